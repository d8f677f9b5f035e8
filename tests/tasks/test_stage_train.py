"""The train stage: what enters the loss, what is refused, and a policy k+1 that others can load."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_core.errors import CorruptOutputError, DataError, NonFiniteError
from rl_core.manifest import Ref
from rl_core.schemas import ADVANTAGES
from tasks.storage.files import describe

Row = dict[str, Any]
COMPLETIONS = [[65, 66, 67, 257], [70, 71], [80], [], [90, 91, 92], [93, 257], [94, 95], [96]]
# advantage, drop reason: one row of each kind beside those in the loss
SIGNALS = [
    (1.25, None),
    (-0.75, None),
    (0.5, "truncated"),
    (-0.5, "empty"),
    (0.0, "unscored"),
    (0.75, None),
    (0.0, "no_signal"),
    (0.0, "singleton"),
]


def load(folder: str | Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def weights(folder: str | Path) -> dict[str, torch.Tensor]:
    return {name: weight.detach().clone() for name, weight in load(folder).named_parameters()}


def inputs(bench: Any, changes: dict[int, Row] | None = None, **trajectory: Any) -> dict[str, Ref]:
    """Two groups of four with their advantages; `changes` go into single rows of the advantages table."""
    trajectories = bench.trajectories(
        [{"group": i // 4, "sample": i % 4, "completion_ids": ids, **trajectory} for i, ids in enumerate(COMPLETIONS)]
    )
    table = [
        {"group_id": i // 4, "sample_id": i % 4, "reward": 0.0, "advantage": a, "keep": why is None, "drop_reason": why}
        for i, (a, why) in enumerate(SIGNALS)
    ]
    for index, values in (changes or {}).items():
        table[index] |= values
    return {"policy": bench.base, "generate": trajectories, "advantage": bench.table(table, ADVANTAGES)}


def logprobs(model: Any, prompt: list[int], ids: list[int], temperature: float) -> torch.Tensor:
    logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1] / temperature
    return logits.log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0]


@pytest.mark.parametrize("name", ["grpo", "dapo", "rloo", "dr_grpo"])
def test_one_step_against_a_loop_over_rows(bench: Any, rows: Any, name: str) -> None:
    """C54: unscored, empty and masked rows are in no denominator; rows without signal are, at no cost.

    Loss, gradient norm and new weights are those of a plain loop over sequences and torch's own clipping and AdamW.
    """
    learner = {"lr": 1e-2, "eps": 1e-3, "max_grad_norm": 0.1, "weight_decay": 0.1}
    config = bench.config(algorithm={"name": name}, learner=learner, generate={"temperature": 0.7})
    given = inputs(bench)
    made = bench.run("train", config, **given)

    counted = [i for i, (_, why) in enumerate(SIGNALS) if why in (None, "no_signal", "singleton")]
    tokens = sum(len(COMPLETIONS[i]) for i in counted)
    model = load(bench.model)
    loss = torch.zeros(())
    for i in counted:
        lp = logprobs(model, [256, 72 + i // 4, 105], COMPLETIONS[i], 0.7)
        token_losses = -SIGNALS[i][0] * torch.exp(lp - lp.detach())
        share = {
            "grpo": len(counted) * len(COMPLETIONS[i]),
            "dapo": tokens,
            "rloo": len(counted),
            "dr_grpo": len(counted) * config.generate.max_completion_tokens,
        }[name]
        loss = loss + token_losses.sum() / share
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3, weight_decay=0.1).step()

    metrics = bench.reply["metrics"]
    assert metrics["learner/loss"] == pytest.approx(loss.item(), abs=1e-6)
    assert metrics["learner/grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
    assert (metrics["learner/tokens"], metrics["learner/steps_applied"]) == (tokens, 1.0)
    assert metrics["learner/tokens_computed"] == sum(len(COMPLETIONS[i]) for i in (0, 1, 5))
    new, old = weights(made.path), weights(bench.model)
    for key, weight in model.named_parameters():
        assert float((new[key] - weight.detach()).abs().max()) <= 2e-6, key
    assert max(float((new[key] - old[key]).abs().max()) for key in new) > 1e-4
    assert {row["metric"]: row["value"] for row in rows(made)}["learner/loss"] == metrics["learner/loss"]


BAD: list[tuple[str, dict[int, Row], Row]] = [
    ("advantage", {1: {"advantage": math.nan}}, {}),
    ("advantage", {6: {"advantage": -math.inf}}, {}),
    ("log-prob", {}, {"sampler_logprobs": None}),
]


@pytest.mark.parametrize(("what", "changes", "trajectory"), BAD, ids=["nan", "infinity", "log-prob"])
@pytest.mark.parametrize("steps", [1, 2])
def test_what_is_not_finite_never_reaches_a_weight(
    bench: Any, what: str, changes: dict[int, Row], trajectory: Row, steps: int
) -> None:
    """C04: the stage refuses before the optimizer: model in memory bit-identical, nothing written, files untouched."""
    given = inputs(bench, changes)
    if trajectory:
        rows = [
            {"group": i // 4, "sample": i % 4, "completion_ids": ids, "sampler_logprobs": [math.nan] * len(ids)}
            for i, ids in enumerate(COMPLETIONS)
        ]
        given["generate"] = bench.trajectories(rows)
    config = bench.config(learner={"update_epochs": steps})
    clean = bench.run("train", config, **inputs(bench))
    context = bench.context(config, **given)
    with pytest.raises(NonFiniteError, match=what):
        bench.perform("train", context)
    held = bench.services.engines(config).policy.model
    for name, weight in weights(bench.model).items():
        assert torch.equal(dict(held.named_parameters())[name], weight), name
    assert list(context.output.iterdir()) == []
    assert bench.ref(bench.model) == bench.base
    assert bench.run("train", config, **inputs(bench)).digest == clean.digest, "the failed update left a trace"


def test_the_next_policy_loads_elsewhere(bench: Any, rows: Any) -> None:
    """C69: policy k+1 is a plain Hugging Face folder with its tied embedding, tokenizer and the trainer's state."""
    made = bench.run("train", bench.config(), **inputs(bench))
    model = load(made.path)
    assert model.get_output_embeddings().weight.data_ptr() == model.get_input_embeddings().weight.data_ptr()
    ids = torch.tensor([[256, 70, 71, 72]])
    held = bench.services.engines(bench.config()).policy.model
    with torch.no_grad():
        assert float((model(ids).logits - held(ids).logits).abs().max()) <= 1e-6
    assert {entry.name.split("/")[0] for entry in describe(Path(made.path))} >= {"trainer", "tokenizer.json"}
    again = bench.run("evaluate", bench.config(), train=made)
    bench.cold()
    assert bench.run("evaluate", bench.config(), train=made).digest == again.digest


def test_cold_and_warm_learners_write_the_same_bytes(bench: Any) -> None:
    """C67: two iterations in one process, or a new process in between: weights, moments and counters are equal."""
    learner = {"update_epochs": 2, "minibatches": 2, "warmup_steps": 3, "schedule": "cosine"}
    config = bench.config(learner=learner)
    given = inputs(bench)
    first = bench.run("train", config, **given)
    bench.reply.clear()
    warm = bench.run("train", config, iteration=1, **given | {"policy": first})
    warm_metrics = bench.reply["metrics"]
    bench.cold()
    assert bench.run("train", config, **given).digest == first.digest
    bench.cold()
    cold = bench.run("train", config, iteration=1, **given | {"policy": first})
    assert cold.digest == warm.digest != first.digest
    assert bench.reply["metrics"] == warm_metrics
    files = [{f.name: f.sha256 for f in describe(Path(ref.path))} for ref in (warm, cold)]
    assert files[0] == files[1] and any(name.startswith("trainer/") for name in files[0])
    trained_otherwise = bench.run("train", config, iteration=1, **given)
    assert trained_otherwise.digest != cold.digest, "the optimizer state of policy 1 made no difference"


def test_metrics_per_step_and_per_iteration(bench: Any, rows: Any) -> None:
    """C67: steps are numbered through the run; the iteration's value is the mean, or the extreme, where defined."""
    config = bench.config(learner={"update_epochs": 2, "minibatches": 2, "warmup_steps": 8})
    first = bench.run("train", config, **inputs(bench))
    found = rows(bench.run("train", config, iteration=1, **inputs(bench) | {"policy": first}))
    assert sorted({row["step"] for row in found}) == [5, 6, 7, 8]
    lr = {row["step"]: row["value"] for row in found if row["metric"] == "learner/lr"}
    assert lr == pytest.approx({step: 1e-3 * step / 8 for step in (5, 6, 7, 8)})
    metrics = bench.reply["metrics"]
    assert metrics["learner/lr"] == pytest.approx(1e-3 * 6.5 / 8)
    for name in ("policy/entropy", "mismatch/log_w_max", "mismatch/log_w_min", "learner/grad_norm"):
        values = [row["value"] for row in found if row["metric"] == name and row["value"] is not None]
        pick = {"max": max, "min": min}.get(name.rsplit("_", 1)[-1], lambda v: sum(v) / len(v))
        assert metrics[name] == pytest.approx(pick(values)), name
    assert metrics["policy/dual_clip_frac"] is None
    assert metrics["learner/steps_applied"] == len({row["step"] for row in found if row["applied"]}) == 4


def test_an_iteration_without_signal_changes_nothing(bench: Any, rows: Any) -> None:
    """C55: no row carries signal: the step is skipped and counted, the weights keep their bytes."""
    silent = {i: {"advantage": 0.0, "keep": False, "drop_reason": "no_signal"} for i in range(8)}
    made = bench.run("train", bench.config(), **inputs(bench, silent))
    files = {entry.name: entry.sha256 for entry in describe(Path(made.path))}
    assert files["model.safetensors"] == {e.name: e.sha256 for e in describe(bench.model)}["model.safetensors"]
    assert {(row["step"], row["applied"]) for row in rows(made)} == {(1, False)}
    metrics = bench.reply["metrics"]
    assert (metrics["learner/applied"], metrics["learner/steps_applied"], metrics["learner/loss"]) == (0.0, 0.0, 0.0)
    assert metrics["policy/entropy"] is None
    following = bench.run("train", bench.config(), iteration=1, **inputs(bench) | {"policy": made})
    assert {row["step"] for row in rows(following)} == {2}


def test_rows_that_do_not_meet_are_refused(bench: Any) -> None:
    """Fewer rows, another key and a key twice are errors of the data, found before a weight is loaded."""
    given = inputs(bench)
    table = [{"group_id": 0, "sample_id": s, "advantage": 1.0, "keep": True} for s in range(8)]
    for changed in (table[:7], table, [*table[:7], table[0]]):
        context = bench.context(bench.config(), **given | {"advantage": bench.table(changed, ADVANTAGES)})
        with pytest.raises(DataError, match="do not have the same rows"):
            bench.perform("train", context)
        assert list(context.output.iterdir()) == []


def test_a_damaged_checkpoint_is_refused_before_it_is_loaded(bench: Any) -> None:
    """C62: one flipped bit in the weights or the trainer's state, or a file too many."""
    first = bench.run("train", bench.config(), **inputs(bench))
    names = [entry.name for entry in describe(Path(first.path)) if entry.name.endswith(".safetensors")]
    assert len(names) >= 2
    for name in [*names, "extra"]:
        bench.cold()
        copy = bench.copy(first)
        path = Path(copy.path) / name
        data = path.read_bytes() if path.exists() else b"\0"
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        with pytest.raises(CorruptOutputError, match="does not hold what its digest says"):
            bench.run("train", bench.config(), iteration=1, **inputs(bench) | {"policy": copy})

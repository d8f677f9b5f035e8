"""The generate stage against transformers itself, the environment's own order, and itself when cold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rl_core.config import RunConfig
from rl_core.environments.base import open_environment
from rl_core.errors import DataError
from rl_core.manifest import Ref
from rl_core.seeds import seed
from tasks.storage.datasets import read_rows

END = 257


def load(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def load_tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def logprobs(model: Any, row: dict[str, Any], temperature: float) -> torch.Tensor:
    """Log-probs of a row's completion by one plain forward pass over prompt and completion."""
    ids = torch.tensor([row["prompt_ids"] + row["completion_ids"]])
    with torch.no_grad():
        logits = model(ids).logits[0, len(row["prompt_ids"]) - 1 : -1].double() / temperature
    return logits.log_softmax(-1).gather(1, ids[0, len(row["prompt_ids"]) :, None])[:, 0]


def difference(model: Any, rows: list[dict[str, Any]], column: str, temperature: float) -> float:
    return max(
        float((logprobs(model, row, temperature) - torch.tensor(row[column], dtype=torch.float64)).abs().max())
        for row in rows
        if row["completion_ids"]
    )


@pytest.fixture
def other_policy(bench: Any) -> Ref:
    """A policy that is not the one the run starts from."""
    folder = Path(bench.copy(bench.base).path)
    model = load(folder)
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.02)
    model.save_pretrained(folder)
    found: Ref = bench.ref(folder)
    return found


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_rows_say_what_was_sampled(bench: Any, rows: Any, temperature: float) -> None:
    """Stored log-probs are those of a teacher-forced pass at the sampling temperature; ids, text and masks agree."""
    config = bench.config(generate={"temperature": temperature, "max_completion_tokens": 12, "group_size": 8})
    found = rows(bench.run("generate", config, iteration=2, policy=bench.base))
    assert difference(load(bench.model), found, "sampler_logprobs", temperature) <= 1e-4
    assert bench.reply["rows"] == len(found) == 16
    tokenizer = load_tokenizer(bench.model)
    for row in found:
        ids = row["completion_ids"]
        stopped = ids[-1] == END
        assert (row["finish_reason"], row["truncated"]) == (("stop", False) if stopped else ("length", True))
        assert END not in ids[:-1] and len(ids) <= 12 and (stopped or len(ids) == 12)
        assert row["action_mask"] == [True] * len(ids)
        assert row["turns"] == [{"role": "assistant", "start": 0, "end": len(ids)}]
        assert row["text"] == tokenizer.decode(ids, skip_special_tokens=True) and "<eos>" not in row["text"]
        assert (row["temperature"], row["policy_version"]) == (temperature, 2)
        assert row["policy_digest"] == bench.base.digest
    metrics = bench.reply["metrics"]
    assert metrics["completion/tokens_total"] == sum(len(row["completion_ids"]) for row in found)
    assert metrics["prompt/tokens_mean"] == pytest.approx(sum(len(row["prompt_ids"]) for row in found) / len(found))


def test_prompts_are_those_of_the_environment(bench: Any, rows: Any) -> None:
    """Group ids are stream positions; prompt, data and templated ids are the environment's."""
    config = bench.config()
    environment = open_environment(config.environment, config.seed, read_rows)
    tokenizer = load_tokenizer(bench.model)
    found = rows(bench.run("generate", config, cursor=5, policy=bench.base))
    assert [(row["group_id"], row["sample_id"]) for row in found] == [(g, s) for g in (5, 6) for s in range(4)]
    assert bench.reply["state"] == {"cursor": 7}
    for row in found:
        prompt = environment.prompt("train", row["group_id"])
        assert row["prompt_id"] == prompt.prompt_id and row["prompt_messages"] == prompt.messages
        text = f"user: {prompt.messages[0]['content']}\nassistant:"
        assert row["prompt_ids"] == tokenizer(text)["input_ids"]  # one start token, which it puts there itself
        assert row["prompt_ids"].count(tokenizer.bos_token_id) == 1
        assert row["seed"] == seed(config.seed, "generate", 0, row["group_id"], row["sample_id"])


def test_no_two_rows_share_their_random_numbers(bench: Any, rows: Any) -> None:
    """C39: one prompt in two groups, three iterations: all streams differ, and an iteration repeats itself exactly."""
    config = bench.config(environment=bench.prompts(["same", "same"]), seed=7)
    made = [bench.run("generate", config, iteration=k, cursor=2 * k, policy=bench.base) for k in range(3)]
    found = [row for ref in made for row in rows(ref)]
    assert len({row["seed"] for row in found}) == 24
    assert len({tuple(row["prompt_ids"]) for row in found}) == 1
    assert len({tuple(row["completion_ids"]) for row in found}) == 24
    bench.cold()
    again = bench.run("generate", config, iteration=2, cursor=4, policy=bench.base)
    assert again.digest == made[2].digest
    assert bench.run("generate", config, iteration=1, cursor=4, policy=bench.base).digest != made[2].digest


def test_every_prompt_once_in_the_order_of_the_environment(bench: Any, rows: Any) -> None:
    """C66: prompts too long are dropped and counted, and the cursor passes them, over the end of an epoch too."""
    texts = [f"prompt {i}" + " long" * 8 * (i % 3 == 0) for i in range(20)]
    environment = bench.prompts(texts)
    environment["params"]["shuffle"] = True
    config = bench.config(
        environment=environment,
        generate={
            "max_prompt_tokens": 40,
            "overlong_prompt": "drop",
            "group_size": 2,
            "max_completion_tokens": 1,
            "prompts_per_iteration": 5,
        },
    )
    stream = open_environment(config.environment, config.seed, read_rows)
    cursor, positions, dropped = 0, [], 0.0
    for k in range(5):
        found = rows(bench.run("generate", config, iteration=k, cursor=cursor, policy=bench.base))
        cursor = bench.reply["state"]["cursor"]
        positions += [row["group_id"] for row in found if row["sample_id"] == 0]
        dropped += bench.reply["metrics"]["prompt/dropped"]
        assert len(found) == 10
        assert all(row["prompt_id"] == stream.prompt("train", row["group_id"]).prompt_id for row in found)
    fits = [p for p in range(60) if "long" not in stream.prompt("train", p).messages[0]["content"]]
    assert positions == fits[:25]
    assert cursor == positions[-1] + 1
    assert dropped == cursor - 25 > 7
    first_epoch = [stream.prompt("train", p).prompt_id for p in positions if p < 20]
    assert len(set(first_epoch)) == len(first_epoch) == 13


def test_a_lone_prompt_that_fits_is_found_in_every_epoch(bench: Any, rows: Any) -> None:
    """Dropping is no error as long as something fits; only a stream in which nothing does is refused."""
    limits = {"max_prompt_tokens": 40, "overlong_prompt": "drop", "max_completion_tokens": 1}
    config = bench.config(environment=bench.prompts(["long" * 10, "long" * 20, "fits", "long" * 30]), generate=limits)
    found = rows(bench.run("generate", config, policy=bench.base))
    assert [row["group_id"] for row in found] == [2] * 4 + [6] * 4
    config = bench.config(environment=bench.prompts(["long" * 10, "long" * 20]), generate=limits)
    with pytest.raises(DataError, match="no prompt fits the limit"):
        bench.run("generate", config, policy=bench.base)


def small_context(bench: Any, texts: list[str], overlong: str) -> RunConfig:
    limits = {"max_prompt_tokens": 31, "max_completion_tokens": 8, "overlong_prompt": overlong}
    config: RunConfig = bench.config(
        environment=bench.prompts(texts),
        model={"max_context_tokens": 32},
        generate={**limits, "prompts_per_iteration": len(texts)},
    )
    return config


def test_the_context_limits_prompt_and_completion(bench: Any, rows: Any) -> None:
    """C35: context 32, templated prompts of 20, 30 and 40 tokens: the limit is on the templated length."""
    texts = ["a" * 2, "b" * 12, "c" * 22]  # 18 tokens of template
    with pytest.raises(DataError, match="is longer than the limit") as caught:
        bench.run("generate", small_context(bench, texts, "fail"), policy=bench.base)
    assert "40 tokens" in caught.value.got

    found = rows(bench.run("generate", small_context(bench, texts[:2], "fail"), policy=bench.base))
    assert {row["group_id"]: len(row["prompt_ids"]) for row in found} == {0: 20, 1: 30}
    for row in found:
        room = 8 if row["group_id"] == 0 else 2
        assert len(row["completion_ids"]) <= room
        if len(row["completion_ids"]) == room and row["completion_ids"][-1] != END:
            assert row["truncated"] and row["finish_reason"] == "length"
    assert sum(row["truncated"] for row in found if row["group_id"] == 1) >= 1

    found = rows(bench.run("generate", small_context(bench, texts, "truncate"), policy=bench.base))
    cut = [row for row in found if row["group_id"] == 2]
    assert len(cut) == 4 and all(len(row["prompt_ids"]) == 31 for row in cut)
    assert load_tokenizer(bench.model).decode(cut[0]["prompt_ids"]) == f"<bos>user: {'c' * 13}\nassistant:"
    assert cut[0]["prompt_messages"] == [{"role": "user", "content": "c" * 13}]
    assert all(len(row["completion_ids"]) == 1 for row in cut)


def test_cold_and_warm_engines_write_the_same_bytes(bench: Any, rows: Any, other_policy: Ref) -> None:
    """The engines' past (another policy, another batch) leaves no trace; nor does how many rows are decoded at once."""
    config = bench.config(generate={"max_completion_tokens": 10})
    bench.run("generate", bench.config(seed=9), policy=other_policy)
    warm = bench.run("generate", config, policy=bench.base)
    again = bench.run("generate", config, policy=bench.base)
    bench.cold()
    cold = bench.run("generate", config, policy=bench.base)
    assert warm.digest == again.digest == cold.digest
    config = bench.config(generate={"max_completion_tokens": 10}, execution={"generate_rows": 3})
    few = bench.run("generate", config, policy=bench.base)
    assert [row["completion_ids"] for row in rows(few)] == [row["completion_ids"] for row in rows(cold)]


def test_reference_logprobs_only_for_a_penalty_in_the_reward(bench: Any, rows: Any, other_policy: Ref) -> None:
    """kl.place = reward: log-probs of the same tokens under the model the run started from; else null."""
    config = bench.config(algorithm={"kl": {"coef": 0.1, "place": "reward"}}, generate={"temperature": 0.7})
    found = rows(bench.run("generate", config, policy=bench.base))
    assert (
        max(abs(a - b) for row in found for a, b in zip(row["ref_logprobs"], row["sampler_logprobs"], strict=True))
        <= 1e-4
    )

    found = rows(bench.run("generate", config, iteration=1, policy=other_policy))
    assert difference(load(bench.model), found, "ref_logprobs", 0.7) <= 1e-4
    assert difference(load(Path(other_policy.path)), found, "sampler_logprobs", 0.7) <= 1e-4
    assert difference(load(bench.model), found, "sampler_logprobs", 0.7) > 0.01

    for kl in ({}, {"coef": 0.1, "place": "loss"}, {"coef": 0.0, "place": "reward"}):
        found = rows(bench.run("generate", bench.config(algorithm={"kl": kl}), policy=bench.base))
        assert all(row["ref_logprobs"] is None for row in found)


def test_prompts_that_changed_after_the_fingerprint_are_refused(bench: Any) -> None:
    """A data set file that is edited between two worker processes must not pass under the old fingerprint."""
    environment = bench.prompts(["one", "two"])
    context = bench.context(bench.config(environment=environment), policy=bench.base)
    bench.cold()
    path = Path(environment["params"]["path"])
    path.write_text(path.read_text().replace("two", "three"))
    with pytest.raises(DataError, match="changed after the run was opened"):
        bench.perform("generate", context)
    assert list(context.output.iterdir()) == []

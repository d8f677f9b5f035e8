"""All or nothing: refused and skipped steps, and a state that survives a reload bit for bit."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rl_core.config import AlgorithmConfig, LearnerConfig
from rl_core.engines.base import StepPlan, StepStats, TrainRow
from rl_core.engines.learner_torch import TorchLearner
from rl_core.errors import ModelError, NonFiniteError
from rl_core.models import Policy, load_policy

LEARNER = LearnerConfig(lr=1e-3, warmup_steps=2, schedule="cosine", weight_decay=0.1)
PLAN = StepPlan(AlgorithmConfig(), LEARNER, 1.0, 16, 8, 5, 256, 16, False)
FOUR_STEPS = replace(PLAN, learner=LEARNER.model_copy(update={"minibatches": 4}))


@pytest.fixture(autouse=True)
def _deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def load(tiny_model: Path) -> Callable[..., TorchLearner]:
    def make(folder: Path = tiny_model, dtype: torch.dtype = torch.float32) -> TorchLearner:
        return TorchLearner(load_policy(folder, "cpu", dtype))

    return make


def _rows(seed: int = 0, groups: int = 5) -> list[TrainRow]:
    rng = random.Random(seed)
    rows = []
    for g in range(groups):
        prompt = [rng.randrange(256) for _ in range(rng.randint(3, 9))]
        for s in range(3):
            ids = [rng.randrange(256) for _ in range(rng.randint(1, 9))]
            rows.append(TrainRow(g, s, prompt, ids, [True] * len(ids), rng.gauss(0, 1), [-5.0] * len(ids), True))
    return rows


def _weights(policy: Policy) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in policy.model.named_parameters()}


def _digests(learner: TorchLearner, folder: Path) -> dict[str, str]:
    learner.save(folder)
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), float("1e400")])
@pytest.mark.parametrize("field", ["advantage", "sampler_logprobs"])
def test_non_finite_input_is_refused_before_anything(
    load: Callable[..., TorchLearner], tmp_path: Path, value: float, field: str
) -> None:
    """C04: a row of a broken file is named, and nothing has changed."""
    learner, rows = load(), _rows()
    list(learner.update(rows, PLAN))
    before = _digests(learner, tmp_path / "before")
    bad = value if field == "advantage" else [value] * len(rows[4].completion_ids)
    rows[4] = replace(rows[4], **{field: bad})  # type: ignore[arg-type]
    with pytest.raises(NonFiniteError, match="group 1, sample 1"):
        learner.update(rows, PLAN)
    assert _digests(learner, tmp_path / "after") == before


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_failure_in_the_third_of_four_steps_undoes_all(
    load: Callable[..., TorchLearner], tmp_path: Path, trained: bool, dtype: torch.dtype
) -> None:
    """A weight becomes NaN before step 3: weights, moments and counters are those before the update."""
    learner = load(dtype=dtype)
    if trained:
        list(learner.update(_rows(1), FOUR_STEPS))
    before = _digests(learner, tmp_path / "before")
    seen: list[StepStats] = []
    with pytest.raises(NonFiniteError, match="loss"):
        for stats in learner.update(_rows(), FOUR_STEPS):
            seen.append(stats)
            if len(seen) == 2:
                with torch.no_grad():
                    learner.policy.model.lm_head.weight[0] = float("nan")
    assert [stats.applied for stats in seen] == [True, True]
    assert all(p.grad is None for p in learner.policy.model.parameters())
    assert _digests(learner, tmp_path / "after") == before
    assert [stats.applied for stats in learner.update(_rows(), FOUR_STEPS)] == [True] * 4


def test_non_finite_gradient_of_a_single_step(load: Callable[..., TorchLearner], tmp_path: Path) -> None:
    """A finite loss whose gradient overflows: refused before the optimizer."""
    learner = load()
    list(learner.update(_rows(1), PLAN))
    before = _digests(learner, tmp_path / "before")
    rows = [replace(row, advantage=1e37 * row.advantage) for row in _rows()]
    with pytest.raises(NonFiniteError, match="gradient norm"):
        list(learner.update(rows, PLAN))
    assert _digests(learner, tmp_path / "after") == before


def test_step_without_signal_is_skipped_and_counted(load: Callable[..., TorchLearner]) -> None:
    """C55: every completion masked, or every advantage 0: loss 0, no step, weights unchanged by moments or decay."""
    learner = load()
    list(learner.update(_rows(), PLAN))
    before = _weights(learner.policy)
    masked = [replace(row, action_mask=[False] * len(row.completion_ids)) for row in _rows()]
    equal = [replace(row, advantage=0.0) for row in _rows()]
    for number, (rows, tokens) in enumerate(((masked, 0), (equal, sum(len(r.completion_ids) for r in equal))), start=2):
        (stats,) = learner.update(rows, PLAN)
        assert (stats.step, stats.applied, learner.optimizer.applied) == (number, False, 1)
        wanted = {"learner/loss": 0.0, "learner/grad_norm": 0.0, "learner/tokens": tokens, "policy/entropy": None}
        assert {name: stats.metrics[name] for name in wanted} == wanted
    after = _weights(learner.policy)
    assert all(torch.equal(before[name], after[name]) for name in before)
    (stats,) = learner.update(_rows(), PLAN)
    assert (stats.step, stats.applied) == (4, True)


def test_step_without_rows(load: Callable[..., TorchLearner]) -> None:
    """Fewer groups than minibatches, and no rows at all: the empty steps are skipped and counted."""
    learner = load()
    assert sorted(stats.applied for stats in learner.update(_rows(groups=3), FOUR_STEPS)) == [False, True, True, True]
    assert [stats.applied for stats in learner.update([], PLAN)] == [False]
    assert (learner.optimizer.step, learner.optimizer.applied) == (5, 3)


def test_masked_out_rows_leave_the_denominator(load: Callable[..., TorchLearner]) -> None:
    """C55: five tokens that are out and five that are in: the divisor is 5."""
    inside = TrainRow(0, 0, [3, 4], [5] * 5, [True] * 5, -1.0, [-5.0] * 5, True)
    outside = replace(inside, sample_id=1, action_mask=[False] * 5, sampler_logprobs=[float("nan")] * 5)
    plan = replace(PLAN, algorithm=AlgorithmConfig(aggregation="token_mean"))
    (stats,) = load().update([inside, outside], plan)
    assert (stats.metrics["learner/tokens"], stats.metrics["learner/loss"]) == (5, pytest.approx(1.0, rel=1e-6))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_masked_positions_are_never_read(load: Callable[..., TorchLearner], tmp_path: Path, dtype: torch.dtype) -> None:
    """C56: garbage at positions that are masked or excluded changes no metric and no bit of the weights."""
    clean = [
        replace(row, action_mask=[t % 3 != 1 for t in range(len(row.completion_ids))], keep=row.sample_id != 2)
        for row in _rows()
    ]
    junk = [float("-inf"), float("nan"), -1e10, 120.0]
    dirty = [
        replace(
            row,
            sampler_logprobs=[
                x if chosen and row.keep else junk[(row.group_id + t) % 4]
                for t, (x, chosen) in enumerate(zip(row.sampler_logprobs, row.action_mask, strict=True))
            ],
        )
        for row in clean
    ]
    results = []
    for name, rows in (("clean", clean), ("dirty", dirty)):
        learner = load(dtype=dtype)
        steps = list(learner.update(rows, FOUR_STEPS))
        results.append((steps, _digests(learner, tmp_path / name)))
    assert results[0] == results[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_reload_continues_bit_for_bit(load: Callable[..., TorchLearner], tmp_path: Path, dtype: torch.dtype) -> None:
    """C67: four updates straight, and two, a reload, two more: weights, moments, lr, steps and files agree."""
    straight, lines = load(dtype=dtype), []
    for k in range(4):
        lines += list(straight.update(_rows(k), PLAN))
    first = load(dtype=dtype)
    again = [stats for k in range(2) for stats in first.update(_rows(k), PLAN)]
    assert _digests(first, tmp_path / "policy") == _digests(first, tmp_path / "repeat")

    second = load(tmp_path / "policy", dtype=dtype)
    second.load_trainer_state(tmp_path / "policy")
    again += [stats for k in range(2, 4) for stats in second.update(_rows(k), PLAN)]
    assert again == lines
    assert [stats.step for stats in again] == [1, 2, 3, 4]
    rates = [stats.metrics["learner/lr"] for stats in again]
    assert rates[:3] == [5e-4, 1e-3, 1e-3] and rates[3] is not None and 0 < rates[3] < 1e-3
    assert _digests(second, tmp_path / "second") == _digests(straight, tmp_path / "straight")


def test_same_update_gives_the_same_bytes(load: Callable[..., TorchLearner], tmp_path: Path) -> None:
    digests = []
    for name in ("a", "b"):
        learner = load()
        list(learner.update(_rows(), FOUR_STEPS))
        digests.append(_digests(learner, tmp_path / name))
    assert digests[0] == digests[1]


def test_state_of_a_new_policy_and_broken_states(load: Callable[..., TorchLearner], tmp_path: Path) -> None:
    learner = load()
    _digests(learner, tmp_path)
    learner.load_trainer_state(tmp_path)
    assert (learner.optimizer.step, learner.optimizer.applied) == (0, 0)
    list(learner.update(_rows(), PLAN))
    before = learner.optimizer.snapshot()
    for name, content in (("state.json", "{}"), ("state.json", '{"format": 99, "step": 1, "applied": 1}')):
        (tmp_path / "trainer" / name).write_text(content, encoding="utf-8")
        with pytest.raises(ModelError, match="optimizer state"):
            learner.load_trainer_state(tmp_path)
    (tmp_path / "trainer" / "state.json").write_text('{"format": 1, "step": 1, "applied": 1}', encoding="utf-8")
    with pytest.raises(ModelError, match="another model"):
        learner.load_trainer_state(tmp_path)
    after = learner.optimizer.snapshot()
    assert (after.step, after.applied) == (before.step, before.applied)
    assert all(torch.equal(a, b) for a, b in zip(before.tensors, after.tensors, strict=True))

"""The learner's numbers: against one plain forward pass per sequence, and unchanged by any regrouping."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_core.config import AlgorithmConfig, KlConfig, LearnerConfig
from rl_core.engines.base import StepPlan, TrainRow
from rl_core.engines.learner_torch import TorchLearner
from rl_core.errors import ConfigError, DataError
from rl_core.models import Policy, load_policy

GOLDEN = Path(__file__).parents[2] / "golden" / "learner_losses.json"
MODES = ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_sum_fixed_norm"]
PLAN = StepPlan(AlgorithmConfig(), LearnerConfig(lr=1e-3), 0.8, 16, 100, 5, 4096, 16, False)


@pytest.fixture
def policy(tiny_model: Path) -> Policy:
    return load_policy(tiny_model, "cpu", torch.float32)


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def _rows(seed: int = 0, groups: int = 3, samples: int = 4) -> list[TrainRow]:
    """Groups of uneven prompts and completions; the second completion of the first group is empty."""
    rng = random.Random(seed)
    rows = []
    for g in range(groups):
        prompt = [rng.randrange(256) for _ in range(rng.randint(3, 20))]
        for s in range(samples):
            ids = [rng.randrange(256) for _ in range(0 if (g, s) == (0, 1) else rng.randint(1, 14))]
            logprobs = [-rng.random() - 5 for _ in ids]
            rows.append(TrainRow(g, s, prompt, ids, [True] * len(ids), rng.gauss(0, 1), logprobs, True))
    return rows


def _row(sample: int, ids: list[int], advantage: float, **changes: Any) -> TrainRow:
    row = TrainRow(0, sample, [10, 11, 12], ids, [True] * len(ids), advantage, [-5.0] * len(ids), True)
    return replace(row, **changes)


def _plan(**changes: Any) -> StepPlan:
    algorithm = {key: changes.pop(key) for key in ("aggregation", "kl", "name") if key in changes}
    learner = {key: changes.pop(key) for key in ("update_epochs", "minibatches", "lr") if key in changes}
    return replace(
        PLAN, algorithm=AlgorithmConfig(**algorithm), learner=PLAN.learner.model_copy(update=learner), **changes
    )


def _plain(policy: Policy, row: TrainRow, temperature: float) -> torch.Tensor:
    ids = torch.tensor([[*row.prompt_ids, *row.completion_ids]])
    logits = policy.model(input_ids=ids, use_cache=False).logits[0, len(row.prompt_ids) - 1 : -1] / temperature
    return logits.log_softmax(-1).gather(1, ids[0, len(row.prompt_ids) :, None]).squeeze(1)


def _gradients(policy: Policy) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in policy.model.named_parameters() if p.grad is not None}


def _oracle(policy: Policy, rows: list[TrainRow], mode: str) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss -Σ w A ratio with ratio 1, one sequence at a time, denominators written out."""
    policy.model.zero_grad()
    with_tokens = [row for row in rows if row.completion_ids]
    total = sum(len(row.completion_ids) for row in rows)
    loss = torch.zeros((), dtype=torch.float64)
    for row in with_tokens:
        logprobs = _plain(policy, row, PLAN.temperature).double()
        tokens = -row.advantage * (logprobs - logprobs.detach()).exp()
        divisor = {
            "token_mean": total,
            "seq_mean_token_mean": len(with_tokens) * len(row.completion_ids),
            "seq_mean_token_sum": len(with_tokens),
            "seq_sum_fixed_norm": len(with_tokens) * PLAN.max_completion_tokens,
        }[mode]
        loss = loss + tokens.sum() / divisor
    loss.backward()  # type: ignore[no-untyped-call]
    return float(loss.detach()), _gradients(policy)


@pytest.mark.parametrize("mode", MODES)
def test_any_grouping_gives_the_plain_loss_and_gradient(policy: Policy, mode: str) -> None:
    """Section M, C54: one micro-batch, several, split groups and single rows equal a pass per sequence."""
    rows = _rows()
    wanted, gradients = _oracle(policy, rows, mode)
    learner = TorchLearner(policy)
    passes = []
    for budget, checkpointing in ((4096, False), (4096, True), (64, False), (32, False), (16, False)):
        plan = _plan(aggregation=mode, micro_batch_tokens=budget, gradient_checkpointing=checkpointing)
        stats = learner.gradients(rows, plan)
        passes.append(stats.metrics["learner/micro_batches"])
        assert stats.metrics["learner/loss"] == pytest.approx(wanted, abs=1e-6)
        for name, gradient in _gradients(policy).items():
            torch.testing.assert_close(gradient, gradients[name], rtol=1e-4, atol=1e-6 * float(gradient.abs().max()))
    assert passes[0] is not None and passes[-1] is not None and passes[-1] > passes[0]


@pytest.mark.parametrize("place", [None, "loss"])
def test_rows_without_signal_are_not_computed_and_stay_in_the_denominators(policy: Policy, place: str | None) -> None:
    """The step equals one that computes them all; with a KL term in the loss they are computed."""
    rows = [replace(row, advantage=0.0) if row.group_id == 1 else row for row in _rows()]
    wanted, gradients = _oracle(policy, rows, "token_mean")
    kl = KlConfig(coef=0.1) if place else KlConfig()
    stats = TorchLearner(policy, policy).gradients(rows, _plan(aggregation="token_mean", kl=kl))
    silent = sum(len(row.completion_ids) for row in rows if row.group_id == 1)
    tokens, computed = stats.metrics["learner/tokens"], stats.metrics["learner/tokens_computed"]
    assert tokens is not None and computed == tokens - (0 if place else silent)
    assert stats.metrics["learner/loss"] == pytest.approx(wanted, abs=1e-6)
    for name, gradient in _gradients(policy).items():
        torch.testing.assert_close(gradient, gradients[name], rtol=1e-4, atol=1e-6 * float(gradient.abs().max()))


def test_logprobs_equal_a_plain_pass_per_sequence(policy: Policy) -> None:
    """Position ids restart: every completion scores as it does alone, in the order the rows came in."""
    rows = _rows(seed=4)[::-1]
    for row, got in zip(rows, TorchLearner(policy).logprobs(rows, PLAN), strict=True):
        wanted = _plain(policy, row, PLAN.temperature).tolist() if row.completion_ids else []
        assert got == pytest.approx(wanted, abs=1e-5)


def test_siblings_are_blind_to_each_other(policy: Policy) -> None:
    """Leak test of section M: changing one completion moves no other completion's log-probs."""
    learner, rows = TorchLearner(policy), _rows(groups=1)
    before = learner.logprobs(rows, PLAN)
    rows[2] = replace(rows[2], completion_ids=[(token + 97) % 256 for token in rows[2].completion_ids])
    after = learner.logprobs(rows, PLAN)
    assert after[2] != pytest.approx(before[2], abs=1e-3)
    assert [after[i] for i in (0, 1, 3)] == [before[i] for i in (0, 1, 3)]


def test_row_order_changes_no_bit(policy: Policy) -> None:
    learner, rows = TorchLearner(policy), _rows()
    first = (learner.gradients(rows, PLAN), _gradients(policy))
    second = (learner.gradients(rows[::-1], PLAN), _gradients(policy))
    assert first[0] == second[0]
    assert all(torch.equal(first[1][name], second[1][name]) for name in first[1])


@pytest.mark.parametrize("budget", [4096, 16])
@pytest.mark.parametrize("quiet", [0.0, 1e-30])
def test_one_denominator_over_micro_batches(policy: Policy, budget: int, quiet: float) -> None:
    """C54: one token of loss 10 and nine of loss 0 give 1.0, computed or not, in one micro-batch or in two."""
    rows = [_row(0, [5], -10.0), _row(1, list(range(20, 29)), quiet)]
    plan = _plan(aggregation="token_mean", micro_batch_tokens=budget)
    stats = TorchLearner(policy).gradients(rows, plan)
    assert stats.metrics["learner/loss"] == pytest.approx(1.0, rel=1e-6)
    masked = [rows[0], replace(rows[1], action_mask=[True] * 6 + [False] * 3)]
    stats = TorchLearner(policy).gradients(masked, plan)
    assert (stats.metrics["learner/tokens"], stats.metrics["learner/loss"]) == (7, pytest.approx(10 / 7, rel=1e-6))


def test_rejected_rows_keep_the_denominator(policy: Policy) -> None:
    """B2: losses [1, 1, 2, 2, 2, 2] with the last two rejected give 6 / 6."""
    rows = [_row(0, [5, 6], -1.0), _row(1, [7, 8], -2.0), _row(2, [9, 10], -2.0, keep=False)]
    stats = TorchLearner(policy).gradients(rows, _plan(aggregation="token_mean"))
    assert stats.metrics["learner/loss"] == pytest.approx(1.0, rel=1e-6)


def test_very_short_completions(policy: Policy) -> None:
    """C36: an end token alone trains one token, an empty completion none, and nothing is NaN."""
    rows = [_row(0, [257], -1.0), _row(1, [], -1.0), _row(2, [5, 257], 1.0), _row(3, [6, 7, 257], 1.0)]
    learner = TorchLearner(policy)
    (stats,) = learner.update(rows, PLAN)
    assert (stats.metrics["learner/tokens"], stats.metrics["learner/tokens_computed"]) == (6, 6)
    assert all(value is None or math.isfinite(value) for value in stats.metrics.values())
    alone = learner.gradients(rows[:1], PLAN)
    assert alone.metrics["learner/tokens_computed"] == 1 and alone.applied


def test_first_ratio_is_one_at_any_temperature(policy: Policy) -> None:
    """C57: the sampler's log-probs at the same temperature match; the mismatch metrics see another temperature."""
    learner, rows = TorchLearner(policy), _rows()
    sampled = learner.logprobs(rows, PLAN)
    rows = [replace(row, sampler_logprobs=[float(x or 0) for x in xs]) for row, xs in zip(rows, sampled, strict=True)]
    same = learner.gradients(rows, PLAN).metrics
    assert same["mismatch/k3"] == pytest.approx(0.0, abs=1e-9) and same["mismatch/ess"] == pytest.approx(1.0, abs=1e-9)
    assert (same["policy/log_ratio_max"], same["policy/log_ratio_min"]) == (0.0, 0.0)
    other = learner.gradients(rows, _plan(temperature=1.6)).metrics
    assert other["mismatch/k3"] is not None and other["mismatch/k3"] > 1e-3
    with pytest.raises(ConfigError, match="temperature"):
        learner.gradients(rows, _plan(temperature=0.0))


@pytest.mark.parametrize("checkpointing", [False, True])
def test_no_dropout_in_any_pass(policy: Policy, checkpointing: bool) -> None:
    """C59: dropout 0.1 in the model, no learning, 4 minibatches, 2 epochs: ratio 1, KL 0, modes put back."""
    for module in policy.model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.1
    policy.model.train()
    policy.model.lm_head.eval()
    modes = [module.training for module in policy.model.modules()]
    plan = _plan(update_epochs=2, minibatches=4, lr=1e-30, kl=KlConfig(coef=0.1), gradient_checkpointing=checkpointing)
    steps = list(TorchLearner(policy, policy).update(_rows(groups=6), plan))
    assert [step.step for step in steps] == list(range(1, 9))
    for step in steps:
        wanted = {"policy/log_ratio_max": 0.0, "policy/log_ratio_min": 0.0, "policy/ratio": 1.0, "policy/kl": 0.0}
        assert {name: step.metrics[name] for name in wanted} == wanted
    assert [module.training for module in policy.model.modules()] == modes
    assert not policy.model.is_activation_checkpointing


def test_kl_needs_a_reference_only_in_the_loss(policy: Policy) -> None:
    learner = TorchLearner(policy)
    with pytest.raises(ConfigError, match="reference"):
        list(learner.update(_rows(), _plan(kl=KlConfig(coef=0.1))))
    (stats,) = learner.update(_rows(), _plan(kl=KlConfig(coef=0.1, place="reward")))
    assert stats.metrics["policy/kl"] is None


def test_too_long_rows_are_refused(policy: Policy) -> None:
    with pytest.raises(DataError, match="context"):
        TorchLearner(policy).update([_row(0, [5] * 1022, 1.0)], PLAN)


def test_progress_counts_every_pass(policy: Policy) -> None:
    seen: list[tuple[int, int]] = []
    note: Callable[[int, int], None] = lambda done, total: seen.append((done, total))  # noqa: E731
    list(TorchLearner(policy).update(_rows(), _plan(minibatches=3, update_epochs=2), note))
    assert seen == [(i, 9) for i in range(1, 10)]  # three old-log-prob passes, then two epochs of three steps


def test_golden_losses(policy: Policy, deterministic: None) -> None:
    """Four seeded updates of two steps each give the recorded losses."""
    plan = _plan(name="dapo", minibatches=2, lr=3e-3)
    learner = TorchLearner(policy)
    losses = [step.metrics["learner/loss"] for seed in range(4) for step in learner.update(_rows(seed), plan)]
    golden = json.loads(GOLDEN.read_text(encoding="utf-8"))
    assert losses == pytest.approx(golden["losses"], rel=1e-6, abs=1e-8)

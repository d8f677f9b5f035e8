"""The algorithm table: complete, overridable, and each row the loss it claims to be."""

from __future__ import annotations

import subprocess
import sys
from typing import Any, get_args

import pytest
import torch
from pydantic import ValidationError

from rl_core.algorithms import ALGORITHMS, Needs, resolve, token_loss
from rl_core.config import (
    AdvantageName,
    AggregationName,
    AlgorithmConfig,
    AlgorithmName,
    GenerateConfig,
    KlConfig,
    LearnerConfig,
    OverlongConfig,
    RunConfig,
)
from rl_core.losses import TokenBatch, kl_loss, policy_loss

BUDGET = GenerateConfig(max_completion_tokens=50)


def make_batch() -> TokenBatch:
    old = torch.tensor([-1.0, -2.0, -1.0, -2.0, -3.0], dtype=torch.float64)
    ratios = torch.tensor([1.3, 0.7, 1.3, 0.7, 4.0], dtype=torch.float64)
    return TokenBatch(
        logprobs=(old + ratios.log()).requires_grad_(),
        entropy=torch.ones(5),
        old_logprobs=old,
        sampler_logprobs=old,
        advantages=torch.tensor([1.0, 1.0, -1.0, -1.0, -1.0], dtype=torch.float64),
        mask=torch.tensor([True, True, True, True, True]),
        sequence_ids=torch.tensor([0, 0, 1, 1, 1]),
        sequences=2,
        ref_logprobs=old - 0.5,
    )


def test_table_has_every_name_the_config_knows() -> None:
    assert set(ALGORITHMS) == set(get_args(AlgorithmName))
    assert {row.advantage for row in ALGORITHMS.values()} == set(get_args(AdvantageName))
    assert {row.aggregation for row in ALGORITHMS.values()} == set(get_args(AggregationName))


@pytest.mark.parametrize(
    ("name", "advantage", "loss", "aggregation", "clip"),
    [
        ("grpo", "grpo", "ppo_clip", "seq_mean_token_mean", (0.2, 0.2)),
        ("dr_grpo", "dr_grpo", "ppo_clip", "seq_sum_fixed_norm", (0.2, 0.2)),
        ("rloo", "rloo", "ppo_clip", "seq_mean_token_sum", (0.2, 0.2)),
        ("dapo", "grpo", "ppo_clip", "token_mean", (0.2, 0.28)),
        ("reinforce", "reinforce", "reinforce", "seq_mean_token_sum", (0.2, 0.2)),
    ],
)
def test_rows(name: Any, advantage: str, loss: str, aggregation: str, clip: tuple[float, float]) -> None:
    row = resolve(AlgorithmConfig(name=name), BUDGET)
    assert (row.advantage, row.loss, row.aggregation) == (advantage, loss, aggregation)
    assert (row.clip_low, row.clip_high) == clip and row.dual_clip is None
    assert row.norm_length == 50
    assert row.overlong == (OverlongConfig(buffer_tokens=10) if name == "dapo" else None)


def test_every_override_reaches_the_algorithm() -> None:
    config = AlgorithmConfig(
        name="dapo",
        advantage="rloo",
        std_ddof=0,
        std_eps=1e-4,
        clip_low=0.0,
        clip_high=0.0,
        dual_clip=3.0,
        aggregation="seq_sum_fixed_norm",
        kl=KlConfig(coef=0.1, estimator="k2", place="reward"),
        truncation="reward_override",
        truncated_reward=-1.0,
        overlong=OverlongConfig(buffer_tokens=3, factor=0.5),
    )
    row = resolve(config, BUDGET)
    for field in AlgorithmConfig.model_fields:
        if field != "name":
            assert getattr(row, field) == getattr(config, field), field
    assert row.loss == "ppo_clip"


@pytest.mark.parametrize(("epochs", "minibatches", "old"), [(1, 1, False), (2, 1, True), (1, 2, True)])
def test_needs_only_what_is_used(epochs: int, minibatches: int, old: bool) -> None:
    learner = LearnerConfig(update_epochs=epochs, minibatches=minibatches)
    for kl, in_loss, in_reward in (
        (KlConfig(), False, False),
        (KlConfig(place="reward"), False, False),
        (KlConfig(coef=0.1), True, False),
        (KlConfig(coef=0.1, place="reward"), False, True),
    ):
        assert resolve(AlgorithmConfig(kl=kl), BUDGET).needs(learner) == Needs(old, in_loss, in_reward)


def test_token_loss_is_policy_loss_plus_kl() -> None:
    batch = make_batch()
    plain = token_loss(batch, resolve(AlgorithmConfig(name="dapo", dual_clip=3.0), BUDGET))
    assert plain.loss.tolist() == pytest.approx([-1.28, -0.7, 1.3, 0.8, 3.0])
    assert "policy/kl" not in plain.metrics
    in_reward = AlgorithmConfig(name="dapo", dual_clip=3.0, kl=KlConfig(coef=0.1, place="reward"))
    assert torch.equal(token_loss(batch, resolve(in_reward, BUDGET)).loss, plain.loss)
    for estimator in ("k1", "k2", "k3", "k3_st"):
        config = AlgorithmConfig(kl=KlConfig(coef=0.1, estimator=estimator))  # type: ignore[arg-type]
        both = token_loss(batch, resolve(config, BUDGET))
        expected = policy_loss(batch).loss + 0.1 * kl_loss(batch, estimator).loss  # type: ignore[arg-type]
        torch.testing.assert_close(both.loss, expected, rtol=0, atol=1e-15)
        assert {"policy/kl", "policy/clip_frac_low"} <= both.metrics.keys()


def test_reinforce_row_uses_its_loss() -> None:
    batch = make_batch()
    result = token_loss(batch, resolve(AlgorithmConfig(name="reinforce"), BUDGET))
    (grad,) = torch.autograd.grad(result.loss.sum(), batch.logprobs)
    assert grad.tolist() == pytest.approx([-1.3, -0.7, 1.3, 0.7, 4.0])


@pytest.mark.parametrize("name", get_args(AlgorithmName))
def test_group_size_one_is_refused_for_group_methods_only(name: AlgorithmName) -> None:
    """C46: a group of one is refused by the config for every method that compares a prompt's completions."""
    data = {
        "name": "x",
        "model": {"source": "tiny-random"},
        "environment": {"kind": "dataset"},
        "rewards": [{"function": "last_integer"}],
        "generate": {"group_size": 1},
        "algorithm": {"name": name},
    }
    if resolve(AlgorithmConfig(name=name), BUDGET).advantage == "reinforce":
        assert RunConfig.model_validate(data).generate.group_size == 1
    else:
        with pytest.raises(ValidationError, match="group_size"):
            RunConfig.model_validate(data)


def test_temperature_zero_is_refused_for_training() -> None:
    """C57: rollouts that are trained on need a temperature above 0."""
    with pytest.raises(ValidationError, match="temperature"):
        GenerateConfig(temperature=0.0)


def test_pure_modules_do_not_import_torch() -> None:
    code = (
        "import sys, rl_core.advantages, rl_core.algorithms, rl_core.evaluation, rl_core.metrics\n"
        "bad = {'torch', 'transformers', 'prefect', 'mlflow'} & sys.modules.keys()\n"
        "assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)

"""Policy losses, temperature and mismatch terms against hand numbers, naive loops and known gradients."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rl_core.logprobs import token_logprobs
from rl_core.losses import (
    TokenBatch,
    TokenLoss,
    mismatch_terms,
    policy_loss,
)

# Two sequences, ratios 1.3 0.7 with advantage +1 and 1.3 0.7 4.0 with advantage -1.
RATIOS = [1.3, 0.7, 1.3, 0.7, 4.0]
ADVANTAGES = [1.0, 1.0, -1.0, -1.0, -1.0]
SEQUENCES = [0, 0, 1, 1, 1]


def make_batch(logprobs: Tensor, advantages: Any, **changes: Any) -> TokenBatch:
    """A batch where everything not given is neutral: old and sampler are the current policy, all tokens count."""
    n = len(logprobs)
    fields: dict[str, Any] = {
        "logprobs": logprobs,
        "entropy": torch.ones(n),
        "old_logprobs": logprobs.detach(),
        "sampler_logprobs": logprobs.detach(),
        "advantages": torch.as_tensor(advantages, dtype=logprobs.dtype),
        "mask": torch.ones(n, dtype=torch.bool),
        "sequence_ids": torch.zeros(n, dtype=torch.long),
        "sequences": 1,
    }
    return TokenBatch(**(fields | changes))


def ratio_batch(ratios: list[float], advantages: list[float]) -> TokenBatch:
    old = torch.full((len(ratios),), -3.0, dtype=torch.float64)
    logprobs = (old + torch.tensor(ratios, dtype=torch.float64).log()).requires_grad_()
    return make_batch(logprobs, advantages, old_logprobs=old, sampler_logprobs=old)


def gradient(batch: TokenBatch, result: TokenLoss) -> list[float]:
    (grad,) = torch.autograd.grad(result.loss.sum(), batch.logprobs)
    return grad.tolist()


# -- policy losses


def test_ppo_clip_hand_numbers() -> None:
    batch = ratio_batch(RATIOS, ADVANTAGES)
    assert policy_loss(batch).loss.tolist() == pytest.approx([-1.2, -0.7, 1.3, 0.8, 4.0], abs=1e-6)
    higher = policy_loss(batch, clip_low=0.2, clip_high=0.28).loss.tolist()
    assert higher == pytest.approx([-1.28, -0.7, 1.3, 0.8, 4.0], abs=1e-6)


def test_dual_clip_bounds_only_negative_advantages() -> None:
    dual = policy_loss(ratio_batch(RATIOS, ADVANTAGES), dual_clip=3.0)
    assert dual.loss.tolist() == pytest.approx([-1.2, -0.7, 1.3, 0.8, 3.0], abs=1e-6)
    assert dual.metrics["policy/dual_clip_frac"].tolist() == [0, 0, 0, 0, 1]
    # the bound does not touch a positive advantage, even at a ratio far above it
    assert policy_loss(ratio_batch([9.0], [1.0]), clip_high=20.0, dual_clip=3.0).loss.item() == pytest.approx(-9.0)


def test_clip_fractions_count_the_active_branch_only() -> None:
    metrics = policy_loss(ratio_batch(RATIOS, ADVANTAGES)).metrics
    assert metrics["policy/clip_frac_high"].tolist() == [1, 0, 0, 0, 0]
    assert metrics["policy/clip_frac_low"].tolist() == [0, 0, 0, 1, 0]


def test_clipped_side_has_exactly_no_gradient() -> None:
    batch = ratio_batch(RATIOS, ADVANTAGES)
    assert gradient(batch, policy_loss(batch)) == pytest.approx([0.0, -0.7, 1.3, 0.0, 4.0])
    assert [g == 0.0 for g in gradient(batch, policy_loss(batch, dual_clip=3.0))] == [True, False, False, True, True]


@pytest.mark.parametrize("options", [{}, {"dual_clip": 3.0}, {"clip_low": 0.1, "clip_high": 0.5}])
def test_ratio_one_gives_the_gradient_of_reinforce(options: dict[str, float]) -> None:
    logprobs = torch.tensor([-0.1, -2.0, -5.0, -1.0], dtype=torch.float64, requires_grad=True)
    batch = make_batch(logprobs, [0.5, -1.5, 2.0, 0.0])
    plain = gradient(batch, policy_loss(batch, loss="reinforce"))
    assert plain == pytest.approx([-0.5, 1.5, -2.0, 0.0])
    assert gradient(batch, policy_loss(batch, **options)) == plain


def test_reinforce_weights_by_the_detached_ratio() -> None:
    batch = ratio_batch([2.0], [1.5])
    result = policy_loss(batch, loss="reinforce")
    assert result.loss.item() == pytest.approx(-2.0 * 1.5 * (-3.0 + math.log(2.0)))
    assert gradient(batch, result) == pytest.approx([-3.0])


@pytest.mark.parametrize("loss", ["ppo_clip", "reinforce"])
def test_zero_advantage_gives_zero_gradient(loss: Any) -> None:
    batch = ratio_batch(RATIOS, [0.0] * 5)
    assert gradient(batch, policy_loss(batch, loss=loss, dual_clip=3.0)) == [0.0] * 5


@given(
    st.lists(st.tuples(st.floats(-1.5, 1.5), st.floats(-3, 3)), min_size=1, max_size=8),
    st.floats(0.05, 0.9),
    st.floats(0.05, 2.0),
    st.none() | st.floats(1.1, 6.0),
)
@settings(max_examples=60, deadline=None)
def test_ppo_clip_equals_a_naive_loop(
    pairs: list[tuple[float, float]], low: float, high: float, dual: float | None
) -> None:
    batch = ratio_batch([math.exp(x) for x, _ in pairs], [a for _, a in pairs])
    expected = []
    for x, a in pairs:
        r = math.exp(x)
        loss = max(-a * r, -a * min(max(r, 1 - low), 1 + high))
        expected.append(min(loss, -dual * a) if dual is not None and a < 0 else loss)
    result = policy_loss(batch, clip_low=low, clip_high=high, dual_clip=dual)
    assert result.loss.tolist() == pytest.approx(expected, abs=1e-9)


# -- temperature, entropy, mismatch


@pytest.mark.parametrize(
    ("temperature", "entropy", "logprobs"),
    [
        (1.0, 0.832396, [-0.407606, -1.407606, -2.407606]),
        (0.7, 0.650573, [-0.260118, None, -3.117261]),
        (2.0, 1.020191, [None, None, None]),
    ],
)
def test_temperature_and_entropy_hand_numbers(temperature: float, entropy: float, logprobs: list[float | None]) -> None:
    head = torch.tensor([[2.0], [1.0], [0.0]])
    lp, h = token_logprobs(torch.ones(3, 1), head, torch.arange(3), temperature, 2)
    assert h.tolist() == pytest.approx([entropy] * 3, abs=1e-4)
    for got, wanted in zip(lp.tolist(), logprobs, strict=True):
        assert wanted is None or got == pytest.approx(wanted, abs=1e-4)
    if temperature == 1.0:
        assert lp.exp().tolist() == pytest.approx([0.665241, 0.244728, 0.090031], abs=1e-4)


def test_two_most_likely_tokens_renormalised() -> None:
    """What a sampler that keeps 2 of the 3 tokens (mass 0.909969) reports: raw log-probs lack log 0.909969."""
    head = torch.tensor([[2.0], [1.0], [0.0]])
    full, _ = token_logprobs(torch.ones(1, 1), head, torch.tensor([0]), 1.0, 1)
    kept, entropy = token_logprobs(torch.ones(1, 1), head[:2], torch.tensor([0]), 1.0, 1)
    assert (kept.item(), entropy.item()) == pytest.approx((-0.313262, 0.582203), abs=1e-4)
    assert math.exp(full.item() - kept.item()) == pytest.approx(0.909969, abs=1e-5)


def test_ratio_is_one_at_the_sampling_temperature() -> None:
    """C57: logits [2, 1, 0] at temperature 0.5 give -0.1429 on both sides and ratio 1; temperature 1 gives 0.767."""
    head, hidden, target = torch.tensor([[2.0], [1.0], [0.0]]), torch.ones(1, 1, requires_grad=True), torch.tensor([0])
    sampler = (head[:, 0].double() / 0.5).log_softmax(-1)[:1]
    assert sampler.item() == pytest.approx(-0.1429, abs=1e-4)
    ratios = []
    for temperature in (0.5, 1.0):
        logprobs, entropy = token_logprobs(hidden, head, target, temperature, 1)
        batch = make_batch(logprobs, [1.0], old_logprobs=sampler, sampler_logprobs=sampler, entropy=entropy)
        ratios.append(policy_loss(batch).metrics["policy/ratio"].item())
    assert ratios == pytest.approx([1.0, 0.767], abs=1e-3)


def test_mismatch_hand_numbers() -> None:
    log_w = torch.tensor([0.0, 0.5, -2.0, 1.0], dtype=torch.float64)
    means = {name: value.mean().item() for name, value in mismatch_terms(log_w).items()}
    assert means == pytest.approx(
        {
            "mismatch/k1": 0.125,
            "mismatch/k3": 0.500585,
            "mismatch/mean_w": 1.375585,
            "mismatch/chi2": 1.781413,
            "mismatch/mult_prob_error": 3.189015,
        },
        abs=1e-6,
    )
    # effective sample size from the two means the learner keeps
    assert means["mismatch/mean_w"] ** 2 / (means["mismatch/chi2"] + 1) == pytest.approx(0.680313, abs=1e-6)


def test_metrics_and_peaks_of_a_batch() -> None:
    old = torch.tensor([-1.0, -2.0, -3.0], dtype=torch.float64)
    logprobs = (old + torch.tensor([0.1, -0.3, 0.0], dtype=torch.float64)).requires_grad_()
    sampler = old - torch.tensor([0.0, 0.5, -2.0], dtype=torch.float64)
    result = policy_loss(make_batch(logprobs, [1.0] * 3, old_logprobs=old, sampler_logprobs=sampler))
    r = [math.exp(0.1), math.exp(-0.3), 1.0]
    assert result.metrics["policy/ratio"].tolist() == pytest.approx(r)
    assert result.metrics["policy/approx_kl"].tolist() == pytest.approx([x - 1 - math.log(x) for x in r])
    assert {name: value.item() for name, value in result.peaks.items()} == pytest.approx(
        {
            "policy/log_ratio_max": 0.1,
            "policy/log_ratio_min": -0.3,
            "mismatch/log_w_max": 0.5,
            "mismatch/log_w_min": -2.0,
        }
    )
    assert not any(value.requires_grad for value in itertools.chain(result.metrics.values(), result.peaks.values()))

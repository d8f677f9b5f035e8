"""KL terms to the reference: values, and gradients by enumeration and finite differences."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_core.losses import (
    kl_estimate,
)

# -- KL to the reference, on pi = [.5, .3, .2], ref = [.3, .3, .4]

PI, REF = [0.5, 0.3, 0.2], [0.3, 0.3, 0.4]
REVERSE = [0.197021, -0.035035, -0.161986]


def expected_gradient(term: Any, score_function: bool = False) -> list[float]:
    """Gradient in the logits of the expected loss, by enumeration over the three tokens an on-policy sampler may draw.

    `score_function`: the term is a reward, so the samples, not the term, carry the gradient.
    """
    logits = torch.tensor(PI, dtype=torch.float64).log().requires_grad_()
    logprobs, ref = logits.log_softmax(-1), torch.tensor(REF, dtype=torch.float64).log()
    probability = logprobs.exp()
    values = term(logprobs, ref)
    loss = (probability * values.detach()).sum() if score_function else (probability.detach() * values).sum()
    (grad,) = torch.autograd.grad(loss, logits)
    return grad.tolist()


def test_kl_estimators_hand_numbers() -> None:
    d, zero = torch.tensor([0.5], dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    values = [kl_estimate(d, zero, k).item() for k in ("k1", "k2", "k3", "k3_st")]
    assert values == pytest.approx([0.5, 0.125, 0.106531, 0.106531], abs=1e-6)


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [("k1", [0.0, 0.0, 0.0]), ("k2", REVERSE), ("k3", [0.2, 0.0, -0.2]), ("k3_st", REVERSE)],
)
def test_kl_loss_gradients_by_enumeration(estimator: Any, expected: list[float]) -> None:
    assert expected_gradient(lambda lp, ref: kl_estimate(lp, ref, estimator)) == pytest.approx(expected, abs=1e-6)


def test_ratio_weighted_k3_has_the_reverse_gradient() -> None:
    grad = expected_gradient(lambda lp, ref: (lp - lp.detach()).exp() * kl_estimate(lp, ref, "k3"))
    assert grad == pytest.approx(REVERSE, abs=1e-6)


@pytest.mark.parametrize(("estimator", "expected"), [("k1", REVERSE), ("k3", [-0.002979, -0.035035, 0.038014])])
def test_kl_in_reward_gradients_by_enumeration(estimator: Any, expected: list[float]) -> None:
    grad = expected_gradient(lambda lp, ref: kl_estimate(lp, ref, estimator), score_function=True)
    assert grad == pytest.approx(expected, abs=1e-6)


def test_reverse_gradient_is_that_of_the_divergence_by_finite_differences() -> None:
    def divergence(logits: list[float]) -> float:
        weights = [math.exp(z) for z in logits]
        p = [w / sum(weights) for w in weights]
        return sum(a * math.log(a / b) for a, b in zip(p, REF, strict=True))

    logits, h = [math.log(p) for p in PI], 1e-6
    for i, expected in enumerate(expected_gradient(lambda lp, ref: kl_estimate(lp, ref, "k2"))):
        up, down = ([z + s * h * (j == i) for j, z in enumerate(logits)] for s in (1, -1))
        assert (divergence(up) - divergence(down)) / (2 * h) == pytest.approx(expected, abs=1e-8)


def test_kl_expected_values() -> None:
    lp, ref = (torch.tensor(p, dtype=torch.float64).log() for p in (PI, REF))
    means = [float((lp.exp() * kl_estimate(lp, ref, k)).sum()) for k in ("k1", "k2", "k3")]
    assert means == pytest.approx([0.116783, 0.113281, 0.116783], abs=1e-6)


@given(st.floats(-60, 60))
@settings(max_examples=80, deadline=None)
def test_no_kl_loss_pushes_away_from_the_reference(gap: float) -> None:
    """Beyond the clamp a gradient may be 0, never of the wrong sign."""
    for estimator in ("k2", "k3", "k3_st"):
        logprob = torch.tensor([gap], dtype=torch.float64, requires_grad=True)
        kl = kl_estimate(logprob, torch.zeros(1, dtype=torch.float64), estimator)  # type: ignore[arg-type]
        kl.sum().backward()
        assert kl.item() >= -1e-15 and logprob.grad is not None and logprob.grad.item() * gap >= 0.0

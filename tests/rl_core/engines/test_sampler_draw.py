from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats

from rl_core.engines.sampler_transformers import draw
from rl_core.errors import NonFiniteError


def test_draw_follows_the_probabilities() -> None:
    """The numbers of section E (temperatures), C57, and a chi-square test of the frequencies."""
    logits = torch.tensor([[2.0, 1.0, 0.0]]).repeat(40_000, 1)
    u = np.random.default_rng(0).random(40_000)
    for temperature, first, last in (
        (1.0, -0.407606, -2.407606),
        (0.7, -0.260118, -3.117261),
        (0.5, -0.142932, -4.142932),
    ):
        tokens, logprobs = draw(logits, u, temperature)
        assert logprobs[tokens == 0][0].item() == pytest.approx(first, abs=2e-6)
        assert logprobs[tokens == 2][0].item() == pytest.approx(last, abs=2e-6)
        expected = (logits[0].double() / temperature).softmax(-1).numpy() * len(u)
        assert stats.chisquare(np.bincount(tokens.numpy(), minlength=3), expected).pvalue > 1e-3
    tokens, logprobs = draw(logits[:2], u[:2], 0.0)
    assert tokens.tolist() == [0, 0]
    assert logprobs.tolist() == pytest.approx([-0.407606] * 2, abs=2e-6)


@pytest.mark.parametrize("vocabulary", [3, 256, 1000, 49_152])
def test_draw_equals_the_exact_inverse_cdf(vocabulary: int) -> None:
    """Against float64 over the whole vocabulary: the same token, or u lies within rounding of the boundary between."""
    generator = torch.Generator().manual_seed(vocabulary)
    logits = torch.randn(500, vocabulary, generator=generator) * 3
    u = np.random.default_rng(vocabulary).random(500)
    tokens, logprobs = draw(logits, u, 0.8)
    exact = (logits.double() / 0.8).log_softmax(-1)
    running = exact.exp().cumsum(-1).numpy()
    rows = np.arange(500)
    upper, lower = running[rows, tokens], running[rows, tokens] - exact.exp().numpy()[rows, tokens]
    assert (lower - 1e-7 <= u).all() and (u < upper + 1e-7).all()
    np.testing.assert_allclose(logprobs, exact.gather(1, tokens[:, None])[:, 0], atol=2e-6)


@pytest.mark.parametrize("vocabulary", [4, 300, 600])
def test_impossible_tokens_are_never_drawn(vocabulary: int) -> None:
    """Both ends of [0, 1), and impossible tokens at both ends of the vocabulary, in its middle and block-wise."""
    edges = np.array([0.0, 5e-324, 2.0**-53, 0.5, 1 - 2.0**-53])
    for possible in ([1], [2], [1, 2], [1, vocabulary - 2], list(range(1, vocabulary - 1))):
        logits = torch.full((len(edges), vocabulary), -math.inf)
        logits[:, possible] = torch.linspace(-1, 1, len(possible))
        tokens, logprobs = draw(logits, edges, 1.0)
        assert set(tokens.tolist()) <= set(possible)
        assert tokens[0] == possible[0]
        assert tokens[-1] == possible[-1]
        assert torch.isfinite(logprobs).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_without_a_distribution_is_refused(bad: float) -> None:
    logits = torch.zeros(3, 5)
    logits[1, 2] = bad
    for temperature in (1.0, 0.0):
        with pytest.raises(NonFiniteError):
            draw(logits, np.full(3, 0.5), temperature)

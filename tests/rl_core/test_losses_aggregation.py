"""Token weights: hand numbers, naive loops, and the same loss and gradient however the tokens are grouped."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rl_core.config import AggregationName
from rl_core.losses import TokenBatch, policy_loss, step_totals, token_weights

MODES: list[AggregationName] = ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_sum_fixed_norm"]


def weights_of(mode: AggregationName, counts: list[int], norm_length: int = 8) -> Tensor:
    tokens, sequences = step_totals(counts)
    return token_weights(
        mode, torch.tensor(counts), total_tokens=tokens, total_sequences=sequences, norm_length=norm_length
    )


def aggregate(loss: Tensor, mode: AggregationName, sequence_ids: list[int], counts: list[int]) -> float:
    return float((weights_of(mode, counts)[torch.tensor(sequence_ids)] * loss).sum())


# -- aggregation


@pytest.mark.parametrize(
    ("mode", "plain", "dual"),
    [
        ("token_mean", 0.84, 0.64),
        ("seq_mean_token_sum", 2.1, 1.6),
        ("seq_mean_token_mean", 0.541667, 0.375),
        ("seq_sum_fixed_norm", 0.2625, 0.2),
    ],
)
def test_aggregation_hand_numbers(mode: AggregationName, plain: float, dual: float) -> None:
    """ppo_clip losses of ratios 1.3 0.7 (advantage 1) and 1.3 0.7 4.0 (advantage -1), without and with dual clip."""
    for last, expected in ((4.0, plain), (3.0, dual)):
        losses = torch.tensor([-1.2, -0.7, 1.3, 0.8, last], dtype=torch.float64)
        assert aggregate(losses, mode, [0, 0, 1, 1, 1], [2, 3]) == pytest.approx(expected, abs=1e-6)


def test_micro_batches_share_one_denominator() -> None:
    losses = [[1.0, 1.0], [2.0, 2.0, 2.0, 2.0]]
    tokens, sequences = step_totals([2, 4])
    parts = []
    for part in losses:
        counts = torch.tensor([len(part)])
        weight = token_weights("token_mean", counts, total_tokens=tokens, total_sequences=sequences, norm_length=1)
        parts.append(float(weight * sum(part)))
    assert sum(parts) == pytest.approx(1.666667, abs=1e-6)
    # two ranks whose gradients are averaged, each scaled by the number of ranks
    assert sum(2 * part for part in parts) / 2 == pytest.approx(1.666667, abs=1e-6)


def test_rejection_keeps_the_denominator() -> None:
    losses = torch.tensor([1.0, 1.0, 2.0, 2.0, 2.0, 2.0], dtype=torch.float64)
    rejected = torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0, 0.0])
    assert aggregate(losses * rejected, "token_mean", [0] * 6, [6]) == pytest.approx(1.0)


@pytest.mark.parametrize("split", [[[0, 1]], [[0], [1]], [[1], [0]]])
def test_token_mean_does_not_depend_on_the_split(split: list[list[int]]) -> None:
    """C54: one token of loss 10 and nine of loss 0 give 1.0 however they are cut, and equal gradients."""
    sequences = [torch.tensor([10.0]), torch.zeros(9)]
    parameter = torch.tensor(1.0, requires_grad=True)
    total = torch.tensor(0.0, dtype=torch.float64)
    for part in split:
        counts = torch.tensor([len(sequences[i]) for i in part])
        weights = token_weights("token_mean", counts, total_tokens=10, total_sequences=2, norm_length=1)
        loss = parameter * torch.cat([sequences[i] for i in part])
        total = total + (weights.repeat_interleave(counts) * loss).sum()
    total.backward()
    assert total.item() == pytest.approx(1.0) and parameter.grad is not None
    assert parameter.grad.item() == pytest.approx(1.0)


def test_masked_out_tokens_are_not_in_the_divisor() -> None:
    """C54: of ten tokens three are masked out as truncated; the divisor is 7, and their sequence is not counted."""
    assert step_totals([1, 6, 0]) == (7, 2)
    weights = weights_of("token_mean", [1, 6, 0])
    assert weights.tolist() == pytest.approx([1 / 7, 1 / 7, 0.0])
    assert weights_of("seq_mean_token_sum", [1, 6, 0]).tolist() == pytest.approx([0.5, 0.5, 0.0])


def test_skipped_rows_are_not_in_the_divisor() -> None:
    """C55: five tokens that are no part of the loss and five that are: the divisor is 5, not 10."""
    assert weights_of("token_mean", [0, 5]).tolist() == pytest.approx([0.0, 0.2])


@pytest.mark.parametrize("mode", MODES)
def test_empty_steps_and_empty_sequences_have_weight_zero(mode: AggregationName) -> None:
    assert weights_of(mode, [0, 0]).tolist() == [0.0, 0.0]
    assert weights_of(mode, []).tolist() == []
    assert weights_of(mode, [3, 0])[1].item() == 0.0


@pytest.mark.parametrize("mode", MODES)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=7), st.data())
@settings(max_examples=25, deadline=None)
def test_aggregation_equals_a_naive_loop_and_any_regrouping(
    mode: AggregationName, counts: list[int], data: st.DataObject
) -> None:
    """Uneven lengths, empty completions and whole empty parts: any split sums to the textbook formula."""
    losses = [[data.draw(st.floats(-2, 2)) for _ in range(n)] for n in counts]
    filled = [row for row in losses if row]
    tokens, b = sum(counts), max(1, len(filled))
    expected = {
        "token_mean": sum(map(sum, filled)) / max(1, tokens),
        "seq_mean_token_mean": sum(sum(row) / len(row) for row in filled) / b,
        "seq_mean_token_sum": sum(map(sum, filled)) / b,
        "seq_sum_fixed_norm": sum(map(sum, filled)) / (b * 8),
    }[mode]
    total = 0.0
    owner = [data.draw(st.integers(0, 2)) for _ in counts]
    all_tokens, all_sequences = step_totals(counts)
    for part in range(3):
        rows = [row for row, of in zip(losses, owner, strict=True) if of == part]
        weights = token_weights(
            mode,
            torch.tensor([len(row) for row in rows], dtype=torch.long),
            total_tokens=all_tokens,
            total_sequences=all_sequences,
            norm_length=8,
        )
        total += sum(float(w) * sum(row) for w, row in zip(weights, rows, strict=True))
    assert total == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("mode", MODES)
def test_regrouping_gives_equal_loss_and_gradient(mode: AggregationName) -> None:
    """Five sequences of uneven length, one empty, as one batch, as 2+3 and as four parts of which one is empty."""
    counts, generator = [3, 0, 5, 1, 2], torch.Generator().manual_seed(3)
    start = [sum(counts[:i]) for i in range(6)]
    inputs = torch.randn(11, 3, generator=generator, dtype=torch.float64)
    old = -torch.rand(11, generator=generator, dtype=torch.float64)
    advantages = torch.randn(11, generator=generator, dtype=torch.float64)
    tokens, sequences = step_totals(counts)

    def run(parts: list[list[int]]) -> tuple[float, Tensor]:
        weight = torch.tensor([0.3, -0.2, 0.5], dtype=torch.float64, requires_grad=True)
        total = 0.0
        for part in parts:
            rows = [t for i in part for t in range(start[i], start[i + 1])]
            ids = torch.tensor([k for k, i in enumerate(part) for _ in range(counts[i])], dtype=torch.long)
            logprobs = -torch.nn.functional.softplus(inputs[rows] @ weight)
            batch = TokenBatch(
                logprobs=logprobs,
                entropy=old[rows],
                old_logprobs=old[rows],
                sampler_logprobs=old[rows],
                advantages=advantages[rows],
                mask=torch.ones(len(rows), dtype=torch.bool),
                sequence_ids=ids,
                sequences=len(part),
            )
            lengths = torch.tensor([counts[i] for i in part], dtype=torch.long)
            w = token_weights(mode, lengths, total_tokens=tokens, total_sequences=sequences, norm_length=8)
            loss = (w[ids] * policy_loss(batch).loss).sum()
            loss.backward()
            total += loss.item()
        assert weight.grad is not None
        return total, weight.grad

    whole = run([[0, 1, 2, 3, 4]])
    assert whole[0] != 0.0
    for parts in ([[0, 1], [2, 3, 4]], [[2], [1], [0, 4], [3]], [[4, 3, 2, 1, 0]]):
        loss, grad = run(parts)
        assert loss == pytest.approx(whole[0], abs=1e-12)
        torch.testing.assert_close(grad, whole[1], rtol=0, atol=1e-12)

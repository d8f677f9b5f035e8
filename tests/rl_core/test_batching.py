"""Shared-prefix rows against a layout written by hand and against invariants of any packing."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_core.batching import arrange, block_mask, microbatches, minibatches, rows_with_signal, step_order
from rl_core.engines.base import TrainRow
from rl_core.errors import DataError


def _row(group: int, sample: int, prompt: list[int], completion: list[int], **changes: object) -> TrainRow:
    tokens = len(completion)
    row = TrainRow(group, sample, prompt, completion, [True] * tokens, 1.0, [-1.0] * tokens, True)
    return replace(row, **changes)  # type: ignore[arg-type]


def test_layout_by_hand() -> None:
    """C29: pad and end token are both 2, and a 2 inside prompt and completion is a token like any other."""
    rows = [_row(1, 0, [7, 2], [5, 6, 2]), _row(1, 1, [7, 2], [2]), _row(0, 0, [2, 2, 9], [4, 2])]
    (batch,) = microbatches(arrange(rows), range(3), budget=100)
    # Row of group 0: prompt 2 2 9, then 4; row of group 1: prompt 7 2, then 5 6; last tokens are scored, not fed.
    assert batch.input_ids.tolist() == [[2, 2, 9, 4], [7, 2, 5, 6]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3], [0, 1, 2, 3]]
    assert batch.segments.tolist() == [[0, 0, 0, 1], [0, 0, 1, 1]]
    assert batch.scored_at.tolist() == [2, 3, 4 + 1, 4 + 2, 4 + 3, 4 + 1]
    assert batch.tokens.tolist() == [0, 1, 2, 3, 4, 5]


def test_mask_by_hand() -> None:
    """C29: prompt of two, completions of two and one token, two padding positions."""
    wanted = [
        "1......",
        "11.....",
        "111....",
        "1111...",
        "11..1..",
        ".....1.",
        "......1",
    ]
    mask = block_mask(torch.tensor([[0, 0, 1, 1, 2, -1, -1]]))
    assert mask.shape == (1, 1, 7, 7)
    assert ["".join("1" if seen else "." for seen in line) for line in mask[0, 0].tolist()] == wanted


def test_positions_restart_after_the_prompt() -> None:
    rows = [_row(0, s, [3, 4, 5], list(range(10, 10 + n))) for s, n in enumerate((3, 1, 4))]
    (batch,) = microbatches(arrange(rows), range(3), budget=100)
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4, 3, 4, 5]]
    assert batch.segments.tolist() == [[0, 0, 0, 1, 1, 3, 3, 3]]


def test_only_action_tokens_are_scored() -> None:
    """A tool's tokens are fed where a later action token needs them, and never scored; a tail of them is not fed."""
    rows = [_row(0, 0, [3], [10, 11, 12, 13, 14], action_mask=[True, False, False, True, False])]
    (batch,) = microbatches(arrange(rows), [0], budget=100)
    assert batch.input_ids.tolist() == [[3, 10, 11, 12]]
    assert batch.tokens.tolist() == [0, 3]
    assert batch.scored_at.tolist() == [0, 3]


def test_split_group_repeats_its_prompt() -> None:
    rows = [_row(0, s, [1] * 10, [5] * 6) for s in range(4)]
    batches = microbatches(arrange(rows), range(4), budget=21)
    assert [batch.input_ids.shape for batch in batches] == [(1, 20), (1, 20)]
    assert all(batch.input_ids[0, :10].tolist() == [1] * 10 for batch in batches)
    assert [batch.tokens.tolist() for batch in batches] == [list(range(12)), list(range(12, 24))]


def test_one_completion_over_the_budget_goes_alone() -> None:
    rows = [_row(0, 0, [1] * 10, [5] * 30), _row(0, 1, [1] * 10, [5] * 3)]
    shapes = [tuple(batch.input_ids.shape) for batch in microbatches(arrange(rows), range(2), budget=16)]
    assert shapes == [(1, 39), (1, 12)]


def test_empty_and_masked_completions_are_left_out() -> None:
    """C36: an empty completion scores nothing; an end token alone is scored at the last prompt position."""
    rows = [_row(0, 0, [3, 4], [2]), _row(0, 1, [3, 4], []), _row(0, 2, [3, 4], [5, 2], action_mask=[False, False])]
    arranged = arrange(rows)
    (batch,) = microbatches(arranged, range(3), budget=100)
    assert batch.input_ids.tolist() == [[3, 4]]
    assert batch.scored_at.tolist() == [1]
    assert arranged.action_lengths.tolist() == [1, 0, 0]
    assert microbatches(arranged, [1, 2], budget=100) == []


def test_rows_with_signal() -> None:
    rows = [
        _row(0, 0, [3], [5]),
        _row(0, 1, [3], [5], advantage=0.0),
        _row(0, 2, [3], [5], keep=False),
        _row(0, 3, [3], []),
        _row(0, 4, [3], [5], action_mask=[False]),
    ]
    assert rows_with_signal(arrange(rows), every_token=False) == [0]
    assert rows_with_signal(arrange(rows), every_token=True) == [0, 1]


def test_minibatches_keep_groups_whole_and_cover_all_rows() -> None:
    rows = [_row(g, s, [g], [5]) for g in range(7) for s in range(3)]
    arranged = arrange(rows)
    parts = minibatches(arranged, 3, shuffle_seed=11)
    assert sorted(i for part in parts for i in part) == list(range(21))
    assert [len(part) for part in parts] == [9, 6, 6]
    groups = [{arranged.rows[i].group_id for i in part} for part in parts]
    assert all(a.isdisjoint(b) for a in groups for b in groups if a is not b)
    assert parts == minibatches(arrange(rows[::-1]), 3, shuffle_seed=11)
    assert len({str(minibatches(arranged, 3, shuffle_seed=s)) for s in range(5)}) > 1
    assert minibatches(arrange(rows[:6]), 3, shuffle_seed=0)[2] == []


def test_step_order_is_a_shuffle_per_epoch() -> None:
    orders = [step_order(5, 1, epoch) for epoch in range(6)]
    assert all(sorted(order) == [0, 1, 2, 3, 4] for order in orders)
    assert len({tuple(order) for order in orders}) > 1
    assert orders == [step_order(5, 1, epoch) for epoch in range(6)]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([_row(0, 0, [1], [5]), _row(0, 0, [1], [5])], "twice"),
        ([_row(0, 0, [1], [5]), _row(0, 1, [2], [5])], "another prompt"),
        ([_row(0, 0, [], [5])], "no prompt"),
        ([_row(0, 0, [1], [5], action_mask=[True, True])], "different length"),
        ([_row(0, 0, [1], [5], sampler_logprobs=[])], "different length"),
    ],
)
def test_broken_rows_are_refused(rows: list[TrainRow], message: str) -> None:
    with pytest.raises(DataError, match=message):
        arrange(rows)


@given(
    lengths=st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=5), min_size=1, max_size=5),
    prompts=st.lists(st.integers(1, 12), min_size=5, max_size=5),
    budget=st.integers(16, 120),
)
def test_any_packing_scores_every_token_from_its_own_past(
    lengths: list[list[int]], prompts: list[int], budget: int
) -> None:
    """Following the mask from the scoring position gives prompt + earlier completion tokens, whatever the packing."""
    rows = [
        _row(g, s, [1000 * g + p for p in range(prompts[g])], [1000 * g + 100 + 10 * s + t for t in range(n)])
        for g, sizes in enumerate(lengths)
        for s, n in enumerate(sizes)
    ]
    arranged = arrange(rows)
    seen: list[int] = []
    for batch in microbatches(arranged, range(len(rows)), budget):
        lines, length = batch.input_ids.shape
        assert lines * length <= budget or lines == 1
        mask = batch.to_mask()
        for at, token in zip(batch.scored_at.tolist(), batch.tokens.tolist(), strict=True):
            line, place = divmod(at, length)
            row = arranged.rows[int(arranged.row_of_token[token])]
            t = token - int(arranged.starts[int(arranged.row_of_token[token])])
            visible = mask[line, 0, place]
            past = [*row.prompt_ids, *row.completion_ids[:t]]
            assert batch.input_ids[line][visible].tolist() == past
            assert batch.position_ids[line][visible].tolist() == list(range(len(past)))
        seen += batch.tokens.tolist()
    assert sorted(seen) == list(range(len(arranged.completion_ids)))

"""Shared-prefix rows: each prompt once, its completions after it, blind to one another; pure index arithmetic.

A packed row of a prompt of P tokens and two completions a, b:

    position in row   0 … P-1   P …           …
    token             prompt    a0 a1 …       b0 b1 …
    position id       0 … P-1   P P+1 …       P P+1 …      (restarted: b stands where a stands)
    segment           0         1             2            (-1 at padding)

A completion token sees the prompt and its own segment so far. Logits at position p score the next token of the segment:
the first token of every completion is scored by the last prompt position, and the last scored one is never fed. Masks
come from lengths, never from token values: pad may equal eos.

Shapes: R packed rows, L row length, N scored tokens of the micro-batch, T completion tokens of all rows end to end.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rl_core.engines.base import TrainRow
from rl_core.errors import DataError
from rl_core.seeds import seed

Indices = npt.NDArray[np.int64]

_Packed = tuple[int, list[int]]  # length of a packed row, indices of the rows in it

# What a further micro-batch costs, in padded tokens: adding a full set of weight gradients to the sum.
_MICRO_BATCH_COST = 48


@dataclass(frozen=True)
class Arranged:
    """The rows of an update in key order, their completion tokens end to end on one flat axis.

    Attributes:
        rows: [B], ascending (group_id, sample_id).
        starts: [B], flat index of a row's first token.
        completion_ids: [T].
        action_mask: [T], true where the policy chose the token.
        sampler_logprobs: [T], nats.
        row_of_token: [T], index into `rows`.
    """

    rows: tuple[TrainRow, ...]
    starts: Indices
    completion_ids: Tensor
    action_mask: Tensor
    sampler_logprobs: Tensor
    row_of_token: Tensor

    @property
    def action_lengths(self) -> Tensor:
        """[B], action tokens per row."""
        return torch.bincount(self.row_of_token[self.action_mask], minlength=len(self.rows))


@dataclass(frozen=True)
class MicroBatch:
    """One forward pass.

    Attributes:
        input_ids: [R, L], 0 at padding.
        position_ids: [R, L], 0 at padding.
        segments: [R, L]: 0 prompt, 1… completions, -1 padding.
        scored_at: [N], index into the flattened [R · L] positions whose logits score the token.
        tokens: [N], index of the token on the flat axis of `Arranged`.
    """

    input_ids: Tensor
    position_ids: Tensor
    segments: Tensor
    scored_at: Tensor
    tokens: Tensor

    def to_mask(self, device: torch.device | str = "cpu") -> Tensor:
        """Boolean attention mask [R, 1, L, L], true where the query (third axis) sees the key (fourth axis)."""
        return block_mask(self.segments.to(device))


def arrange(rows: Iterable[TrainRow]) -> Arranged:
    """Put rows in key order.

    Raises:
        DataError: a key twice, a group with two prompts, an empty prompt, or columns of different length.
    """
    ordered = tuple(sorted(rows, key=lambda row: (row.group_id, row.sample_id)))
    for i, row in enumerate(ordered):
        _check_row(row, ordered[i - 1] if i else None)
    lengths = np.array([len(row.completion_ids) for row in ordered], dtype=np.int64)
    return Arranged(
        rows=ordered,
        starts=np.cumsum(lengths) - lengths,
        completion_ids=torch.tensor([t for row in ordered for t in row.completion_ids], dtype=torch.int64),
        action_mask=torch.tensor([bool(m) for row in ordered for m in row.action_mask], dtype=torch.bool),
        sampler_logprobs=torch.tensor([x for row in ordered for x in row.sampler_logprobs], dtype=torch.float32),
        row_of_token=torch.from_numpy(np.repeat(np.arange(len(ordered)), lengths)),
    )


def _check_row(row: TrainRow, before: TrainRow | None) -> None:
    where = f"train row (group {row.group_id}, sample {row.sample_id})"
    tokens = len(row.completion_ids)
    if len(row.action_mask) != tokens or len(row.sampler_logprobs) != tokens:
        raise DataError(
            f"{where} has columns of different length",
            expected=f"one action_mask and one sampler_logprobs entry for each of its {tokens} completion tokens",
            got=f"{len(row.action_mask)} and {len(row.sampler_logprobs)}",
            todo="rerun from the generate stage",
        )
    if not len(row.prompt_ids):
        raise DataError(f"{where} has no prompt token", expected="at least one", todo="check the environment")
    if before is None or before.group_id != row.group_id:
        return
    if before.sample_id == row.sample_id:
        raise DataError(f"{where} occurs twice", expected="each key once", todo="rerun from the generate stage")
    if list(before.prompt_ids) != list(row.prompt_ids):
        raise DataError(
            f"{where} has another prompt than the rest of its group",
            expected="one prompt for a group_id",
            todo="give every prompt its own group_id",
        )


def rows_with_signal(arranged: Arranged, every_token: bool) -> list[int]:
    """Indices of the rows that can contribute a gradient; with `every_token` (a KL term) at advantage 0, too."""
    return [
        i
        for i, row in enumerate(arranged.rows)
        if row.keep and any(row.action_mask) and (every_token or row.advantage != 0.0)
    ]


def minibatches(arranged: Arranged, count: int, shuffle_seed: int) -> list[list[int]]:
    """Split the rows into `count` lists of row indices, one per optimizer step of a pass.

    Groups are never split, and stand in the order of a hash of (seed, group_id). The lists are the same in every epoch
    (`step_order` shuffles them): the same micro-batches round a row's log-probs in the same way, so that the ratio is
    exactly 1 until a weight changes.
    """
    members: dict[int, list[int]] = {}
    for i, row in enumerate(arranged.rows):
        members.setdefault(row.group_id, []).append(i)
    order = list(members)
    if count > 1:
        order.sort(key=lambda group: (seed(shuffle_seed, "minibatches", 0, group), group))
    parts = np.array_split(np.arange(len(order)), count)
    return [sorted(i for place in part for i in members[order[int(place)]]) for part in parts]


def step_order(count: int, shuffle_seed: int, epoch: int) -> list[int]:
    """Order in which epoch `epoch` (from 0) takes its `count` minibatches."""
    return sorted(range(count), key=lambda step: seed(shuffle_seed, "epoch", epoch, step))


def microbatches(arranged: Arranged, selected: Sequence[int], budget: int) -> list[MicroBatch]:
    """Pack the selected rows into forward passes of at most `budget` padded tokens (R · L).

    A group over the budget becomes several packed rows, each with the prompt; a single completion over it goes alone.
    Rows without action tokens are left out.
    """
    packed = _pack(arranged, selected, budget)
    packed.sort(key=lambda row: (-row[0], row[1]))
    return [_build(arranged, part) for part in _partition(packed, budget)]


def _fed(row: TrainRow) -> int:
    """Completion tokens to feed: those before the last action token, which is scored and conditions nothing."""
    return max(t for t, chosen in enumerate(row.action_mask) if chosen)


def _pack(arranged: Arranged, selected: Sequence[int], budget: int) -> list[_Packed]:
    packed: list[_Packed] = []
    open_group: int | None = None
    for i in sorted(selected):
        row = arranged.rows[i]
        if not any(row.action_mask):
            continue
        fed = _fed(row)
        if row.group_id == open_group and packed[-1][0] + fed <= budget:
            packed[-1] = (packed[-1][0] + fed, [*packed[-1][1], i])
        else:
            packed.append((len(row.prompt_ids) + fed, [i]))
            open_group = row.group_id
    return packed


def _partition(packed: list[_Packed], budget: int) -> list[list[_Packed]]:
    """Cut rows sorted by falling length into runs whose padded tokens plus the cost per run are least."""
    best = [0.0] + [float("inf")] * len(packed)
    cut = [0] * (len(packed) + 1)
    for end in range(1, len(packed) + 1):
        for start in range(end - 1, -1, -1):
            padded = (end - start) * packed[start][0]
            if padded > budget and end - start > 1:
                break
            cost = best[start] + padded + _MICRO_BATCH_COST
            if cost < best[end]:
                best[end], cut[end] = cost, start
    parts: list[list[_Packed]] = []
    end = len(packed)
    while end:
        parts.append(packed[cut[end] : end])
        end = cut[end]
    return parts[::-1]


def _build(arranged: Arranged, packed: list[_Packed]) -> MicroBatch:
    shape = (len(packed), packed[0][0])
    input_ids, position_ids = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    segments = np.full(shape, -1, np.int64)
    scored_at: list[Indices] = []
    tokens: list[Indices] = []
    for r, (_, members) in enumerate(packed):
        prompt = np.asarray(arranged.rows[members[0]].prompt_ids, np.int64)
        at = len(prompt)
        input_ids[r, :at], position_ids[r, :at], segments[r, :at] = prompt, np.arange(at), 0
        for segment, i in enumerate(members, start=1):
            row = arranged.rows[i]
            fed = _fed(row)
            input_ids[r, at : at + fed] = row.completion_ids[:fed]
            position_ids[r, at : at + fed] = len(prompt) + np.arange(fed)
            segments[r, at : at + fed] = segment
            before = np.concatenate([[len(prompt) - 1], np.arange(at, at + fed)])
            chosen = np.flatnonzero(np.asarray(row.action_mask, bool))
            scored_at.append(r * shape[1] + before[chosen])
            tokens.append(arranged.starts[i] + chosen)
            at += fed
    arrays = (input_ids, position_ids, segments, np.concatenate(scored_at), np.concatenate(tokens))
    return MicroBatch(*map(torch.from_numpy, arrays))


def block_mask(segments: Tensor) -> Tensor:
    """Boolean mask [R, 1, L, L] from segments [R, L]: causal, to the prompt and the own segment only.

    The diagonal is true everywhere, so that a padding query has something to attend to and stays finite.
    """
    length = segments.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool, device=segments.device).tril()
    query, key = segments[:, :, None], segments[:, None, :]
    visible = causal & ((key == 0) | (key == query)) & (query >= 0)
    return (visible | torch.eye(length, dtype=torch.bool, device=segments.device))[:, None]

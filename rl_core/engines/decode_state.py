"""Rows between two tokens: what attention has to remember of them, and the logits of their next token.

Shapes: P prompts, R rows, H key-value heads, C columns (prompt and completion), D head size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from rl_core.models import Policy

SHARED_PREFIX_MIN = 8
"""A common beginning of fewer tokens is cheaper to compute once per prompt than in a pass of its own."""


class BufferLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """Keys and values of one layer in buffers [R, H, C, D], of which the first `used` columns are filled.

    The dynamic cache of transformers copies everything at every token; this one writes one column.
    """

    is_sliding = False

    def __init__(self, capacity: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.capacity, self.used = capacity, 0
        self.buffers: tuple[Tensor, Tensor] | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.buffers = self._empty(key_states, len(key_states)), self._empty(value_states, len(value_states))
        self.is_initialized = True

    def _empty(self, like: Tensor, rows: int) -> Tensor:
        return like.new_empty(rows, like.shape[1], self.capacity, like.shape[3])

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append [R, H, n, D] and return everything so far, [R, H, used, D]."""
        if self.buffers is None:
            self.lazy_initialization(key_states, value_states)
        assert self.buffers is not None
        start, self.used = self.used, self.used + key_states.shape[2]
        for buffer, states in zip(self.buffers, (key_states, value_states), strict=True):
            buffer[:, :, start : self.used] = states
        return self.buffers[0][:, :, : self.used], self.buffers[1][:, :, : self.used]

    def choose(self, rows: Tensor, spare: int) -> None:
        """Keep the rows `rows` (one may come several times) with room for `spare` further columns."""
        assert self.buffers is not None
        old, self.capacity = self.buffers, self.used + spare
        self.buffers = self._empty(old[0], len(rows)), self._empty(old[1], len(rows))
        for buffer, new in zip(old, self.buffers, strict=True):
            new[:, :, : self.used] = buffer[rows, :, : self.used]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.used + query_length, 0

    def get_seq_length(self) -> int:
        return self.used

    def get_max_length(self) -> int:
        return self.capacity


class DecodeState:
    """The rows of one batch, at first one per prompt; `choose` repeats and drops rows, `advance` adds a token to each.

    Attributes:
        logits: [R, V], float32, of the next token of every row.
    """

    logits: Tensor

    def __init__(self, policy: Policy, prompts: Sequence[Sequence[int]]) -> None:
        """Prefill: what all prompts begin with once, the rest of each prompt padded on the left."""
        self.policy = policy
        self.lengths = np.array([len(prompt) for prompt in prompts])
        # the last token of a prompt is never shared: its logits are wanted for every prompt
        shared = _shared_tokens([prompt[:-1] for prompt in prompts])
        width = int(self.lengths.max()) - shared
        count = policy.model.config.get_text_config().num_hidden_layers
        self.layers = [BufferLayer(shared + width) for _ in range(count)]
        self.cache = Cache(layers=list(self.layers))
        if shared:
            head = torch.tensor([prompts[0][:shared]])
            self._forward(head, torch.arange(shared)[None], torch.ones(1, shared, shared, dtype=torch.bool).tril())
            self._choose_layers(np.zeros(len(prompts), np.int64), width)
        ids = torch.full((len(prompts), width), policy.pad_id)
        self.real = torch.ones(len(prompts), shared + width, dtype=torch.bool)  # [R, C]: no padding
        for row, prompt in enumerate(prompts):
            pads = shared + width - len(prompt)
            self.real[row, shared : shared + pads] = False
            ids[row, pads:] = torch.tensor(prompt[shared:])
        positions = (self.real.cumsum(1) - 1)[:, shared:].clamp(min=0)
        columns = torch.arange(shared + width)
        causal, itself = columns <= columns[shared:, None], columns == columns[shared:, None]
        # padding looks at itself, or its attention would be 0/0
        self._forward(ids, positions, (self.real[:, None] & causal) | itself)

    def choose(self, rows: npt.NDArray[np.int64], spare: int) -> None:
        """Keep the rows `rows` (one may come several times), with room for `spare` further tokens."""
        self._choose_layers(rows, spare)
        index = torch.from_numpy(rows)
        self.real, self.lengths = self.real[index], self.lengths[rows]
        self.logits = self.logits[index.to(self.logits.device)]

    def advance(self, tokens: Tensor) -> None:
        """Append one token per row, [R]."""
        self.real = torch.nn.functional.pad(self.real, (0, 1), value=True)
        self._forward(tokens[:, None], torch.from_numpy(self.lengths)[:, None], self.real[:, None])
        self.lengths = self.lengths + 1

    def _choose_layers(self, rows: npt.NDArray[np.int64], spare: int) -> None:
        index = torch.from_numpy(rows).to(self.policy.device)
        for layer in self.layers:
            layer.choose(index, spare)

    def _forward(self, ids: Tensor, positions: Tensor, mask: Tensor) -> None:
        """`ids` and `positions` [R, n]; `mask` [R, n, C], true where a position sees a column."""
        model: Any = self.policy.model
        device = self.policy.device
        # as numbers to add to the scores, or the attention kernel would convert the mask again in every layer
        hidden = torch.zeros(mask.shape, dtype=self.policy.dtype).masked_fill_(~mask, float("-inf"))
        out = model(
            input_ids=ids.to(device),
            position_ids=positions.to(device),
            attention_mask=hidden[:, None].to(device),
            cache=self.cache,
            use_cache=True,
            logits_to_keep=1,  # only the last position: [R, 1, V]
        )
        self.logits = out.logits[:, -1].float()


def _shared_tokens(prompts: Sequence[Sequence[int]]) -> int:
    """How many tokens to prefill once for all prompts."""
    same = sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, zip(*prompts, strict=False)))
    return same if len(prompts) > 1 and same >= SHARED_PREFIX_MIN else 0

"""The sampler on transformers: one forward pass per token for all completions decoded together.

A prompt is prefilled once per group, and what all prompts of a batch begin with only once. Random numbers belong to
(row seed, step), so a row samples the same tokens whichever rows are beside it, up to the rounding of matrix products.

Shapes: R rows (completions being decoded), V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rl_core.engines.base import Completion, Progress, SampleRequest
from rl_core.engines.decode_state import DecodeState
from rl_core.engines.packed_linear import packed_linears
from rl_core.errors import DataError, NonFiniteError
from rl_core.models import Policy
from rl_core.seeds import uniforms

LEAVE_FRACTION = 1 / 8
"""Finished rows leave the batch when they are this share of it: copying the cache then costs less than they do."""
PACK_STEPS = 8
"""Packing the weights takes about as long as two steps, so it pays from this many on."""
BLOCK = 256
"""Tokens whose probabilities are summed first: exact running sums are then short, and none is as long as V."""


class TransformersSampler:
    """Samples from a policy; the `Sampler` of `rl_core.engines.base`."""

    def __init__(self, policy: Policy, rows_limit: int) -> None:
        """`rows_limit`: completions decoded together at most. It decides memory and speed, not what is sampled."""
        self.policy = policy
        self.rows_limit = rows_limit
        embedding: Any = policy.model.get_input_embeddings()
        self.vocabulary = int(embedding.weight.shape[0])

    def sample(
        self, requests: Sequence[SampleRequest], temperature: float, progress: Progress | None = None
    ) -> list[list[Completion]]:
        """Completions per request, in request order; log-probs in nats at `temperature` (greedy, 0: at 1)."""
        if not 0 <= temperature < float("inf"):
            raise DataError("this is no sampling temperature", expected="a number of 0 or more", got=str(temperature))
        for number, request in enumerate(requests):
            self._check(request, number)
        found = [[Completion([], [], "length") for _ in request.seeds] for request in requests]
        done = sum(len(request.seeds) for request in requests if not request.max_new_tokens)
        total = sum(len(request.seeds) for request in requests)
        model: Any = self.policy.model
        was_training = model.training
        longest = max((request.max_new_tokens for request in requests), default=0)
        model.eval()
        try:
            with (
                torch.inference_mode(),
                packed_linears(model, min(total, self.rows_limit) if longest >= PACK_STEPS else 0),
            ):
                for parts in _batches(requests, self.rows_limit):
                    completions = _decode(self.policy, parts, temperature)
                    for part in parts:
                        for sample in range(part.first, part.last):
                            found[part.index][sample] = next(completions)
                    done += sum(part.last - part.first for part in parts)
                    if progress:
                        progress(done, total)
        finally:
            model.train(was_training)
        return found

    def _check(self, request: SampleRequest, number: int) -> None:
        length = len(request.prompt_ids)
        if not length:
            raise DataError(f"request {number} has an empty prompt", expected="at least one token", got="none")
        if min(request.prompt_ids) < 0 or max(request.prompt_ids) >= self.vocabulary:
            raise DataError(
                f"request {number} holds a token that the model does not know",
                expected=f"ids from 0 to {self.vocabulary - 1}",
                got=f"ids from {min(request.prompt_ids)} to {max(request.prompt_ids)}",
            )
        if request.max_new_tokens < 0 or length + request.max_new_tokens > self.policy.context_tokens:
            raise DataError(
                f"request {number} does not fit the model's context",
                expected=f"prompt and completion of at most {self.policy.context_tokens} tokens",
                got=f"{length} and {request.max_new_tokens}",
                todo="lower generate.max_prompt_tokens or generate.max_completion_tokens",
            )


@dataclass(frozen=True)
class _Part:
    """Completions `first` to `last` (not included) of request number `index`."""

    request: SampleRequest
    index: int
    first: int
    last: int


def _batches(requests: Sequence[SampleRequest], rows_limit: int) -> Iterator[list[_Part]]:
    """Parts of at most `rows_limit` completions together; only a group above the limit is split."""
    batch: list[_Part] = []
    rows = 0
    for index, request in enumerate(requests):
        wanted = len(request.seeds) if request.max_new_tokens else 0
        for first in range(0, wanted, rows_limit):
            last = min(first + rows_limit, wanted)
            if rows + last - first > rows_limit:
                yield batch
                batch, rows = [], 0
            batch.append(_Part(request, index, first, last))
            rows += last - first
    if batch:
        yield batch


def _decode(policy: Policy, parts: Sequence[_Part], temperature: float) -> Iterator[Completion]:
    """All completions of one batch, in the order of `parts`."""
    counts = [part.last - part.first for part in parts]
    seeds = np.array([seed for part in parts for seed in part.request.seeds[part.first : part.last]], np.uint64)
    budgets = np.repeat([part.request.max_new_tokens for part in parts], counts)
    rows, steps = len(seeds), int(budgets.max())
    tokens, logprobs = np.zeros((rows, steps), np.int64), np.zeros((rows, steps), np.float32)
    ends, stopped = budgets.copy(), np.zeros(rows, bool)

    state = DecodeState(policy, [part.request.prompt_ids for part in parts])
    state.choose(np.repeat(np.arange(len(parts)), counts), steps - 1)
    here, live = np.arange(rows), np.ones(rows, bool)  # rows in the state, and which of them are unfinished
    for step in range(steps):
        drawn, scores = draw(state.logits, uniforms(seeds[here], step), temperature)
        ids = drawn.cpu().numpy()
        tokens[here, step], logprobs[here, step] = ids, scores.cpu().numpy()
        stop = live & np.isin(ids, policy.eos_ids)
        stopped[here[stop]], ends[here[stop]] = True, step + 1
        live &= ~stop & (budgets[here] > step + 1)
        if not live.any():
            break
        if live.sum() <= len(live) * (1 - LEAVE_FRACTION):
            stay = np.flatnonzero(live)
            state.choose(stay, steps - step - 1)
            here, live, drawn = here[stay], live[stay], drawn[torch.from_numpy(stay).to(drawn.device)]
        state.advance(drawn)
    for row, end in enumerate(ends):
        yield Completion(tokens[row, :end].tolist(), logprobs[row, :end].tolist(), "stop" if stopped[row] else "length")


def draw(logits: Tensor, uniform: npt.NDArray[np.float64], temperature: float) -> tuple[Tensor, Tensor]:
    """One token per row by inverse CDF, or the likeliest at temperature 0; and its log-prob.

    Args:
        logits: [R, V], float32.
        uniform: [R], in [0, 1).
        temperature: the logits are divided by it; 0 is greedy, with log-probs at temperature 1.

    Returns:
        Token ids [R] and float32 log-probs [R] in nats. A token of probability 0 is never drawn.

    Raises:
        NonFiniteError: a row has no distribution.
    """
    if temperature not in (0.0, 1.0):
        logits = logits / temperature
    peak = logits.amax(-1, keepdim=True)
    weights = (logits - peak).exp_()
    padding = -weights.shape[1] % BLOCK
    blocks = (torch.nn.functional.pad(weights, (0, padding)) if padding else weights).view(len(weights), -1, BLOCK)
    sums = blocks.sum(-1).double().cpu()  # [R, V / BLOCK]; a running sum on a GPU is not deterministic
    total = sums.sum(-1, keepdim=True)
    if not torch.isfinite(total).all():
        raise NonFiniteError("the policy's logits are not finite", expected="finite numbers", got="NaN or infinity")
    if temperature == 0.0:
        chosen = logits.argmax(-1, keepdim=True)
    else:
        block, rest = _locate(sums, torch.from_numpy(uniform)[:, None] * total)
        index = block.to(blocks.device)[:, :, None].expand(-1, 1, BLOCK)
        inside = blocks.gather(1, index)[:, 0].double().cpu()  # [R, BLOCK]
        chosen = (block * BLOCK + _locate(inside, rest)[0]).to(logits.device)
    return chosen[:, 0], (logits.gather(1, chosen) - peak)[:, 0] - total[:, 0].log().to(logits.device, logits.dtype)


def _locate(weights: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Where the running sum of `weights` [R, n] passes `target` [R, 1], and what of the target is left at that place.

    Rounding can put a target at or above the total, or a hair below zero; both ends fall on a positive weight.
    """
    running = weights.cumsum(-1)
    last = running[:, -1:]
    target = torch.minimum(target, torch.nextafter(last, torch.zeros_like(last))).clamp_(min=0)
    place = torch.searchsorted(running, target, right=True).clamp_(max=weights.shape[1] - 1)
    return place, target - (running.gather(1, place) - weights.gather(1, place))

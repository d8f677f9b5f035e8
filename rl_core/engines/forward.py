"""One forward pass over shared-prefix rows, and the proof that a model can do it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor

from rl_core.batching import MicroBatch, arrange, microbatches
from rl_core.engines.base import TrainRow
from rl_core.errors import ModelError
from rl_core.logprobs import token_logprobs
from rl_core.models import Policy


def score_tokens(
    policy: Policy, batch: MicroBatch, targets: Tensor, temperature: float, chunk_tokens: int
) -> tuple[Tensor, Tensor]:
    """Log-probs [N] (differentiable) and entropies [N] in nats of the micro-batch's tokens, float32, on the device."""
    device, model = policy.device, cast(Any, policy.model)
    hidden = model.base_model(
        input_ids=batch.input_ids.to(device),
        attention_mask=batch.to_mask(device),
        position_ids=batch.position_ids.to(device),
        use_cache=False,
    ).last_hidden_state
    scored = hidden.flatten(0, 1).index_select(0, batch.scored_at.to(device))
    head = model.get_output_embeddings().weight
    return token_logprobs(scored, head, targets.to(device), temperature, chunk_tokens)


@contextmanager
def forward_mode(model: Any, gradient_checkpointing: bool) -> Iterator[None]:
    """No dropout in any pass; with gradient checkpointing only the checkpointed layers themselves are in train mode.

    transformers recomputes activations only in layers whose `training` is true. Setting that flag on the layers and
    not on the modules inside them keeps dropout off, so that every pass computes the same numbers. All flags are put
    back.
    """
    flags = {module: module.training for module in model.modules()}
    was_on = model.is_activation_checkpointing
    model.eval()
    if gradient_checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
        for module in flags:
            module.training = bool(getattr(module, "gradient_checkpointing", False))
    try:
        yield
    finally:
        if gradient_checkpointing and not was_on:
            model.activation_checkpointing_disable()
        for module, flag in flags.items():
            module.training = flag


def check_shared_prefix(policy: Policy) -> None:
    """Compare shared-prefix rows with plain forward passes on a few tokens.

    Models that ignore a 4-D mask or position ids, carry state along the row, or change their logits after the output
    weights give other numbers there.

    Raises:
        ModelError: the model cannot be trained on shared-prefix rows.
    """
    vocabulary = int(cast(Any, policy.model).get_input_embeddings().weight.shape[0])
    prompt, *completions = ([(31 * i + 7) % vocabulary for i in ids] for ids in ((1, 2, 3), (4, 5, 6), (7, 8, 9, 10)))
    rows = [TrainRow(0, i, prompt, c, [True] * len(c), 0.0, [0.0] * len(c), True) for i, c in enumerate(completions)]
    arranged = arrange(rows)
    (batch,) = microbatches(arranged, range(len(rows)), budget=64)
    with torch.no_grad(), forward_mode(policy.model, False):
        packed, _ = score_tokens(policy, batch, arranged.completion_ids[batch.tokens], 1.0, 8)
        plain = [_plain_logprobs(policy, prompt, completion) for completion in completions]
    difference = float((packed - torch.cat(plain)).abs().max())
    limit = 1e-3 if policy.dtype == torch.float32 else 0.25
    if not difference <= limit:
        raise ModelError(
            f"{type(policy.model).__name__} gives other log-probs in shared-prefix rows than alone",
            expected=f"a difference of at most {limit:g} nats",
            got=f"{difference:g} nats",
            todo="take a decoder with full attention, rotary positions and a plain output layer (Llama, Qwen, SmolLM)",
        )


def _plain_logprobs(policy: Policy, prompt: list[int], completion: list[int]) -> Tensor:
    ids = torch.tensor([prompt + completion], device=policy.device)
    logits: Tensor = policy.model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
    return logits.float().log_softmax(-1).gather(1, ids[0, len(prompt) :, None]).squeeze(1)

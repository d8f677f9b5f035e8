"""Log-probabilities of given tokens from hidden states, in chunks: the logits of all tokens never exist at once.

Shapes: N tokens, H hidden size, V vocabulary.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from rl_core.errors import ConfigError


def token_logprobs(
    hidden: Tensor, head: Tensor, targets: Tensor, temperature: float, chunk_tokens: int
) -> tuple[Tensor, Tensor]:
    """Log-prob of each target and entropy of each distribution softmax(hidden · headᵀ / temperature).

    Only `chunk_tokens` × V logits exist at a time, in the forward and in the backward pass. Logits are float32 from the
    product on, whatever the type of the weights.

    Args:
        hidden: [N, H], the states whose logits score the targets.
        head: [V, H], output weights.
        targets: [N], token ids.
        temperature: the sampling temperature of the rollouts; more than 0.
        chunk_tokens: tokens whose logits exist at the same time.

    Returns:
        log-probs [N] float32 in nats, differentiable in `hidden` and `head`, and entropies [N] float32 in nats, not
        differentiable.

    Raises:
        ConfigError: a temperature that is not a positive number.
    """
    if not (math.isfinite(temperature) and temperature > 0):
        raise ConfigError(
            "log-probs for training need a sampling temperature above 0",
            expected="a positive number",
            got=str(temperature),
            todo="set generate.temperature above 0; greedy sampling is for evaluation only",
        )
    logprobs, entropy = _TokenLogprobs.apply(hidden, head, targets, temperature, chunk_tokens)  # type: ignore[no-untyped-call]
    return logprobs, entropy


def _logits(hidden: Tensor, head: Tensor, temperature: float) -> Tensor:
    logits = F.linear(hidden, head).float()
    return logits.div_(temperature) if temperature != 1.0 else logits


class _TokenLogprobs(torch.autograd.Function):
    """The gradient of log softmax(z)[y] in z is onehot(y) - softmax(z); keeping only logsumexp(z) is enough for it.

    So the backward pass recomputes a chunk's logits with one product and works in that one buffer, instead of keeping
    or differentiating through the chain logits → log_softmax → gather.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, targets: Tensor, temperature: float, chunk_tokens: int
    ) -> tuple[Tensor, Tensor]:
        logprobs, entropy, logsumexp = (hidden.new_empty(len(targets), dtype=torch.float32) for _ in range(3))
        for at in range(0, len(targets), chunk_tokens):
            part = slice(at, at + chunk_tokens)
            z = _logits(hidden[part], head, temperature)
            top = z.amax(-1, keepdim=True)
            z.sub_(top)
            chosen = z.gather(1, targets[part, None]).squeeze(1)
            exp = z.exp()
            total = exp.sum(-1)
            log_total = total.log()
            logprobs[part] = chosen - log_total
            # H = log Σe^z - Σ z e^z / Σe^z, the batched dot product needing no third [chunk, V] buffer.
            entropy[part] = log_total - torch.linalg.vecdot(exp, z) / total
            logsumexp[part] = log_total + top.squeeze(1)
        ctx.save_for_backward(hidden, head, targets, logsumexp)
        ctx.temperature, ctx.chunk_tokens = temperature, chunk_tokens
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None, None, None]:
        hidden, head, targets, logsumexp = ctx.saved_tensors
        weight = grads[0] / ctx.temperature
        grad_hidden = torch.empty_like(hidden)
        grad_head = torch.zeros_like(head, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        for at in range(0, len(targets), ctx.chunk_tokens):
            part = slice(at, at + ctx.chunk_tokens)
            z = _logits(hidden[part], head, ctx.temperature)
            z.sub_(logsumexp[part, None]).exp_().mul_(-weight[part, None])
            z[torch.arange(len(z), device=z.device), targets[part]] += weight[part]
            z = z.to(head.dtype)
            grad_hidden[part] = z @ head
            if grad_head is None:
                continue
            if head.dtype == torch.float32:
                grad_head.addmm_(z.T, hidden[part])
            else:
                grad_head += z.T @ hidden[part]
        return grad_hidden, None if grad_head is None else grad_head.to(head.dtype), None, None, None

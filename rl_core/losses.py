"""Token-level losses, flat over the tokens of a micro-batch. Losses are minimised; nothing here averages.

Shapes: N tokens, S sequences of the micro-batch. `token_weights` turns the per-token loss into the step's one number.

Three policies: `sampler` chose the tokens, `old` is the policy at the start of the update, `current` has the gradient.
Per sampled token, in log-probs: ratio = exp(current - old), w = exp(old - sampler), d = current - reference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rl_core.algorithms import LossName
from rl_core.config import AggregationName, KlName

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to this many nats on both sides before `exp`; beyond it the token has no gradient."""
LOGPROB_FLOOR = -1e5
"""A log-prob of -inf is read as this many nats, so that differences of log-probs stay defined."""


@dataclass(frozen=True, kw_only=True)
class TokenBatch:
    """The tokens of one micro-batch. Values at positions where `mask` is false are never read, whatever they are.

    Attributes:
        logprobs: [N] nats, log-prob of each token under the current policy at the sampling temperature, with gradient.
        entropy: [N] nats, entropy of the current policy at each token's position.
        old_logprobs: [N] nats, the same tokens at the start of the update. For a single optimizer step per iteration
            pass `logprobs.detach()`: the ratio is then 1 and its gradient intact.
        sampler_logprobs: [N] nats, the same tokens as the sampler reported them.
        advantages: [N], advantage of each token.
        mask: [N] bool, true where the policy chose the token and the token takes part in the loss.
        sequence_ids: [N] long, which sequence of the micro-batch (0 to `sequences` - 1) a token belongs to.
        sequences: number of sequences S.
        ref_logprobs: [N] nats under the frozen reference, or null where no KL term is wanted.
    """

    logprobs: Tensor
    entropy: Tensor
    old_logprobs: Tensor
    sampler_logprobs: Tensor
    advantages: Tensor
    mask: Tensor
    sequence_ids: Tensor
    sequences: int
    ref_logprobs: Tensor | None = None


@dataclass(frozen=True)
class TokenLoss:
    """A loss and its metrics, 0 wherever the mask is false.

    Attributes:
        loss: [N], with gradient.
        metrics: name to [N], detached; a metric is their sum over the number of masked-in tokens.
        peaks: name to scalar, detached: take the maximum (`_max`) or the minimum (`_min`) over micro-batches. Empty
            where no token is masked in.
    """

    loss: Tensor
    metrics: dict[str, Tensor] = field(default_factory=dict)
    peaks: dict[str, Tensor] = field(default_factory=dict)


def _clean(values: Tensor, mask: Tensor) -> Tensor:
    """At least float32, 0 where masked out, before any arithmetic: NaN times 0 is NaN, in the backward pass too."""
    kept = torch.where(mask, values, 0.0)
    return kept.to(torch.promote_types(kept.dtype, torch.float32))


def _logprobs(values: Tensor, mask: Tensor) -> Tensor:
    return _clean(values, mask).clamp(min=LOGPROB_FLOOR)


def policy_loss(
    batch: TokenBatch,
    *,
    loss: LossName = "ppo_clip",
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
) -> TokenLoss:
    """Per-token policy loss and its metrics.

    `ppo_clip` (1707.06347; separate bounds as in 2503.14476): max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)). With
    `dual_clip` c (1912.09729) a token of negative advantage loses at most -c A.
    `reinforce`: -sg(r) A logprob. At ratio 1 its gradient is that of `ppo_clip`.

    NaN at an unmasked position stays NaN, so that the learner sees it and refuses the step.
    """
    mask = batch.mask
    logprobs = _logprobs(batch.logprobs, mask)
    advantages = _clean(batch.advantages, mask)
    log_ratio = logprobs - _logprobs(batch.old_logprobs, mask).detach()
    ratio = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    if loss == "reinforce":
        token_loss, metrics = _reinforce(ratio, advantages, logprobs)
    else:
        token_loss, metrics = _ppo_clip(ratio, advantages, clip_low, clip_high, dual_clip)
    log_w = (_logprobs(batch.old_logprobs, mask) - _logprobs(batch.sampler_logprobs, mask)).detach()
    metrics |= _policy_terms(batch, log_ratio.detach(), ratio.detach()) | mismatch_terms(log_w)
    return TokenLoss(
        loss=torch.where(mask, token_loss, 0.0),
        metrics={name: torch.where(mask, value, 0.0) for name, value in metrics.items()},
        peaks=_peaks(mask, log_ratio.detach(), log_w),
    )


def _reinforce(ratio: Tensor, advantages: Tensor, logprobs: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    return -ratio.detach() * advantages * logprobs, {}


def _ppo_clip(
    ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float, dual_clip: float | None
) -> tuple[Tensor, dict[str, Tensor]]:
    raw = -advantages * ratio
    clipped = -advantages * ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    active = clipped > raw
    # `where`, not `maximum`: a tie would give half of the gradient to each side.
    loss = torch.where(active, clipped, raw)
    metrics = {
        "policy/clip_frac_low": (active & (advantages < 0)).float(),
        "policy/clip_frac_high": (active & (advantages > 0)).float(),
    }
    if dual_clip is not None:
        bound = -dual_clip * advantages
        bounded = (advantages < 0) & (loss > bound)
        loss = torch.where(bounded, bound, loss)
        metrics["policy/dual_clip_frac"] = bounded.float()
    return loss, metrics


def _policy_terms(batch: TokenBatch, log_ratio: Tensor, ratio: Tensor) -> dict[str, Tensor]:
    return {
        "policy/entropy": _clean(batch.entropy.detach(), batch.mask),
        "policy/ratio": ratio,
        "policy/approx_kl": _k3(log_ratio),
        "policy/ratio_clamp_frac": (log_ratio.abs() > LOG_RATIO_LIMIT).float(),
    }


def mismatch_terms(log_w: Tensor) -> dict[str, Tensor]:
    """Per-token terms whose means say how far the learner's log-probs are from the sampler's; [N] in, [N] each.

    k1 = -log w and k3 = w - 1 - log w estimate KL(sampler || old) in nats per token, the mean of w is 1 where both
    agree, chi2 = w^2 - 1, and the multiplicative error is exp|log w|.
    """
    w = log_w.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    return {
        "mismatch/k1": -log_w,
        "mismatch/k3": _k3(log_w),
        "mismatch/mean_w": w,
        "mismatch/chi2": w.square() - 1.0,
        "mismatch/mult_prob_error": log_w.abs().clamp(max=LOG_RATIO_LIMIT).exp(),
    }


def _peaks(mask: Tensor, log_ratio: Tensor, log_w: Tensor) -> dict[str, Tensor]:
    if not bool(mask.any()):
        return {}
    (r_min, r_max), (w_min, w_max) = log_ratio[mask].aminmax(), log_w[mask].aminmax()
    policy = {"policy/log_ratio_max": r_max, "policy/log_ratio_min": r_min}
    return policy | {"mismatch/log_w_max": w_max, "mismatch/log_w_min": w_min}


def _k3(log_ratio: Tensor) -> Tensor:
    """exp(x) - 1 - x, exact near 0. x is clamped in both terms: a clamp inside `exp` alone flips the gradient."""
    x = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return x.expm1() - x


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, estimator: KlName) -> Tensor:
    """Per-token estimate of KL(current || reference) in nats; [N] in, [N] out.

    With d = logprobs - ref_logprobs: k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d. As a loss on samples of the current
    policy k1 has no expected gradient, k2 has that of the reverse KL, k3 that of the forward KL (2506.09477). `k3_st`
    has the value of k3 and the gradient of k2. Only k3 reads d clamped to `LOG_RATIO_LIMIT`.
    """
    d = logprobs - ref_logprobs
    if estimator == "k1":
        return d
    k2 = d.square() / 2.0
    if estimator == "k2":
        return k2
    k3 = _k3(-d)
    return k3 if estimator == "k3" else k3.detach() + (k2 - k2.detach())


def kl_loss(batch: TokenBatch, estimator: KlName) -> TokenLoss:
    """KL term to the reference, not weighted by the ratio. Raises `ValueError` without reference log-probs."""
    if batch.ref_logprobs is None:
        raise ValueError("a KL loss needs the reference's log-probs of the batch")
    logprobs = _logprobs(batch.logprobs, batch.mask)
    reference = _logprobs(batch.ref_logprobs, batch.mask).detach()
    kl = kl_estimate(logprobs, reference, estimator)
    clamped = (logprobs - reference).detach().abs() > LOG_RATIO_LIMIT
    return TokenLoss(
        loss=torch.where(batch.mask, kl, 0.0),
        metrics={
            "policy/kl": kl_estimate(logprobs, reference, "k3").detach(),
            "policy/kl_clamp_frac": clamped.float(),
        },
    )


def step_totals(token_counts: Sequence[int]) -> tuple[int, int]:
    """(total_tokens, total_sequences) of an optimizer step from the masked-in tokens of each of its sequences.

    A sequence without such a token (empty, or masked out as truncated) is not counted; one of a group without signal,
    or one rejected later, is.
    """
    return sum(token_counts), sum(count > 0 for count in token_counts)


def token_weights(
    mode: AggregationName,
    token_counts_per_sequence: Tensor,
    *,
    total_tokens: int,
    total_sequences: int,
    norm_length: int,
) -> Tensor:
    """Weight of every token of a sequence, so that the step's loss is the plain sum of weight times token loss.

    Args:
        mode: `token_mean` 1/N; `seq_mean_token_mean` 1/(B L_i); `seq_mean_token_sum` 1/B; `seq_sum_fixed_norm`
            1/(B norm_length) (2503.20783).
        token_counts_per_sequence: [S] L_i, masked-in tokens of the sequence before any rejection.
        total_tokens: N of the whole optimizer step: all micro-batches, all ranks.
        total_sequences: B of the whole optimizer step: its sequences with at least one token.
        norm_length: constant of the run, in tokens.

    Returns:
        [S] float64; 0 for a sequence without tokens and for a step without tokens. Micro-batch losses are summed, never
        divided again by their number.
    """
    counts = token_counts_per_sequence.to(torch.float64)
    divisor = {
        "token_mean": torch.full_like(counts, float(total_tokens)),
        "seq_mean_token_mean": counts * float(total_sequences),
        "seq_mean_token_sum": torch.full_like(counts, float(total_sequences)),
        "seq_sum_fixed_norm": torch.full_like(counts, float(total_sequences) * norm_length),
    }[mode]
    used = (counts > 0) & (divisor > 0)
    return torch.where(used, 1.0 / torch.where(used, divisor, 1.0), 0.0)

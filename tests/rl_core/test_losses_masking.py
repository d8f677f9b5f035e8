"""Numbers that must not spread: masked positions, huge log-ratios, infinities, NaN."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from rl_core.losses import TokenBatch, TokenLoss, kl_loss, policy_loss, token_weights


def make_batch(logprobs: Tensor, advantages: Any, **changes: Any) -> TokenBatch:
    """A batch where everything not given is neutral: old and sampler are the current policy, all tokens count."""
    n = len(logprobs)
    fields: dict[str, Any] = {
        "logprobs": logprobs,
        "entropy": torch.ones(n),
        "old_logprobs": logprobs.detach(),
        "sampler_logprobs": logprobs.detach(),
        "advantages": torch.as_tensor(advantages, dtype=logprobs.dtype),
        "mask": torch.ones(n, dtype=torch.bool),
        "sequence_ids": torch.zeros(n, dtype=torch.long),
        "sequences": 1,
    }
    return TokenBatch(**(fields | changes))


def gradient(batch: TokenBatch, result: TokenLoss) -> list[float]:
    (grad,) = torch.autograd.grad(result.loss.sum(), batch.logprobs)
    return grad.tolist()


# -- numbers that must not spread


@pytest.mark.parametrize("gap", [1e4, -1e4, math.inf, -math.inf])
@pytest.mark.parametrize("loss", ["ppo_clip", "reinforce"])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_huge_log_ratios_stay_finite(gap: float, loss: Any, advantage: float) -> None:
    """Log-ratios of 1e4 nats and log-probs of -inf give finite losses, gradients and metrics."""
    current, other = (-gap, 0.0) if gap < 0 else (0.0, -gap)
    logprobs = torch.tensor([-abs(current), -1.0], requires_grad=True)
    other_tensor = torch.tensor([-abs(other), -1.0])
    batch = make_batch(
        logprobs, [advantage] * 2, old_logprobs=other_tensor, sampler_logprobs=other_tensor, ref_logprobs=other_tensor
    )
    for result in (policy_loss(batch, loss=loss), *(kl_loss(batch, k) for k in ("k1", "k2", "k3", "k3_st"))):
        assert torch.isfinite(result.loss).all()
        assert all(math.isfinite(g) for g in gradient(batch, result))
        assert all(torch.isfinite(m).all() for m in result.metrics.values())
    assert policy_loss(batch).metrics["policy/ratio_clamp_frac"].tolist() == [1, 0]
    assert kl_loss(batch, "k3").metrics["policy/kl_clamp_frac"].tolist() == [1, 0]


def test_both_log_probs_minus_infinity_is_ratio_one() -> None:
    logprobs = torch.tensor([-math.inf], requires_grad=True)
    result = policy_loss(make_batch(logprobs, [1.0]))
    assert result.metrics["policy/ratio"].item() == 1.0 and result.loss.item() == -1.0


def test_nan_at_an_unmasked_position_is_not_hidden() -> None:
    logprobs = torch.tensor([-1.0, math.nan], requires_grad=True)
    result = policy_loss(make_batch(logprobs, [1.0, 1.0]))
    assert torch.isfinite(result.loss).tolist() == [True, False]


def poison_everything(clean: TokenBatch, extra: int) -> TokenBatch:
    """The clean batch with masked-out positions between and after its tokens, full of values nobody may read."""
    bad = [math.nan, math.inf, -math.inf, -1e10, 120.0]
    parts: dict[str, Any] = {}
    n = len(clean.logprobs)
    order = torch.randperm(n + extra, generator=torch.Generator().manual_seed(0))
    for k, name in enumerate(("logprobs", "entropy", "old_logprobs", "sampler_logprobs", "advantages", "ref_logprobs")):
        values = getattr(clean, name)
        filler = torch.tensor([bad[(i + k) % 5] for i in range(extra)], dtype=values.dtype)
        parts[name] = torch.cat([values.detach(), filler])[order]
    parts["logprobs"].requires_grad_()
    mask = torch.cat([torch.ones(n, dtype=torch.bool), torch.zeros(extra, dtype=torch.bool)])[order]
    return make_batch(parts.pop("logprobs"), parts.pop("advantages"), mask=mask, **parts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("loss", ["ppo_clip", "reinforce"])
def test_masked_positions_never_matter(dtype: torch.dtype, loss: Any) -> None:
    """C56: NaN, infinities and sentinels under a false mask leave loss, metrics and gradients bit-identical."""
    generator = torch.Generator().manual_seed(1)
    values = -3 * torch.rand(4, 6, generator=generator)
    logprobs, old, sampler, ref = (v.to(dtype) for v in values)
    clean = make_batch(
        logprobs.clone().requires_grad_(),
        torch.randn(6, generator=generator).to(dtype),
        entropy=torch.rand(6, generator=generator).to(dtype),
        old_logprobs=old,
        sampler_logprobs=sampler,
        ref_logprobs=ref,
    )
    poisoned = poison_everything(clean, 7)
    where = poisoned.mask
    # the clean tokens of the poisoned batch, in its order
    names = ("logprobs", "entropy", "old_logprobs", "sampler_logprobs", "ref_logprobs")
    same = {name: getattr(poisoned, name).detach()[where] for name in names}
    clean = make_batch(same.pop("logprobs").requires_grad_(), poisoned.advantages[where], **same)
    for make in (
        lambda b: policy_loss(b, loss=loss, dual_clip=3.0),
        lambda b: kl_loss(b, "k3"),
        lambda b: kl_loss(b, "k2"),
    ):
        good, bad = make(clean), make(poisoned)
        assert torch.equal(good.loss, bad.loss[where]) and torch.count_nonzero(bad.loss[~where]) == 0
        for name, metric in good.metrics.items():
            assert torch.equal(metric, bad.metrics[name][where]), name
            assert torch.count_nonzero(bad.metrics[name][~where]) == 0, name
        assert good.peaks == bad.peaks
        (grad_good,) = torch.autograd.grad(good.loss.sum(), clean.logprobs)
        (grad_bad,) = torch.autograd.grad(bad.loss.sum(), poisoned.logprobs)
        assert torch.equal(grad_good, grad_bad[where]) and torch.count_nonzero(grad_bad[~where]) == 0


def test_poisoned_rows_leave_the_weights_bit_identical() -> None:
    """C56: one optimizer step with a fully excluded row of NaN ends in the same weights as with a tame one."""

    def step(filler: float) -> Tensor:
        torch.manual_seed(0)
        head, hidden = torch.nn.Linear(4, 5), torch.randn(5, 4)
        logprobs = head(hidden).log_softmax(-1)[:, 2]
        mask = torch.arange(5) < 3
        other = torch.where(mask, logprobs.detach() - 0.1, filler)
        advantages = torch.where(mask, 1.0, filler)
        batch = make_batch(logprobs, advantages, mask=mask, old_logprobs=other, sampler_logprobs=other)
        (policy_loss(batch).loss.sum() / 3).backward()
        assert head.weight.grad is not None and head.weight.grad.abs().max() > 0
        return head.weight.detach() - 0.1 * head.weight.grad

    assert torch.equal(step(-1.0), step(math.nan)) and torch.equal(step(-1.0), step(math.inf))


def test_fully_masked_batch_is_zero_with_zero_gradients() -> None:
    """C55: nothing masked in gives loss 0, finite zero gradients and no extremes; also for no tokens at all."""
    logprobs = torch.tensor([math.nan, -1.0], requires_grad=True)
    batch = make_batch(logprobs, [1.0, math.inf], mask=torch.zeros(2, dtype=torch.bool))
    result = policy_loss(batch)
    weight = token_weights("token_mean", torch.tensor([0]), total_tokens=0, total_sequences=0, norm_length=1)
    loss = (weight[batch.sequence_ids] * result.loss).sum()
    loss.backward()
    assert loss.item() == 0.0 and logprobs.grad is not None and logprobs.grad.tolist() == [0.0, 0.0]
    assert result.peaks == {}
    assert policy_loss(make_batch(torch.zeros(0, requires_grad=True), [])).loss.shape == (0,)


def test_kl_loss_needs_a_reference() -> None:
    with pytest.raises(ValueError, match="reference"):
        kl_loss(make_batch(torch.zeros(1, requires_grad=True), [1.0]), "k3")

"""Chunked log-probs against hand numbers and against plain autograd."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rl_core.errors import ConfigError
from rl_core.logprobs import token_logprobs

LOGITS = torch.tensor([[2.0, 1.0, 0.0]])  # hidden states whose logits under the identity head are themselves


def _reference(
    hidden: torch.Tensor, head: torch.Tensor, targets: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    z = torch.log_softmax((hidden @ head.T).float() / temperature, -1)
    return z.gather(1, targets[:, None]).squeeze(1), -(z.exp() * z).sum(-1)


@pytest.mark.parametrize(
    ("temperature", "target", "logprob", "entropy"),
    [
        (1.0, 0, -0.407606, 0.832396),
        (1.0, 2, -2.407606, 0.832396),
        (0.7, 0, -0.260118, 0.650573),
        (0.7, 2, -3.117261, 0.650573),
        (2.0, 0, None, 1.020191),
        (0.5, 0, -0.142932, None),
    ],
)
def test_hand_numbers(temperature: float, target: int, logprob: float | None, entropy: float | None) -> None:
    """C57: log-prob and entropy at the sampling temperature."""
    got, got_entropy = token_logprobs(LOGITS, torch.eye(3), torch.tensor([target]), temperature, 4)
    if logprob is not None:
        assert float(got) == pytest.approx(logprob, abs=1e-6)
    if entropy is not None:
        assert float(got_entropy) == pytest.approx(entropy, abs=1e-6)


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan"), float("inf")])
def test_temperature_must_be_positive(temperature: float) -> None:
    """C57: temperature 0 is refused for training."""
    with pytest.raises(ConfigError, match="above 0"):
        token_logprobs(LOGITS, torch.eye(3), torch.tensor([0]), temperature, 4)


@pytest.mark.parametrize("chunk", [1, 3, 7, 64])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_equals_plain_autograd_for_any_chunk(chunk: int, temperature: float) -> None:
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(7, 5, generator=generator, dtype=torch.float32, requires_grad=True)
    head = torch.randn(11, 5, generator=generator, requires_grad=True)
    targets = torch.randint(0, 11, (7,), generator=generator)
    weights = torch.randn(7, generator=generator)

    got, entropy = token_logprobs(hidden, head, targets, temperature, chunk)
    gradients = torch.autograd.grad((got.exp() * weights).sum(), (hidden, head))
    wanted, wanted_entropy = _reference(hidden, head, targets, temperature)
    expected = torch.autograd.grad((wanted.exp() * weights).sum(), (hidden, head))

    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(entropy, wanted_entropy, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradients, expected, rtol=1e-5, atol=1e-6)
    assert not entropy.requires_grad


def test_bfloat16_weights_give_float32_logprobs() -> None:
    generator = torch.Generator().manual_seed(4)
    hidden = torch.randn(6, 8, generator=generator).bfloat16().requires_grad_()
    head = torch.randn(13, 8, generator=generator).bfloat16().requires_grad_()
    targets = torch.arange(6)
    got, _ = token_logprobs(hidden, head, targets, 1.0, 4)
    got.sum().backward()  # type: ignore[no-untyped-call]
    wanted, _ = _reference(hidden.detach(), head.detach(), targets, 1.0)
    exact, exact_head = hidden.detach().float().requires_grad_(), head.detach().float().requires_grad_()
    _reference(exact, exact_head, targets, 1.0)[0].sum().backward()  # type: ignore[no-untyped-call]
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.detach(), wanted, rtol=1e-6, atol=1e-6)
    for grad, oracle in ((hidden.grad, exact.grad), (head.grad, exact_head.grad)):
        assert grad is not None and grad.dtype == torch.bfloat16 and oracle is not None
        torch.testing.assert_close(grad.float(), oracle, rtol=0.05, atol=0.05)


def test_large_logits_stay_finite() -> None:
    got, entropy = token_logprobs(LOGITS * 1e4, torch.eye(3), torch.tensor([2]), 1.0, 1)
    assert float(got) == -2e4
    assert float(entropy) == 0.0


def test_frozen_head_gets_no_gradient() -> None:
    hidden = LOGITS.clone().requires_grad_()
    got, _ = token_logprobs(hidden, torch.eye(3), torch.tensor([0]), 1.0, 1)
    (grad,) = torch.autograd.grad(got.sum(), hidden)
    torch.testing.assert_close(grad, torch.tensor([[1.0, 0.0, 0.0]]) - LOGITS.softmax(-1))


class _Largest(TorchDispatchMode):
    """Records the largest tensor with a vocabulary axis that any operation makes."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.vocabulary = vocabulary
        self.rows = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, torch.Tensor) and tensor.dim() == 2 and tensor.shape[1] == self.vocabulary:
                self.rows = max(self.rows, tensor.shape[0])
        return result


def test_logits_of_all_tokens_never_exist() -> None:
    hidden, head = torch.randn(40, 3, requires_grad=True), torch.randn(101, 3, requires_grad=True)
    with _Largest(101) as seen:
        got, _ = token_logprobs(hidden, head, torch.zeros(40, dtype=torch.int64), 1.0, 8)
        got.sum().backward()  # type: ignore[no-untyped-call]
    assert seen.rows == 8

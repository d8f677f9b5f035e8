"""Schedule by hand numbers; AdamW against the formula written out."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import nn

from rl_core.config import LearnerConfig
from rl_core.engines.optimizer import Optimizer, learning_rate


@pytest.mark.parametrize(
    ("schedule", "wanted"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]),
        ("cosine", [0.5, 1.0, 1.0, 0.5 + math.sqrt(0.125), 0.5, 0.5 - math.sqrt(0.125), 0.0]),
    ],
)
def test_schedule(schedule: str, wanted: list[float]) -> None:
    """Two steps of warm-up in a run of six; the seventh entry is past the end."""
    config = LearnerConfig(lr=1.0, warmup_steps=2, schedule=schedule)  # type: ignore[arg-type]
    assert [learning_rate(config, step, 6) for step in range(1, 8)] == pytest.approx(wanted, abs=1e-12)


def test_warmup_longer_than_the_run() -> None:
    config = LearnerConfig(lr=1.0, warmup_steps=10, schedule="cosine")
    assert [learning_rate(config, step, 4) for step in (1, 4)] == pytest.approx([0.1, 0.4])


def _step(optimizer: Optimizer, model: nn.Linear, config: LearnerConfig, gradient: list[float], lr: float) -> float:
    model.weight.grad = torch.tensor([gradient], dtype=model.weight.dtype)
    optimizer.collect()
    norm = optimizer.gradient_norm()
    optimizer.apply(config, lr, norm)
    return norm


def test_adamw_by_the_formula() -> None:
    """Clipping to norm 1, then decoupled decay and bias-corrected moments (1711.05101), in float64 by hand."""
    config = LearnerConfig(betas=(0.8, 0.9), eps=1e-8, weight_decay=0.1, max_grad_norm=1.0)
    model = nn.Linear(2, 1, bias=False)
    start = model.weight.detach().double().clone()
    optimizer = Optimizer(model)
    theta, m, v = start.clone(), torch.zeros(1, 2, dtype=torch.float64), torch.zeros(1, 2, dtype=torch.float64)
    for t, (gradient, lr) in enumerate((([3.0, 4.0], 0.1), ([0.3, -0.4], 0.05), ([-6.0, 8.0], 0.01)), start=1):
        norm = _step(optimizer, model, config, gradient, lr)
        assert norm == pytest.approx(math.hypot(*gradient))
        g = torch.tensor([gradient], dtype=torch.float64) / max(1.0, math.hypot(*gradient))
        m, v = 0.8 * m + 0.2 * g, 0.9 * v + 0.1 * g * g
        theta = theta * (1 - lr * 0.1)
        theta = theta - lr * (m / (1 - 0.8**t)) / ((v / (1 - 0.9**t)).sqrt() + 1e-8)
    torch.testing.assert_close(model.weight.detach().double(), theta, rtol=1e-5, atol=1e-6)
    assert (optimizer.step, optimizer.applied) == (3, 3)


def test_master_weights_keep_what_bfloat16_loses(tmp_path: Path) -> None:
    """Steps of 1e-4 on weights of 1 are below bfloat16's resolution, add up in the master, and survive a reload."""
    config = LearnerConfig(betas=(0.0, 0.0), max_grad_norm=10.0)

    def make() -> tuple[nn.Linear, Optimizer]:
        model = nn.Linear(2, 1, bias=False).to(torch.bfloat16)
        with torch.no_grad():
            model.weight.fill_(1.0)
        return model, Optimizer(model)

    model, optimizer = make()
    for _ in range(10):
        _step(optimizer, model, config, [1.0, -1.0], 1e-4)
    assert model.weight.tolist() == [[1.0, 1.0]]
    optimizer.save(tmp_path)
    model, optimizer = make()
    optimizer.load(tmp_path)
    for _ in range(30):
        _step(optimizer, model, config, [1.0, -1.0], 1e-4)
    assert model.weight.float().tolist() == [[pytest.approx(0.996, abs=2e-3), pytest.approx(1.004, abs=4e-3)]]
    assert model.weight.tolist() != [[1.0, 1.0]]
    optimizer.save(tmp_path)
    from safetensors.torch import load_file

    master = load_file(tmp_path / "optimizer.safetensors")["master.weight"]
    torch.testing.assert_close(master, torch.tensor([[0.996, 1.004]]), rtol=1e-5, atol=1e-6)


def test_gradients_of_micro_batches_add_up_in_float32() -> None:
    model = nn.Linear(1, 1, bias=False).to(torch.bfloat16)
    optimizer = Optimizer(model)
    for gradient in (256.0, 1.0, 1.0):  # bfloat16 would lose the ones: 256 + 1 = 256
        model.weight.grad = torch.tensor([[gradient]], dtype=torch.bfloat16)
        optimizer.collect()
    assert optimizer.gradient_norm() == 258.0

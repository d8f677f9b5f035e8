"""AdamW with a schedule, float32 master weights and a state that survives a reload bit for bit."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from rl_core.config import LearnerConfig
from rl_core.errors import ModelError

FORMAT = 1


def learning_rate(config: LearnerConfig, step: int, total_steps: int) -> float:
    """Learning rate of optimizer step `step` (from 1) of a run of `total_steps`.

    Warm-up is linear and reaches the peak at step `warmup_steps`. The decay starts from the peak at the first step
    after it and is 0 once `total_steps` are done, so that the last step of the run still learns.
    """
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    done = min(1.0, (step - 1 - config.warmup_steps) / max(1, total_steps - config.warmup_steps))
    if config.schedule == "linear":
        return config.lr * (1.0 - done)
    return config.lr * 0.5 * (1.0 + math.cos(math.pi * done))


@dataclass(frozen=True)
class Snapshot:
    """The state before a step: counters, and copies of master weights and moments."""

    step: int
    applied: int
    tensors: list[Tensor]


class Optimizer:
    """AdamW (1711.05101, decoupled weight decay) over the trainable parameters of a model.

    Attributes:
        step: optimizer steps taken in the run, skipped ones included; the schedule's position.
        applied: steps that changed the weights; Adam's own count, for its bias correction.
    """

    def __init__(self, model: nn.Module) -> None:
        self.step = 0
        self.applied = 0
        self._weights = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._masters = {
            name: p if p.dtype == torch.float32 else p.detach().float() for name, p in self._weights.items()
        }
        # fused: one pass over memory per parameter instead of about ten.
        self._adamw = torch.optim.AdamW(self._masters.values(), fused=True)

    def collect(self) -> None:
        """Add the gradients of a backward pass to the float32 sums; for float32 weights autograd has done it."""
        for name, weight in self._weights.items():
            master = self._masters[name]
            if master is weight or weight.grad is None:
                continue
            master.grad = weight.grad.float() if master.grad is None else master.grad.add_(weight.grad)
            weight.grad = None

    def gradient_norm(self) -> float:
        """Global 2-norm of the summed gradients; not finite if any gradient is not."""
        grads = [master.grad for master in self._masters.values() if master.grad is not None]
        return float(torch.nn.utils.get_total_norm(grads)) if grads else 0.0

    def apply(self, config: LearnerConfig, lr: float, norm: float) -> None:
        """Scale gradients of global norm `norm` to at most `max_grad_norm`, take one step, forget the gradients."""
        masters = list(self._masters.values())
        for master in masters:
            if master.grad is None:  # every parameter takes every step, so that one count serves all of them
                master.grad = torch.zeros_like(master)
        if norm > config.max_grad_norm:
            torch.nn.utils.clip_grads_with_norm_(masters, config.max_grad_norm, torch.tensor(norm))
        (group,) = self._adamw.param_groups
        group |= {"lr": lr, "betas": config.betas, "eps": config.eps, "weight_decay": config.weight_decay}
        self._adamw.step()
        self._publish()
        self.forget_gradients()
        self.step += 1
        self.applied += 1

    def skip(self) -> None:
        """Count a step that changes nothing."""
        self.step += 1

    def forget_gradients(self) -> None:
        for name, weight in self._weights.items():
            weight.grad = self._masters[name].grad = None

    def snapshot(self) -> Snapshot:
        """A copy of everything `apply` changes: one to three times the float32 weights in memory."""
        return Snapshot(self.step, self.applied, [t.detach().clone() for t in self._tensors().values()])

    def restore(self, snapshot: Snapshot) -> None:
        """Back to the snapshot, bit for bit."""
        self.step, self.applied = snapshot.step, snapshot.applied
        if not snapshot.applied:
            self._adamw.state.clear()
        with torch.no_grad():
            for target, copy in zip(self._tensors().values(), snapshot.tensors, strict=True):
                target.copy_(copy)
        self._publish()

    def save(self, folder: Path) -> None:
        """Write `optimizer.safetensors` (moments and, where they are not the weights, masters) and `state.json`."""
        folder.mkdir(parents=True, exist_ok=True)
        everything = self._tensors()
        stored = {key: everything[key].detach().contiguous() for key, _ in self._stored_names(self.applied)}
        save_file(stored, folder / "optimizer.safetensors")
        state = {"applied": self.applied, "format": FORMAT, "step": self.step}
        (folder / "state.json").write_text(json.dumps(state, indent=2, sort_keys=True) + "\n", encoding="utf-8")

    def load(self, folder: Path) -> None:
        """Take over the state that `save` wrote for the weights the model holds now.

        Raises:
            ModelError: no state there, another format, or a state of another model.
        """
        try:
            state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
            tensors = load_file(folder / "optimizer.safetensors")
            found, step, applied = state["format"], int(state["step"]), int(state["applied"])
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            raise ModelError(
                "the optimizer state of the checkpoint cannot be read",
                expected="trainer/state.json and trainer/optimizer.safetensors",
                got=f"{type(error).__name__}: {error}",
                todo="continue from a checkpoint that this project wrote",
            ) from error
        if found != FORMAT:
            raise ModelError("the optimizer state has another format", expected=str(FORMAT), got=str(found))
        shapes = {key: master.shape for key, master in self._stored_names(applied)}
        if shapes != {key: tensor.shape for key, tensor in tensors.items()}:
            raise ModelError("the optimizer state belongs to another model", expected="the same parameters and shapes")
        self.step, self.applied = step, applied
        self._adamw.state.clear()
        with torch.no_grad():
            for name, master in self._masters.items():
                if f"master.{name}" in tensors:
                    master.copy_(tensors[f"master.{name}"])
                if applied:
                    self._adamw.state[master] = {
                        "step": torch.tensor(float(applied), device=master.device),
                        "exp_avg": tensors[f"exp_avg.{name}"].to(master.device),
                        "exp_avg_sq": tensors[f"exp_avg_sq.{name}"].to(master.device),
                    }
        self._publish()

    def _stored_names(self, applied: int) -> list[tuple[str, Tensor]]:
        """(key in the file, its master weight): moments once a step was applied; masters apart from the weights."""
        kinds = ["exp_avg", "exp_avg_sq"] if applied else []
        names = [(f"{kind}.{name}", master) for kind in kinds for name, master in self._masters.items()]
        apart = [(f"master.{name}", m) for name, m in self._masters.items() if m is not self._weights[name]]
        return names + apart

    def _tensors(self) -> dict[str, Tensor]:
        """Everything a step changes, by name; moments only once a step was applied."""
        found = {f"master.{name}": master for name, master in self._masters.items()}
        if self.applied:
            for moment in ("exp_avg", "exp_avg_sq"):
                found |= {f"{moment}.{name}": self._adamw.state[m][moment] for name, m in self._masters.items()}
        return found

    def _publish(self) -> None:
        with torch.no_grad():
            for name, weight in self._weights.items():
                if self._masters[name] is not weight:
                    weight.copy_(self._masters[name])

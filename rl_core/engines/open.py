"""The one place that chooses engines. On one device sampler and learner share one model object: no copy, no sync."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from rl_core.config import RunConfig
from rl_core.engines.base import Sampler
from rl_core.engines.learner_torch import TorchLearner
from rl_core.engines.sampler_transformers import TransformersSampler
from rl_core.errors import ConfigError, ModelError
from rl_core.execution import ExecutionConfig
from rl_core.models import Policy, choose_dtype, load_policy


class Engines:
    """The warm engines of one worker: one policy, a learner on the same weights, and a frozen reference if asked for.

    `digest` names the checkpoint that the weights in memory equal, or is empty while they equal none.
    """

    def __init__(self, config: RunConfig) -> None:
        self.device = _device(config.execution)
        self.dtype, self.dtype_reason = choose_dtype(config.model.dtype, self.device)
        self.digest = ""
        self.reference_digest = ""
        self._policy: Policy | None = None
        self._learner: TorchLearner | None = None
        self._reference: Policy | None = None
        # Equal runs must give equal bytes; on the CPU this costs nothing that can be measured.
        torch.use_deterministic_algorithms(True)

    @property
    def policy(self) -> Policy:
        if self._policy is None:
            raise ModelError("no policy is loaded", todo="call `load` first")
        return self._policy

    @property
    def reference(self) -> Policy:
        if self._reference is None:
            raise ModelError("no reference is loaded", todo="call `load_reference` first")
        return self._reference

    def load(self, folder: Path, digest: str) -> None:
        self._policy = self._learner = None  # let go of the old weights before the new ones take their room
        self.digest = ""
        self._policy = load_policy(folder, self.device, self.dtype)
        self.digest = digest

    def load_reference(self, folder: Path, digest: str) -> None:
        self._reference = None
        self.reference_digest = ""
        self._reference = load_policy(folder, self.device, self.dtype)
        self._reference.model.requires_grad_(False)
        self.reference_digest = digest

    def sampler(self, config: RunConfig) -> Sampler:
        return TransformersSampler(self.policy, config.execution.generate_rows)

    def learner(self, folder: Path) -> TorchLearner:
        """The learner at the loaded policy; its optimizer continues from the checkpoint in `folder`."""
        if self._learner is None:
            learner = TorchLearner(self.policy)
            if (folder / "trainer").is_dir():
                learner.load_trainer_state(folder)
            self._learner = learner
        # From here on the weights may change; `adopt` gives them a name again.
        self.digest = ""
        return self._learner

    @property
    def has_learner(self) -> bool:
        """The learner is warm, so that nothing of the checkpoint is read."""
        return self._learner is not None

    def scorer(self) -> TorchLearner:
        """A learner at the loaded policy whose weights are not to change: the warm one, or one without a state."""
        return self._learner or TorchLearner(self.policy)

    def adopt(self, digest: str) -> None:
        self.digest = digest

    def measured(self) -> dict[str, Any]:
        return {
            "device": str(self.device),
            "dtype": str(self.dtype).removeprefix("torch."),
            "dtype_reason": self.dtype_reason,
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
        }


def _device(execution: ExecutionConfig) -> torch.device:
    cuda = torch.cuda.is_available()
    if execution.device == "cuda" and not cuda:
        raise ConfigError(
            "execution.device is cuda, but torch sees no CUDA device", todo="set execution.device = 'cpu'"
        )
    return torch.device("cuda" if cuda and execution.device != "cpu" else "cpu")

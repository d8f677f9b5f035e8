"""The worker: one process that holds warm engines and executes stages. A hang or an out-of-memory kill costs a stage.

The flow process never imports torch. A request names the policy digest it needs; an engine that holds it loads nothing.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_core.config import RunConfig
from rl_core.environments.base import Environment, open_environment
from rl_core.errors import WorkerError
from rl_core.fingerprint import canonical_json
from rl_core.manifest import Ref, content_digest
from rl_core.recipes import build_config, config_json
from tasks.processes.child import ChildProcess, serve
from tasks.stage import StageContext, load_stage
from tasks.storage.datasets import read_rows
from tasks.storage.files import storage_errors, verify

if TYPE_CHECKING:
    from rl_core.engines.learner_torch import TorchLearner
    from rl_core.engines.open import Engines
    from rl_core.models import Policy
    from tasks.scoring.pool import RewardPool

Message = dict[str, Any]


class Services:
    """What a stage may use inside the worker: engines, reward processes, the environment; opened when first used."""

    def __init__(self, log_dir: Path) -> None:
        self._log_dir = log_dir
        self._environments: dict[str, Environment] = {}
        self._pool: RewardPool | None = None
        self._pool_key = ""
        self._engines: Engines | None = None
        self._engines_key = ("", "")

    def environment(self, config: RunConfig) -> Environment:
        key = canonical_json([config.environment.model_dump(mode="json"), config.seed])
        if key not in self._environments:
            self._environments[key] = open_environment(config.environment, config.seed, read_rows)
        return self._environments[key]

    def rewards(self, config: RunConfig) -> RewardPool:
        """Reward processes for these rewards; started anew when the rewards or their limits change."""
        from tasks.scoring.pool import RewardPool

        execution = config.execution
        rewards = [reward.model_dump(mode="json", exclude={"weight"}) for reward in config.rewards]
        limits = [config.scoring.timeout_seconds, execution.reward_processes, execution.reward_batch_rows]
        key = canonical_json([rewards, limits])
        if self._pool is None or key != self._pool_key:
            self.close_rewards()
            self._pool = RewardPool(
                list(config.rewards),
                processes=execution.reward_processes,
                batch_rows=execution.reward_batch_rows,
                timeout_seconds=config.scoring.timeout_seconds,
                log_dir=self._log_dir,
            )
            self._pool_key = key
        self._pool.rewards = {reward.name: reward for reward in config.rewards}
        return self._pool

    def close_rewards(self) -> None:
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def engines(self, config: RunConfig) -> Engines:
        from rl_core.engines.open import Engines

        key = (config.execution.device, config.model.dtype)
        if self._engines is None or key != self._engines_key:
            self._engines = None  # the old weights go first
            self._engines, self._engines_key = Engines(config), key
        return self._engines

    def policy(self, ref: Ref, config: RunConfig) -> Policy:
        """The policy of that digest, verified before it is loaded; nothing is read when the engine holds it."""
        engines = self.engines(config)
        if engines.digest != ref.digest:
            verify(Path(ref.path), ref.digest)
            engines.load(Path(ref.path), ref.digest)
        return engines.policy

    def learner(self, ref: Ref, config: RunConfig) -> TorchLearner:
        """A learner at that policy, with the optimizer state of its checkpoint. Raises `ModelError` without one."""
        from tasks.lineage.trainer_states import require_trainer_state

        self.policy(ref, config)
        engines = self.engines(config)
        if not engines.has_learner:
            require_trainer_state(Path(ref.path))
        return engines.learner(Path(ref.path))

    def scorer(self, ref: Ref, config: RunConfig) -> TorchLearner:
        """A learner at that policy for log-probs only; no optimizer state is read."""
        self.policy(ref, config)
        return self.engines(config).scorer()

    def reference(self, ref: Ref, config: RunConfig) -> Policy:
        """The frozen reference policy, beside the policy that is trained."""
        engines = self.engines(config)
        if engines.reference_digest != ref.digest:
            verify(Path(ref.path), ref.digest)
            engines.load_reference(Path(ref.path), ref.digest)
        return engines.reference

    def adopt(self, digest: str) -> None:
        """The weights in memory are now the checkpoint of that digest."""
        if self._engines is not None:
            self._engines.adopt(digest)

    def measured(self) -> dict[str, Any]:
        base = {"host": platform.node(), "pid": os.getpid()}
        return base | (self._engines.measured() if self._engines else {})


def _inspect(config: RunConfig, services: Services) -> Message:
    """Digests of what the config names; raises the user's mistakes before anything is paid for."""
    from rl_core.rewards.contract import reward_digest

    environment = services.environment(config)
    first = environment.prompt("train", 0)
    environment.prompt("heldout", 0)
    columns = sorted(first.data)
    return {
        "dtype": str(services.engines(config).dtype).removeprefix("torch."),
        "environment": environment.digest,
        "heldout": environment.size("heldout"),
        "rewards": {reward.name: reward_digest(reward, columns) for reward in config.rewards},
    }


def _perform(context: StageContext, name: str, services: Services, progress: Callable[[Message], None]) -> Message:
    stage = load_stage(name)
    with storage_errors(context.output):
        outcome, files = stage.perform(context, services, lambda done, total: progress({"done": done, "total": total}))
    if name == "train":
        services.adopt(content_digest(files))
    return {
        "rows": outcome.rows,
        "metrics": outcome.metrics,
        "state": outcome.state,
        "measured": {**services.measured(), **outcome.measured},
        "files": [file.model_dump() for file in files],
    }


def _handle(message: Message, services: Services, progress: Callable[[Message], None]) -> Message:
    match message["op"]:
        case "inspect":
            return _inspect(build_config(message["config"], "run config"), services)
        case "perform":
            return _perform(StageContext.from_dict(message["context"]), message["stage"], services, progress)
        case "fetch_model":
            from rl_core.models import fetch_model

            with storage_errors(Path(message["folder"])):
                fetch_model(message["name"], Path(message["folder"]))
            return {}
    raise WorkerError(f"the worker does not know the operation {message['op']!r}")


class Worker:
    """The flow process's end: starts the worker when first needed, and again after it died or was killed."""

    def __init__(self, log_dir: Path, threads: int | None = None) -> None:
        self._log_dir = log_dir
        self._threads = threads or len(os.sched_getaffinity(0))
        self._child: ChildProcess | None = None

    def request(
        self, message: Message, timeout_seconds: float | None = None, progress: Callable[[Message], None] | None = None
    ) -> Message:
        if self._child is not None and not self._child.alive:
            self.close()
        if self._child is None:
            self._log_dir.mkdir(parents=True, exist_ok=True)
            self._child = ChildProcess(
                "tasks.worker", [str(self._log_dir)], self._log_dir / "worker.log", _environment(self._threads)
            )
        return self._child.request(message, timeout_seconds, progress)

    def inspect(self, config: RunConfig) -> Message:
        return self.request({"op": "inspect", "config": config_json(config)}, timeout_seconds=300)

    def close(self) -> None:
        if self._child is not None:
            self._child.close()
            self._child = None


def _environment(threads: int) -> dict[str, str]:
    """Set before torch is imported: a fixed thread count and bitwise repeatable GEMMs make equal runs equal."""
    return {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "MKL_CBWR": "AVX2,STRICT",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }


def main() -> None:
    services = Services(Path(sys.argv[2]))
    try:
        serve(lambda message, progress: _handle(message, services, progress), int(sys.argv[1]))
    finally:
        services.close_rewards()


if __name__ == "__main__":
    main()

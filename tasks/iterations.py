"""Which iterations of a run are complete, where the next one starts, and what each is made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rl_core.config import RunConfig
from rl_core.errors import ConfigError, RunError
from rl_core.manifest import Ref
from rl_core.recipes import apply_overrides, build_config, config_json, override_key
from rl_core.stages import STAGES
from tasks.live.adjustment_log import AdjustmentLog
from tasks.storage.files import folder_digest, read_manifest
from tasks.storage.store import RunStore

FIXED = ("name", "iterations", "model.source", "execution.threads")
"""Settings of a whole run: a rerun of one iteration cannot change them."""


@dataclass(frozen=True)
class Position:
    """Where an iteration starts: its number, the policy it reads, the prompts consumed before it."""

    iteration: int
    policy: Ref
    cursor: int


class Iterations:
    """The iterations of an open run, as their records on disk have them."""

    def __init__(self, store: RunStore, config: RunConfig, base_model: Ref) -> None:
        self._store = store
        self._config = config
        self._start = Position(0, base_model, 0)
        self._records: dict[int, dict[str, Any]] = {}
        self._log = AdjustmentLog(store)

    # -- where to go on -----------------------------------------------------------------------------------------------
    def resume_position(self) -> Position:
        """The first iteration that is not complete, or whose inputs have changed since it was made."""
        passed = self._passed()
        # The policy to go on from is read as a whole: a checkpoint that lost a bit is made again.
        while len(passed) > 1 and not self._intact(passed[-1].policy):
            passed.pop()
        return passed[-1]

    def complete(self) -> int:
        """How many iterations, from the first on, are complete and made from one another."""
        return self._passed()[-1].iteration

    def _passed(self) -> list[Position]:
        passed = [self._start]
        while passed[-1].iteration < self._config.iterations:
            following = self._following(passed[-1])
            if following is None:
                break
            passed.append(following)
        return passed

    def position(self, iteration: int) -> Position:
        """Where a given iteration starts. Raises `RunError` when an earlier one is not complete."""
        position = self._start
        while position.iteration < iteration:
            following = self._following(position)
            if following is None:
                raise RunError(
                    f"iteration {position.iteration} of run {self._store.name!r} is not complete",
                    expected=f"complete iterations before {iteration}",
                    todo=f"continue the run first: rlstages run {self._store.name}",
                )
            position = following
        return position

    def next_to_begin(self) -> int:
        """The first iteration that has not begun: none of it is on disk, or what is there would be made anew."""
        at = self._start
        while (record := self._store.iteration(at.iteration)) and self._fits(record, at):
            following = self._after(record)
            if following is None:
                return at.iteration + 1
            at = following
        return at.iteration

    def _following(self, at: Position) -> Position | None:
        record = self._store.iteration(at.iteration)
        if not record or not record["complete"] or not self._fits(record, at):
            return None
        if any(read_manifest(self._store.path / made["folder"]) is None for made in record["stages"].values()):
            return None
        return self._after(record)

    def _fits(self, record: dict[str, Any], at: Position) -> bool:
        """The iteration was made from what it would start from now, with the adjustments it is to have."""
        made_from = (record["policy"]["digest"], record["cursor"], record.get("adjustments", []))
        return made_from == (at.policy.digest, at.cursor, self._log.applying(at.iteration))

    def _after(self, record: dict[str, Any]) -> Position | None:
        """Where the iteration after this one starts, as far as this one has got."""
        generated, trained = (record["stages"].get(stage) for stage in ("generate", "train"))
        manifest = read_manifest(self._store.path / generated["folder"]) if generated and trained else None
        if manifest is None:
            return None
        cursor = manifest.state["cursor"]
        assert isinstance(cursor, int)
        return Position(record["iteration"] + 1, Ref(path=trained["folder"], digest=trained["digest"]), cursor)

    def _intact(self, policy: Ref) -> bool:
        return folder_digest(self._store.resolve(policy)) == policy.digest

    # -- what one is made of ------------------------------------------------------------------------------------------
    def begin(self, at: Position, overrides: list[str] | None = None) -> None:
        """Open the record of an iteration; `overrides` replace those it was made with before.

        From now on no adjustment of the run reaches it.
        """
        with self._log.locked():
            self._log.reload()
            record = self._store.iteration(at.iteration) or {"iteration": at.iteration, "overrides": [], "stages": {}}
            if overrides is not None:
                record["overrides"] = overrides
            record |= {"policy": at.policy.model_dump(), "cursor": at.cursor, "complete": False}
            record["adjustments"] = self._log.applying(at.iteration)
            self._records[at.iteration] = record
            self.config(at.iteration)  # an override that does not fit is refused before anything is written
            self._store.iteration_dir(at.iteration).mkdir(parents=True, exist_ok=True)
            self._store.write_iteration(at.iteration, record)

    def begin_evaluation(self, policy: int, overrides: list[str]) -> None:
        """Prepare a stand-alone evaluation of a policy: it lies beside the run's own and enters no iteration record."""
        self._records[policy - 1] = {"overrides": overrides, "cursor": 0, "detached": True}

    def is_detached(self, iteration: int) -> bool:
        """What runs under this number is a stand-alone evaluation, not the run's own."""
        return bool(self._records.get(iteration, {}).get("detached"))

    def add(self, iteration: int, stage: str, made: dict[str, str]) -> None:
        """Write down which output of a stage the iteration is made of."""
        record = self._records.get(iteration)
        if record is None or self.is_detached(iteration) or record["stages"].get(stage) == made:
            return
        record["stages"][stage] = made
        self._store.write_iteration(iteration, record)

    def end(self, iteration: int) -> None:
        """Mark the iteration complete; stages that it no longer has leave its record."""
        record = self._records[iteration]
        record["stages"] = {s: made for s, made in record["stages"].items() if s in self.stages_due(iteration)}
        record["complete"] = True
        self._store.write_iteration(iteration, record)

    def stages_due(self, iteration: int) -> list[str]:
        """The stages of an iteration: all six, or the first four between two evaluations."""
        config = self.config(iteration)
        due = (iteration + 1) % config.evaluate.every == 0 or iteration + 1 == config.iterations
        return list(STAGES) if due else [name for name in STAGES if name not in ("evaluate", "register")]

    def config(self, iteration: int) -> RunConfig:
        """The run's config with the adjustments that the iteration has, and the overrides of its own."""
        record = self._records.get(iteration)
        return self.overridden(iteration, record["overrides"] if record else [])

    def overridden(self, iteration: int, overrides: list[str]) -> RunConfig:
        """The config of an iteration with overrides that it may have. Raises `ConfigError` for any other."""
        if fixed := [item for item in overrides if override_key(item) in FIXED]:
            raise ConfigError(
                f"one iteration cannot have {', '.join(fixed)} of its own",
                expected=f"settings other than {', '.join(FIXED)}",
                todo="start a new run with --set name=...",
            )
        config = self._log.applied(self._config, iteration)
        if not overrides:
            return config
        return build_config(apply_overrides(config_json(config), overrides), f"iteration {iteration} with overrides")

    def is_stale(self, start: Position) -> bool:
        """An iteration was made from another policy, cursor or adjustments than it would be now."""
        record = self._store.iteration(start.iteration)
        return record is not None and not self._fits(record, start)

    def cursor(self, iteration: int) -> int:
        """Prompts consumed before the iteration."""
        record = self._records.get(iteration)
        return int(record["cursor"]) if record else 0

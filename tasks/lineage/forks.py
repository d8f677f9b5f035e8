"""Forks: runs that go on from another run's outputs. Who is whose parent is written in `run.json` and nowhere else.

A fork has a record of every iteration before its fork point, which names the parent's outputs; nothing is copied. Its
settings hold from the fork point on: which of the parent's outputs of that iteration serve it is for the fingerprints
to say.
"""

from __future__ import annotations

import os
import shutil
from typing import Any

from rl_core.adjustable import changes, settings
from rl_core.config import RunConfig
from rl_core.errors import ConfigError, RunError
from rl_core.execution import StageName
from rl_core.manifest import Ref
from rl_core.parent import Parent
from rl_core.recipes import apply_overrides, build_config, config_json, override_key
from rl_core.stages import STAGES
from tasks.iterations import FIXED, Iterations, Position
from tasks.launch import check_config
from tasks.lineage.references import lineage_lock
from tasks.lineage.trainer_states import require_trainer_state
from tasks.live.adjustment_log import Adjustment, AdjustmentLog
from tasks.provenance import code_version, now, who
from tasks.settings import STATE_DIR, runs_dir
from tasks.storage.files import publish_folder, read_manifest, storage_errors
from tasks.storage.store import RunStore
from tasks.worker import Worker

INHERITED = ("name", "seed", "model")
"""What a fork cannot change: its weights and its random numbers come out of its parent."""

Record = dict[str, Any]


def fork(run: str, new: str, iteration: int, from_stage: StageName, overrides: list[str]) -> None:
    """Make the run `new`, which goes on from `run` at a stage of an iteration. `run` may be at work meanwhile.

    Raises:
        RunError: no such run, iteration or stage yet, or `new` is there already.
        ConfigError: overrides that do not fit, or that a fork cannot have.
        ModelError: the policy to train from has lost its optimizer state.
    """
    store, point = RunStore(runs_dir(), run), Parent(run=run, iteration=iteration, stage=from_stage)
    config = _config(store, new, overrides, iteration)
    _inspect(store.config(), config)
    with lineage_lock(store.path.parent):
        child = RunStore(store.path.parent, new)
        if child.path.exists():
            raise RunError(f"there is a run or a folder {new!r} already", todo="give the fork another name")
        partial = RunStore(store.path.parent, f"{new}.partial-{os.getpid()}")
        try:
            _write(store, partial, point, config, overrides)
            publish_folder(partial.path, child.path)
        finally:
            shutil.rmtree(partial.path, ignore_errors=True)


def _config(store: RunStore, new: str, overrides: list[str], iteration: int) -> RunConfig:
    keys = [override_key(override) for override in overrides]
    if refused := [key for key in keys if key.split(".")[0] in INHERITED]:
        raise ConfigError(
            f"a fork cannot have {', '.join(refused)} of its own",
            expected=f"settings other than {', '.join(INHERITED)}",
            todo="start a new run with --set name=...",
        )
    data = apply_overrides({**store.record()["config"], "name": new}, overrides)
    config = build_config(data, f"fork {new} of {store.name}")
    if config.iterations <= iteration:
        raise ConfigError(
            f"nothing is left to do for {new}",
            expected=f"iterations > {iteration}",
            got=f"iterations = {config.iterations}",
            todo="add --set iterations=...",
        )
    return config


def _inspect(old: RunConfig, new: RunConfig) -> None:
    """Open what the overrides name, as for a new run."""
    if _named(old) != _named(new):
        worker = Worker(STATE_DIR / "logs")
        try:
            check_config(new, worker)
        finally:
            worker.close()


def _named(config: RunConfig) -> list[Any]:
    """What has to exist outside the config."""
    return [config.environment, config.evaluate.problems, [(r.function, r.params) for r in config.rewards]]


def _write(store: RunStore, child: RunStore, point: Parent, config: RunConfig, overrides: list[str]) -> None:
    iterations = Iterations(store, store.config(), store.base_model())
    done = iterations.complete()
    if point.iteration > done:
        raise RunError(
            f"run {store.name!r} has not got to iteration {point.iteration}",
            expected=f"0 to {done}, as {done} iterations are complete",
            got=str(point.iteration),
            todo=f"continue it first: rlstages run {store.name}",
        )
    position = iterations.position(point.iteration)
    child.create(config, store.base_model(), code_version(), point)
    numbers = _inherit_adjustments(store, child, point.iteration, config, overrides)
    records = [record for k in range(point.iteration) if (record := store.iteration(k)) is not None]
    due = Iterations(child, config, child.base_model()).stages_due(point.iteration)
    if point.stage not in due:
        raise RunError(f"iteration {point.iteration} has no stage {point.stage}", todo="see evaluate.every")
    stages = _made_before(store, position, point, iterations.is_stale(position))
    _check_states(store, position, point, stages, config)
    old = (store.iteration(point.iteration) or {}).get("overrides", []) if stages else []
    own = [item for item in overrides if override_key(item) not in FIXED]
    begun = {"iteration": point.iteration, "overrides": [*old, *own] if old else [], "stages": stages}
    begun |= {"policy": position.policy.model_dump(), "cursor": position.cursor, "complete": False}
    begun["adjustments"] = AdjustmentLog(child).applying(point.iteration)
    for record in [*records, begun]:
        if record is not begun:
            record["adjustments"] = [numbers[old] for old in record.get("adjustments", []) if old in numbers]
        folder = child.iteration_dir(record["iteration"])
        with storage_errors(folder):
            folder.mkdir(parents=True)
        child.write_iteration(record["iteration"], _seen_from(child, store, record))


def _made_before(store: RunStore, at: Position, point: Parent, stale: bool) -> Record:
    """The parent's stages of the iteration that lie before the fork point, each made from the one before."""
    record = store.iteration(at.iteration) or {"stages": {}}
    current: dict[str, str] = {"policy": at.policy.digest}
    found: Record = {}
    for name, spec in STAGES.items():
        if not point.has(at.iteration, name):
            continue
        made = record["stages"].get(name)
        manifest = read_manifest(store.folder(made["folder"])) if made else None
        if stale or manifest is None or any(current.get(read) != manifest.inputs[read].digest for read in spec.reads):
            raise RunError(
                f"run {store.name!r} has no {name} of iteration {at.iteration} to go on from",
                expected=f"--from {name}, or a stage before it",
                got=f"--from {point.stage}",
            )
        current[name], found[name] = made["digest"], made
    return found


def _check_states(store: RunStore, at: Position, point: Parent, stages: Record, config: RunConfig) -> None:
    """The first policy that the fork trains has to have its optimizer state."""
    if "train" not in stages:
        require_trainer_state(store.resolve(at.policy))
    elif point.iteration + 1 < config.iterations:
        require_trainer_state(store.folder(stages["train"]["folder"]))


def _inherit_adjustments(
    store: RunStore, child: RunStore, iteration: int, config: RunConfig, overrides: list[str]
) -> dict[int, int]:
    """Take over the live changes in force at the fork point; new number by old number.

    An override of the fork goes before them, so it becomes the last of them where one would overrule it. A change of a
    reward that the fork no longer has is left behind.
    """
    there = settings(config)
    entries = [e for e in AdjustmentLog(store).entries if e.from_iteration <= iteration and e.key in there]
    numbers = {entry.id: number for number, entry in enumerate(entries, 1)}
    log = AdjustmentLog(child)
    if entries:
        log.append([entry.model_copy(update={"id": numbers[entry.id]}) for entry in entries])
        found = log.applied(config, iteration)
        wanted = build_config(apply_overrides(config_json(found), overrides), f"fork of {store.name}")
        about: Record = {
            "at": now(),
            "by": who(),
            "why": f"set when forked from {store.name}",
            "from_iteration": iteration,
        }
        overruled = changes(found, wanted).items()
        log.append(
            [
                Adjustment(id=len(entries) + place, key=key, old=old, new=value, **about)
                for place, (key, (old, value)) in enumerate(overruled, 1)
            ]
        )
    return numbers


def _seen_from(child: RunStore, store: RunStore, record: Record) -> Record:
    """A record of `store` with its folders as `child` writes them down."""

    def moved(path: str) -> str:
        return path if os.path.isabs(path) else child.relative(store.folder(path))

    stages = {name: {**made, "folder": moved(made["folder"])} for name, made in record["stages"].items()}
    policy = Ref.model_validate(record["policy"])
    return {**record, "stages": stages, "policy": {**policy.model_dump(), "path": moved(policy.path)}}

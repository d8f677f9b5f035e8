"""A run that is open in this process: its store under lock, its worker, its tracker, and the stage runner."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rl_core.config import RunConfig
from rl_core.errors import RunError
from rl_core.fingerprint import canonical_json, fingerprint
from rl_core.manifest import FileEntry, Manifest, Ref, content_digest
from rl_core.recipes import apply_overrides, build_config, config_json
from rl_core.stages import STAGES, Facts
from tasks.stage import Mode, Outcome, Stage, StageContext, StageResult
from tasks.store import RunStore, read_manifest, storage_errors
from tasks.tracking import Tracker, open_tracker
from tasks.worker import Worker

EventKind = Literal["started", "progress", "finished", "failed", "completed"]


@dataclass(frozen=True)
class StageEvent:
    """What an observer is told: a stage started, got on, finished or failed, or a whole iteration is complete."""

    kind: EventKind
    run: str
    iteration: int
    stage: str
    done: int = 0
    total: int = 0
    result: StageResult | None = None
    error: BaseException | None = None


OBSERVERS: list[Callable[[StageEvent], None]] = []
"""Called in the flow process for every event of every open run: the terminal's bars, Prefect's progress artifact."""

_OPEN: dict[str, Session] = {}


@dataclass(frozen=True)
class Position:
    """Where an iteration starts: its number, the policy it reads, the prompts consumed before it."""

    iteration: int
    policy: Ref
    cursor: int


class Session:
    """One open run. Create it with `open_session`."""

    def __init__(self, store: RunStore) -> None:
        self.store = store
        self.config = store.config()
        self.base_model = store.base_model()
        self.worker = Worker(store.path / "logs", self.config.execution.threads)
        self.worker_seconds = 0.0
        self._facts: dict[str, Facts] = {}
        self._records: dict[int, dict[str, Any]] = {}
        self._tracker: Tracker | None = None

    # -- iterations ---------------------------------------------------------------------------------------------------
    def resume_position(self) -> Position:
        """The first iteration that is not complete, or whose inputs have changed since it was made."""
        position = Position(0, self.base_model, 0)
        while position.iteration < self.config.iterations:
            following = self._following(position)
            if following is None:
                break
            position = following
        return position

    def position(self, iteration: int) -> Position:
        """Where a given iteration starts. Raises `RunError` when an earlier one is not complete."""
        position = Position(0, self.base_model, 0)
        while position.iteration < iteration:
            following = self._following(position)
            if following is None:
                raise RunError(
                    f"iteration {position.iteration} of run {self.store.name!r} is not complete",
                    expected=f"complete iterations before {iteration}",
                    todo=f"continue the run first: rlstages run {self.store.name}",
                )
            position = following
        return position

    def _following(self, at: Position) -> Position | None:
        record = self.store.iteration(at.iteration)
        if not record or not record["complete"]:
            return None
        if record["policy"]["digest"] != at.policy.digest or record["cursor"] != at.cursor:
            return None
        manifests = {name: read_manifest(self.store.path / made["folder"]) for name, made in record["stages"].items()}
        if any(manifest is None for manifest in manifests.values()):
            return None
        generated, trained = manifests["generate"], record["stages"]["train"]
        assert generated is not None
        cursor = generated.state["cursor"]
        assert isinstance(cursor, int)
        return Position(at.iteration + 1, Ref(path=trained["folder"], digest=trained["digest"]), cursor)

    def begin_iteration(self, at: Position, overrides: list[str] | None = None) -> None:
        """Open the record of an iteration; `overrides` replace those it was made with before."""
        record = self.store.iteration(at.iteration) or {"iteration": at.iteration, "overrides": [], "stages": {}}
        if overrides is not None:
            record["overrides"] = overrides
        record |= {"policy": at.policy.model_dump(), "cursor": at.cursor, "complete": False}
        self._records[at.iteration] = record
        self.config_for(at.iteration)  # an override that does not fit is refused before anything is written
        self.store.iteration_dir(at.iteration).mkdir(parents=True, exist_ok=True)
        self.store.write_iteration(at.iteration, record)

    def begin_evaluation(self, policy: int, overrides: list[str]) -> None:
        """Prepare a stand-alone evaluation of a policy: it lies beside the run's own and enters no iteration record."""
        self._records[policy - 1] = {"overrides": overrides, "cursor": 0, "detached": True}

    def end_iteration(self, iteration: int) -> None:
        """Mark the iteration complete; stages that it no longer has leave its record."""
        record = self._records[iteration]
        record["stages"] = {s: made for s, made in record["stages"].items() if s in self.stages_due(iteration)}
        record["complete"] = True
        self.store.write_iteration(iteration, record)
        self._tell("completed", iteration, "")

    def stages_due(self, iteration: int) -> list[str]:
        """The stages of an iteration: all six, or the first four between two evaluations."""
        config = self.config_for(iteration)
        due = (iteration + 1) % config.evaluate.every == 0 or iteration + 1 == config.iterations
        return list(STAGES) if due else [name for name in STAGES if name not in ("evaluate", "register")]

    def config_for(self, iteration: int) -> RunConfig:
        record = self._records.get(iteration)
        overrides = record["overrides"] if record else []
        if not overrides:
            return self.config
        return build_config(
            apply_overrides(config_json(self.config), overrides), f"iteration {iteration} with overrides"
        )

    # -- stages -------------------------------------------------------------------------------------------------------
    def facts(self, config: RunConfig, iteration: int) -> Facts:
        key = canonical_json(
            [config.environment.model_dump(mode="json"), [r.model_dump(mode="json") for r in config.rewards]]
        )
        if key not in self._facts:
            self._facts[key] = self.worker.inspect(config)
        record = self._records.get(iteration)
        return {**self._facts[key], "cursor": record["cursor"] if record else 0, "reference": self.base_model.digest}

    def run_stage(self, stage: Stage[Any], iteration: int, inputs: dict[str, Ref], mode: Mode) -> StageResult:
        """Take the stage's output if it is there, else execute the stage and publish what it writes."""
        spec, started = stage.spec, time.monotonic()
        self._tell("started", iteration, spec.name)
        try:
            config = self.config_for(iteration)
            facts = self.facts(config, iteration)
            identity = spec.identity(config, facts)
            seed_key = [config.seed, iteration]
            mark = fingerprint(
                spec.name, spec.version, identity, seed_key, {name: ref.digest for name, ref in inputs.items()}
            )
            found = self.store.find(iteration, spec.name, mark)
            if found and mode == "reuse":
                folder, manifest, new = *found, False
            else:
                context = StageContext(
                    config=config,
                    iteration=iteration,
                    inputs={n: Ref(path=str(self.store.resolve(r)), digest=r.digest) for n, r in inputs.items()},
                    output=self.store.begin(iteration, spec.name, mark),
                    facts=facts,
                    base_model=self.base_model,
                    previous=found[0] if found else None,
                )
                folder, manifest, new = self._execute(stage, context, identity, seed_key, mark, inputs, started)
        except BaseException as error:
            self._tell("failed", iteration, spec.name, error=error)
            raise
        result = StageResult(
            stage=spec.name,
            folder=folder.relative_to(self.store.path).as_posix(),
            digest=manifest.digest,
            fingerprint=mark,
            rows=manifest.rows,
            reused=not new,
            metrics=manifest.metrics,
            state=manifest.state,
            seconds=time.monotonic() - started,
        )
        self._record(result, iteration)
        self._track(result, iteration, manifest)
        self._tell("finished", iteration, spec.name, result=result)
        return result

    def _execute(
        self,
        stage: Stage[Any],
        context: StageContext,
        identity: dict[str, Any],
        seed_key: list[int],
        mark: str,
        inputs: dict[str, Ref],
        started: float,
    ) -> tuple[Path, Manifest, bool]:
        spec = stage.spec
        try:
            outcome, files = self._perform(stage, context)
            manifest = Manifest(
                run=self.store.name,
                iteration=context.iteration,
                stage=spec.name,
                stage_version=spec.version,
                fingerprint=mark,
                identity=identity,
                seed_key=seed_key,
                inputs=inputs,
                digest=content_digest(files),
                files=files,
                rows=outcome.rows,
                metrics=outcome.metrics,
                state=outcome.state,
                measured={
                    **outcome.measured,
                    "seconds": time.monotonic() - started,
                    "finished_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                    "execution": context.config.execution.model_dump(mode="json"),
                },
                code_version=code_version(),
            )
            with storage_errors(context.output):
                return self.store.publish(context.output, manifest)
        except BaseException:
            shutil.rmtree(context.output, ignore_errors=True)
            raise

    def _perform(self, stage: Stage[Any], context: StageContext) -> tuple[Outcome, list[FileEntry]]:
        name = stage.spec.name

        def on_progress(done: int, total: int) -> None:
            self._tell("progress", context.iteration, name, done=done, total=total)

        if not stage.spec.in_worker:
            with storage_errors(context.output):
                return stage.perform(context, self.tracker, on_progress)
        before = time.monotonic()
        try:
            reply = self.worker.request(
                {"op": "perform", "stage": name, "context": context.to_dict()},
                context.config.execution.timeout_seconds.get(name),
                lambda message: on_progress(message["done"], message["total"]),
            )
        finally:
            self.worker_seconds += time.monotonic() - before
        outcome = Outcome(reply["rows"], reply["metrics"], reply["state"], reply["measured"])
        return outcome, [FileEntry.model_validate(entry) for entry in reply["files"]]

    def _record(self, result: StageResult, iteration: int) -> None:
        record = self._records.get(iteration)
        if record is None or record.get("detached"):
            return
        made = {"folder": result.folder, "fingerprint": result.fingerprint, "digest": result.digest}
        if record["stages"].get(result.stage) != made:
            record["stages"][result.stage] = made
            self.store.write_iteration(iteration, record)

    def _tell(self, kind: EventKind, iteration: int, stage: str, **more: Any) -> None:
        event = StageEvent(kind, self.store.name, iteration, stage, **more)
        for observer in list(OBSERVERS):
            observer(event)

    def _track(self, result: StageResult, iteration: int, manifest: Manifest) -> None:
        metrics = dict(manifest.metrics)
        seconds = manifest.measured.get("seconds")
        if isinstance(seconds, float):
            metrics[f"time/{result.stage}_seconds"] = seconds
        self.tracker.log_stage(result.stage, iteration, metrics, marker=result.fingerprint + result.digest)
        if result.stage == "generate":
            name = f"trajectories-{iteration:04d}"
            self.tracker.log_dataset(name, self.store.path / result.folder, result.digest, result.rows)

    # -- tracking -----------------------------------------------------------------------------------------------------
    @property
    def tracker(self) -> Tracker:
        if self._tracker is None:
            self._tracker = open_tracker(self.store, self.config)
        return self._tracker

    def close(self, failed: bool) -> None:
        self.worker.close()
        if self._tracker is not None:
            self._tracker.finish("FAILED" if failed else "FINISHED")


@contextmanager
def open_session(run: str, runs_dir: Path) -> Iterator[Session]:
    """Open a run for work: lock it, remove what dead attempts left, close its worker and tracker at the end."""
    if run in _OPEN:
        yield _OPEN[run]
        return
    store = RunStore(runs_dir, run)
    store.record()
    with store.lock():
        store.sweep()
        session = _OPEN[run] = Session(store)
        failed = True
        try:
            yield session
            failed = False
        finally:
            del _OPEN[run]
            session.close(failed)


def runs_dir() -> Path:
    """Folder of all runs: `RLSTAGES_RUNS_DIR`, or `runs` in the working directory."""
    return Path(os.environ.get("RLSTAGES_RUNS_DIR", "runs"))


def current_session(run: str) -> Session:
    if run not in _OPEN:
        raise RunError(f"run {run!r} is not open in this process", todo="call stages inside `open_session`")
    return _OPEN[run]


def code_version() -> str:
    """Version of the package and, in a checkout, the commit."""
    from importlib.metadata import version

    here = Path(__file__).resolve().parent
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=here, capture_output=True, text=True, check=False
    ).stdout.strip()
    return f"rlstages {version('rlstages')}" + (f" ({commit})" if commit else "")

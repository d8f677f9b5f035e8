"""A run that is open in this process: its store under lock, its worker, its tracker, and the stage runner."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rl_core.config import RunConfig
from rl_core.errors import RunError
from rl_core.fingerprint import canonical_json, fingerprint
from rl_core.manifest import FileEntry, Manifest, Ref, content_digest
from rl_core.stages import Facts
from tasks.attempts import note_attempt
from tasks.events import EventKind, StageEvent, tell
from tasks.iterations import Iterations
from tasks.lineage.trainer_states import Retention
from tasks.placement import check_placement, place, supersede
from tasks.provenance import code_version, now
from tasks.slots import free_own_slot
from tasks.stage import Mode, Outcome, Stage, StageContext, StageResult
from tasks.storage.files import storage_errors
from tasks.storage.store import RunStore
from tasks.tracking.tracker import Tracker, open_tracker
from tasks.worker import Worker

_PATIENCE_SECONDS = 3.0  # `doctor` holds the run while it closes its MLflow run
_OPEN: dict[str, Session] = {}


class Session:
    """One open run. Create it with `open_session`."""

    def __init__(self, store: RunStore) -> None:
        self.store = store
        self.config = store.config()
        self.base_model = store.base_model()
        self.worker = Worker(store.path / "logs", self.config.execution.threads)
        self.worker_seconds = 0.0
        self._facts: dict[str, Facts] = {}
        self.iterations = Iterations(store, self.config, self.base_model)
        self._retention = Retention(store)
        self._tracker: Tracker | None = None

    def end_iteration(self, iteration: int) -> None:
        self.iterations.end(iteration)
        self._retention.retain(self.iterations.config(iteration), iteration)
        tell(StageEvent("completed", self.store.name, iteration))

    # -- stages -------------------------------------------------------------------------------------------------------
    def facts(self, config: RunConfig, iteration: int) -> Facts:
        named = config.model_dump(mode="json", include={"seed", "model", "environment", "rewards"})
        key = canonical_json([named, config.execution.device])
        if key not in self._facts:
            self._facts[key] = self.worker.inspect(config)
        cursor, reference = self.iterations.cursor(iteration), self.base_model.digest
        return {**self._facts[key], "cursor": cursor, "reference": reference}

    def run_stage(self, stage: Stage[Any], iteration: int, inputs: dict[str, Ref], mode: Mode) -> StageResult:
        """Take the stage's output if it is there, else execute the stage and publish what it writes."""
        spec, started = stage.spec, time.monotonic()
        self._tell("started", iteration, spec.name)
        try:
            config = self.iterations.config(iteration)
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
                if mode == "execute":  # what a dead process had begun elsewhere may be older than what is asked for
                    supersede(self.store.iteration_dir(iteration) / spec.name)
                with _taken_away(self.store.partial(iteration, spec.name, mark)):
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
            folder=self.store.relative(folder),
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
                **({"detached": True} if self.iterations.is_detached(context.iteration) else {}),
                "seconds": time.monotonic() - started,
                "finished_at": now(),
                "finished_unix_seconds": time.time(),  # less "seconds": when it began, its slots in hand
                "execution": context.config.execution.model_dump(mode="json"),
            },
            code_version=code_version(),
            parent=str(parent) if (parent := self.store.parent()) else None,
        )
        with storage_errors(context.output):
            return self.store.publish(context.output, manifest)

    def _perform(self, stage: Stage[Any], context: StageContext) -> tuple[Outcome, list[FileEntry]]:
        name = stage.spec.name

        def on_progress(done: int, total: int) -> None:
            self._tell("progress", context.iteration, name, done=done, total=total)

        if not stage.spec.in_worker:
            with storage_errors(context.output):
                return stage.perform(context, self.tracker, on_progress)
        before = time.monotonic()
        try:
            if name in context.config.execution.placement:
                reply = place(name, context, self.store.name, on_progress)
            else:
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
        made = {"folder": result.folder, "fingerprint": result.fingerprint, "digest": result.digest}
        self.iterations.add(iteration, result.stage, made)

    def _tell(self, kind: EventKind, iteration: int, stage: str, **more: Any) -> None:
        tell(StageEvent(kind, self.store.name, iteration, stage, **more))

    def _track(self, result: StageResult, iteration: int, manifest: Manifest) -> None:
        if self.iterations.is_detached(iteration):
            return  # its numbers would mix with the run's own at the same step
        metrics = dict(manifest.metrics)
        seconds = manifest.measured.get("seconds")
        if isinstance(seconds, float):
            metrics[f"time/{result.stage}_seconds"] = seconds
        self.tracker.log_stage(result.stage, iteration, metrics, marker=result.fingerprint + result.digest)
        if result.stage == "generate":
            name = f"trajectories-{iteration:04d}"
            self.tracker.log_dataset(name, self.store.folder(result.folder), result.digest, result.rows)

    # -- tracking -----------------------------------------------------------------------------------------------------
    @property
    def tracker(self) -> Tracker:
        if self._tracker is None:
            self._tracker = open_tracker(self.store, self.config)
        return self._tracker

    def close(self, status: str) -> None:
        """End the worker and close the MLflow run as `FINISHED`, `FAILED` or `KILLED`."""
        self.worker.close()
        if self._tracker is not None:
            self._tracker.finish(status)


@contextmanager
def open_session(run: str, runs_dir: Path) -> Iterator[Session]:
    """Open a run for work: lock it, remove what dead attempts left, close its worker and tracker at the end."""
    if run in _OPEN:
        yield _OPEN[run]
        return
    store = RunStore(runs_dir, run)
    store.record()
    with store.lock(_PATIENCE_SECONDS):
        store.sweep()
        check_placement(store.config())
        free_own_slot(store)
        note_attempt(store)
        session = _OPEN[run] = Session(store)
        status = "KILLED"  # by a signal, unless it turns out otherwise
        try:
            yield session
            status = "FINISHED"
        except Exception:
            status = "FAILED"
            raise
        finally:
            del _OPEN[run]
            session.close(status)


@contextmanager
def _taken_away(attempt: Path) -> Iterator[None]:
    """Whatever ends an attempt early, a signal while its folder is made too, leaves nothing of it."""
    try:
        yield
    except BaseException:
        shutil.rmtree(attempt, ignore_errors=True)
        raise


def current_session(run: str) -> Session:
    if run not in _OPEN:
        raise RunError(f"run {run!r} is not open in this process", todo="call stages inside `open_session`")
    return _OPEN[run]

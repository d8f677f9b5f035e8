"""An attempt of a stage that another machine makes: one folder on shared storage that both sides know.

    runs/<run>/iterations/0003/train/placed-<fingerprint12>-<token>/
        request.json    the deployment and everything the stage may know
        output/         what the stage writes
        progress.json   replaced every few seconds as long as somebody works here
        reply.json      what the work says of itself, or the error it ended with

The run that wants the stage makes the folder, waits for `reply.json` and publishes `output` (`tasks.placement`). The
flow run of the deployment works in it (`perform_attempt`) and needs neither the run's lock nor its records. The folder
outlives either process, so that a run which is continued finds the work that went on without it.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import threading
import traceback
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rl_core.engines.base import Progress
from rl_core.errors import ConfigError, RlstagesError, RunError, StageError
from tasks.provenance import code_version
from tasks.settings import runs_dir
from tasks.stage import StageContext
from tasks.storage.files import read_json, storage_errors, write_json
from tasks.storage.store import PLACED, RunStore
from tasks.worker import Worker

BEAT_SECONDS = 2.0
_NAME = re.compile(rf"{PLACED}[0-9a-f]{{12}}-[0-9a-f]{{8}}")

Message = dict[str, Any]


@dataclass(frozen=True)
class Attempt:
    """The folder of one attempt."""

    folder: Path

    @classmethod
    def create(cls, stage_dir: Path, fingerprint: str, request: Message) -> Attempt:
        """A new attempt; `request` says what is to be done."""
        made = cls(stage_dir / f"{PLACED}{fingerprint[:12]}-{uuid.uuid4().hex[:8]}")
        with storage_errors(made.folder):
            made.output.mkdir(parents=True)
        write_json(made.folder / "request.json", request)
        return made

    @property
    def output(self) -> Path:
        return self.folder / "output"

    @property
    def request(self) -> Message | None:
        """What is to be done; null where the attempt is incomplete: its maker died, or has taken the output already."""
        return _read(self.folder / "request.json") if self.output.is_dir() else None

    @property
    def reply(self) -> Message | None:
        """`{"result": ...}` or `{"error": ...}` once the work is over."""
        return _read(self.folder / "reply.json")

    @property
    def progress(self) -> Message | None:
        """`{"beat": n, "done": d, "total": t}`; `beat` grows as long as somebody works here."""
        return _read(self.folder / "progress.json")

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


def attempts(stage_dir: Path) -> list[Attempt]:
    """All attempts in the folder of a stage, whether somebody works on them or not."""
    return [Attempt(path) for path in sorted(stage_dir.glob(f"{PLACED}*")) if path.is_dir()]


def perform_attempt(run: str, iteration: int, stage: str, name: str) -> Message:
    """Do the work of an attempt in a worker of its own, and leave the reply in its folder.

    Raises `RunError` when there is no such attempt, or it is over; and whatever the work raises.
    """
    store = RunStore(runs_dir(), run)
    attempt = Attempt(store.iteration_dir(iteration) / stage / name)
    request = attempt.request if _NAME.fullmatch(name) else None
    if request is None or attempt.reply is not None:
        raise RunError(
            f"there is nothing to do for attempt {name!r} of {run}, iteration {iteration}, {stage}",
            expected=f"an open attempt in {attempt.folder}",
            got="it is over" if request else "no such folder here",
            todo="leave `attempt` empty for a rerun; a placed stage needs the same runs folder on both machines",
        )
    try:
        context = replace(StageContext.from_dict(request["context"]), output=attempt.output)
        result = _work(store, stage, attempt, context)
    except Exception as error:  # the run that waits raises it again
        known = error if isinstance(error, RlstagesError) else None
        told = known or StageError(f"{type(error).__name__}: {error}", details=traceback.format_exc())
        write_json(attempt.folder / "reply.json", {"error": told.to_dict()})
        raise
    write_json(attempt.folder / "reply.json", {"result": result})
    return {"run": run, "iteration": iteration, "stage": stage, "rows": result["rows"]}


def _work(store: RunStore, stage: str, attempt: Attempt, context: StageContext) -> Message:
    shutil.rmtree(attempt.output)  # a flow run that is started again finds what it wrote before
    attempt.output.mkdir()
    execution = context.config.execution
    worker = Worker(store.path / "logs" / "placed", execution.threads)
    try:
        with _beating(attempt) as progress:
            _check_same(context, worker.inspect(context.config))
            reply = worker.request(
                {"op": "perform", "stage": stage, "context": context.to_dict()},
                execution.timeout_seconds.get(stage),  # type: ignore[call-overload]
                lambda message: progress(message["done"], message["total"]),
            )
    finally:
        worker.close()
    return reply | {"measured": {**reply["measured"], "placed_code_version": code_version()}}


def _check_same(context: StageContext, found: Message) -> None:
    """Code and number format here must be those that the fingerprint of the output names."""
    differing = [name for name, value in found.items() if context.facts.get(name) != value]
    if differing:
        raise ConfigError(
            f"this machine would compute something else: {', '.join(differing)} differ from the run's",
            expected=str({name: context.facts.get(name) for name in differing}),
            got=str({name: found[name] for name in differing}),
            todo="install the same code on both machines; with a GPU on one of them, set model.dtype",
        )


@contextlib.contextmanager
def _beating(attempt: Attempt) -> Iterator[Progress]:
    """Show that somebody works here, and how far the work is."""
    told, over = {"beat": 0, "done": 0, "total": 0}, threading.Event()

    def progress(done: int, total: int) -> None:
        told.update(done=done, total=total)

    def beat() -> None:
        while True:
            told["beat"] += 1
            with contextlib.suppress(OSError, RlstagesError):  # the work itself meets the same disk and says so
                write_json(attempt.folder / "progress.json", dict(told))
            if over.wait(BEAT_SECONDS):
                return

    thread = threading.Thread(target=beat, name="rlstages-beat", daemon=True)
    thread.start()
    try:
        yield progress
    finally:
        over.set()
        thread.join()


def _read(path: Path) -> Message | None:
    try:
        return read_json(path)
    except FileNotFoundError:
        return None

"""Pausing a run between two iterations: runs/<run>/paused.json is there as long as it is to wait."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import UUID

from rl_core.errors import RunError
from rl_core.section import Section
from tasks.events import StageEvent, tell
from tasks.provenance import now, who
from tasks.settings import runs_dir
from tasks.storage.files import read_json, storage_errors
from tasks.storage.store import RunStore

if TYPE_CHECKING:
    from prefect.client.schemas import OrchestrationResult
    from prefect.client.schemas.objects import FlowRun, State

    from tasks.session import Session

_POLL_SECONDS = 1.0
_log = logging.getLogger("rlstages.pausing")


class Pause(Section):
    """Who wants a run to wait, since when (UTC), and why."""

    at: str
    by: str
    why: str

    def __str__(self) -> str:
        return f"paused by {self.by} at {self.at}" + (f": {self.why}" if self.why else "")


def pause(run: str, why: str = "") -> None:
    """Let a run wait before its next iteration, now or when it is continued. Raises `RunError`: no such run."""
    store = RunStore(runs_dir(), run)
    store.record()
    record = Pause(at=now(), by=who(), why=why.strip())
    # Not under the name that `write_json` gives: a process that opens the run just now would sweep it away.
    partial = store.path / f".paused-{os.getpid()}"
    with storage_errors(store.path):
        partial.write_text(record.model_dump_json(indent=1) + "\n", encoding="utf-8")
        partial.replace(_file(store))


def resume(run: str) -> None:
    """Let a paused run go on. Raises `RunError`: no such run, or it is not paused."""
    store = RunStore(runs_dir(), run)
    store.record()
    try:
        _file(store).unlink()
    except FileNotFoundError:
        raise RunError(f"run {run!r} is not paused") from None


def paused(store: RunStore) -> Pause | None:
    """Who has paused the run; null while nobody has."""
    try:
        return Pause.model_validate(read_json(_file(store)))
    except FileNotFoundError:
        return None


def _file(store: RunStore) -> Path:
    return store.path / "paused.json"


def wait_while_paused(session: Session) -> None:
    """Wait as long as the run is paused: without a worker, and shown as paused in Prefect, whose Resume ends it too."""
    store = session.store
    found = paused(store)
    if found is None:
        return
    session.worker.close()  # its memory is somebody else's meanwhile
    message = f"{found}; `rlstages resume {store.name}` lets it go on"
    tell(StageEvent("notice", store.name, session.iterations.complete(), message=message))
    with _shown_in_prefect(message) as flow_run:
        while paused(store) is not None:
            time.sleep(_POLL_SECONDS)
            if flow_run is not None and flow_run.was_resumed():
                _file(store).unlink(missing_ok=True)
    tell(StageEvent("notice", store.name, session.iterations.complete(), message=f"{store.name} goes on"))


class _PausedFlowRun:
    """The flow run of this process, as Prefect's server shows it. The file decides: no call fails without a server."""

    def __init__(self, id_: UUID, message: str) -> None:
        self._id = id_
        self._message = message
        self._is_shown = False
        self._has_button = False

    def show(self) -> None:
        from prefect.client.orchestration import get_client
        from prefect.states import Paused, Running

        with _only_shown(), get_client(sync_client=True) as client:
            # A state of another type than Running frees the slot of a deployment with a limit, and Prefect ends a
            # process whose slot is gone: such a run is paused by name only, and has no Resume button.
            by_name = _holds_slot(client.read_flow_run(self._id))
            kind = Running if by_name else Paused
            state: State[Any] = kind(name="Paused", message=self._message)
            answer: OrchestrationResult[Any] = client.set_flow_run_state(self._id, state)
            self._is_shown = answer.state is not None and answer.state.name == "Paused"
            self._has_button = self._is_shown and not by_name

    def was_resumed(self) -> bool:
        """Whether somebody pressed Resume. Raises `RunError` when the flow run was cancelled instead."""
        from prefect.client.orchestration import get_client
        from prefect.states import Cancelled

        state = None
        with _only_shown(), get_client(sync_client=True) as client:
            flow_run = client.read_flow_run(self._id)
            state = flow_run.state
            if state is not None and state.is_cancelling() and flow_run.deployment_id is None:
                # Nobody else acts on it: a process of a worker is ended by that worker, which says Cancelled then.
                state = Cancelled(message="cancelled while paused")
                client.set_flow_run_state(self._id, state, force=True)
        if state is not None and state.is_cancelled():
            raise RunError("the flow run was cancelled while it was paused", todo="the run stays paused: resume it")
        if self._has_button and state is not None and state.is_running():
            self._is_shown = self._has_button = False
            return True
        return False

    def end(self) -> None:
        """Show it as running again."""
        from prefect.client.orchestration import get_client
        from prefect.states import Running

        with _only_shown(), get_client(sync_client=True) as client:
            if self._is_shown:
                client.set_flow_run_state(self._id, Running())


def _holds_slot(flow_run: FlowRun) -> bool:
    return flow_run.state is not None and flow_run.state.state_details.deployment_concurrency_lease_id is not None


@contextmanager
def _shown_in_prefect(message: str) -> Iterator[_PausedFlowRun | None]:
    """Around the wait. When it ends by an error or a signal, Prefect's engine sets the last state itself."""
    from prefect.context import FlowRunContext

    context = FlowRunContext.get()
    if context is None or context.flow_run is None:
        yield None
        return
    shown = _PausedFlowRun(context.flow_run.id, message)
    shown.show()
    yield shown
    shown.end()


@contextmanager
def _only_shown() -> Iterator[None]:
    """A server that does not answer costs the display, not the run."""
    try:
        yield
    except Exception as error:
        _log.warning("the pause cannot be shown in Prefect: %s", error)

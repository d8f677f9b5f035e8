"""When a run that crashes again and again has to stop: the automation that resumes it knows no end.

.state/attempts/<flow run>.json   attempts of a flow run since the run last got on
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rl_core.errors import ConfigError, StageError
from tasks import attempts
from tasks.launch import resolve_config
from tasks.live.pausing import paused
from tasks.servers.deployments import AUTO_RESUME
from tasks.settings import STATE_DIR, runs_dir
from tasks.storage.files import read_json, write_json
from tasks.storage.store import RunStore

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.objects import FlowRun

RESUMED = "goes on after a crash"
_VARIABLE = "RLSTAGES_MAX_ATTEMPTS"
_DEFAULT = 5
_KEPT_SECONDS = 30 * 86400
_POLL_SECONDS = 1.0


def is_to_resume(flow_run: FlowRun) -> bool:
    """Whether a flow run has crashed and its deployment wants it to go on."""
    crashed = flow_run.state is not None and flow_run.state.is_crashed()
    return crashed and flow_run.deployment_id is not None and AUTO_RESUME in flow_run.tags


def resume_crashed(client: SyncPrefectClient) -> list[str]:
    """Schedule every run again that `is_to_resume`; returns their names."""
    from prefect.client.schemas.filters import FlowRunFilter
    from prefect.states import AwaitingRetry

    wanted = {"state": {"type": {"any_": ["CRASHED"]}}, "tags": {"all_": [AUTO_RESUME]}}
    found = client.read_flow_runs(flow_run_filter=FlowRunFilter.model_validate(wanted), limit=200)
    resumed = [flow_run for flow_run in found if is_to_resume(flow_run)]
    for flow_run in resumed:
        client.set_flow_run_state(flow_run.id, AwaitingRetry(message=RESUMED))
    return [flow_run.name for flow_run in resumed]


@contextmanager
def counted_attempt(target: str, overrides: list[str]) -> Iterator[None]:
    """Around the whole of a training run; it is about deployed runs only.

    Ends what dead attempts have left, though their processes end with them (`tasks.processes.guardian`). A flow run
    that goes on waits here while another process works on its run: its own, where two have learned of one crash, or
    that of a person who was quicker.

    Counts the attempts of this flow run that began with the same finished stages as the one before: a machine that dies
    once a day never stops a run, a stage that kills its process always does. An attempt that somebody stopped, or whose
    run is paused, does not count. Raises `StageError` when there were `RLSTAGES_MAX_ATTEMPTS` in a row (default 5); the
    flow run then ends as failed, which nothing resumes. Whoever retries it by hand has as many attempts again.
    """
    from prefect.runtime import deployment, flow_run

    from tasks.doctor.checks import processes

    if deployment.id is None:  # nothing resumes it but a person
        yield
        return
    processes(fix=True)
    known = attempts.run_of(flow_run.id, runs_dir())
    run = known or resolve_config(target, overrides).name
    store = RunStore(runs_dir(), run)
    while known and attempts.is_worked_on(store):
        time.sleep(_POLL_SECONDS)
    path = STATE_DIR / "attempts" / f"{flow_run.id}.json"
    if not paused(store):
        _count(path, run)
    try:
        yield
    except Exception:
        raise
    except BaseException:  # stopped by a signal, which says nothing about the run
        path.unlink(missing_ok=True)
        raise


def _count(path: Path, run: str) -> None:
    most, finished = _most(), _finished_stages(runs_dir() / run)
    last = read_json(path) if path.is_file() else {"finished": -1, "attempts": 0}
    count = 1 + (last["attempts"] if last["finished"] == finished else 0)
    if count > most:
        path.unlink()
        raise StageError(
            f"run {run!r} crashed {most} times in a row before a stage was finished",
            expected="progress between two crashes",
            got=f"{finished} finished stages each time",
            todo=f"read {runs_dir() / run / 'logs'} and the worker's log, then retry this flow run",
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    _forget_old(path.parent)
    write_json(path, {"run": run, "finished": finished, "attempts": count})


def _most() -> int:
    text = os.environ.get(_VARIABLE, str(_DEFAULT))
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"{_VARIABLE} is not a number of attempts", expected="a whole number from 1 on", got=text)
    return int(text)


def _finished_stages(run: Path) -> int:
    manifests = run.glob("iterations/*/*/*/manifest.json")
    return sum(".partial-" not in manifest.parent.name for manifest in manifests)


def _forget_old(folder: Path) -> None:
    for path in folder.glob("*.json"):
        if path.stat().st_mtime < time.time() - _KEPT_SECONDS:
            path.unlink(missing_ok=True)

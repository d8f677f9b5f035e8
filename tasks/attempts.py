"""Which process works on a run, under which Prefect flow run, and which slot it holds: written down, to be told dead.

    runs/<run>/attempts.jsonl   a line per attempt: process id, host, time, flow run
    runs/<run>/slot.json        the task run that holds slots of limited tags now; gone when its stage is over

The lock says whether an attempt lives: all but the last are over, and the last is when nobody holds the lock. So a
flow run that Prefect still shows as running, and whose attempt is over, is a zombie.
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.processes.tree import was_started_before
from tasks.storage.files import read_json, write_json
from tasks.storage.store import RunStore

_KEPT = 200  # newest attempts that are remembered


def note_attempt(store: RunStore) -> None:
    """Write down that this process has begun to work on the run. Only under the run's lock."""
    from prefect.runtime import flow_run

    record = {"pid": os.getpid(), "host": platform.node(), "began_at": time.time(), "flow_run": flow_run.id}
    lines = [*(json.dumps(attempt) for attempt in attempts(store)[1 - _KEPT :]), json.dumps(record)]
    partial = store.path / f"attempts.jsonl.partial-{os.getpid()}"
    partial.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    partial.replace(store.path / "attempts.jsonl")


def attempts(store: RunStore) -> list[dict[str, Any]]:
    """All attempts, the newest last."""
    path = store.path / "attempts.jsonl"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.is_file() else []


def run_of(flow_run: str, runs: Path) -> str | None:
    """The run that a flow run has worked on before, in an attempt of its own that is over."""
    for path in sorted(runs.glob("*/attempts.jsonl")):
        if any(attempt["flow_run"] == flow_run for attempt in attempts(RunStore(runs, path.parent.name))):
            return path.parent.name
    return None


def process_lives(store: RunStore, flow_run: str) -> bool:
    """Whether the process of the newest attempt of a flow run lives on this machine."""
    found = [attempt for attempt in attempts(store) if attempt["flow_run"] == flow_run][-1:]
    return any(a["host"] == platform.node() and was_started_before(a["pid"], a["began_at"]) for a in found)


def is_worked_on(store: RunStore) -> bool:
    """Whether a living process holds the run's lock."""
    path = store.path / "lock"
    if not path.is_file():
        return False
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


@dataclass(frozen=True)
class Past:
    """What is over in a run.

    Attributes:
        flow_runs: when the last attempt of a flow run began, in seconds since 1970; the living one is not among them.
        all_flow_runs: these and the living one.
        until: what began in the run before this time, in seconds since 1970, has ended.
    """

    flow_runs: dict[str, float]
    all_flow_runs: list[str]
    until: float


def past(store: RunStore) -> Past:
    """What of a run is over, whatever Prefect says of it. Flow runs and tasks inside of a run begin under its lock."""
    until = time.time()
    lives = is_worked_on(store)
    known = [attempt for attempt in attempts(store) if attempt["flow_run"]]
    # A flow run that is tried again after a crash makes several attempts under one id.
    began = {attempt["flow_run"]: float(attempt["began_at"]) for attempt in known}
    all_flow_runs = sorted(began)
    if lives and known:
        until = began.pop(known[-1]["flow_run"])
    return Past(began, all_flow_runs, until if known else 0.0)


def note_slot(store: RunStore, task_run: str, tags: list[str]) -> None:
    write_json(_slot(store), {"task_run": task_run, "tags": tags})


def held_slot(store: RunStore) -> dict[str, Any] | None:
    """`task_run` and `tags` of the stage that holds slots, or held them when its process died."""
    return read_json(_slot(store)) if _slot(store).is_file() else None


def forget_slot(store: RunStore) -> None:
    _slot(store).unlink(missing_ok=True)


def _slot(store: RunStore) -> Path:
    return store.path / "slot.json"

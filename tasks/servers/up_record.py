"""What `rlstages up` has started, so that whoever comes later finds it and nothing else.

    .state/up.json   addresses, the process of `up` itself, and a mark that all it starts has in its environment

The mark is written down before the first process starts. A process is ours if it carries the mark: a process id that
was given to another meanwhile is never touched, and what a flow started and hid behind `setsid` is found (Linux).
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Literal, NamedTuple

from tasks import settings
from tasks.processes.tree import living, stat
from tasks.storage.files import read_json, write_json

UP_FILE = settings.STATE_DIR / "up.json"
MARK = "RLSTAGES_UP"

Role = Literal["worker", "servers"]


@dataclass(frozen=True)
class UpRecord:
    """Attributes:
    prefect_api, mlflow: addresses.
    mark: what `RLSTAGES_UP` begins with in the environment of all that was started; its role follows.
    pid, started: of the process that waits for Ctrl-C, the start in clock ticks since boot; null when detached.
    ready: whether all that belongs to it has been started and has answered.
    """

    prefect_api: str
    mlflow: str
    mark: str
    pid: int | None
    started: int | None
    ready: bool = False

    def write(self, **changes: object) -> UpRecord:
        """Write it down, with changes; returns what was written."""
        changed = replace(self, **changes)  # type: ignore[arg-type]
        write_json(UP_FILE, asdict(changed))
        return changed

    def environment(self, role: Role) -> dict[str, str]:
        return {MARK: f"{self.mark}/{role}"}

    def owner_lives(self) -> bool:
        """Whether the very process that waits for Ctrl-C is still there."""
        return self.pid is not None and start_ticks(self.pid) == self.started

    def processes(self, role: Role | None = None) -> dict[int, int]:
        """Living processes that carry the mark: their parents by their ids."""
        wanted, found = f"{MARK}={self.mark}/{role or ''}".encode(), {}
        for pid, fields, environment in living():
            if pid != os.getpid() and any(variable.startswith(wanted) for variable in environment.split(b"\0")):
                found[pid] = int(fields[1])
        return found

    def end(self, patience_seconds: float = 15.0) -> None:
        """End everything: first the worker with its flow runs, while there is a server to hear of it, then the servers.

        What has not ended within the patience is killed.
        """
        self._ask("worker", patience_seconds)
        self._ask("servers", patience_seconds)
        for _ in range(100):
            living = self.processes()
            if not living:
                break
            _signal(living, signal.SIGKILL)
            time.sleep(0.05)
        there = read_record()
        if there is not None and there.mark == self.mark:  # another `up` may have begun meanwhile
            UP_FILE.unlink(missing_ok=True)

    def _ask(self, role: Role, patience_seconds: float) -> None:
        """Ask the processes at the top of a role to end, and wait for all of it."""
        found = self.processes(role)
        _signal([pid for pid, parent in found.items() if parent not in found], signal.SIGTERM)
        deadline = time.monotonic() + patience_seconds
        while self.processes(role) and time.monotonic() < deadline:
            time.sleep(0.1)


def read_record() -> UpRecord | None:
    return UpRecord(**read_json(UP_FILE)) if UP_FILE.is_file() else None


class Pages(NamedTuple):
    """Where the pages of Prefect and MLflow are, or would be after `rlstages up` without options."""

    prefect: str
    mlflow: str
    are_up: bool


def pages() -> Pages:
    record = read_record()
    if record is not None and record.ready:
        return Pages(record.prefect_api.removesuffix("/api"), record.mlflow, True)
    return Pages(f"http://127.0.0.1:{settings.PREFECT_PORT}", f"http://127.0.0.1:{settings.MLFLOW_PORT}", False)


def start_ticks(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; null when there is none."""
    fields = stat(pid)
    return int(fields[19]) if fields else None


def _signal(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)

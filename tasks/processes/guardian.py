"""The guardian: a small process that outlives one of ours by an instant, to end what that one has started.

Children die with their parent (`process`), but what a reward function started itself, say `sleep`, has no such bond:
with the flow process killed by SIGKILL nobody would be left to end it. So the first child of a process comes with a
guardian, in a session of its own. It waits for the end of that process and kills all that carries its mark.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
import uuid
from pathlib import Path

from tasks.processes.tree import MARK, descendants

_guarded: tuple[int, str] = (0, "")  # process id, mark: a fork of ours gets a guardian of its own


def family_mark() -> str:
    """The mark that all children of this process carry; a process that has one passes it on."""
    global _guarded
    if MARK in os.environ:
        return os.environ[MARK]
    if _guarded[0] != os.getpid():
        _guarded = (os.getpid(), uuid.uuid4().hex)
        _start(*_guarded)
    return _guarded[1]


def _start(pid: int, mark: str) -> None:
    root = str(Path(__file__).resolve().parents[2])
    silent = [(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_RDWR, 0) for fd in range(3)]
    command = [sys.executable, "-S", "-P", "-m", "tasks.processes.guardian", str(pid), mark]
    os.posix_spawn(sys.executable, command, {"PYTHONPATH": root}, file_actions=silent, setsid=True)


def main() -> None:
    pid, mark = int(sys.argv[1]), sys.argv[2]
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):  # it ends with the process it guards, not before
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(ProcessLookupError):
        descriptor = os.pidfd_open(pid)
        if os.getppid() == pid:  # else it ended before we looked, and the id may be another's
            select.select([descriptor], [], [])
    for _ in range(500):
        found = descendants(-1, mark)
        for child in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(child, signal.SIGKILL)
        if not found:
            return
        time.sleep(0.01)


if __name__ == "__main__":
    main()

"""How a child process is started, what it inherits, and how it and all that it started are ended (Linux: /proc).

The kernel kills a child when the *thread* that started it ends (PR_SET_PDEATHSIG counts threads, not processes). So
all children are started by one thread that lives as long as the interpreter: `in_spawner`.

Descendants are found by parent, by session and by a mark in their environment, so that neither `setsid` nor a double
fork hides them.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

MARK, PARENT = "RLSTAGES_CHILD", "RLSTAGES_PARENT_PID"


def child_environment(extra: dict[str, str], mark: str) -> dict[str, str]:
    """The parent's environment with `extra`, its import path (working directory last), and the mark."""
    # What every interpreter has anyway stays out: it would break other Python versions started further down.
    own = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    own |= {f"{sysconfig.get_path('stdlib')}/lib-dynload"}
    paths = [os.path.abspath(entry) for entry in sys.path if not entry.endswith(".zip")]
    paths = [extra.get("PYTHONPATH", ""), *(path for path in paths if path not in own), os.getcwd()]
    path = os.pathsep.join(dict.fromkeys(filter(None, paths)))
    # The hash seed decides the order of sets: fixed, so that a rerun computes the same.
    defaults = {"PYTHONHASHSEED": "0", "PYTHONUNBUFFERED": "1"}
    return {**defaults, **os.environ, **extra, "PYTHONPATH": path, MARK: mark, PARENT: str(os.getpid())}


def kill_tree(pid: int, mark: str) -> set[int]:
    """SIGKILL a child and its descendants; returns the descendants. The caller reaps the child."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)  # stays the root of its tree and starts nothing new until the rest is gone
    killed: set[int] = set()
    for _ in range(100):
        found = descendants(pid, mark)
        for child in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(child, signal.SIGKILL)
        killed |= found
        if not found:
            break
        time.sleep(0.01)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    return killed


def stat(pid: int) -> list[str] | None:
    """Fields of /proc/<pid>/stat from the state on; null when there is no such process, or it is a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields


def was_started_before(pid: int, unix_seconds: float) -> bool:
    """Whether a living process has this id and is older: ids come again, above all after a reboot."""
    fields = stat(pid)
    if fields is None:
        return False
    boot = next(line for line in Path("/proc/stat").read_text().splitlines() if line.startswith("btime"))
    return int(boot.split()[1]) + int(fields[19]) / os.sysconf("SC_CLK_TCK") <= unix_seconds + 1.0


def living() -> Iterator[tuple[int, list[str], bytes]]:
    """Id, `stat` and environment of every living process; that of another user's is empty."""
    for name in os.listdir("/proc"):
        if name.isdigit() and (fields := stat(int(name))) is not None:
            environment = b""
            with contextlib.suppress(OSError):
                environment = Path("/proc", name, "environ").read_bytes()
            yield int(name), fields, environment


def descendants(root: int, mark: str) -> set[int]:
    """Living processes below `root`: by parent, by session, or by the mark in their environment."""
    family, parents = {root}, {}
    for pid, fields, environment in living():
        parents[pid] = int(fields[1])
        if int(fields[3]) == root or mark.encode() in environment:
            family.add(pid)
    while grown := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= grown
    return family - {root}


_orders: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
_spawner: threading.Thread | None = None
_spawner_lock = threading.Lock()


def in_spawner(start: Callable[[], Any]) -> Any:
    """Run `start` in the thread that starts all children (module docstring) and return its result."""
    global _spawner
    with _spawner_lock:
        if _spawner is None or not _spawner.is_alive():
            _spawner = threading.Thread(target=_spawn_forever, name="rlstages-spawner", daemon=True)
            _spawner.start()
    future: Future[Any] = Future()
    _orders.put((start, future))
    return future.result()


def _spawn_forever() -> None:
    while True:
        start, future = _orders.get()
        try:
            future.set_result(start())
        except BaseException as error:
            future.set_exception(error)

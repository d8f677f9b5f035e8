"""Child processes: answers, errors and progress cross the pipe; time limits, deaths and exits leave nothing behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rl_core.errors import DataError, StageError, StageTimeoutError, WorkerError
from tasks.processes.child import ChildProcess
from tasks.processes.tree import child_environment

pytestmark = pytest.mark.slow

KID = r"""
import os, subprocess, sys, threading, time
from rl_core.errors import DataError
from tasks.processes.child import serve

def handle(message, progress):
    op = message["op"]
    if op == "echo":
        return message
    if op == "progress":
        for i in range(3):
            progress({"done": i})
        return {"done": 3}
    if op == "hang":
        time.sleep(300)
    if op == "chatter":
        while True:
            progress({"x": "y" * 1000})
    if op == "user":
        raise DataError("bad row", expected="a", got="b", todo="c", details="d")
    if op == "bug":
        return {"x": 1 / 0}
    if op == "not json":
        return {"x": object()}
    if op == "signal":
        print("last words", flush=True)
        os.kill(os.getpid(), int(message["signal"]))
    if op == "exit":
        os._exit(7)
    if op == "orphan":  # the grandchild holds the pipe open while its parent is gone
        if os.fork() == 0:
            time.sleep(300)
        os._exit(5)
    if op == "breed":
        pids = [subprocess.Popen(["setsid", "sleep", "300"]).pid, subprocess.Popen(["sleep", "300"]).pid]
        return {"pids": pids}
    if op == "deaf":
        os.close(int(sys.argv[1]))
        time.sleep(300)
    return {"args": sys.argv[2:], "cwd": os.getcwd(), "path": sys.path, "env": dict(os.environ), "sid": os.getsid(0)}

if __name__ == "__main__":
    if "late" in sys.argv:
        time.sleep(300)
    serve(handle, int(sys.argv[1]))
    if "stubborn" in sys.argv:
        time.sleep(300)
"""

PARENT = r"""
import sys, threading, time
from pathlib import Path
from tasks.processes.child import ChildProcess

sys.path.insert(0, sys.argv[1])
child = ChildProcess("kid_module", [], Path(sys.argv[1], "kid.log"))
child.request({"op": "echo"}, 60)
print(child.pid, flush=True)
if sys.argv[2] == "hang":
    child.request({"op": "hang"}, None)
if sys.argv[2] == "thread":
    threading.Thread(target=lambda: child.request({"op": "hang"}, None), daemon=True).start()
    time.sleep(0.3)
"""


@pytest.fixture
def kid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., ChildProcess]]:
    (tmp_path / "kid_module.py").write_text(KID)
    monkeypatch.syspath_prepend(str(tmp_path))
    started: list[ChildProcess] = []

    def start(*args: str, **env: str) -> ChildProcess:
        started.append(ChildProcess("kid_module", list(args), tmp_path / "logs" / "kid.log", env))
        return started[-1]

    yield start
    for child in started:
        child.close()
        assert not child.alive


def _gone(pid: int) -> bool:
    """No such process; a zombie that is another process's to reap counts as gone."""
    try:
        state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state == "Z" and int(parent) != os.getpid()


def _wait_gone(pid: int, seconds: float = 3.0) -> bool:
    limit = time.monotonic() + seconds
    while not _gone(pid) and time.monotonic() < limit:
        time.sleep(0.02)
    return _gone(pid)


def test_messages_cross_unchanged(kid: Callable[..., ChildProcess]) -> None:
    """C10: half characters, NUL and megabytes pass in both directions."""
    child = kid()
    message = {
        "op": "echo",
        "text": "ok \ud83d a\x00b \u202e42",
        "long": "é" * 5_000_000,
        "n": [1.0, 1e-300, None, 2**70],
    }
    assert child.request(message, 60) == message


def test_progress_and_environment(kid: Callable[..., ChildProcess]) -> None:
    child = kid("one", "two", SPECIAL="yes")
    seen: list[dict[str, Any]] = []
    assert child.request({"op": "progress"}, 60, seen.append) == {"done": 3}
    assert seen == [{"done": 0}, {"done": 1}, {"done": 2}]
    about = child.request({"op": "about"}, 60)
    assert about["args"] == ["one", "two"] and about["cwd"] == os.getcwd() and about["env"]["SPECIAL"] == "yes"
    wanted = [os.path.abspath(entry) for entry in sys.path if not entry.endswith(".zip")]
    assert set(wanted) <= set(map(os.path.abspath, about["path"]))
    assert "lib-dynload" not in about["env"]["PYTHONPATH"]  # no standard library: it belongs to one version of Python
    assert about["sid"] == child.pid != os.getsid(0)


def test_errors_keep_their_type_and_the_child_lives_on(kid: Callable[..., ChildProcess]) -> None:
    child = kid()
    with pytest.raises(DataError) as user:
        child.request({"op": "user"}, 60)
    assert user.value.to_dict() == DataError("bad row", expected="a", got="b", todo="c", details="d").to_dict()
    with pytest.raises(StageError, match="ZeroDivisionError") as bug:
        child.request({"op": "bug"}, 60)
    assert "1 / 0" in bug.value.details
    with pytest.raises(StageError, match="not JSON serializable"):
        child.request({"op": "not json"}, 60)
    assert child.alive and child.request({"op": "echo"}, 60) == {"op": "echo"}


@pytest.mark.parametrize("op", ["hang", "chatter"])
def test_a_time_limit_ends_the_work(kid: Callable[..., ChildProcess], op: str) -> None:
    child = kid()
    family = child.request({"op": "breed"}, 60)["pids"]
    started = time.monotonic()
    with pytest.raises(StageTimeoutError, match=r"within 0\.5 s"):
        child.request({"op": op}, 0.5)
    assert time.monotonic() - started < 3
    assert not child.alive and all(_gone(pid) for pid in [child.pid, *family])
    with pytest.raises(WorkerError):
        child.request({"op": "echo"}, 5)


def test_a_time_limit_counts_while_sending(kid: Callable[..., ChildProcess]) -> None:
    """A child that never reads blocks a message larger than the pipe's buffer."""
    child = kid("late")
    with pytest.raises(StageTimeoutError):
        child.request({"op": "echo", "text": "x" * 10_000_000}, 0.5)


@pytest.mark.parametrize(
    ("message", "got"),
    [
        ({"op": "signal", "signal": 9}, "signal 9"),
        ({"op": "signal", "signal": 6}, "signal 6"),
        ({"op": "exit"}, "exit status 7"),
        ({"op": "orphan"}, "exit status 5"),
    ],
)
def test_a_death_is_reported(kid: Callable[..., ChildProcess], message: dict[str, Any], got: str) -> None:
    child = kid()
    started = time.monotonic()
    with pytest.raises(WorkerError) as caught:
        child.request(message, 60)
    assert caught.value.got == got and time.monotonic() - started < 5
    if message["op"] == "signal":
        assert "last words" in caught.value.details
    assert not child.alive and _gone(child.pid)


def test_a_child_that_cannot_start_or_closes_its_pipe(kid: Callable[..., ChildProcess], tmp_path: Path) -> None:
    child = ChildProcess("no_such_module_at_all", [], tmp_path / "none.log")
    with pytest.raises(WorkerError) as caught:
        child.request({"op": "echo"}, 60)
    assert caught.value.got == "exit status 1" and "no_such_module_at_all" in caught.value.details
    deaf = kid()
    with pytest.raises(WorkerError, match="ended before it answered") as silent:
        deaf.request({"op": "deaf"}, 60)
    assert "no answer" in silent.value.got and _gone(deaf.pid)


def test_an_interrupted_request_kills(kid: Callable[..., ChildProcess]) -> None:
    """A pipe that is out of step is never used again; the caller's own error comes through as it is."""
    child = kid()

    def interrupt(data: dict[str, Any]) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        child.request({"op": "progress"}, 60, interrupt)
    assert not child.alive


def test_close_is_polite_then_firm(kid: Callable[..., ChildProcess]) -> None:
    child, stubborn = kid(), kid("stubborn")
    family = child.request({"op": "breed"}, 60)["pids"]
    stubborn.request({"op": "echo"}, 60)
    started = time.monotonic()
    child.close()
    assert time.monotonic() - started < 2 and child._popen.returncode == 0
    assert all(_gone(pid) for pid in family)
    stubborn.close(grace_seconds=0.3)
    assert stubborn._popen.returncode == -signal.SIGKILL
    child.close()


def test_kill_from_another_thread_ends_a_request(kid: Callable[..., ChildProcess]) -> None:
    child = kid()
    child.request({"op": "echo"}, 60)
    timer = threading.Timer(0.3, child.kill)
    timer.start()
    with pytest.raises(WorkerError) as caught:
        child.request({"op": "hang"}, 60)
    timer.join()
    assert caught.value.got == "signal 9"


def test_a_child_outlives_the_thread_that_asked_for_it(kid: Callable[..., ChildProcess]) -> None:
    """The kernel counts the starting thread as the parent: a thread that ends must not take the child with it."""
    made: list[ChildProcess] = []

    def start() -> None:
        made.append(kid())
        made[0].request({"op": "echo"}, 60)

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    time.sleep(0.3)
    assert made[0].alive and made[0].request({"op": "echo"}, 60) == {"op": "echo"}


def test_nothing_leaks(kid: Callable[..., ChildProcess]) -> None:
    """C24: no descriptor and no zombie is left after children that ended in every way."""
    kid().close()
    before = sorted(os.listdir("/proc/self/fd"))
    for op in ("echo", "hang", "exit", "orphan") * 2:
        child = kid()
        with contextlib.suppress(StageError):
            child.request({"op": op}, 0.4 if op == "hang" else 60)
        child.close()
    assert sorted(os.listdir("/proc/self/fd")) == before
    listing = subprocess.run(["ps", "-o", "stat=", "--ppid", str(os.getpid())], capture_output=True, text=True)
    assert not [line for line in listing.stdout.split() if line.startswith("Z")]


def _run_parent(tmp_path: Path, how: str) -> tuple[subprocess.Popen[str], int]:
    (tmp_path / "kid_module.py").write_text(KID)
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path), how],
        stdout=subprocess.PIPE,
        text=True,
        env=child_environment({}, "test"),
    )
    assert parent.stdout is not None
    return parent, int(parent.stdout.readline())


def test_sigkill_of_the_parent_kills_the_child(tmp_path: Path) -> None:
    parent, pid = _run_parent(tmp_path, "hang")
    with parent:
        time.sleep(0.3)
        assert not _gone(pid)
        parent.kill()
        assert _wait_gone(pid)


@pytest.mark.parametrize("how", ["idle", "thread"])
def test_the_interpreter_exits_without_close(tmp_path: Path, how: str) -> None:
    """An idle child, or one busy for a daemon thread, neither holds up the exit nor survives it."""
    parent, pid = _run_parent(tmp_path, how)
    with parent:
        assert parent.wait(10) == 0
        assert _wait_gone(pid)

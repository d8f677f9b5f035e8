"""The one way rlstages runs work in child processes: a private pipe, a real time limit, no survivors (Linux).

A child is `python -m module <fd> args...` in its own session, with stdout and stderr in a log file. Messages are JSON
objects in UTF-8, each behind its length in 8 bytes; nothing is pickled. The child's module calls `serve(handler, fd)`.

A child dies with its parent: it asks the kernel for SIGKILL when the *thread* that started it ends (PR_SET_PDEATHSIG
counts threads, not processes), so every child is started by one thread that lives as long as the interpreter.
A child that is killed takes its descendants with it (`process_tree`), and so does the parent (`process_guardian`).
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from rl_core.errors import RlstagesError, StageError, StageTimeoutError, WorkerError, from_dict
from tasks.processes.guardian import family_mark
from tasks.processes.pipe import Channel, Message
from tasks.processes.tree import PARENT, child_environment, in_spawner, kill_tree

T = TypeVar("T")
_PR_SET_PDEATHSIG = 1


class _Gone(Exception):
    """The child's process has ended although its end of the pipe is still open somewhere."""


class ChildProcess:
    """A child process that answers requests, one at a time, in the order they are made.

    Args:
        module: module run with `python -m`; it must call `serve`.
        args: further command line arguments, after the pipe's file descriptor.
        log_path: file that stdout and stderr are appended to.
        env: variables set on top of the parent's. The child sees the parent's `sys.path` and working directory.
    """

    def __init__(self, module: str, args: list[str], log_path: Path, env: dict[str, str] | None = None) -> None:
        self.module, self.log_path = module, log_path
        self._mark = uuid.uuid4().hex
        self._lock = threading.Lock()
        self._deadline: float | None = None
        self._end_seen = False
        log_path.parent.mkdir(parents=True, exist_ok=True)
        family = family_mark()
        ours, theirs = socket.socketpair()
        self._channel = Channel(ours, self._check)
        try:
            with theirs, log_path.open("ab") as log:
                self._log_start = log.tell()
                command = [sys.executable, "-P", "-X", "faulthandler", "-m", module, str(theirs.fileno()), *args]
                self._popen: subprocess.Popen[bytes] = in_spawner(
                    lambda: subprocess.Popen(
                        command,
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        pass_fds=(theirs.fileno(),),
                        start_new_session=True,
                        env=child_environment(env or {}, f"{family}/{self._mark}"),  # a child of a child carries all
                    )
                )
        except BaseException:
            ours.close()
            raise
        self.pid = self._popen.pid
        _live.add(self)

    @property
    def alive(self) -> bool:
        return self._popen.returncode is None and not self._exited()

    def request(
        self, message: Message, timeout_seconds: float | None, on_progress: Callable[[Message], None] | None = None
    ) -> Message:
        """Send a message and wait for its result. One thread at a time.

        Raises:
            StageTimeoutError: no result within the limit; the child and its descendants have been killed.
            WorkerError: the child died (`got` is "signal 9" or "exit status 1"), closed its pipe or wrote no JSON.
            RlstagesError: whatever the handler raised; the child lives on.
        """
        payload = json.dumps(message).encode()
        self._deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        try:
            self._talk(lambda: self._channel.send(payload), timeout_seconds)
            while "progress" in (reply := self._talk(self._channel.receive, timeout_seconds)):
                if on_progress:
                    on_progress(reply["progress"])
        except BaseException:  # interrupted halfway: the pipe is out of step
            self.kill()
            raise
        if "error" in reply:
            raise from_dict(reply["error"])
        result: Message = reply["result"]
        return result

    def _talk(self, step: Callable[[], T], timeout_seconds: float | None) -> T:
        """One use of the pipe, its failures told as errors of ours."""
        try:
            return step()
        except StageTimeoutError as error:
            raise StageTimeoutError(
                f"{self.module} gave no answer within {timeout_seconds:g} s and was killed",
                expected=f"an answer within {timeout_seconds:g} s",
                details=self._log_tail(),
            ) from error
        except (OSError, EOFError, ValueError, _Gone) as error:
            self._wait_exit(1.0)  # a closed pipe usually means that the process is about to end by itself
            died = self._exited()
            self.kill()
            code = self._popen.returncode
            got = (f"signal {-code}" if code < 0 else f"exit status {code}") if died else f"no answer: {error!r}"
            raise WorkerError(
                f"{self.module} (process {self.pid}) ended before it answered",
                expected="an answer",
                got=got,
                todo="read its last words below; signal 9 is often the system's out-of-memory killer",
                details=self._log_tail(),
            ) from error

    def close(self, grace_seconds: float = 5.0) -> None:
        """Close the pipe, give the child time to leave by itself, then kill what is left of it. May be called twice."""
        with contextlib.suppress(OSError):
            self._channel.sock.shutdown(socket.SHUT_RDWR)
        self._wait_exit(grace_seconds)
        self.kill()

    def kill(self) -> None:
        """Kill the child and all its descendants and reap it. May be called twice and from any thread."""
        with self._lock:
            if self._popen.returncode is None:
                killed = kill_tree(self.pid, self._mark)
                self._popen.wait()
                for pid in killed:  # orphans come to us where we are process 1 or a subreaper
                    with contextlib.suppress(ChildProcessError):
                        os.waitpid(pid, os.WNOHANG)
            with contextlib.suppress(OSError):
                self._channel.sock.shutdown(socket.SHUT_RDWR)  # wakes a thread that waits in `request`
            self._channel.sock.close()
            _live.discard(self)

    def _check(self, idle: bool) -> None:
        if self._deadline is not None and time.monotonic() > self._deadline:
            raise StageTimeoutError("time is up")
        if idle and self._end_seen:
            raise _Gone
        self._end_seen = self._exited()  # believed at the second look: the last answer may still be on its way

    def _exited(self) -> bool:
        """Whether the process has ended. It stays unreaped, so that its id cannot be given to another before `kill`."""
        try:
            return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:
            return True

    def _wait_exit(self, seconds: float) -> None:
        limit = time.monotonic() + seconds
        while self.alive and time.monotonic() < limit:
            time.sleep(0.01)

    def _log_tail(self, lines: int = 20) -> str:
        with contextlib.suppress(OSError), self.log_path.open("rb") as log:
            log.seek(max(self._log_start, log.seek(0, os.SEEK_END) - 8192))
            text = log.read().decode("utf-8", "replace")
            if text.strip():
                return "\n".join([f"last lines of {self.log_path}:", *text.splitlines()[-lines:]])
        return ""


def serve(handler: Callable[[Message, Callable[[Message], None]], Message], fd: int) -> None:
    """The child's loop: answer requests until the parent closes the pipe.

    `handler(message, progress)` returns the result as JSON-plain data and may call `progress` any number of times.
    What it raises goes to the parent: an `RlstagesError` as it is, all else as a `StageError` with the traceback.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(os.environ[PARENT]):  # the parent ended before the kernel was asked
        return
    with socket.socket(fileno=fd) as sock:
        sock.set_inheritable(False)
        channel, lock = Channel(sock), threading.Lock()

        def send(payload: bytes) -> None:
            with lock:  # progress may come from several threads
                channel.send(payload)

        def progress(data: Message) -> None:
            send(json.dumps({"progress": data}).encode())

        with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
            while True:
                message = channel.receive()
                try:
                    payload = json.dumps({"result": handler(message, progress)}).encode()
                except RlstagesError as error:
                    payload = json.dumps({"error": error.to_dict()}).encode()
                except Exception as error:
                    failure = StageError(f"{type(error).__name__}: {error}", details=traceback.format_exc())
                    payload = json.dumps({"error": failure.to_dict()}).encode()
                send(payload)


_live: set[ChildProcess] = set()


@atexit.register
def _kill_all() -> None:
    for child in list(_live):
        child.kill()


os.register_at_fork(after_in_child=_live.clear)  # a fork of ours must not kill our children when it ends

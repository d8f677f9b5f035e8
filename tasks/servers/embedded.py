"""The Prefect server of a process that finds none: for this process alone, and gone with it however it ends.

Prefect's own temporary server shares the terminal's process group, so Ctrl-C ends it before the run has said goodbye,
and the run waits a minute for it; it outlives a run that is killed; and it frees no slots of dead holders.
"""

from __future__ import annotations

import atexit
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from importlib.util import find_spec
from pathlib import Path

from rl_core.errors import StageError
from tasks import settings
from tasks.processes.guardian import family_mark
from tasks.processes.tree import MARK, PARENT

START_SECONDS = 180.0
_ENV = {
    "PREFECT_UI_ENABLED": "0",
    "PREFECT__SERVER_FINAL": "1",
    # What is scheduled is for the servers and the worker of `rlstages up`.
    "PREFECT_SERVER_SERVICES_SCHEDULER_ENABLED": "false",
    "PREFECT_SERVER_SERVICES_LATE_RUNS_ENABLED": "false",
    "PREFECT_SERVER_SERVICES_FOREMAN_ENABLED": "false",
}


def start_embedded() -> str:
    """Start the server, wait until it answers, and return its API URL. Call it before prefect is imported."""
    log = settings.STATE_DIR / "logs" / "prefect-embedded.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    spec = find_spec("prefect")
    assert spec is not None and spec.origin is not None
    command = [sys.executable, "-m", "uvicorn", "--app-dir", str(Path(spec.origin).parent.parent), "--factory"]
    command += ["prefect.server.api.server:create_app", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--log-level", "error", "--lifespan", "on", "--timeout-graceful-shutdown", "2"]
    env = {**os.environ, **_ENV, MARK: f"{family_mark()}/prefect", PARENT: str(os.getpid())}
    with log.open("ab") as file:
        server = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, env=env, start_new_session=True
        )
    atexit.register(_stop, server, os.getpid())
    url = f"http://127.0.0.1:{port}/api"
    wait_for(f"{url}/health", server, log)
    return url


def wait_for(url: str, child: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until a server answers there; raise `StageError` when its process ends first, or never does."""
    deadline = time.monotonic() + START_SECONDS
    while not answers(url):
        check_alive(child, log, deadline)


def check_alive(child: subprocess.Popen[bytes], log: Path, deadline: float) -> None:
    """Wait a moment; raise when the process has ended or `deadline`, as of `time.monotonic`, is over."""
    if child.poll() is not None or time.monotonic() > deadline:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
        raise StageError(f"{log.stem} did not start", todo=f"read {log}", details=tail)
    time.sleep(0.1)


def answers(url: str) -> bool:
    """Whether a server answers there."""
    try:
        with urllib.request.urlopen(url, timeout=2) as reply:
            return bool(reply.status == 200)
    except (OSError, urllib.error.URLError):
        return False


def _stop(server: subprocess.Popen[bytes], owner: int) -> None:
    if os.getpid() != owner:  # a fork of the process that started it
        return
    server.terminate()
    try:
        server.wait(5)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()

"""A Prefect server for a benchmark: on a free port of loopback, with a database of its own, gone at the end."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Server:
    """`url` of its API, `pid` of its process, `home` with `prefect.db`."""

    url: str
    pid: int
    home: Path


@contextmanager
def prefect_server(home: Path) -> Iterator[Server]:
    """Start a server whose data lie in `home`, wait until it answers, and stop it at the end."""
    from tasks import settings
    from tasks.servers.embedded import wait_for

    settings.apply_defaults()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # an end like any other: nothing started here stays
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    home.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)]
    with (home / "server.log").open("wb") as log:
        env = os.environ | {"PREFECT_HOME": str(home)}
        server = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=env, start_new_session=True)
    url = f"http://127.0.0.1:{port}/api"
    try:
        wait_for(f"{url}/health", server, home / "server.log")
        yield Server(url, server.pid, home)
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        try:
            server.wait(15)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()

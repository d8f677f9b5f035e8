"""A Prefect server that a test may kill and start again, set up as `rlstages up` sets up its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tasks import settings


class OwnServer:
    """One server process at a time, always with the same port and the same home."""

    def __init__(self, home: Path, port: int) -> None:
        self.home, self.port = home, port
        self.api = f"http://127.0.0.1:{self.port}/api"
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def database(self) -> Path:
        return self.home / "prefect.db"

    def start(self) -> None:
        command = [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(self.port)]
        env = {**os.environ, **settings._DEFAULTS, "PREFECT_HOME": str(self.home)}
        with (self.home / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env=env, start_new_session=True
            )
        deadline = time.monotonic() + 120
        while not self.answers():
            assert self._process.poll() is None and time.monotonic() < deadline, (self.home / "server.log").read_text()
            time.sleep(0.2)

    def answers(self) -> bool:
        try:
            return httpx.get(f"{self.api}/health", timeout=1).status_code == 200
        except httpx.HTTPError:
            return False

    def kill(self) -> None:
        """As a crash of the machine would: no goodbye."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def limit(self, tag: str, slots: int) -> None:
        body = {"name": f"tag:{tag}", "limit": slots, "active": True}
        httpx.post(f"{self.api}/v2/concurrency_limits/", json=body).raise_for_status()

    def unlimit(self, tag: str) -> None:
        httpx.delete(f"{self.api}/v2/concurrency_limits/tag:{tag}").raise_for_status()

    def used(self, tag: str) -> int:
        return int(httpx.get(f"{self.api}/v2/concurrency_limits/tag:{tag}").json()["active_slots"])

    def flow_runs(self, name: str) -> list[dict[str, Any]]:
        """Flow runs of a name, the newest first."""
        body = {"flow_runs": {"name": {"any_": [name]}}, "sort": "START_TIME_DESC"}
        found: list[dict[str, Any]] = httpx.post(f"{self.api}/flow_runs/filter", json=body).json()
        return found


@pytest.fixture(scope="session")
def own_server(tmp_path_factory: pytest.TempPathFactory, free_port: Callable[[], int]) -> Iterator[OwnServer]:
    made = OwnServer(tmp_path_factory.mktemp("own-server"), free_port())
    yield made
    made.kill()


@pytest.fixture
def server(own_server: OwnServer) -> OwnServer:
    """The server, up, whatever the test before did to it."""
    if not own_server.answers():
        own_server.kill()
        own_server.start()
    return own_server


@pytest.fixture
def at_own_server(server: OwnServer, tmp_path: Path, new_project_at: Callable[..., Any]) -> Any:
    """A project folder whose Prefect server is that one."""
    return new_project_at(server.api, tmp_path / "project")


@pytest.fixture(scope="session")
def quiet_smoke(tmp_path_factory: pytest.TempPathFactory, new_project: Callable[[Path], Any]) -> dict[str, str]:
    """Digests of the smoke run that nobody disturbed."""
    project = new_project(tmp_path_factory.mktemp("quiet") / "project")
    project.call("run", "smoke")
    found: dict[str, str] = project.digests("smoke")
    assert sum("train" in name and name.endswith("model.safetensors") for name in found) == 2
    assert sum(name.endswith(".parquet") for name in found) == 2 * 6 + 1
    return found

"""Fixtures of the tests that run real flows: one Prefect server for the whole test run, one folder per test."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest


@pytest.fixture(scope="session", autouse=True)
def prefect_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A home for Prefect in this process, whichever test imports it first and wherever that test stands then."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PREFECT_HOME", str(tmp_path_factory.mktemp("home")))
        yield


def free_port() -> int:
    """A port of loopback where nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="session", name="free_port")
def free_port_() -> Callable[[], int]:
    return free_port


@pytest.fixture(scope="session")
def prefect_api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """API URL of a real Prefect server on loopback, with a database of its own."""
    home = tmp_path_factory.mktemp("prefect")
    port = free_port()
    env = os.environ | {
        "PREFECT_HOME": str(home),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "1",
        "PREFECT_SERVER_LOGGING_LEVEL": "ERROR",
    }
    command = [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)]
    with (home / "server.log").open("wb") as log:
        server = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=env, start_new_session=True)
    url = f"http://127.0.0.1:{port}/api"
    try:
        deadline = time.monotonic() + 120
        while not _answers(f"{url}/health"):
            assert server.poll() is None and time.monotonic() < deadline, (home / "server.log").read_text()
            time.sleep(0.2)
        yield url
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        try:
            server.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=1) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False


@dataclass
class Project:
    """A folder in which `rlstages` is called as a user would call it."""

    folder: Path
    env: dict[str, str] = field(default_factory=dict)

    def start(self, *arguments: str, driver: Path | None = None) -> subprocess.Popen[str]:
        """Start the command line in a process group of its own."""
        head = [sys.executable, str(driver)] if driver else [sys.executable, "-m", "flows.cli"]
        return subprocess.Popen(
            [*head, *arguments],
            cwd=self.folder,
            env=os.environ | self.env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def call(self, *arguments: str, expect: int = 0, timeout: float = 300, driver: Path | None = None) -> str:
        """Run the command line to its end; returns what it printed. Fails on another exit code than `expect`."""
        process = self.start(*arguments, driver=driver)
        try:
            output, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            raise AssertionError(f"{arguments} still ran after {timeout} s:\n{output}") from None
        assert process.returncode == expect, f"{arguments} ended with {process.returncode}:\n{output}"
        return output

    def run_folder(self, run: str) -> Path:
        return self.folder / "runs" / run

    def digests(self, run: str) -> dict[str, str]:
        """sha256 of every Parquet file, weight and trainer file of a run, by path below its folder."""
        folder, records = self.run_folder(run), ("manifest.json", "iteration.json")
        made = sorted(path for path in folder.glob("iterations/**/*") if path.is_file() and path.name not in records)
        return {path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in made}

    def wait_for(self, path: Path, process: subprocess.Popen[str]) -> None:
        """Wait until a process that was started here has made a file or folder."""
        deadline = time.monotonic() + 300
        while not path.exists():
            if process.poll() is not None or time.monotonic() > deadline:
                process.kill()
                raise AssertionError(f"{path} did not appear:\n{process.communicate()[0]}")
            time.sleep(0.002)

    def processes(self) -> dict[int, list[str]]:
        """Command lines of all living processes that were started in this folder, by their ids."""
        found = {}
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and (entry / "cwd").readlink() == self.folder:
                    command = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
                    if (entry / "stat").read_text().rpartition(")")[2].split()[0] != "Z":
                        found[int(entry.name)] = command
            except OSError:
                continue
        return found

    def workers(self) -> list[int]:
        """Process ids of living workers and reward processes of this folder."""
        kinds = {"tasks.worker", "tasks.scoring.reward_process"}
        return [pid for pid, command in self.processes().items() if kinds & set(command)]


@pytest.fixture(scope="session")
def mlflow_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An MLflow database with its schema in place: making one takes seconds."""
    folder = tmp_path_factory.mktemp("mlflow")
    uri = f"sqlite:///{folder / 'mlflow.db'}"
    subprocess.run([sys.executable, "-m", "mlflow", "db", "upgrade", uri], check=True, capture_output=True)
    return folder / "mlflow.db"


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the project's own tiny random model."""
    from rl_core.models import fetch_model

    folder = tmp_path_factory.mktemp("models") / "tiny-random"
    fetch_model("tiny-random", folder)
    return folder


NewProject = Callable[[Path], Project]


@pytest.fixture(scope="session")
def new_project_at(mlflow_template: Path, tiny_model: Path) -> Callable[[str, Path], Project]:
    """Makes project folders at a Prefect server, each with an MLflow store of its own."""

    def make(api: str, folder: Path) -> Project:
        folder.mkdir(parents=True)
        shutil.copy(mlflow_template, folder / "mlflow.db")
        shutil.copytree(tiny_model, folder / "models" / "tiny-random")
        env = {"PREFECT_API_URL": api, "PREFECT_HOME": str(folder / ".state" / "prefect"), "COLUMNS": "200"}
        return Project(folder, env)

    return make


@pytest.fixture(scope="session")
def new_project(prefect_api: str, new_project_at: Callable[[str, Path], Project]) -> NewProject:
    """Makes project folders at the session's Prefect server."""
    return lambda folder: new_project_at(prefect_api, folder)


@pytest.fixture
def project(new_project: NewProject, tmp_path: Path) -> Project:
    return new_project(tmp_path / "project")

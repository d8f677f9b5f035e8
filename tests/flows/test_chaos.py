"""A seeded killer ends processes of runs at random moments; the results are those of runs that nobody disturbed."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

pytestmark = pytest.mark.slow

KILLS = 10  # of each of the two tests
VICTIMS = ("flow", "worker", "reward", "flow")
RETRIES = "execution.retries={generate=9, score=9, advantage=9, train=9, evaluate=9}"  # the killer may strike one twice
SETTINGS = (RETRIES, "iterations=6", "generate.group_size=8", "generate.max_completion_tokens=32")


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory, new_project: Callable[[Path], Any]) -> dict[str, str]:
    """Digests of the run that nobody disturbed."""
    project = new_project(tmp_path_factory.mktemp("quiet") / "project")
    project.call("run", "smoke", *sets("quiet"))
    return digests(project.run_folder("quiet"))


def sets(name: str) -> list[str]:
    return [part for item in (f"name={name}", *SETTINGS) for part in ("--set", item)]


def digests(run: Path) -> dict[str, str]:
    """Fingerprint folder and digest of every output of a run.

    Of a registration only its place counts: it names the model, which has the name of the run.
    """
    found = {}
    for path in sorted(run.glob("iterations/*/*/*/manifest.json")):
        if ".partial-" not in path.parent.name:
            place, of = path.parent.relative_to(run), json.loads(path.read_text())
            registered = of["stage"] == "register"
            found[(place.parent if registered else place).as_posix()] = "" if registered else of["digest"]
    return found


class Killer:
    """Kills one process of a run after another, each after a random pause of work, until it has killed enough."""

    def __init__(self, project: Any, seed: int) -> None:
        self.project, self.random = project, random.Random(seed)
        self.killed: list[str] = []

    def lock_holder(self, run: str) -> int | None:
        with contextlib.suppress(OSError, ValueError):
            pid = int((self.project.run_folder(run) / "lock").read_text())
            return pid if (Path("/proc") / str(pid)).exists() else None
        return None

    def victim(self, kind: str, run: str) -> int | None:
        holder = self.lock_holder(run)
        if kind == "flow" or holder is None:
            return holder
        module = {"worker": "tasks.worker", "reward": "tasks.scoring.reward_process"}[kind]
        return next((p for p in self.project.workers() if module in command(p)), None)

    def strike(self, run: str, is_over: Callable[[], bool]) -> str | None:
        """Let the run finish 0 to 3 stages more, wait for a random moment, then kill. Null when the run was over first.

        Counted in stages, not in seconds: on a slow machine a run would never get on between two kills.
        """
        kind = self.random.choice(VICTIMS)
        stages, pause = self.random.randint(0, 3), self.random.uniform(0.0, 0.6)
        wanted = len(digests(self.project.run_folder(run))) + stages
        while self.victim(kind, run) is None or len(digests(self.project.run_folder(run))) < wanted:
            if is_over():
                return None
            time.sleep(0.02)
        time.sleep(pause)
        pid = self.victim(kind, run)
        if pid is None or is_over():
            return None
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            self.killed.append(kind)
            return kind
        return None


def command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return (Path("/proc") / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return ""


def settle(project: Any) -> None:
    deadline = time.monotonic() + 10
    while project.workers() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert project.workers() == []


def mlflow_states(project: Any) -> set[str]:
    with contextlib.closing(sqlite3.connect(project.folder / "mlflow.db")) as database:
        return {row[0] for row in database.execute("select status from runs")}


def test_ten_kills_of_runs_at_the_command_line(project: Any, quiet: dict[str, str]) -> None:
    """Whatever is killed and whenever, the same command continues the run, and its bytes are those of the quiet one."""
    killer = Killer(project, seed=1)
    runs = 0
    while len(killer.killed) < KILLS:
        runs += 1
        run = f"chaos-{runs}"
        for _ in range(60):
            process = project.start("run", "smoke", *sets(run))
            while len(killer.killed) < KILLS and process.poll() is None:
                killer.strike(run, lambda process=process: process.poll() is not None)  # type: ignore[misc]
            output, _ = process.communicate(timeout=300)
            if process.returncode == 0:
                break
            assert process.returncode in (-signal.SIGKILL, 1), output
        assert digests(project.run_folder(run)) == quiet, killer.killed
        assert list(project.run_folder(run).rglob("*.partial-*")) == []
    settle(project)
    assert mlflow_states(project) == {"FINISHED"}
    assert {"flow", "worker", "reward"} <= set(killer.killed)


def test_ten_kills_of_deployed_runs_that_resume_by_themselves(
    project: Any, quiet: dict[str, str], free_port: Callable[[], int]
) -> None:
    """Nobody starts anything again: the server's automation does. At the end no process, slot or record is left."""
    project.env.pop("PREFECT_API_URL")
    ports = ["--prefect-port", str(free_port()), "--mlflow-port", str(free_port())]
    project.call("up", "--detach", "--limit", "train=1", *ports)
    try:
        api = json.loads((project.folder / ".state" / "up.json").read_text())["prefect_api"]
        with httpx.Client(base_url=api, timeout=60) as client:
            serve_and_kill(project, client, quiet)
            print(project.call("doctor", "--fix"))
            running = {"flow_runs": {"state": {"type": {"any_": ["RUNNING", "PENDING", "CANCELLING"]}}}}
            assert client.post("/flow_runs/filter", json=running).json() == []
            running = {"task_runs": {"state": {"type": {"any_": ["RUNNING", "PENDING"]}}}}
            assert client.post("/task_runs/filter", json=running).json() == []
            limits = client.post("/v2/concurrency_limits/filter", json={}).json()
            assert {limit["active_slots"] for limit in limits if limit["name"].startswith("tag:")} == {0}
        settle(project)
        assert mlflow_states(project) == {"FINISHED"}
    finally:
        project.call("down")


def serve_and_kill(project: Any, client: httpx.Client, quiet: dict[str, str]) -> None:
    killer = Killer(project, seed=2)
    runs = 0
    while len(killer.killed) < KILLS:
        runs += 1
        run = f"served-{runs}"
        deployment = client.get("/deployments/name/training-run/train").json()["id"]
        parameters = {"run": "smoke", "overrides": [f"name={run}", *SETTINGS]}
        flow_run = client.post(f"/deployments/{deployment}/create_flow_run", json={"parameters": parameters}).json()

        def state(flow_run: dict[str, Any] = flow_run) -> str:
            return str(client.get(f"/flow_runs/{flow_run['id']}").json()["state"]["type"])

        deadline = time.monotonic() + 600
        while state() not in ("COMPLETED", "FAILED", "CANCELLED"):
            assert time.monotonic() < deadline, f"{state()} after {killer.killed}"
            if len(killer.killed) < KILLS:
                killer.strike(run, lambda: state() in ("COMPLETED", "FAILED", "CANCELLED"))
            time.sleep(0.5)
        assert state() == "COMPLETED", killer.killed
        assert digests(project.run_folder(run)) == quiet, killer.killed

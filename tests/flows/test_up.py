"""`rlstages up` as operators use it: one real server and worker, everything else through deployments and the API."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest

pytestmark = pytest.mark.slow

DEPLOYMENTS = {
    *("training-run/train", "training-run/nightly", "evaluation/evaluate", "stage/rerun", "stage/cpu", "stage/gpu"),
    *("adjust/adjust", "pause/pause", "resume/resume", "sweep-orphans/sweep-orphans"),
}


def until(true: Callable[[], Any], seconds: float, what: str) -> float:
    """Wait until something is so; returns how many seconds it took."""
    began = time.monotonic()
    while not true():
        assert time.monotonic() - began < seconds, f"{what}: not within {seconds} s"
        time.sleep(0.1)
    return time.monotonic() - began


def processes(text: str) -> list[int]:
    """Living processes with a text in their environment."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and text.encode() in (entry / "environ").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


@dataclass
class Served:
    """A project folder whose servers are up."""

    project: Any
    up: subprocess.Popen[str]
    api: httpx.Client
    mlflow: str

    def deployment(self, name: str) -> dict[str, Any]:
        return self.get(f"/deployments/name/{name}")

    def request(self, method: str, path: str, **more: Any) -> httpx.Response:
        """A busy SQLite server asks for patience (503), as it asks Prefect's own client."""
        for _ in range(30):
            answer = self.api.request(method, path, **more)
            if answer.status_code != 503:
                break
            time.sleep(1)
        return answer

    def get(self, path: str, **params: Any) -> Any:
        return self.request("GET", path, params=params).raise_for_status().json()

    def post(self, path: str, **body: Any) -> Any:
        return self.request("POST", path, json=body).raise_for_status().json()

    def trigger(self, name: str, **parameters: Any) -> str:
        path = f"/deployments/{self.deployment(name)['id']}/create_flow_run"
        flow_run = self.post(path, parameters=parameters, state={"type": "SCHEDULED"})
        return str(flow_run["id"])

    def state(self, flow_run: str) -> str:
        return str(self.get(f"/flow_runs/{flow_run}")["state"]["type"])

    def finish(self, flow_run: str, wanted: str = "COMPLETED", seconds: float = 120) -> None:
        until(lambda: self.state(flow_run) in ("COMPLETED", "FAILED", "CANCELLED"), seconds, f"{flow_run} ends")
        found = self.get(f"/flow_runs/{flow_run}")["state"]
        assert found["type"] == wanted, found

    def everything(self) -> dict[str, list[str]]:
        """Names of all that `up` makes, doubles included."""
        deployments = self.post("/deployments/filter")
        flows = {flow["id"]: flow["name"] for flow in self.post("/flows/filter")}
        return {
            "deployments": sorted(f"{flows[d['flow_id']]}/{d['name']}" for d in deployments),
            "schedules": sorted(f"{d['name']}: {s['slug']} {s['active']}" for d in deployments for s in d["schedules"]),
            "automations": sorted(automation["name"] for automation in self.post("/automations/filter")),
            "queues": sorted(queue["name"] for queue in self.post("/work_pools/local/queues/filter")),
            "limits": sorted(f"{x['name']}={x['limit']}" for x in self.post("/v2/concurrency_limits/filter")),
        }

    def run_json(self, run: str, file: str) -> dict[str, Any]:
        return dict(json.loads((self.project.run_folder(run) / file).read_text()))


def wait_until_ready(project: Any, process: subprocess.Popen[str]) -> dict[str, Any]:
    file = project.folder / ".state" / "up.json"

    def ready() -> bool:
        assert process.poll() is None, process.communicate()[0]
        return file.exists() and json.loads(file.read_text())["ready"]

    until(ready, 240, "rlstages up is ready")
    return dict(json.loads(file.read_text()))


@pytest.fixture(scope="module")
def served(
    tmp_path_factory: pytest.TempPathFactory, new_project: Callable[[Path], Any], free_port: Callable[[], int]
) -> Iterator[Served]:
    project = new_project(tmp_path_factory.mktemp("up") / "project")
    project.env.pop("PREFECT_API_URL")
    ports = ["--prefect-port", str(free_port()), "--mlflow-port", str(free_port())]
    process = project.start("up", *ports, "--limit", "train=1", "--limit", "gpu=1")
    try:
        record = wait_until_ready(project, process)
        assert record["prefect_api"] == f"http://127.0.0.1:{ports[1]}/api"
        with httpx.Client(base_url=record["prefect_api"], timeout=60) as client:
            yield Served(project, process, client, record["mlflow"])
    finally:
        process.kill()
        process.wait()
        project.call("down")
        assert processes(f"PREFECT_HOME={project.folder}") == []


@pytest.fixture(scope="module")
def planned(served: Served) -> tuple[str, datetime]:
    """A schedule that starts a training run at one full minute, 30 to 90 s from now; its path and that minute."""
    path = f"/deployments/{served.deployment('training-run/train')['id']}/schedules"
    parameters = {"run": "smoke", "overrides": ["name=planned"]}
    minute = (datetime.now(UTC) + timedelta(seconds=90)).replace(second=0, microsecond=0)
    cron = {"cron": f"{minute:%M %H %d %m} *", "timezone": "UTC"}
    schedule = {"schedule": cron, "active": True, "parameters": parameters}
    [made] = served.request("POST", path, json=[schedule]).raise_for_status().json()
    return f"{path}/{made['id']}", minute


def test_up_makes_everything_once(served: Served, planned: tuple[str, datetime]) -> None:
    made = served.everything()
    assert set(made["deployments"]) == DEPLOYMENTS and len(made["deployments"]) == len(DEPLOYMENTS)
    assert made["schedules"] == ["nightly: nightly False", "sweep-orphans: quarter-hourly False", "train: None True"]
    assert made["automations"] == ["rlstages: crash silent runs", "rlstages: resume silent runs"]
    assert made["queues"] == ["cpu", "default", "gpu"]
    assert made["limits"][-2:] == ["tag:gpu=1", "tag:train=1"]
    assert httpx.get(f"{served.mlflow}/health").text == "OK"
    assert "up already" in served.project.call("up", expect=2)


def test_forms_refuse_values_that_do_not_fit(served: Served) -> None:
    """C81: bounds and types of the form are checked by the server; what a run's setting may be, by the run itself."""
    deployment = served.deployment("stage/rerun")["id"]
    given = {"run": "planned", "iteration": 0, "from_stage": "score"}
    for name, value in [("iteration", -2), ("iteration", 0.5), ("iteration", "first"), ("from_stage", "reward")]:
        answer = served.request(
            "POST",
            f"/deployments/{deployment}/create_flow_run",
            json={"parameters": {**given, name: value}, "state": {"type": "SCHEDULED"}},
        )
        assert answer.status_code == 409 and name in answer.text, (name, value, answer.text)
    for deployment in served.post("/deployments/filter"):
        form = deployment["parameter_openapi_schema"]["properties"]
        assert all(field.get("description") for field in form.values()), (deployment["name"], form)


def test_a_schedule_starts_a_run_and_a_killed_process_is_resumed(served: Served, planned: tuple[str, datetime]) -> None:
    """SIGKILL of its process is reported once, and the same flow run goes on: without the events of the server.

    An automation would learn of the end of a run from a fresh schedule 15 minutes late.
    """
    deployments = {"id": {"any_": [served.deployment("training-run/train")["id"]]}}

    def flow_runs() -> list[dict[str, Any]]:
        running = {"state": {"type": {"any_": ["RUNNING"]}}}
        return list(served.post("/flow_runs/filter", deployments=deployments, flow_runs=running))

    until(flow_runs, 180, "the schedule starts a run")
    [started] = flow_runs()
    assert datetime.fromisoformat(started["expected_start_time"]) == planned[1]
    assert served.request("DELETE", planned[0]).status_code == 204
    flow_run = str(started["id"])
    until((served.project.run_folder("planned") / "iterations/0000/score").exists, 120, "the first iteration")
    [engine] = [pid for pid in processes(flow_run) if b"prefect.engine" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    os.kill(engine, signal.SIGKILL)
    served.finish(flow_run)
    found = served.get(f"/flow_runs/{flow_run}")
    states = [state["name"] for state in served.get("/flow_run_states/", flow_run_id=flow_run)]
    assert found["run_count"] == 2 and states.count("Crashed") == 1 and states.count("AwaitingRetry") == 1, states
    assert found["name"] == "planned" and "run:planned" in found["tags"], found
    assert served.run_json("planned", "iterations/0001/iteration.json")["complete"]
    until(lambda: not processes(flow_run), 10, "its processes are gone")


def test_a_stage_is_made_again_from_its_form(served: Served) -> None:
    folder = served.project.run_folder("planned") / "iterations/0000"
    before = {path.name for path in (folder / "score").iterdir()}
    weight = ["rewards.format_regex.weight=2.0"]
    again = {"iteration": 0, "from_stage": "score", "to_stage": "score", "overrides": weight}
    served.finish(served.trigger("stage/rerun", run="planned", **again))
    [new] = {path.name for path in (folder / "score").iterdir()} - before
    made = served.run_json("planned", "iterations/0000/iteration.json")["stages"]["score"]["folder"]
    assert made.endswith(new) and len(before) == 1


def test_adjust_pause_resume_and_cancel_a_living_run(served: Served) -> None:
    """All through deployments; a cancelled run's processes are gone within 10 s of the request."""
    overrides = ["name=steered", "iterations=200", "evaluate.every=50"]
    flow_run = served.trigger("training-run/train", run="smoke", overrides=overrides)
    until((served.project.run_folder("steered") / "run.json").exists, 90, "the run exists")
    paused = served.trigger("pause/pause", run="steered", why="to look at it")
    changed = served.trigger("adjust/adjust", run="steered", changes=["learner.lr=5e-4"], why="too fast")
    served.finish(paused)
    served.finish(changed)
    until(lambda: served.get(f"/flow_runs/{flow_run}")["state"]["name"] == "Paused", 90, "the run waits")
    done = len(list(served.project.run_folder("steered").glob("iterations/*/iteration.json")))
    served.finish(served.trigger("resume/resume", run="steered"))
    record = served.project.run_folder("steered") / f"iterations/{done:04d}/train"
    until(lambda: list(record.glob("*/manifest.json")), 90, "an iteration after the pause")
    [manifest] = record.glob("*/manifest.json")
    assert json.loads(manifest.read_text())["identity"]["learner"]["lr"] == 5e-4
    assert len(processes(flow_run)) >= 3  # the flow's process, its worker, its reward processes
    served.post(f"/flow_runs/{flow_run}/set_state", state={"type": "CANCELLING", "name": "Cancelling"})
    until(lambda: not processes(flow_run), 10, "a cancelled run's processes are gone")
    served.finish(flow_run, "CANCELLED", seconds=30)


def test_a_killed_up_is_found_by_the_next_one(served: Served) -> None:
    """Its servers live on; the next `up` ends them, starts anew on the same database, and makes nothing twice."""
    made = served.everything()
    served.up.kill()
    served.up.communicate()
    old = json.loads((served.project.folder / ".state" / "up.json").read_text())["mark"]
    assert len(processes(old)) >= 3 and served.everything() == made
    ports = ["--prefect-port", str(served.api.base_url.port), "--mlflow-port", served.mlflow.rpartition(":")[2]]
    assert "rlstages down stops them" in served.project.call("up", "--detach", *ports)
    assert processes(old) == []
    assert served.everything() == made
    assert "up already" in served.project.call("up", *ports, expect=2)
    flow_run = served.trigger("training-run/train", run="smoke", overrides=["name=stopped", "iterations=200"])
    until((served.project.run_folder("stopped") / "iterations/0001").exists, 120, "a run is at work")
    served.project.call("down")
    assert processes(flow_run) == []
    assert "wrong" not in served.project.call("doctor"), "an orderly end leaves nothing to repair"
    assert processes(f"PREFECT_HOME={served.project.folder}") == []
    assert "nothing is up" in served.project.call("down")


def test_up_that_is_stopped_while_it_starts_leaves_nothing(served: Served, free_port: Callable[[], int]) -> None:
    ports = ["--prefect-port", str(free_port()), "--mlflow-port", str(free_port())]
    process = served.project.start("up", *ports)
    home = f"PREFECT_HOME={served.project.folder}"
    until(lambda: len(processes(home)) >= 3, 30, "the servers are being started")
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 143 and "Traceback" not in output
    assert processes(home) == []

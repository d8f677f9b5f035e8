"""Stages placed in other work queues: who executes what, and what a dead caller or a dead worker process costs."""

from __future__ import annotations

import json
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

pytestmark = pytest.mark.slow
DEPLOY = """
import os, sys
from tasks import settings
settings.apply_defaults()
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.utilities.callables import parameter_schema
from flows.stage import stage

pool, folder = sys.argv[1:]
with get_client(sync_client=True) as client:
    client.create_work_pool(WorkPoolCreate(name=pool, type="process"))
    flow = client.create_flow(stage)
    for queue in ("cpu", "gpu"):
        client.create_work_queue(queue, work_pool_name=pool)
        client.create_deployment(
            flow, f"{pool}-{queue}", work_pool_name=pool, work_queue_name=queue, entrypoint="flows.stage.stage",
            pull_steps=[{"prefect.deployments.steps.set_working_directory": {"directory": folder}}],
            parameter_openapi_schema=parameter_schema(stage).model_dump(), enforce_parameter_schema=True,
        )
"""


class Pool:
    """A process work pool with the queues `cpu` and `gpu`, a worker for each, and deployments of the flow `stage`."""

    def __init__(self, project: Any, name: str) -> None:
        self.project, self.name, self.api = project, name, project.env["PREFECT_API_URL"]
        script = project.folder / "deploy.py"
        script.write_text(DEPLOY)
        project.call(name, str(project.folder), driver=script)
        self.workers = [self._start(queue) for queue in ("cpu", "gpu")]
        self.callers: list[subprocess.Popen[str]] = []

    def _start(self, queue: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "prefect", "worker", "start", "--pool", self.name]
        command += ["--work-queue", queue, "--name", f"{self.name} {queue} machine"]
        env = os.environ | self.project.env | {"PREFECT_WORKER_QUERY_SECONDS": "1"}
        with (self.project.folder / f"worker-{queue}.log").open("wb") as log:
            return subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env=env, cwd=self.project.folder, start_new_session=True
            )

    def call(self, *arguments: str) -> subprocess.Popen[str]:
        """Start the command line; it does not outlive the pool."""
        self.callers.append(self.project.start(*arguments))
        return self.callers[-1]

    def stop(self) -> None:
        for caller in self.callers:
            if caller.poll() is None:
                os.killpg(caller.pid, signal.SIGKILL)
                caller.communicate()
        for worker in self.workers:
            os.killpg(worker.pid, signal.SIGTERM)
        for worker in self.workers:
            try:
                worker.wait(15)
            except subprocess.TimeoutExpired:
                os.killpg(worker.pid, signal.SIGKILL)
                worker.wait()

    def flow_runs(self, queue: str) -> list[dict[str, Any]]:
        """Flow runs of a queue's deployment, the oldest first."""
        body = {"deployments": {"name": {"any_": [f"{self.name}-{queue}"]}}, "sort": "EXPECTED_START_TIME_ASC"}
        found: list[dict[str, Any]] = httpx.post(f"{self.api}/flow_runs/filter", json=body).json()
        return found

    def wait_running(self, queue: str, number: int, caller: subprocess.Popen[str]) -> dict[str, Any]:
        """The flow run of that number when it is at work, as long as the caller that waits for it lives."""
        deadline = time.monotonic() + 300
        while time.monotonic() < deadline:
            assert caller.poll() is None, caller.communicate()[0]
            found = self.flow_runs(queue)
            if len(found) > number and found[number]["state_type"] == "RUNNING":
                return found[number]
            time.sleep(0.1)
        raise AssertionError(f"flow run {number} of {queue} never ran: {self.flow_runs(queue)}")

    def executed_by(self, flow_run: dict[str, Any]) -> set[str]:
        """Names of the workers that say they executed a flow run."""
        body = {
            "filter": {
                "event": {"name": ["prefect.worker.submitted-flow-run"]},
                "related": {"id": [f"prefect.flow-run.{flow_run['id']}"]},
            }
        }
        events = httpx.post(f"{self.api}/events/filter", json=body).json()["events"]
        return {event["resource"]["prefect.resource.name"] for event in events}


def test_the_form_of_a_rerun_explains_itself() -> None:
    from prefect.utilities.callables import parameter_schema

    from flows.stage import stage
    from rl_core.stages import STAGES

    fields = parameter_schema(stage).model_dump()["properties"]
    assert all(field["description"].strip() for field in fields.values())
    assert list(fields) == ["run", "iteration", "from_stage", "to_stage", "overrides", "force", "attempt"]
    assert fields["from_stage"]["enum"] == list(STAGES)
    assert [choice.get("enum") for choice in fields["to_stage"]["anyOf"]] == [list(STAGES), None]


@pytest.fixture
def pool(project: Any) -> Iterator[Pool]:
    made = Pool(project, "placing")
    yield made
    made.stop()


def test_placed_stages_survive_their_caller_and_are_executed_once(
    pool: Pool, new_project: Callable[[Path], Any], tmp_path: Path
) -> None:
    """Train on one queue, score on another. A scoring that is killed is made again; the caller is killed while training
    goes on elsewhere, and attaches when it is continued; the result is that of a run which nobody disturbed."""
    project, run = pool.project, pool.project.run_folder("smoke")
    places = [("train", "gpu"), ("score", "cpu")]
    places = [f"execution.placement.{stage}=deployment:stage/{pool.name}-{queue}" for stage, queue in places]
    sets = [word for setting in ("iterations=1", *places) for word in ("--set", setting)]
    caller = pool.call("run", "smoke", *sets)
    killed = pool.wait_running("cpu", 0, caller)
    os.kill(int(killed["infrastructure_pid"].rpartition(":")[2]), signal.SIGKILL)
    pool.wait_running("gpu", 0, caller)
    os.killpg(caller.pid, signal.SIGKILL)
    output, _ = caller.communicate()
    assert "it0000/score failed" in output and "ended before it answered" in output
    assert len(list((run / "iterations/0000/train").glob("placed-*"))) == 1
    project.call("run", "smoke")

    plain = new_project(tmp_path / "plain")
    plain.call("run", "smoke", "--set", "iterations=1")
    assert project.digests("smoke") == plain.digests("smoke")
    assert not list(run.rglob("placed-*"))

    flow_runs = {"train": pool.flow_runs("gpu"), "score": pool.flow_runs("cpu")}
    states = {stage: [made["state_name"] for made in found] for stage, found in flow_runs.items()}
    assert states == {"train": ["Completed"], "score": ["Crashed", "Completed"]}
    for stage, found in flow_runs.items():
        folder = run / "iterations/0000" / stage
        manifest = json.loads(next(folder.glob("*/manifest.json")).read_text())
        assert manifest["measured"]["placed"]["flow_run"] == found[-1]["id"]
        assert {made["name"] for made in found} == {f"smoke/it0000/{stage}-placed"}
        keys = [Path(made["idempotency_key"]) for made in found]
        assert {key.parent for key in keys} == {folder} and len(set(keys)) == len(keys)
        assert all(key.name.startswith(f"placed-{manifest['fingerprint'][:12]}-") for key in keys)
        queue = "gpu" if stage == "train" else "cpu"
        assert {name for made in found for name in pool.executed_by(made)} == {f"{pool.name} {queue} machine"}

"""SIGTERM, Ctrl-C and SIGKILL: the stage ends at once, no process is left, and what a run is decides itself."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

KILL_AT = Path(__file__).with_name("kill_at.py")
LATE_SIGNAL = Path(__file__).with_name("late_signal.py")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy")]

HANGING = """
import subprocess, time

def hangs(completions):
    subprocess.Popen(["sleep", "300"])
    subprocess.Popen(["setsid", "sleep", "300"])
    open("hangs", "w").close()
    time.sleep(300)
"""


def commands(project: Any) -> list[str]:
    return [" ".join(command) for command in project.processes().values()]


def left_after(project: Any, seconds: float) -> list[str]:
    deadline = time.monotonic() + seconds
    while (found := commands(project)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return found


def mlflow_status(folder: Path) -> str:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{folder / 'mlflow.db'}")
    (run,) = client.search_runs([client.get_experiment_by_name("rlstages").experiment_id])  # type: ignore[union-attr]
    return str(run.info.status)


def flow_runs(project: Any, name: str) -> list[dict[str, Any]]:
    body = {"flow_runs": {"name": {"any_": [name]}}, "sort": "START_TIME_DESC"}
    found: list[dict[str, Any]] = httpx.post(f"{project.env['PREFECT_API_URL']}/flow_runs/filter", json=body).json()
    return found


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signal_to_a_run_with_its_own_server(project: Any, number: signal.Signals, code: int) -> None:
    """As a terminal or a service manager sends it, to the whole process group: over in seconds, nothing left."""
    del project.env["PREFECT_API_URL"]
    process = project.start("run", "smoke", "--set", "iterations=50")
    project.wait_for(project.run_folder("smoke") / "iterations/0001/train", process)
    os.killpg(process.pid, number)
    sent = time.monotonic()
    output, _ = process.communicate(timeout=60)
    seconds = time.monotonic() - sent
    print(f"{number.name}: over after {seconds:.1f} s")
    assert process.returncode == code and "Traceback" not in output, output
    assert "stopped; the same command continues it" in output
    assert seconds < 15
    assert left_after(project, 5) == []
    assert list(project.folder.rglob("*.partial-*")) == []
    assert mlflow_status(project.folder) == "KILLED"


@pytest.mark.parametrize("numbers", [[signal.SIGKILL], [signal.SIGTERM, signal.SIGKILL], [signal.SIGTERM]])
def test_nothing_that_a_reward_started_outlives_the_flow(project: Any, numbers: list[signal.Signals]) -> None:
    """Worker, reward process and its `sleep`s, one of them in a session of its own, end with the flow process alone."""
    (project.folder / "hanging.py").write_text(HANGING)
    process = project.start("run", "smoke", "--set", "rewards.0.function=hanging:hangs", "--set", "rewards.0.params={}")
    project.wait_for(project.folder / "hangs", process)
    deadline = time.monotonic() + 30  # what was started may not be `sleep` yet
    while sum("sleep 300" in command for command in commands(project)) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert sum("sleep 300" in command for command in commands(project)) >= 2 and len(project.workers()) >= 2
    for number in numbers:
        os.kill(process.pid, number)
    left = left_after(project, 10)
    process.communicate(timeout=30)
    assert left == []


def test_resume_decides_by_manifest_and_lock(project: Any) -> None:
    """C80: the killed run still shows as running; of two resumes one goes on and one is told who has the run."""
    run = ["run", "smoke", "--set", "name=resumed"]
    bomb = project.start("work", "advantage", "0", *run, driver=KILL_AT)
    bomb.communicate(timeout=180)
    (old,) = flow_runs(project, "resumed")
    assert old["state_type"] == "RUNNING"
    made = json.loads((project.run_folder("resumed") / "iterations/0000/iteration.json").read_text())["stages"]
    two = [project.start(*run) for _ in range(2)]
    outputs = [process.communicate(timeout=180)[0] for process in two]
    codes = [process.returncode for process in two]
    assert sorted(codes) == [0, 2], outputs
    refused = " ".join(outputs[codes.index(2)].replace("│", " ").split())
    assert f"process {two[codes.index(0)].pid} holds it" in refused and "Traceback" not in refused
    after = json.loads((project.run_folder("resumed") / "iterations/0000/iteration.json").read_text())["stages"]
    assert {stage: after[stage] for stage in made} == made and set(made) == {"generate", "score"}

    # SIGTERM one second after completion changes nothing: not in Prefect, not on disk.
    files = {path: path.stat().st_mtime_ns for path in project.run_folder("resumed").glob("iterations/**/*")}
    output = project.call(*run, expect=143, driver=LATE_SIGNAL)
    assert "nothing to do" in output
    assert {path: path.stat().st_mtime_ns for path in project.run_folder("resumed").glob("iterations/**/*")} == files
    newest, *older = flow_runs(project, "resumed")
    assert newest["state_type"] == "COMPLETED"
    assert sum(flow["state_type"] == "COMPLETED" for flow in older) == 1

    # What the kill left running in Prefect is the doctor's.
    assert "resumed" in project.call("doctor", expect=1)
    project.call("doctor", "--fix")
    states = [flow["state_type"] for flow in flow_runs(project, "resumed")]
    assert "RUNNING" not in states and "CRASHED" in states

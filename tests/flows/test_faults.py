"""Servers that restart, hang or stay away, and a clock that goes back, in the middle of a run: nothing is lost."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

CLOCK_BACK = Path(__file__).with_name("clock_back.py")
STAGES = ["generate", "score", "advantage", "train", "evaluate", "register"]
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy")]


def end_of(process: subprocess.Popen[str], code: int = 0) -> str:
    output, _ = process.communicate(timeout=240)
    assert process.returncode == code, output
    assert "Traceback" not in output
    return output


def hold(database: Path, seconds: float) -> threading.Thread:
    """Lock a database against every other writer for some time."""
    connection = sqlite3.connect(database, isolation_level=None, check_same_thread=False, timeout=30)
    connection.execute("BEGIN EXCLUSIVE")

    def release() -> None:
        time.sleep(seconds)
        connection.execute("ROLLBACK")
        connection.close()

    thread = threading.Thread(target=release)
    thread.start()
    return thread


def check_tracked_once(folder: Path, run: str, iterations: int) -> None:
    """Every metric of every iteration is in MLflow, and once."""
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{folder / 'mlflow.db'}")
    (found,) = client.search_runs([client.get_experiment_by_name("rlstages").experiment_id])  # type: ignore[union-attr]
    assert found.info.status == "FINISHED"
    for name in ("reward/mean", "learner/steps_applied", *(f"time/{stage}_seconds" for stage in STAGES)):
        steps = Counter(point.step for point in client.get_metric_history(found.info.run_id, name))
        assert {step: n for step, n in steps.items() if step >= 0} == dict.fromkeys(range(iterations), 1), name
    assert len(client.search_model_versions(f"name='{run}'")) == iterations


def test_server_restarts_while_a_slot_is_held(server: Any, at_own_server: Any) -> None:
    """The holder trains on, its lease outlives the server, and the slot is given back in the end."""
    server.limit("fault", 1)
    tags = ["--set", 'execution.tags={train=["fault"]}', "--set", "learner.update_epochs=8"]
    process = at_own_server.start("run", "smoke", *tags)
    at_own_server.wait_for(at_own_server.run_folder("smoke") / "slot.json", process)
    assert server.used("fault") == 1
    server.kill()
    server.start()
    end_of(process)
    assert server.used("fault") == 0
    server.unlimit("fault")
    check_tracked_once(at_own_server.folder, "smoke", 2)


@pytest.mark.parametrize("which", ["prefect", "mlflow"])
def test_database_is_locked_for_a_while(server: Any, at_own_server: Any, which: str) -> None:
    """Whoever writes there waits; the run ends as if nothing had been."""
    process = at_own_server.start("run", "smoke")
    at_own_server.wait_for(at_own_server.run_folder("smoke") / "iterations/0000/score", process)
    locked = hold(server.database if which == "prefect" else at_own_server.folder / "mlflow.db", 15)
    output = end_of(process)
    locked.join()
    check_tracked_once(at_own_server.folder, "smoke", 2)
    assert "it0001" in output


def test_server_goes_for_good(server: Any, at_own_server: Any) -> None:
    """The run gives up after its retries, says what to do, and goes on where it was once there is a server again."""
    at_own_server.env["PREFECT_CLIENT_MAX_RETRIES"] = "1"  # with Prefect's own 5 it takes minutes
    process = at_own_server.start("run", "smoke")
    at_own_server.wait_for(at_own_server.run_folder("smoke") / "iterations/0000/evaluate", process)
    server.kill()
    gone = time.monotonic()
    output = " ".join(end_of(process, code=1).replace("│", " ").split())
    print(f"gave up after {time.monotonic() - gone:.0f} s")
    assert f"the Prefect server at {server.api} does not answer any more" in output
    assert "the same command then continues the run" in output
    weights = {p: p.stat().st_mtime_ns for p in at_own_server.run_folder("smoke").rglob("0000/train/*/*.safetensors")}
    assert len(weights) == 1
    server.start()
    at_own_server.call("run", "smoke")
    assert {path: path.stat().st_mtime_ns for path in weights} == weights
    check_tracked_once(at_own_server.folder, "smoke", 2)


def test_clock_goes_back(server: Any, at_own_server: Any) -> None:
    """Durations are those of a clock that cannot; MLflow has its steps in order; what is done is known as done."""
    at_own_server.call("run", "smoke", driver=CLOCK_BACK)
    run = at_own_server.run_folder("smoke")
    measured = {
        (int(path.parts[-4]), path.parts[-3]): json.loads(path.read_text())["measured"]
        for path in run.glob("iterations/[0-9]*/*/*/manifest.json")
    }
    assert set(measured) == {(iteration, stage) for iteration in (0, 1) for stage in STAGES}
    assert all(0 < made["seconds"] < 300 for made in measured.values())
    assert measured[0, "evaluate"]["finished_unix_seconds"] < measured[0, "train"]["finished_unix_seconds"] - 3000
    check_tracked_once(at_own_server.folder, "smoke", 2)
    assert "nothing to do: all 2 iterations are complete" in at_own_server.call("run", "smoke")
    assert "wrong" not in at_own_server.call("doctor")

"""A live run that is paused, adjusted, resumed, killed, adjusted again and continued, seen from outside."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import polars as pl
import pytest

from tasks.live.adjustments import adjust
from tasks.live.pausing import pause
from tasks.tracking.mlflow_client import open_client

# MLflow 3.17 sets up its own tables with a loader option that SQLAlchemy 2.1 has deprecated.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy")]


def record(run: Path, iteration: int) -> dict[str, Any]:
    path = run / f"iterations/{iteration:04d}/iteration.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    return found


def until(seen: Callable[[], Any], process: Any) -> Any:
    deadline = time.monotonic() + 120
    while not (found := seen()):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return found


def rest(project: Any, what: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = httpx.post(f"{project.env['PREFECT_API_URL']}/{what}/filter", json=body).json()
    return found


def lrs(run: Path) -> dict[int, set[float]]:
    """The learning rates that the optimizer had, by iteration, as the steps' own table says."""
    found = {}
    for k in range(4):
        steps = pl.read_parquet(run / record(run, k)["stages"]["train"]["folder"] / "*.parquet")
        found[k] = set(steps.filter(pl.col("metric") == "learner/lr")["value"])
    return found


def test_live_changes_reach_the_optimizer_and_outlive_a_kill(
    project: Any, new_project: Callable[[Path], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C85: changes by form and by hand, a pause ended from Prefect, a kill, and a resume with other settings."""
    monkeypatch.setenv("RLSTAGES_RUNS_DIR", str(project.folder / "runs"))
    name, run = "changed", project.run_folder("changed")
    process = project.start("run", "smoke", "--set", f"name={name}", "--set", "iterations=3")
    until(lambda: record(run, 0), process)
    pause(name, "to think")
    body = {"flow_runs": {"name": {"any_": [name]}, "state": {"type": {"any_": ["PAUSED"]}}}}
    (shown,) = until(lambda: rest(project, "flow_runs", body), process)
    assert record(run, 0)["complete"] and not record(run, 1), "it stopped at the boundary"
    assert project.workers() == [], "a paused run needs no memory"

    form = project.folder / "form.py"
    form.write_text(
        "from tasks import settings\nsettings.apply_defaults()\nfrom flows.control import adjust\n"
        f"print(adjust({name!r}, ['learner.lr=5e-4', 'rewards.format_regex.weight=2'], 'too fast'))\n"
    )
    assert "from iteration 1: learner.lr 0.001 -> 0.0005 (by" in project.call(driver=form)
    assert not record(run, 1), "it still waits"
    httpx.post(f"{project.env['PREFECT_API_URL']}/flow_runs/{shown['id']}/resume")
    until(lambda: record(run, 1), process)
    (change,) = adjust(name, ["learner.lr=2e-3"], "too slow")
    assert change.from_iteration == 2, "iteration 1 has begun"
    os.killpg(process.pid, signal.SIGKILL)
    output, _ = process.communicate()
    assert f"{name} goes on" in output and "paused by" in output and ": to think" in output
    assert "from iteration 1: learner.lr 0.001 -> 0.0005" in output and ", too fast)" in output

    more = ["iterations=4", "execution.reward_batch_rows=8"]
    output = project.call("run", "smoke", "--set", f"name={name}", *(part for item in more for part in ("--set", item)))
    assert "from iteration 2: learner.lr 0.0005 -> 0.002" in output and "iteration 1: learner" not in output
    assert lrs(run) == {0: {1e-3}, 1: {5e-4}, 2: {2e-3}, 3: {2e-3}}
    scores = pl.read_parquet(run / record(run, 1)["stages"]["score"]["folder"] / "*.parquet")
    assert (scores["reward"] == 2 * scores["reward_format_regex"]).all()
    check_what_is_shown(project, name)

    monkeypatch.delenv("RLSTAGES_RUNS_DIR")
    quiet = new_project(tmp_path / "quiet")
    quiet.run_folder(name).mkdir(parents=True)
    shutil.copy(run / "adjustments.jsonl", quiet.run_folder(name))
    quiet.call("run", "smoke", "--set", f"name={name}", "--set", "iterations=4")
    made = quiet.digests(name)
    assert sum(path.endswith("model.safetensors") for path in made) == 4 and project.digests(name) == made


def check_what_is_shown(project: Any, name: str) -> None:
    """MLflow has a tag per change and keeps its parameters; Prefect has the table; a repeated start says nothing."""
    client = open_client(f"sqlite:///{project.folder}/mlflow.db")
    (mlflow_run,) = client.search_runs([client.get_experiment_by_name("rlstages").experiment_id])  # type: ignore[union-attr]
    tags = mlflow_run.data.tags
    assert [key for key in tags if "adjustment" in key] == [f"rlstages.adjustment.{n:04d}" for n in (1, 2, 3)]
    assert "learner.lr 0.0005 -> 0.002" in tags["rlstages.adjustment.0003"]
    assert (tags["rlstages.changed.iterations"], mlflow_run.data.params["iterations"]) == ("4", "3")
    assert (tags["rlstages.changed.execution.reward_batch_rows"], mlflow_run.data.params["learner.lr"]) == (
        "8",
        "0.001",
    )
    history = client.get_metric_history(mlflow_run.info.run_id, "learner/lr")
    assert {m.step: m.value for m in history} == {0: 1e-3, 1: 5e-4, 2: 2e-3, 3: 2e-3} and len(history) == 4
    tables = rest(
        project, "artifacts", {"artifacts": {"key": {"any_": [f"{name}-adjustments"]}}, "sort": "CREATED_DESC"}
    )
    assert len(tables) == 2 and len(json.loads(tables[0]["data"])) == 3

    listed = project.call("adjust", name)
    assert "0.0005" in listed and "rewards.format_regex.weight" in listed and "too slow" in listed
    refused = project.call("adjust", name, "--set", "seed=3", expect=2)
    assert "seed cannot change in a live run" in refused and "learner.weight_decay" in refused
    taken = project.call("run", name, "--set", "learner.lr=1.0", expect=2)
    assert "only iterations and execution may change" in taken

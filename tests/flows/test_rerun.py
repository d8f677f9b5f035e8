"""Reruns of a stage, seen from outside: what is executed, what is reused, what lies on disk and in Prefect."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import polars as pl
import pyarrow.parquet as pq
import pytest

pytestmark = pytest.mark.slow
STAGES = ["generate", "score", "advantage", "train", "evaluate", "register"]


def stamps(run: Path, stage: str = "*") -> dict[str, int]:
    files = run.glob(f"iterations/[0-9]*/{stage}/*/*")
    return {str(path.relative_to(run)): path.stat().st_mtime_ns for path in sorted(files) if path.is_file()}


def record(run: Path, iteration: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / f"iterations/{iteration:04d}/iteration.json").read_text())
    return found


def task_runs(project: Any, flow_run_name: str) -> list[dict[str, Any]]:
    """Task runs of the newest flow run of that name, in the order of their start."""
    api = project.env["PREFECT_API_URL"]
    flows = httpx.post(
        f"{api}/flow_runs/filter",
        json={"flow_runs": {"name": {"any_": [flow_run_name]}}, "sort": "START_TIME_DESC", "limit": 1},
    ).json()
    body = {"task_runs": {"flow_run_id": {"any_": [flows[0]["id"]]}}, "sort": "EXPECTED_START_TIME_ASC"}
    found: list[dict[str, Any]] = httpx.post(f"{api}/task_runs/filter", json=body).json()
    return found


def flow_run_log(project: Any, name: str) -> list[str]:
    """Messages of the training run of that name that executed iterations, in their order."""
    api = project.env["PREFECT_API_URL"]
    body: dict[str, Any] = {"flow_runs": {"name": {"any_": [name]}}, "sort": "START_TIME_ASC"}
    first = httpx.post(f"{api}/flow_runs/filter", json=body).raise_for_status().json()[0]
    body = {"logs": {"flow_run_id": {"any_": [first["id"]]}}, "sort": "TIMESTAMP_ASC"}
    return [line["message"] for line in httpx.post(f"{api}/logs/filter", json=body).raise_for_status().json()]


def artifacts(project: Any, key: str) -> list[dict[str, Any]]:
    api = project.env["PREFECT_API_URL"]
    body = {"artifacts": {"key": {"any_": [key]}}, "sort": "CREATED_DESC"}
    found: list[dict[str, Any]] = httpx.post(f"{api}/artifacts/filter", json=body).json()
    return found


@pytest.fixture(scope="module")
def finished(new_project: Callable[[Path], Any], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A project with a finished smoke run, shared by the tests that only look."""
    project = new_project(tmp_path_factory.mktemp("finished") / "project")
    project.call("run", "smoke", "--set", "name=looked-at")
    return project


@pytest.fixture
def copied(finished: Any, tmp_path: Path) -> Any:
    """A copy of it for a test that changes something."""
    folder = tmp_path / "project"
    shutil.copytree(finished.folder, folder, symlinks=True)
    return replace(finished, folder=folder)


def test_rerun_from_score_executes_no_generation_and_reuses_the_rest(copied: Any) -> None:
    run = copied.run_folder("looked-at")
    before, made = stamps(run), record(run, 0)
    copied.call("rerun", run.name, "--iteration", "0", "--from", "score")
    assert stamps(run) == before
    assert record(run, 0) == made
    states = {task["name"]: task["state_name"] for task in task_runs(copied, f"{run.name}/it0000")}
    assert states == {f"it0000/{stage}": "Reused" for stage in STAGES}


def test_rerun_with_another_weight_lies_beside_and_reaches_what_depends_on_it(copied: Any) -> None:
    run = copied.run_folder("looked-at")
    before, made = stamps(run), record(run, 0)
    output = copied.call("rerun", run.name, "--iteration", "0", "--from", "score", "--set", "rewards.0.weight=2.0")
    assert "policy 1 changed" in output
    after, remade = stamps(run), record(run, 0)
    assert {path: after[path] for path in before} == before, "an old file was touched"
    assert remade["overrides"] == ["rewards.0.weight=2.0"]
    same = {stage for stage in STAGES if remade["stages"][stage] == made["stages"][stage]}
    assert same == {"generate"}
    scores = pl.read_parquet(run / remade["stages"]["score"]["folder"] / "*.parquet")
    assert (scores["reward"] == 2 * scores["reward_format_regex"]).all()

    # A rerun that cannot be made leaves the record as it was.
    bad = ["rerun", run.name, "--iteration", "0", "--from", "score", "--set"]
    assert "typo" in copied.call(*bad, "rewards.0.function=typo:reward", expect=2)
    assert record(run, 0) == remade

    assert "1 of 2 iterations complete" in copied.call("status", run.name)
    # Policy 1 changed, so iteration 1 is stale: the run makes it anew from the new policy, and is then complete.
    copied.call("run", run.name)
    assert record(run, 1)["policy"]["digest"] == remade["stages"]["train"]["digest"]
    assert record(run, 1)["complete"]
    policies = {row["policy_digest"] for row in pq.read_table(_part(run, 1, "generate")).to_pylist()}
    assert policies == {remade["stages"]["train"]["digest"]}


def test_rerun_up_to_a_stage_leaves_the_rest_to_the_next_run(copied: Any) -> None:
    run = copied.run_folder("looked-at")
    made, before = record(run, 0), stamps(run)
    rerun = ["rerun", run.name, "--iteration", "0", "--set", "rewards.0.weight=2.0"]
    assert "cannot end before it begins" in copied.call(*rerun, "--from", "score", "--to", "generate", expect=2)
    assert record(run, 0) == made

    output = copied.call(*rerun, "--from", "score", "--to", "advantage")
    assert f"iteration 0 is made up to advantage: `rlstages run {run.name}` makes the rest" in output
    part = record(run, 0)
    assert not part["complete"] and part["overrides"] == ["rewards.0.weight=2.0"]
    changed = {stage for stage in STAGES if part["stages"][stage] != made["stages"][stage]}
    assert changed == {"score", "advantage"}
    new = {Path(path).parts[2] for path in stamps(run) if path not in before}
    assert new == {"score", "advantage"}
    tasks = task_runs(copied, f"{run.name}/it0000/from-score-to-advantage")
    assert [task["name"] for task in tasks] == ["it0000/generate", "it0000/score", "it0000/advantage"]
    assert tasks[0]["state_name"] == "Reused"

    copied.call("run", run.name)
    whole = record(run, 0)
    assert whole["complete"] and whole["overrides"] == part["overrides"]
    assert all(whole["stages"][stage] == part["stages"][stage] for stage in ("generate", "score", "advantage"))
    assert whole["stages"]["train"]["fingerprint"] != made["stages"]["train"]["fingerprint"]
    assert record(run, 1)["complete"] and record(run, 1)["policy"]["digest"] == whole["stages"]["train"]["digest"]


def _part(run: Path, iteration: int, stage: str) -> Path:
    return run / record(run, iteration)["stages"][stage]["folder"] / "part-0000.parquet"


def test_what_prefect_shows(finished: Any) -> None:
    """Names, tags and artifacts of an iteration."""
    run = finished.run_folder("looked-at")
    tasks = task_runs(finished, f"{run.name}/it0001")
    assert [task["name"] for task in tasks] == [f"it0001/{stage}" for stage in STAGES]
    tags = {task["name"].split("/")[1]: set(task["tags"]) for task in tasks}
    assert tags["generate"] >= {"stage:generate", "rollout"}
    assert tags["train"] >= {"stage:train", "train"}
    assert tags["score"] >= {"stage:score", "score"}
    summary = artifacts(finished, f"{run.name}-summary")
    executed = [one for one in summary if "| train | executed |" in one["data"]]  # others are of reruns of a copy
    headline = re.compile(r"iteration \d\*\* \(\d of \d\): reward \d")
    assert len(executed) >= 2 and all(headline.search(one["data"]) for one in executed)
    assert len(artifacts(finished, f"{run.name}-metrics")) == len(summary)
    assert "experiments" in artifacts(finished, f"{run.name}-mlflow")[0]["data"]
    progress = artifacts(finished, f"{run.name}-generate")
    assert progress and float(progress[0]["data"]) == 100.0
    lines = [line for line in flow_run_log(finished, run.name) if line.startswith("it0")]
    assert len(lines) == 2
    for number, line in enumerate(lines):
        assert re.fullmatch(rf"it000{number} of 2: reward 0\.\d+, held-out .*%\)\. [A-Z].*", line), line


def test_every_table_opens_with_pyarrow_and_polars(copied: Any) -> None:
    """C72: the tables of several runs and iterations are one table per stage, with one schema."""
    copied.call("run", "smoke", "--set", "iterations=1", "--set", "seed=5", "--set", "name=other")
    root = copied.folder / "runs"
    for stage in STAGES:
        files = sorted(root.glob(f"*/iterations/*/{stage}/*/*.parquet"))
        assert len({file.relative_to(root).parts[0] for file in files}) == 2
        rows = sum(pq.read_table(file).num_rows for file in files)
        assert len({pq.read_schema(file).remove_metadata() for file in files}) == 1
        lazy = pl.scan_parquet(str(root / f"*/iterations/*/{stage}/*/*.parquet"))
        assert lazy.select(pl.len()).collect().item() == rows > 0
        assert lazy.collect().height == rows
    trajectories = pl.scan_parquet(str(root / "*/iterations/*/generate/*/*.parquet")).collect()
    lengths = trajectories.select(
        *(pl.col(name).list.len() for name in ("completion_ids", "sampler_logprobs", "action_mask"))
    )
    assert (lengths["completion_ids"] == lengths["sampler_logprobs"]).all()
    assert (lengths["completion_ids"] == lengths["action_mask"]).all()


def test_show_and_status(finished: Any) -> None:
    shown = finished.call("show", "looked-at", "--iteration", "0")
    assert "best groups" in shown and "worst groups" in shown and "advantage" in shown
    assert "2 of 2 iterations complete" in finished.call("status", "looked-at")
    assert "has no iteration 7" in finished.call("show", "looked-at", "--iteration", "7", expect=2)


def test_a_registered_version_is_evaluated_again(copied: Any) -> None:
    """A version with other settings: rows beside the run's own, whose record does not change."""
    run = copied.run_folder("looked-at")
    made = [record(run, iteration) for iteration in (0, 1)]
    before = stamps(run)
    script = copied.folder / "evaluate_champion.py"
    script.write_text(
        "from tasks import settings\nsettings.apply_defaults()\nfrom flows.evaluation import evaluation\n"
        "print(evaluation('looked-at', 'champion', ['evaluate.problems=5', 'evaluate.samples=3']))\n"
    )
    output = copied.call(driver=script)
    assert "eval/pass_at_3" in output
    new = {path for path in stamps(run, "evaluate") if path not in before}
    (part,) = (run / path for path in new if path.endswith(".parquet"))
    assert pl.read_parquet(part).height == 5 * (1 + 3)
    assert [record(run, iteration) for iteration in (0, 1)] == made

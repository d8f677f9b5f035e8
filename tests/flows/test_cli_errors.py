"""Bad input: one readable block, exit code 2, no traceback, nothing half-written."""

from __future__ import annotations

import json
import os
import signal
import time
from typing import Any

import pytest

pytestmark = pytest.mark.slow


def refused(project: Any, *arguments: str) -> str:
    output: str = project.call(*arguments, expect=2, timeout=120)
    assert "Traceback" not in output
    assert "╭" in output, "not one block"
    return " ".join(output.replace("│", " ").split())


def test_unknown_recipe_key(project: Any) -> None:
    assert "learner.learning_rte: unknown key" in refused(project, "run", "smoke", "--set", "learner.learning_rte=1")
    assert not project.run_folder("smoke").exists()


def test_unknown_recipe(project: Any) -> None:
    output = refused(project, "run", "quickstrat")
    assert "no recipe and no run 'quickstrat'" in output and "quickstart" in output


def test_missing_model(project: Any) -> None:
    assert "there is no model 'nowhere/model'" in refused(
        project, "run", "smoke", "--set", "model.source=nowhere/model"
    )
    assert not project.run_folder("smoke").exists()


def test_reward_that_cannot_be_imported(project: Any) -> None:
    output = refused(project, "run", "smoke", "--set", "rewards.0.function=no_such_module:reward")
    assert "no_such_module" in output
    assert not project.run_folder("smoke").exists()


def test_group_of_one_with_a_group_estimator(project: Any) -> None:
    """C46: refused when the config is read."""
    assert "needs at least 2" in refused(project, "run", "smoke", "--set", "generate.group_size=1")


def test_prompt_longer_than_the_limit(project: Any) -> None:
    """C35: policy `fail` names the prompt and its length; the run can be continued with another policy."""
    output = refused(project, "run", "smoke", "--set", "generate.max_prompt_tokens=20")
    assert "20" in output and "tokens" in output
    assert list(project.run_folder("smoke").rglob("*.parquet")) == []


def test_no_such_run_and_no_such_iteration(project: Any) -> None:
    assert "there is no run 'nothing'" in refused(project, "status", "nothing")
    assert "there is no run 'nothing'" in refused(project, "rerun", "nothing", "--iteration", "0", "--from", "score")


def test_same_name_with_another_config_is_refused_and_more_iterations_are_not(project: Any) -> None:
    """C65: a finished run says so; another configuration under its name is not silently taken."""
    project.call("run", "smoke", "--set", "iterations=1")
    output = refused(project, "run", "smoke", "--set", "learner.lr=0.5", "--set", "iterations=1")
    assert "exists with another config" in output and "learner.lr" in output
    assert "1 of 1 iterations complete" in project.call("status", "smoke")
    project.call("run", "smoke", "--set", "iterations=2")
    assert "2 of 2 iterations complete" in project.call("status", "smoke")
    before = sorted(p.stat().st_mtime_ns for p in project.run_folder("smoke").rglob("*.parquet"))
    assert "nothing to do: all 2 iterations are complete" in project.call("run", "smoke")
    assert sorted(p.stat().st_mtime_ns for p in project.run_folder("smoke").rglob("*.parquet")) == before


def test_two_runs_of_one_name_at_once(project: Any) -> None:
    """Exactly one proceeds; the other says which process holds the run."""
    first = project.start("run", "smoke", "--set", "iterations=50")
    lock = project.run_folder("smoke") / "iterations"
    deadline = time.monotonic() + 120
    while not lock.exists():
        assert first.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    try:
        output = refused(project, "run", "smoke", "--set", "iterations=50")
        assert "is in use" in output and str(first.pid) in output
    finally:
        os.killpg(first.pid, signal.SIGKILL)
        first.communicate()


def test_corrupted_shard_is_put_aside_and_made_again(project: Any) -> None:
    """C76: a cut or altered file is found before it is used, its stage runs again, the result is the same."""
    project.call("run", "smoke", "--set", "iterations=1")
    run = project.run_folder("smoke")
    record = json.loads((run / "iterations/0000/iteration.json").read_text())
    folders = {stage: run / made["folder"] for stage, made in record["stages"].items()}
    shard = folders["generate"] / "part-0000.parquet"
    whole = shard.read_bytes()

    def damage(how: str) -> None:
        if how == "cut":
            shard.write_bytes(whole[:-1])
        else:
            shard.write_bytes(whole[:100] + bytes([whole[100] ^ 1]) + whole[101:])

    again = {
        "cut": ["run", "smoke", "--set", "iterations=1"],
        "altered": ["rerun", "smoke", "--iteration", "0", "--from", "score"],
    }
    for number, (how, command) in enumerate(again.items()):
        damage(how)
        project.call(*command)
        assert shard.read_bytes() == whole, how
        assert len(list((run / "damaged").iterdir())) == number + 1

"""A run that is killed anywhere and continued ends with the same bytes as one that never was."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest

STAGES = ["generate", "score", "advantage", "train", "evaluate", "register"]
KILL_AT = Path(__file__).with_name("kill_at.py")

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("point", "iteration"), [("work", 0), ("publish", 1)])
def test_sigkill_in_every_stage_leaves_no_trace_in_the_result(
    project: Any, quiet_smoke: dict[str, str], point: str, iteration: int
) -> None:
    """C62, C75: one run killed six times, once in each stage, equals the quiet run byte for byte."""
    for stage in STAGES:
        bomb = project.start(point, stage, str(iteration), "run", "smoke", driver=KILL_AT)
        output, _ = bomb.communicate(timeout=120)
        assert bomb.returncode == -signal.SIGKILL, f"{stage}: {output}"
        record = json.loads((project.run_folder("smoke") / f"iterations/{iteration:04d}/iteration.json").read_text())
        assert stage not in record["stages"], f"{stage} was over before the kill"
        deadline = time.monotonic() + 5
        while project.workers() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert project.workers() == [], f"{stage}: the worker outlived its flow"
        finished = project.digests("smoke")
        differing = [name for name in finished if ".partial-" not in name and finished[name] != quiet_smoke.get(name)]
        assert differing == [], f"published before the kill in {stage}"
    project.call("run", "smoke")
    assert project.digests("smoke") == quiet_smoke
    assert list(project.run_folder("smoke").rglob("*.partial-*")) == []


def test_worker_killed_from_outside_costs_one_attempt(project: Any, quiet_smoke: dict[str, str]) -> None:
    """The stage fails with a clear error, its retry starts a new worker, and the run ends as if nothing had been."""
    output = project.call("worker", "train", "1", "run", "smoke", driver=KILL_AT)
    assert "it0001/train failed: tasks.worker" in output and "before it answered" in output
    assert project.digests("smoke") == quiet_smoke

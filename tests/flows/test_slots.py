"""Runs that share a limited tag: they take turns, and a slot never dies with its holder."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow
# An update that takes a second or two, so that runs meet at it.
LONG_TRAIN = ["--set", "learner.update_epochs=8"]


def spans(run: Path, *stages: str) -> list[tuple[float, float, str]]:
    """When these stages began and ended, in seconds since 1970, by the manifests of a run."""
    found = []
    for stage in stages:
        for path in run.glob(f"iterations/[0-9]*/{stage}/*/manifest.json"):
            measured = json.loads(path.read_text())["measured"]
            end = measured["finished_unix_seconds"]
            found.append((end - measured["seconds"], end, f"{run.name} {stage}"))
    return sorted(found)


def kill(process: subprocess.Popen[str]) -> None:
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def words(output: str) -> str:
    return " ".join(output.split())


@pytest.fixture
def limited(server: Any) -> Any:
    """Limits of one on `train` and `gpu`, for the test alone."""
    for tag in ("train", "gpu"):
        server.limit(tag, 1)
    yield server
    for tag in ("train", "gpu"):
        server.unlimit(tag)


def test_two_runs_take_turns(limited: Any, at_own_server: Any) -> None:
    """Two runs with `train = 1`, and `gpu = 1` on training and evaluation, never overlap there, and both get on.

    C79: tags that follow each other in one run, and the flow above that holds nothing, are no deadlock.
    """
    tags = ["--set", 'execution.tags={train=["gpu"], evaluate=["gpu"]}']
    arguments = ["run", "smoke", "--set", "iterations=3", *tags, *LONG_TRAIN, "--set"]
    processes = [at_own_server.start(*arguments, f"name={name}") for name in ("a", "b")]
    outputs = {name: process.communicate(timeout=280)[0] for name, process in zip("ab", processes, strict=True)}
    assert [process.returncode for process in processes] == [0, 0], outputs
    runs = [at_own_server.run_folder(name) for name in "ab"]
    for stages in (["train"], ["train", "evaluate"]):
        turns = sorted(span for run in runs for span in spans(run, *stages))
        assert len(turns) == 6 * len(stages)
        overlaps = [(one, two) for one, two in pairwise(turns) if two[0] < one[1]]
        assert overlaps == []
    order = [name for _, _, name in sorted(span for run in runs for span in spans(run, "train"))]
    assert order not in (sorted(order), sorted(order, reverse=True)), "one after the other, not in turns"
    assert any("waits for tag gpu: 1 of 1 slots held by" in words(output) for output in outputs.values()), outputs
    assert limited.used("train") == limited.used("gpu") == 0


def test_slot_of_a_killed_run_is_free_within_90_seconds(limited: Any, at_own_server: Any) -> None:
    """C78: SIGKILL in training, and of the server as well; another run says who holds the slot, and gets it."""
    arguments = ["run", "smoke", "--set", "iterations=1", *LONG_TRAIN, "--set"]
    first = at_own_server.start(*arguments, "name=first")
    at_own_server.wait_for(at_own_server.run_folder("first") / "slot.json", first)
    kill(first)
    killed_at = time.time()
    limited.kill()
    limited.start()
    assert limited.used("train") == 1
    output = words(at_own_server.call(*arguments, "name=second"))
    assert "it0000/train waits for tag train: 1 of 1 slots held by" in output
    (began, _, _) = spans(at_own_server.run_folder("second"), "train")[0]
    print(f"free {began - killed_at:.1f} s after the kill")
    assert began - killed_at < 90
    assert limited.used("train") == 0


def test_run_that_goes_on_takes_its_own_slot_back_at_once(limited: Any, at_own_server: Any) -> None:
    """It holds the run's lock, so its last attempt is dead, and the slot with it."""
    arguments = ["run", "smoke", "--set", "iterations=1", *LONG_TRAIN]
    first = at_own_server.start(*arguments)
    at_own_server.wait_for(at_own_server.run_folder("smoke") / "slot.json", first)
    kill(first)
    assert limited.used("train") == 1
    assert "waits for" not in words(at_own_server.call(*arguments))
    assert limited.used("train") == 0

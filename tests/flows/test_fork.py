"""A fork, seen from outside: the same bytes as without one, nothing copied, nothing of the parent touched."""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

MADE = ["generate", "score", "advantage", "train", "evaluate"]
"""Stages whose files depend on what went in alone; a decision also depends on the champion it met."""


def record(run: Path, iteration: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / f"iterations/{iteration:04d}/iteration.json").read_text())
    return found


def output(run: Path, iteration: int, stage: str) -> Path:
    return (run / record(run, iteration)["stages"][stage]["folder"]).resolve()


def digests(run: Path, iteration: int, stage: str) -> dict[str, str]:
    """sha256 of every file of the output that an iteration is made of, but for its manifest."""
    folder = output(run, iteration, stage)
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != "manifest.json"]
    return {p.relative_to(folder).as_posix(): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def stamps(run: Path) -> dict[Path, tuple[int, int]]:
    files = {path: path.stat() for path in [run, *run.rglob("*")] if path.name != "lock"}
    return {path: (stat.st_ino, stat.st_mtime_ns) for path, stat in files.items()}


def folders(run: Path) -> set[str]:
    return {path.relative_to(run).as_posix() for path in run.glob("iterations/*/*/*")}


def states(run: Path) -> list[str]:
    return sorted(path.parts[-4] for path in run.glob("iterations/*/train/*/trainer"))


@pytest.fixture(scope="module")
def origin(new_project: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A project with a run of three iterations that keeps the optimizer states of two policies, and a copy of it."""
    project = new_project(tmp_path_factory.mktemp("origin") / "project")
    settings = ["name=origin", "iterations=3", "execution.keep_trainer_states=2"]
    project.call("run", "smoke", *(part for item in settings for part in ("--set", item)))
    assert states(project.run_folder("origin")) == ["0001", "0002"]
    return project


@pytest.fixture
def copied(origin: Any, tmp_path: Path) -> Any:
    folder = tmp_path / "project"
    shutil.copytree(origin.folder, folder, symlinks=True)
    return replace(origin, folder=folder)


def test_a_fork_ends_as_the_run_itself_would_have(origin: Any, copied: Any) -> None:
    run, before = origin.run_folder("origin"), stamps(origin.run_folder("origin"))
    # With the parent's settings, every stage is executed and comes out like the parent's own.
    origin.call("fork", "origin", "twin", "--iteration", "2")
    origin.call("run", "twin")
    twin = origin.run_folder("twin")
    assert folders(twin) == {output(twin, 2, stage).relative_to(twin).as_posix() for stage in [*MADE, "register"]}
    for stage in MADE:
        assert output(twin, 2, stage) != output(run, 2, stage)
        assert digests(twin, 2, stage) == digests(run, 2, stage), stage

    # With another learning rate from train on, it is what a rerun of that stage makes in a copy of the parent.
    origin.call("fork", "origin", "kid", "--iteration", "2", "--from", "train", "--set", "learner.lr=5e-4")
    origin.call("run", "kid")
    copied.call("rerun", "origin", "--iteration", "2", "--from", "train", "--set", "learner.lr=5e-4")
    kid, rerun = origin.run_folder("kid"), copied.run_folder("origin")
    for stage in MADE[:3]:
        assert output(kid, 2, stage) == output(run, 2, stage) and not (kid / "iterations/0002" / stage).exists()
    for stage in ("train", "evaluate"):
        assert digests(kid, 2, stage) == digests(rerun, 2, stage) != digests(run, 2, stage), stage
    manifest = json.loads((output(kid, 2, "train") / "manifest.json").read_text())
    assert manifest["parent"] == "origin@2/train"
    assert stamps(run) == before, "the parent was touched"

    shown = origin.call("status", "kid")
    assert "fork of origin at iteration 2, train" in shown and "3 of 3 iterations complete" in shown
    assert "forks: kid at 2/train, twin at 2/generate" in origin.call("status", "origin")
    assert "is needed by its forks" in origin.call("delete", "origin", "--yes", expect=2)
    assert "nothing to remove" in origin.call("prune", "origin", "--yes")
    assert stamps(run) == before


def test_a_fork_of_what_is_not_there_is_refused(origin: Any) -> None:
    wrong = ["fork", "origin", "wrong", "--iteration"]
    assert "typo" in origin.call(*wrong, "2", "--set", "rewards.0.function=typo:reward", expect=2)
    assert "optimizer state of policy 1 of run" in origin.call(*wrong, "1", expect=2)
    assert not origin.run_folder("wrong").exists()


def test_prune_and_the_way_back_to_a_removed_state(copied: Any) -> None:
    """What a rerun superseded goes, but for what a version leads to; a state that was removed can be made again."""
    run = copied.run_folder("origin")
    made, before = record(run, 0), folders(run)
    lost = ["rerun", "origin", "--iteration", "1", "--from", "train"]
    assert "optimizer state of policy 1 of run" in copied.call(*lost, expect=2)
    copied.call("rerun", "origin", "--iteration", "0", "--from", "train")
    assert record(run, 0) == made and folders(run) == before
    assert states(run) == ["0000", "0001", "0002"]
    copied.call(*lost)
    assert states(run) == ["0000", "0001", "0002"], "two policies count from where the rerun ended, and from the end"
    assert "3 of 3 iterations complete" in copied.call("status", "origin")

    old = output(run, 2, "register").relative_to(run).as_posix()
    copied.call("rerun", "origin", "--iteration", "2", "--from", "train", "--set", "learner.lr=5e-4")
    full = folders(run)
    assert len(full) == len(before) + 3
    assert set(states(run)) == {"0001", "0002"}, "what the reruns needed is gone again"
    assert old in copied.call("prune", "origin", "--yes")
    assert folders(run) == full - {old}

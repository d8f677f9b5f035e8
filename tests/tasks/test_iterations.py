"""Where a run goes on, decided by what is on disk; overrides of single iterations; which stages are due."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rl_core.errors import ConfigError, RunError
from rl_core.manifest import Ref
from rl_core.stages import STAGES
from tasks.iterations import Position
from tasks.storage.files import read_json


def made(run: Any, iteration: int, stage: str) -> Path:
    folder: Path = run.store.path / run.store.iteration(iteration)["stages"][stage]["folder"]
    return folder


def flip(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(bytes([data[0] ^ 1]) + data[1:])


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def resume(run: Any) -> Position:
    """As a new process sees it."""
    found: Position = run.reopened().resume_position()
    return found


def test_a_new_and_a_finished_run(run_folder: Any, plain_config: Any) -> None:
    run = run_folder(plain_config(iterations=2))
    start = Position(0, run.store.base_model(), 0)
    assert resume(run) == start
    after = run.complete(run.complete(start, 2), 4)
    assert resume(run) == after
    assert after.iteration == 2 and after.cursor == 4


def test_a_run_goes_on_after_its_last_complete_iteration(three: Any) -> None:
    assert resume(three) == three.at == Position(3, three.at.policy, 6)
    three.iterations.begin(three.at)
    three.publish(3, "generate", "generate 3", {"policy": three.at.policy}, state={"cursor": 8})
    assert resume(three) == three.at
    assert [three.reopened().position(k).cursor for k in range(4)] == [0, 2, 4, 6]
    with pytest.raises(RunError, match="iteration 3 of run 'run' is not complete") as caught:
        three.reopened().position(4)
    assert caught.value.todo.endswith("rlstages run run")


DAMAGE: dict[str, Callable[[Any], object]] = {
    "an iteration begun again": lambda run: run.iterations.begin(run.reopened().position(1)),
    "another policy before it": lambda run: run.complete(run.reopened().position(0), 2, "remade"),
    "another cursor before it": lambda run: run.complete(run.reopened().position(0), 3),
    "no record": lambda run: (run.store.iteration_dir(1) / "iteration.json").unlink(),
    "a missing file": lambda run: (made(run, 1, "score") / "content").unlink(),
    "a file cut by a byte": lambda run: cut(made(run, 1, "train") / "content"),
    "no manifest": lambda run: (made(run, 1, "register") / "manifest.json").unlink(),
    "an unreadable manifest": lambda run: (made(run, 1, "evaluate") / "manifest.json").write_text("{"),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_what_is_stale_or_damaged_is_made_again(three: Any, damage: Callable[[Any], object]) -> None:
    """C62, C76: iteration 1 starts anew, from what iteration 0 is made of now, though 1 and 2 say they are complete."""
    damage(three)
    now = three.store.iteration(0)["stages"]["train"]
    cursor = read_json(made(three, 0, "generate") / "manifest.json")["state"]["cursor"]
    assert resume(three) == Position(1, Ref(path=now["folder"], digest=now["digest"]), cursor)


def test_remaking_with_the_same_result_makes_nothing_stale(three: Any) -> None:
    """Early cut-off: iteration 0 was run again and ended as before."""
    three.complete(three.reopened().position(0), 2)
    assert resume(three) == three.at


def test_a_checkpoint_that_lost_a_bit_costs_one_iteration(three: Any) -> None:
    """C62: the checkpoint to go on from is read as a whole; older ones are not, nothing needs them any more."""
    flip(made(three, 0, "train") / "content")
    assert resume(three) == three.at
    flip(made(three, 2, "train") / "content")
    assert resume(three).iteration == 2
    flip(made(three, 1, "train") / "content")
    assert resume(three) == Position(0, three.store.base_model(), 0)


def test_overrides_are_kept_with_their_iteration(three: Any) -> None:
    """Recorded with `begin`, applied to that iteration only, and applied again when a new process goes on."""
    at = three.at
    three.iterations.begin(at, ["learner.lr=0.5", "rewards.last_integer.weight=2"])
    again = three.reopened()
    assert again.config(3) == again.config(2) == three.config, "nothing is applied before the iteration is opened"
    again.begin(at)
    assert again.config(3).learner.lr == 0.5 and again.config(3).rewards[0].weight == 2.0
    assert again.config(2).learner.lr == three.config.learner.lr
    assert three.store.iteration(3)["overrides"] == ["learner.lr=0.5", "rewards.last_integer.weight=2"]
    again.begin(at, ["seed=3"])
    assert (again.config(3).seed, again.config(3).learner.lr) == (3, three.config.learner.lr)
    again.begin(at, [])
    assert again.config(3) == three.config and three.store.iteration(3)["overrides"] == []


@pytest.mark.parametrize("override", ["learner.lr=-1", "learner.rate=1", "no equals sign"])
def test_an_override_that_does_not_fit_is_refused_before_it_is_written(three: Any, override: str) -> None:
    path = three.store.iteration_dir(2) / "iteration.json"
    before = path.read_bytes()
    with pytest.raises(ConfigError):
        three.iterations.begin(three.reopened().position(2), [override])
    assert path.read_bytes() == before
    with pytest.raises(ConfigError):
        three.iterations.begin(three.at, [override])
    assert not three.store.iteration_dir(3).exists()


@pytest.mark.parametrize(
    ("every", "iterations", "evaluated"),
    [(1, 3, [0, 1, 2]), (2, 5, [1, 3, 4]), (3, 6, [2, 5]), (9, 2, [1])],
)
def test_every_so_many_iterations_and_the_last_are_evaluated(
    run_folder: Any, every: int, iterations: int, evaluated: list[int], plain_config: Any
) -> None:
    run = run_folder(plain_config(iterations=iterations, evaluate={"every": every}))
    at = resume(run)
    for k in range(iterations):
        at = run.complete(at, k + 1)
    assert resume(run).iteration == iterations
    due = {k: list(run.store.iteration(k)["stages"]) for k in range(iterations)}
    for k in range(iterations):
        assert run.iterations.stages_due(k) == list(STAGES)[: 6 if k in evaluated else 4]
        assert set(due[k]) == set(run.iterations.stages_due(k))


def test_an_evaluation_that_is_no_longer_due_leaves_the_record(three: Any) -> None:
    """Rerun with a wider spacing: the iteration is not made of its old evaluation any more; the files stay."""
    folder = made(three, 2, "evaluate")
    at = three.reopened().position(2)
    three.iterations.begin(at, ["evaluate.every=5"])
    three.iterations.end(2)
    assert set(three.store.iteration(2)["stages"]) == {"generate", "score", "advantage", "train"}
    assert folder.is_dir()


def test_a_stand_alone_evaluation_enters_no_record(three: Any) -> None:
    before = {p: p.stat().st_mtime_ns for p in three.store.path.rglob("iteration.json")}
    again = three.reopened()
    for policy in (0, 2, 3):
        again.begin_evaluation(policy, ["evaluate.problems=3"])
        assert (again.config(policy - 1).evaluate.problems, again.cursor(policy - 1)) == (3, 0)
        again.add(policy - 1, "evaluate", {"folder": "elsewhere", "fingerprint": "f", "digest": "d"})
    assert {p: p.stat().st_mtime_ns for p in three.store.path.rglob("iteration.json")} == before


def test_a_record_is_written_only_when_it_changes(three: Any) -> None:
    path = three.store.iteration_dir(2) / "iteration.json"
    before = path.stat().st_mtime_ns
    record = dict(three.store.iteration(2)["stages"]["score"])
    three.iterations.add(2, "score", record)
    assert path.stat().st_mtime_ns == before
    three.iterations.add(2, "score", record | {"digest": "another"})
    assert three.store.iteration(2)["stages"]["score"]["digest"] == "another"
    assert three.iterations.cursor(2) == 4 and three.reopened().cursor(2) == 0

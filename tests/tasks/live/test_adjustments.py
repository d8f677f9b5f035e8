"""Live changes: from which iteration they hold, what is refused, and that no iteration changes under way."""

from __future__ import annotations

import io
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from rl_core.errors import ConfigError, RunError
from rl_core.manifest import Ref
from rl_core.recipes import apply_overrides, build_config, config_json
from tasks.iterations import Iterations, Position
from tasks.live.adjustment_log import Adjustment, AdjustmentLog
from tasks.live.adjustments import adjust, adjustments, changes_at, check_not_adjusted, print_adjustments
from tasks.worker import Services


@pytest.fixture
def run(run_folder: Any, plain_config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("RLSTAGES_RUNS_DIR", str(tmp_path / "runs"))
    return run_folder(plain_config())


def lrs(iterations: Iterations) -> list[float]:
    return [iterations.config(k).learner.lr for k in range(6)]


def adjusted(*overrides: str, why: str = "") -> list[tuple[str, Any, Any, int]]:
    return [(one.key, one.old, one.new, one.from_iteration) for one in adjust("run", [*overrides], why)]


def test_a_change_holds_from_the_first_iteration_that_has_not_begun(run: Any) -> None:
    start = Position(0, run.store.base_model(), 0)
    assert adjusted("learner.lr=1.0") == [("learner.lr", 1e-6, 1.0, 0)]
    run.iterations.begin(start)
    assert adjusted("learner.lr=2.0") == [("learner.lr", 1.0, 2.0, 1)]
    at = run.complete(start, 2)
    assert adjusted("learner.lr=3.0") == [("learner.lr", 2.0, 3.0, 1)]
    for k in range(1, 5):
        at = run.complete(at, 2 * k + 2)
    assert adjusted("learner.lr=4.0") == [("learner.lr", 3.0, 4.0, 5)], "for the day when the run is extended"
    assert lrs(run.reopened()) == [1.0, 3.0, 3.0, 3.0, 3.0, 4.0]
    assert run.reopened().resume_position().iteration == 5, "nothing that was made became stale"


def test_several_changes_against_a_naive_reading(three: Any) -> None:
    """One line per changed key; who, when and why are kept; the config is that of the overrides in their order."""
    adjust("run", ["rewards.0.weight=2", "learner.betas=[0.8, 0.9]"], "first")
    three.iterations.begin(three.at)
    adjust("run", ["scoring={on_error='mark', timeout_seconds=3}"], "second")
    found = adjustments(three.store)
    assert [(one.id, one.key, one.from_iteration, one.why) for one in found] == [
        (1, "rewards.last_integer.weight", 3, "first"),
        (2, "learner.betas", 3, "first"),
        (3, "scoring.on_error", 4, "second"),
        (4, "scoring.timeout_seconds", 4, "second"),
    ]
    assert all("@" in one.by and one.at.endswith("Z") for one in found)
    assert changes_at(three.store, 4) == found[2:] and changes_at(three.store, 2) == []
    overrides = {
        3: ["rewards.0.weight=2", "learner.betas=[0.8, 0.9]"],
        4: ["scoring.on_error=mark", "scoring.timeout_seconds=3"],
    }
    for k in range(6):
        due = [item for start, items in overrides.items() if start <= k for item in items]
        assert three.reopened().config(k) == build_config(apply_overrides(config_json(three.config), due), "naive")


def test_an_iteration_has_its_own_overrides_on_top(three: Any) -> None:
    adjust("run", ["learner.lr=2.0", "learner.weight_decay=0.5"])
    three.iterations.begin(three.at, ["learner.lr=3.0"])
    learner = three.iterations.config(3).learner
    assert (learner.lr, learner.weight_decay, three.iterations.config(4).learner.lr) == (3.0, 0.5, 2.0)
    three.iterations.begin(three.at, [])
    assert three.iterations.config(3).learner.lr == 2.0


def test_the_spacing_of_evaluations_may_change(run: Any) -> None:
    adjust("run", ["evaluate.every=2"])
    assert [len(run.reopened().stages_due(k)) for k in range(5)] == [4, 6, 4, 6, 6]


def test_what_is_remade_gets_the_change_and_a_later_one_is_overruled(three: Any) -> None:
    """After a rerun of iteration 0, 1 and 2 are made anew: a change holds from 1, also against one of 3."""
    adjust("run", ["learner.lr=5.0"])
    three.complete(three.reopened().position(0), 2, "remade")
    assert adjusted("learner.lr=1e-6") == [("learner.lr", 1e-6, 1e-6, 1)]
    assert lrs(three.reopened()) == [1e-6] * 6
    assert adjusted("learner.lr=1e-6") == []


def test_a_rerun_under_way_changes_nothing_for_what_follows_it(three: Any) -> None:
    """Whether iterations 2 and 3 are made anew is not known yet: they keep their numbers."""
    three.iterations.begin(three.reopened().position(1))
    assert adjusted("learner.lr=2.0")[0][3] == 3


def test_an_old_line_that_comes_back_is_remade_with_the_changes_it_is_to_have(three: Any) -> None:
    """Iteration 0 is remade, the run adjusted from 1, iteration 0 reset: 1 and 2 fit again but for the change."""
    three.complete(three.reopened().position(0), 2, "remade")
    adjust("run", ["learner.lr=2.0"])
    at = three.complete(three.reopened().position(0), 2)
    assert at.policy.digest == three.store.iteration(1)["policy"]["digest"]
    again = three.reopened()
    assert again.resume_position() == at and again.is_stale(at)
    assert again.config(1).learner.lr == 2.0


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["seed=1"], "cannot change in a live run"),
        (["learner.lr=2.0", "iterations=9"], "cannot change in a live run"),
        (["learner.lr=-1"], "learner.lr"),
        (["learner.epsilon=1"], "unknown key"),
        (["learner.minibatches=9"], "prompts_per_iteration is 8"),
        (["learner.lr"], "key=value"),
    ],
)
def test_nothing_is_written_of_a_change_that_is_refused(three: Any, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        adjust("run", overrides)
    assert not (three.store.path / "adjustments.jsonl").exists()
    with pytest.raises(RunError, match="there is no run 'other'"):
        adjust("other", ["learner.lr=1.0"])


def test_a_change_has_to_fit_later_changes_and_overrides_too(three: Any) -> None:
    """Iterations 1 and 2 are to be made anew, 2 with minibatches of its own; from 3 on there are only two prompts."""
    three.iterations.begin(three.reopened().position(2), ["learner.minibatches=4"])
    adjust("run", ["generate.prompts_per_iteration=2"])
    three.complete(three.reopened().position(0), 2, "remade")
    with pytest.raises(ConfigError, match="need at least as many prompts"):
        adjust("run", ["learner.minibatches=3"])
    with pytest.raises(ConfigError, match="iteration 2 with its own overrides"):
        adjust("run", ["generate.prompts_per_iteration=3"])
    assert adjusted("generate.prompts_per_iteration=4") == [("generate.prompts_per_iteration", 8, 4, 1)]


def test_half_a_line_of_a_crash_is_cut_and_seen_by_nobody(three: Any) -> None:
    adjust("run", ["learner.lr=2.0"])
    path = three.store.path / "adjustments.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"id": 2, "key": "learner.l')
    assert len(adjustments(three.store)) == 1 and path.stat().st_size > len(whole), "reading changes nothing"
    adjust("run", ["learner.lr=3.0"])
    assert path.read_bytes().startswith(whole)
    assert [one.new for one in adjustments(three.store)] == [2.0, 3.0]


LOOP = """
import sys, time
from tasks.live.adjustments import adjust
for number in range(1, 41):
    adjust("run", [f"learner.lr={float(number)}"])
    time.sleep(0.01)
"""


def test_another_process_adjusts_while_iterations_begin(run_folder: Any, tmp_path: Path, plain_config: Any) -> None:
    """No change falls between an iteration's config and its record, and the run's lock is not needed to adjust."""
    run = run_folder(plain_config(iterations=200))
    env = {"RLSTAGES_RUNS_DIR": str(tmp_path / "runs"), "PYTHONPATH": str(Path(__file__).parents[3])}
    at = Position(0, run.store.base_model(), 0)
    used = []
    with run.store.lock(), subprocess.Popen([sys.executable, "-c", LOOP], env=env) as other:
        while other.poll() is None and at.iteration < 200:
            before = len(adjustments(run.store))
            at = run.complete(at, at.iteration + 1)
            used.append(run.iterations.config(at.iteration - 1).learner.lr)
            while not before and not adjustments(run.store) and other.poll() is None:
                time.sleep(0.01)
        other.wait()
    assert other.returncode == 0 and len(adjustments(run.store)) == 40
    assert lrs(run.reopened())[:1] == used[:1]
    assert [run.reopened().config(k).learner.lr for k in range(len(used))] == used
    assert len(set(used)) > 3, "the changes did not meet the iterations"
    assert run.reopened().resume_position() == at


def test_a_setting_that_was_adjusted_is_changed_by_adjusting_it(three: Any) -> None:
    """The run's config would be overruled without a word."""
    adjust("run", ["execution.generate_rows=64"])
    same = build_config(apply_overrides(config_json(three.config), ["iterations=9"]), "test")
    check_not_adjusted(three.store, same)
    with pytest.raises(ConfigError, match=r"execution.generate_rows of run 'run' was adjusted") as caught:
        check_not_adjusted(
            three.store, build_config(apply_overrides(config_json(same), ["execution.generate_rows=8"]), "")
        )
    assert "rlstages adjust run --set execution.generate_rows" in caught.value.todo


def test_the_table_of_changes(three: Any) -> None:
    def shown() -> str:
        console = Console(file=io.StringIO(), width=160)
        print_adjustments(console, "run")
        text: str = console.file.getvalue()  # type: ignore[attr-defined]
        return text

    assert "learner.lr" in shown() and "rewards.*.weight" in shown()
    adjust("run", ["learner.betas=[0.5, 0.9]"], "[bold] and odd")
    assert "[0.9, 0.999]" in shown() and "[0.5, 0.9]" in shown() and "[bold] and odd" in shown()
    (one,) = adjustments(three.store)
    assert (
        str(one)
        == f"from iteration 3: learner.betas [0.9, 0.999] -> [0.5, 0.9] (by {one.by}, {one.at}, [bold] and odd)"
    )


def test_records_from_before_there_were_adjustments_are_complete(three: Any) -> None:
    for k in range(3):
        record = three.store.iteration(k)
        del record["adjustments"]
        three.store.write_iteration(k, record)
    assert three.reopened().resume_position() == three.at


def test_a_log_takes_entries_of_another_run(run_folder: Any, plain_config: Any) -> None:
    """As a fork does; the iterations it refers to are made with them."""
    run = run_folder(plain_config())
    entry = Adjustment(id=1, at="", by="", why="", key="learner.lr", old=1e-6, new=2.0, from_iteration=0)
    AdjustmentLog(run.store).append([entry])
    run.iterations.begin(Position(0, Ref(path="base", digest="base"), 0))
    assert run.store.iteration(0)["adjustments"] == [1] and run.iterations.config(0).learner.lr == 2.0


@pytest.mark.slow
def test_another_weight_restarts_no_reward_process(tmp_path: Path, plain_config: Any) -> None:
    services = Services(tmp_path)
    rows = [
        {"group_id": 0, "sample_id": 0, "text": "7", "prompt_messages": [], "completion_ids": [1], "truncated": False}
        | {"data": {"answer": "7"}}
    ]
    try:
        totals, pids = [], []
        for weight in (1.0, 3.0):
            pool = services.rewards(plain_config(rewards=[{"function": "last_integer", "weight": weight}]))
            totals += [score.total for score in pool.score(rows)]
            pids.append(pool.pids)
        assert totals == [1.0, 3.0] and pids[0] == pids[1] and len(pids[0]) == 1
    finally:
        services.close_rewards()

"""What `status`, `show` and the end of a run tell, against a run folder whose content is known."""

from __future__ import annotations

import io
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from rl_core.config import RunConfig
from rl_core.errors import RunError
from rl_core.manifest import Ref
from tasks.attempts import note_attempt
from tasks.display import status
from tasks.iterations import Position
from tasks.live.adjustments import adjust
from tasks.live.pausing import pause, resume

# MLflow 3.17 sets up its own tables with a loader option that SQLAlchemy 2.1 has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy")

Row = dict[str, Any]


@pytest.fixture
def console() -> Console:
    return Console(file=io.StringIO(), width=200, record=True)


@pytest.fixture
def run(bench: Any, run_folder: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A run of 3 iterations: the first complete, with one value not defined; the second begun."""
    monkeypatch.setenv("RLSTAGES_RUNS_DIR", str(tmp_path / "runs"))
    made = run_folder(bench.config())
    made.start = Position(0, made.store.base_model(), 0)
    return made


def publish(run: Any, bench: Any, rows: Any, at: Position, table: list[Row]) -> dict[str, Ref]:
    """Trajectories, scores and advantages of an iteration, complete rows made of what the test says of each."""
    k = at.iteration
    run.iterations.begin(at)
    shown = [
        {"group": row["group"], "sample": row["sample"], "text": row.get("text", "answer"), "seed": k} for row in table
    ]
    refs = {"policy": at.policy}
    refs["generate"] = run.publish(k, "generate", rows(bench.trajectories(shown)), dict(refs), state={"cursor": 9})
    scores, advantages = [], []
    for row in table:
        key, reward = {"group_id": row["group"], "sample_id": row["sample"]}, row["reward"]
        scores.append(key | {"reward": reward, "status": "ok" if reward is not None else "unscored"})
        advantages.append(
            key
            | {"reward": reward, "advantage": row.get("advantage", 0.0), "keep": True, "drop_reason": row.get("why")}
        )
    inputs = {"generate": refs["generate"]}
    refs["score"] = run.publish(k, "score", scores, inputs)
    metrics = {"reward/mean": 0.375, "groups/kept_frac": None, "completion/tokens_mean": 3.25}
    refs["advantage"] = run.publish(k, "advantage", advantages, inputs | {"score": refs["score"]}, metrics=metrics)
    return refs


def table(rewards: dict[int, list[float | None]]) -> list[Row]:
    return [{"group": g, "sample": s, "reward": r} for g, found in rewards.items() for s, r in enumerate(found)]


REWARDS: dict[int, list[float | None]] = {
    0: [0.5, 0.5],
    1: [None, None],
    2: [1.0, 0.75],
    3: [0.0, None],
    4: [0.25, 0.0],
}


def lines(console: Console) -> list[str]:
    return [line.rstrip() for line in console.export_text().splitlines() if line.strip()]


def completions(console: Console) -> list[tuple[str, ...]]:
    """Sample, reward, advantage, finish reason and answer of every line that shows a completion."""
    pattern = r" +(\d+) +(-?[\d.]+|-) +([+-][\d.]+|-) +(stop|length) +(.*?) *"
    found = (re.fullmatch(pattern, line) for line in console.export_text(clear=False).splitlines())
    return [match.groups() for match in found if match]


def evaluate(run: Any, k: int, train: Ref, accuracy: float, problems: int = 6) -> Ref:
    metrics = {"eval/greedy_accuracy": accuracy}
    found: Ref = run.publish(
        k, "evaluate", f"{accuracy} {problems}", {"train": train}, metrics=metrics, identity={"problems": problems}
    )
    return found


def complete(run: Any, bench: Any, rows: Any) -> Position:
    refs = publish(run, bench, rows, run.start, table(REWARDS))
    inputs = {name: refs[name] for name in ("policy", "generate", "advantage")}
    trained = run.publish(0, "train", "weights", inputs, measured={"seconds": 60})
    evaluated = evaluate(run, 0, trained, 0.5)
    run.publish(0, "register", "version", {"train": trained, "evaluate": evaluated}, state={"alias": "champion"})
    run.iterations.end(0)
    return Position(1, trained, 9)


def test_a_row_per_iteration(run: Any, bench: Any, rows: Any, console: Console) -> None:
    following = complete(run, bench, rows)
    run.iterations.begin(following)
    run.publish(1, "generate", "trajectories", {"policy": following.policy}, state={"cursor": 18})
    (run.store.iteration_dir(3)).mkdir()
    shutil.copy(run.store.iteration_dir(0) / "iteration.json", run.store.iteration_dir(3))
    status.print_status(console, "bench")
    head, columns, *table = lines(console)
    assert head.split("  ")[1] == f"grpo on {bench.model}, reasoning_gym, 2 prompts × 4 completions, seed 3"
    assert columns.split() == ["iteration", "state", "reward", "held-out", "signal", "tokens", "seconds", "gate"]
    assert table[0].split() == ["0", "complete", "0.375", "0.5", "not", "defined", "3.25", "67.5", "passed"]
    assert table[1].split() == ["1", "begun", "-", "-", "-", "-", "1.5"]
    assert table[2].split()[:2] == ["2", "missing"]
    assert table[4] == "nobody works on it: rlstages run bench"
    assert table[5].startswith("1 of 3 iterations complete, outputs in ")


def test_who_works_on_a_run_and_what_was_asked_of_it(run: Any, bench: Any, rows: Any, console: Console) -> None:
    """All runs in a row each, without one of their names; a deletion that was killed is no run."""
    complete(run, bench, rows)
    (run.store.path.parent / "gone.partial-1").mkdir()
    shutil.copy(run.store.path / "run.json", run.store.path.parent / "gone.partial-1")
    pause("bench", "lunch")
    adjust("bench", ["learner.lr=0.5"])
    with run.store.lock():
        note_attempt(run.store)
        status.print_runs(console)
        head, row = lines(console)
    assert head.split() == ["run", "iterations"]
    assert re.fullmatch(
        rf"bench +1 of 3 +process {os.getpid()} works on it; paused by .*: lunch; "
        r"1 live changes: rlstages adjust bench",
        row,
    )
    resume("bench")
    status.print_runs(console)
    assert "nobody works on it: rlstages run bench; 1 live changes" in lines(console)[1]


def test_a_damaged_output_is_named(run: Any, bench: Any, rows: Any, console: Console) -> None:
    complete(run, bench, rows)
    made = run.store.iteration(0)["stages"]
    (run.store.path / made["score"]["folder"] / "part-0000.parquet").unlink()
    (run.store.path / made["train"]["folder"] / "content").write_text("cut")
    status.print_status(console, "bench")
    assert "damaged: score, train" in lines(console)[2]


def test_the_best_and_the_worst_groups(run: Any, bench: Any, rows: Any, console: Console) -> None:
    """Ordered by mean reward over the scored completions; a group without any is the last; none is shown twice."""
    publish(run, bench, rows, run.start, table(REWARDS))
    for groups, best, worst in ((1, [2], [1]), (2, [2, 0], [1, 3]), (3, [2, 0, 4], [1, 3]), (9, [2, 0, 4, 3, 1], [])):
        status.print_samples(console, "bench", 0, groups)
        text = console.export_text()
        upper, lower = text.split("worst groups")
        assert "bench, iteration 0: best groups" in upper
        shown = [
            [int(line.split()[1]) for line in part.splitlines() if line.startswith("group ")] for part in (upper, lower)
        ]
        assert shown == [best, worst], groups


def test_every_completion_with_its_numbers(run: Any, bench: Any, rows: Any, console: Console) -> None:
    """Nulls as a dash, reasons beside; text is one line, as it is, and cannot steer the terminal."""
    given = [
        {"group": 7, "sample": 0, "reward": 1.0, "advantage": 0.70710678, "text": "two\nlines [bold]x[/]"},
        {"group": 7, "sample": 1, "reward": None, "why": "unscored", "text": "\x1b[2J\x07\u202e\x9b é 数\t."},
        {"group": 7, "sample": 2, "reward": -1.5, "advantage": -0.70710678, "text": "y" * 300},
    ]
    publish(run, bench, rows, run.start, given)
    status.print_samples(console, "bench", 0, 2)
    text = console.export_text(clear=False)
    assert "\x1b" not in text and "\x07" not in text and "\u202e" not in text
    assert completions(console) == [
        ("0", "1.000", "+0.707", "stop", r"two\nlines [bold]x[/]"),
        ("1", "-", "+0.000", "stop", r"\x1b[2J\x07\u202e\x9b é 数\t. unscored"),
        ("2", "-1.500", "-0.707", "stop", "y" * (len(completions(console)[2][4]) - 1) + "…"),
    ]
    assert max(map(len, text.splitlines())) <= 200
    status.print_samples(console, "bench", 0, 1)
    assert "group 7  prompt 7" in lines(console)


def test_while_an_iteration_is_made_anew(run: Any, bench: Any, rows: Any, console: Console) -> None:
    """Another policy came before it: old rewards are not shown beside new completions, nor old metrics as current."""
    complete(run, bench, rows)
    other = Position(0, Ref(path="elsewhere", digest="another policy"), 0)
    run.iterations.begin(other)
    status.print_status(console, "bench")
    assert lines(console)[2].split() == ["0", "begun", "-", "-", "-", "-", "0.0"]
    with pytest.raises(RunError, match="has no trajectories yet"):
        status.print_samples(console, "bench", 0, 1)
    new = rows(bench.trajectories([{"group": g, "sample": s, "text": "new"} for g in range(5) for s in range(2)]))
    run.publish(0, "generate", new, {"policy": other.policy}, state={"cursor": 9})
    status.print_samples(console, "bench", 0, 5)
    assert [found[1:] for found in completions(console)] == [("-", "-", "stop", "new")] * 10


def test_runs_and_iterations_that_are_not_there(run: Any, bench: Any, rows: Any, console: Console) -> None:
    with pytest.raises(RunError, match="no run 'other'") as caught:
        status.print_status(console, "other")
    assert caught.value.expected == "bench"
    with pytest.raises(RunError, match="has no iteration 0") as caught:
        status.print_samples(console, "bench", 0, 1)
    assert caught.value.expected == "a run with at least one iteration"
    complete(run, bench, rows)
    with pytest.raises(RunError, match="has no iteration 4") as caught:
        status.check_run("bench", 4)
    assert caught.value.expected == "0 to 0"
    found: RunConfig = status.check_run("bench", 0)
    assert found == run.config


def test_the_end_of_a_run(
    run: Any, bench: Any, rows: Any, mlflow_template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before and after are of the same problems, although other evaluations of the first policy lie beside them."""
    shutil.copy(mlflow_template, tmp_path / "mlflow.db")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    complete(run, bench, rows)
    assert "held-out" not in status.closing_lines("bench")
    for number in range(4):
        evaluate(run, -1, run.start.policy, 0.9 - number / 10, problems=100 + number)
    evaluate(run, -1, run.start.policy, 0.21875)
    found = status.closing_lines("bench")
    assert found["held-out"] == "0.219 before training, 0.5 after 1 iterations"
    assert found["run folder"] == str(run.store.path)
    assert found["champion"] == "none yet"
    assert found["samples"] == "rlstages show bench --iteration 0"
    assert found["Prefect UI"] == "http://127.0.0.1:4200, after `rlstages up`" and "5000" in found["MLflow UI"]

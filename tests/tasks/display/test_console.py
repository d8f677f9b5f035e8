"""The terminal: the line of an iteration and the block of an error hold the right numbers and words."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from rl_core.errors import ConfigError, DataError, RewardFailedError, WorkerError
from tasks.display.console import Display, print_end, print_error
from tasks.events import StageEvent, tell
from tasks.stage import StageResult


@pytest.fixture
def console() -> Console:
    return Console(file=io.StringIO(), width=120, record=True)


def finished(iteration: int, stage: str, seconds: float = 1.0, reused: bool = False, **more: object) -> None:
    result = StageResult(
        stage=stage,
        folder="folder",
        digest="d",
        fingerprint="f",
        rows=8,
        reused=reused,
        metrics=more.get("metrics", {}),
        state=more.get("state", {}),
        seconds=seconds,
    )
    tell(StageEvent("started", "run", iteration, stage))
    tell(StageEvent("progress", "run", iteration, stage, done=4, total=8))
    tell(StageEvent("finished", "run", iteration, stage, result=result))


COLUMNS = ["reward", "held-out", "groups", "gener", "score", "advan", "train", "evalu", "regis"]


def table(console: Console) -> dict[str, list[str | None]]:
    """The lines below the one header, by their first word; a dash is null."""
    rows = [line.split() for line in console.export_text(clear=False).splitlines() if line.strip()]
    start = rows.index(COLUMNS)
    assert COLUMNS not in rows[start + 1 :]
    return {row[0]: [None if cell == "-" else cell for cell in row[1:]] for row in rows[start + 1 :]}


def test_one_line_per_iteration(console: Console) -> None:
    """Reward, held-out accuracy, groups with signal, seconds per stage, and what became the champion."""
    with Display(console):
        finished(-1, "evaluate", 5.26, metrics={"eval/greedy_accuracy": 0.2265625})
        finished(0, "generate", 1.94)
        finished(0, "score", 0.0, reused=True)
        finished(0, "advantage", 0.12, metrics={"reward/mean": 0.125, "groups/count": 8.0, "groups/kept_frac": 0.625})
        finished(0, "train", 8.06)
        finished(0, "evaluate", 2.8, metrics={"eval/greedy_accuracy": 0.28125, "eval/avg_at_2": 0.9})
        finished(0, "register", 0.3, state={"alias": "champion"})
        tell(StageEvent("completed", "run", 0))
        finished(1, "generate", 2.0)
        finished(1, "advantage", 0.1, metrics={"reward/mean": None, "groups/count": 8.0, "groups/kept_frac": 0.0})
        tell(StageEvent("completed", "run", 1))
    tell(StageEvent("completed", "run", 5))  # nobody listens any more
    found = table(console)
    assert found["start"] == [None, "0.227", None, None, None, None, None, "5.3", None]
    assert found["it0000"] == ["0.125", "0.281", "5/8", "1.9", "=", "0.1", "8.1", "2.8", "0.3", "champion"]
    assert found["it0001"] == [None, None, "0/8", "2.0", None, "0.1", None, None, None]
    assert set(found) == {"start", "it0000", "it0001"}


def test_accuracy_of_a_run_that_only_samples(console: Console) -> None:
    with Display(console):
        metrics = {"eval/avg_at_4_high": 0.75, "eval/avg_at_4": 0.5, "eval/avg_at_4_low": 0.25, "eval/pass_at_4": 1.0}
        finished(0, "evaluate", metrics=metrics, state={"alias": "challenger"})
        tell(StageEvent("completed", "run", 0))
    assert table(console)["it0000"][1:3] == ["0.500", None] and len(table(console)["it0000"]) == 9


def test_a_stage_that_is_tried_again(console: Console) -> None:
    """The reason of a retry is one line, whatever its words; an error that ends the run is told at the end."""
    with Display(console):
        tell(StageEvent("started", "run", 0, "score"))
        tell(StageEvent("failed", "run", 0, "score", error=WorkerError("pipe [/tmp/a] [red]broke", got="signal 9")))
        tell(StageEvent("started", "run", 0, "score"))
        tell(StageEvent("failed", "run", 0, "score", error=DataError("not this one")))
        tell(StageEvent("failed", "run", 0, "score", error=KeyError("nor this one")))
        finished(0, "score", 0.5)
        tell(StageEvent("completed", "run", 0))
    text = console.export_text(clear=False)
    assert "it0000/score failed: pipe [/tmp/a] [red]broke\n" in text
    assert "not this one" not in text and "nor this one" not in text
    assert table(console)["it0000"][4] == "0.5"


def test_an_error_is_one_block(console: Console) -> None:
    """Every part of it is shown as it is, also what looks like markup; parts that are not there take no line."""
    error = RewardFailedError(
        "reward 'my:fn' failed for [bold]group 1[/]",
        expected="a number",
        got="ConnectionError: [/] refused",
        todo="mend it",
        details='Traceback (most recent call last):\n  File "my.py", line 3\nConnectionError',
    )
    print_error(console, error)
    lines = [line.strip("│ ") for line in console.export_text().splitlines()]
    assert lines[0].startswith("╭─ RewardFailedError ─") and lines[-1].startswith("╰")
    assert lines[1:-1] == [
        "reward 'my:fn' failed for [bold]group 1[/]",
        "expected  a number",
        "got  ConnectionError: [/] refused",
        "to do  mend it",
        "",
        "Traceback (most recent call last):",
        'File "my.py", line 3',
        "ConnectionError",
    ]
    print_error(console, ConfigError("short"))
    assert [line.strip("│ ") for line in console.export_text().splitlines()][1:-1] == ["short"]


def test_the_closing_block(console: Console) -> None:
    print_end(console, {"run folder": Path("/data/[/x]/runs"), "champion": "models:/[a]@champion is version 3"})
    assert console.export_text() == "run folder  /data/[/x]/runs\n  champion  models:/[a]@champion is version 3\n"

"""The score stage: failures of single rows, reruns that score only what is missing, totals and limits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rl_core.config import RunConfig
from rl_core.errors import RewardContractError, RewardFailedError
from rl_core.manifest import Ref

pytestmark = pytest.mark.slow  # each test starts a process for the rewards

JUDGE = """
import pathlib
HERE = pathlib.Path(__file__).parent

def judge(completions, index):
    with open(HERE / "calls.txt", "a") as file:
        file.write("".join(f"{i}\\n" for i in index))
    if 5 in index and not (HERE / "mended").exists():
        raise ConnectionError("the judge refused")
    return [0.125 * i for i in index]

def given(completions, value, scale=1.0):
    return [None if v is None else scale * v for v in value]

def hinted(completions, hint):
    return [None if h is None else float(h) for h in hint]

def code_points(completions):
    return [float(sum(map(ord, text))) for text in completions]
"""

REFUSED = "ConnectionError: the judge refused"
FIFTH = {"reward_r": 0.625, "reason_r": None, "reward": 1.25, "status": "ok"}
Row = dict[str, Any]


@pytest.fixture
def module(user_module: Any) -> Callable[[str], str]:
    name, _ = user_module(JUDGE)
    return lambda function: f"{name}:{function}"


def make(bench: Any, function: str, data: list[Row], **changes: Any) -> tuple[RunConfig, Ref]:
    """A config with that one reward, and trajectories in groups of four whose data has these columns."""
    changes = {
        "rewards": [{"function": function, "name": "r"}],
        "environment": bench.prompts(["x"], data[:1]),
        **changes,
    }
    rows = [{"group": i // 4, "sample": i % 4, "data": columns} for i, columns in enumerate(data)]
    return bench.config(**changes), bench.trajectories(rows)


EIGHT = [{"index": i} for i in range(8)]  # 2 prompts × 4 completions


def test_a_failing_row_fails_the_stage(bench: Any, module: Any) -> None:
    """C02, policy `fail`: row, function and the user's own traceback are named; nothing is written."""
    config, trajectories = make(bench, module("judge"), EIGHT)
    context = bench.context(config, generate=trajectories)
    with pytest.raises(RewardFailedError, match="group 1, sample 1") as caught:
        bench.perform("score", context)
    assert module("judge") in caught.value.message
    assert caught.value.got == "ConnectionError: the judge refused"
    assert 'raise ConnectionError("the judge refused")' in caught.value.details
    assert list(context.output.iterdir()) == []


def test_a_marked_row_alone_is_scored_by_the_rerun(bench: Any, module: Any, rows: Any, tmp_path: Path) -> None:
    """C02, policy `mark`: 7 rewards and one null with its reason; the rerun calls the reward for that row only."""
    calls = tmp_path / "calls.txt"
    rewards = [{"function": module("judge"), "weight": 2.0, "name": "r"}]
    config, trajectories = make(bench, "", EIGHT, rewards=rewards, scoring={"on_error": "mark"})
    marked = bench.run("score", config, generate=trajectories)
    first = rows(marked)
    assert [row["reward_r"] for row in first] == [None if i == 5 else 0.125 * i for i in range(8)]
    assert [row["reward"] for row in first] == [None if i == 5 else 0.25 * i for i in range(8)]
    assert [row["status"] for row in first] == ["unscored" if i == 5 else "ok" for i in range(8)]
    assert [row["reason_r"] for row in first] == [REFUSED if i == 5 else None for i in range(8)]
    assert bench.reply["metrics"] == {"reward/r_mean": 0.125 * 23 / 7, "reward/r_unscored_frac": 1 / 8}

    calls.unlink()
    still = bench.run("score", config, generate=trajectories, previous=Path(marked.path))
    assert calls.read_text() == "5\n"
    assert still.digest == marked.digest

    calls.unlink()
    (tmp_path / "mended").touch()
    mended = bench.run("score", config, generate=trajectories, previous=Path(marked.path))
    assert calls.read_text() == "5\n"
    assert rows(mended) == [row | FIFTH if i == 5 else row for i, row in enumerate(first)]
    assert (bench.reply["measured"]["rows_scored"], bench.reply["measured"]["rows_kept"]) == (1, 7)

    calls.unlink()
    afresh = bench.run("score", config, generate=trajectories, previous=Path(mended.path))
    assert calls.read_text().split() == [str(i) for i in range(8)]
    assert afresh.digest == mended.digest
    assert (bench.reply["measured"]["rows_scored"], bench.reply["measured"]["rows_kept"]) == (8, 0)


def test_the_rerun_of_a_row_that_lacks_a_column(bench: Any, module: Any, rows: Any) -> None:
    """A column that only the rows already scored have is null in the row that is scored again, as the first time."""
    data = [{"hint": 1, "other": 2}, {"other": 3}]
    config, trajectories = make(bench, module("hinted"), data, scoring={"on_error": "mark"})
    marked = bench.run("score", config, generate=trajectories)
    assert [(row["reward"], row["reason_r"]) for row in rows(marked)] == [(1.0, None), (None, "returned None")]
    again = bench.run("score", config, generate=trajectories, previous=Path(marked.path))
    assert again.digest == marked.digest


def test_weights_and_totals(bench: Any, module: Any, rows: Any) -> None:
    """The total is the weighted sum of all components, and null where one of them is."""
    rewards = [
        {"function": module("given"), "weight": 2.0, "name": "a"},
        {"function": module("given"), "params": {"scale": 10.0}, "weight": -0.5, "name": "b"},
    ]
    config, trajectories = make(bench, "", [{"value": v} for v in (1, 0.25, None, -3)], rewards=rewards)
    found = rows(bench.run("score", config, generate=trajectories))
    assert [row["reward_b"] for row in found] == [10.0, 2.5, None, -30.0]
    assert [row["reward"] for row in found] == [2.0 - 5.0, 0.5 - 1.25, None, -6.0 + 15.0]
    assert [row["reason_a"] for row in found] == [None, None, "returned None", None]
    assert bench.reply["metrics"] == pytest.approx(
        {
            "reward/a_mean": (1 + 0.25 - 3) / 3,
            "reward/a_unscored_frac": 0.25,
            "reward/b_mean": (10 + 2.5 - 30) / 3,
            "reward/b_unscored_frac": 0.25,
        }
    )
    assert set(bench.reply["measured"]["reward_seconds"]) == {"a", "b"}


def test_too_many_rows_without_a_score(bench: Any, module: Any) -> None:
    """At the limit the stage passes; beyond it nothing is written, whether the rewards failed or returned None."""
    data: list[Row] = [{"value": None} for _ in range(5)] + [{"value": 1}] * 3
    config, trajectories = make(bench, module("given"), data, scoring={"max_unscored_fraction": 5 / 8})
    bench.run("score", config, generate=trajectories)
    assert bench.reply["metrics"]["reward/r_unscored_frac"] == 5 / 8
    config, trajectories = make(bench, module("given"), data, scoring={"max_unscored_fraction": 0.5})
    context = bench.context(config, generate=trajectories)
    with pytest.raises(
        RewardFailedError, match="5 of 8 completions have no score; the first: reward r, group 0"
    ) as caught:
        bench.perform("score", context)
    assert (caught.value.got, list(context.output.iterdir())) == ("returned None", [])


def test_a_total_that_is_not_finite(bench: Any, module: Any, rows: Any) -> None:
    """C04: two finite components whose weighted sum overflows leave no total, and the row is not trained on."""
    rewards = [{"function": module("given"), "weight": 1e308, "name": name} for name in ("a", "b")]
    config, trajectories = make(bench, "", [{"value": 1}, {"value": 0}], rewards=rewards)
    found = rows(bench.run("score", config, generate=trajectories))
    assert [(row["reward"], row["status"]) for row in found] == [(None, "unscored"), (0.0, "ok")]
    config, trajectories = make(bench, "", [{"value": 1}], rewards=rewards)
    with pytest.raises(RewardFailedError, match="1 of 1") as caught:
        bench.run("score", config, generate=trajectories)
    assert caught.value.got == "the weighted sum is not finite"


def test_the_reward_gets_the_stored_text(bench: Any, module: Any, rows: Any) -> None:
    """C10: whatever the text holds, the function sees the very characters of the text column."""
    texts = ["ok \ufffd", "a\x00b", "\u202e42", "x" * 2**23]
    environment = bench.prompts(["x"], [{"index": 0}])
    config = bench.config(rewards=[{"function": module("code_points"), "name": "r"}], environment=environment)
    trajectories = bench.trajectories([{"group": 0, "sample": i, "text": text} for i, text in enumerate(texts)])
    found = rows(bench.run("score", config, generate=trajectories))
    assert [row["reward_r"] for row in found] == [float(sum(map(ord, text))) for text in texts]


def test_source_that_changed_after_the_fingerprint(bench: Any, user_module: Any) -> None:
    """The processes must run the very source that the fingerprint names."""
    name, file = user_module(JUDGE)
    config, trajectories = make(bench, f"{name}:given", [{"value": 1}])
    context = bench.context(config, generate=trajectories)
    file.write_text(JUDGE.replace("scale * v", "scale * v + 1"))
    with pytest.raises(RewardContractError, match="the source of reward r changed after the run was opened"):
        bench.perform("score", context)
    assert list(context.output.iterdir()) == []

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from rl_core.config import EnvironmentConfig
from rl_core.environments.base import open_environment, shuffled
from rl_core.errors import ConfigError, DataError


def rows(count: int) -> list[dict[str, Any]]:
    return [{"prompt": f"Task {index}?", "answer": index} for index in range(count)]


def open_rows(count: int, run_seed: int = 3, **params: Any) -> Any:
    held_out = [{"prompt": f"Held out {index}?", "answer": index} for index in range(2)]
    files = {"train.jsonl": rows(count), "heldout.jsonl": held_out}
    config = EnvironmentConfig(
        kind="dataset", params={"path": "train.jsonl", "heldout_path": "heldout.jsonl", **params}
    )
    return open_environment(config, run_seed, files.__getitem__)


def answers(environment: Any, start: int, stop: int) -> list[int]:
    return [environment.prompt("train", position).data["answer"] for position in range(start, stop)]


@given(run_seed=st.integers(0, 2**63 - 1), size=st.integers(1, 300), epoch=st.integers(0, 1000))
@settings(max_examples=60, deadline=None)
def test_every_epoch_is_a_permutation(run_seed: int, size: int, epoch: int) -> None:
    drawn = [shuffled(run_seed, size, epoch * size + offset) for offset in range(size)]
    assert {number for number, _ in drawn} == {epoch}
    assert sorted(index for _, index in drawn) == list(range(size))


def test_epochs_and_runs_have_their_own_order_and_rows_move_evenly() -> None:
    def order(run_seed: int, epoch: int) -> list[int]:
        return [shuffled(run_seed, 50, epoch * 50 + offset)[1] for offset in range(50)]

    assert order(1, 0) != order(1, 1)
    assert order(1, 0) != order(2, 0)
    first = [shuffled(run_seed, 4, 0)[1] for run_seed in range(4000)]
    counts = [first.count(row) for row in range(4)]
    # Each is binomial(4000, 1/4): mean 1000, standard deviation 27.
    assert all(abs(count - 1000) < 6 * 27 for count in counts)


def test_resume_at_an_epoch_end_goes_on_with_the_next_epoch() -> None:
    """C65: 6 prompts, batch 2, two epochs; resumed after step 3 and with batch 3, no prompt is skipped or repeated."""
    environment = open_rows(6)
    whole = answers(environment, 0, 12)
    assert sorted(whole[:6]) == sorted(whole[6:]) == [0, 1, 2, 3, 4, 5]
    assert whole[:6] != whole[6:]
    consumed = 3 * 2
    resumed = open_rows(6)
    steps = [answers(resumed, consumed + 2 * step, consumed + 2 * step + 2) for step in range(3)]
    assert [answer for step in steps for answer in step] == whole[6:]
    consumed = 2 * 2
    with_three = [answers(open_rows(6), consumed + 3 * step, consumed + 3 * step + 3) for step in range(2)]
    assert [answer for step in with_three for answer in step] == whole[4:10]


def test_every_prompt_once_wherever_a_run_stops() -> None:
    """C66: 20 prompts shuffled; a filter downstream consumes prompts too; killed and resumed at every position."""
    whole = answers(open_rows(20), 0, 40)
    assert sorted(whole[:20]) == sorted(whole[20:]) == list(range(20))
    for stop in range(21):
        assert answers(open_rows(20), 0, stop) + answers(open_rows(20), stop, 40) == whole


def test_one_order_in_every_process() -> None:
    code = (
        "from rl_core.environments.base import shuffled\n"
        "print([shuffled(7, 12, position)[1] for position in range(24)])"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": seed}
        ).stdout.strip()
        for seed in ("1", "2")
    }
    assert outputs == {str([shuffled(7, 12, position)[1] for position in range(24)])}


def test_heldout_positions_end() -> None:
    environment = open_rows(3)
    assert environment.size("heldout") == 2
    assert environment.prompt("heldout", 1).data == {"answer": 1}
    with pytest.raises(DataError, match="no held-out problem 2"):
        environment.prompt("heldout", 2)


class Counting:
    """An environment of the reader's own."""

    class Params(BaseModel):
        start: int

    digest = "0" * 64

    def __init__(self, params: Any, run_seed: int, read_rows: Any) -> None:
        self.start = params.start + run_seed

    def size(self, split: str) -> int | None:
        return None

    def prompt(self, split: str, position: int) -> int:
        return self.start + position


def test_an_environment_by_import_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "my_tasks", sys.modules[__name__])
    environment = open_environment(EnvironmentConfig(kind="my_tasks:Counting", params={"start": 5}), 10, lambda _: [])
    assert environment.prompt("train", 2) == 17


@pytest.mark.parametrize(
    ("kind", "params", "words"),
    [
        ("reasoning_gmy", {}, ["'reasoning_gmy' is unknown", "did you mean 'reasoning_gym'?"]),
        ("no_such_package.tasks:Env", {}, ["cannot import", "no_such_package"]),
        ("json:NoSuchClass", {}, ["cannot import", "NoSuchClass"]),
        ("json:JSONDecoder", {}, ["no `Params` model"]),
        ("dataset", {"pth": "x", "heldout_rows": 1}, ["environment.params.path", "environment.params.pth", "'path'"]),
        ("dataset", {"path": "x"}, ["heldout_path or heldout_rows"]),
        (
            "dataset",
            {"path": "x", "heldout_rows": 0},
            ["environment.params.heldout_rows", "greater than or equal to 1"],
        ),
    ],
)
def test_mistakes_are_named(kind: str, params: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        open_environment(EnvironmentConfig(kind=kind, params=params), 0, lambda _: [])
    for word in words:
        assert word in str(caught.value)

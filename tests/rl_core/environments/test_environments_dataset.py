from __future__ import annotations

import json
import math
from typing import Any

import pytest

from rl_core.config import EnvironmentConfig
from rl_core.environments.base import open_environment
from rl_core.errors import DataError

USER = {"role": "user", "content": "What is 2 + 2?"}
SYSTEM = {"role": "system", "content": "Be brief."}
ASSISTANT = {"role": "assistant", "content": "4"}
HELD_OUT = [{"prompt": "Held out?", "reward_model": {"ground_truth": "x"}}]


def open_rows(rows: list[Any], heldout: list[Any] | None = None, **params: Any) -> Any:
    files = {"train.jsonl": rows, "heldout.jsonl": HELD_OUT if heldout is None else heldout}
    if "heldout_rows" not in params:
        params["heldout_path"] = "heldout.jsonl"
    config = EnvironmentConfig(kind="dataset", params={"path": "train.jsonl", "shuffle": False, **params})
    return open_environment(config, 0, files.__getitem__)


def verl_row(number: int, **changes: Any) -> dict[str, Any]:
    return {
        "data_source": "sums",
        "prompt": [{"role": "user", "content": f"What is {number} + 1?"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(number + 1)},
        "extra_info": {"index": number},
        **changes,
    }


def test_verl_rows() -> None:
    environment = open_rows([verl_row(4), verl_row(5)])
    prompt = environment.prompt("train", 1)
    assert prompt.messages == [{"role": "user", "content": "What is 5 + 1?"}]
    assert prompt.data == {
        "ground_truth": "6",
        "data_source": "sums",
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "6"},
        "extra_info": {"index": 5},
    }


def test_trl_rows_as_text_messages_and_raw_text() -> None:
    """C09: list and dictionary columns reach the rewards as they are, aligned to their prompt."""
    tests = [{"input": "1", "output": [2, None]}, {"input": "3", "output": []}]
    rows = [{"prompt": "Write f.", "tests": tests}, {"prompt": [SYSTEM, USER, ASSISTANT, USER], "tests": [], "n": {}}]
    environment = open_rows(rows)
    assert environment.prompt("train", 0).messages == [{"role": "user", "content": "Write f."}]
    assert environment.prompt("train", 0).data == {"tests": tests}
    assert environment.prompt("train", 1).messages == [SYSTEM, USER, ASSISTANT, USER]
    assert environment.prompt("train", 1).data == {"tests": [], "n": {}}
    raw = open_rows(rows, text_prompt="raw")
    assert raw.prompt("train", 0).messages == [{"role": "raw", "content": "Write f."}]
    with_system = open_rows(rows, system="Think.")
    assert with_system.prompt("train", 0).messages[0] == {"role": "system", "content": "Think."}
    assert with_system.prompt("train", 1).messages[0] == SYSTEM


def test_values_come_through_exactly() -> None:
    """C70: absent stays absent, integers of any size stay exact, empty list, dictionary and null stay distinct."""
    infos: list[Any] = [
        {"k": 7, "m": 8, "p": 9},
        {"k": 1, "m": 2},
        {},
        {"k": "x"},
        [[1], [], None],
        2**63,
        2**53 + 1,
        {"a": [], "b": {}, "c": None, "d": 1.0, "e": 1, "f": True, "g": 0.1, "h": "é\n"},
    ]
    environment = open_rows([{"prompt": f"{index}", "extra_info": info} for index, info in enumerate(infos)])
    for index, info in enumerate(infos):
        data = environment.prompt("train", index).data
        assert json.dumps(data) == json.dumps({"extra_info": info})
    assert open_rows([{"prompt": "a"}]).prompt("train", 0).data == {}


@pytest.mark.parametrize("value", [math.nan, math.inf, b"x", {1: 2}, {"deep": [{"x": math.nan}]}, "\ud800"])
def test_values_json_cannot_hold_are_refused_with_the_row(value: Any) -> None:
    """C70."""
    with pytest.raises(DataError, match=r"train.jsonl row 2 of 2"):
        open_rows([{"prompt": "a"}, {"prompt": "b", "info": value}])


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ([USER, USER], ["roles", "user, user"]),
        ([SYSTEM], ["roles", "ending with `user`"]),
        ([USER, SYSTEM, USER], ["roles", "user, system, user"]),
        ([USER, ASSISTANT], ["roles"]),
        ([{"role": "tool", "content": "x"}], ["roles", "tool"]),
        ([], ["no prompt"]),
        ("  ", ["empty prompt"]),
        ([{"role": "user", "content": ""}], ["empty prompt"]),
        (None, ["no prompt", "None"]),
        ([{"role": "user"}], ["message 1", "no message"]),
        ([{"role": "user", "content": [{"type": "image"}]}], ["message 1", "no message"]),
        ([{**USER, "tool_calls": [1]}], ["message 1", "tool_calls"]),
    ],
)
def test_prompts_that_cannot_be_used_are_refused_at_load(prompt: Any, words: list[str]) -> None:
    """C34, C35: refused when the data is loaded, naming the row and the rule."""
    rows: list[Any] = [{"prompt": [SYSTEM, USER]}] * 16 + [{"prompt": prompt}] + [{"prompt": "x"}] * 3
    with pytest.raises(DataError) as caught:
        open_rows(rows)
    for word in ["train.jsonl row 17 of 20", *words]:
        assert word in str(caught.value)


def test_system_text_merged_into_the_first_user_turn() -> None:
    """C34: the same in every row, whether the system turn came from the row or from the config."""
    environment = open_rows([{"prompt": [SYSTEM, USER]}, {"prompt": "Hi"}], system="Think.", merge_system=True)
    assert environment.prompt("train", 0).messages == [{"role": "user", "content": "Be brief.\n\nWhat is 2 + 2?"}]
    assert environment.prompt("train", 1).messages == [{"role": "user", "content": "Think.\n\nHi"}]


def test_empty_data_and_other_mistakes() -> None:
    """C35 (empty data set), C09 (a column named like a reward argument)."""
    with pytest.raises(DataError, match=r"train.jsonl has no rows"):
        open_rows([])
    with pytest.raises(DataError, match=r"heldout.jsonl has no rows"):
        open_rows([{"prompt": "a"}], heldout=[])
    with pytest.raises(DataError, match=r"row 2 of 2: column `completions`"):
        open_rows([{"prompt": "a"}, {"prompt": "b", "completions": []}])
    with pytest.raises(DataError, match=r"row 1 of 1 has no column `prompt`") as caught:
        open_rows([{"promt": "a", "answer": 1}])
    assert "did you mean 'promt'?" in str(caught.value)
    with pytest.raises(DataError, match=r"row 1 of 1 is no row"):
        open_rows(["text"])
    with pytest.raises(DataError, match=r"row 2 of 2 is not in the verl form"):
        open_rows([verl_row(1), {"prompt": "a"}])
    with pytest.raises(DataError, match=r"both `ground_truth` and"):
        open_rows([verl_row(1, ground_truth="3")])


def test_heldout_rows_are_taken_by_content() -> None:
    rows = [verl_row(number) for number in range(40)]
    one, two = open_rows(rows, heldout_rows=10), open_rows(rows[::-1], heldout_rows=10)
    held_out = [one.prompt("heldout", i) for i in range(10)]
    assert held_out == [two.prompt("heldout", i) for i in range(10)]
    trained = {one.prompt("train", i).prompt_id for i in range(30)}
    assert (one.size("train"), one.size("heldout"), one.excluded) == (30, 10, 0)
    assert len(trained | {prompt.prompt_id for prompt in held_out}) == 40


def test_no_heldout_prompt_is_trained_on() -> None:
    """Two rows with one prompt never end up on both sides, with either way to hold out."""
    rows = [{"prompt": f"Task {number % 10}", "try": number} for number in range(30)]
    split = open_rows(rows, heldout_rows=4)
    held_out = {split.prompt("heldout", i).messages[0]["content"] for i in range(4)}
    trained = {split.prompt("train", i).messages[0]["content"] for i in range(split.size("train"))}
    assert not held_out & trained
    assert split.size("train") + split.size("heldout") + split.excluded == 30
    by_file = open_rows(rows, heldout=[{"prompt": "Task 3"}])
    assert (by_file.size("train"), by_file.excluded) == (27, 3)
    with pytest.raises(DataError, match="no training rows are left"):
        open_rows(rows[:2], heldout_rows=2)


def test_prompt_ids_name_the_content() -> None:
    rows = [{"prompt": "a", "x": 1}, {"prompt": "a", "x": 2}, {"prompt": "a", "x": 1}]
    ids = [open_rows(rows).prompt("train", i).prompt_id for i in range(3)]
    assert len(set(ids)) == 3
    assert ids[2] == f"{ids[0]}-2"
    assert open_rows([{"prompt": "z"}, *rows]).prompt("train", 1).prompt_id == ids[0]


def test_digest_follows_the_content() -> None:
    rows = [{"prompt": "a", "x": 1}, {"prompt": "b"}]
    base = open_rows(rows).digest
    assert open_rows(rows).digest == base
    assert open_rows(rows[::-1]).digest != base
    assert open_rows([{"prompt": "a", "x": 1.0}, {"prompt": "b"}]).digest != base
    assert open_rows(rows, shuffle=True).digest != base
    assert open_rows(rows, system="s").digest != base


def test_several_files_are_one_data_set() -> None:
    files = {"a.jsonl": [{"prompt": "1"}], "b.jsonl": [{"prompt": "2"}, {"prompt": "3"}], "c.jsonl": []}
    params: dict[str, Any] = {"path": ["a.jsonl", "b.jsonl"], "heldout_rows": 1, "shuffle": False}
    environment = open_environment(EnvironmentConfig(kind="dataset", params=params), 0, files.__getitem__)
    assert environment.size("train") == 2
    params["path"] = ["a.jsonl", "c.jsonl"]
    with pytest.raises(DataError, match=r"c.jsonl has no rows"):
        open_environment(EnvironmentConfig(kind="dataset", params=params), 0, files.__getitem__)

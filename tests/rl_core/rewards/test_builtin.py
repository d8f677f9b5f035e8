"""Built-in rewards against values found by hand."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_core.rewards.builtin import exact_match, format_regex, last_integer, length_penalty


@pytest.mark.parametrize(
    ("text", "answer", "reward"),
    [
        ("The sum is 42.", 42, 1.0),
        ("42, or rather 43", 42, 0.0),
        ("so \u22127", -7, 1.0),
        ("so \u22127", 7, 0.0),
        ("(-7)", "-7", 1.0),
        ("10-3", 3, 1.0),
        ("= 10 - 3 = 7", 7, 1.0),
        ("答案是-5", -5, 1.0),
        ("it costs 1,234 in all", 1234, 1.0),
        ("it costs 1,234", "1,234", 1.0),
        ("1,234", 234, 0.0),
        ("12,34", 34, 1.0),
        ("1, 234", 234, 1.0),
        ("3.5", 5, 0.0),
        ("42 and 3.5", 42, 1.0),
        ("\uff14\uff12", 42, 1.0),
        ("x23", 23, 0.0),
        ("007", 7, 1.0),
        ("-0", 0, 1.0),
        ("no number", 0, 0.0),
        ("", 0, 0.0),
        ("\u00b2", 2, 0.0),
        ("9" * 5000, "9" * 5000, 1.0),
        ("9" * 5000, "9" * 4999, 0.0),
        ("42", None, None),
        ("42", "forty-two", None),
        ("42", 42.0, None),
        ("1", True, None),
    ],
)
def test_last_integer(text: str, answer: Any, reward: float | None) -> None:
    assert last_integer([text], answer=[answer]) == [reward]


@given(st.lists(st.integers(), min_size=1), st.sampled_from([" ", "; ", "\n", " and ", " = "]))
def test_last_integer_is_the_last_of_many(numbers: list[int], between: str) -> None:
    text = between.join(map(str, numbers))
    assert last_integer([text, text + ".", text + " apples"], answer=[numbers[-1]] * 3) == [1.0] * 3
    assert last_integer([text], answer=[numbers[-1] + 1]) == [0.0]
    assert last_integer([f"{numbers[-1]:,}"], answer=[numbers[-1]]) == [1.0]


def test_exact_match() -> None:
    texts, answers = [" Yes\n", "yes", "no", "5", "x"], ["Yes", "Yes", "Yes", 5, None]
    assert exact_match(texts, answer=answers) == [1, 0, 0, 1, None]
    assert exact_match(texts, answer=answers, ignore_case=True) == [1, 1, 0, 1, None]
    assert exact_match(texts, answer=answers, strip=False) == [0, 0, 0, 1, None]


def test_format_regex_matches_the_whole_text() -> None:
    texts = ["<think>a\nb</think> 5\n", "well <think>a</think> 5", "<think>a</think>", ""]
    assert format_regex(texts, pattern=r"<think>.*</think>\s*\d+") == [1, 0, 0, 0]


def test_length_penalty() -> None:
    texts, ids = ["", "abc", "abcdefgh"], [[], [1, 2], list(range(300))]
    assert length_penalty(texts, ids, per_unit=0.01) == [0.0, -0.02, -1.0]
    assert length_penalty(texts, ids, per_unit=0.01, free=100, max_penalty=5.0) == [0.0, 0.0, -2.0]
    assert length_penalty(texts, ids, unit="characters", per_unit=0.5, free=1, max_penalty=2.0) == [0.0, -1.0, -2.0]
    with pytest.raises(ValueError, match="unit"):
        length_penalty(texts, ids, unit="words")  # type: ignore[arg-type]

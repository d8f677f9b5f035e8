"""Built-in reward functions, one value per completion. The calling contract is in `contract.py`."""

from __future__ import annotations

import re
from typing import Any, Literal

REWARDS: dict[str, str] = {
    "exact_match": "rl_core.rewards.builtin:exact_match",
    "format_regex": "rl_core.rewards.builtin:format_regex",
    "last_integer": "rl_core.rewards.builtin:last_integer",
    "length_penalty": "rl_core.rewards.builtin:length_penalty",
    "math_answer": "rl_core.rewards.math:math_answer",
}
"""Short name → import path."""

# Full-width forms and the true minus sign, as models write them.
_ASCII = {code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)} | {0x2212: ord("-")}
# A number as one piece; commas belong to it only where they part groups of three digits.
_NUMBER = re.compile(r"(?<![A-Za-z_0-9])([0-9]{1,3}(?:,[0-9]{3})+(?![0-9]|,[0-9]{3}(?![0-9]))|[0-9]+)(\.[0-9]+)?")


def ascii_signs(text: str) -> str:
    """Full-width characters and U+2212 (minus) as their ASCII twins; nothing else changes."""
    return text.translate(_ASCII)


def _integers(text: str) -> list[str]:
    """Integers of a text in canonical form. `3.5` holds none, `1,234` is one, the 3 in `10-3` is positive."""
    text = ascii_signs(text)
    found = []
    for match in _NUMBER.finditer(text):
        before = text[max(0, match.start() - 2) : match.start()]
        if match[2] or re.search(r"[0-9]\.$", before):
            continue
        sign = "-" if re.search(r"(?:^|[^A-Za-z0-9_)\]}])-$", before) else ""
        digits = match[1].replace(",", "").lstrip("0")
        found.append(sign + digits if digits else "0")
    return found


def last_integer(completions: list[str], *, answer: list[Any]) -> list[float | None]:
    """1 where the last integer of the completion is the answer, else 0; unscored where a row has no integer answer."""
    rewards: list[float | None] = []
    for text, gold in zip(completions, answer, strict=True):
        wanted = [] if gold is None or isinstance(gold, bool) else _integers(str(gold))
        found = _integers(text)
        rewards.append(float(found[-1:] == wanted) if len(wanted) == 1 else None)
    return rewards


def exact_match(
    completions: list[str], *, answer: list[Any], strip: bool = True, ignore_case: bool = False
) -> list[float | None]:
    """1 where the completion is the answer's text, else 0; unscored where a row has no answer."""

    def form(text: str) -> str:
        text = text.strip() if strip else text
        return text.casefold() if ignore_case else text

    return [
        None if gold is None else float(form(text) == form(str(gold)))
        for text, gold in zip(completions, answer, strict=True)
    ]


def format_regex(completions: list[str], *, pattern: str) -> list[float]:
    """1 where the regular expression matches the whole completion, outer white space aside; `.` matches newlines."""
    compiled = re.compile(pattern, re.DOTALL)
    return [float(compiled.fullmatch(text.strip()) is not None) for text in completions]


def length_penalty(
    completions: list[str],
    completion_ids: list[list[int]],
    *,
    unit: Literal["tokens", "characters"] = "tokens",
    per_unit: float = 0.01,
    free: int = 0,
    max_penalty: float = 1.0,
) -> list[float]:
    """-per_unit for every token (or character) beyond `free`, never below -max_penalty."""
    if unit not in ("tokens", "characters"):
        raise ValueError(f"unit must be 'tokens' or 'characters', not {unit!r}")
    lengths = [len(ids) for ids in completion_ids] if unit == "tokens" else [len(text) for text in completions]
    return [-min(max_penalty, per_unit * max(0, length - free)) for length in lengths]

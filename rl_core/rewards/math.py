"""`math_answer`: is the final answer of a completion mathematically the gold answer? One extractor, one set of rules.

Final answer (gold and completion alike): the content of the last `\\boxed{}` or `\\fbox{}`; one that is never closed is
no answer. Without a box: what follows the last `####`; else a text without prose as a whole; else what math-verify
finds ("the answer is ...", the last formula, the last number).

Equality, gold first:
- integers, decimals and fractions are compared exactly, of any length. A decimal equals a number that it cannot write
  exactly (1/7, pi) if it has at least six significant digits and differs by less than one unit of its last digit.
- `%` is read as "divided by 100" or as a unit: 50% equals 50%, 0.5 and 50; 0.5 does not equal 50.
- a comma parts thousands only in well-formed groups (12,345), else list items. Lists are compared item by item: in
  brackets (which must agree) in order, bare or in braces in any order; a bare list fits any brackets.
- constants are compared at 60 digits, relative 1e-40; all other things (relations, sets, symbols) by math-verify.

Values too large to compute (9^9^9, 100000!), unevaluated sums and integrals, over-long or over-nested formulas are
equal to nothing but their own text. No time limit is set here: the process pool has one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from rl_core.rewards.builtin import ascii_signs
from rl_core.rewards.math_symbolic import math_verify, nesting, symbolic_equal

_BOX = re.compile(r"\\f?box(?:ed)?\s*\{")
_CHARACTERS, _PROSE_CHARACTERS = 100_000, 4000  # read at the end of a text: for a box, for an answer in prose
_MAX_DIGITS = 4000  # Python converts no longer digit strings to integers
_INTEGER = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)"
_DECIMAL = re.compile(rf"([+-]?)({_INTEGER}|(?=\.))(?:\.([0-9]+))?(?:[eE]([+-]?[0-9]{{1,3}}))?")
_FRACTION = re.compile(r"([+-]?)(?:\\frac\{?([+-]?[0-9]+)\}?\{?([0-9]+)\}?|([0-9]+)\s*/\s*([0-9]+))")
_WRAPPER = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|mbox|boxed|fbox)\s*\{([^{}]*)\}")
_ENVIRONMENT = re.compile(r"\\(?:begin|end)\{[a-z]+\*?\}")
_SPACES = re.compile(r"(?<!\\)\\[ ,;:!]|\\q?quad|~|\\left(?![a-z])|\\right(?![a-z])|\*\*(?![0-9({])|(?<![0-9)}])\*\*")
_AND = re.compile(r"\\text\{\s*(?:and|or)\s*\}|\b(?:and|or)\b")
_WORDS = re.compile(r"(?<![\\A-Za-z])(?!(?:sin|cos|tan|cot|log|ln|exp|sqrt|pi|and|or)\b)[A-Za-z]{2,}")
_BRACKETS = {"(": ")", "[": "]", "{": "}"}


def math_answer(completions: list[str], *, answer: list[Any], require_box: bool = False) -> list[float | None]:
    """1 where the completion's final answer equals the row's answer, else 0; unscored where a row has no answer.

    Args:
        answer: gold answers: numbers, or text (bare, boxed or after `####`).
        require_box: a completion without a box has no answer.
    """
    rewards: list[float | None] = []
    for text, gold in zip(completions, answer, strict=True):
        wanted = None if gold is None else final_answer(str(gold))
        found = final_answer(text, require_box)
        rewards.append(None if wanted is None else float(found is not None and answers_equal(wanted, found)))
    return rewards


def final_answer(text: str, require_box: bool = False) -> str | None:
    """The final answer in a text by the module's rule; None where there is none."""
    text = ascii_signs(text[-_CHARACTERS:])
    boxes = list(_BOX.finditer(text))
    if boxes:
        return _braced(text, boxes[-1].end())
    if require_box:
        return None
    if "####" in text:
        lines = text.rpartition("####")[2].strip().splitlines()
        return lines[0].strip() if lines else None
    text = text.strip()
    if "\n" not in text and not _WORDS.search(_ENVIRONMENT.sub("", _WRAPPER.sub("", text))):
        return text or None
    if re.fullmatch(r"\S+", text):
        return text
    return _from_prose(text[-_PROSE_CHARACTERS:])


def _braced(text: str, start: int) -> str | None:
    depth = 1
    for match in re.finditer(r"\\.|[{}]", text[start:], re.DOTALL):
        depth += {"{": 1, "}": -1}.get(match[0], 0)
        if depth == 0:
            return text[start : start + match.start()].strip() or None
    return None


def _from_prose(text: str) -> str | None:
    found = math_verify().parse(text, parsing_timeout=None)
    return str(found[-1]) if found else None


def answers_equal(gold: str, answer: str) -> bool:
    """Whether two final answers are equal by the module's rules. Raises nothing on any text."""
    gold, answer = _clean(gold), _clean(answer)
    if not gold or not answer:
        return False
    if gold == answer:
        return True
    if max(nesting(gold), nesting(answer)) > 20:
        return False
    numbers = _number(gold), _number(answer)
    if numbers[0] and numbers[1]:
        return _numbers_equal(numbers[0], numbers[1])
    lists = _items(gold), _items(answer)
    if lists[0] and lists[1]:
        return _lists_equal(*lists[0], *lists[1])
    if all(re.fullmatch(r"[A-Za-z ]{3,}", text) for text in (gold, answer)):
        return gold.casefold() == answer.casefold()  # words, not products of their letters
    if any(len(re.findall(r"[0-9]", text)) > _MAX_DIGITS for text in (gold, answer)):
        return _digits(gold) == _digits(answer) is not None
    return symbolic_equal(gold, answer, numbers)


def _clean(text: str) -> str:
    """Answer without wrappers, spacing commands, dollar signs and final full stop. `\\dfrac` is `\\frac`."""
    text = ascii_signs(text)
    before = None
    while before != text:
        before = text
        text = _SPACES.sub(" ", text.replace("{,}", ",").replace("\\%", "%").replace("\\$", "").replace("$", ""))
        text = re.sub(r"\\[dtc]frac", r"\\frac", text).strip().rstrip(".").strip(" £€*")
        if whole := re.fullmatch(r"\\[(\[](.*)\\[)\]]", text, re.DOTALL) or _WRAPPER.fullmatch(text):
            text = whole[1]
    return re.sub(r"\s*(?:percent|\\text\{\s*percent\s*\})$", "%", text)


@dataclass(frozen=True)
class Number:
    """An exact value; `decimals` is the count of digits behind the point, None for a fraction."""

    value: Fraction
    decimals: int | None
    significant: int
    percent: bool


def _number(text: str) -> Number | None:
    percent, text = text.endswith("%"), text.removesuffix("%").strip()
    if len(text) > _MAX_DIGITS:
        return None
    if match := _DECIMAL.fullmatch(text):
        sign, whole, part = match[1], match[2].replace(",", ""), match[3] or ""
        decimals = len(part) - int(match[4] or 0)
        value = Fraction(int(whole + part or "0")) / Fraction(10) ** decimals
        return Number(-value if sign == "-" else value, decimals, len((whole + part).lstrip("0")), percent)
    if match := _FRACTION.fullmatch(text):
        top, bottom = int(match[2] or match[4]), int(match[3] or match[5])
        if bottom:
            return Number(Fraction(-top if match[1] == "-" else top, bottom), None, 0, percent)
    return None


def _numbers_equal(gold: Number, answer: Number) -> bool:
    readings = [(gold.value, answer.value)]
    if gold.percent != answer.percent:
        readings.append((gold.value / (100 if gold.percent else 1), answer.value / (100 if answer.percent else 1)))
    return any(x == y or _rounds(gold, x, y) or _rounds(answer, y, x) for x, y in readings)


def _rounds(written: Number, value: Fraction, exact: Fraction) -> bool:
    """`value`, written as a decimal, is `exact` rounded or cut at its last digit, and says six digits or more of it."""
    if written.decimals is None or written.decimals <= 0 or written.significant < 6:
        return False
    unit = Fraction(1, 10**written.decimals) * (value / written.value if written.value else 1)
    return abs(value - exact) < unit


def _digits(text: str) -> str | None:
    """Canonical form of a decimal number too long for arithmetic."""
    match = _DECIMAL.fullmatch(text)
    if not match or match[4]:
        return None
    whole, part = match[2].replace(",", "").lstrip("0"), (match[3] or "").rstrip("0")
    return f"{match[1].replace('+', '')}{whole}.{part}"


def _items(text: str) -> tuple[str, list[str]] | None:
    """(kind, items) of a list: kind is its brackets, such as "()" or "[)", or "" for a bare one; None for no list."""
    text = text.replace("\\{", "{").replace("\\}", "}").replace("\\lbrace", "{").replace("\\rbrace", "}")
    text = _AND.sub(",", text) if _AND.search(text) else text
    kind = ""
    if text[0] in _BRACKETS and text[-1] in ")]}" and _encloses(text):
        kind, text = text[0] + text[-1], text[1:-1]
    items, depth, start = [], 0, 0
    for index, sign in enumerate(text):
        depth += (sign in "([{") - (sign in ")]}")
        if depth == 0 and sign in ",;":
            items.append(text[start:index].strip())
            start = index + 1
    items.append(text[start:].strip())
    items = [item for item in items if item]
    return (kind, items) if len(items) > 1 or kind == "{}" else None


def _encloses(text: str) -> bool:
    """Whether the first bracket is closed by the last sign of the text (kinds may differ: half-open intervals)."""
    depth = 0
    for index, sign in enumerate(text):
        depth += (sign in "([{") - (sign in ")]}")
        if depth == 0:
            return index == len(text) - 1
    return False


def _lists_equal(gold_kind: str, gold: list[str], kind: str, items: list[str]) -> bool:
    if len(gold) != len(items) or (gold_kind and kind and gold_kind != kind) or len(gold) > 50:
        return False
    if {gold_kind, kind} <= {"", "{}"}:
        left = list(items)
        for item in gold:
            match = next((i for i, other in enumerate(left) if answers_equal(item, other)), None)
            if match is None:
                return False
            del left[match]
        return True
    return all(answers_equal(a, b) for a, b in zip(gold, items, strict=True))


def written_as(number: Number, low: Fraction, high: Fraction) -> bool:
    """Whether a written number equals a real number known to lie between two others, in either reading of `%`."""
    readings = [number.value, number.value / 100] if number.percent else [number.value]
    return any(low <= value <= high or _rounds(number, value, (low + high) / 2) for value in readings)

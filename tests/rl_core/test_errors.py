"""Errors cross process borders as plain data and by pickle; their tree is the one the module draws."""

from __future__ import annotations

import copy
import json
import pickle
import re

import pytest

from rl_core import errors
from rl_core.errors import RlstagesError, StageError, UserError, from_dict


def _all(root: type[RlstagesError]) -> list[type[RlstagesError]]:
    return [root, *(found for child in root.__subclasses__() for found in _all(child))]


CLASSES = [cls for cls in _all(RlstagesError) if cls.__module__ == errors.__name__]
PARTS = {"expected": "an ü", "got": "a\nb", "todo": "do", "details": "Traceback\n  line"}


def _drawn() -> set[tuple[str, str]]:
    """(class, parent) of every line of the tree in the module's docstring."""
    assert errors.__doc__
    found, parents = set(), {}
    for line in errors.__doc__.splitlines():
        match = re.match(r"^    ([ │├└─]*)([A-Z]\w+)", line)
        if match:
            depth = len(match[1]) // 4
            parents[depth] = match[2]
            if depth:
                found.add((match[2], parents[depth - 1]))
    return found


def test_the_drawn_tree_is_the_real_one() -> None:
    real = {
        (cls.__name__, base.__name__) for cls in CLASSES for base in cls.__bases__ if issubclass(base, RlstagesError)
    }
    assert _drawn() == real
    assert len(real) == len(CLASSES) - 1 == 13


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_every_error_survives_plain_data_and_pickle(cls: type[RlstagesError]) -> None:
    error = cls("it broke", **PARTS)
    plain = json.loads(json.dumps(error.to_dict()))
    for back in (from_dict(plain), pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(back) is cls
        assert back.to_dict() == error.to_dict()
        assert str(back) == str(error)
        assert {name: getattr(back, name) for name in PARTS} == PARTS


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_who_is_to_act_follows_from_the_branch(cls: type[RlstagesError]) -> None:
    """User errors would come again, so none is retried; both branches are also errors of the standard library."""
    assert cls.user_error == issubclass(cls, UserError)
    assert not (cls.user_error and cls.retryable)
    assert issubclass(cls, UserError) <= issubclass(cls, ValueError)
    assert issubclass(cls, StageError) <= issubclass(cls, RuntimeError)
    comes_again = (errors.NonFiniteError, errors.CorruptOutputError)
    assert cls.retryable == (issubclass(cls, StageError) and not issubclass(cls, comes_again))


def test_text_says_what_was_expected_got_and_to_do() -> None:
    error = errors.DataError("row 3 is empty", expected="a prompt", got="''", todo="drop it", details="more")
    assert str(error) == "row 3 is empty\n  expected: a prompt\n  got: ''\n  to do: drop it\nmore"
    assert str(errors.DataError("short")) == "short"


def test_an_error_of_unknown_type_is_a_stage_error_with_its_message() -> None:
    back = from_dict({"type": "FutureError", "message": "new"})
    assert type(back) is StageError
    assert back.message == "new"
    assert from_dict({}).message == "unknown error"


def test_a_part_of_any_length_becomes_one_that_can_be_read_and_logged() -> None:
    """Begin and end stay, the rest is counted; a text that was shortened is not shortened again."""
    text = "begin" + "x" * 3_000_000 + "the error itself"
    error = StageError(text, details=text, got="y" * errors.MAX_CHARACTERS)
    assert len(str(error)) < 100_000 and error.got == "y" * errors.MAX_CHARACTERS
    for part in (error.message, error.details):
        assert part.startswith("beginxxx") and part.endswith("xxxthe error itself")
        assert "\n... 2,985,021 characters left out ...\n" in part
    assert from_dict(error.to_dict()).to_dict() == error.to_dict()

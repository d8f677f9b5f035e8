"""The calling contract: what is accepted as a function and as a result, and what is refused in which words."""

from __future__ import annotations

import math
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rl_core.config import RewardConfig
from rl_core.errors import RewardContractError
from rl_core.rewards.builtin import REWARDS
from rl_core.rewards.contract import (
    call_reward,
    check_columns,
    check_result,
    load_reward,
    resolve,
    reward_digest,
    source_digest,
)

MODULE = r"""
import functools

def plain(completions, answer, scale=1.0):
    return [scale * len(text) for text in completions]

def everything(completions, **kwargs):
    return kwargs

def bare(texts):
    return [0.0]

def positional(completions, /):
    return [0.0]

async def waits(completions):
    return [2.0] * len(completions)

class Judge:
    def __call__(self, completions):
        return [3.0] * len(completions)

judge = Judge()
waiting = functools.partial(waits)
half = functools.partial(plain, scale=0.5)
number = 3
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    name = f"contract_rewards_{abs(hash(request.node.name))}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    return name


def _row(text: str, **data: Any) -> dict[str, Any]:
    prompt = [{"role": "user", "content": "?"}]
    return {"text": text, "prompt_messages": prompt, "completion_ids": [1], "truncated": False, "data": data}


def _config(function: str, **params: Any) -> RewardConfig:
    return RewardConfig(function=function, params=params)


def test_every_short_name_resolves() -> None:
    for name in REWARDS:
        assert resolve(name).__name__ == name


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("last_intger", "did you mean 'last_integer'"),
        ("completely_unknown", "package.module:function"),
        ("no_such_module_x:f", "ModuleNotFoundError"),
        ("{module}:nothing", "AttributeError"),
        ("{module}:number", "is no function"),
        ("{module}:Judge", "is no function"),
    ],
)
def test_functions_that_do_not_resolve(module: str, function: str, words: str) -> None:
    with pytest.raises(RewardContractError) as caught:
        resolve(function.format(module=module))
    assert words in str(caught.value)


def test_a_module_that_raises_on_import_is_named(module: str, tmp_path: Path) -> None:
    (tmp_path / f"{module}_bad.py").write_text("x = 1\nraise OSError('no licence')\n")
    with pytest.raises(RewardContractError, match="OSError: no licence") as caught:
        resolve(f"{module}_bad:f")
    assert "line 2" in caught.value.details


def test_kinds_of_callables(module: str) -> None:
    """C06: async functions, partials and objects with __call__ give what a plain function gives."""
    rows = [_row("abcd", answer=1), _row("ab", answer=2)]
    expected = {
        "plain": [4.0, 2.0],
        "half": [2.0, 1.0],
        "waits": [2.0, 2.0],
        "waiting": [2.0, 2.0],
        "judge": [3.0, 3.0],
    }
    for name, values in expected.items():
        reward = load_reward(_config(f"{module}:{name}"))
        assert check_result(call_reward(reward, rows, ["answer"]), 2, name) == (values, [None, None])


def test_kwargs_receive_every_column(module: str) -> None:
    reward = load_reward(_config(f"{module}:everything", level=3))
    assert call_reward(reward, [_row("a", x=1), _row("b", y={"k": [1]})], ["x", "y"]) == {
        "level": 3,
        "prompts": [[{"role": "user", "content": "?"}]] * 2,
        "completion_ids": [[1], [1]],
        "truncated": [False, False],
        "x": [1, None],
        "y": [None, {"k": [1]}],
    }


@pytest.mark.parametrize(
    ("name", "params", "words"),
    [
        ("bare", {}, "takes no `completions`"),
        ("positional", {}, "passed by name"),
        ("plain", {"sclae": 2}, "takes no parameter 'sclae'"),
        ("everything", {"prompts": 1}, "what rlstages passes itself"),
    ],
)
def test_signatures_that_are_refused(module: str, name: str, params: dict[str, Any], words: str) -> None:
    with pytest.raises(RewardContractError) as caught:
        load_reward(_config(f"{module}:{name}", **params))
    assert words in str(caught.value)


def test_columns_are_checked_against_the_signature(module: str) -> None:
    """C09: reserved names, a parameter nothing provides, a param that hides a column."""
    config = _config(f"{module}:plain")
    assert reward_digest(config, ["answer", "other"]) == load_reward(config).digest
    with pytest.raises(RewardContractError, match="needs 'answer'") as missing:
        reward_digest(config, ["question", "solution"])
    assert "question, solution" in missing.value.expected
    with pytest.raises(RewardContractError, match="columns named truncated"):
        check_columns("f", [], [], ["answer", "truncated"])
    with pytest.raises(RewardContractError, match="are columns of the data too"):
        reward_digest(_config(f"{module}:plain", scale=2), ["answer", "scale"])
    reward_digest(_config(f"{module}:plain", answer=5), [])


@pytest.mark.parametrize("values", [[1, 2, 3, 4], (1, 2, 3, 4), [True, np.int64(2), np.float32(3), Decimal(4)]])
def test_results_that_are_accepted(values: Any) -> None:
    """C01, C05: a list or tuple of n; every number becomes a float."""
    numbers, reasons = check_result(values, 4, "f")
    assert numbers == [1.0, 2.0, 3.0, 4.0] and all(type(n) is float for n in numbers) and reasons == [None] * 4


@pytest.mark.parametrize(
    ("values", "got"),
    [
        ([1.0], "1 values"),
        ([1.0] * 3, "3 values"),
        ((1.0,) * 5, "5 values"),
        ([], "0 values"),
        ((x for x in range(4)), "generator"),
        (1.0, "float 1.0"),
        ({0: 1, 1: 1, 2: 1, 3: 1}, "dict"),
        (None, "NoneType"),
        ("1234", "str '1234'"),
        (np.ones(4), "numpy.ndarray"),
        (torch.ones(4), "torch.Tensor"),
        ([1, 2, 3, "0.25"], "str '0.25'"),
        ([1, 2, 3, torch.tensor(1.0)], "torch.Tensor"),
        ([1, 2, 3, np.array(1.0)], "numpy.ndarray"),
        ([1, 2, 3, [4]], "list"),
        ([1, 2, 3, {"score": 1}], "dict"),
        ([1, 2, 3, 1j], "complex"),
        ([1, 2, 3, b"1"], "bytes"),
    ],
)
def test_results_that_are_refused(values: Any, got: str) -> None:
    """C01, C05: the function, what was expected and what came are named."""
    with pytest.raises(RewardContractError) as caught:
        check_result(values, 4, "my.rewards:f")
    assert "'my.rewards:f'" in caught.value.message and caught.value.got == got and caught.value.expected


def test_missing_and_infinite_values_have_reasons() -> None:
    """C04: also an int beyond the range of floats, and Decimal's NaNs."""
    values = [
        1.0,
        math.nan,
        None,
        math.inf,
        float("1e400"),
        10**400,
        Decimal("sNaN"),
        Decimal("1e400"),
        np.float32("nan"),
    ]
    numbers, reasons = check_result(values, len(values), "f")
    assert numbers == [1.0] + [None] * 8
    assert reasons == [None, "not finite", "returned None"] + ["not finite"] * 6


def test_digest_follows_the_source(module: str, tmp_path: Path) -> None:
    plain, judge = resolve(f"{module}:plain"), resolve(f"{module}:judge")
    assert source_digest(plain) == source_digest(judge) == source_digest(resolve(f"{module}:half"))
    (tmp_path / f"{module}_same.py").write_text(MODULE)
    (tmp_path / f"{module}_other.py").write_text(MODULE.replace("scale * len", "scale + len"))
    assert source_digest(resolve(f"{module}_same:plain")) == source_digest(plain)
    assert source_digest(resolve(f"{module}_other:plain")) != source_digest(plain)
    assert source_digest(resolve("last_integer")) == source_digest(resolve("math_answer")) != source_digest(plain)

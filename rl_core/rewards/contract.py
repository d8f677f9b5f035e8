"""What a reward function is, and the checks on both sides of a call.

    def reward(completions: list[str], *, answer: list[Any], scale: float = 1.0) -> list[float]: ...

It is an importable callable that names what it wants: `completions` (always), `prompts` (message lists),
`completion_ids`, `truncated`, and columns of the environment's data; each is a list aligned to the completions, null
where a row lacks the column. `**kwargs` receives all of them. `params` of the recipe come as keyword arguments.
`async def` works too: it runs in an event loop of its own. The result is a list or tuple of one number per completion;
None leaves a completion unscored. A value must not depend on the other completions of the call: batches may be split.
"""

from __future__ import annotations

import asyncio
import difflib
import importlib
import inspect
import math
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from decimal import Decimal
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np

from rl_core.config import RewardConfig
from rl_core.errors import RewardContractError
from rl_core.rewards.builtin import REWARDS
from rl_core.rewards.source import source_digest

RESERVED = {
    "completions": "text",
    "prompts": "prompt_messages",
    "completion_ids": "completion_ids",
    "truncated": "truncated",
}
"""Argument name → key of a row. No column of the environment may have one of these names."""

_PATH = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


@dataclass(frozen=True)
class Reward:
    """A reward function, ready to be called.

    Attributes:
        name: name of its column.
        function: short name or import path, as the recipe gives it.
        call: the function itself.
        wants: arguments it names beside its params; those it cannot do without are in `needs`.
        takes_all: it has `**kwargs`.
        params: keyword arguments from the recipe.
        digest: see `source_digest`.
    """

    name: str
    function: str
    call: Callable[..., Any]
    wants: frozenset[str]
    needs: frozenset[str]
    takes_all: bool
    params: dict[str, Any]
    digest: str


def load_reward(config: RewardConfig) -> Reward:
    """Import a reward and check its signature against the recipe's params. Raises `RewardContractError`."""
    call = resolve(config.function)
    wants, needs, takes_all = _signature(call, config)
    digest = source_digest(call)
    return Reward(config.name, config.function, call, wants, needs, takes_all, dict(config.params), digest)


def reward_digest(config: RewardConfig, columns: Iterable[str]) -> str:
    """The source digest of a reward that fits its recipe and these data columns. Raises `RewardContractError`."""
    reward = load_reward(config)
    check_columns(reward.function, reward.needs, reward.params, columns)
    return reward.digest


def resolve(function: str) -> Callable[..., Any]:
    """The callable behind a short name or `package.module:function`; the working directory can be imported from.

    Raises `RewardContractError` when it is unknown, cannot be imported (with the lines at fault) or is no function.
    """
    path = REWARDS.get(function, function)
    if not _PATH.fullmatch(path):
        near = difflib.get_close_matches(function, REWARDS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else "write your own as `package.module:function`"
        raise RewardContractError(
            f"there is no reward {function!r}", expected=f"one of {', '.join(REWARDS)}", got=function, todo=hint
        )
    module, _, name = path.partition(":")
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())
    try:
        found = attrgetter(name)(importlib.import_module(module))
    except (Exception, SystemExit) as error:
        raise RewardContractError(
            f"reward {function!r} cannot be imported",
            expected=f"{name} in a module {module} that Python finds from {os.getcwd()}",
            got=f"{type(error).__name__}: {error}",
            details=_places(error),
        ) from error
    if not callable(found) or inspect.isclass(found):
        raise RewardContractError(
            f"reward {function!r} is no function", expected="a function, or an object with __call__", got=_kind(found)
        )
    return found  # type: ignore[no-any-return]


def _places(error: BaseException) -> str:
    """The lines of the user's own modules that an import failed in; ours and Python's are left out."""
    ours = (str(Path(__file__).resolve().parents[2] / "rl_core"), str(Path(importlib.__file__).parent), "<frozen")
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(ours)]
    return "\n".join(f"{f.filename}, line {f.lineno}, in {f.name}: {f.line}" for f in frames)


def _signature(call: Callable[..., Any], config: RewardConfig) -> tuple[frozenset[str], frozenset[str], bool]:
    """(arguments wanted from the rows, those of them without a default, whether it has `**kwargs`)."""
    try:
        parameters = inspect.signature(call).parameters.values()
    except (TypeError, ValueError) as error:
        raise RewardContractError(
            f"reward {config.function!r} has no readable signature", todo="wrap it in a Python function"
        ) from error
    named = {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    text = f"{config.function}{inspect.signature(call)}"
    if positional := [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY]:
        raise RewardContractError(
            f"reward {config.function!r}: all arguments are passed by name",
            got=text,
            todo=f"free {positional} of the /",
        )
    if "completions" not in named:
        raise RewardContractError(
            f"reward {config.function!r} takes no `completions`",
            expected="def reward(completions, ...)",
            got=text,
        )
    if clash := sorted(set(config.params) & set(RESERVED)):
        raise RewardContractError(
            f"reward {config.name!r}: params {clash} are what rlstages passes itself", todo="choose other names"
        )
    if not takes_all and (unknown := sorted(set(config.params) - set(named))):
        raise RewardContractError(
            f"reward {config.name!r}: its function takes no parameter {', '.join(map(repr, unknown))}",
            expected=f"params among {sorted(set(named) - set(RESERVED))}",
            got=text,
        )
    wants = frozenset(named) - set(config.params)
    return wants, frozenset(n for n in wants if named[n].default is inspect.Parameter.empty), takes_all


def check_columns(function: str, needs: Iterable[str], params: Iterable[str], columns: Iterable[str]) -> None:
    """Refuse data columns with reserved names, params that hide a column, and arguments that nothing provides."""
    columns = sorted(columns)
    if clash := sorted(set(columns) & set(RESERVED)):
        raise RewardContractError(
            f"the environment's data has columns named {', '.join(clash)}",
            expected=f"other names than {', '.join(RESERVED)}: reward functions get those from rlstages",
            todo="rename the columns in the data set",
        )
    if hidden := sorted(set(params) & set(columns)):
        raise RewardContractError(
            f"reward {function!r}: params {hidden} are columns of the data too", todo="rename the function's parameter"
        )
    if missing := sorted(set(needs) - set(RESERVED) - set(columns)):
        raise RewardContractError(
            f"reward {function!r} needs {', '.join(map(repr, missing))}, and nothing provides it",
            expected=f"arguments among {', '.join([*RESERVED, *columns])}, or params of the recipe",
            got=", ".join(missing),
            todo=f"set params.{missing[0]} in the recipe, or give the argument a default",
        )


def call_reward(reward: Reward, rows: list[dict[str, Any]], columns: Iterable[str]) -> Any:
    """Call a reward on rows (keys: values of `RESERVED`, and `data`) with the given data columns; the raw result."""
    arguments: dict[str, Any] = dict(reward.params)
    for name, key in RESERVED.items():
        if reward.takes_all or name in reward.wants:
            arguments[name] = [row[key] for row in rows]
    for name in columns:
        if reward.takes_all or name in reward.wants:
            arguments[name] = [row["data"].get(name) for row in rows]
    result = reward.call(**arguments)
    return asyncio.run(_awaited(result)) if inspect.isawaitable(result) else result


async def _awaited(result: Any) -> Any:
    return await result


def check_result(values: Any, expected_rows: int, function: str) -> tuple[list[float | None], list[str | None]]:
    """One float per row and, where there is none, the reason: "returned None" or "not finite".

    Accepts a list or tuple of int, float, bool, Decimal, numpy scalars and None. All else raises
    `RewardContractError`: other containers (a numpy array, a tensor, a generator: return `.tolist()` or `list(...)`),
    another count, text, 0-d arrays and tensors.
    """
    if not isinstance(values, (list, tuple)):
        raise RewardContractError(
            f"reward {function!r} returned no list",
            expected=f"a list of {expected_rows} numbers",
            got=_kind(values),
            todo="return one number per completion, as a list",
        )
    if len(values) != expected_rows:
        raise RewardContractError(
            f"reward {function!r} returned {len(values)} values for {expected_rows} completions",
            expected=f"{expected_rows} values",
            got=f"{len(values)} values",
            todo="return one number per completion",
        )
    numbers: list[float | None] = []
    reasons: list[str | None] = []
    for index, value in enumerate(values):
        number = None if value is None else _number(value, index, function)
        finite = number is not None and math.isfinite(number)
        numbers.append(number if finite else None)
        reasons.append(None if finite else "returned None" if value is None else "not finite")
    return numbers, reasons


def _number(value: Any, index: int, function: str) -> float:
    if not isinstance(value, (bool, int, float, Decimal, np.bool_, np.integer, np.floating)):
        raise RewardContractError(
            f"reward {function!r}: value {index} is no number",
            expected="int, float, bool, Decimal, a numpy scalar or None",
            got=_kind(value),
            todo="convert it in the reward function: float(x), or x.item() for an array or tensor of one element",
        )
    try:
        return float(value)
    except (OverflowError, ValueError):  # an integer beyond 1.8e308, a signalling NaN
        return math.nan


def _kind(value: Any) -> str:
    kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    return f"{kind} {value!r:.60}" if isinstance(value, (str, int, float)) else kind

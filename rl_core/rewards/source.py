"""The digest of a reward function's source, which is part of a scoring's identity."""

from __future__ import annotations

import functools
import importlib
import inspect
import linecache
from collections.abc import Callable
from importlib import metadata
from typing import Any

from rl_core.errors import RewardContractError
from rl_core.fingerprint import canonical_json, sha256_text
from rl_core.rewards.builtin import REWARDS

_BUILT_IN = "rl_core.rewards."
_LIBRARIES = ("math-verify", "latex2sympy2_extended", "sympy")  # they decide what `math_answer` says


def source_digest(call: Callable[..., Any]) -> str:
    """SHA-256 of the code that decides a reward: the source of the module that defines the function, as first seen.

    A built-in reward covers all built-in reward modules and the versions of the libraries behind `math_answer`.
    Not covered: other modules that the user's module imports.
    """
    target = call
    while isinstance(target, functools.partial):
        target = target.func
    target = inspect.unwrap(target)
    name = getattr(target, "__module__", None) or type(target).__module__
    if name.startswith(_BUILT_IN):
        names = sorted({path.partition(":")[0] for path in REWARDS.values()} | {"rl_core.rewards.math_symbolic"})
        parts = [*map(_source, names), *(f"{library} {metadata.version(library)}" for library in _LIBRARIES)]
        return sha256_text(canonical_json(parts))
    return sha256_text(canonical_json([_source(name)]))


@functools.cache
def _source(name: str) -> str:
    module = importlib.import_module(name)
    try:
        linecache.checkcache(inspect.getsourcefile(module))
        return inspect.getsource(module)
    except (OSError, TypeError) as error:
        raise RewardContractError(
            f"the source of module {name!r} cannot be read", todo="define the reward function in a Python file"
        ) from error

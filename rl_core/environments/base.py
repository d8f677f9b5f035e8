"""What an environment is: an endless, seekable stream of training prompts and a fixed list of held-out ones.

The stream has no state. A run remembers how many prompts it has consumed, and prompt number `position` is a function of
the run's seed alone, so resuming, rerunning and changing the batch size only move that one number.
"""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, Literal, Protocol

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, JsonValue, ValidationError

from rl_core.config import EnvironmentConfig
from rl_core.errors import ConfigError, DataError
from rl_core.seeds import seed, uniforms

Split = Literal["train", "heldout"]
ReadRows = Callable[[str], list[dict[str, Any]]]

ENVIRONMENTS = {
    "reasoning_gym": "rl_core.environments.reasoning_gym:ReasoningGym",
    "dataset": "rl_core.environments.dataset:DatasetEnvironment",
}


@dataclass(frozen=True)
class Prompt:
    """One task.

    Attributes:
        prompt_id: the environment's own name of the task; equal ids mean the same task, in any run.
        messages: chat messages, each `{"role", "content"}`; a raw prompt is one message of role `raw`.
        data: JSON-plain columns handed to the rewards.
    """

    prompt_id: str
    messages: list[dict[str, str]]
    data: dict[str, JsonValue]


class Params(BaseModel):
    """Base of an environment's parameters: unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)


class Environment(Protocol):
    """A source of single-turn tasks. It is built as `cls(params, run_seed, read_rows)`.

    Attributes:
        Params: pydantic model of `environment.params`.
        digest: SHA-256 of everything, apart from the run's seed, that decides the prompts.
    """

    Params: ClassVar[type[BaseModel]]
    digest: str

    def size(self, split: Split) -> int | None:
        """Number of different prompts in a split; null where there is no end of new ones."""
        ...

    def prompt(self, split: Split, position: int) -> Prompt:
        """Prompt number `position`, from 0. `train` never ends (epoch = position // size), `heldout` has `size`."""
        ...


@lru_cache(maxsize=4)
def _order(size: int, order_seed: int) -> npt.NDArray[np.int64]:
    keys = uniforms(np.uint64(order_seed) + np.arange(size, dtype=np.uint64), 0)
    return np.argsort(keys, kind="stable")


def shuffled(run_seed: int, size: int, position: int) -> tuple[int, int]:
    """(epoch, row) of stream position `position`: each epoch is its own permutation of `range(size)`."""
    if position < 0 or size < 1:
        raise ValueError(f"position {position} of {size} rows")
    epoch, offset = divmod(position, size)
    return epoch, int(_order(size, seed(run_seed, "prompts", epoch))[offset])


def check_heldout(position: int, size: int) -> None:
    """Refuse a held-out position that does not exist: asking twice for one problem would count it twice."""
    if not 0 <= position < size:
        raise DataError(
            f"there is no held-out problem {position}",
            expected=f"0 to {size - 1}" if size else "an environment with held-out problems",
            got=str(position),
            todo="lower evaluate.problems, or give the environment more held-out problems",
        )


def near(word: str, known: list[str]) -> str:
    """A hint that lists the closest known words, or all of them when there are few."""
    matches = difflib.get_close_matches(word, known, n=3, cutoff=0.5)
    if matches:
        return "did you mean " + " or ".join(repr(match) for match in matches) + "?"
    return "known: " + ", ".join(known) if len(known) <= 20 else f"none of the {len(known)} known names is near"


def open_environment(config: EnvironmentConfig, run_seed: int, read_rows: ReadRows) -> Environment:
    """Build the environment a config names.

    Args:
        config: kind (short name or `package.module:Class`) and parameters.
        run_seed: the run's seed.
        read_rows: reads the rows of a file; the environment itself opens none.

    Raises:
        ConfigError: the kind cannot be imported, or a parameter is unknown or out of bounds.
        DataError: the data it was given is unusable.
    """
    cls = _import(ENVIRONMENTS.get(config.kind, config.kind))
    params_model = getattr(cls, "Params", None)
    if not (isinstance(params_model, type) and issubclass(params_model, BaseModel)):
        raise ConfigError(
            f"environment.kind: {config.kind} has no `Params` model",
            expected="a class with a pydantic model `Params`, built as cls(params, run_seed, read_rows)",
        )
    try:
        params = params_model.model_validate(config.params)
    except ValidationError as error:
        raise _explain(config.kind, params_model, error) from error
    environment: Environment = cls(params, run_seed, read_rows)
    missing = [name for name in ("digest", "size", "prompt") if not hasattr(environment, name)]
    if missing:
        raise ConfigError(f"environment.kind: {config.kind} is no environment", got=f"without {', '.join(missing)}")
    return environment


def _import(path: str) -> Any:
    module_name, colon, name = path.partition(":")
    if not colon:
        raise ConfigError(
            f"environment.kind: {path!r} is unknown",
            expected=f"one of {', '.join(ENVIRONMENTS)}, or an import path `package.module:Class`",
            todo=near(path, list(ENVIRONMENTS)),
        )
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())
    try:
        return getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"environment.kind: cannot import {path}",
            got=f"{type(error).__name__}: {error}",
            todo=f"install the package, or put the module where Python finds it from {os.getcwd()}",
        ) from error


def _explain(kind: str, model: type[BaseModel], error: ValidationError) -> ConfigError:
    lines = []
    for item in error.errors(include_url=False):
        path = ".".join(["environment.params", *map(str, item["loc"])])
        if item["type"] == "extra_forbidden":
            lines.append(f"  {path}: unknown key; {near(str(item['loc'][-1]), list(model.model_fields))}")
        else:
            lines.append(f"  {path}: {str(item['msg']).removeprefix('Value error, ')} (got {item.get('input')!r})")
    return ConfigError(f"the parameters of environment {kind} are not valid", details="\n".join(lines))

"""Procedural tasks of the `reasoning_gym` package: any of its data sets, by name and parameters."""

from __future__ import annotations

import dataclasses
import datetime
import enum
import fractions
import importlib.metadata
import string
import sys
from collections.abc import Mapping
from decimal import Decimal
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np
from pydantic import Field, JsonValue, field_validator

from rl_core.environments.base import Params, Prompt, ReadRows, Split, check_heldout, near, shuffled
from rl_core.errors import ConfigError, DataError
from rl_core.fingerprint import canonical_json, sha256_text
from rl_core.seeds import seed

# These iterate over sets of text while they build a problem, so the problem depends on Python's hash seed.
HASH_ORDERED = frozenset(
    {"isomorphic_strings", "knight_swap", "polynomial_multiplication", "ransom_note", "word_ladder"}
)
# Runs stored programs that draw unseeded random numbers: about 1 problem in 100 differs from process to process.
UNREPEATABLE = frozenset({"codeio"})
_ENDLESS_EPOCH = 1024
_MAX_REDRAWS = 256


class ReasoningGymParams(Params):
    dataset: str = Field(min_length=1)
    """Name of a reasoning_gym data set, such as `chain_sum`."""
    dataset_params: dict[str, JsonValue] = Field(default_factory=dict)
    """Parameters of that data set; its seed and size are set from the fields here."""
    size: int | None = Field(default=None, ge=1)
    """Training problems of one epoch; null draws new problems for ever."""
    heldout_size: int = Field(default=128, ge=0)
    """Different held-out problems. None of their questions is ever a training question."""
    heldout_seed: int = Field(default=0, ge=0)
    """Seed of the held-out problems: the run's seed does not move them, so runs can be compared."""
    template: str = "{question}"
    """Text of the user turn. Fields: `question` and the names in the problem's metadata, such as `{expression}`."""
    system: str | None = Field(default=None, min_length=1)
    """Text of a system turn before it."""

    @field_validator("template")
    @classmethod
    def _plain_fields(cls, template: str) -> str:
        names = _field_names(template)
        if not names:
            raise ValueError("the template has no field, so every problem would read the same; use {question}")
        if bad := [name for name in names if not name.isidentifier()]:
            raise ValueError(f"fields are plain names in braces, not {bad[0]!r}; write a literal brace twice")
        return template


def _field_names(template: str) -> list[str]:
    return [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]


class ReasoningGym:
    """Problems of one reasoning_gym data set; rewards get `question`, `answer` and `metadata`.

    Training problem `position` is drawn with a seed made of the run's seed, its epoch (only where `size` is null) and a
    redraw count that grows until the question is none of the held-out ones.

    Raises:
        ConfigError: unknown data set or parameter, a template field that problems do not have, or a data set with too
            few different problems.
    """

    Params: ClassVar[type[ReasoningGymParams]] = ReasoningGymParams

    def __init__(self, params: ReasoningGymParams, run_seed: int, read_rows: ReadRows) -> None:
        self._params = params
        self._run_seed = run_seed
        self._stream = lru_cache(maxsize=32)(self._create)
        self.digest = sha256_text(
            canonical_json(
                {
                    "environment": "reasoning_gym",
                    "library": importlib.metadata.version("reasoning-gym"),
                    "params": params.model_dump(mode="json"),
                }
            )
        )
        self._heldout = self._draw_heldout()
        self._heldout_questions = {entry["question"] for entry in self._heldout}
        self.prompt("train", 0)

    def size(self, split: Split) -> int | None:
        return len(self._heldout) if split == "heldout" else self._params.size

    def prompt(self, split: Split, position: int) -> Prompt:
        if split == "heldout":
            check_heldout(position, len(self._heldout))
            return self._render(self._heldout[position])
        epoch, index = shuffled(self._run_seed, self._params.size or _ENDLESS_EPOCH, position)
        problem_set = epoch if self._params.size is None else 0
        for redraw in range(_MAX_REDRAWS):
            stream_seed = seed(self._run_seed, "reasoning_gym/train", problem_set, redraw)
            entry = self._entry(self._stream(stream_seed), index)
            if entry["question"] not in self._heldout_questions:
                return self._render(entry)
        raise ConfigError(
            f"{self._params.dataset}: {_MAX_REDRAWS} draws gave only held-out questions",
            todo="lower environment.params.heldout_size, or set dataset_params that allow more problems",
        )

    def _draw_heldout(self) -> list[dict[str, Any]]:
        wanted = self._params.heldout_size
        found: dict[str, dict[str, Any]] = {}
        stream = self._stream(seed(self._params.heldout_seed, "reasoning_gym/heldout", 0))
        for index in range(20 * wanted):
            entry = self._entry(stream, index)
            found.setdefault(entry["question"], entry)
            if len(found) == wanted:
                return list(found.values())
        if wanted:
            raise ConfigError(
                f"{self._params.dataset}: {20 * wanted} draws gave only {len(found)} different problems",
                expected=f"environment.params.heldout_size = {wanted} of them",
                todo="lower heldout_size, or set dataset_params that allow more problems",
            )
        return []

    def _create(self, stream_seed: int) -> Any:
        # Some data sets hand their seed to NumPy, which takes 32 bits.
        return _create(self._params.dataset, self._params.dataset_params, stream_seed & 0x3FFFFFFF)

    def _entry(self, stream: Any, index: int) -> dict[str, Any]:
        try:
            entry: dict[str, Any] = stream[index]
        except Exception as error:
            raise DataError(
                f"reasoning_gym failed to make problem {index} of {self._params.dataset}",
                got=f"{type(error).__name__}: {error}",
                todo="check environment.params.dataset_params",
            ) from error
        return entry

    def _render(self, entry: Mapping[str, Any]) -> Prompt:
        metadata = plain(entry["metadata"], f"{self._params.dataset} metadata")
        assert isinstance(metadata, dict)
        fields = {**metadata, "question": entry["question"]}
        try:
            text = self._params.template.format_map(fields)
        except KeyError as error:
            name = str(error.args[0])
            raise ConfigError(
                f"environment.params.template: problems of {self._params.dataset} have no field {name!r}",
                expected=", ".join(sorted(fields)),
                todo=near(name, sorted(fields)),
            ) from error
        system = [] if self._params.system is None else [{"role": "system", "content": self._params.system}]
        messages = [*system, {"role": "user", "content": text}]
        data = {"question": entry["question"], "answer": plain(entry["answer"], "answer"), "metadata": metadata}
        name = sha256_text(canonical_json([messages, data["answer"]]))[:16]
        return Prompt(prompt_id=f"{self._params.dataset}-{name}", messages=messages, data=data)


def _create(name: str, params: dict[str, JsonValue], stream_seed: int) -> Any:
    from reasoning_gym.composite import DatasetSpec
    from reasoning_gym.factory import DATASETS, create_dataset

    if name not in DATASETS:
        raise ConfigError(
            f"environment.params.dataset: reasoning_gym has no data set {name!r}", todo=near(name, sorted(DATASETS))
        )
    known = [field.name for field in dataclasses.fields(DATASETS[name][1]) if field.name not in ("seed", "size")]
    for key in params:
        if key not in known:
            hint = "set by the environment" if key in ("seed", "size") else f"unknown key; {near(key, known)}"
            raise ConfigError(f"environment.params.dataset_params.{key}: {hint}")
    settings: dict[str, Any] = dict(params)
    members = {name}
    try:
        if name == "composite":
            settings["datasets"] = [DatasetSpec(**spec) for spec in settings.get("datasets", [])]
            members = {spec.name for spec in settings["datasets"]}
        _check_repeatable(members)
        return create_dataset(name, seed=stream_seed, size=_ENDLESS_EPOCH, **settings)
    except (AssertionError, TypeError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"environment.params.dataset_params: {name} refuses them", got=f"{type(error).__name__}: {error}"
        ) from error


def _check_repeatable(names: set[str]) -> None:
    if affected := sorted(names & UNREPEATABLE):
        raise ConfigError(
            f"problems of {', '.join(affected)} differ from process to process",
            expected="a data set whose problems are a function of their seed",
            todo="take another data set, or write its problems to a file and use the environment `dataset`",
        )
    if sys.flags.hash_randomization and (affected := sorted(names & HASH_ORDERED)):
        raise ConfigError(
            f"problems of {', '.join(affected)} differ from process to process",
            expected="Python started with PYTHONHASHSEED=0",
            todo="set PYTHONHASHSEED=0, or take another data set",
        )


def plain(value: Any, where: str) -> JsonValue:
    """The JSON form of a problem's metadata. Raises `DataError` on a type without an obvious one."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return _scalar(value)
    if isinstance(value, np.generic):
        return plain(value.item(), where)
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, (Decimal, fractions.Fraction)):
        return str(value)
    if isinstance(value, (datetime.date, datetime.time)):
        return value.isoformat()
    if isinstance(value, np.ndarray):
        return plain(value.tolist(), where)
    if isinstance(value, Mapping):
        return {str(plain(key, where)): plain(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item, where) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted((plain(item, where) for item in value), key=canonical_json)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return plain({field.name: getattr(value, field.name) for field in dataclasses.fields(value)}, where)
    raise DataError(
        f"{where} holds a value without a JSON form", got=f"{type(value).__module__}.{type(value).__qualname__}"
    )


def _scalar(value: Any) -> JsonValue:
    if isinstance(value, enum.Enum):
        return value.name
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value)  # subclasses, such as NumPy's text, become the plain type
    return None

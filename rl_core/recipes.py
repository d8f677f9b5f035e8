"""Recipes: TOML text and `--set` overrides in, a `RunConfig` out, every mistake named in the user's own words."""

from __future__ import annotations

import copy
import difflib
import tomllib
from datetime import date, time
from typing import Any

from pydantic import ValidationError

from rl_core.config import RewardConfig, RunConfig
from rl_core.errors import ConfigError

MAX_OVERRIDE_CHARACTERS = 65_536


def parse_recipe(text: str, where: str) -> dict[str, Any]:
    """TOML text as plain data. Raises `ConfigError` with the line of a syntax error."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{where} is not valid TOML", got=str(error)) from error


def parse_value(text: str) -> Any:
    """The value of `--set key=text`: any TOML value; what TOML does not read as one value is taken as text.

    Dates are text too: no setting is a date, and a run's name may look like one.
    """
    try:
        found = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    if found.keys() != {"value"} or isinstance(found["value"], (date, time)):
        return text
    return found["value"]


def override_key(override: str) -> str:
    """The setting that an override is about: `learner.lr` of `learner.lr=1e-6`."""
    return override.partition("=")[0].strip()


def apply_overrides(data: dict[str, Any], overrides: list[str]) -> dict[str, Any]:
    """A copy of `data` with each `a.b.c=value` applied; list items go by index or, for rewards, by name."""
    result = copy.deepcopy(data)
    for override in overrides:
        if len(override) > MAX_OVERRIDE_CHARACTERS:
            raise ConfigError(
                f"the override of {override_key(override)[:80]} is too long",
                expected=f"at most {MAX_OVERRIDE_CHARACTERS:,} characters: overrides go through Prefect and MLflow",
                got=f"{len(override):,} characters",
                todo="put the data into a file and give its path, as the environment `dataset` takes it",
            )
        path, equals, text = override.partition("=")
        if not equals or not path.strip():
            raise ConfigError(
                "an override is not of the form key=value", expected="--set learner.lr=1e-6", got=override
            )
        _assign(result, path.strip().split("."), parse_value(text.strip()), override)
    return result


def _assign(node: Any, keys: list[str], value: Any, override: str) -> None:
    key = keys[0]
    if isinstance(node, list):
        index = _list_index(node, key, override)
        if len(keys) == 1:
            node[index] = value
        else:
            _assign(node[index], keys[1:], value, override)
        return
    if not isinstance(node, dict):
        raise ConfigError(f"--set {override}: {key!r} lies below a plain value", todo="set the value above it")
    if len(keys) == 1:
        node[key] = value
        return
    if node.get(key) is None:
        node[key] = {}
    _assign(node[key], keys[1:], value, override)


def _list_index(items: list[Any], key: str, override: str) -> int:
    names = [_item_name(item) for item in items]
    if key and key in names:
        return names.index(key)
    if key.isdecimal() and int(key) < len(items):
        return int(key)
    known = ", ".join(f"{i} ({name})" if name else str(i) for i, name in enumerate(names))
    raise ConfigError(f"--set {override}: there is no item {key!r}", expected=known, got=key)


def _item_name(item: Any) -> str:
    try:
        return RewardConfig.model_validate(item).name  # the name a reward has, or takes from its function
    except ValidationError:
        return ""


def build_config(data: dict[str, Any], where: str) -> RunConfig:
    """Validate plain data. Raises one `ConfigError` that lists every mistake, for unknown keys with the nearest one."""
    try:
        return RunConfig.model_validate(data)
    except ValidationError as error:
        found = error.errors(include_url=False)
        # A list whose items are wrong is also told to be too short: said only where it is the whole truth.
        inner = {item["loc"][:n] for item in found for n in range(len(item["loc"]))}
        lines = [_explain(item) for item in found if item["type"] != "too_short" or item["loc"] not in inner]
        raise ConfigError(f"{where} is not a valid run config", details="\n".join(f"  {x}" for x in lines)) from error


def _explain(item: Any) -> str:
    path = ".".join(str(part) for part in item["loc"])
    message = str(item["msg"]).removeprefix("Value error, ")
    if item["type"] == "extra_forbidden":
        near = difflib.get_close_matches(str(item["loc"][-1]), _keys_at(item["loc"][:-1]), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        return f"{path}: unknown key{hint}"
    if item["type"] == "value_error":
        return f"{path}: {message}" if path else message
    return f"{path}: {message}" if item["type"] == "missing" else f"{path}: {message} (got {item.get('input')!r})"


def _keys_at(path: tuple[Any, ...]) -> list[str]:
    model: Any = RunConfig
    for part in path:
        if isinstance(part, int):
            continue
        annotation = model.model_fields[part].annotation
        for candidate in (annotation, *getattr(annotation, "__args__", ())):
            if hasattr(candidate, "model_fields"):
                model = candidate
    return list(model.model_fields)


def config_json(config: RunConfig) -> dict[str, Any]:
    """The resolved config as JSON-plain data; `RunConfig.model_validate` is the inverse."""
    data: dict[str, Any] = config.model_dump(mode="json")
    return data

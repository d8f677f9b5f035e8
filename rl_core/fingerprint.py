"""Canonical JSON and the digests made of it. What is not canonical is refused, never turned into text."""

from __future__ import annotations

import hashlib
import json
import math
from typing import Any

from rl_core.errors import ConfigError


def _check(value: Any, where: str) -> None:
    if value is None or type(value) in (bool, int, str):  # exactly: numpy.float64 is a float and enums may be text
        return
    if type(value) is float:
        if not math.isfinite(value):
            raise ConfigError(f"{where} is not finite", expected="a finite number", got=repr(value))
        return
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise ConfigError(f"{where} has a key that is not text", expected="text keys", got=f"{key!r}")
            _check(item, f"{where}.{key}")
        return
    if isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            _check(item, f"{where}[{index}]")
        return
    raise ConfigError(
        f"{where} cannot enter a fingerprint",
        expected="null, true/false, numbers, text, lists and dictionaries of these",
        got=f"{type(value).__module__}.{type(value).__qualname__}",
        todo="convert it to plain data first",
    )


def canonical_json(value: Any, where: str = "value") -> str:
    """The one text form of a JSON-plain value: sorted keys, no spaces, UTF-8. Raises `ConfigError` on anything else.

    A whole float stays a float (`1.0`), so `1` and `1.0` differ: the config model has typed them before.
    """
    _check(value, where)
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def sha256_text(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def fingerprint(stage: str, version: int, identity: dict[str, Any], seed_key: list[int], inputs: dict[str, str]) -> str:
    """SHA-256 over what decides a stage's output: its name, version, identity config, seed key, input digests."""
    return sha256_text(
        canonical_json(
            {"stage": stage, "version": version, "identity": identity, "seed": seed_key, "inputs": inputs},
            where=stage,
        )
    )

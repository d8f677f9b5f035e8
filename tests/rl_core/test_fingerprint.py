"""What enters a fingerprint is canonical: one text per value, and no text for what has none."""

from __future__ import annotations

import enum
import hashlib
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_core.errors import ConfigError
from rl_core.fingerprint import canonical_json, fingerprint, sha256_text

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


def _shuffled(value: Any, shuffle: random.Random) -> Any:
    """The same value with the keys of every dictionary in another order."""
    if isinstance(value, dict):
        items = [(key, _shuffled(item, shuffle)) for key, item in value.items()]
        shuffle.shuffle(items)
        return dict(items)
    return [_shuffled(item, shuffle) for item in value] if isinstance(value, list) else value


@given(PLAIN, st.integers(0, 2**32))
def test_text_depends_on_the_value_and_not_on_the_order_of_keys(value: Any, order: int) -> None:
    text = canonical_json(value)
    assert canonical_json(_shuffled(value, random.Random(order))) == text
    assert json.loads(text) == value
    assert canonical_json(json.loads(text)) == text


@given(PLAIN, PLAIN)
def test_different_values_have_different_texts(one: Any, other: Any) -> None:
    # Python calls 1, 1.0 and True equal; the reference here is the standard library's own text of the sorted value.
    same = json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)
    assert (canonical_json(one) == canonical_json(other)) == same


def test_text_is_exactly_this() -> None:
    value = {"b": [1, 1.0, True, None], "a": {"ü": "x\n", "": -0.5}, "ab": (2, 3)}
    assert canonical_json(value) == '{"a":{"":-0.5,"ü":"x\\n"},"ab":[2,3],"b":[1,1.0,true,null]}'


def test_whole_floats_integers_and_booleans_differ() -> None:
    assert len({canonical_json(value) for value in (1, 1.0, True, "1", [1])}) == 5
    assert canonical_json((1, 2)) == canonical_json([1, 2])


class _Text(enum.StrEnum):
    A = "a"


class _Number(enum.IntEnum):
    ONE = 1


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (np.float64(1.5), "numpy.float64"),
        (np.float32(1.5), "numpy.float32"),
        (np.int64(1), "numpy.int64"),
        (np.bool_(True), "numpy.bool"),
        (np.str_("a"), "numpy.str_"),
        (np.zeros(2), "numpy.ndarray"),
        (torch.tensor(1.0), "torch.Tensor"),
        (torch.float32, "torch.dtype"),
        (Path("a"), "pathlib.PosixPath"),
        (b"a", "builtins.bytes"),
        ({1, 2}, "builtins.set"),
        (1j, "builtins.complex"),
        (object(), "builtins.object"),
        (len, "builtins.builtin_function_or_method"),
        (_Text.A, "_Text"),
        (_Number.ONE, "_Number"),
    ],
)
def test_what_is_not_plain_is_refused_by_place_and_type(value: Any, kind: str) -> None:
    with pytest.raises(ConfigError) as caught:
        canonical_json({"model": [0, {"x": value}]}, where="train")
    assert "train.model[1].x cannot enter a fingerprint" in str(caught.value)
    assert kind in caught.value.got


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_numbers_that_are_not_finite_are_refused(value: float) -> None:
    with pytest.raises(ConfigError, match=r"generate\[0\] is not finite"):
        canonical_json([value], where="generate")


@pytest.mark.parametrize("key", [1, None, ("a",), 1.5])
def test_keys_that_are_not_text_are_refused(key: Any) -> None:
    with pytest.raises(ConfigError, match="has a key that is not text"):
        canonical_json({key: 1})


def test_a_lone_surrogate_has_a_digest() -> None:
    """C10: a Python text may hold what UTF-8 cannot; two different ones must not share a digest."""
    assert sha256_text(canonical_json("ok \ud83d")) != sha256_text(canonical_json("ok \ufffd"))


def test_fingerprint_is_sha256_of_the_canonical_record() -> None:
    record = '{"identity":{"lr":1e-06},"inputs":{"policy":"d"},"seed":[7,3],"stage":"train","version":2}'
    assert fingerprint("train", 2, {"lr": 1e-6}, [7, 3], {"policy": "d"}) == hashlib.sha256(record.encode()).hexdigest()


def test_fingerprint_is_this_on_every_machine() -> None:
    golden = "653ddd8109d9654759e4448924a0fb40381e851b69fda38d8b38b72e673fcf91"
    assert fingerprint("score", 1, {"rewards": [{"name": "ü", "weight": 1.0}]}, [0, -1], {"generate": "ab"}) == golden


def test_every_part_of_a_fingerprint_counts() -> None:
    base: dict[str, Any] = {"stage": "s", "version": 1, "identity": {"a": 1}, "seed_key": [1, 2], "inputs": {"p": "x"}}
    changes = [
        {"stage": "t"},
        {"version": 2},
        {"identity": {"a": 2}},
        {"identity": {"a": 1, "b": None}},
        {"seed_key": [1, 3]},
        {"seed_key": [2, 2]},
        {"inputs": {"p": "y"}},
        {"inputs": {"q": "x"}},
    ]
    assert len({fingerprint(**base)} | {fingerprint(**(base | change)) for change in changes}) == len(changes) + 1

"""The declared tables: described fields, types that hold more than 2 GiB, one key, nulls only with a reason."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
import pytest

from rl_core import schemas

TABLES = {
    "trajectories": schemas.TRAJECTORIES,
    "rewards": schemas.rewards_schema(["a", "b"]),
    "advantages": schemas.ADVANTAGES,
    "evaluation": schemas.EVALUATION,
    "train_steps": schemas.TRAIN_STEPS,
    "decisions": schemas.DECISIONS,
}
SHORT_TEXT = {"role", "finish_reason", "policy_digest", "champion_digest", "drop_reason", "status", "mode", "alias"}
SHORT_TEXT |= {"method", "metric"}
"""Texts of a bounded length: a column of them cannot pass 2 GiB in a table that fits into memory."""


def _nested(field: pa.Field) -> Iterator[pa.Field]:
    yield field
    if pa.types.is_large_list(field.type):
        yield from _nested(field.type.value_field)
    elif pa.types.is_struct(field.type):
        for child in field.type:
            yield from _nested(child)


def _columns() -> list[tuple[str, pa.Field]]:
    return [(f"{table}.{field.name}", field) for table, schema in TABLES.items() for field in schema]


COLUMNS = pytest.mark.parametrize(("name", "field"), _columns(), ids=[name for name, _ in _columns()])


@COLUMNS
def test_every_column_says_what_it_holds(name: str, field: pa.Field) -> None:
    assert field.metadata[b"about"].decode().strip(), name


@COLUMNS
def test_columns_that_can_grow_long_have_64_bit_offsets(name: str, field: pa.Field) -> None:
    """C74: a list or text column past 2 GiB must not overflow when its parts are joined."""
    for part in _nested(field):
        assert not pa.types.is_list(part.type) and not pa.types.is_binary(part.type), name
        if pa.types.is_string(part.type):
            assert part.name in SHORT_TEXT or part.name == "reason", name


@COLUMNS
def test_items_of_lists_are_never_null(name: str, field: pa.Field) -> None:
    for part in list(_nested(field))[1:]:
        assert not part.nullable, name


@pytest.mark.parametrize("table", ["trajectories", "rewards", "advantages", "evaluation"])
def test_rows_of_completions_begin_with_the_key(table: str) -> None:
    fields = [TABLES[table].field(i) for i in (0, 1)]
    assert [(f.name, f.type, f.nullable) for f in fields] == [
        ("group_id", pa.int64(), False),
        ("sample_id", pa.int32(), False),
    ]


def test_only_these_columns_may_be_null() -> None:
    nullable = {name for name, field in _columns() if field.nullable}
    assert nullable == {
        "trajectories.ref_logprobs",
        *(f"rewards.{column}" for column in ("reward_a", "reason_a", "reward_b", "reason_b", "reward")),
        *("advantages.reward", "advantages.drop_reason", "evaluation.score", "evaluation.reason"),
        "train_steps.value",
        *(f"decisions.{c}" for c in ("champion_digest", "difference", "lower_bound", "p_value")),
    }


def test_reward_columns_follow_the_order_of_the_recipe() -> None:
    names = ["group_id", "sample_id", "reward_b", "reason_b", "reward_a", "reason_a", "reward", "status"]
    assert schemas.rewards_schema(["b", "a"]).names == names


def test_names_are_unique_in_a_table() -> None:
    for name, schema in TABLES.items():
        assert len(set(schema.names)) == len(schema.names), name

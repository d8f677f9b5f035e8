"""Parquet by declared schema: what is written comes back exactly, and what does not fit is refused by name."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rl_core.errors import DataError
from rl_core.schemas import ADVANTAGES, DECISIONS, EVALUATION, TRAIN_STEPS, TRAJECTORIES, rewards_schema
from tasks.storage.tables import read_table, write_table

SCORES = pa.schema(
    [
        pa.field("group_id", pa.int64(), nullable=False),
        pa.field("note", pa.large_string()),
        pa.field("tool_score", pa.float64()),
    ]
)


def trajectory(**changes: Any) -> dict[str, Any]:
    row: dict[str, Any] = {
        "group_id": 0,
        "sample_id": 0,
        "prompt_id": "p",
        "prompt_messages": [{"role": "user", "content": "1 + 1?"}],
        "prompt_ids": [1, 2],
        "completion_ids": [3, 4],
        "sampler_logprobs": [-0.5, -0.25],
        "ref_logprobs": None,
        "action_mask": [True, False],
        "turns": [{"role": "assistant", "start": 0, "end": 2}],
        "finish_reason": "stop",
        "truncated": False,
        "temperature": 1.0,
        "policy_version": 0,
        "policy_digest": "d",
        "seed": 2**63 - 1,
        "text": "2",
        "env_data": "{}",
    }
    return row | changes


def round_trip(folder: Path, rows: list[dict[str, Any]], schema: pa.Schema) -> list[dict[str, Any]]:
    assert write_table(folder / "part-0000.parquet", rows, schema) == len(rows)
    table = read_table(folder, schema)
    assert table.schema.equals(schema, check_metadata=True)
    found: list[dict[str, Any]] = table.to_pylist()
    return found


def refusal(folder: Path, rows: list[dict[str, Any]], schema: pa.Schema) -> DataError:
    path = folder / "part-0000.parquet"
    with pytest.raises(DataError) as caught:
        write_table(path, rows, schema)
    assert not path.exists()
    return caught.value


# -- what is written comes back ----------------------------------------------------------------------------------------


def test_awkward_texts_come_back_exactly(tmp_path: Path) -> None:
    """C10: a NUL, a right-to-left mark and an 8 MB line; the other rows stay as they are."""
    texts = ["ok", "a\x00b", "\u202e42", "x" * 8_000_000, "\ufffd", "😀", "", "line\u2028break\r\n"]
    rows = [trajectory(sample_id=i, text=text, completion_ids=[i]) for i, text in enumerate(texts)]
    found = round_trip(tmp_path, rows, TRAJECTORIES)
    assert found == rows
    polars = pl.read_parquet(tmp_path / "part-0000.parquet")
    assert polars["text"].to_list() == texts


def test_a_lone_surrogate_is_refused_by_column_and_row(tmp_path: Path) -> None:
    """C10: it is replaced where text is decoded; one that gets here is a mistake and must not be lost in silence."""
    error = refusal(tmp_path, [trajectory(), trajectory(text="ok \ud83d")], TRAJECTORIES)
    assert "column text, row 1" in error.message
    assert "surrogates not allowed" in error.got


def test_an_empty_list_is_not_null(tmp_path: Path) -> None:
    """C36: `[]` (stopped at once) and null (not computed) stay distinct, in pyarrow and in Polars."""
    empty = {"completion_ids": [], "sampler_logprobs": [], "action_mask": [], "turns": []}
    rows = [
        trajectory(sample_id=0, ref_logprobs=[], **empty),
        trajectory(sample_id=1, ref_logprobs=None, **empty),
        trajectory(sample_id=2, ref_logprobs=[-1.0, -2.0]),
    ]
    assert round_trip(tmp_path, rows, TRAJECTORIES) == rows
    polars = pl.read_parquet(tmp_path / "part-0000.parquet")
    assert polars["ref_logprobs"].to_list() == [[], None, [-1.0, -2.0]]
    assert polars["completion_ids"].to_list() == [[], [], [3, 4]]


def test_numbers_at_their_bounds_come_back_exactly(tmp_path: Path) -> None:
    rows = [
        trajectory(group_id=2**63 - 1, sample_id=2**31 - 1, seed=-(2**63), prompt_ids=[2**31 - 1, -(2**31)]),
        trajectory(temperature=5e-324, sampler_logprobs=[-3.4028234663852886e38, -1.401298464324817e-45]),
        trajectory(temperature=-0.0, seed=2**53 + 1),
    ]
    found = round_trip(tmp_path, rows, TRAJECTORIES)
    assert found == rows
    assert str(found[2]["temperature"]) == "-0.0"


JSON_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
ROWS = st.lists(
    st.fixed_dictionaries(
        {
            "group_id": st.integers(-(2**63), 2**63 - 1),
            "note": st.none() | JSON_TEXT,
            "tool_score": st.none() | st.floats(allow_nan=False),
        }
    ),
    max_size=30,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(ROWS)
def test_any_rows_come_back_in_order(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    assert round_trip(tmp_path, rows, SCORES) == rows
    assert pl.read_parquet(tmp_path / "part-0000.parquet").to_dicts() == rows


def test_texts_that_hold_json_keep_absent_empty_and_null_apart(tmp_path: Path) -> None:
    """C70: `env_data` is JSON text, so no struct type is inferred and no key is added or lost."""
    data = [
        '{"k":7,"m":8,"p":9}',
        '{"k":1,"m":2}',
        "{}",
        '{"k":"x"}',
        '{"a":[[1],[],null]}',
        '{"n":9223372036854775808}',
    ]
    rows = [trajectory(sample_id=i, env_data=text) for i, text in enumerate(data)]
    assert [row["env_data"] for row in round_trip(tmp_path, rows, TRAJECTORIES)] == data


@pytest.mark.parametrize(
    "schema",
    [TRAJECTORIES, ADVANTAGES, EVALUATION, TRAIN_STEPS, DECISIONS, rewards_schema(["a"])],
    ids=lambda s: s.names[2],
)
def test_every_table_is_one_schema_for_pyarrow_and_polars(tmp_path: Path, schema: pa.Schema) -> None:
    """Also without rows; the unit and shape of a column travel in the file."""
    write_table(tmp_path / "part-0000.parquet", [], schema)
    stored = pq.read_schema(tmp_path / "part-0000.parquet")
    assert stored.equals(schema)
    for field in stored:
        assert field.metadata[b"about"] == schema.field(field.name).metadata[b"about"]
    assert pl.read_parquet_schema(tmp_path / "part-0000.parquet") == pl.DataFrame(schema.empty_table()).schema


def test_the_same_rows_give_the_same_bytes(tmp_path: Path) -> None:
    rows = [trajectory(sample_id=i, text=f"{i}" * 50) for i in range(100)]
    digests = set()
    for name in ("part-0000.parquet", "part-0001.parquet", "part-0000.parquet"):
        write_table(tmp_path / name, rows, TRAJECTORIES)
        digests.add(hashlib.sha256((tmp_path / name).read_bytes()).hexdigest())
    assert len(digests) == 1


# -- what does not fit is refused --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("column", "value"),
    [
        *(("group_id", "1"), ("group_id", 1.0), ("group_id", 1.5), ("group_id", True), ("group_id", 2**63)),
        *(("sample_id", 2**31), ("sample_id", None), ("seed", 2**64), ("seed", None)),
        *(("text", None), ("text", 5), ("text", b"\xff"), ("text", ["a"]), ("truncated", 1), ("truncated", None)),
        *(("temperature", "hot"), ("temperature", None), ("temperature", 2**53 + 1)),
        *(("prompt_ids", None), ("prompt_ids", 5), ("prompt_ids", "ab"), ("prompt_ids", [1, None])),
        *(("prompt_ids", [1, 2.5]), ("prompt_ids", (1, 2.0)), ("prompt_ids", [2**31]), ("prompt_ids", [[1]])),
        *(("ref_logprobs", [-1.0, None]), ("ref_logprobs", ["x"]), ("action_mask", [1, 0]), ("action_mask", [None])),
        *(("prompt_messages", {"role": "user", "content": "x"}), ("prompt_messages", [None])),
        *(("prompt_messages", [{"role": "user"}]), ("prompt_messages", [{"role": None, "content": "x"}])),
        ("turns", [{"role": "assistant", "start": 0.5, "end": 2}]),
        ("turns", [{"role": "assistant", "start": 0}]),
    ],
)
def test_a_value_that_does_not_fit_is_refused_by_column_and_row(tmp_path: Path, column: str, value: object) -> None:
    rows = [trajectory()] * 300 + [trajectory(**{column: value}), trajectory()]
    error = refusal(tmp_path, rows, TRAJECTORIES)
    assert f"column {column}, row 300" in error.message
    assert error.expected == str(TRAJECTORIES.field(column).type)
    assert error.got


def test_a_missing_key_is_null_where_null_is_allowed_and_refused_elsewhere(tmp_path: Path) -> None:
    assert round_trip(tmp_path, [{"group_id": 1}], SCORES) == [{"group_id": 1, "note": None, "tool_score": None}]
    (tmp_path / "part-0000.parquet").unlink()
    assert "column group_id, row 0" in refusal(tmp_path, [{"note": "x"}], SCORES).message

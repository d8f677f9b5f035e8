"""Parquet by declared schema: what is written comes back exactly, and what does not fit is refused by name."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rl_core.errors import CorruptOutputError, DataError
from rl_core.schemas import ADVANTAGES, DECISIONS, EVALUATION, TRAIN_STEPS, TRAJECTORIES, rewards_schema
from tasks import tables
from tasks.tables import read_table, write_table

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


# -- shards of several ages --------------------------------------------------------------------------------------------


def test_shards_of_four_kinds_read_as_one_table(tmp_path: Path) -> None:
    """C72: all-null column, numbers, no rows, an older file without the column, a newer one with an unknown column."""
    older = pa.schema([field for field in SCORES if field.name != "tool_score"])
    newer = pa.schema([*SCORES, pa.field("later", pa.bool_())])
    shards: list[tuple[list[dict[str, Any]], pa.Schema]] = [
        ([{"group_id": 0, "note": "a"}, {"group_id": 1}], SCORES),
        ([{"group_id": 2, "tool_score": 0.5}], SCORES),
        ([], SCORES),
        ([{"group_id": 3, "note": "b"}], older),
        ([{"group_id": 4, "tool_score": 1.5, "later": True}], newer),
    ]
    for index, (rows, schema) in enumerate(shards):
        write_table(tmp_path / f"part-{index:04d}.parquet", rows, schema)
    expected = {
        "group_id": [0, 1, 2, 3, 4],
        "note": ["a", None, None, "b", None],
        "tool_score": [None, None, 0.5, None, 1.5],
    }
    table = read_table(tmp_path, SCORES)
    assert table.schema.equals(SCORES)
    assert table.to_pydict() == expected
    frame = pl.scan_parquet(tmp_path / "part-*.parquet", missing_columns="insert", extra_columns="ignore").collect()
    assert frame.schema == {"group_id": pl.Int64, "note": pl.String, "tool_score": pl.Float64}
    assert frame.to_dict(as_series=False) == expected


def test_a_column_that_another_writer_left_untyped_is_read_as_declared(tmp_path: Path) -> None:
    """C72: a shard whose column was inferred as null, and one with 32-bit texts, from a writer without a schema."""
    pq.write_table(pa.table({"group_id": [1], "note": ["a"], "tool_score": [None]}), tmp_path / "part-0000.parquet")
    write_table(tmp_path / "part-0001.parquet", [{"group_id": 2, "tool_score": 2.0}], SCORES)
    assert read_table(tmp_path, SCORES).to_pydict() == {
        "group_id": [1, 2],
        "note": ["a", None],
        "tool_score": [None, 2.0],
    }


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"note": ["a"], "tool_score": [1.0]}, "lacks the column group_id"),
        ({"group_id": [None, 1]}, "column group_id has nulls"),
        ({"group_id": [1], "tool_score": ["many"]}, "column tool_score has another type"),
        ({"group_id": [1], "tool_score": [[1.0]]}, "column tool_score has another type"),
        ({"group_id": [1.5]}, "column group_id has another type"),
    ],
)
def test_a_file_that_breaks_the_schema_is_refused_by_path_and_column(
    tmp_path: Path, table: dict[str, Any], message: str
) -> None:
    path = tmp_path / "part-0000.parquet"
    pq.write_table(pa.table(table), path)
    with pytest.raises(DataError) as caught:
        read_table(tmp_path, SCORES)
    assert str(path) in caught.value.message
    assert message in caught.value.message


@pytest.mark.parametrize("content", [b"", b"PAR1", b"garbage" * 100])
def test_an_unreadable_file_is_a_corrupt_output(tmp_path: Path, content: bytes) -> None:
    write_table(tmp_path / "part-0000.parquet", [{"group_id": 1}], SCORES)
    (tmp_path / "part-0001.parquet").write_bytes(content)
    with pytest.raises(CorruptOutputError, match=r"part-0001\.parquet cannot be read"):
        read_table(tmp_path, SCORES)


def test_a_file_without_its_footer_is_a_corrupt_output(tmp_path: Path) -> None:
    """C75: what a killed attempt leaves."""
    path = tmp_path / "part-0000.parquet"
    write_table(path, [{"group_id": i} for i in range(1000)], SCORES)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CorruptOutputError, match="cannot be read as Parquet"):
        read_table(tmp_path, SCORES)


def test_a_folder_without_parts_is_a_corrupt_output(tmp_path: Path) -> None:
    with pytest.raises(CorruptOutputError, match="holds no part"):
        read_table(tmp_path, SCORES)


def test_parts_are_read_in_file_order(tmp_path: Path) -> None:
    for index in (3, 0, 2, 1):
        write_table(tmp_path / f"part-{index:04d}.parquet", [{"group_id": index}], SCORES)
    (tmp_path / "other.parquet").write_bytes(b"not a part")
    assert read_table(tmp_path, SCORES).column("group_id").to_pylist() == [0, 1, 2, 3]


# -- size --------------------------------------------------------------------------------------------------------------


def _group_bytes(path: Path) -> list[int]:
    file = pq.ParquetFile(path)
    return [file.read_row_group(index).nbytes for index in range(file.num_row_groups)]


@pytest.mark.parametrize(
    "sizes",
    [[100] * 5000, [50_000] * 20 + [1] * 2000, [1] * 2000 + [50_000] * 20, [60_000] * 600, [300_000, 1, 300_000], [1]],
    ids=["even", "long rows first", "long rows last", "long rows", "single rows above the cap", "one row"],
)
def test_row_groups_stay_under_the_cap(tmp_path: Path, sizes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """C74: whatever the mix of row sizes; only a row that is larger by itself may pass the cap."""
    cap = 200_000
    monkeypatch.setattr(tables, "ROW_GROUP_BYTES", cap)
    path = tmp_path / "part-0000.parquet"
    rows = [{"group_id": i, "note": "x" * size} for i, size in enumerate(sizes)]
    assert write_table(path, rows, SCORES) == len(rows)
    groups = _group_bytes(path)
    assert all(size <= max(cap, max(sizes) + 100) for size in groups)
    assert len(groups) <= 4 * sum(sizes) / cap + 1
    assert read_table(tmp_path, SCORES).column("group_id").to_pylist() == list(range(len(rows)))


_LARGE = """
import resource, sys
from pathlib import Path
resource.setrlimit(resource.RLIMIT_AS, (8 * 2**30, 8 * 2**30))
import pyarrow as pa
import pyarrow.parquet as pq
from rl_core.schemas import ADVANTAGES
from tasks.tables import read_table, write_table

folder = Path(sys.argv[1])
schema = pa.schema([ADVANTAGES.field("group_id"), pa.field("text", pa.large_string(), nullable=False)])
texts = [chr(97 + i) * 2**20 for i in range(11)]
rows = [{"group_id": i // 8, "text": texts[i % 11]} for i in range(2200)]
write_table(folder / "part-0000.parquet", rows, schema)
file = pq.ParquetFile(folder / "part-0000.parquet")
assert file.num_row_groups > 1
row = 0
for index in range(file.num_row_groups):
    group = file.read_row_group(index)
    assert group.nbytes <= 64 * 2**20
    for value in group.column("text"):
        assert value.as_py() == texts[row % 11]
        row += 1
assert row == 2200
table = read_table(folder, schema)
assert table.nbytes > 2**31
whole = table.combine_chunks()
assert whole.column("group_id").to_pylist() == [i // 8 for i in range(2200)]
counts = whole.group_by("group_id").aggregate([("text", "count")])
assert counts.column("text_count").to_pylist() == [8] * 275
"""


@pytest.mark.slow
def test_a_text_column_past_two_gib_is_written_read_and_joined(tmp_path: Path) -> None:
    """C74: 2,200 rows of 1 MiB in a process that may use 8 GiB; the row groups keep under the real cap."""
    subprocess.run([sys.executable, "-c", _LARGE, str(tmp_path)], check=True, timeout=300)

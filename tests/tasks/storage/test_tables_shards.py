"""Files of several ages and sizes read as one table; what cannot be read says so."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rl_core.errors import CorruptOutputError, DataError
from tasks.storage import tables
from tasks.storage.tables import read_table, write_table

SCORES = pa.schema(
    [
        pa.field("group_id", pa.int64(), nullable=False),
        pa.field("note", pa.large_string()),
        pa.field("tool_score", pa.float64()),
    ]
)


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
from tasks.storage.tables import read_table, write_table

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
    row += group.num_rows
    assert group.column("text")[-1].as_py() == texts[(row - 1) % 11]
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

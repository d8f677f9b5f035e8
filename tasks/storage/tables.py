"""Parquet in and out, always by a declared schema."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rl_core.errors import CorruptOutputError, DataError

ROW_GROUP_BYTES = 64 * 2**20
_BLOCK_ROWS = 256


def write_table(path: Path, rows: Sequence[dict[str, Any]], schema: pa.Schema) -> int:
    """Write rows under `schema` (never inferred) and return their number; keys the schema does not know are left out.

    A row group holds at most `ROW_GROUP_BYTES` or one row. Raises `DataError` naming column and row when a value does
    not fit; no file is left then.
    """
    try:
        with pq.ParquetWriter(path, schema, compression="zstd") as writer:
            for group in _row_groups(rows, schema):
                writer.write_table(group, row_group_size=max(1, group.num_rows))
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    return len(rows)


def _row_groups(rows: Sequence[dict[str, Any]], schema: pa.Schema) -> Iterator[pa.Table]:
    """Converted block by block, so that a large table is never twice in memory."""
    pending = schema.empty_table()
    for start in range(0, len(rows), _BLOCK_ROWS):
        block = rows[start : start + _BLOCK_ROWS]
        table = pa.table([_column(block, field, start) for field in schema], schema=schema)
        for part in _halved(table):
            if pending.num_rows and pending.nbytes + part.nbytes > ROW_GROUP_BYTES:
                yield pending
                pending = part
            else:
                pending = pa.concat_tables([pending, part])
    yield pending


def _halved(table: pa.Table) -> Iterator[pa.Table]:
    # Halving holds the cap for rows of any sizes; a cap in rows does not when long rows stand together.
    if table.nbytes <= ROW_GROUP_BYTES or table.num_rows < 2:
        yield table
        return
    half = table.num_rows // 2
    yield from _halved(table.slice(0, half))
    yield from _halved(table.slice(half))


def _column(block: Sequence[dict[str, Any]], field: pa.Field, start: int) -> pa.Array:
    values = [row.get(field.name) for row in block]
    try:
        return _array(values, field)
    except _MISFIT as error:
        raise _misfit(values, field, start, error) from error


_MISFIT = (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError, UnicodeEncodeError)


def _array(values: list[Any], field: pa.Field) -> pa.Array:
    if _has_float_for_int(values, field.type):
        raise pa.ArrowTypeError("a float where an integer belongs")  # Arrow would cut its fraction off
    column = pa.array(values, type=field.type)
    if _has_null(column, field):
        raise pa.ArrowInvalid("null where a value is required")
    return column


def _has_float_for_int(values: Iterable[Any], kind: pa.DataType) -> bool:
    if pa.types.is_integer(kind):
        return any(isinstance(value, (float, np.floating)) for value in values)
    if pa.types.is_large_list(kind):
        lists = (value for value in values if isinstance(value, (list, tuple, np.ndarray)))
        return any(_has_float_for_int(value, kind.value_type) for value in lists)
    if pa.types.is_struct(kind):
        items = [value for value in values if isinstance(value, dict)]
        return any(_has_float_for_int((item.get(child.name) for item in items), child.type) for child in kind)
    return False


def _has_null(column: pa.Array, field: pa.Field) -> bool:
    """Whether a null stands, at any depth, where the field allows none. Arrow itself checks only in the writer."""
    if column.null_count and not field.nullable:
        return True
    if pa.types.is_large_list(field.type):
        return _has_null(column.flatten(), field.type.value_field)
    if pa.types.is_struct(field.type):
        return any(_has_null(column.field(i), child) for i, child in enumerate(field.type))
    return False


def _misfit(values: list[Any], field: pa.Field, start: int, error: Exception) -> DataError:
    for row, value in enumerate(values, start):
        try:
            _array([value], field)
        except _MISFIT as found:
            return DataError(
                f"column {field.name}, row {row}: the value does not fit", expected=str(field.type), got=str(found)
            )
    return DataError(f"column {field.name}: the values do not fit", expected=str(field.type), got=str(error))


def read_table(folder: Path, schema: pa.Schema) -> pa.Table:
    """All `part-*.parquet` of a folder as one table under `schema`, in file order.

    A nullable column that an older file lacks is null; columns the schema does not know are left out. Raises
    `CorruptOutputError` for a file that cannot be read, `DataError` for one that lacks a required column or value, or
    holds a column of another type.
    """
    parts = sorted(folder.glob("part-*.parquet"))
    if not parts:
        raise CorruptOutputError(f"{folder} holds no part-*.parquet", todo="rerun the stage that writes it")
    return pa.concat_tables([_read_part(part, schema) for part in parts])


def _read_part(path: Path, schema: pa.Schema) -> pa.Table:
    try:
        table = pq.read_table(path, partitioning=None)
    except (pa.ArrowInvalid, OSError) as error:
        raise CorruptOutputError(f"{path} cannot be read as Parquet", got=str(error), todo="rerun its stage") from error
    columns = []
    for field in schema:
        if field.name not in table.column_names:
            if not field.nullable:
                raise DataError(f"{path} lacks the column {field.name}", expected=str(field.type))
            columns.append(pa.nulls(table.num_rows, field.type))
            continue
        column = table.column(field.name)
        try:
            column = column.cast(field.type)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            raise DataError(
                f"{path}: column {field.name} has another type", expected=str(field.type), got=str(column.type)
            ) from error
        if column.null_count and not field.nullable:
            raise DataError(f"{path}: column {field.name} has nulls", expected=f"{field.type} without nulls")
        columns.append(column)
    return pa.table(columns, schema=schema)

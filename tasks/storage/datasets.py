"""Read the rows of a data set file. Values come back as they were written, or the file is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NoReturn

import pyarrow as pa
import pyarrow.parquet as pq

from rl_core.errors import DataError

_SUFFIXES = (".jsonl", ".json", ".parquet")


def read_rows(path: str) -> list[dict[str, Any]]:
    """Rows of a `.jsonl`, `.json` (one array of objects) or `.parquet` file.

    JSON keeps absent keys absent and integers of any size exact; `NaN` and infinities, which JSON does not have, are
    refused. Parquet stores a struct as one fixed set of keys, so a key absent from a row comes back as null there: use
    JSON lines where that difference matters.

    Raises:
        DataError: the file is missing, unreadable or of another kind; names the line where there is one.
    """
    file = Path(path)
    if file.suffix not in _SUFFIXES:
        raise DataError(f"cannot read {path}", expected=f"a file ending in {', '.join(_SUFFIXES)}", got=file.name)
    try:
        if file.suffix == ".parquet":
            rows: list[dict[str, Any]] = pq.read_table(file, memory_map=False).to_pylist()
            return rows
        text = file.read_text(encoding="utf-8-sig")
    except FileNotFoundError as error:
        raise DataError(f"{path} does not exist", todo="check environment.params.path") from error
    except (OSError, UnicodeDecodeError, pa.ArrowException) as error:
        raise DataError(f"cannot read {path}", got=f"{type(error).__name__}: {error}") from error
    return _json_lines(text, path) if file.suffix == ".jsonl" else _json_array(text, path)


def _json_lines(text: str, path: str) -> list[dict[str, Any]]:
    rows = []
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            rows.append(_object(_parse(line, f"{path} line {number}"), f"{path} line {number}"))
    return rows


def _json_array(text: str, path: str) -> list[dict[str, Any]]:
    value = _parse(text, path)
    if not isinstance(value, list):
        raise DataError(f"{path} holds no rows", expected="one array of objects", got=type(value).__name__)
    return [_object(item, f"{path} item {number}") for number, item in enumerate(value, start=1)]


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise DataError(f"{where} is no row", expected="an object", got=type(value).__name__)
    return value


def _parse(text: str, where: str) -> Any:
    def refuse(constant: str) -> NoReturn:
        raise DataError(f"{where} holds {constant}", expected="a number JSON has, or null", todo="correct the row")

    try:
        return json.loads(text, parse_constant=refuse)
    except DataError:
        raise
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where} is not valid JSON", got=str(error)) from error

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rl_core.config import EnvironmentConfig
from rl_core.environments.base import open_environment
from rl_core.errors import DataError
from tasks.storage.datasets import read_rows

ROWS: list[dict[str, Any]] = [
    {"prompt": "a", "extra_info": {"k": 7, "m": 8, "p": 9}},
    {"prompt": "b", "extra_info": {"k": 1, "m": 2}},
    {"prompt": "c", "extra_info": {}},
    {"prompt": "d", "extra_info": {"k": "x"}},
    {"prompt": "e", "extra_info": [[1], [], None]},
    {"prompt": "f", "extra_info": 2**63, "note": None},
    {"prompt": "g", "extra_info": 2**53 + 1, "text": "line\u2028break\n"},
]


@pytest.mark.parametrize("kind", ["jsonl", "json"])
def test_json_rows_come_back_exactly(tmp_path: Path, kind: str) -> None:
    """C70: absent stays absent, empty list, dictionary and null stay distinct, integers stay exact."""
    file = tmp_path / f"rows.{kind}"
    lines = [json.dumps(row, ensure_ascii=False) for row in ROWS]
    file.write_text("\n".join(lines) + "\n\n" if kind == "jsonl" else f"[{','.join(lines)}]", encoding="utf-8")
    assert json.dumps(read_rows(str(file))) == json.dumps(ROWS)
    config = EnvironmentConfig(kind="dataset", params={"path": str(file), "heldout_rows": 1, "shuffle": False})
    environment = open_environment(config, 0, read_rows)
    prompts = [environment.prompt("train", i) for i in range(6)] + [environment.prompt("heldout", 0)]
    assert {p.messages[0]["content"]: {"prompt": p.messages[0]["content"], **p.data} for p in prompts} == {
        row["prompt"]: row for row in ROWS
    }


def test_windows_line_ends_and_a_byte_order_mark(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n{"prompt": "b"}\r\n')
    assert read_rows(str(file)) == [{"prompt": "a"}, {"prompt": "b"}]


def test_parquet_rows(tmp_path: Path) -> None:
    """Parquet gives a struct one set of keys: a key absent from a row reads as null, as the docstring says."""
    file = tmp_path / "rows.parquet"
    rows = [
        {"prompt": [{"role": "user", "content": "a"}], "reward_model": {"ground_truth": "1"}, "n": 2**63 - 1},
        {
            "prompt": [{"role": "user", "content": "b"}],
            "reward_model": {"ground_truth": "2", "style": "rule"},
            "n": None,
        },
    ]
    pq.write_table(pa.Table.from_pylist(rows), file)
    expected = json.loads(json.dumps(rows))
    expected[0]["reward_model"]["style"] = None
    assert read_rows(str(file)) == expected
    config = EnvironmentConfig(kind="dataset", params={"path": str(file), "heldout_rows": 1})
    environment = open_environment(config, 0, read_rows)
    found = {environment.prompt(split, 0).data["ground_truth"] for split in ("train", "heldout")}
    assert found == {"1", "2"}


def test_parquet_values_without_a_json_form_are_refused_with_the_row(tmp_path: Path) -> None:
    """C70."""
    file = tmp_path / "rows.parquet"
    table = {"prompt": ["a", "b"], "when": pa.array([None, 5], pa.timestamp("us"))}
    pq.write_table(pa.table(table), file)
    config = EnvironmentConfig(kind="dataset", params={"path": str(file), "heldout_rows": 1})
    with pytest.raises(DataError, match=r"row 2 of 2 holds a value[^$]*row.when is datetime.datetime"):
        open_environment(config, 0, read_rows)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.jsonl", b'{"prompt": "a"}\n{"prompt": \n', ["line 2", "not valid JSON"]),
        ("a.jsonl", b'{"prompt": "a"}\n\n[1]\n', ["line 3", "is no row", "list"]),
        ("a.jsonl", b'{"prompt": "a", "x": NaN}\n', ["line 1", "holds NaN"]),
        ("a.jsonl", b'{"prompt": "a", "x": ' + b"9" * 5000 + b"}\n", ["line 1", "not valid JSON"]),
        ("a.jsonl", b'{"prompt": "\xff"}\n', ["cannot read", "UnicodeDecodeError"]),
        ("a.json", b'{"prompt": "a"}', ["holds no rows"]),
        ("a.json", b'[{"prompt": "a"}, 3]', ["item 2", "is no row"]),
        ("a.parquet", b"no parquet", ["cannot read"]),
        ("a.csv", b"prompt\na\n", ["cannot read", ".jsonl, .json, .parquet"]),
        ("missing.jsonl", None, ["does not exist"]),
    ],
)
def test_files_that_cannot_be_read(tmp_path: Path, name: str, content: bytes | None, words: list[str]) -> None:
    file = tmp_path / name
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(DataError) as caught:
        read_rows(str(file))
    for word in words:
        assert word in str(caught.value)

"""`rlstages report`: one HTML page about a run that needs nothing else, neither a server nor the run folder."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from rl_core.errors import RunError
from tasks.report.data import RunData
from tasks.storage.files import storage_errors


def write_report(run: str, output: Path | None = None) -> Path:
    """Write the page to `output`, or to `report.html` in the run's folder, and return its path.

    Raises `RunError` when there is no such run or no place for the file.
    """
    data = RunData(run)
    path = output if output is not None else data.store.path / "report.html"
    if not path.parent.is_dir() or path.is_dir():
        raise RunError(f"a report cannot be written to {path}", expected="a file in a folder that exists")
    text = report_html(data)
    partial = path.with_name(f"{path.name}.partial-{os.getpid()}")
    try:
        with storage_errors(path):
            partial.write_text(text, "utf-8")
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    return path


def report_html(run: RunData) -> str:
    """The whole page. Its charts and samples are drawn from one block of JSON."""
    from tasks.report.charts import CONFIG, charts, library
    from tasks.report.page import page
    from tasks.report.samples import Samples

    tables = run.tables()
    samples = Samples(run)
    data = {
        "run": run.store.name,
        "tables": tables,
        "charts": charts(tables),
        "chart_config": CONFIG,
        "samples": samples.collect(),
        "tokens": samples.tokens,
    }
    return page(run, data, embeddable(data), library(), len(samples.made_iterations))


def embeddable(data: Any) -> str:
    """JSON that can stand in a `<script>` block: no text in it can end the block or begin a comment."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text

"""What a run wants in MLflow, written down before it is sent: nothing is lost in an outage and nothing is sent twice.

One JSON object a line. `metrics` and `dataset` entries hold what is to be sent, with the time stamp it will carry;
`sent` and `refused` say what became of an entry in one MLflow run; `run` names the run in any MLflow store and
`mlflow_run` in one.
"""

from __future__ import annotations

import json
import os
import uuid
from pathlib import Path
from typing import Any

from rl_core.errors import CorruptOutputError
from tasks.files import storage_errors

Entry = dict[str, Any]
CONTENT = ("metrics", "dataset")


class Ledger:
    """The file `tracking.jsonl` of one run. Only the process that holds the run's lock writes it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.entries = self._read()

    def append(self, entry: Entry) -> Entry:
        """Add an entry; on disk when this returns."""
        self._whole()  # a full disk may have left half of the entry before
        with storage_errors(self.path), self.path.open("a") as file:
            file.write(json.dumps(entry, allow_nan=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self.entries.append(entry)
        return entry

    def add(self, entry: Entry) -> Entry:
        """Add something to be sent, under a number of its own."""
        return self.append({**entry, "number": sum(e["kind"] in CONTENT for e in self.entries)})

    def run_key(self) -> str:
        """The run's name in every MLflow store, unique in the world."""
        for entry in self.entries:
            if entry["kind"] == "run":
                return str(entry["key"])
        return str(self.append({"kind": "run", "key": uuid.uuid4().hex})["key"])

    def mlflow_run(self, tracking_uri: str) -> str | None:
        """The newest MLflow run id in a store."""
        ids = [e["run_id"] for e in self.entries if e["kind"] == "mlflow_run" and e["uri"] == tracking_uri]
        return str(ids[-1]) if ids else None

    def pending(self, run_id: str | None) -> list[Entry]:
        """What an MLflow run has not got yet, in order."""
        settled = {e["number"] for e in self.entries if e["kind"] in ("sent", "refused") and e["run_id"] == run_id}
        return [e for e in self.entries if e["kind"] in CONTENT and e["number"] not in settled]

    def latest(self, kind: str, **where: Any) -> Entry | None:
        """The newest entry of a kind whose fields have these values."""
        for entry in reversed(self.entries):
            if entry["kind"] == kind and all(entry.get(key) == value for key, value in where.items()):
                return entry
        return None

    def _read(self) -> list[Entry]:
        if not self.path.exists():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            return []
        try:
            return [json.loads(line) for line in self._whole().splitlines()]
        except ValueError as error:
            raise CorruptOutputError(
                f"{self.path} is damaged", got=str(error), todo="remove it: MLflow then gets a new run with new entries"
            ) from error

    def _whole(self) -> bytes:
        """The file's whole lines. A last line cut short was never sent: the process died, or the disk was full."""
        content = self.path.read_bytes() if self.path.exists() else b""
        whole = content[: content.rfind(b"\n") + 1]
        if len(whole) < len(content):
            os.truncate(self.path, len(whole))
        return whole

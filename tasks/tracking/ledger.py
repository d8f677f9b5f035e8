"""What a run wants in MLflow, written down before it is sent: nothing is lost in an outage and nothing is sent twice.

One JSON object a line. `metrics`, `dataset` and `tag` entries hold what is to be sent, metrics with the time stamp they
will carry; `sent` and `refused` say what became of an entry in one MLflow run; `run` names the run in any MLflow store
and `mlflow_run` in one.
"""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

from tasks.storage.journal import Entry, Journal

SUBJECT = {"metrics": ("stage", "iteration"), "dataset": ("name",), "tag": ("key",)}
"""Kinds of entries that are to be sent, with the fields that say what one is about."""


class Ledger:
    """The file `tracking.jsonl` of one run. Only the process that holds the run's lock writes it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._journal = Journal(path, "remove it: MLflow then gets a new run with new entries")
        self.entries: list[Entry] = []
        # No question costs more in a run of a thousand iterations than in one of ten.
        self._content: list[Entry] = []
        self._about: dict[tuple[Any, ...], list[Entry]] = {}
        self._waiting: dict[str | None, dict[int, Entry]] = {}
        for entry in self._journal.read():
            self._take(entry)

    def append(self, entry: Entry) -> Entry:
        """Add an entry; on disk when this returns."""
        self._journal.append([entry])
        self._take(entry)
        return entry

    def _take(self, entry: Entry) -> None:
        self.entries.append(entry)
        if entry["kind"] in SUBJECT:
            self._content.append(entry)
            self._about.setdefault(_subject(entry["kind"], entry), []).append(entry)
            for waiting in self._waiting.values():
                waiting[entry["number"]] = entry
        elif entry["kind"] in ("sent", "refused") and entry["run_id"] in self._waiting:
            self._waiting[entry["run_id"]].pop(entry["number"], None)

    def add(self, entry: Entry) -> Entry:
        """Add something to be sent, under a number of its own."""
        return self.append({**entry, "number": len(self._content)})

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
        if run_id not in self._waiting:
            settled = {e["number"] for e in self.entries if e["kind"] in ("sent", "refused") and e["run_id"] == run_id}
            self._waiting[run_id] = {e["number"]: e for e in self._content if e["number"] not in settled}
        return list(self._waiting[run_id].values())

    def latest(self, kind: str, **where: Any) -> Entry | None:
        """The newest entry of a kind that is sent whose fields, those of its subject among them, have these values."""
        for entry in reversed(self._about.get(_subject(kind, where), [])):
            if all(entry.get(key) == value for key, value in where.items()):
                return entry
        return None


def _subject(kind: str, fields: Entry) -> tuple[Any, ...]:
    return kind, *(fields.get(name) for name in SUBJECT[kind])

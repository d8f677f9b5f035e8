"""The live changes of a run as they are written down: runs/<run>/adjustments.jsonl, one changed setting a line.

The file is written by whoever changes something, while the process that works on the run reads it. Both do so under
`locked()`, a lock of its own: the run's lock is held by the working process for as long as it lives.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import AbstractContextManager

from pydantic import JsonValue

from rl_core.adjustable import with_setting
from rl_core.config import RunConfig
from rl_core.recipes import build_config, config_json
from rl_core.section import Section
from tasks.storage.journal import Journal, file_lock
from tasks.storage.store import RunStore


class Adjustment(Section):
    """One setting that changed in a live run."""

    id: int
    """Number in the run, from 1."""
    at: str
    """Time in UTC, ISO 8601."""
    by: str
    why: str
    key: str
    """Dotted name as in `rl_core.adjustable.settings`."""
    old: JsonValue
    new: JsonValue
    from_iteration: int
    """The first iteration that has the new value."""

    def __str__(self) -> str:
        why = f", {self.why}" if self.why else ""
        return f"from iteration {self.from_iteration}: {self.change} (by {self.by}, {self.at}{why})"

    @property
    def change(self) -> str:
        return f"{self.key} {json.dumps(self.old)} -> {json.dumps(self.new)}"


class AdjustmentLog:
    """The adjustments of one run; `entries` is what the file held at the last `reload`."""

    def __init__(self, store: RunStore) -> None:
        self._path = store.path / "adjustments.jsonl"
        self._journal = Journal(self._path, "put the line right: iterations that were made with it depend on it")
        self.reload()

    def reload(self) -> None:
        self.entries = [Adjustment.model_validate(entry) for entry in self._journal.read()]

    def locked(self) -> AbstractContextManager[None]:
        """Nobody else adjusts the run, or begins an iteration of it, meanwhile. Held for moments only."""
        return file_lock(self._path.with_suffix(".lock"))

    def append(self, entries: list[Adjustment]) -> None:
        """Add adjustments. Only under `locked()`."""
        self._journal.append([entry.model_dump(mode="json") for entry in entries])
        self.entries = [*self.entries, *entries]

    def applying(self, iteration: int) -> list[int]:
        """Ids of the adjustments that an iteration is to be made with."""
        return [entry.id for entry in self.entries if entry.from_iteration <= iteration]

    def applied(self, config: RunConfig, iteration: int, more: Sequence[Adjustment] = ()) -> RunConfig:
        """The config of an iteration: of several changes of a setting the one that was made last holds.

        `more` are taken as if they had been added.
        """
        due = [entry for entry in (*self.entries, *more) if entry.from_iteration <= iteration]
        if not due:
            return config
        data = config_json(config)
        for entry in due:
            data = with_setting(data, entry.key, entry.new)
        return build_config(data, f"iteration {iteration} with the run's adjustments")

"""The metrics of past iterations, as the manifests on disk have them."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

from rl_core.errors import CorruptOutputError
from rl_core.manifest import MANIFEST_NAME
from tasks.storage.files import iteration_name, read_json
from tasks.storage.store import RunStore

Metrics = dict[str, float | None]

_UNREADABLE = (OSError, CorruptOutputError, KeyError)
_READ: dict[str, tuple[tuple[int, int], Metrics]] = {}
"""Metrics by record of an iteration, with the time (ns) and inode of the record: each is read once per process, so that
the thousandth iteration costs what the tenth does."""


def metric_history(store: RunStore, before: int, names: Collection[str]) -> list[Metrics]:
    """These metrics of the iterations 0 to `before` - 1; of one that is not there or is damaged, none."""
    # As text: building a path object for each of a thousand iterations would take longer than all the rest.
    folder = store.iteration_dir(0).parent
    return [_metrics(store, f"{folder}/{iteration_name(k)}/iteration.json", names) for k in range(before)]


def _metrics(store: RunStore, path: str, names: Collection[str]) -> Metrics:
    try:
        stat = os.stat(path)
        key = (stat.st_mtime_ns, stat.st_ino)
        known = _READ.get(path)
        if known is None or known[0] != key:
            record: dict[str, Any] = read_json(Path(path))
            found: dict[str, Any] = {}
            for made in record["stages"].values():
                found |= read_json(store.path / made["folder"] / MANIFEST_NAME)["metrics"]
            known = _READ[path] = key, {name: found[name] for name in names if name in found}
        return known[1]
    except _UNREADABLE:
        return {}

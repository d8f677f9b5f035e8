"""What of a run's outputs nobody needs any more, and its removal.

Needed is what an iteration's record names, in the run or in a fork of it, and what a version in MLflow's registry leads
to. Weights that are needed are never touched. Optimizer states are needed where a run may go on from: at the newest
policies, at the champion and at the point where a fork leaves the run.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from rl_core.manifest import Manifest
from tasks.lineage.references import Version, descendants, lineage_lock, registered_versions
from tasks.lineage.removal import Removal, size, take_away
from tasks.lineage.trainer_states import removable_states
from tasks.settings import runs_dir, tracking_uri
from tasks.storage.files import read_manifest
from tasks.storage.store import RunStore, is_output
from tasks.tracking.gate import CHAMPION


# -- what is needed ----------------------------------------------------------------------------------------------------
def _records(store: RunStore) -> Iterator[dict[str, Any]]:
    for number in store.iteration_numbers():
        record = store.iteration(number)
        if record is not None:
            yield record


def _named(store: RunStore) -> set[Path]:
    """Folders that the records of a run and of its forks name."""
    found = set()
    for one in (store, *descendants(store)):
        for record in _records(one):
            found |= {one.folder(made["folder"]) for made in record["stages"].values()}
            found.add(one.folder(record["policy"]["path"]))
    return found


# -- what goes ---------------------------------------------------------------------------------------------------------
def plan(run: str, keep_trainer_states: int | None = None) -> list[Removal]:
    """What can be removed of a run; with a number, the optimizer states of all but so many newest policies too.

    Raises `StageError` when MLflow cannot be asked what its versions lead to.
    """
    store = RunStore(runs_dir(), run)
    store.record()
    versions = registered_versions(tracking_uri())
    outputs = _unneeded(store, versions)
    going = {item.path for item in outputs}
    champions = {d for v in versions if CHAMPION in v.aliases for d in v.digests}
    states = [item for item in removable_states(store, keep_trainer_states, champions) if item.path not in going]
    return [*outputs, *_garbage(store), *states]


def _unneeded(store: RunStore, versions: list[Version]) -> list[Removal]:
    needed = _named(store).union(*(version.folders for version in versions))
    digests = frozenset[str]().union(*(version.digests for version in versions))
    bases = _base_identities(needed)
    found = []
    for folder in sorted(store.path.glob("iterations/*/*/*")):
        if folder in needed or not is_output(folder):
            continue
        manifest = read_manifest(folder)
        if manifest is None:
            found.append(Removal(folder, size(folder), "damaged, and nothing is made of it"))
        elif manifest.measured.get("detached"):
            continue  # an evaluation that a person asked for
        elif manifest.digest not in digests and not (manifest.iteration < 0 and _is_base(manifest, bases)):
            found.append(Removal(folder, size(folder), "superseded: nothing is made of it"))
    return found


def _base_identities(needed: set[Path]) -> list[Any]:
    manifests = (read_manifest(path) for path in needed if path.parent.name == "evaluate")
    return [manifest.identity for manifest in manifests if manifest]


def _is_base(manifest: Manifest, identities: list[Any]) -> bool:
    """No record names the evaluation of the starting model: it is the one made like those of the iterations."""
    return not identities or manifest.identity in identities


def _garbage(store: RunStore) -> list[Removal]:
    damaged = [Removal(path, size(path), "damaged") for path in sorted(store.path.glob("damaged/*"))]
    partial = [Removal(path, size(path), "left by an attempt that died") for path in store.leftovers()]
    return damaged + partial


def print_plan(console: Console, run: str, found: list[Removal]) -> None:
    """What would be removed, with sizes and reasons."""
    if not found:
        console.print(f"nothing to remove: every output of {run} is needed", highlight=False)
        return
    root = RunStore(runs_dir(), run).path
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("MB", justify="right")
    table.add_column("what", overflow="fold")
    table.add_column("why")
    for item in found:
        what = item.path.relative_to(root).as_posix() + ("/trainer" if item.files else "")
        table.add_row(f"{item.bytes / 1e6:,.1f}", what, item.reason)
    console.print(table)
    console.print(f"{sum(item.bytes for item in found) / 1e9:.2f} GB in all", highlight=False)


# -- removal -----------------------------------------------------------------------------------------------------------
def remove(run: str, keep_trainer_states: int | None = None) -> list[Removal]:
    """Remove what `plan` finds now, and return it. Raises `RunError` while a process works on the run."""
    store = RunStore(runs_dir(), run)
    store.record()
    with lineage_lock(store.path.parent), store.lock():
        found = plan(run, keep_trainer_states)
        for item in found:
            take_away(item)
    return found

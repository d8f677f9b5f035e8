"""What from outside leads into a run's folder: forks of the run, and versions and aliases in MLflow's registry."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rl_core.parent import Parent
from tasks.processes.tree import stat
from tasks.storage.journal import file_lock
from tasks.storage.store import RunStore
from tasks.tracking.gate import CHAMPION
from tasks.tracking.mlflow_client import mlflow_errors, open_client, sqlite_file

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion


@contextmanager
def lineage_lock(runs: Path, patience_seconds: float = 120.0) -> Iterator[None]:
    """Held by whatever adds a reference between runs, or removes what one may lead to."""
    with file_lock(runs / "lineage.lock", patience_seconds):
        for leftover in dead_remains(runs):
            shutil.rmtree(leftover, ignore_errors=True)
        yield


def dead_remains(runs: Path) -> list[Path]:
    """What a fork or a deletion of a whole run left behind when it was killed."""
    found = [(path, path.name.rpartition("-")[2]) for path in sorted(runs.glob("*.partial-*")) if path.is_dir()]
    return [path for path, pid in found if pid.isdigit() and stat(int(pid)) is None]


def forks(store: RunStore) -> dict[str, Parent]:
    """Fork points of the runs that name this one as their parent, by their names."""
    found = {}
    for path in sorted(store.path.parent.glob("*/run.json")):
        if ".partial-" not in path.parent.name:
            parent = RunStore(store.path.parent, path.parent.name).parent()
            if parent is not None and parent.run == store.name:
                found[path.parent.name] = parent
    return found


def descendants(store: RunStore) -> list[RunStore]:
    """The forks of a run, their forks, and so on."""
    found = []
    for name in forks(store):
        child = RunStore(store.path.parent, name)
        found += [child, *descendants(child)]
    return found


def describe_lineage(store: RunStore) -> list[str]:
    """Lines for people: what the run is a fork of, and which forks it has."""
    parent, children = store.parent(), forks(store)
    lines = [f"fork of {parent.run} at iteration {parent.iteration}, {parent.stage}"] if parent else []
    if children:
        lines.append("forks: " + ", ".join(f"{name} at {at.iteration}/{at.stage}" for name, at in children.items()))
    return lines


@dataclass(frozen=True)
class Version:
    """A registered version: its checkpoint and its evaluation.

    Attributes:
        model: name of the registered model.
        number: version number.
        aliases: aliases that point at it.
        folders: absolute folders in its tags.
        digests: their digests.
    """

    model: str
    number: str
    aliases: tuple[str, ...]
    folders: frozenset[Path]
    digests: frozenset[str]


def registered_versions(tracking_uri: str) -> list[Version]:
    """All versions that this project registered, of all models. Raises `StageError` when MLflow cannot be reached."""
    database = sqlite_file(tracking_uri)
    if database is not None and not database.exists():
        return []
    with mlflow_errors("reading the registry", tracking_uri):
        client = open_client(tracking_uri)
        found = _search(client)
        aliases = {name: client.get_registered_model(name).aliases for name in {hit.name for hit in found}}
        return [
            Version(
                model=hit.name,
                number=str(hit.version),
                aliases=tuple(sorted(a for a, n in aliases[hit.name].items() if str(n) == str(hit.version))),
                folders=frozenset(Path(hit.tags[key]) for key in ("checkpoint_path", "evaluation_path")),
                digests=frozenset(hit.tags[key] for key in ("checkpoint_sha256", "evaluation_digest")),
            )
            for hit in found
            if {"checkpoint_path", "evaluation_path", "checkpoint_sha256", "evaluation_digest"} <= hit.tags.keys()
        ]


def _search(client: MlflowClient) -> list[ModelVersion]:
    found: list[ModelVersion] = []
    token: str | None = None
    while True:
        page = client.search_model_versions(max_results=1000, page_token=token)
        found += page
        token = page.token
        if not token:
            return found


def champion_digest(tracking_uri: str, model_name: str) -> str | None:
    """Digest of the champion's checkpoint; null where there is none. Raises `StageError` when MLflow is away."""
    from mlflow.exceptions import MlflowException

    database = sqlite_file(tracking_uri)
    if database is not None and not database.exists():
        return None
    with mlflow_errors("reading the registry", tracking_uri):
        try:
            tags = open_client(tracking_uri).get_model_version_by_alias(model_name, CHAMPION).tags
        except MlflowException as error:
            if error.error_code not in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
                raise
            return None  # neither the model nor the alias need exist
        return str(tags["checkpoint_sha256"]) if "checkpoint_sha256" in tags else None

"""Removal of a whole run, unless a fork, an alias in MLflow or a process needs it."""

from __future__ import annotations

import os
import shutil

from rl_core.errors import RunError
from tasks.lineage.references import Version, forks, lineage_lock, registered_versions
from tasks.lineage.removal import size
from tasks.settings import runs_dir, tracking_uri
from tasks.storage.store import RunStore
from tasks.tracking.mlflow_client import mlflow_errors, open_client


def check_deletable(run: str, with_versions: bool = False) -> int:
    """Bytes of a run's folder. Raises `RunError` while a fork or a process needs the run, or an alias in MLflow.

    With `with_versions` aliases are no reason: they go with the versions.
    """
    store = _existing(run)
    with lineage_lock(store.path.parent), store.lock():
        _check_unused(store, with_versions)
        return size(store.path)


def delete(run: str, with_versions: bool = False) -> None:
    """Remove a run's folder if `check_deletable` still allows it, and with `with_versions` its versions in MLflow.

    What else MLflow has logged of the run stays.
    """
    store = _existing(run)
    with lineage_lock(store.path.parent), store.lock():
        _check_unused(store, with_versions)
        if with_versions:
            _remove(_versions(store))
        going = store.path.rename(store.path.with_name(f"{run}.partial-{os.getpid()}"))
    shutil.rmtree(going)  # which may take long, and nobody has to wait for it


def _existing(run: str) -> RunStore:
    store = RunStore(runs_dir(), run)
    store.record()
    return store


def _versions(store: RunStore) -> list[Version]:
    """Registered versions whose checkpoint or evaluation lies in the run's folder."""
    found = registered_versions(tracking_uri())
    return [version for version in found if any(folder.is_relative_to(store.path) for folder in version.folders)]


def _remove(versions: list[Version]) -> None:
    with mlflow_errors("removing versions from the registry", tracking_uri()):
        client = open_client(tracking_uri())
        for version in versions:
            client.delete_model_version(version.model, version.number)


def _check_unused(store: RunStore, with_versions: bool) -> None:
    if children := forks(store):
        raise RunError(
            f"run {store.name!r} is needed by its forks",
            got=", ".join(f"{name} goes on from iteration {at.iteration}, {at.stage}" for name, at in children.items()),
            todo="delete the forks first",
        )
    pointing = [(version, alias) for version in _versions(store) for alias in version.aliases]
    if pointing and not with_versions:
        raise RunError(
            f"registered models lead to checkpoints of run {store.name!r}",
            got=", ".join(f"models:/{at.model}@{alias} is version {at.number}" for at, alias in pointing),
            todo="move these aliases to versions of other runs, or remove the run's versions too: --with-versions",
        )

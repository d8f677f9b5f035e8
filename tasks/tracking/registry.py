"""Register a policy in MLflow: one version per checkpoint, `challenger` always, `champion` if it is not worse.

The order makes every step repeatable. A version is created with its decision in its tags and `gate = pending`; then the
aliases move; then `gate` gets its final word. Whoever comes back after a crash finds the version by its digest, applies
the decision that is written there and never decides twice. An alias only moves to a higher version number.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rl_core.config import RegistryConfig
from rl_core.errors import ConfigError, CorruptOutputError, ModelError
from rl_core.manifest import Ref
from tasks.storage.journal import file_lock
from tasks.tracking.gate import (
    CHALLENGER,
    CHAMPION,
    Candidate,
    Decision,
    complete,
    decide,
    gate_word,
    recorded,
    tags_of,
)
from tasks.tracking.mlflow_client import mlflow_errors, open_client, sqlite_file
from tasks.tracking.pointer import upload_pointer
from tasks.tracking.tracker import Tracker

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion

PREVIOUS = "previous_champion"
_NAME = re.compile(r"[\w.\- ]+")


@dataclass(frozen=True)
class Registration:
    """What came of it: the version, the alias it was given, whether it is new, the row for the DECISIONS table."""

    version: str
    alias: str
    created: bool
    decision: Decision


def champion_version(tracking_uri: str, model_name: str) -> str | None:
    """Version number of the champion; null where there is none. Raises `StageError` when MLflow cannot be reached."""
    database = sqlite_file(tracking_uri)
    if database is not None and not database.exists():
        return None
    with mlflow_errors("reading the registry", tracking_uri):
        return _aliases(open_client(tracking_uri), model_name).get(CHAMPION)


def registered_policy(tracking_uri: str, model_name: str, version: str) -> tuple[str, int, Ref]:
    """Run, number and checkpoint of the policy behind a version number or alias. Raises `ModelError` for none."""
    with mlflow_errors("reading the registry", tracking_uri):
        client = open_client(tracking_uri)
        aliases = _aliases(client, model_name)
        number = aliases.get(version, version)
        found = client.search_model_versions(f"name = '{model_name}'") if _NAME.fullmatch(model_name) else []
    for hit in found:
        if str(hit.version) == number and "checkpoint_sha256" in hit.tags:
            checkpoint = Ref(path=hit.tags["checkpoint_path"], digest=hit.tags["checkpoint_sha256"])
            return hit.tags["run"], int(hit.tags["iteration"]) + 1, checkpoint
    known = [*aliases, *sorted((str(hit.version) for hit in found), key=int)]
    raise ModelError(
        f"model {model_name!r} has no version or alias {version!r}",
        expected=", ".join(known) or "a registered model",
        got=version,
    )


def register_policy(tracker: Tracker, candidate: Candidate, config: RegistryConfig, lock: Path) -> Registration:
    """Register a checkpoint, decide on its alias and move the aliases. Repeating it changes nothing.

    Args:
        tracker: of the run; the pointer's files become artifacts of its MLflow run.
        candidate: the policy and where its evaluation is.
        config: how to compare.
        lock: file that all runs which may register here agree on.

    Raises:
        CorruptOutputError: files of the checkpoint or of its evaluation are missing; nothing is registered.
        StageError: MLflow cannot be reached; may be tried again.
    """
    if not _NAME.fullmatch(candidate.model_name):
        raise ConfigError(
            f"{candidate.model_name!r} cannot be the name of a registered model",
            expected="letters, digits, spaces and . _ -",
            todo="set registry.model_name",
        )
    for folder, digest in (
        (candidate.checkpoint, candidate.digest),
        (candidate.evaluation, candidate.evaluation_digest),
    ):
        if complete(folder, digest) is None:
            raise CorruptOutputError(
                f"{folder} is not complete, so it is not registered",
                expected=f"the files of {digest[:12]}",
                todo="rerun the stage that wrote it",
            )
    with mlflow_errors("registering a policy", tracker.tracking_uri), file_lock(lock):
        return _register(tracker, candidate, config)


def _register(tracker: Tracker, candidate: Candidate, config: RegistryConfig) -> Registration:
    client, name = tracker.client, candidate.model_name
    _ensure_model(client, name)
    champion = _champion(client, name)
    version = _find(client, candidate)
    decision = recorded(version, champion, candidate, config) if version else None
    if version is not None and decision is not None and version.tags["gate"] != "pending":
        return Registration(str(version.version), decision["alias"], False, decision)
    decision = decision or decide(version, champion, candidate, config)
    tags, description = tags_of(candidate, config, decision), decision["reason"]
    created = version is None
    if version is None:
        source = upload_pointer(tracker, candidate.checkpoint, candidate.digest, candidate.max_completion_tokens)
        client.create_model_version(name, source, run_id=tracker.run_id, tags=tags, description=description)
        version = _find(client, candidate)
        assert version is not None
    else:
        client.update_model_version(name, str(version.version), description)
        for key, value in tags.items():
            client.set_model_version_tag(name, str(version.version), key, value)
    number = str(version.version)
    _move_aliases(client, name, number, decision["alias"] == CHAMPION)
    client.set_model_version_tag(name, number, "gate", gate_word(decision))
    return Registration(number, decision["alias"], created, decision)


def _ensure_model(client: MlflowClient, name: str) -> None:
    from mlflow.exceptions import MlflowException

    try:
        client.create_registered_model(name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise


def _aliases(client: MlflowClient, name: str) -> dict[str, str]:
    """Version number by alias; a search would not give them."""
    from mlflow.exceptions import MlflowException

    try:
        return {alias: str(number) for alias, number in client.get_registered_model(name).aliases.items()}
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        return {}


def _champion(client: MlflowClient, name: str) -> ModelVersion | None:
    number = _aliases(client, name).get(CHAMPION)
    return client.get_model_version(name, number) if number else None


def _find(client: MlflowClient, candidate: Candidate) -> ModelVersion | None:
    """The oldest version of this checkpoint whose pointer leads to complete files; later twins are removed."""
    query = f"name = '{candidate.model_name}' and tags.checkpoint_sha256 = '{candidate.digest}'"
    hits = sorted(client.search_model_versions(query), key=lambda hit: int(hit.version))
    hits = [hit for hit in hits if complete(Path(hit.tags.get("checkpoint_path", "")), candidate.digest) is not None]
    aliased = set(_aliases(client, candidate.model_name).values())
    for twin in hits[1:]:
        # A create call that was repeated below this client, after its first answer was lost.
        if twin.tags.get("gate") == "pending" and str(twin.version) not in aliased:
            client.delete_model_version(candidate.model_name, str(twin.version))
    return hits[0] if hits else None


def _move_aliases(client: MlflowClient, name: str, number: str, is_champion: bool) -> None:
    aliases = _aliases(client, name)
    if int(aliases.get(CHALLENGER, 0)) < int(number):
        client.set_registered_model_alias(name, CHALLENGER, number)
    old = aliases.get(CHAMPION)
    if not is_champion or int(old or 0) >= int(number):
        return
    if old is not None:
        client.set_registered_model_alias(name, PREVIOUS, old)
    client.set_registered_model_alias(name, CHAMPION, number)

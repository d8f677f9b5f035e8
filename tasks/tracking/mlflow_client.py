"""One way to talk to MLflow: quiet, with bounded waits, a SQLite schema made once, and only names that it takes."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rl_core.errors import RlstagesError, StageError
from rl_core.fingerprint import sha256_text
from tasks.storage.journal import file_lock

if TYPE_CHECKING:
    from mlflow import MlflowClient

MAX_PARAM_CHARACTERS = 6000
MAX_TAG_CHARACTERS = 5000
_MAX_KEY_CHARACTERS = 250

_SETTINGS = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    # MLflow's own retries go on for minutes, and repeat calls that are not idempotent, such as creating a version.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
}
_INITIALISED: set[str] = set()


def open_client(tracking_uri: str) -> MlflowClient:
    """A client of a tracking server or of a SQLite file, which is created where it is missing."""
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    from mlflow import MlflowClient

    for name in ("mlflow", "alembic"):
        logging.getLogger(name).setLevel(os.environ["MLFLOW_LOGGING_LEVEL"])
    database = sqlite_file(tracking_uri)
    if database is None or tracking_uri in _INITIALISED:
        return MlflowClient(tracking_uri=tracking_uri, registry_uri=tracking_uri)
    database.parent.mkdir(parents=True, exist_ok=True)
    # Processes that migrate one fresh file at the same time break each other's migration.
    with file_lock(database.with_name(f"{database.name}.lock")):
        client = MlflowClient(tracking_uri=tracking_uri, registry_uri=tracking_uri)
        client.search_experiments(max_results=1)
        client.search_registered_models(max_results=1)
    _INITIALISED.add(tracking_uri)
    return client


def sqlite_file(tracking_uri: str) -> Path | None:
    """The file behind a `sqlite:///` URI; null for any other kind of store."""
    prefix = "sqlite:///"
    if not tracking_uri.startswith(prefix):
        return None
    return Path(tracking_uri.removeprefix(prefix).partition("?")[0]).absolute()


def experiment_id(client: MlflowClient, tracking_uri: str, name: str) -> str:
    """Id of the experiment, created where it is missing; that of a SQLite store keeps its artifacts beside the file."""
    from mlflow.exceptions import MlflowException

    experiment = client.get_experiment_by_name(name)
    if experiment is None:
        # MLflow's own default is the working directory of whoever comes first.
        database = sqlite_file(tracking_uri)
        location = (database.parent / "mlruns").as_uri() if database else None
        try:
            return str(client.create_experiment(name, artifact_location=location))
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
            experiment = client.get_experiment_by_name(name)
            assert experiment is not None
    return str(experiment.experiment_id)


@contextmanager
def mlflow_errors(doing: str, tracking_uri: str) -> Iterator[None]:
    """Turn whatever MLflow raises, from its database driver to its HTTP client, into one `StageError`."""
    try:
        yield
    except RlstagesError:
        raise
    except Exception as error:
        raise StageError(
            f"MLflow failed: {doing}",
            got=f"{type(error).__name__}: {str(error)[:500]}",
            todo=f"see whether {tracking_uri} can be reached, then continue the run",
        ) from error


def safe_key(name: str) -> str:
    """A metric or parameter name that MLflow takes: odd characters become `_`, and then a hash keeps names apart."""
    parts = re.sub(r"[^\w.\- /]", "_", name).split("/")
    cleaned = "/".join(part for part in parts if part not in ("", ".", "..")) or "_"
    if cleaned == name and len(name) <= _MAX_KEY_CHARACTERS:
        return name
    return f"{cleaned[: _MAX_KEY_CHARACTERS - 9]}-{sha256_text(name)[:8]}"


def short_param(value: str) -> str:
    """The value, or its beginning with a note when MLflow would cut it without one."""
    if len(value) <= MAX_PARAM_CHARACTERS:
        return value
    note = f" ... [cut: {len(value)} characters, whole in config.json]"
    return value[: MAX_PARAM_CHARACTERS - len(note)] + note

"""The MLflow run that belongs to a training run: found again or created, with its parameters and their changes."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any

from rl_core.fingerprint import canonical_json, sha256_text
from tasks.tracking.ledger import Ledger
from tasks.tracking.mlflow_client import MAX_PARAM_CHARACTERS, experiment_id, safe_key, short_param

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

RUN_TAG = "rlstages.run"
KEY_TAG = "rlstages.run_key"
CONFIG_TAG = "rlstages.config_sha256"
CHANGED_TAG = "rlstages.changed."
"""Before the name of a parameter whose value has changed since the run was created: MLflow keeps the old one."""

_BATCH = 100  # parameters and tags that MLflow takes at once

_log = logging.getLogger("rlstages.tracking")


def find_run(client: MlflowClient, tracking_uri: str, experiment: str, ledger: Ledger) -> Run | None:
    """The MLflow run of a ledger in this store; null where there is none, or a person has deleted it."""
    from mlflow.exceptions import MlflowException

    known = ledger.mlflow_run(tracking_uri)
    if known is not None:
        try:
            run = client.get_run(known)
            return run if run.info.lifecycle_stage == "active" else None
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
    # The process may have died after it created the run and before it wrote its id down.
    query = f"tags.`{KEY_TAG}` = '{ledger.run_key()}'"
    found = client.search_runs([experiment_id(client, tracking_uri, experiment)], filter_string=query, max_results=1)
    return found[0] if found else None


def create_run(
    client: MlflowClient, tracking_uri: str, experiment: str, ledger: Ledger, run_name: str, tags: dict[str, str]
) -> Run:
    named = {**tags, RUN_TAG: run_name, KEY_TAG: ledger.run_key()}
    return client.create_run(experiment_id(client, tracking_uri, experiment), tags=named, run_name=run_name)


def log_config(client: MlflowClient, run: Run, config: dict[str, Any]) -> None:
    """The whole config as `config.json`, which follows every resume, and its leaves as parameters.

    MLflow never changes a parameter: a value that is another one by now becomes a tag beside it.
    """
    from mlflow.entities import Param, RunTag

    digest = sha256_text(canonical_json(config))
    if run.data.tags.get(CONFIG_TAG) == digest:
        return
    client.log_dict(run.info.run_id, config, "config.json")
    flat = {safe_key(key): value for key, value in flatten(config).items()}
    for key in (key for key, value in flat.items() if len(value) > MAX_PARAM_CHARACTERS):
        _log.warning("parameter %s is longer than MLflow takes; its whole value is in config.json", key)
    new = [Param(key, short_param(value)) for key, value in flat.items() if key not in run.data.params]
    changed = _changed(run, flat)
    for start in range(0, max(len(new), len(changed)), _BATCH):
        tags = [RunTag(key, value) for key, value in list(changed.items())[start : start + _BATCH]]
        client.log_batch(run.info.run_id, params=new[start : start + _BATCH], tags=tags)
    client.set_tag(run.info.run_id, CONFIG_TAG, digest)


def _changed(run: Run, flat: dict[str, str]) -> dict[str, str]:
    """Tags to set: settings whose value is not that of their parameter, or is so again after a change."""
    found = {}
    for key, original in run.data.params.items():
        tag = safe_key(CHANGED_TAG + key)
        value = short_param(flat[key]) if key in flat else "not set"
        if run.data.tags.get(tag, original) != value:
            found[tag] = value
    return found


def flatten(value: Any, prefix: str = "") -> dict[str, str]:
    """Leaves of plain data by dotted path, as text; empty lists and dictionaries are leaves."""
    if isinstance(value, (dict, list)) and value:
        items = value.items() if isinstance(value, dict) else enumerate(value)
        joined: dict[str, str] = {}
        for key, item in items:
            joined |= flatten(item, f"{prefix}.{key}" if prefix else str(key))
        return joined
    return {prefix: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}

"""The MLflow run of a training run: parameters, metrics by iteration, links to the data. Losing MLflow loses nothing.

Everything is written into the run's ledger first and then sent, with the time stamp it got there. MLflow stores a
metric of equal key, step, value and time stamp once, so an entry may be sent again after a crash in between.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_core.config import RunConfig
from rl_core.errors import RlstagesError, StageError, StorageError
from rl_core.fingerprint import canonical_json, sha256_text
from rl_core.recipes import config_json
from tasks import settings
from tasks.ledger import Entry, Ledger
from tasks.mlflow_client import MAX_PARAM_CHARACTERS, experiment_id, open_client, safe_key, short_param
from tasks.store import RunStore

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

EXPERIMENT = "rlstages"
_RUN_TAG = "rlstages.run"
_KEY_TAG = "rlstages.run_key"
_CONFIG_TAG = "rlstages.config_sha256"
_RETRY_DELAYS = (0.2, 1.0)
_PAUSE_SECONDS = 30.0  # after an outage, entries are only collected for so long before MLflow is tried again
_SLOW_SECONDS = 5.0  # a call that failed after so long is not tried again at once: the server hangs
_REFUSALS = ("INVALID_PARAMETER_VALUE", "BAD_REQUEST", "MALFORMED_REQUEST")

_log = logging.getLogger("rlstages.tracking")


def open_tracker(store: RunStore, config: RunConfig) -> Tracker:
    """The tracker of a run that this process has locked."""
    return Tracker(settings.tracking_uri(), EXPERIMENT, config.name, store.path / "tracking.jsonl", config_json(config))


class Tracker:
    """One MLflow run, found again on every resume. No method raises because MLflow is away, but `run_id` and `client`.

    Args:
        tracking_uri: `sqlite:///...` or the address of a server.
        experiment: name of the MLflow experiment.
        run_name: name shown in MLflow.
        ledger: file of what is to be sent and what was.
        config: the resolved config, JSON-plain.
    """

    def __init__(self, tracking_uri: str, experiment: str, run_name: str, ledger: Path, config: dict[str, Any]) -> None:
        self.tracking_uri = tracking_uri
        self._experiment = experiment
        self._run_name = run_name
        self._config = config
        self._ledger = Ledger(ledger)
        self._client: MlflowClient | None = None
        self._run: Run | None = None
        self._try_at = 0.0

    # -- what a run reports -------------------------------------------------------------------------------------------
    def log_stage(self, stage: str, iteration: int, metrics: dict[str, float | None], marker: str) -> None:
        """Log the metrics of a published stage at step `iteration`, once.

        Nulls are left out. A stage whose newest entry has this marker, or the same metrics, is not logged again.
        """
        values = {name: float(value) for name, value in metrics.items() if value is not None and math.isfinite(value)}
        last = self._ledger.latest("metrics", stage=stage, iteration=iteration)
        if values and (last is None or (last["marker"] != marker and last["metrics"] != values)):
            about = {"stage": stage, "iteration": iteration, "marker": marker, "time": time.time_ns() // 1_000_000}
            self._ledger.add({"kind": "metrics", **about, "metrics": values})
        self._deliver()

    def log_dataset(self, name: str, folder: Path, digest: str, rows: int, context: str = "training") -> None:
        """Link a table of the run folder to the MLflow run by name, place and digest; no row is read."""
        about = {"name": name, "source": str(folder), "digest": digest[:36], "rows": rows, "context": context}
        if self._ledger.latest("dataset", **about) is None:
            self._ledger.add({"kind": "dataset", **about})
        self._deliver()

    def finish(self, status: str) -> None:
        """Send what is left and close the MLflow run as `FINISHED`, `FAILED` or `KILLED`."""
        self._try_at = 0.0
        self._deliver()
        if self._run is not None:
            self._guard(lambda: self._connected().set_terminated(self.run_id, status))
        if pending := self._ledger.pending(self._run.info.run_id if self._run else None):
            _log.warning("%d entries did not reach MLflow; they are kept in %s", len(pending), self._ledger.path)

    # -- what others need of it ---------------------------------------------------------------------------------------
    @property
    def run_id(self) -> str:
        """Id of the MLflow run. Raises `StageError` when MLflow cannot be reached."""
        self._connected()
        assert self._run is not None
        return str(self._run.info.run_id)

    @property
    def client(self) -> MlflowClient:
        """Raises `StageError` when MLflow cannot be reached."""
        return self._connected()

    def run_url(self) -> str:
        """Address of the run in the MLflow UI; of the UI itself while MLflow cannot be reached."""
        is_server = self.tracking_uri.startswith(("http://", "https://"))
        base = self.tracking_uri.rstrip("/") if is_server else f"http://127.0.0.1:{settings.MLFLOW_PORT}"
        if self._run is None:
            return base
        return f"{base}/#/experiments/{self._run.info.experiment_id}/runs/{self._run.info.run_id}"

    # -- sending ------------------------------------------------------------------------------------------------------
    def _deliver(self) -> None:
        if time.monotonic() < self._try_at or not self._guard(self._connected):
            return
        for entry in self._ledger.pending(self.run_id):
            if not self._guard(lambda entry=entry: self._send(entry)):  # type: ignore[misc]
                return

    def _guard(self, call: Callable[[], Any]) -> bool:
        """Try a call that may be repeated; on an outage wait with the next one. True when it went through."""
        for delay in (*_RETRY_DELAYS, None):
            started = time.monotonic()
            try:
                call()
                return True
            except StorageError:
                raise
            # A missing tracker must not end the training, whatever its drivers raise; the ledger keeps the data.
            except Exception as error:
                if delay is not None and time.monotonic() - started < _SLOW_SECONDS:
                    time.sleep(delay)
                    continue
                self._try_at = time.monotonic() + _PAUSE_SECONDS
                _log.warning("MLflow at %s cannot be used and gets its data later: %s", self.tracking_uri, error)
                break
        return False

    def _send(self, entry: Entry) -> None:
        from mlflow.exceptions import MlflowException

        settled = {"number": entry["number"], "run_id": self.run_id}
        try:
            self._send_metrics(entry) if entry["kind"] == "metrics" else self._send_dataset(entry)
        except MlflowException as error:
            if error.error_code not in _REFUSALS:
                raise
            _log.warning("MLflow refuses an entry, which stays in %s: %s", self._ledger.path, error)
            self._ledger.append({"kind": "refused", **settled, "error": str(error)[:500]})
            return
        self._ledger.append({"kind": "sent", **settled})

    def _send_metrics(self, entry: Entry) -> None:
        from mlflow.entities import Metric

        metrics = [
            Metric(safe_key(name), value, entry["time"], entry["iteration"]) for name, value in entry["metrics"].items()
        ]
        for start in range(0, len(metrics), 1000):
            self._connected().log_batch(self.run_id, metrics=metrics[start : start + 1000])

    def _send_dataset(self, entry: Entry) -> None:
        from mlflow.entities import Dataset, DatasetInput, InputTag

        dataset = Dataset(
            name=entry["name"],
            digest=entry["digest"],
            source_type="local",
            source=json.dumps({"uri": entry["source"]}),
            profile=json.dumps({"num_rows": entry["rows"]}),
        )
        tag = InputTag("mlflow.data.context", entry["context"])
        self._connected().log_inputs(self.run_id, datasets=[DatasetInput(dataset, [tag])])

    # -- the MLflow run -----------------------------------------------------------------------------------------------
    def _connected(self) -> MlflowClient:
        if self._client is not None and self._run is not None:
            return self._client
        try:
            client = open_client(self.tracking_uri)
            run = self._find_run(client) or self._create_run(client)
            if self._ledger.mlflow_run(self.tracking_uri) != run.info.run_id:
                self._ledger.append({"kind": "mlflow_run", "uri": self.tracking_uri, "run_id": run.info.run_id})
            client.update_run(run.info.run_id, status="RUNNING")
            self._log_config(client, run)
        except RlstagesError:
            raise
        except Exception as error:
            raise StageError(
                f"MLflow at {self.tracking_uri} cannot be used",
                got=f"{type(error).__name__}: {str(error)[:300]}",
                todo="start it, or set MLFLOW_TRACKING_URI to a store that can be reached",
            ) from error
        self._client, self._run = client, run
        return client

    def _find_run(self, client: MlflowClient) -> Run | None:
        from mlflow.exceptions import MlflowException

        known = self._ledger.mlflow_run(self.tracking_uri)
        if known is not None:
            try:
                run = client.get_run(known)
                return run if run.info.lifecycle_stage == "active" else None
            except MlflowException as error:
                if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                    raise
        # The process may have died after it created the run and before it wrote its id down.
        query = f"tags.`{_KEY_TAG}` = '{self._ledger.run_key()}'"
        experiment = experiment_id(client, self.tracking_uri, self._experiment)
        found = client.search_runs([experiment], filter_string=query, max_results=1)
        return found[0] if found else None

    def _create_run(self, client: MlflowClient) -> Run:
        tags = {_RUN_TAG: self._run_name, _KEY_TAG: self._ledger.run_key()}
        experiment = experiment_id(client, self.tracking_uri, self._experiment)
        return client.create_run(experiment, tags=tags, run_name=self._run_name)

    def _log_config(self, client: MlflowClient, run: Run) -> None:
        """Parameters, which MLflow never changes, and the whole config, which follows every resume."""
        from mlflow.entities import Param

        digest = sha256_text(canonical_json(self._config))
        if run.data.tags.get(_CONFIG_TAG) == digest:
            return
        client.log_dict(run.info.run_id, self._config, "config.json")
        flat = {safe_key(key): value for key, value in flatten(self._config).items()}
        for key in (key for key, value in flat.items() if len(value) > MAX_PARAM_CHARACTERS):
            _log.warning("parameter %s is longer than MLflow takes; its whole value is in config.json", key)
        new = [Param(key, short_param(value)) for key, value in flat.items() if key not in run.data.params]
        for start in range(0, len(new), 100):
            client.log_batch(run.info.run_id, params=new[start : start + 100])
        client.set_tag(run.info.run_id, _CONFIG_TAG, digest)


def flatten(value: Any, prefix: str = "") -> dict[str, str]:
    """Leaves of plain data by dotted path, as text; empty lists and dictionaries are leaves."""
    if isinstance(value, (dict, list)) and value:
        items = value.items() if isinstance(value, dict) else enumerate(value)
        joined: dict[str, str] = {}
        for key, item in items:
            joined |= flatten(item, f"{prefix}.{key}" if prefix else str(key))
        return joined
    return {prefix: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}

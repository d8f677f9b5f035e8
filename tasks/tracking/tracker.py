"""The MLflow run of a training run: parameters, metrics by iteration, links to the data. Losing MLflow loses nothing.

Everything is written into the run's ledger first and then sent, with the time stamp it got there. MLflow stores a
metric of equal key, step, value and time stamp once, so an entry may be sent again after a crash in between; of several
values at one step, the one with the newest time stamp is the current one.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_core.config import RunConfig
from rl_core.errors import RlstagesError, RunError, StageError, StorageError
from rl_core.recipes import config_json
from tasks import settings
from tasks.servers.up_record import pages
from tasks.storage.journal import Entry
from tasks.storage.store import RunStore
from tasks.tracking.ledger import Ledger
from tasks.tracking.mlflow_client import MAX_TAG_CHARACTERS, mlflow_errors, open_client, safe_key
from tasks.tracking.mlflow_run import create_run, find_run, log_config

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

EXPERIMENT = "rlstages"
_RETRY_DELAYS = (0.2, 1.0)
_PAUSE_SECONDS = 30.0  # after an outage, entries are only collected for so long before MLflow is tried again
_SLOW_SECONDS = 5.0  # a call that failed after so long is not tried again at once: the server hangs
_REFUSALS = ("INVALID_PARAMETER_VALUE", "BAD_REQUEST", "MALFORMED_REQUEST")

_log = logging.getLogger("rlstages.tracking")


def open_tracker(store: RunStore, config: RunConfig) -> Tracker:
    """The tracker of a run that this process has locked."""
    tags = {f"rlstages.parent_{key}": str(value) for key, value in (store.record().get("parent") or {}).items()}
    ledger = store.path / "tracking.jsonl"
    return Tracker(settings.tracking_uri(), EXPERIMENT, config.name, ledger, config_json(config), tags)


def close_abandoned(store: RunStore) -> str | None:
    """Close the MLflow run of a training run that nobody works on if it still says RUNNING; returns its id.

    It becomes `KILLED`, until the training run is continued. Raises `StageError` when MLflow cannot be reached.
    """
    uri, ledger = settings.tracking_uri(), Ledger(store.path / "tracking.jsonl")
    if not ledger.entries:
        return None
    with mlflow_errors(f"closing the run of {store.name}", uri):
        client = open_client(uri)
        run = find_run(client, uri, EXPERIMENT, ledger)  # may take long: whoever opens the run need not wait for it
        if run is not None and run.info.status == "RUNNING":
            with contextlib.suppress(RunError), store.lock():  # else somebody works on it
                if client.get_run(run.info.run_id).info.status == "RUNNING":
                    client.set_terminated(run.info.run_id, "KILLED")
                    return str(run.info.run_id)
    return None


class Tracker:
    """One MLflow run, found again on every resume. No method raises because MLflow is away, but `run_id` and `client`.

    Args:
        tracking_uri: `sqlite:///...` or the address of a server.
        experiment, run_name: names shown in MLflow.
        ledger: file of what is to be sent and what was.
        config, tags: the resolved config, JSON-plain; tags that the MLflow run is created with.
    """

    def __init__(
        self,
        tracking_uri: str,
        experiment: str,
        run_name: str,
        ledger: Path,
        config: dict[str, Any],
        tags: dict[str, str] | None = None,
    ) -> None:
        self.tracking_uri = tracking_uri
        self._experiment = experiment
        self._run_name = run_name
        self._config = config
        self._tags = tags or {}
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
            stamp = max(time.time_ns() // 1_000_000, last["time"] + 1 if last else 0)  # clocks also go backwards
            about = {"stage": stage, "iteration": iteration, "marker": marker, "time": stamp}
            self._ledger.add({"kind": "metrics", **about, "metrics": values})
        self._deliver()

    def log_dataset(self, name: str, folder: Path, digest: str, rows: int, context: str = "training") -> None:
        """Link a table of the run folder to the MLflow run by name, place and digest; no row is read."""
        about = {"name": name, "source": str(folder), "digest": digest[:36], "rows": rows, "context": context}
        if self._ledger.latest("dataset", **about) is None:
            self._ledger.add({"kind": "dataset", **about})
        self._deliver()

    def has_tag(self, key: str) -> bool:
        """Whether `set_tag` was called for it, whatever MLflow knows of it yet."""
        return self._ledger.latest("tag", key=key) is not None

    def set_tag(self, key: str, value: str) -> None:
        """Set a tag of the MLflow run, once for each new value."""
        entry = {"kind": "tag", "key": key, "value": value[:MAX_TAG_CHARACTERS]}
        if (self._ledger.latest("tag", key=key) or {}).get("value") != entry["value"]:
            self._ledger.add(entry)
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
        base = self.tracking_uri.rstrip("/") if is_server else pages().mlflow
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
            match entry["kind"]:
                case "metrics":
                    self._send_metrics(entry)
                case "dataset":
                    self._send_dataset(entry)
                case "tag":
                    self._connected().set_tag(self.run_id, entry["key"], entry["value"])
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
            place = client, self.tracking_uri, self._experiment, self._ledger
            run = find_run(*place) or create_run(*place, self._run_name, self._tags)
            if self._ledger.mlflow_run(self.tracking_uri) != run.info.run_id:
                self._ledger.append({"kind": "mlflow_run", "uri": self.tracking_uri, "run_id": run.info.run_id})
            client.update_run(run.info.run_id, status="RUNNING")
            log_config(client, run, self._config)
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

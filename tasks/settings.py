"""How Prefect and MLflow are set up for this project; nothing the user has set is overridden."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rl_core.errors import StageError

STATE_DIR = Path(".state")
PREFECT_PORT = 4200
MLFLOW_PORT = 5000

_DEFAULTS = {
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "DO_NOT_TRACK": "1",
    "PREFECT_CLI_PROMPT": "false",
    "PREFECT_LOGGING_LEVEL": "WARNING",
    "PREFECT_SERVER_LOGGING_LEVEL": "WARNING",
    "PREFECT_LOGGING_LOGGERS_PREFECT_FLOW_RUNS_LEVEL": "INFO",  # a line per iteration, for the UI
    "PREFECT_RESULTS_DEFAULT_SERIALIZER": "json",
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",
    # A slot that lives in the server's memory is lost for ever when the server restarts.
    "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage.filesystem",
    # A release wakes no waiter, so waiters ask often; a dead holder's slot is free 65 s after its end at the latest.
    "PREFECT_SERVER_TASKS_TAG_CONCURRENCY_SLOT_WAIT_SECONDS": "2",
    "PREFECT_SERVER_CONCURRENCY_MAXIMUM_CONCURRENCY_SLOT_WAIT_SECONDS": "5",
    "PREFECT_SERVER_SERVICES_REPOSSESSOR_LOOP_SECONDS": "5",
    # The server calls a run dead after three times as long (`tasks.servers.provision`).
    "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_ENABLE_ASYNC_LOGGING": "false",
}


def apply_defaults() -> None:
    """Set the project's settings in the environment. Call it before prefect or mlflow is imported."""
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("PREFECT_HOME", str((STATE_DIR / "prefect").absolute()))
    os.environ.setdefault("MLFLOW_TRACKING_URI", f"sqlite:///{Path('mlflow.db').absolute()}")


def runs_dir() -> Path:
    """Folder of all runs: `RLSTAGES_RUNS_DIR`, or `runs` in the working directory."""
    return Path(os.environ.get("RLSTAGES_RUNS_DIR", "runs"))


def tracking_uri() -> str:
    """Address of the MLflow store; also in a process that did not come through the command line."""
    apply_defaults()
    return os.environ["MLFLOW_TRACKING_URI"]


@contextmanager
def without_heartbeat() -> Iterator[None]:
    """Run sync subflows without their heartbeat thread, whose end each would wait for up to a second.

    Entering takes a tenth of a second: once for all subflows, not once for each.
    """
    from prefect.settings import PREFECT_FLOWS_HEARTBEAT_FREQUENCY, temporary_settings

    with temporary_settings({PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None}):
        yield


def lost_server(error: BaseException) -> StageError | None:
    """What to say when the Prefect server has gone for good; null when the error is about something else."""
    from httpx import TransportError

    if not isinstance(error, TransportError):
        return None
    return StageError(
        f"the Prefect server at {os.environ.get('PREFECT_API_URL', 'an unknown address')} does not answer any more",
        got=f"{type(error).__name__}: {error}",
        todo="start it again with `rlstages up`; the same command then continues the run, and finished stages are kept",
    )


def quiet_console() -> None:
    """Keep Prefect's log lines out of the terminal; they still reach its server and its UI."""
    import logging

    from prefect.logging.handlers import PrefectConsoleHandler

    loggers = [logging.getLogger(), *(logging.getLogger(name) for name in list(logging.root.manager.loggerDict))]
    for logger in loggers:
        for handler in list(logger.handlers):
            if isinstance(handler, PrefectConsoleHandler):
                logger.removeHandler(handler)

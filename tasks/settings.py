"""How Prefect and MLflow are set up for this project; nothing the user has set is overridden."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

STATE_DIR = Path(".state")
PREFECT_PORT = 4200
MLFLOW_PORT = 5000

_DEFAULTS = {
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "DO_NOT_TRACK": "1",
    "PREFECT_CLI_PROMPT": "false",
    "PREFECT_LOGGING_LEVEL": "WARNING",
    "PREFECT_SERVER_LOGGING_LEVEL": "WARNING",
    "PREFECT_RESULTS_DEFAULT_SERIALIZER": "json",
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",
    # A slot that lives in the server's memory is lost for ever when the server restarts.
    "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage.filesystem",
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
    """Run sync subflows without their heartbeat thread, whose end each would wait for up to a second."""
    from prefect.settings import PREFECT_FLOWS_HEARTBEAT_FREQUENCY, temporary_settings

    with temporary_settings({PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None}):
        yield


_LIMITS_SECONDS = 30.0
_limits: tuple[float, frozenset[str]] = (-_LIMITS_SECONDS, frozenset())


def skip_unlimited(tags: list[str]) -> None:
    """Spare Prefect the question for slots of tags that have no concurrency limit.

    It asks its server before every task with tags, and an SQLite server that is busy with events takes seconds to
    answer. Prefect keeps the answer "no limits" for 5 s itself; here one look at the list of limits serves for 30 s.
    """
    global _limits
    from prefect.client.orchestration import get_client
    from prefect.concurrency import services

    names = frozenset(f"tag:{tag}" for tag in tags)
    if time.monotonic() - _limits[0] > _LIMITS_SECONDS:
        with get_client(sync_client=True) as client:
            known = client.read_global_concurrency_limits(limit=200, offset=0)
        _limits = (time.monotonic(), frozenset(limit.name for limit in known))
    if not names & _limits[1]:
        with services._cache_lock:
            services._no_limits_cache[names] = True


def quiet_console() -> None:
    """Keep Prefect's log lines out of the terminal; they still reach its server and its UI."""
    import logging

    from prefect.logging.handlers import PrefectConsoleHandler

    loggers = [logging.getLogger(), *(logging.getLogger(name) for name in list(logging.root.manager.loggerDict))]
    for logger in loggers:
        for handler in list(logger.handlers):
            if isinstance(handler, PrefectConsoleHandler):
                logger.removeHandler(handler)

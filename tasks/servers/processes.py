"""How each of the servers of `rlstages up` is started: command, environment, log file."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path

from tasks import settings
from tasks.servers.up_record import UpRecord

LOGS = settings.STATE_DIR / "logs"


@dataclass(frozen=True)
class UpOptions:
    """Attributes:
    host: address to listen at.
    database_url: of the Prefect server; null is an SQLite file in Prefect's home.
    limits: concurrency limits as `tag=slots`.
    detach: leave everything running and return.
    """

    host: str = "127.0.0.1"
    prefect_port: int = settings.PREFECT_PORT
    mlflow_port: int = settings.MLFLOW_PORT
    database_url: str | None = None
    limits: list[str] = field(default_factory=list)
    detach: bool = False


def start_prefect(record: UpRecord, options: UpOptions) -> subprocess.Popen[bytes]:
    name = "PREFECT_SERVER_SERVICES_SCHEDULER_LOOP_SECONDS"
    # With Prefect's 60 s a schedule that is made in the UI for the next minute misses it.
    extra = {name: os.environ.get(name, "10")}
    if options.database_url:
        extra["PREFECT_SERVER_DATABASE_CONNECTION_URL"] = options.database_url
    if not ip_address(options.host).is_loopback:
        extra["PREFECT_SERVER_UI_API_URL"] = "/api"  # other machines' browsers know this one by another name
    command = ["prefect", "server", "start", "--host", options.host, "--port", str(options.prefect_port)]
    return _start(command, LOGS / "prefect.log", record.environment("servers") | extra)


def start_mlflow(record: UpRecord, options: UpOptions) -> subprocess.Popen[bytes]:
    command = ["mlflow", "server", "--host", options.host, "--port", str(options.mlflow_port), "--workers", "1"]
    command += ["--backend-store-uri", settings.tracking_uri()]
    command += ["--default-artifact-root", str(Path("mlruns").absolute())]
    extra = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}  # a process of 260 MB for features not used here
    return _start(command, LOGS / "mlflow.log", record.environment("servers") | extra)


def start_worker(record: UpRecord, name: str) -> subprocess.Popen[bytes]:
    seconds = os.environ.get("PREFECT_WORKER_QUERY_SECONDS", "2")  # a triggered run starts so much later at most
    command = ["tasks.servers.local_worker", name]
    extra = {"PREFECT_WORKER_QUERY_SECONDS": seconds}
    return _start(command, LOGS / "prefect-worker.log", record.environment("worker") | extra)


def _start(command: list[str], log: Path, extra: dict[str, str]) -> subprocess.Popen[bytes]:
    with log.open("ab") as file:
        return subprocess.Popen(
            [sys.executable, "-m", *command],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=os.environ | extra,
            start_new_session=True,
        )

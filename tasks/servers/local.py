"""The servers beside a run: Prefect's, MLflow's, and a Prefect worker, on loopback unless told otherwise."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from ipaddress import IPv4Address
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from rl_core.errors import ConfigError, RunError, StageError
from tasks import settings
from tasks.servers.embedded import START_SECONDS, answers, check_alive, start_embedded, wait_for
from tasks.servers.processes import LOGS, UpOptions, start_mlflow, start_prefect, start_worker
from tasks.servers.up_record import UP_FILE, UpRecord, read_record, start_ticks

_DATABASES = ("postgresql+asyncpg://", "sqlite+aiosqlite://")

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient


def connect() -> None:
    """Point Prefect at the server of `rlstages up` if one answers, else at one of this process's own."""
    Path(os.environ["PREFECT_HOME"]).mkdir(parents=True, exist_ok=True)
    if "PREFECT_API_URL" in os.environ:
        return
    os.environ["PREFECT_API_URL"] = running_api() or start_embedded()


def running_api() -> str | None:
    """API URL of the server that `rlstages up` started here, if it answers."""
    record = read_record()
    return record.prefect_api if record and answers(f"{record.prefect_api}/health") else None


def up(console: Console, options: UpOptions) -> None:
    """Start all three, wait until they answer, deploy, say where they are, and stop them at Ctrl-C, SIGTERM or SIGHUP.

    Raises `RunError` when they are up here already or a port is taken, `StageError` when one does not start or ends.
    """
    from tasks.servers.provision import parse_limits

    limits = parse_limits(options.limits)
    _check_options(options)
    LOGS.mkdir(parents=True, exist_ok=True)
    with _alone():
        _clear(console)
        for port in (options.prefect_port, options.mlflow_port):
            _check_free(options.host, port)
        _answer_signals()
        mine = None if options.detach else os.getpid()
        here = options.host if not IPv4Address(options.host).is_unspecified else "127.0.0.1"
        record = UpRecord(
            prefect_api=f"http://{here}:{options.prefect_port}/api",
            mlflow=f"http://{here}:{options.mlflow_port}",
            mark=uuid.uuid4().hex,
            pid=os.getpid(),
            started=start_ticks(os.getpid()),
        ).write()
        leave = False
        try:
            children = _start_all(console, record, options, limits)
            record = record.write(ready=True, pid=mine, started=record.started if mine else None)
            _announce(console, record, options)
            leave = options.detach
            while not options.detach and all(child.poll() is None for child in children):
                time.sleep(0.5)
            if not options.detach:
                raise StageError("one of the servers ended", todo=f"read the logs in {LOGS}")
        finally:
            if not leave:
                for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                    signal.signal(number, signal.SIG_IGN)  # a second Ctrl-C must not leave half of it behind
                record.end()


def stop(console: Console) -> None:
    """Stop what `rlstages up` started in this folder, also when it was killed itself. `down` of the command line."""
    record = read_record()
    if record is None:
        console.print("nothing is up in this folder")
        return
    if record.owner_lives() and record.pid is not None:
        os.kill(record.pid, signal.SIGTERM)
        deadline = time.monotonic() + 60
        while record.owner_lives() and time.monotonic() < deadline:
            time.sleep(0.1)
    record.end()
    console.print("stopped; runs that were interrupted go on after the next `rlstages up`", highlight=False)


def _check_options(options: UpOptions) -> None:
    try:
        IPv4Address(options.host)
    except ValueError as error:
        raise ConfigError(
            "--host is not an IPv4 address", expected="such as 127.0.0.1 or 0.0.0.0", got=options.host
        ) from error
    if options.database_url and not options.database_url.startswith(_DATABASES):
        raise ConfigError(
            "--database-url is not one Prefect can use", expected=" or ".join(f"{x}..." for x in _DATABASES)
        )


@contextmanager
def _alone() -> Iterator[None]:
    """Keep a second `up` of this folder out."""
    with (settings.STATE_DIR / "up.lock").open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise _up_already() from None
        yield


def _up_already() -> RunError:
    return RunError(
        "the servers of this folder are up already", got=str(UP_FILE), todo="use them, or stop them: rlstages down"
    )


def _clear(console: Console) -> None:
    """End what an `up` that was killed has left; refuse when a detached one is there."""
    record = read_record()
    if record is None:
        return
    if record.processes() and record.ready and record.pid is None:
        raise _up_already()
    with console.status("ending what an earlier `rlstages up` has left"):
        record.end()


def _check_free(host: str, port: int) -> None:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise RunError(
                f"port {port} of {host} cannot be had",
                got=str(error),
                todo="stop what listens there, or choose another port",
            ) from error


def _answer_signals() -> None:
    """Let SIGTERM and SIGHUP end `up` in order.

    What is ignored here, as below `nohup` or `&`, stays without effect, but by a handler: the servers must not inherit
    it, or the worker would take no first SIGTERM and go on taking runs.
    """
    for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, lambda *_: None)
        else:
            signal.signal(number, lambda *_, code=code: sys.exit(code))


def _start_all(
    console: Console, record: UpRecord, options: UpOptions, limits: dict[str, int]
) -> list[subprocess.Popen[bytes]]:
    os.environ["PREFECT_API_URL"] = record.prefect_api
    os.environ["RLSTAGES_DIR"] = str(Path.cwd())
    for name in ("prefect", "mlflow", "prefect-worker"):
        (LOGS / f"{name}.log").open("ab").close()
    with console.status("starting the Prefect server and MLflow"):
        children = [start_prefect(record, options), start_mlflow(record, options)]
        from prefect.client.orchestration import get_client  # takes seconds, while the servers start

        from tasks.servers import provision
        from tasks.servers.deployments import read_file

        file = read_file()
        wait_for(f"{record.prefect_api}/health", children[0], LOGS / "prefect.log")
    with console.status("deploying and starting a worker"), get_client(sync_client=True) as client:
        provision.create_pool(client)
        began, deadline, name = datetime.now(UTC), time.monotonic() + START_SECONDS, socket.gethostname()
        children.append(start_worker(record, name))
        for line in provision.provision(client, file, limits):
            console.print(f"changed back to prefect.yaml: {line}", highlight=False)
        _resume_dead_runs(console, client)
        while not provision.worker_reported(client, name, began):
            check_alive(children[2], LOGS / "prefect-worker.log", deadline)
    with console.status("waiting for MLflow"):
        wait_for(f"{record.mlflow}/health", children[1], LOGS / "mlflow.log")
    return children


def _resume_dead_runs(console: Console, client: SyncPrefectClient) -> None:
    """Tell the server which runs died with an earlier worker or with the machine, and schedule them again."""
    from tasks.doctor import known_stores
    from tasks.doctor.server import server
    from tasks.servers.autoresume import resume_crashed

    server(known_stores(), fix=True)
    for name in resume_crashed(client):
        console.print(f"{name} goes on where it was interrupted", highlight=False)


def _announce(console: Console, record: UpRecord, options: UpOptions) -> None:
    lines = [f"Prefect  {record.prefect_api.removesuffix('/api')}", f"MLflow   {record.mlflow}", f"logs     {LOGS}"]
    if not IPv4Address(options.host).is_loopback:
        lines.append("whoever reaches these ports can run code here: there is no password")
    lines.append("rlstages down stops them" if options.detach else "Ctrl-C stops them")
    console.print("\n".join(lines), highlight=False, soft_wrap=True)

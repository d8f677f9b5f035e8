"""The servers beside a run: Prefect's, MLflow's, and a Prefect worker, all on loopback."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

from rich.console import Console

from rl_core.errors import RunError, StageError
from tasks import settings

_UP_FILE = settings.STATE_DIR / "up.json"
_START_SECONDS = 180


def connect() -> None:
    """Point Prefect at the server of `rlstages up` if one answers, else leave it to start its embedded one."""
    Path(os.environ["PREFECT_HOME"]).mkdir(parents=True, exist_ok=True)
    if "PREFECT_API_URL" in os.environ:
        return
    url = running_api()
    if url:
        os.environ["PREFECT_API_URL"] = url
    else:
        os.environ.setdefault("PREFECT_SERVER_ALLOW_EPHEMERAL_MODE", "true")


def running_api() -> str | None:
    """API URL of the server that `rlstages up` started here, if it answers."""
    if not _UP_FILE.is_file():
        return None
    url: str = json.loads(_UP_FILE.read_text())["prefect_api"]
    return url if _answers(f"{url}/health") else None


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as reply:
            return bool(reply.status == 200)
    except (OSError, urllib.error.URLError):
        return False


def serve_until_interrupted(console: Console, prefect_port: int, mlflow_port: int) -> None:
    """Start all three, wait until they answer, say where they are, and stop them at Ctrl-C or SIGTERM."""
    if running_api():
        raise RunError("the servers of this folder are up already", got=str(_UP_FILE), todo="use them, or stop them")
    for port in (prefect_port, mlflow_port):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                raise RunError(f"port {port} is taken", todo="stop what listens there, or choose another port")
    logs = settings.STATE_DIR / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    api = f"http://127.0.0.1:{prefect_port}/api"
    mlflow = f"http://127.0.0.1:{mlflow_port}"
    env = os.environ | {"PREFECT_API_URL": api, "RLSTAGES_DIR": str(Path.cwd())}
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    children: list[subprocess.Popen[bytes]] = []
    try:
        with console.status("starting the Prefect server and MLflow"):
            children.append(
                _start(
                    _prefect("server", "start", "--host", "127.0.0.1", "--port", str(prefect_port)),
                    logs / "prefect.log",
                    env,
                )
            )
            children.append(_start(_mlflow(mlflow_port), logs / "mlflow.log", env))
            _wait(f"{api}/health", children[0], logs / "prefect.log")
            _wait(f"{mlflow}/health", children[1], logs / "mlflow.log")
        with console.status("creating the work pool and deploying"):
            _prepare(env, logs / "prefect.log")
            children.append(_start(_prefect("worker", "start", "--pool", "local"), logs / "prefect-worker.log", env))
        _UP_FILE.write_text(json.dumps({"prefect_api": api, "mlflow": mlflow, "pid": os.getpid()}))
        console.print(f"Prefect  {api.removesuffix('/api')}", highlight=False)
        console.print(f"MLflow   {mlflow}", highlight=False)
        console.print(f"logs     {logs}\nCtrl-C stops them", highlight=False)
        while all(child.poll() is None for child in children):
            time.sleep(0.5)
        raise StageError("one of the servers ended", todo=f"read the logs in {logs}")
    finally:
        _UP_FILE.unlink(missing_ok=True)
        for child in reversed(children):
            _stop(child)


def _prefect(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "prefect", *arguments]


def _mlflow(port: int) -> list[str]:
    uri = settings.tracking_uri()
    arguments = ["server", "--host", "127.0.0.1", "--port", str(port), "--backend-store-uri", uri, "--workers", "1"]
    return [sys.executable, "-m", "mlflow", *arguments, "--default-artifact-root", str(Path("mlruns").absolute())]


def _start(command: list[str], log: Path, env: dict[str, str]) -> subprocess.Popen[bytes]:
    with log.open("ab") as file:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, env=env, start_new_session=True
        )


def _wait(url: str, child: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while not _answers(url):
        if child.poll() is not None or time.monotonic() > deadline:
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
            raise StageError(f"no answer from {url}", todo="is the port taken? choose another one", details=tail)
        time.sleep(0.3)


def _prepare(env: dict[str, str], log: Path) -> None:
    root = Path(__file__).resolve().parent.parent
    steps = [
        _prefect("work-pool", "create", "local", "--type", "process", "--overwrite"),
        _prefect("--no-prompt", "deploy", "--all", "--prefect-file", str(root / "prefect.yaml")),
    ]
    for step in steps:
        with log.open("ab") as file:
            code = subprocess.run(
                step, stdout=file, stderr=subprocess.STDOUT, env=env, cwd=root, check=False
            ).returncode
        if code != 0:
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
            raise StageError(f"`prefect {' '.join(step[3:])}` failed", details=tail)


def _stop(child: subprocess.Popen[bytes]) -> None:
    """End a server and what it started: politely, then for good."""
    for number, grace_seconds in ((signal.SIGTERM, 10.0), (signal.SIGKILL, 5.0)):
        try:
            os.killpg(child.pid, number)
            child.wait(grace_seconds)
            return
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue

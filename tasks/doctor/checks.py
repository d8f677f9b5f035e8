"""What `doctor` looks at without a Prefect server: processes, folders, MLflow runs, the disk."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from pathlib import Path

from rl_core.errors import RlstagesError
from tasks import attempts
from tasks.doctor import Finding
from tasks.launch import MODELS_DIR
from tasks.lineage.references import dead_remains
from tasks.lineage.removal import size
from tasks.processes.tree import MARK, PARENT, living, stat
from tasks.settings import runs_dir, tracking_uri
from tasks.storage.store import PLACED, RunStore
from tasks.tracking.ledger import Ledger

_REPAIR = "rlstages doctor --fix"
_LARGE_DATABASE_BYTES = 5_000_000_000
_SILENT_SECONDS = 600.0  # who works on a placed attempt says so every few seconds


def processes(fix: bool) -> list[Finding]:
    """Workers, reward processes, servers and what they started, of this project, whose parent is gone."""
    found = []
    for pid, _, environment in living():
        pairs = (entry.partition("=") for entry in environment.decode(errors="replace").split("\0"))
        env = {key: value for key, _, value in pairs}
        ours = pid != os.getpid() and MARK in env and env.get("PREFECT_HOME") == os.environ.get("PREFECT_HOME")
        if not ours or not env.get(PARENT, "").isdigit() or stat(int(env[PARENT])):
            continue
        with contextlib.suppress(OSError):
            command = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
            words = " ".join(word for word in command[-6:] if word)
            finding = Finding("process", f"{pid} has outlived its run: {words[:100]}", f"{_REPAIR} ends it")
            found.append(finding)
            if fix:
                os.kill(pid, signal.SIGKILL)
                finding.repaired = _gone(pid)
    return found or [Finding("process", "no worker or reward process without its run")]


def _gone(pid: int) -> bool:
    deadline = time.monotonic() + 5
    while stat(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return stat(pid) is None


def folders(stores: list[RunStore], fix: bool) -> list[Finding]:
    """Half-written outputs of processes that are gone. Those of a run that is worked on are its own affair."""
    places = [store.path for store in stores if not attempts.is_worked_on(store)]
    stale = [path for place in places for path in sorted(place.rglob("*.partial-*")) if _is_stale(path)]
    stale += [path for path in sorted(MODELS_DIR.glob("*.partial-*")) if _is_stale(path)]
    stale += dead_remains(runs_dir())
    silent = [path for place in places for path in sorted(place.glob(f"iterations/*/*/{PLACED}*")) if _is_silent(path)]
    left = [(path, "left half-written") for path in stale if not any(other in path.parents for other in stale)]
    left += [(path, "placed on another worker, where nobody works on it") for path in silent]
    found = []
    for path, how in left:
        finding = Finding("folder", f"{_short(path)}: {how}, {_size(size(path))}", f"{_REPAIR} removes it")
        found.append(finding)
        if fix:
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
            finding.repaired = not path.exists()
    return found or [Finding("folder", "nothing half-written was left behind")]


def _is_stale(path: Path) -> bool:
    pid = path.name.rpartition("-")[2]
    placed = any(part.startswith(PLACED) for part in path.parts)  # made by another machine, which may be at it
    return pid.isdigit() and not placed and stat(int(pid)) is None


def _is_silent(attempt: Path) -> bool:
    """A placed attempt without a reply, that a run which goes on could take, and for long without a sign of life."""
    signs = [attempt, attempt / "request.json", attempt / "progress.json"]
    newest = max(path.stat().st_mtime for path in signs if path.exists())
    return not (attempt / "reply.json").exists() and time.time() - newest > _SILENT_SECONDS


def _short(path: Path) -> Path:
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def _size(bytes_: int) -> str:
    return f"{bytes_ / 1e9:,.2f} GB" if bytes_ >= 1e9 else f"{bytes_ / 1e6:,.1f} MB"


def mlflow(stores: list[RunStore], fix: bool) -> list[Finding]:
    """MLflow runs that say RUNNING although nobody works on their training run."""
    from tasks.tracking.tracker import close_abandoned

    found = []
    try:
        for store in stores:
            if run_id := _abandoned(store):
                finding = Finding(
                    "mlflow", f"run {store.name} says RUNNING in MLflow ({run_id})", f"{_REPAIR} closes it as KILLED"
                )
                found.append(finding)
                if fix:
                    finding.repaired = close_abandoned(store) is not None
    except RlstagesError as error:
        return [*found, Finding("mlflow", error.message, error.todo or f"see whether {tracking_uri()} can be reached")]
    return found or [Finding("mlflow", "no run says RUNNING that nobody works on")]


def _abandoned(store: RunStore) -> str | None:
    """Id of the run's MLflow run if it says RUNNING and nobody works on the run."""
    from tasks.tracking.mlflow_client import mlflow_errors, open_client
    from tasks.tracking.mlflow_run import find_run
    from tasks.tracking.tracker import EXPERIMENT

    ledger = Ledger(store.path / "tracking.jsonl")
    if not ledger.entries or attempts.is_worked_on(store):
        return None
    with mlflow_errors(f"looking for the run of {store.name}", tracking_uri()):
        run = find_run(open_client(tracking_uri()), tracking_uri(), EXPERIMENT, ledger)
    return str(run.info.run_id) if run is not None and run.info.status == "RUNNING" else None


def disk(stores: list[RunStore]) -> list[Finding]:
    """Bytes of every run, and whether the next checkpoint fits."""
    found = [Finding("disk", f"run {store.name} uses {_size(size(store.path))}") for store in stores]
    found += _database()
    place = stores[0].path.parent if stores else Path.cwd()
    free = shutil.disk_usage(place).free
    needs = [(max((size(p) for p in _checkpoints(store)), default=0), store.name) for store in stores]
    need, run = max(needs, default=(0, ""))
    if need > free:
        what = f"{_size(free)} free, but a checkpoint of {run} takes {_size(need)}"
        return [*found, Finding("disk", what, f"free some space, say with `rlstages prune {run}`")]
    more = f", enough for {free // need:,} checkpoints of {run}" if need else ""
    return [*found, Finding("disk", f"{_size(free)} free{more}")]


def _database() -> list[Finding]:
    """Bytes of the Prefect server's SQLite database. It forgets events after a week, flow runs only when told to."""
    files = list(Path(os.environ.get("PREFECT_HOME", ".")).glob("prefect.db*"))
    bytes_ = sum(size(path) for path in files)
    if bytes_ > _LARGE_DATABASE_BYTES:
        todo = "PREFECT_SERVER_SERVICES_DB_VACUUM_ENABLED=events,flow_runs removes old flow runs too; or use Postgres"
        return [Finding("disk", f"the Prefect database has {_size(bytes_)}", todo)]
    return [Finding("disk", f"the Prefect database has {_size(bytes_)}")] if files else []


def _checkpoints(store: RunStore) -> list[Path]:
    return list(store.path.glob("iterations/[0-9]*/train/*"))

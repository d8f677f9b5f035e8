"""Does anything grow? Many iterations of the smallest real run: memory, files, threads, processes, time, databases.

    python benchmarks/soak.py [--iterations 1000] [--every 50] [--folder /tmp/soak] [--out benchmarks/results/soak.json]

One prompt, two completions of two tokens, a tiny random model, one evaluation at the end: four stages an iteration
through the real flows, with a Prefect server of its own and MLflow on SQLite. It takes about a second an iteration.
Seconds are wall time and suffer from other work on the machine; the processor seconds beside them do not.
The verdict compares the first quarter hundred after iteration 10 with the last: flat means that no process takes more
memory than 1.2 times and 32 MiB, more files, threads or processes, or 1.2 times the time of an iteration.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from prefect_server import Server, prefect_server

WINDOW = 25
SETTINGS = [
    "name=soak",
    "generate.prompts_per_iteration=1",
    "generate.group_size=2",
    "generate.max_completion_tokens=2",
    "evaluate.problems=1",
    "evaluate.samples=0",
    "execution.keep_trainer_states=2",
    "execution.reward_processes=1",
]
Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--iterations", type=int, default=1000)
    parser.add_argument("--every", type=int, default=50)
    parser.add_argument("--folder", type=Path, help="work here and leave everything; default: a temporary folder")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/soak.json"))
    arguments = parser.parse_args()
    if arguments.iterations < 10 + 2 * WINDOW:
        parser.error(f"--iterations: at least {10 + 2 * WINDOW}, to have a beginning and an end to compare")
    out = arguments.out.absolute()
    with tempfile.TemporaryDirectory() as temporary:
        folder = (arguments.folder or Path(temporary)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        os.chdir(folder)
        with prefect_server(folder / "prefect-server") as server:
            os.environ["PREFECT_API_URL"] = server.url
            seconds, rows = measure(arguments.iterations, arguments.every, server)
        os.chdir("/")
    result = verdict(seconds, rows) | {"rows": rows, "seconds": [round(one, 4) for one in seconds]}
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n")
    print(
        f"seconds per iteration: {result['seconds_begin']:.2f} at first, {result['seconds_end']:.2f} at last, "
        f"ratio {result['seconds_ratio']:.2f}; processor seconds of the run {result['cpu_ratio']:.2f}"
    )
    print("flat" if result["flat"] else "NOT flat: " + "; ".join(result["growing"]))


def measure(iterations: int, every: int, server: Server) -> tuple[list[float], list[Row]]:
    """Seconds of each iteration, and a row of measurements after every so many."""
    from tasks import settings
    from tasks.servers import local

    local.connect()
    from flows.training_run import training_run
    from tasks.events import StageEvent, observed
    from tasks.launch import prepare_run
    from tasks.session import current_session

    settings.quiet_console()
    # One more, with the run's only evaluation: it is no part of what is compared.
    name = prepare_run("smoke", [*SETTINGS, f"iterations={iterations + 1}", f"evaluate.every={iterations + 1}"])
    seconds: list[float] = []
    rows: list[Row] = []
    since = 0.0

    def observe(event: StageEvent) -> None:
        nonlocal since
        if event.kind == "finished" and event.iteration < 0:
            since = time.monotonic()
        if event.kind != "completed":
            return
        seconds.append(time.monotonic() - since)
        if len(seconds) == 10 or (len(seconds) % every == 0 and len(seconds) <= iterations):
            session = current_session(name)
            assert session.worker._child is not None
            rows.append(sample(len(seconds), session.worker._child.pid, server, session.store.path))
            show(rows[-1], seconds)
        since = time.monotonic()  # what the measurements take belongs to no iteration

    with observed(observe):
        training_run(name)
    return seconds[:iterations], rows


def sample(done: int, worker: int, server: Server, run: Path) -> Row:
    """What the processes hold and how much lies on disk after `done` iterations."""
    flow = os.getpid()
    return {
        "iteration": done,
        "flow": process(flow),
        "worker": process(worker),
        "server": process(server.pid),
        "processes": len(descendants(flow)) - len(descendants(server.pid)) - 1,
        "prefect_db_bytes": size(server.home, lambda path: path.name.startswith("prefect.db")),
        "mlflow_db_bytes": size(Path(), lambda path: path.name.startswith("mlflow.db"), deep=False),
        "run_bytes": size(run),
        "run_files": sum(path.is_file() for path in run.rglob("*")),
    }


def process(pid: int) -> Row:
    """Resident memory, open files, threads and processor seconds of a process."""
    stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    ticks = os.sysconf("SC_CLK_TCK")
    return {
        "rss_bytes": int(stat[21]) * resource.getpagesize(),
        "files": len(os.listdir(f"/proc/{pid}/fd")),
        "threads": int(stat[17]),
        "cpu_seconds": (int(stat[11]) + int(stat[12])) / ticks,
    }


def descendants(root: int) -> set[int]:
    """Living processes below `root`, by parent."""
    parents = {}
    for entry in os.listdir("/proc"):
        try:
            if entry.isdigit():
                parents[int(entry)] = int(Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    family = {root}
    while grown := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= grown
    return family - {root}


def size(folder: Path, wanted: Callable[[Path], bool] = lambda _: True, deep: bool = True) -> int:
    total = 0
    for path in folder.rglob("*") if deep else folder.iterdir():
        try:
            total += path.stat().st_size if path.is_file() and wanted(path) else 0
        except FileNotFoundError:  # a journal that came and went
            continue
    return total


def show(row: Row, seconds: list[float]) -> None:
    parts = [f"{name} {row[name]['rss_bytes'] / 2**20:.0f} MiB" for name in ("flow", "worker", "server")]
    parts += [f"{row['flow']['files']} files", f"{row['flow']['threads']} threads", f"{row['processes']} processes"]
    names = ("prefect_db_bytes", "mlflow_db_bytes", "run_bytes")
    parts += [f"{name.removesuffix('_bytes')} {row[name] / 2**20:.1f} MiB" for name in names]
    print(f"{row['iteration']:>5}  {statistics.median(seconds[-WINDOW:]):.2f} s/it  " + "  ".join(parts), flush=True)


def verdict(seconds: list[float], rows: list[Row]) -> Row:
    """What has grown between the beginning (after iteration 10) and the end."""
    begin, end = statistics.median(seconds[10 : 10 + WINDOW]), statistics.median(seconds[-WINDOW:])
    first, last = rows[0], rows[-1]
    rates = [_cpu_rate(rows[0], rows[1]), _cpu_rate(rows[-2], rows[-1])]
    growing = [f"time of an iteration {end / begin:.2f} times"] if end > 1.2 * begin else []
    for name in ("flow", "worker"):
        before, after = first[name], last[name]
        if after["rss_bytes"] > max(1.2 * before["rss_bytes"], before["rss_bytes"] + 32 * 2**20):
            growing.append(f"memory of {name} {before['rss_bytes'] >> 20} to {after['rss_bytes'] >> 20} MiB")
        growing += [
            f"{what} of {name} {before[what]} to {after[what]}"
            for what in ("files", "threads")
            if after[what] > before[what] + 2
        ]
    if last["processes"] > first["processes"]:
        growing.append(f"processes {first['processes']} to {last['processes']}")
    return {
        "iterations": len(seconds),
        "seconds_begin": begin,
        "seconds_end": end,
        "seconds_ratio": end / begin,
        "cpu_ratio": rates[1] / rates[0],
        "flat": not growing,
        "growing": growing,
    }


def _cpu_rate(before: Row, after: Row) -> float:
    """Processor seconds of flow process and worker per iteration between two rows."""
    spent = sum(after[name]["cpu_seconds"] - before[name]["cpu_seconds"] for name in ("flow", "worker"))
    return spent / (after["iteration"] - before["iteration"])


if __name__ == "__main__":
    main()

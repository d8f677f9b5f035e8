"""What orchestration costs: wall time of an iteration less the time inside the worker and its reward processes.

    python benchmarks/overhead.py [--iterations 8] [--out benchmarks/results/overhead.json]

Runs the smoke recipe through the real flows, with the embedded Prefect server (or the one PREFECT_API_URL names) and
real MLflow on SQLite, in a temporary folder. The first iteration pays the start of worker and engines, so it is shown
apart.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--iterations", type=int, default=8)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/overhead.json"))
    arguments = parser.parse_args()
    out = arguments.out.absolute()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        rows = measure(arguments.iterations)
        os.chdir("/")
    overheads = [row["overhead_seconds"] for row in rows[1:]]
    result = {
        "iterations": rows,
        "overhead_seconds_median": statistics.median(overheads),
        "overhead_seconds_max": max(overheads),
        "share_of_iteration": statistics.median(row["overhead_seconds"] / row["seconds"] for row in rows[1:]),
    }
    print(f"{'iteration':>9} {'seconds':>8} {'worker':>8} {'overhead':>8}")
    for row in rows:
        values = (row["seconds"], row["worker_seconds"], row["overhead_seconds"])
        print(f"{row['iteration']:>9} " + " ".join(f"{value:>8.2f}" for value in values))
    print(
        f"overhead per iteration, first one apart: median {result['overhead_seconds_median']:.2f} s, "
        f"max {result['overhead_seconds_max']:.2f} s"
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n")


def measure(iterations: int) -> list[dict[str, float]]:
    """Seconds per iteration: in all, inside the worker, the rest."""
    from tasks import settings

    settings.apply_defaults()
    from tasks.servers import local

    local.connect()
    from flows.training_run import training_run
    from tasks.events import StageEvent, observed
    from tasks.launch import prepare_run
    from tasks.session import current_session

    settings.quiet_console()
    name = prepare_run("smoke", [f"iterations={iterations}"])
    marks: list[tuple[float, float]] = []

    def observe(event: StageEvent) -> None:
        begins = event.kind == "finished" and event.iteration < 0
        if begins or event.kind == "completed":
            marks.append((time.monotonic(), current_session(name).worker_seconds))

    with observed(observe):
        training_run(name)
    return [
        {
            "iteration": number,
            "seconds": after[0] - before[0],
            "worker_seconds": after[1] - before[1],
            "overhead_seconds": (after[0] - before[0]) - (after[1] - before[1]),
        }
        for number, (before, after) in enumerate(pairwise(marks))
    ]


if __name__ == "__main__":
    main()

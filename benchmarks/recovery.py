"""What a crash costs: seconds until a killed run works again, and seconds of work that are lost.

    python benchmarks/recovery.py [--kills 20] [--seed 0] [--out benchmarks/results/recovery.json]

A run of the tiny random model (16 prompts, 8 completions of up to 96 tokens) is started with `rlstages run`, its
process group gets SIGKILL at a random moment, and the same command continues it, again and again, with a Prefect server
that keeps running. Measured each time:

    resume      from the start of the command to the first stage that executes
    lost        work done since the last stage was published: it is done again
    whole batch what a trainer loses that only writes checkpoints after optimizer steps: the iteration's finished
                stages since its last checkpoint (generate, score, advantage before train; evaluate after it) and `lost`

Nothing but the files of the run is looked at: folders of attempts, manifests and their seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from prefect_server import prefect_server

RUN = "recovery"
SETTINGS = [
    f"name={RUN}",
    "iterations=1000",
    "generate.prompts_per_iteration=16",
    "generate.group_size=8",
    "generate.max_completion_tokens=96",
    "learner.minibatches=2",
]
STAGES = ["generate", "score", "advantage", "train", "evaluate", "register"]
BEFORE_CHECKPOINT = ("generate", "score", "advantage")
AFTER_CHECKPOINT = ("evaluate",)
Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/recovery.json"))
    arguments = parser.parse_args()
    out = arguments.out.absolute()
    with tempfile.TemporaryDirectory() as folder, prefect_server(Path(folder) / "server") as server:
        os.chdir(folder)
        os.environ |= {"PREFECT_API_URL": server.url, "PREFECT_HOME": str(Path(folder) / "home")}
        rows = measure(arguments.kills, random.Random(arguments.seed), Path(folder) / "runs" / RUN)
        os.chdir("/")
    result: Row = {"kills": rows, "seed": arguments.seed}
    for name in ("resume", "lost", "whole_batch"):
        values = [row[f"{name}_seconds"] for row in rows]
        result |= {f"{name}_seconds_median": statistics.median(values), f"{name}_seconds_max": max(values)}
        print(f"{name.replace('_', ' '):<12} median {statistics.median(values):6.2f} s   max {max(values):6.2f} s")
    lost, whole = (sum(row[f"{name}_seconds"] for row in rows) for name in ("lost", "whole_batch"))
    result["lost_ratio"] = whole / lost
    print(f"a trainer that checkpoints optimizer steps loses {whole / lost:.1f} times as much work")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n")


def measure(kills: int, dice: random.Random, run: Path) -> list[Row]:
    """A row per kill. The first start makes the model, the base evaluation and two iterations, and is not counted."""
    with started([word for setting in SETTINGS for word in ("--set", setting)], run) as (process, _):
        span = first_iterations(process, run)
    rows = []
    print(f"{'kill':>4} {'in':>16} {'resume':>8} {'lost':>8} {'whole batch':>12}   seconds")
    for number in range(kills):
        with started([], run) as (process, resume):
            working = time.time()
            time.sleep(dice.uniform(0.0, 1.5 * span))
            killed = kill(process)
        row = {"resume_seconds": resume, **losses(run, working, killed)}
        rows.append(row)
        values = (row["resume_seconds"], row["lost_seconds"], row["whole_batch_seconds"])
        where = f"{row['iteration']:04d}/{row['stage']}"
        print(f"{number:>4} {where:>16} {values[0]:>8.2f} {values[1]:>8.2f} {values[2]:>12.2f}", flush=True)
    return rows


@contextmanager
def started(settings: list[str], run: Path) -> Iterator[tuple[subprocess.Popen[bytes], float]]:
    """Start or continue the run; its process and the seconds until one of its stages executes: the folder of its
    attempt appears. It does not outlive the block."""
    begun = time.monotonic()
    with Path("output.log").open("ab") as log:
        command = [sys.executable, "-m", "flows.cli", "run", "smoke" if settings else RUN, *settings]
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        while not list(run.glob(f"iterations/*/*/*.partial-{process.pid}")):
            if process.poll() is not None or time.monotonic() - begun > 300:
                raise RuntimeError(Path("output.log").read_text(errors="replace")[-3000:])
            time.sleep(0.02)
        yield process, time.monotonic() - begun
    finally:
        if process.poll() is None:
            kill(process)


def first_iterations(process: subprocess.Popen[bytes], run: Path) -> float:
    """Wait for two iterations; the wall seconds of the second one."""
    ends = []
    for number in (0, 1):
        while not complete(run, number):
            if process.poll() is not None:
                raise RuntimeError(Path("output.log").read_text(errors="replace")[-3000:])
            time.sleep(0.05)
        ends.append(time.monotonic())
    return ends[1] - ends[0]


def complete(run: Path, iteration: int) -> bool:
    path = run / f"iterations/{iteration:04d}/iteration.json"
    return path.is_file() and bool(json.loads(path.read_text())["complete"])


def kill(process: subprocess.Popen[bytes]) -> float:
    """SIGKILL the process group; the moment of it, as the file system's clock has it."""
    os.killpg(process.pid, signal.SIGKILL)
    moment = time.time()
    process.wait()
    return moment


def losses(run: Path, working: float, killed: float) -> Row:
    """What was under way in the newest iteration, and the work that a kill at that moment has cost."""
    newest = max(int(path.parent.name) for path in run.glob("iterations/[0-9]*/iteration.json"))
    record = json.loads((run / f"iterations/{newest:04d}/iteration.json").read_text())
    done = record["stages"]
    published = [(run / made["folder"] / "manifest.json") for made in done.values()]
    last = max([working, *(path.stat().st_mtime for path in run.glob("iterations/*/*/*/manifest.json"))])
    seconds = {
        json.loads(path.read_text())["stage"]: json.loads(path.read_text())["measured"]["seconds"] for path in published
    }
    unsaved = AFTER_CHECKPOINT if "train" in done else BEFORE_CHECKPOINT
    lost = max(killed - last, 0.0)
    return {
        "iteration": newest,
        "stage": next((stage for stage in STAGES if stage not in done), "end"),
        "lost_seconds": lost,
        "whole_batch_seconds": lost + sum(seconds.get(stage, 0.0) for stage in unsaved),
    }


if __name__ == "__main__":
    main()

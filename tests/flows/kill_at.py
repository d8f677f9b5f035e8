"""`rlstages` with a bomb: SIGKILL of the whole process group in the middle of one stage.

    python kill_at.py POINT STAGE ITERATION arguments of rlstages...

POINT: `work`: the stage's work is under way. `publish`: its files are written, their folder has no manifest and not its
final name. `worker`: as `work`, but only the worker is killed, once.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from typing import Any

from flows import cli
from tasks.session import Session
from tasks.storage.store import RunStore

point, stage, iteration = sys.argv[1], sys.argv[2], int(sys.argv[3])


def explode() -> None:
    os.killpg(os.getpgid(0), signal.SIGKILL)


def is_target(name: str, number: int) -> bool:
    return name == stage and number == iteration


def explode_soon(folder: Any) -> None:
    """Wait until the stage has written something, at most for a moment: some stages write only at their very end."""
    deadline = time.monotonic() + 0.05
    while time.monotonic() < deadline and not any(folder.rglob("*")):
        time.sleep(0.001)
    explode()


def kill_worker_soon(session: Session) -> None:
    time.sleep(0.02)
    assert session.worker._child is not None
    os.kill(session.worker._child.pid, signal.SIGKILL)


perform, publish = Session._perform, RunStore.publish
workers_killed: list[int] = []


def perform_with_bomb(self: Session, target: Any, context: Any) -> Any:
    if point == "work" and is_target(target.spec.name, context.iteration):
        threading.Thread(target=explode_soon, args=(context.output,), daemon=True).start()
    if point == "worker" and is_target(target.spec.name, context.iteration) and not workers_killed:
        workers_killed.append(1)
        threading.Thread(target=kill_worker_soon, args=(self,), daemon=True).start()
    return perform(self, target, context)


def publish_with_bomb(self: RunStore, partial: Any, manifest: Any) -> Any:
    if point == "publish" and is_target(manifest.stage, manifest.iteration):
        explode()
    return publish(self, partial, manifest)


Session._perform, RunStore.publish = perform_with_bomb, publish_with_bomb  # type: ignore[method-assign]
sys.argv = ["rlstages", *sys.argv[4:]]
cli.main()

"""`rlstages` with a bomb: SIGKILL of the whole process group in the middle of one stage.

    python kill_at.py POINT STAGE ITERATION arguments of rlstages...

POINT: `work`: the stage's work is under way. `publish`: its files are written, their folder has no manifest and not its
final name. `record`: the folder is published, the iteration's record does not know it yet.
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
from tasks.store import RunStore

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


perform, publish, record = Session._perform, RunStore.publish, Session._record


def perform_with_bomb(self: Session, target: Any, context: Any) -> Any:
    if point == "work" and is_target(target.spec.name, context.iteration):
        threading.Thread(target=explode_soon, args=(context.output,), daemon=True).start()
    return perform(self, target, context)


def publish_with_bomb(self: RunStore, partial: Any, manifest: Any) -> Any:
    if point == "publish" and is_target(manifest.stage, manifest.iteration):
        explode()
    return publish(self, partial, manifest)


def record_with_bomb(self: Session, result: Any, number: int) -> Any:
    if point == "record" and is_target(result.stage, number):
        explode()
    return record(self, result, number)


Session._perform, RunStore.publish, Session._record = perform_with_bomb, publish_with_bomb, record_with_bomb  # type: ignore[method-assign]
sys.argv = ["rlstages", *sys.argv[4:]]
cli.main()

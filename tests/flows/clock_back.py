"""`rlstages` on a machine whose clock goes back by an hour when the first iteration has trained its policy.

`python clock_back.py arguments of rlstages...`
"""

from __future__ import annotations

import sys
import time
from typing import Any

from flows import cli
from tasks.session import Session

run_stage, clock, clock_ns, calendar = Session.run_stage, time.time, time.time_ns, time.gmtime
back = 0


def run_stage_then_jump(self: Session, stage: Any, iteration: int, inputs: Any, mode: Any) -> Any:
    global back
    result = run_stage(self, stage, iteration, inputs, mode)
    if (stage.spec.name, iteration) == ("train", 0):
        back = 3600
    return result


Session.run_stage = run_stage_then_jump  # type: ignore[method-assign]
time.time = lambda: clock() - back
time.time_ns = lambda: clock_ns() - back * 10**9
time.gmtime = lambda seconds=None: calendar(time.time() if seconds is None else seconds)
sys.argv = ["rlstages", *sys.argv[1:]]
cli.main()

"""`rlstages` that gets SIGTERM one second after its flow is complete: `python late_signal.py arguments...`."""

from __future__ import annotations

import os
import signal
import sys
import time

from flows import cli

end = cli._end


def end_late(name: str) -> None:
    time.sleep(1)
    os.kill(os.getpid(), signal.SIGTERM)
    end(name)


cli._end = end_late
sys.argv = ["rlstages", *sys.argv[1:]]
cli.main()

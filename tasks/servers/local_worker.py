"""The Prefect worker of `rlstages up`: takes flow runs of this machine's queues and runs each in a process.

    python -m tasks.servers.local_worker NAME

It is Prefect's own worker for processes but for three things. It schedules crashed runs of deployments tagged
`auto-resume` again at once: an automation would learn of a crash in time only if the server has not been restarted and
the run did not come from a fresh schedule, else up to 15 minutes later. It reports a crash once: Prefect's worker does
so again some seconds later, when the run has been resumed, and crashes it while it works. And what signals do here does
not depend on what the shell that called `rlstages up` ignores.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from typing import Any

from httpx import HTTPError
from prefect.client.schemas.objects import FlowRun
from prefect.exceptions import ObjectNotFound
from prefect.states import AwaitingRetry
from prefect.workers.process import ProcessWorker, ProcessWorkerResult

from tasks.processes.tree import descendants, living
from tasks.servers.autoresume import RESUMED, is_to_resume
from tasks.servers.provision import POOL, queues_here

_PATIENCE_SECONDS = 12.0
_NO_MARK = "no environment has this"


class LocalWorker(ProcessWorker):
    @classmethod
    def __dispatch_key__(cls) -> str:
        return "process-rlstages"  # Prefect's own stays the one that is known as `process`

    async def run(self, flow_run: FlowRun, *args: Any, **kwargs: Any) -> ProcessWorkerResult:
        """Run a flow run to the end of its process. Its exit status has been reported by then, and is not returned."""
        result = await super().run(flow_run, *args, **kwargs)
        try:
            if is_to_resume(await self.client.read_flow_run(flow_run.id)):
                await self.client.set_flow_run_state(flow_run.id, AwaitingRetry(message=RESUMED))
        except (HTTPError, ObjectNotFound) as error:  # `rlstages up` or the doctor will find it
            self.get_flow_run_logger(flow_run).error("cannot be resumed: %s", error)
        return ProcessWorkerResult(status_code=0, identifier=result.identifier)


def _stop(*_: Any) -> None:
    """Let the flow runs end in order, which Prefect's worker does not: it kills their processes."""
    for pid, fields, _environment in living():
        if int(fields[1]) == os.getpid():
            os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while descendants(os.getpid(), _NO_MARK) and time.monotonic() < deadline:
        time.sleep(0.05)
    signal.raise_signal(signal.SIGINT)


def main(name: str) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, _stop)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(LocalWorker(work_pool_name=POOL, name=name, work_queues=queues_here()).start())


if __name__ == "__main__":
    main(sys.argv[1])

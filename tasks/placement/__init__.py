"""A stage handed to a Prefect deployment instead of the run's own worker: the side that waits and publishes.

`execution.placement.train = "deployment:stage/gpu"` makes a flow run of that deployment, which any worker of its work
queue takes; the two sides meet in the folder of an attempt (`tasks.placement.attempt`). Its idempotency key is that
folder, whose name begins with the fingerprint: a run that is continued attaches to the work that went on without it,
and whatever ended badly is done again under another name. Nothing stays warm between two attempts: each loads its
policy.
"""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_core.config import RunConfig
from rl_core.engines.base import Progress
from rl_core.errors import RunError, StageTimeoutError, WorkerError, from_dict
from tasks.placement import runs
from tasks.placement.attempt import Attempt, Message, attempts
from tasks.stage import StageContext

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.objects import FlowRun

POLL_SECONDS = 1.0
SILENT_SECONDS = 120.0
"""Work whose progress file has not changed for so long is lost: its machine died before it could say so."""
REPLY_SECONDS = 30.0
"""How long a reply may take to be seen here after its flow run has ended, and the other way round."""
TIMEOUT_SLACK_SECONDS = 30.0
"""The other side stops its work at the limit; only if it cannot, this side cancels it so much later."""

_log = logging.getLogger("rlstages.placement")


def check_placement(config: RunConfig) -> None:
    """Raise `ConfigError` unless every deployment that a run places stages in exists and can take them."""
    if config.execution.placement:
        with runs.client() as client:
            for name in config.execution.placement.values():
                runs.deployment(client, name)


def supersede(stage_dir: Path, wanted: Message | None = None) -> Attempt | None:
    """Cancel and remove the attempts of a stage; but return one that is usable and was made for `wanted`."""
    kept = None
    for attempt in attempts(stage_dir):
        if kept is None and wanted is not None and attempt.request == wanted and _usable(attempt):
            kept = attempt
        else:
            _discard(attempt)
    return kept


def place(stage: str, context: StageContext, run: str, on_progress: Progress) -> Message:
    """Have a stage's work done by its deployment; what it wrote lies in `context.output` then.

    Raises what the work raised; `ConfigError` without a deployment, `WorkerError` when the flow run crashed or was
    lost, `StageTimeoutError` when it passed its limit, `RunError` when somebody cancelled it. A flow run that is still
    at work when this ends in an error, or is interrupted, is cancelled.
    """
    name = context.config.execution.placement[stage]  # type: ignore[index]
    request = json.loads(json.dumps({"deployment": name, "context": {**context.to_dict(), "output": ""}}))
    stage_dir, fingerprint = context.output.parent, context.output.name
    attempt = supersede(stage_dir, request) or Attempt.create(stage_dir, fingerprint, request)
    parameters = {"run": run, "iteration": context.iteration, "from_stage": stage, "attempt": attempt.folder.name}
    key = str(attempt.folder)
    try:
        with runs.client() as client:
            flow_run = runs.find(client, key) or runs.submit(client, name, parameters, key)
            result = _Wait(client, flow_run, attempt, stage, context, on_progress).result()
        attempt.output.rename(context.output)  # it is empty, so this replaces it
    except BaseException:
        _discard(attempt)
        raise
    attempt.remove()
    return result


class _Wait:
    """Watches one flow run and its attempt until there is a result."""

    def __init__(
        self,
        client: SyncPrefectClient,
        flow_run: FlowRun,
        attempt: Attempt,
        stage: str,
        context: StageContext,
        on_progress: Progress,
    ) -> None:
        self.client, self.flow_run, self.attempt, self.on_progress = client, flow_run, attempt, on_progress
        self.limit = context.config.execution.timeout_seconds.get(stage)  # type: ignore[call-overload]
        self.deployment = context.config.execution.placement[stage]  # type: ignore[index]
        self.submitted = time.monotonic()
        self.began: float | None = None
        self.replied: float | None = None
        self.changed = self.submitted
        self.progress: Message | None = None

    def result(self) -> Message:
        while True:
            state = runs.state(self.client, self.flow_run)
            reply = self.attempt.reply
            if reply is not None and (state is None or state.is_final() or self._replied_long_ago()):
                return self._open(reply)
            if state is not None and state.is_final():
                return self._open(self._late_reply(state))
            self._watch(state)
            time.sleep(POLL_SECONDS)

    def _replied_long_ago(self) -> bool:
        """A reply is here for a while, though nobody says that the flow run has ended: its machine died after it."""
        self.replied = self.replied or time.monotonic()
        return time.monotonic() - self.replied > REPLY_SECONDS

    def _watch(self, state: Any) -> None:
        now, progress = time.monotonic(), self.attempt.progress
        if self.began is None:
            if progress is not None or (state is not None and state.is_running()):
                self.began = self.changed = now
            elif state is not None:  # it waits for its turn, as long as that takes
                self.changed = now
                if now - self.submitted > runs.UNPOLLED_SECONDS:
                    runs.check_polled(self.client, self.flow_run, self.deployment)
        if progress is not None and progress != self.progress:
            self.progress, self.changed = progress, now
            if progress["total"]:
                self.on_progress(progress["done"], progress["total"])
        if self.limit is not None and self.began is not None and now - self.began > self.limit + TIMEOUT_SLACK_SECONDS:
            raise StageTimeoutError(
                f"{self._name} gave no answer within {self.limit:g} s and is cancelled",
                expected=f"an answer within {self.limit:g} s",
            )
        if now - self.changed > SILENT_SECONDS:
            raise WorkerError(
                f"{self._name} is lost",
                expected="its progress file to change every few seconds, or Prefect to say that it waits",
                got=f"nothing for {SILENT_SECONDS:g} s",
                todo="do its machine and the server live, and do both sides see the same runs folder?",
            )

    def _late_reply(self, state: Any) -> Message:
        """The reply of a flow run that has ended; shared storage may show it later than the server tells the end."""
        deadline = time.monotonic() + (REPLY_SECONDS if state.is_completed() else 0.0)
        while (reply := self.attempt.reply) is None:
            if time.monotonic() > deadline:
                raise self._ended(state)
            time.sleep(POLL_SECONDS)
        return reply

    def _ended(self, state: Any) -> Exception:
        got, details = f"state {state.name}", state.message or ""
        if state.is_cancelled():
            return RunError(f"{self._name} was cancelled", got=got, todo="start the run again", details=details)
        return WorkerError(
            f"{self._name} ended before it answered",
            expected="a reply",
            got=got,
            todo="read the logs of that flow run in Prefect",
            details=details,
        )

    def _open(self, reply: Message) -> Message:
        if "error" in reply:
            raise from_dict(reply["error"])
        result: Message = reply["result"]
        for entry in result["files"]:
            path = self.attempt.output / entry["name"]
            if not path.is_file() or path.stat().st_size != entry["bytes"]:
                raise WorkerError(f"{self._name} reports {entry['name']}, which is not here whole", got=str(path))
        placed = {"deployment": self.deployment, "flow_run": str(self.flow_run.id)}
        return result | {"measured": {**result["measured"], "placed": placed}}

    @property
    def _name(self) -> str:
        return f"the flow run of {self.deployment} ({self.flow_run.id})"


def _usable(attempt: Attempt) -> bool:
    """It is being worked on, waits for a worker, or ended well."""
    reply = attempt.reply
    if reply is not None:
        return "result" in reply
    with runs.client() as client:
        flow_run = runs.find(client, str(attempt.folder))
        return flow_run is None or flow_run.state is None or not flow_run.state.is_final()


def _discard(attempt: Attempt) -> None:
    """Cancel the flow run of an attempt if it has not ended, wait a moment for its end, and remove the folder."""
    try:
        with runs.client() as client:
            flow_run = runs.find(client, str(attempt.folder))
            if flow_run is not None and not (flow_run.state and flow_run.state.is_final()):
                runs.cancel(client, flow_run)
    # What cannot be cancelled finds its folder gone, and fails.
    except Exception as error:
        _log.warning("the flow run of %s was not cancelled: %s", attempt.folder, error)
    finally:
        attempt.remove()

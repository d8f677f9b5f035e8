"""What `doctor` asks a Prefect server: slots, flow and task runs whose process is gone, schedules."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import UUID

from tasks import attempts
from tasks.doctor import Finding, Kind
from tasks.slots import Slots, describe_task_run, free_slot, read_slots
from tasks.storage.store import RunStore

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.objects import FlowRun, TaskRun

_REPAIR = "rlstages doctor --fix"
_STARTING_SECONDS = 120.0  # a flow run shows as running for so long at most before its process has opened its run
_RELEASE_SECONDS = 10.0  # a task that has ended gives its slot back within so long
_RECOUNT_SECONDS = 8.0  # an expired lease is off the server's counter within so long
_PAGE = 200
_GONE = "its process is gone (rlstages doctor)"


def server(stores: list[RunStore], fix: bool) -> list[Finding]:
    """All that lies in the Prefect server, if there is one."""
    from tasks.servers.local import running_api

    url = os.environ.get("PREFECT_API_URL") or running_api()
    if url is None:
        return [Finding("server", "no Prefect server is up: slots and flow runs were not looked at")]
    os.environ["PREFECT_API_URL"] = url  # before prefect is imported, which reads it once and looks for its home
    if "PREFECT_HOME" in os.environ:
        Path(os.environ["PREFECT_HOME"]).mkdir(parents=True, exist_ok=True)
    from httpx import HTTPError
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings

    try:
        with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 1}), SyncPrefectClient(url) as client:
            flows, tasks = _zombies(client, stores)
            slots = _slots(client, stores, {task.id for task in tasks}, fix)
            return [*slots, *_runs(client, flows, tasks, fix), *_pending(client, fix), *_schedules()]
    except HTTPError as error:
        what = f"the Prefect server at {url} does not answer: {type(error).__name__}"
        return [Finding("server", what, "start it with `rlstages up`, or mend PREFECT_API_URL")]


# -- flow and task runs -----------------------------------------------------------------------------------------------
def _zombies(client: SyncPrefectClient, stores: list[RunStore]) -> tuple[list[FlowRun], list[TaskRun]]:
    """Flow and task runs that show as running although the attempt they belong to is over."""
    flows: list[FlowRun] = []
    tasks: list[TaskRun] = []
    for store in stores:
        past = attempts.past(store)
        if not past.all_flow_runs:
            continue
        for flow in _running(client, "flow", id=list(past.flow_runs)):
            began = past.flow_runs[str(flow.id)]
            if attempts.process_lives(store, str(flow.id)):
                continue  # it has let go of the run, and is about to say how it ended
            if _since(flow) <= began or time.time() - _since(flow) > _STARTING_SECONDS:
                flows.append(flow)
        inner = _running(client, "flow", parent_flow_run_id=past.all_flow_runs)
        # A placed stage has its caller as parent, and lives on without it.
        flows += [flow for flow in inner if _since(flow) < past.until and not flow.parameters.get("attempt")]
        held = [
            *_running(client, "task", id=past.all_flow_runs),
            *_running(client, "task", parent_flow_run_id=past.all_flow_runs),
        ]
        tasks += [task for task in held if _since(task) < past.until]
    return flows, tasks


def _running(client: SyncPrefectClient, kind: str, **flow_runs: list[str]) -> list[Any]:
    """Flow runs that show as running or cancelling among those of a filter, or the tasks that do inside of them."""
    from prefect.client.schemas.filters import FlowRunFilter, TaskRunFilter

    ids = {name: {"any_": values} for name, values in flow_runs.items()}
    if not all(flow_runs.values()):
        return []
    # A task that was killed before it began is pending for ever; a flow run that is pending may be about to go on.
    types = ["RUNNING", "CANCELLING"] if kind == "flow" else ["RUNNING", "CANCELLING", "PENDING"]
    state = {"state": {"type": {"any_": types}}}
    found: list[Any] = []
    while True:
        if kind == "flow":
            wanted = FlowRunFilter.model_validate({**ids, **state})
            part: list[Any] = client.read_flow_runs(flow_run_filter=wanted, limit=_PAGE, offset=len(found))
        else:
            part = client.read_task_runs(
                flow_run_filter=FlowRunFilter.model_validate(ids),
                task_run_filter=TaskRunFilter.model_validate(state),
                limit=_PAGE,
                offset=len(found),
            )
        found += part
        if len(part) < _PAGE:
            return found


def _since(run: FlowRun | TaskRun) -> float:
    return run.state.timestamp.timestamp() if run.state else time.time()


def _runs(client: SyncPrefectClient, flows: list[FlowRun], tasks: list[TaskRun], fix: bool) -> list[Finding]:
    found = []
    dead: list[tuple[Kind, str, FlowRun | TaskRun]] = [
        *(("task run", describe_task_run(client, task.id), task) for task in tasks),
        *(("flow run", f"{flow.name} ({flow.id})", flow) for flow in flows),
    ]
    for kind, name, run in dead:
        what = f"{name} shows as running, {_GONE.partition(' (')[0]}"
        found.append(Finding(kind, what, f"{_REPAIR} sets it to Crashed"))
        if fix:
            _crash(client, kind, run)
            found[-1].repaired = True
    return found or [Finding("flow run", "no flow run of this folder runs without its process")]


def _crash(client: SyncPrefectClient, kind: Kind, run: FlowRun | TaskRun) -> None:
    """Set a dead run to Crashed, unless it has another state by now: then somebody has resumed or ended it."""
    from prefect.states import Crashed

    read, write = (
        (client.read_task_run, client.set_task_run_state)
        if kind == "task run"
        else (client.read_flow_run, client.set_flow_run_state)
    )
    now, seen = read(run.id).state, run.state
    if now is not None and seen is not None and now.id == seen.id:
        write(run.id, Crashed(message=_GONE), force=True)


def _pending(client: SyncPrefectClient, fix: bool) -> list[Finding]:
    """Flow runs of the local pool that a worker took and then died, before their process was started.

    Nothing else ends them, and each holds the slot of its deployment: with CANCEL_NEW all later ones are cancelled.
    """
    from prefect.client.schemas.filters import FlowRunFilter, WorkPoolFilter
    from prefect.client.schemas.responses import SetStateStatus
    from prefect.states import AwaitingRetry

    from tasks.servers.provision import POOL

    pool = WorkPoolFilter.model_validate({"name": {"any_": [POOL]}})
    state = FlowRunFilter.model_validate({"state": {"type": {"any_": ["PENDING"]}}})
    found = []
    for flow in client.read_flow_runs(flow_run_filter=state, work_pool_filter=pool, limit=_PAGE):
        seconds = time.time() - _since(flow)
        if seconds > _STARTING_SECONDS:
            what = f"{flow.name} ({flow.id}) is pending since {seconds / 60:.0f} min: nobody starts it"
            found.append(Finding("flow run", what, f"{_REPAIR} schedules it again"))
            if fix:
                again: Any = AwaitingRetry(message="nobody started it (rlstages doctor)")
                answer: Any = client.set_flow_run_state(flow.id, again)
                found[-1].repaired = answer.status == SetStateStatus.ACCEPT
    return found


# -- slots ------------------------------------------------------------------------------------------------------------
def _slots(client: SyncPrefectClient, stores: list[RunStore], dead: set[UUID], fix: bool) -> list[Finding]:
    held = [attempts.held_slot(store) for store in stores if not attempts.is_worked_on(store)]
    dead = dead | {UUID(slot["task_run"]) for slot in held if slot}
    found = []
    for slots in _settled(client):
        gone = [holder for holder in slots.holders if holder in dead or _has_ended(client, holder)]
        alive = [describe_task_run(client, holder) for holder in slots.holders if holder not in gone]
        by = f" by {', '.join(alive)}" if alive else ""
        found.append(Finding("slot", f"{slots.tag}: {slots.used} of {slots.limit} in use{by}"))
        for holder in gone:
            what = f"{slots.tag}: held by {describe_task_run(client, holder)}, whose process is gone"
            found.append(Finding("slot", what, f"{_REPAIR} frees it; by itself it is free within 65 s"))
            if fix:
                free_slot(client, str(holder), [slots.tag])
                found[-1].repaired = True
        leaked = slots.used - len(slots.holders)
        if leaked > 0:
            found.append(Finding("slot", f"{slots.tag}: {leaked} taken without a holder", f"{_REPAIR} frees them"))
            if fix:
                client.release_concurrency_slots([f"tag:{slots.tag}"], leaked, 1.0)
                found[-1].repaired = True
    return found or [Finding("slot", "no tag has a limit")]


def _settled(client: SyncPrefectClient) -> list[Slots]:
    """The slots, as two looks in a row have seen them and with a holder each: a run may just change its slot."""
    deadline = time.monotonic() + _RECOUNT_SECONDS
    found: list[Slots] = []
    while True:
        before, found = found, read_slots(client)
        settled = found == before and all(slots.used <= len(slots.holders) for slots in found)
        if settled or time.monotonic() > deadline:
            return found
        time.sleep(0.5)


def _has_ended(client: SyncPrefectClient, task_run: UUID) -> bool:
    from prefect.exceptions import ObjectNotFound

    try:
        task = client.read_task_run(task_run)
    except ObjectNotFound:  # the server learns of task runs with some delay
        return False
    return bool(task.state and task.state.is_final() and time.time() - _since(task) > _RELEASE_SECONDS)


# -- schedules --------------------------------------------------------------------------------------------------------
def _schedules() -> list[Finding]:
    from tasks.servers.provision import schedule_differences

    found = [Finding("schedule", what, "`rlstages up` deploys the file anew") for what in schedule_differences()]
    return found or [Finding("schedule", "deployed as prefect.yaml says")]

"""What `rlstages up` creates on the Prefect server; doing it again changes nothing that is as it should be."""

from __future__ import annotations

from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import UUID

from rl_core.errors import ConfigError, StageError
from tasks.servers import deployments
from tasks.servers.autoresume import RESUMED
from tasks.servers.deployments import AUTO_RESUME, PREFECT_FILE, PrefectFile, read_file
from tasks.slots import read_limits

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.objects import StateType
    from prefect.events import AutomationCore
    from prefect.events.actions import ChangeFlowRunState

POOL = "local"
QUEUES = {
    "default": "everything that names no resource class",
    "cpu": "stages that need no GPU",
    "gpu": "stages that need a GPU",
}
ZOMBIES = "rlstages: crash silent runs"
RESUME = "rlstages: resume silent runs"
_SILENT = "no heartbeat for"


def parse_limits(texts: list[str]) -> dict[str, int]:
    """`tag=slots` of the command line; 0 slots mean no limit. Raises `ConfigError` on anything else."""
    limits = {}
    for text in texts:
        tag, equals, slots = text.partition("=")
        if not equals or not tag.strip() or not slots.strip().isdecimal():
            raise ConfigError("a limit is not of the form tag=slots", expected="--limit train=1", got=text)
        limits[tag.strip()] = int(slots)
    return limits


def gpu_count() -> int:
    return len(list(Path("/dev").glob("nvidia[0-9]*")))


def queues_here() -> list[str]:
    """The queues of the pool that this machine serves: stages for a GPU are left to a machine that has one."""
    return [name for name in QUEUES if name != "gpu" or gpu_count()]


def create_pool(client: SyncPrefectClient) -> None:
    """The work pool of processes on this machine, a queue per resource class."""
    from prefect.client.schemas.actions import WorkPoolCreate
    from prefect.exceptions import ObjectNotFound
    from prefect.workers.process import ProcessWorker

    try:
        client.read_work_pool(POOL)
    except ObjectNotFound:
        template = ProcessWorker.get_default_base_job_template()
        client.create_work_pool(WorkPoolCreate(name=POOL, type=ProcessWorker.type, base_job_template=template))
    there = {queue.name for queue in client.read_work_queues(work_pool_name=POOL)}
    for name, description in QUEUES.items():
        if name not in there:
            client.create_work_queue(name, description, work_pool_name=POOL)


def set_limits(client: SyncPrefectClient, limits: dict[str, int]) -> None:
    """Concurrency limits by task tag. What is not named stays; `gpu` gets the machine's GPUs where it has none yet."""
    from prefect.client.schemas.actions import GlobalConcurrencyLimitCreate, GlobalConcurrencyLimitUpdate

    there = {limit.name for limit in read_limits(client)}
    if "tag:gpu" not in there:
        limits = {"gpu": max(1, gpu_count()), **limits}
    for tag, slots in limits.items():
        name = f"tag:{tag}"
        # No limit is a limit that is switched off, so that `gpu` without one is told from a new server.
        changed = {"active": slots > 0} | ({"limit": slots} if slots else {})
        if name in there:
            client.update_global_concurrency_limit(name, GlobalConcurrencyLimitUpdate.model_validate(changed))
        else:
            wanted = {"name": name, "limit": max(1, slots), "active": slots > 0}
            client.create_global_concurrency_limit(GlobalConcurrencyLimitCreate.model_validate(wanted))


def automations(flows: list[str], resumed: list[UUID], heartbeat_seconds: int) -> list[AutomationCore]:
    """The two automations.

    Args:
        flows: names of the flows whose runs are watched. A run that never sent a heartbeat, as an iteration, is not.
        resumed: deployments whose crashed runs are scheduled again.
        heartbeat_seconds: a run is silent after three times as long; with less, living runs would be hit.
    """
    from prefect.client.schemas.objects import StateType
    from prefect.events import AutomationCore, EventTrigger, Posture

    run: dict[str, str | list[str]] = {"prefect.resource.id": "prefect.flow-run.*"}
    silent = timedelta(seconds=3 * heartbeat_seconds)
    zombies = AutomationCore(
        name=ZOMBIES,
        description=f"A run whose process has not been heard of for {silent.total_seconds():g} s has crashed.",
        tags=["rlstages"],
        trigger=EventTrigger(
            after={"prefect.flow-run.heartbeat"},
            expect={"prefect.flow-run.*"},
            match=run,
            match_related={"prefect.resource.role": "flow", "prefect.resource.name": flows},
            for_each={"prefect.resource.id"},
            posture=Posture.Proactive,
            threshold=1,
            within=silent,
        ),
        actions=[_change(StateType.CRASHED, "Crashed", f"{_SILENT} {silent.seconds} s")],
    )
    ids = [f"prefect.deployment.{deployment}" for deployment in resumed]
    resume = AutomationCore(
        name=RESUME,
        description=f"Silent runs of deployments tagged {AUTO_RESUME} go on; the run itself says when to stop.",
        tags=["rlstages"],
        trigger=EventTrigger(
            expect={"prefect.flow-run.Crashed"},
            match=run | {"prefect.state-message": f"{_SILENT}*"},  # the worker sees to other crashes itself
            match_related={"prefect.resource.role": "deployment", "prefect.resource.id": ids},
            for_each={"prefect.resource.id"},
            posture=Posture.Reactive,
            threshold=1,
        ),
        actions=[_change(StateType.SCHEDULED, "AwaitingRetry", RESUMED)],
    )
    return [zombies, resume]


def _change(state: StateType, name: str, message: str) -> ChangeFlowRunState:
    """Not forced: a run that is over stays so, and one without a deployment, which no worker takes, is left alone."""
    from prefect.events.actions import ChangeFlowRunState

    return ChangeFlowRunState(state=state, name=name, message=message, force=False)


def put_automations(client: SyncPrefectClient, wanted: list[AutomationCore]) -> None:
    """Each automation exactly once, as wanted; whether it is enabled is up to those who see it in the UI.

    One that is as wanted is left alone: an update makes the server forget which runs it waits for.
    """
    for automation in wanted:
        there = client.read_automations_by_name(automation.name)
        if not there:
            client.create_automation(automation)
        elif _essence(there[0]) != _essence(automation):
            client.update_automation(there[0].id, automation.model_copy(update={"enabled": there[0].enabled}))
        for double in there[1:]:
            client.delete_automation(double.id)


def _essence(automation: AutomationCore) -> dict[str, object]:
    parts = automation.model_dump(mode="json", include={"description", "tags", "trigger", "actions"})
    for name in ("after", "expect", "for_each"):
        parts["trigger"][name].sort()  # sets
    parts["trigger"].pop("id", None)
    return parts


def provision(client: SyncPrefectClient, file: PrefectFile, limits: dict[str, int]) -> list[str]:
    """Limits, deployments with their schedules, automations. Returns schedules that were changed back to the file."""
    from prefect.settings import PREFECT_FLOWS_HEARTBEAT_FREQUENCY

    changed = deployments.schedule_differences(client, file)
    set_limits(client, limits)
    made = deployments.deploy(client, file)
    left = deployments.schedule_differences(client, file)
    if left:
        raise StageError("the server did not take the schedules of prefect.yaml", details="\n".join(left))
    resumed = [made[f"{entry.flow().name}/{entry.name}"] for entry in file.deployments if AUTO_RESUME in entry.tags]
    heartbeat = PREFECT_FLOWS_HEARTBEAT_FREQUENCY.value()
    if heartbeat is None:
        raise ConfigError(
            "PREFECT_FLOWS_HEARTBEAT_FREQUENCY has no value", todo="unset it, or set seconds, at least 30"
        )
    flows = sorted({entry.flow().name for entry in file.deployments})
    put_automations(client, automations(flows, resumed, heartbeat))
    return changed


def schedule_differences(path: Path = PREFECT_FILE) -> list[str]:
    """Where the schedules on the server of `PREFECT_API_URL` are not those of the file, a line each."""
    from prefect.client.orchestration import get_client

    with get_client(sync_client=True) as client:
        return deployments.schedule_differences(client, read_file(path))


def worker_reported(client: SyncPrefectClient, name: str, since: datetime) -> bool:
    """Whether the worker of that name has reported since then."""
    workers = client.read_workers_for_work_pool(POOL)
    return any(w.name == name and w.last_heartbeat_time and w.last_heartbeat_time >= since for w in workers)

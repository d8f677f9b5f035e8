"""Flow runs of other deployments, as far as a placed stage needs them: made once, watched, cancelled."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

from rl_core.errors import ConfigError, StageError, WorkerError

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.objects import FlowRun

UNPOLLED_SECONDS = 60.0
"""A queue that no worker has asked for so long has no worker."""
CANCEL_SECONDS = 5.0

_log = logging.getLogger("rlstages.placement")


def client() -> SyncPrefectClient:
    from prefect.client.orchestration import get_client
    from prefect.settings import PREFECT_API_URL

    if not PREFECT_API_URL.value():
        raise ConfigError(
            "execution.placement needs a Prefect server that workers can reach",
            got="the server embedded in this process",
            todo="start one with `rlstages up`, or set PREFECT_API_URL",
        )
    return get_client(sync_client=True)


def deployment(client: SyncPrefectClient, name: str) -> str:
    """`<flow>/<deployment>` of a placement, after a look whether it takes attempts."""
    from prefect.exceptions import ObjectNotFound

    found = name.removeprefix("deployment:")
    try:
        schema = client.read_deployment_by_name(found).parameter_openapi_schema or {}
    except ObjectNotFound as error:
        raise ConfigError(
            f"execution.placement: there is no deployment {found!r}",
            todo="deploy it (`rlstages up`, or `prefect deploy`), or correct the recipe",
        ) from error
    if "attempt" not in schema.get("properties", {}):
        raise ConfigError(
            f"execution.placement: deployment {found!r} cannot take a stage",
            expected="a deployment of the flow `stage`",
        )
    return found


def find(client: SyncPrefectClient, key: str) -> FlowRun | None:
    """The flow run of an idempotency key."""
    from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterIdempotencyKey

    wanted = FlowRunFilterIdempotencyKey(any_=[key])
    found = client.read_flow_runs(flow_run_filter=FlowRunFilter(idempotency_key=wanted))
    return found[0] if found else None


def submit(client: SyncPrefectClient, name: str, parameters: dict[str, Any], key: str) -> FlowRun:
    """A new flow run of a placement's deployment, shown below the flow run that asks for it."""
    from prefect.deployments import run_deployment

    made: FlowRun = run_deployment(  # type: ignore[assignment]
        deployment(client, name), parameters=parameters, timeout=0, idempotency_key=key
    )
    return made


def state(client: SyncPrefectClient, flow_run: FlowRun) -> Any:
    """The flow run's state; null while the server does not answer, which must not cost the work."""
    import httpx
    from prefect.exceptions import ObjectNotFound

    try:
        return client.read_flow_run(flow_run.id).state
    except ObjectNotFound as error:
        raise WorkerError(f"flow run {flow_run.id} is no longer known to Prefect") from error
    except httpx.HTTPError as error:
        _log.warning("Prefect does not answer: %s", error)
        return None


def cancel(client: SyncPrefectClient, flow_run: FlowRun) -> None:
    """Ask whoever executes it to stop; without an answer the flow run is given up as crashed."""
    from prefect.states import Cancelling, Crashed

    client.set_flow_run_state(flow_run.id, Cancelling(message="the run no longer waits for it"))
    deadline = time.monotonic() + CANCEL_SECONDS
    while time.monotonic() < deadline:
        state = client.read_flow_run(flow_run.id).state
        if state is None or state.is_final():
            return
        time.sleep(0.5)
    client.set_flow_run_state(flow_run.id, Crashed(message="it did not end when it was cancelled"), force=True)


def check_polled(client: SyncPrefectClient, flow_run: FlowRun, name: str) -> None:
    """Raise unless some worker asks for flow runs like this one: it may wait long for its turn, but not for nobody."""
    assert flow_run.deployment_id is not None
    deployment = client.read_deployment(flow_run.deployment_id)
    pool, queue = deployment.work_pool_name, deployment.work_queue_name or "default"
    polled = client.read_work_queue_by_name(queue, work_pool_name=pool).last_polled
    since = (time.time() - polled.timestamp()) if polled else None
    if since is None or since > UNPOLLED_SECONDS:
        raise StageError(
            f"no worker takes the flow runs of {name}",
            expected=f"a worker that asks work queue {queue!r} of pool {pool!r}",
            got="nobody ever asked it" if since is None else f"nobody asked it for {since:.0f} s",
            todo=f"start one there: prefect worker start --pool {pool} --work-queue {queue}",
        )

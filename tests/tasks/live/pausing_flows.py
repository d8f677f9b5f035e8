"""Flows that do nothing but wait while their run is paused, one after the other in one process.

    python pausing_flows.py NAME...

A name is that of a run. `leased` runs as a deployment with a concurrency limit, whose slot it holds.
"""

from __future__ import annotations

import sys

from tasks import settings

settings.apply_defaults()

from prefect import flow, get_client  # noqa: E402
from prefect.flow_engine import run_flow  # noqa: E402
from prefect.states import Pending  # noqa: E402

from tasks.live.pausing import wait_while_paused  # noqa: E402
from tasks.session import Session  # noqa: E402
from tasks.storage.store import RunStore  # noqa: E402


@flow(flow_run_name="pausing-{run}", persist_result=False)
def waits(run: str) -> None:
    wait_while_paused(Session(RunStore(settings.runs_dir(), run)))


def run_as_deployment(run: str) -> None:
    """What a worker does with a flow run of a deployment, as far as the server is concerned."""
    with get_client(sync_client=True) as client:
        deployment = client.create_deployment(
            flow_id=client.create_flow(waits), name="limited", concurrency_limit=1, parameter_openapi_schema={}
        )
        flow_run = client.create_flow_run_from_deployment(deployment, name=f"pausing-{run}", parameters={"run": run})
        client.set_flow_run_state(flow_run.id, Pending())
        flow_run = client.read_flow_run(flow_run.id)
        assert flow_run.state is not None and flow_run.state.state_details.deployment_concurrency_lease_id
    run_flow(waits, flow_run=flow_run, parameters={"run": run})


for name in sys.argv[1:]:
    try:
        if name == "leased":
            run_as_deployment(name)
        else:
            waits(name)
    except Exception as error:
        print(f"{name}: {type(error).__name__}: {error}", flush=True)
    else:
        print(f"{name}: went on", flush=True)

"""What `rlstages doctor --fix` does, as a flow: slots, flow runs, processes and folders that crashes left behind."""

from __future__ import annotations

from prefect import flow

from tasks.doctor import examine


@flow(name="sweep-orphans", persist_result=False)
def sweep_orphans(fix: bool = True) -> list[str]:
    """Look for what crashes left behind and repair it; returns a line per finding.

    Args:
        fix: Repair. Off: only look.
    """
    found = examine(fix)
    return [f"{x.kind}: {x.what}" + (", repaired" if x.todo and x.repaired else "") for x in found]

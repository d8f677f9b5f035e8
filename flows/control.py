"""Forms for a run that is going on: change its settings, let it wait, let it go on."""

from __future__ import annotations

from prefect import flow

from tasks.live import adjustments, pausing


@flow(name="adjust", flow_run_name="{run}/adjust", persist_result=False)
def adjust(run: str, changes: list[str], why: str = "") -> list[str]:
    """Change settings of a run from its next iteration on.

    Args:
        run: name of the run.
        changes: one `key=value` an item, such as `learner.lr=5e-6`.
        why: reason, for those who read the run later.
    """
    return [str(change) for change in adjustments.adjust(run, changes, why)]


@flow(name="pause", flow_run_name="{run}/pause", persist_result=False)
def pause(run: str, why: str = "") -> None:
    """Let a run wait before its next iteration until it is resumed.

    Args:
        run: name of the run.
        why: reason, for those who see it wait.
    """
    pausing.pause(run, why)


@flow(name="resume", flow_run_name="{run}/resume", persist_result=False)
def resume(run: str) -> None:
    """Let a paused run go on.

    Args:
        run: name of the run.
    """
    pausing.resume(run)

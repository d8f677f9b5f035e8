"""One stage of one iteration, again: the form of a rerun in the Prefect UI."""

from __future__ import annotations

from typing import Any

from prefect import flow

from flows.training_run import step
from rl_core.execution import StageName
from rl_core.stages import stages_from
from tasks.session import open_session
from tasks.settings import runs_dir
from tasks.summary import generation_progress


@flow(name="stage", flow_run_name="{run}/it{iteration:04d}/from-{from_stage}", persist_result=False)
def stage(
    run: str, iteration: int, from_stage: StageName, overrides: list[str] | None = None, force: bool = False
) -> dict[str, Any]:
    """Execute one stage of one iteration again; what follows it runs only if its inputs changed (`force`: always)."""
    with open_session(run, runs_dir()) as session, generation_progress():
        position = session.iterations.position(iteration)
        session.check_rerun(iteration, from_stage, overrides)
        execute = stages_from(from_stage) if force else [from_stage]
        following = step(session, position, [*execute], overrides)
        stale = session.iterations.is_stale(following)
        return {"run": run, "policy": following.policy.model_dump(), "stale_after": iteration if stale else None}

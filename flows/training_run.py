"""A training run: iterations one after the other, from the first that is not complete."""

from __future__ import annotations

from typing import Any

from prefect import flow

from flows.iteration import iteration
from rl_core.errors import RunError
from rl_core.execution import StageName
from rl_core.manifest import Ref
from rl_core.stages import stages_from
from tasks.evaluate import evaluate
from tasks.iterations import Position
from tasks.launch import continue_or_prepare
from tasks.session import Session, open_session
from tasks.settings import runs_dir, without_heartbeat
from tasks.summary import generation_progress


@flow(name="training-run", flow_run_name="{run}", persist_result=False)
def training_run(run: str, overrides: list[str] | None = None) -> dict[str, Any]:
    """Start or continue a run, by its name or by a recipe: what is complete stays, what is stale or missing is made."""
    run = continue_or_prepare(run, overrides or [])
    with open_session(run, runs_dir()) as session, generation_progress():
        position = session.iterations.resume_position()
        began_at = position.iteration
        if position.iteration == 0:
            evaluate(run, -1, train=session.base_model)
        while position.iteration < session.config.iterations:
            position = _step(session, position)
        return {
            "run": run,
            "began_at": began_at,
            "iterations": position.iteration,
            "policy": position.policy.model_dump(),
        }


@flow(name="rerun", flow_run_name="{run}/it{iteration:04d}/from-{from_stage}", persist_result=False)
def rerun(
    run: str, iteration: int, from_stage: StageName, overrides: list[str] | None = None, force: bool = False
) -> dict[str, Any]:
    """Execute one stage of one iteration again; what follows it runs only if its inputs changed (`force`: always)."""
    with open_session(run, runs_dir()) as session, generation_progress():
        position = session.iterations.position(iteration)
        session.check_rerun(iteration, from_stage, overrides)
        execute = stages_from(from_stage) if force else [from_stage]
        following = _step(session, position, [*execute], overrides)
        stale = session.iterations.is_stale(following)
        return {"run": run, "policy": following.policy.model_dump(), "stale_after": iteration if stale else None}


def _step(
    session: Session, at: Position, execute: list[str] | None = None, overrides: list[str] | None = None
) -> Position:
    # The iteration is over in seconds: its own heartbeat would cost one and say nothing the parent's does not.
    with without_heartbeat():
        made = iteration(session.store.name, at.iteration, at.policy, at.cursor, execute, overrides)
    if (made["run"], made["iteration"]) != (session.store.name, at.iteration):
        raise RunError(
            "Prefect returned the result of another iteration",
            expected=f"{session.store.name} iteration {at.iteration}",
            got=f"{made['run']} iteration {made['iteration']}",
        )
    return Position(at.iteration + 1, Ref.model_validate(made["policy"]), made["cursor"])

"""One stage of one iteration, again: the form of a rerun in the Prefect UI, and the flow that placed stages run in."""

from __future__ import annotations

from typing import Annotated, Any

from prefect import flow
from prefect.runtime import flow_run
from pydantic import Field

from flows.training_run import step
from rl_core.execution import StageName
from rl_core.manifest import Ref
from rl_core.stages import STAGES, stages_from
from tasks.display.summary import generation_progress
from tasks.iterations import Position
from tasks.placement.attempt import perform_attempt
from tasks.rerun import stages_to_make
from tasks.session import Session, open_session
from tasks.settings import runs_dir, without_heartbeat
from tasks.stage import Mode, StageResult, load_stage


def _name() -> str:
    given = flow_run.parameters
    where = f"{given['run']}/" + ("base" if given["iteration"] < 0 else f"it{given['iteration']:04d}")
    if given.get("attempt"):
        return f"{where}/{given['from_stage']}-placed"
    return f"{where}/from-{given['from_stage']}" + (f"-to-{given['to_stage']}" if given.get("to_stage") else "")


@flow(name="stage", flow_run_name=_name, persist_result=False)
def stage(
    run: str,
    iteration: Annotated[int, Field(ge=-1)],
    from_stage: StageName,
    to_stage: StageName | None = None,
    overrides: list[str] | None = None,
    force: bool = False,
    attempt: str | None = None,
) -> dict[str, Any]:
    """Execute one stage of a past iteration again; what follows it runs only where its inputs changed.

    Args:
        run: Name of the run, as its folder below runs/.
        iteration: Number of the iteration, from 0.
        from_stage: First stage to execute; its new output lies beside the old one.
        to_stage: Last stage to execute. Empty: all of them. The rest is made by the next training run.
        overrides: Settings of this iteration from now on, as `learner.lr=1e-5`. Empty: those it has; []: none.
        force: Execute all stages after the first one too, changed inputs or not.
        attempt: Leave this empty. A training run that places this stage on another machine fills it in.
    """
    if attempt is not None:
        return perform_attempt(run, iteration, from_stage, attempt)
    with open_session(run, runs_dir()) as session, generation_progress(), without_heartbeat():
        position = session.iterations.position(iteration)
        stages = stages_to_make(session, iteration, from_stage, to_stage, overrides)
        execute = [*stages_from(from_stage)] if force else [from_stage]
        if stages[-1] != session.iterations.stages_due(iteration)[-1]:
            _make_part(session, position, stages, execute, overrides)
            return {"run": run, "made_to": stages[-1], "stale_after": None}
        following = step(session, position, [*execute], overrides)
        stale = session.iterations.is_stale(following)
        return {"run": run, "policy": following.policy.model_dump(), "stale_after": iteration if stale else None}


def _make_part(
    session: Session, at: Position, stages: list[StageName], execute: list[StageName], overrides: list[str] | None
) -> None:
    """The first stages of an iteration. Its record stays open, so that the next training run makes the rest."""
    session.iterations.begin(at, overrides)
    made: dict[str, StageResult | Ref] = {"policy": at.policy}
    for name in stages:
        mode: Mode = "execute" if name in execute else "reuse"
        inputs = {read: made[read] for read in STAGES[name].reads}
        made[name] = load_stage(name)(session.store.name, at.iteration, mode, **inputs)

"""A training run: iterations one after the other, from the first that is not complete."""

from __future__ import annotations

from typing import Any

from prefect import flow, get_run_logger, tags

from flows.iteration import iteration
from rl_core.errors import RunError
from rl_core.manifest import Ref
from tasks.display.summary import generation_progress, label_flow_run
from tasks.evaluate import evaluate
from tasks.iterations import Position
from tasks.launch import continue_or_prepare
from tasks.live.adjustments import publish_adjustments
from tasks.live.pausing import wait_while_paused
from tasks.servers.autoresume import counted_attempt
from tasks.session import Session, open_session
from tasks.settings import runs_dir, without_heartbeat
from tasks.slots import ITERATION_TAG


@flow(name="training-run", flow_run_name="{run}", persist_result=False)
def training_run(run: str, overrides: list[str] | None = None) -> dict[str, Any]:
    """Start or continue a run, by its name or by a recipe: what is complete stays, what is stale or missing is made.

    Args:
        run: Name of a run, or a recipe: its short name as in deployments/recipes, or a file.
        overrides: Settings on top of the recipe, as `learner.lr=1e-5` or `name=second`; as --set of the command line.
    """
    with counted_attempt(run, overrides or []):
        run = continue_or_prepare(run, overrides or [])
        label_flow_run(run)
        # An iteration is over in seconds: its own heartbeat would cost one and say nothing the parent's does not.
        with open_session(run, runs_dir()) as session, generation_progress(), without_heartbeat():
            return go_on(session)


def go_on(session: Session) -> dict[str, Any]:
    """All iterations of an open run that are not complete."""
    position = session.iterations.resume_position()
    began_at = position.iteration
    if position.iteration == 0:
        wait_while_paused(session)
        evaluate(session.store.name, -1, train=session.base_model)
    while position.iteration < session.config.iterations:
        wait_while_paused(session)
        publish_adjustments(session)
        position = step(session, position)
    publish_adjustments(session)
    return {
        "run": session.store.name,
        "began_at": began_at,
        "iterations": position.iteration,
        "policy": position.policy.model_dump(),
    }


def step(
    session: Session, at: Position, execute: list[str] | None = None, overrides: list[str] | None = None
) -> Position:
    """One iteration from where it starts; returns where the next one starts."""
    with tags(f"run:{session.store.name}", f"{ITERATION_TAG}{at.iteration}"):
        made = iteration(session.store.name, at.iteration, at.policy, at.cursor, execute, overrides)
    if (made["run"], made["iteration"]) != (session.store.name, at.iteration):
        raise RunError(
            "Prefect returned the result of another iteration",
            expected=f"{session.store.name} iteration {at.iteration}",
            got=f"{made['run']} iteration {made['iteration']}",
        )
    get_run_logger().info("it%04d of %d: %s", at.iteration, session.config.iterations, made["summary"])
    return Position(at.iteration + 1, Ref.model_validate(made["policy"]), made["cursor"])

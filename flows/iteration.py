"""One RL iteration: six stages, in order. Every call is a Prefect task; what is done already is reused."""

from __future__ import annotations

from typing import Any

from prefect import flow

from rl_core.manifest import Ref
from tasks.advantage import advantage
from tasks.display.summary import publish_summary
from tasks.evaluate import evaluate
from tasks.generate import generate
from tasks.iterations import Position
from tasks.register import register
from tasks.score import score
from tasks.session import current_session
from tasks.stage import Mode
from tasks.train import train


@flow(name="iteration", flow_run_name="{run}/it{iteration:04d}", persist_result=False)
def iteration(
    run: str,
    iteration: int,
    policy: Ref,
    cursor: int,
    execute: list[str] | None = None,
    overrides: list[str] | None = None,
) -> dict[str, Any]:
    """Policy `iteration` in, policy `iteration + 1` out.

    Stages named in `execute` run even if their output is there; all others run only if their inputs or config changed.
    """
    session = current_session(run)
    session.iterations.begin(Position(iteration, policy, cursor), overrides)
    due = session.iterations.stages_due(iteration)

    def mode(stage: str) -> Mode:
        return "execute" if stage in (execute or ()) else "reuse"

    trajectories = generate(run, iteration, mode("generate"), policy=policy)
    rewards = score(run, iteration, mode("score"), generate=trajectories)
    advantages = advantage(run, iteration, mode("advantage"), generate=trajectories, score=rewards)
    trained = train(run, iteration, mode("train"), policy=policy, generate=trajectories, advantage=advantages)
    results = [trajectories, rewards, advantages, trained]
    if "evaluate" in due:
        evaluated = evaluate(run, iteration, mode("evaluate"), train=trained)
        registered = register(run, iteration, mode("register"), train=trained, evaluate=evaluated)
        results += [evaluated, registered]
    summary = publish_summary(session, iteration, results)  # before it is complete: after a kill it is made again
    session.end_iteration(iteration)
    return {
        "run": run,
        "iteration": iteration,
        "policy": trained.ref.model_dump(),
        "cursor": trajectories.state["cursor"],
        "reused": [result.stage for result in results if result.reused],
        "summary": summary,
    }

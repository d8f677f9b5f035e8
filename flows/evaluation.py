"""Evaluate any registered version again: with more problems, samples or another judge."""

from __future__ import annotations

from typing import Any

from prefect import flow

from tasks.evaluate import evaluate
from tasks.session import open_session
from tasks.settings import runs_dir, tracking_uri
from tasks.tracking.registry import registered_policy


@flow(name="evaluation", flow_run_name="{model}/{version}", persist_result=False)
def evaluation(model: str, version: str = "champion", overrides: list[str] | None = None) -> dict[str, Any]:
    """Evaluate a version (number or alias) of a registered model with changed settings; returns place and metrics.

    The rows lie beside those of the run that made the version and do not replace them.

    Args:
        model: Name of the registered model; a run registers under its own name unless its recipe says otherwise.
        version: Version number, or an alias: champion, challenger, previous_champion.
        overrides: Settings of this evaluation, as `evaluate.problems=500` or `evaluate.samples=8`.
    """
    run, policy, checkpoint = registered_policy(tracking_uri(), model, version)
    with open_session(run, runs_dir()) as session:
        session.iterations.begin_evaluation(policy, overrides or [])
        result = evaluate(run, policy - 1, train=checkpoint)
        return {"run": run, "policy": policy, "folder": result.folder, "metrics": result.metrics}

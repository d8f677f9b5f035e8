"""Evaluate any checkpoint of a run again, for instance with more problems or samples."""

from __future__ import annotations

from typing import Any

from prefect import flow

from tasks.evaluate import evaluate
from tasks.session import open_session, runs_dir


@flow(name="evaluation", flow_run_name="{run}/policy{policy:04d}", persist_result=False)
def evaluation(run: str, policy: int, overrides: list[str] | None = None) -> dict[str, Any]:
    """Evaluate policy number `policy` of a run (0 is the model it started from) and return the metrics."""
    with open_session(run, runs_dir()) as session:
        session.iterations.begin_evaluation(policy, overrides or [])
        result = evaluate(run, policy - 1, train=session.iterations.position(policy).policy)
        return {"run": run, "policy": policy, "folder": result.folder, "metrics": result.metrics}

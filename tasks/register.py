"""Stage 6: make policy k+1 a version in MLflow's registry and decide whether it becomes the champion."""

from __future__ import annotations

from rl_core.engines.base import Progress
from rl_core.schemas import DECISIONS
from rl_core.seeds import seed
from tasks.settings import runs_dir
from tasks.stage import Outcome, StageContext, stage
from tasks.storage.tables import write_table
from tasks.tracking.gate import Candidate
from tasks.tracking.registry import register_policy
from tasks.tracking.tracker import Tracker


@stage("register")
def register(context: StageContext, tracker: Tracker, progress: Progress) -> Outcome:
    """Register the checkpoint as challenger, and as champion if it is not worse on the same problems."""
    config = context.config
    candidate = Candidate(
        model_name=config.model_name,
        run=config.name,
        iteration=context.iteration,
        checkpoint=context.folder("train"),
        digest=context.inputs["train"].digest,
        evaluation=context.folder("evaluate"),
        evaluation_digest=context.inputs["evaluate"].digest,
        max_completion_tokens=config.evaluate.max_completion_tokens or config.generate.max_completion_tokens,
        seed=seed(config.seed, "register", 0),
    )
    made = register_policy(tracker, candidate, config.registry, runs_dir() / "registry.lock")
    written = write_table(context.output / "part-0000.parquet", [made.decision], DECISIONS)
    progress(1, 1)
    return Outcome(
        rows=written,
        state={"alias": made.alias, "reason": made.decision["reason"]},
        measured={"model_name": config.model_name, "version": made.version, "mlflow_run_id": tracker.run_id},
    )

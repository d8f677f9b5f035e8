"""Stage 4: take the optimizer steps of one iteration: policy k in, policy k+1 out."""

from __future__ import annotations

from typing import Any

from rl_core.advantages import OUTSIDE_DENOMINATORS
from rl_core.algorithms import resolve
from rl_core.config import RunConfig
from rl_core.engines.base import Progress, StepPlan, StepStats, TrainRow
from rl_core.errors import DataError
from rl_core.schemas import ADVANTAGES, TRAIN_STEPS, TRAJECTORIES
from rl_core.seeds import seed
from tasks.stage import Outcome, StageContext, stage
from tasks.storage.tables import read_table, write_table
from tasks.worker import Services


@stage("train")
def train(context: StageContext, services: Services, progress: Progress) -> Outcome:
    """Update the policy on the iteration's trajectories and advantages."""
    config = context.config
    rows = _rows(context)
    learner = services.learner(context.inputs["policy"], config)
    needs = resolve(config.algorithm, config.generate).needs(config.learner)
    learner.reference = services.reference(context.base_model, config) if needs.ref_in_loss else None
    steps = list(learner.update(rows, step_plan(config, context.iteration), progress))
    learner.save(context.output)
    written = write_table(context.output / "part-0000.parquet", _step_rows(steps), TRAIN_STEPS)
    applied = float(sum(stats.applied for stats in steps))
    return Outcome(rows=written, metrics=_iteration_values(steps) | {"learner/steps_applied": applied})


def _rows(context: StageContext) -> list[TrainRow]:
    columns = ["group_id", "sample_id", "prompt_ids", "completion_ids", "action_mask", "sampler_logprobs"]
    trajectories = read_table(context.folder("generate"), TRAJECTORIES).select(columns).to_pylist()
    table = read_table(context.folder("advantage"), ADVANTAGES).to_pylist()
    advantages = {(row["group_id"], row["sample_id"]): row for row in table}
    if len(table) != len(advantages) or advantages.keys() != {(r["group_id"], r["sample_id"]) for r in trajectories}:
        raise DataError(
            "advantages and trajectories do not have the same rows",
            expected=f"the keys of {len(trajectories)} trajectories, each once",
            got=f"{len(table)} advantages",
            todo="rerun from advantage",
        )
    rows = []
    for row in trajectories:
        found = advantages[row["group_id"], row["sample_id"]]
        if found["drop_reason"] in OUTSIDE_DENOMINATORS:
            row = row | {"action_mask": [False] * len(row["completion_ids"])}
        rows.append(train_row(row, found["advantage"], found["keep"]))
    return rows


def train_row(row: dict[str, Any], advantage: float, keep: bool) -> TrainRow:
    """A row of the trajectories table as the learner takes it."""
    return TrainRow(
        group_id=row["group_id"],
        sample_id=row["sample_id"],
        prompt_ids=row["prompt_ids"],
        completion_ids=row["completion_ids"],
        action_mask=row["action_mask"],
        advantage=advantage,
        sampler_logprobs=row["sampler_logprobs"],
        keep=keep,
    )


def step_plan(config: RunConfig, iteration: int) -> StepPlan:
    """The update of one iteration, as the config wants it."""
    execution, learner = config.execution, config.learner
    return StepPlan(
        algorithm=config.algorithm,
        learner=learner,
        temperature=config.generate.temperature,
        max_completion_tokens=config.generate.max_completion_tokens,
        total_steps=config.iterations * learner.update_epochs * learner.minibatches,
        seed=seed(config.seed, "train", iteration),
        micro_batch_tokens=execution.micro_batch_tokens,
        logit_chunk_tokens=execution.logit_chunk_tokens,
        gradient_checkpointing=execution.gradient_checkpointing,
    )


def _step_rows(steps: list[StepStats]) -> list[dict[str, Any]]:
    return [
        {"step": stats.step, "applied": stats.applied, "metric": name, "value": value}
        for stats in steps
        for name, value in sorted(stats.metrics.items())
    ]


def _iteration_values(steps: list[StepStats]) -> dict[str, float | None]:
    """One value a metric over the steps where it is defined: extremes of `_max` and `_min`, else the mean."""
    names = sorted({name for stats in steps for name in stats.metrics})
    result: dict[str, float | None] = {}
    for name in names:
        values = [value for stats in steps if (value := stats.metrics.get(name)) is not None]
        if not values:
            result[name] = None
        elif name.endswith(("_max", "_min")):
            result[name] = max(values) if name.endswith("_max") else min(values)
        else:
            result[name] = sum(values) / len(values)
    return result

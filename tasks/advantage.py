"""Stage 3: turn rewards into advantages, group by group."""

from __future__ import annotations

from typing import cast

import polars as pl

from rl_core.advantages import advantage_table, reward_metrics, sequence_kl
from rl_core.algorithms import Algorithm, resolve
from rl_core.engines.base import Progress
from rl_core.errors import DataError
from rl_core.schemas import ADVANTAGES, TRAJECTORIES, rewards_schema
from tasks.stage import Outcome, StageContext, stage
from tasks.storage.tables import read_table, write_table
from tasks.worker import Services

_KEY = ["group_id", "sample_id"]


@stage("advantage")
def advantage(context: StageContext, services: Services, progress: Progress) -> Outcome:
    """Compute the advantage of every completion and say which ones carry no signal."""
    config = context.config
    algorithm = resolve(config.algorithm, config.generate)
    schema = rewards_schema([reward.name for reward in config.rewards])
    rewards = cast(pl.DataFrame, pl.from_arrow(read_table(context.folder("score"), schema)))
    trajectories = _lengths(context, algorithm)
    if not trajectories.select(_KEY).sort(_KEY).equals(rewards.select(_KEY).sort(_KEY)):
        raise DataError(
            "rewards and trajectories do not have the same rows",
            expected=f"the keys of {len(trajectories)} trajectories, each once",
            got=f"{len(rewards)} rewards, {len(trajectories.join(rewards, on=_KEY, how='semi'))} trajectories have one",
            todo="rerun from score",
        )
    frame = trajectories.join(rewards.select([*_KEY, "reward"]), on=_KEY, how="inner")
    table = advantage_table(frame, algorithm)
    written = write_table(context.output / "part-0000.parquet", table.to_dicts(), ADVANTAGES)
    progress(written, written)
    return Outcome(rows=written, metrics=reward_metrics(frame, table))


def _lengths(context: StageContext, algorithm: Algorithm) -> pl.DataFrame:
    columns = [*_KEY, "truncated", "action_mask", "sampler_logprobs", "ref_logprobs"]
    table = read_table(context.folder("generate"), TRAJECTORIES).select(columns)
    frame = cast(pl.DataFrame, pl.from_arrow(table.select([*_KEY, "truncated"])))
    rows = table.to_pylist()
    frame = frame.with_columns(
        pl.Series("completion_tokens", [sum(row["action_mask"]) for row in rows], dtype=pl.Int64)
    )
    if algorithm.needs_kl_penalty:
        estimator = algorithm.kl.resolved_estimator
        penalties = [
            sequence_kl(row["sampler_logprobs"], row["ref_logprobs"], row["action_mask"], estimator) for row in rows
        ]
        frame = frame.with_columns(pl.Series("kl_penalty", penalties, dtype=pl.Float64))
    return frame

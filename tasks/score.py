"""Stage 2: run the reward functions on every completion, in processes that can be killed."""

from __future__ import annotations

import json
from typing import Any

from rl_core.config import RunConfig
from rl_core.engines.base import Progress
from rl_core.errors import RewardContractError, RewardFailedError
from rl_core.schemas import TRAJECTORIES, rewards_schema
from tasks.scoring.pool import RowScore
from tasks.stage import Outcome, StageContext, stage
from tasks.storage.tables import read_table, write_table
from tasks.worker import Services

_COLUMNS = ["group_id", "sample_id", "prompt_messages", "completion_ids", "truncated", "text", "env_data"]


def score_inputs(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of a trajectories table in the form that `RewardPool.score` takes; a column one row has, all have."""
    data = [json.loads(row["env_data"]) for row in rows]
    columns = dict.fromkeys(name for item in data for name in item)
    return [
        {**{name: row[name] for name in _COLUMNS[:-1]}, "data": {**columns, **item}}
        for row, item in zip(rows, data, strict=True)
    ]


@stage("score")
def score(context: StageContext, services: Services, progress: Progress) -> Outcome:
    """Score every completion with every reward; a row without a score is null with a reason."""
    config = context.config
    names = [reward.name for reward in config.rewards]
    schema = rewards_schema(names)
    table = read_table(context.folder("generate"), TRAJECTORIES).select(_COLUMNS)
    rows = score_inputs(table.to_pylist())
    known = _scored_before(context, names)
    missing = [row for row in rows if (row["group_id"], row["sample_id"]) not in known]
    pool = services.rewards(config)
    check_sources(pool.digests, context)
    scores = pool.score(missing, on_error=config.scoring.on_error)
    progress(len(rows), len(rows))
    fresh = {
        (row["group_id"], row["sample_id"]): _reward_row(row, score, config)
        for row, score in zip(missing, scores, strict=True)
    }
    found = [known.get(key) or fresh[key] for key in ((row["group_id"], row["sample_id"]) for row in rows)]
    check_unscored(found, config)
    written = write_table(context.output / "part-0000.parquet", found, schema)
    metrics: dict[str, float | None] = {}
    for name in names:
        values = [row[f"reward_{name}"] for row in found if row[f"reward_{name}"] is not None]
        metrics[f"reward/{name}_mean"] = sum(values) / len(values) if values else None
        metrics[f"reward/{name}_unscored_frac"] = 1 - len(values) / len(found)
    return Outcome(
        rows=written,
        metrics=metrics,
        measured={"reward_seconds": dict(pool.seconds), "rows_scored": len(missing), "rows_kept": len(known)},
    )


def check_sources(digests: dict[str, str], context: StageContext) -> None:
    """The fingerprint names the source of each reward: the processes must run that very source."""
    changed = [name for name, digest in digests.items() if digest != context.facts["rewards"][name]]
    if changed:
        raise RewardContractError(
            f"the source of reward {', '.join(changed)} changed after the run was opened",
            expected="one source for the fingerprint and the scores",
            todo="run again: the new source gives a new score folder",
        )


def _reward_row(row: dict[str, Any], score: RowScore, config: RunConfig) -> dict[str, Any]:
    result: dict[str, Any] = {"group_id": row["group_id"], "sample_id": row["sample_id"]}
    for reward in config.rewards:
        result[f"reward_{reward.name}"] = score.values[reward.name]
        result[f"reason_{reward.name}"] = score.reasons[reward.name]
    return result | {"reward": score.total, "status": "unscored" if score.total is None else "ok"}


def _scored_before(context: StageContext, names: list[str]) -> dict[tuple[int, int], dict[str, Any]]:
    """On a rerun of a scoring that left rows unscored: the rows it did score. A complete one is done afresh."""
    if context.previous is None:
        return {}
    rows = read_table(context.previous, rewards_schema(names)).to_pylist()
    scored = {(row["group_id"], row["sample_id"]): row for row in rows if row["status"] == "ok"}
    return scored if len(scored) < len(rows) else {}


def check_unscored(rows: list[dict[str, Any]], config: RunConfig) -> None:
    """Refuse a rewards table with more rows without a total than `scoring.max_unscored_fraction`."""
    bad = [row for row in rows if row["status"] != "ok"]
    if not bad:
        return
    first = bad[0]
    name = next((r.name for r in config.rewards if first[f"reward_{r.name}"] is None), config.rewards[0].name)
    where = f"reward {name}, group {first['group_id']}, sample {first['sample_id']}"
    reason = first[f"reason_{name}"] or "the weighted sum is not finite"
    limit = config.scoring.max_unscored_fraction
    if len(bad) > limit * len(rows):
        raise RewardFailedError(
            f"{len(bad)} of {len(rows)} completions have no score; the first: {where}",
            expected=f"at most {limit:.0%} without a score (scoring.max_unscored_fraction)",
            got=reason,
            todo="mend the reward or raise the limit",
        )

"""Stage 5: answer the held-out problems with policy k+1 and judge the answers."""

from __future__ import annotations

from typing import Any

from pydantic import JsonValue

from rl_core.config import RunConfig
from rl_core.engines.base import Progress
from rl_core.errors import RewardFailedError
from rl_core.evaluation import avg_at_k, bootstrap_interval, mean_pass_at_k, problem_means, wilson
from rl_core.schemas import EVALUATION
from rl_core.seeds import seed
from tasks.rollout import Encoded, encode_prompts, environment_of, sample
from tasks.score import check_sources, score_inputs
from tasks.stage import Outcome, StageContext, stage
from tasks.storage.tables import write_table
from tasks.worker import Services


@stage("evaluate")
def evaluate(context: StageContext, services: Services, progress: Progress) -> Outcome:
    """Answer the held-out problems greedily and, if asked, by sampling; judge every answer."""
    config, settings = context.config, context.config.evaluate
    policy_ref = context.inputs["train"]
    policy = services.policy(policy_ref, config)
    problems, _, _ = encode_prompts(
        environment_of(context, services),
        policy,
        config,
        "heldout",
        start=0,
        count=settings.problems,
        max_new=settings.max_completion_tokens or config.generate.max_completion_tokens,
    )
    sampler = services.engines(config).sampler(config)

    def row_seed(problem: Encoded, index: int) -> int:
        # The same for every iteration: challenger and champion answer under equal random numbers.
        return seed(config.seed, "evaluate", 0, problem.position, index)

    rows: list[dict[str, Any]] = []
    if settings.greedy:
        greedy = sample(sampler, policy, problems, row_seed, 1, 0.0, progress)
        rows += [row | {"mode": "greedy"} for row in greedy]
    if settings.samples:
        sampled = sample(sampler, policy, problems, row_seed, settings.samples, settings.temperature, progress)
        shift = 1 if settings.greedy else 0
        rows += [row | {"mode": "sample", "sample_id": row["sample_id"] + shift} for row in sampled]
    rows.sort(key=lambda row: (row["group_id"], row["sample_id"]))
    seconds = _judge(rows, context, services)
    for row in rows:
        row["policy_digest"] = policy_ref.digest
    written = write_table(context.output / "part-0000.parquet", rows, EVALUATION)
    return Outcome(rows=written, metrics=evaluation_metrics(rows, config), measured={"reward_seconds": seconds})


def _judge(rows: list[dict[str, Any]], context: StageContext, services: Services) -> dict[str, JsonValue]:
    """Add score, reason and correct to every row; an answer that could not be scored is not correct."""
    config = context.config
    name = config.judge.name
    pool = services.rewards(config)
    check_sources(pool.digests, context)
    scores = pool.score(score_inputs(rows), only=[name])
    for row, score in zip(rows, scores, strict=True):
        value = score.values[name]
        row |= {"score": value, "reason": score.reasons[name]}
        row["correct"] = value is not None and value >= config.evaluate.correct_at
    unscored = [row for row in rows if row["score"] is None]
    if len(unscored) > config.scoring.max_unscored_fraction * len(rows):
        # A judge that fails on most answers says nothing about the policy.
        raise RewardFailedError(
            f"{len(unscored)} of {len(rows)} held-out answers have no score",
            expected=f"at most {config.scoring.max_unscored_fraction:.0%} (scoring.max_unscored_fraction)",
            got=str(unscored[0]["reason"]).strip().splitlines()[0],
            todo="mend the reward that judges, or raise the limit",
        )
    return dict(pool.seconds)


def evaluation_metrics(rows: list[dict[str, Any]], config: RunConfig) -> dict[str, float | None]:
    """Accuracy with its intervals: Wilson for the greedy answers, bootstrap by problem for the sampled ones."""
    metrics: dict[str, float | None] = {
        "eval/truncated_frac": sum(row["truncated"] for row in rows) / len(rows),
        "eval/unscored_frac": sum(row["score"] is None for row in rows) / len(rows),
    }
    greedy = [row["correct"] for row in rows if row["mode"] == "greedy"]
    if greedy:
        interval = wilson(sum(greedy), len(greedy))
        metrics["eval/greedy_accuracy"] = sum(greedy) / len(greedy)
        metrics["eval/greedy_low"], metrics["eval/greedy_high"] = interval or (None, None)
    sampled = [row for row in rows if row["mode"] == "sample"]
    if sampled:
        metrics |= _sampled_metrics(sampled, config)
    return metrics


def _sampled_metrics(rows: list[dict[str, Any]], config: RunConfig) -> dict[str, float | None]:
    k = config.evaluate.samples
    ids, correct = [row["group_id"] for row in rows], [row["correct"] for row in rows]
    mean, passed = avg_at_k(ids, [float(value) for value in correct]), mean_pass_at_k(ids, correct, k)
    means = list(problem_means(ids, [float(value) for value in correct]).values())
    interval = bootstrap_interval(means, seed=0)
    low, high = interval or (None, None)
    return {
        f"eval/avg_at_{k}": mean.mean if mean else None,
        f"eval/avg_at_{k}_se": mean.se if mean else None,
        f"eval/avg_at_{k}_low": low,
        f"eval/avg_at_{k}_high": high,
        f"eval/pass_at_{k}": passed.mean if passed else None,
    }

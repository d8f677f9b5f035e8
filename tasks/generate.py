"""Stage 1: sample a group of completions for each of the next prompts of the run."""

from __future__ import annotations

import time
from typing import Any

from rl_core.engines.base import Progress
from rl_core.schemas import TRAJECTORIES
from rl_core.seeds import seed
from tasks.rollout import Encoded, encode_prompts, environment_of, sample
from tasks.stage import Outcome, StageContext, stage
from tasks.storage.tables import write_table
from tasks.worker import Services


@stage("generate")
def generate(context: StageContext, services: Services, progress: Progress) -> Outcome:
    """Sample `group_size` completions for each of the next `prompts_per_iteration` prompts."""
    config, settings = context.config, context.config.generate
    policy_ref = context.inputs["policy"]
    policy = services.policy(policy_ref, config)
    prompts, cursor, dropped = encode_prompts(
        environment_of(context, services),
        policy,
        config,
        "train",
        start=context.facts["cursor"],
        count=settings.prompts_per_iteration,
        max_new=settings.max_completion_tokens,
    )
    started = time.monotonic()

    def row_seed(prompt: Encoded, index: int) -> int:
        return seed(config.seed, "generate", context.iteration, prompt.position, index)

    sampler = services.engines(config).sampler(config)
    rows = sample(sampler, policy, prompts, row_seed, settings.group_size, settings.temperature, progress)
    seconds = time.monotonic() - started
    for row in rows:
        row |= {"policy_version": context.iteration, "policy_digest": policy_ref.digest}
    if context.config.algorithm.kl.coef > 0 and context.config.algorithm.kl.place == "reward":
        _add_reference_logprobs(rows, context, services)
    written = write_table(context.output / "part-0000.parquet", rows, TRAJECTORIES)
    tokens = sum(len(row["completion_ids"]) for row in rows)
    return Outcome(
        rows=written,
        metrics={
            "completion/tokens_total": float(tokens),
            "prompt/tokens_mean": sum(len(p.ids) for p in prompts) / len(prompts),
            "prompt/dropped": float(dropped),
        },
        state={"cursor": cursor},
        measured={"sample_seconds": seconds, "tokens_per_second": tokens / seconds if seconds > 0 else None},
    )


def _add_reference_logprobs(rows: list[dict[str, Any]], context: StageContext, services: Services) -> None:
    """Log-probs of the sampled tokens under the frozen reference, for a KL term in the reward."""
    from tasks.train import step_plan, train_row

    config, policy = context.config, context.inputs["policy"]
    learner = services.scorer(policy, config)
    learner.reference = services.reference(context.base_model, config)
    found = learner.logprobs(
        [train_row(row, advantage=0.0, keep=True) for row in rows],
        step_plan(config, context.iteration),
        reference=True,
    )
    for row, values in zip(rows, found, strict=True):
        row["ref_logprobs"] = values

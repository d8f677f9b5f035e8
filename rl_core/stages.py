"""The six stages as values: name, version, what each reads and writes, and which part of the config decides its output.

A stage's version is raised when its maths changes, so that old outputs are not taken for new ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pydantic import JsonValue

from rl_core import schemas
from rl_core.algorithms import resolve
from rl_core.config import RunConfig
from rl_core.execution import StageName

Facts = dict[str, Any]
"""What the config only names: digests of `environment`, `reference`, `rewards` (by name), and the prompt `cursor`."""

Identity = Callable[[RunConfig, Facts], dict[str, JsonValue]]


@dataclass(frozen=True)
class StageSpec:
    """One stage.

    Attributes:
        name: file name in `tasks/`, folder name on disk, task name in Prefect.
        version: raised when the same inputs give another output.
        reads: inputs by name: `policy` is policy k, every other name is the stage that wrote it.
        schema: schema of its `part-*.parquet` files.
        identity: the part of the config (and facts) that decides the output.
        tags: built-in resource tags.
        in_worker: runs in the worker process; else in the flow process.
    """

    name: StageName
    version: int
    reads: tuple[str, ...]
    schema: Callable[[RunConfig], pa.Schema]
    identity: Identity
    tags: tuple[str, ...]
    in_worker: bool = True


def _generate(config: RunConfig, facts: Facts) -> dict[str, JsonValue]:
    in_reward = config.algorithm.kl.coef > 0 and config.algorithm.kl.place == "reward"
    return {
        "engine": "transformers",
        "dtype": facts["dtype"],
        "max_context_tokens": config.model.max_context_tokens,
        "environment": facts["environment"],
        "generate": config.generate.model_dump(mode="json"),
        "cursor": facts["cursor"],
        "reference": facts["reference"] if in_reward else None,
    }


def _score(config: RunConfig, facts: Facts) -> dict[str, JsonValue]:
    return {
        "rewards": [{**r.model_dump(mode="json"), "source": facts["rewards"][r.name]} for r in config.rewards],
        "scoring": config.scoring.model_dump(mode="json"),
    }


def _advantage(config: RunConfig, facts: Facts) -> dict[str, JsonValue]:
    algorithm = resolve(config.algorithm, config.generate)
    kl, overlong = algorithm.kl, algorithm.overlong
    return {
        "advantage": algorithm.advantage,
        "std": [algorithm.std_ddof, algorithm.std_eps] if algorithm.advantage == "grpo" else None,
        "overlong": [algorithm.norm_length, overlong.buffer_tokens, overlong.factor] if overlong else None,
        "truncation": algorithm.truncation,
        "truncated_reward": algorithm.truncated_reward if algorithm.truncation == "reward_override" else None,
        "kl_in_reward": [kl.coef, kl.resolved_estimator] if algorithm.needs_kl_penalty else None,
        # It keeps groups whose rewards are equal: they have no advantage, and the KL term still moves them.
        "kl_in_loss": kl.coef > 0 and kl.place == "loss",
    }


def _train(config: RunConfig, facts: Facts) -> dict[str, JsonValue]:
    algorithm = resolve(config.algorithm, config.generate)
    kl = algorithm.kl if algorithm.needs(config.learner).ref_in_loss else None
    return {
        "engine": "torch",
        "dtype": facts["dtype"],
        "loss": algorithm.loss,
        "clip": [algorithm.clip_low, algorithm.clip_high, algorithm.dual_clip],
        "aggregation": algorithm.aggregation,
        "norm_length": algorithm.norm_length if algorithm.aggregation == "seq_sum_fixed_norm" else None,
        "kl": [kl.coef, kl.resolved_estimator, facts["reference"]] if kl else None,
        "learner": config.learner.model_dump(mode="json"),
        "temperature": config.generate.temperature,
        "iterations": config.iterations if config.learner.schedule != "constant" else None,
    }


def _evaluate(config: RunConfig, facts: Facts) -> dict[str, JsonValue]:
    judge = config.judge
    return {
        "engine": "transformers",
        "dtype": facts["dtype"],
        "max_context_tokens": config.model.max_context_tokens,
        "environment": facts["environment"],
        "prompt": [config.generate.max_prompt_tokens, config.generate.overlong_prompt],
        "max_completion_tokens": config.evaluate.max_completion_tokens or config.generate.max_completion_tokens,
        "evaluate": config.evaluate.model_dump(mode="json", exclude={"every", "reward", "max_completion_tokens"}),
        "judge": [judge.function, judge.params, facts["rewards"][judge.name], config.scoring.timeout_seconds],
        "max_unscored_fraction": config.scoring.max_unscored_fraction,
    }


def _register(config: RunConfig, facts: Facts) -> dict[str, JsonValue]:
    return {**config.registry.model_dump(mode="json"), "model_name": config.model_name}


STAGES: dict[StageName, StageSpec] = {
    spec.name: spec
    for spec in (
        StageSpec("generate", 1, ("policy",), lambda _: schemas.TRAJECTORIES, _generate, ("rollout",)),
        StageSpec(
            "score",
            1,
            ("generate",),
            lambda config: schemas.rewards_schema([reward.name for reward in config.rewards]),
            _score,
            ("score",),
        ),
        StageSpec("advantage", 1, ("generate", "score"), lambda _: schemas.ADVANTAGES, _advantage, ()),
        StageSpec("train", 1, ("policy", "generate", "advantage"), lambda _: schemas.TRAIN_STEPS, _train, ("train",)),
        StageSpec("evaluate", 1, ("train",), lambda _: schemas.EVALUATION, _evaluate, ("rollout",)),
        StageSpec("register", 1, ("train", "evaluate"), lambda _: schemas.DECISIONS, _register, (), in_worker=False),
    )
}


def stages_from(name: StageName) -> list[StageName]:
    """The stage and all that come after it."""
    names = list(STAGES)
    return names[names.index(name) :]

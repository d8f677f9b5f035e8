"""Which settings of a run may change while it runs, from one iteration to the next.

Not adjustable is what makes iterations incomparable (the model, the environment, the seed, what a reward means, how
held-out answers are sampled and judged, how the champion is chosen), what belongs to the run as a whole (name, number
of iterations, the learning rate's schedule and warm-up), and what is fixed when the worker starts (device, threads).
"""

from __future__ import annotations

import copy
from fnmatch import fnmatchcase
from typing import Any

from rl_core.config import RunConfig
from rl_core.errors import ConfigError
from rl_core.section import Section

ADJUSTABLE = (
    "generate.prompts_per_iteration",
    "generate.group_size",
    "generate.max_completion_tokens",  # only while evaluate.max_completion_tokens is set
    "generate.temperature",
    "rewards.*.weight",
    "scoring.on_error",
    "scoring.timeout_seconds",
    "scoring.max_unscored_fraction",
    "algorithm.clip_low",
    "algorithm.clip_high",
    "algorithm.dual_clip",
    "algorithm.kl.coef",
    "learner.lr",
    "learner.betas",
    "learner.eps",
    "learner.weight_decay",
    "learner.max_grad_norm",
    "learner.update_epochs",  # only with a constant schedule, like the next one
    "learner.minibatches",
    "evaluate.every",
    "execution.micro_batch_tokens",
    "execution.logit_chunk_tokens",
    "execution.gradient_checkpointing",
    "execution.generate_rows",
    "execution.reward_processes",
    "execution.reward_batch_rows",
    "execution.timeout_seconds",
    "execution.retries",
    "execution.retry_delay_seconds",
    "execution.placement",
    "execution.keep_trainer_states",
    "execution.tags",
)
"""Dotted names; `*` is the name of a reward. Dictionaries are one setting."""

_STEPS = ("learner.update_epochs", "learner.minibatches")

Changes = dict[str, tuple[Any, Any]]
"""Old and new value, JSON-plain, by setting."""


def is_adjustable(key: str) -> bool:
    return any(fnmatchcase(key, pattern) for pattern in ADJUSTABLE)


def settings(config: RunConfig) -> dict[str, Any]:
    """Every setting by dotted name, JSON-plain; rewards go by name, and `rewards` is the list of their names."""
    return _leaves(config, config.model_dump(mode="json"), "")


def _leaves(section: Section, data: dict[str, Any], prefix: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in type(section).model_fields:
        value, key = getattr(section, name), f"{prefix}{name}"
        if isinstance(value, Section):
            found |= _leaves(value, data[name], f"{key}.")
        elif name == "rewards":
            found[key] = [reward.name for reward in value]  # their order matters: the first one judges
            for reward, plain in zip(value, data[name], strict=True):
                found |= _leaves(reward, plain, f"{key}.{reward.name}.")
        else:
            found[key] = data[name]
    return found


def changes(before: RunConfig, after: RunConfig) -> Changes:
    """What differs, whether or not it may; null stands for a setting that the other config does not have."""
    old, new = settings(before), settings(after)
    keys = [*old, *(key for key in new if key not in old)]
    return {key: (old.get(key), new.get(key)) for key in keys if old.get(key) != new.get(key)}


def check_changes(before: RunConfig, after: RunConfig) -> Changes:
    """What a live change from one config to the other consists of. Raises `ConfigError` for one that may not be."""
    found = changes(before, after)
    if refused := [key for key in found if not is_adjustable(key)]:
        raise ConfigError(
            f"{', '.join(refused)} cannot change in a live run",
            expected=", ".join(ADJUSTABLE),
            got=", ".join(refused),
            todo="fork the run, or start a new one with --set name=...; more iterations: `rlstages run RUN --set "
            "iterations=...`",
        )
    if before.learner.schedule != "constant" and (steps := [key for key in _STEPS if key in found]):
        raise ConfigError(
            f"{', '.join(steps)} cannot change in a live run whose learning rate follows a schedule",
            expected="learner.schedule = constant, or as many optimizer steps in every iteration",
            got=f"learner.schedule = {before.learner.schedule}, which spreads over all steps of the run",
            todo="fork the run, or change learner.lr",
        )
    if _heldout_tokens(before) != _heldout_tokens(after):
        raise ConfigError(
            "generate.max_completion_tokens is also the limit of held-out answers, which has to stay",
            expected="evaluate.max_completion_tokens set in the recipe",
            got="null, which takes generate.max_completion_tokens",
            todo="fork the run, or start a new one with evaluate.max_completion_tokens set",
        )
    return found


def _heldout_tokens(config: RunConfig) -> int:
    return config.evaluate.max_completion_tokens or config.generate.max_completion_tokens


def with_setting(data: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    """A copy of a JSON-plain config with one setting of `settings` replaced."""
    result = copy.deepcopy(data)
    *sections, last = key.split(".")
    node: Any = result
    for name in sections:
        node = next(item for item in node if item["name"] == name) if isinstance(node, list) else node[name]
    node[last] = value
    return result

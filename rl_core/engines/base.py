"""What an engine is: two thin protocols. Weights pass between stages as checkpoint folders, so nothing syncs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from rl_core.config import AlgorithmConfig, LearnerConfig

Progress = Callable[[int, int], None]
"""Called with (units done, units in all) now and then while an engine works."""


@dataclass(frozen=True)
class SampleRequest:
    """One prompt and the completions wanted for it.

    Attributes:
        prompt_ids: token ids of the templated prompt, at least one.
        seeds: one seed per completion wanted; a completion depends on its own seed only.
        max_new_tokens: budget of each completion in tokens; 0 gives empty completions.
    """

    prompt_ids: Sequence[int]
    seeds: Sequence[int]
    max_new_tokens: int


@dataclass(frozen=True)
class Completion:
    """What was sampled: `logprobs[t]` in nats is the log-prob of `token_ids[t]` at the sampling temperature."""

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: Literal["stop", "length"]


class Sampler(Protocol):
    def sample(
        self, requests: Sequence[SampleRequest], temperature: float, progress: Progress | None = None
    ) -> list[list[Completion]]:
        """Completions per request, in request order. `temperature` 0 is greedy (log-probs then at temperature 1)."""
        ...


@dataclass(frozen=True)
class TrainRow:
    """One completion as the learner sees it.

    Attributes:
        group_id: rows of one id share `prompt_ids` exactly.
        sample_id: index in the group.
        prompt_ids: [prompt tokens].
        completion_ids: [completion tokens]; may be empty.
        action_mask: [completion tokens], true where the policy chose the token.
        advantage: advantage of every action token.
        sampler_logprobs: [completion tokens], nats, at the sampling temperature.
        keep: false: contributes no gradient, but still counts in the denominators. A row outside these too has an
            action mask that is false throughout.
    """

    group_id: int
    sample_id: int
    prompt_ids: Sequence[int]
    completion_ids: Sequence[int]
    action_mask: Sequence[bool]
    advantage: float
    sampler_logprobs: Sequence[float]
    keep: bool


@dataclass(frozen=True)
class StepPlan:
    """Everything about an update that is not a row and not a weight.

    Attributes:
        algorithm: losses, clipping, aggregation, KL.
        learner: optimizer and schedule.
        temperature: sampling temperature of the rows.
        max_completion_tokens: the run's budget, the constant of `seq_sum_fixed_norm`.
        total_steps: optimizer steps of the whole run, for the schedule.
        seed: decides the order of groups over minibatches.
        micro_batch_tokens: padded tokens of one forward and backward pass.
        logit_chunk_tokens: positions whose logits exist at the same time.
        gradient_checkpointing: recompute activations in the backward pass.
    """

    algorithm: AlgorithmConfig
    learner: LearnerConfig
    temperature: float
    max_completion_tokens: int
    total_steps: int
    seed: int
    micro_batch_tokens: int
    logit_chunk_tokens: int
    gradient_checkpointing: bool


@dataclass(frozen=True)
class StepStats:
    """One optimizer step: its number in the run from 1, whether it was applied, metrics (null: not defined)."""

    step: int
    applied: bool
    metrics: dict[str, float | None]


class Learner(Protocol):
    def update(self, rows: Sequence[TrainRow], plan: StepPlan, progress: Progress | None = None) -> Iterator[StepStats]:
        """Take the optimizer steps of one iteration; yields after each. An error leaves the weights as they were."""
        ...

    def save(self, folder: Path) -> None:
        """Write the policy: a Hugging Face model folder plus `trainer/` (optimizer, schedule position)."""
        ...

"""Algorithms as data: a name maps to an advantage estimator, a loss, an aggregation and bounds, all on one screen.

A new algorithm is a new row, or a new value of one of the choices; no code below is specific to a row. Importing this
file does not import torch, so that stages without tensors can read the table.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, Protocol

from rl_core.config import (
    AdvantageName,
    AggregationName,
    AlgorithmConfig,
    AlgorithmName,
    KlConfig,
    LearnerConfig,
    OverlongConfig,
)

if TYPE_CHECKING:
    from rl_core.losses import TokenBatch, TokenLoss

LossName = Literal["ppo_clip", "reinforce"]


@dataclass(frozen=True)
class Needs:
    """Log-probs an algorithm cannot do without; whatever is false is not computed.

    Attributes:
        old: the policy's at the start of the update, by a pass of its own. False for a single optimizer step per
            iteration: the current log-probs, detached, are then the old ones.
        ref_in_loss: the frozen reference's, in the train stage.
        ref_in_reward: the frozen reference's, before the advantage stage.
    """

    old: bool
    ref_in_loss: bool
    ref_in_reward: bool


@dataclass(frozen=True)
class Algorithm:
    """One row of the table, or a row with a recipe's overrides merged in.

    Attributes:
        advantage: estimator in `rl_core/advantages.py`.
        loss: policy loss in `rl_core/losses.py`.
        aggregation: how token losses become one number.
        clip_low, clip_high: distance of the ratio's bounds from 1.
        dual_clip: bound on the loss of a token with negative advantage, in units of it; null: none.
        overlong_share: soft length zone as a share of the completion budget; 0: none.
        overlong: that zone in tokens, once the budget is known.
        norm_length: tokens, the constant of `seq_sum_fixed_norm`; the completion budget.
        std_ddof, std_eps: standard deviation of `grpo`.
        kl, truncation, truncated_reward: as in `AlgorithmConfig`.
    """

    advantage: AdvantageName
    loss: LossName
    aggregation: AggregationName
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    overlong_share: float = 0.0
    overlong: OverlongConfig | None = None
    norm_length: int = 1
    std_ddof: Literal[0, 1] = 1
    std_eps: float = 1e-6
    kl: KlConfig = field(default_factory=KlConfig)
    truncation: Literal["keep", "mask_loss", "reward_override"] = "keep"
    truncated_reward: float = 0.0

    @property
    def needs_kl_penalty(self) -> bool:
        """The KL to the reference is taken off the reward."""
        return self.kl.coef > 0 and self.kl.place == "reward"

    def needs(self, learner: LearnerConfig) -> Needs:
        """The log-probs this algorithm needs with these optimizer steps per iteration."""
        return Needs(
            old=learner.update_epochs * learner.minibatches > 1,
            ref_in_loss=self.kl.coef > 0 and self.kl.place == "loss",
            ref_in_reward=self.needs_kl_penalty,
        )


ALGORITHMS: dict[AlgorithmName, Algorithm] = {
    # 2402.03300
    "grpo": Algorithm(advantage="grpo", loss="ppo_clip", aggregation="seq_mean_token_mean"),
    # 2503.20783
    "dr_grpo": Algorithm(advantage="dr_grpo", loss="ppo_clip", aggregation="seq_sum_fixed_norm"),
    # 2402.14740: a whole completion is one action, so its log-probs are summed
    "rloo": Algorithm(advantage="rloo", loss="ppo_clip", aggregation="seq_mean_token_sum"),
    # 2503.14476: 4096 of 20480 tokens are the soft zone
    "dapo": Algorithm(advantage="grpo", loss="ppo_clip", aggregation="token_mean", clip_high=0.28, overlong_share=0.2),
    "reinforce": Algorithm(advantage="reinforce", loss="reinforce", aggregation="seq_mean_token_sum"),
}


class _Budget(Protocol):
    """What has a completion budget in tokens: `GenerateConfig`, and the learner's `StepPlan`."""

    @property
    def max_completion_tokens(self) -> int: ...


def resolve(config: AlgorithmConfig, generate: _Budget) -> Algorithm:
    """The table's row with the recipe's overrides merged in; a null field takes the row's value."""
    row = ALGORITHMS[config.name]
    budget = generate.max_completion_tokens
    zone = OverlongConfig(buffer_tokens=max(1, int(row.overlong_share * budget))) if row.overlong_share else None
    return replace(
        row,
        advantage=row.advantage if config.advantage is None else config.advantage,
        aggregation=row.aggregation if config.aggregation is None else config.aggregation,
        clip_low=row.clip_low if config.clip_low is None else config.clip_low,
        clip_high=row.clip_high if config.clip_high is None else config.clip_high,
        dual_clip=row.dual_clip if config.dual_clip is None else config.dual_clip,
        overlong=zone if config.overlong is None else config.overlong,
        norm_length=budget,
        std_ddof=config.std_ddof,
        std_eps=config.std_eps,
        kl=config.kl,
        truncation=config.truncation,
        truncated_reward=config.truncated_reward,
    )


def token_loss(batch: TokenBatch, algorithm: Algorithm) -> TokenLoss:
    """Per-token loss of an algorithm: policy loss plus, where it stands in the loss, `kl.coef` times the KL term."""
    from rl_core import losses

    policy = losses.policy_loss(
        batch,
        loss=algorithm.loss,
        clip_low=algorithm.clip_low,
        clip_high=algorithm.clip_high,
        dual_clip=algorithm.dual_clip,
    )
    if algorithm.kl.coef == 0 or algorithm.kl.place != "loss":
        return policy
    kl = losses.kl_loss(batch, algorithm.kl.resolved_estimator)
    return losses.TokenLoss(policy.loss + algorithm.kl.coef * kl.loss, policy.metrics | kl.metrics, policy.peaks)

"""Rewards to advantages: groups by id, never by position, with statistics in float64.

What is not a finite reward is out of every mean and deviation and gets advantage 0. A group of equal rewards gets
exactly 0, decided by their span before anything is divided.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from rl_core.algorithms import Algorithm
from rl_core.config import AdvantageName, KlName, OverlongConfig
from rl_core.errors import DataError, NonFiniteError

Floats = npt.NDArray[np.float64]

OUTSIDE_DENOMINATORS = frozenset({"unscored", "empty", "truncated"})
"""Drop reasons whose rows are no part of the loss at all: neither their tokens nor they themselves are counted. Rows
dropped for another reason have advantage 0 and are counted, only not computed."""

_KEY = ["group_id", "sample_id"]


def as_rewards(values: Sequence[Any] | npt.NDArray[Any]) -> Floats:
    """Rewards as float64, [rows]; null, NaN and infinities, all unscorable, as NaN."""
    raw = np.asarray([np.nan if value is None else float(value) for value in values], dtype=np.float64)
    return np.where(np.isfinite(raw), raw, np.nan)


class _Groups:
    """Per-group statistics of the scored rows; [rows] each, a row holding its group's value."""

    def __init__(self, group_ids: npt.NDArray[Any], rewards: Floats) -> None:
        names, self.index = np.unique(group_ids, return_inverse=True)
        self.scored = np.isfinite(rewards)
        self.groups = len(names)
        self.value = np.where(self.scored, rewards, 0.0)
        self.size = self.sum(self.scored.astype(np.float64))
        low, high = (np.full(self.groups, bound) for bound in (np.inf, -np.inf))
        np.minimum.at(low, self.index[self.scored], rewards[self.scored])
        np.maximum.at(high, self.index[self.scored], rewards[self.scored])
        empty = low > high
        low, high = np.where(empty, 0.0, low), np.where(empty, 0.0, high)
        tolerance = 1e-6 * np.maximum(1.0, np.maximum(np.abs(low), np.abs(high)))
        self.span = (high - low)[self.index]
        self.constant = (high - low <= tolerance)[self.index]

    def sum(self, values: Floats) -> Floats:
        totals = np.bincount(self.index, weights=values, minlength=self.groups).astype(np.float64)
        return totals[self.index]


def advantages(
    group_ids: Sequence[Any] | npt.NDArray[Any],
    rewards: Sequence[Any] | npt.NDArray[Any],
    estimator: AdvantageName,
    *,
    std_ddof: int = 1,
    std_eps: float = 1e-6,
) -> Floats:
    """Advantage of every completion, [rows], always finite.

    With mean and std over the n scored rows of the same group id:
    `dr_grpo` r - mean (2503.20783); `rloo` (r - mean) n / (n - 1), the leave-one-out baseline (2402.14740); `grpo`
    (r - mean) / (std + std_eps) (2402.03300). `reinforce` is r - mean over all rows of the batch: the one estimator
    that needs no second completion of a prompt.

    0 for a row without a finite reward, a row alone in its group, and a group with
    max - min <= 1e-6 max(1, max|r|). Raises `NonFiniteError` where finite rewards overflow float64.
    """
    ids = np.zeros(len(rewards)) if estimator == "reinforce" else np.asarray(group_ids)
    if len(ids) != len(rewards):
        raise DataError("advantages: ids and rewards differ in length", got=f"{len(ids)} and {len(rewards)}")
    if len(ids) == 0:
        return np.zeros(0)
    with np.errstate(over="ignore", invalid="ignore"):  # the check below says it better
        result = _estimate(_Groups(ids, as_rewards(rewards)), estimator, std_ddof, std_eps)
    if not np.isfinite(result).all():
        raise NonFiniteError(
            "advantages: finite rewards give advantages that are not", todo="scale the rewards to ordinary numbers"
        )
    return result


def _estimate(stats: _Groups, estimator: AdvantageName, std_ddof: int, std_eps: float) -> Floats:
    useful = stats.scored & ~stats.constant  # a row alone in its group is constant
    n = np.where(useful, stats.size, 2.0)
    centred = np.where(useful, stats.value - stats.sum(stats.value) / n, 0.0)
    if estimator == "rloo":
        return centred * (n / (n - 1.0))
    if estimator != "grpo":
        return centred
    # Deviations in units of the span: squares of large or tiny rewards neither overflow nor vanish.
    unit = np.where(useful, stats.span, 1.0)
    std = unit * np.sqrt(stats.sum((centred / unit) ** 2) / (n - std_ddof))
    return np.where(useful, centred / np.where(useful, std + std_eps, 1.0), 0.0)


def overlong_penalty(completion_tokens: npt.NDArray[Any], max_tokens: int, config: OverlongConfig) -> Floats:
    """Soft length penalty (2503.14476 eq. 13), [rows], between -factor and 0.

    0 up to max_tokens - buffer_tokens, then linear down to -factor at max_tokens, and -factor beyond.
    """
    over = np.asarray(completion_tokens, dtype=np.float64) - (max_tokens - config.buffer_tokens)
    return -config.factor * np.clip(over / config.buffer_tokens, 0.0, 1.0)


def sequence_kl(
    sampler_logprobs: Sequence[float], ref_logprobs: Sequence[float], action_mask: Sequence[bool], estimator: KlName
) -> float:
    """KL(sampler || reference) of one completion in nats: the sum over its action tokens, for a KL term in the reward.

    k1 is the unbiased choice there (2512.21852); a reward has no gradient, so k3_st is k3.
    """
    mask = np.asarray(action_mask, dtype=bool)
    d = np.asarray(sampler_logprobs, dtype=np.float64)[mask] - np.asarray(ref_logprobs, dtype=np.float64)[mask]
    if estimator == "k1":
        return float(d.sum())
    if estimator == "k2":
        return float((d**2).sum() / 2.0)
    bounded = d.clip(-20.0, 20.0)
    return float((np.expm1(-bounded) + bounded).sum())


def advantage_table(frame: pl.DataFrame, algorithm: Algorithm) -> pl.DataFrame:
    """The advantages table of a batch, sorted by key, in the columns of `schemas.ADVANTAGES`.

    Args:
        frame: group_id, sample_id, reward (null where unscored), truncated, completion_tokens (action tokens), and
            kl_penalty (nats, `sequence_kl`) where the algorithm takes KL off the reward.
        algorithm: a resolved row; its `norm_length` is the completion budget of the length penalty.

    Reward after shaping: task reward plus the overlong penalty; with `reward_override` a truncated completion's is
    `truncated_reward` instead, scored or not; then minus kl.coef times kl_penalty. All scored rows, truncated and empty
    ones too, take part in the baseline. Reasons to drop a row, the first that applies: unscored, empty (no action
    token), truncated (`mask_loss`), singleton, no_signal. The last two stay in when a KL term in the loss still moves
    them. Raises `DataError` on missing columns and double keys, `NonFiniteError` on a KL that is not finite.
    """
    rows = _checked(frame, algorithm)
    tokens = rows["completion_tokens"].to_numpy()
    truncated = rows["truncated"].to_numpy()
    rewards = _shaped(rows, algorithm, tokens, truncated)
    ids = np.zeros(len(rows)) if algorithm.advantage == "reinforce" else rows["group_id"].to_numpy()
    values = advantages(ids, rewards, algorithm.advantage, std_ddof=algorithm.std_ddof, std_eps=algorithm.std_eps)
    stats = _Groups(ids, rewards)
    kl_moves = algorithm.kl.coef > 0 and algorithm.kl.place == "loss"
    reasons = np.select(
        [
            ~stats.scored,
            tokens == 0,
            truncated & (algorithm.truncation == "mask_loss"),
            (stats.size < 2) & (not kl_moves),
            stats.constant & (not kl_moves),
        ],
        ["unscored", "empty", "truncated", "singleton", "no_signal"],
        default="",
    )
    return rows.select(
        *_KEY,
        pl.Series("reward", rewards).fill_nan(None).alias("reward"),
        pl.Series("advantage", values),
        pl.Series("keep", reasons == ""),
        pl.Series("drop_reason", [reason or None for reason in reasons.tolist()], dtype=pl.String),
    )


def _checked(frame: pl.DataFrame, algorithm: Algorithm) -> pl.DataFrame:
    wanted = [*_KEY, "reward", "truncated", "completion_tokens"]
    if algorithm.needs_kl_penalty:
        wanted.append("kl_penalty")
    missing = [name for name in wanted if name not in frame.columns]
    if missing:
        raise DataError("advantage: columns are missing", expected=", ".join(wanted), got=", ".join(frame.columns))
    rows = frame.select(wanted).sort(_KEY).cast({"group_id": pl.Int64, "sample_id": pl.Int32, "reward": pl.Float64})
    double = rows.filter(rows.select(_KEY).is_duplicated())
    if len(double):
        raise DataError("advantage: a key appears twice", expected="one row per key", got=str(double.row(0)[:2]))
    return rows


def _shaped(
    rows: pl.DataFrame, algorithm: Algorithm, tokens: npt.NDArray[Any], truncated: npt.NDArray[np.bool_]
) -> Floats:
    rewards = as_rewards(rows["reward"].to_list())
    if algorithm.overlong is not None:
        rewards = rewards + overlong_penalty(tokens, algorithm.norm_length, algorithm.overlong)
    if algorithm.truncation == "reward_override":
        rewards = np.where(truncated, algorithm.truncated_reward, rewards)
    if algorithm.needs_kl_penalty:
        penalty = as_rewards(rows["kl_penalty"].to_list())
        if np.isnan(penalty).any():
            key = rows.filter(pl.Series(np.isnan(penalty))).row(0)[:2]
            raise NonFiniteError("advantage: the KL to the reference is not finite", got=f"row {key}")
        rewards = rewards - algorithm.kl.coef * penalty
    return rewards


def reward_metrics(frame: pl.DataFrame, table: pl.DataFrame) -> dict[str, float | None]:
    """Metrics of a batch from `advantage_table`'s input and output; null where not defined.

    `reward/mean`, `reward/std` and `groups/zero_var_frac` look at the task reward before shaping: a length penalty
    alone would give every group variance.
    """
    rows = frame.sort(_KEY)
    raw = as_rewards(rows["reward"].to_list())
    scored, shaped = raw[np.isfinite(raw)], table["reward"].drop_nulls()
    stats = _Groups(rows["group_id"].to_numpy(), raw)
    _, first = np.unique(stats.index, return_index=True)
    size, constant = stats.size[first], stats.constant[first]
    compared = size > 1
    kept_groups = table.filter("keep")["group_id"].n_unique()
    tokens = rows["completion_tokens"]
    return {
        "reward/mean": _mean(scored),
        "reward/std": float(scored.std(ddof=1)) if len(scored) > 1 else None,
        "reward/shaped_mean": _mean(shaped.to_numpy()),
        "reward/nonfinite_frac": _mean(~np.isfinite(raw)),
        "groups/count": float(len(size)),
        "groups/singleton": float((size == 1).sum()),
        "groups/zero_var_frac": _mean(constant[compared]),
        "groups/kept_frac": kept_groups / len(size) if len(size) else None,
        "completion/kept_frac": _mean(table["keep"].to_numpy()),
        "completion/truncated_frac": _mean(rows["truncated"].to_numpy()),
        "completion/empty_frac": _mean((tokens == 0).to_numpy()),
        "completion/tokens_mean": _mean(tokens.to_numpy()),
        "completion/tokens_max": float(tokens.to_numpy().max()) if len(rows) else None,
    }


def _mean(values: npt.NDArray[Any]) -> float | None:
    return float(values.mean()) if len(values) else None

"""The advantages table: shaping, reasons to drop a row, what stays in the baseline, metrics."""

from __future__ import annotations

import math
from typing import Any

import polars as pl
import pytest

from rl_core.advantages import OUTSIDE_DENOMINATORS, advantage_table, reward_metrics
from rl_core.algorithms import Algorithm, resolve
from rl_core.config import AlgorithmConfig, GenerateConfig, KlConfig, OverlongConfig
from rl_core.errors import DataError, NonFiniteError
from rl_core.schemas import ADVANTAGES

Row = tuple[int, int, float | None, bool, int]


def frame_of(rows: list[Row], **columns: Any) -> pl.DataFrame:
    names = ["group_id", "sample_id", "reward", "truncated", "completion_tokens"]
    frame = pl.DataFrame(
        rows, schema=dict(zip(names, [pl.Int64, pl.Int32, pl.Float64, pl.Boolean, pl.Int64], strict=True)), orient="row"
    )
    return frame.with_columns(**{name: pl.Series(values) for name, values in columns.items()})


def algorithm_of(budget: int = 20, **options: Any) -> Algorithm:
    options = {"name": "dr_grpo", "std_eps": 0.0} | options
    return resolve(AlgorithmConfig(**options), GenerateConfig(max_completion_tokens=budget))


def group(rewards: list[float | None], truncated: list[int] = [], tokens: list[int] | None = None) -> pl.DataFrame:  # noqa: B006
    lengths = tokens if tokens is not None else [5] * len(rewards)
    return frame_of([(3, i, r, i in truncated, n) for i, (r, n) in enumerate(zip(rewards, lengths, strict=True))])


def test_one_row_of_every_kind() -> None:
    rows: list[Row] = [
        (2, 1, 4.0, False, 5),
        (1, 0, 1.0, False, 5),
        (1, 1, 0.0, True, 5),
        (1, 2, None, False, 5),
        (1, 3, 0.5, False, 0),
        (2, 0, None, False, 5),
        (4, 0, 2.0, False, 5),
        (4, 1, 2.0, False, 5),
    ]
    table = advantage_table(frame_of(rows), algorithm_of(truncation="mask_loss"))
    assert table.rows() == [
        (1, 0, 1.0, 0.5, True, None),
        (1, 1, 0.0, -0.5, False, "truncated"),
        (1, 2, None, 0.0, False, "unscored"),
        (1, 3, 0.5, 0.0, False, "empty"),
        (2, 0, None, 0.0, False, "unscored"),
        (2, 1, 4.0, 0.0, False, "singleton"),
        (4, 0, 2.0, 0.0, False, "no_signal"),
        (4, 1, 2.0, 0.0, False, "no_signal"),
    ]
    assert table.to_arrow().cast(ADVANTAGES).schema.equals(ADVANTAGES)


def test_row_order_does_not_matter() -> None:
    frame = frame_of([(g, s, g * 0.1 + s * 0.7 % 1, False, 5) for g in range(4) for s in range(5)])
    expected = advantage_table(frame, algorithm_of(name="grpo"))
    assert advantage_table(frame.sample(fraction=1.0, shuffle=True, seed=1), algorithm_of(name="grpo")).equals(expected)


def test_an_end_token_alone_trains_and_an_empty_completion_only_counts() -> None:
    """C36: [eos], [], [5, eos], [6, 7, eos] with rewards 0, 0, 1, 1: the empty one is in the mean, not in the loss."""
    table = advantage_table(group([0.0, 0.0, 1.0, 1.0], tokens=[1, 0, 2, 3]), algorithm_of())
    assert table["advantage"].to_list() == [-0.5, -0.5, 0.5, 0.5]
    assert table["keep"].to_list() == [True, False, True, True]
    assert table["drop_reason"].to_list() == [None, "empty", None, None]
    assert table["reward"].to_list() == [0.0, 0.0, 1.0, 1.0]


def test_the_three_truncation_modes() -> None:
    frame = group([1.0, 0.0, 1.0, 0.0], truncated=[2])
    keep = advantage_table(frame, algorithm_of())
    assert keep["advantage"].to_list() == [0.5, -0.5, 0.5, -0.5] and keep["keep"].all()
    masked = advantage_table(frame, algorithm_of(truncation="mask_loss"))
    assert masked["advantage"].to_list() == [0.5, -0.5, 0.5, -0.5]
    assert masked["drop_reason"].to_list() == [None, None, "truncated", None]
    override = advantage_table(frame, algorithm_of(truncation="reward_override", truncated_reward=-1.0))
    assert override["reward"].to_list() == [1.0, 0.0, -1.0, 0.0] and override["keep"].all()
    assert override["advantage"].to_list() == [1.0, 0.0, -1.0, 0.0]


def test_override_gives_an_unscored_truncated_completion_its_reward() -> None:
    frame = group([1.0, None, None], truncated=[1])
    table = advantage_table(frame, algorithm_of(truncation="reward_override", truncated_reward=0.0))
    assert table["reward"].to_list() == [1.0, 0.0, None]
    assert table["drop_reason"].to_list() == [None, None, "unscored"]


def test_dapo_penalises_length_before_the_baseline() -> None:
    frame = group([1.0, 1.0, 1.0], tokens=[16, 18, 20])
    table = advantage_table(frame, algorithm_of(name="dapo", advantage="dr_grpo"))
    assert table["reward"].to_list() == [1.0, 0.5, 0.0]
    assert table["advantage"].to_list() == [0.5, 0.0, -0.5]
    # an overridden reward is not penalised on top
    options: dict[str, Any] = {"truncation": "reward_override", "truncated_reward": -3.0}
    algorithm = algorithm_of(overlong=OverlongConfig(buffer_tokens=4), **options)
    assert advantage_table(frame.with_columns(truncated=pl.col("sample_id") == 2), algorithm)["reward"].to_list() == [
        1.0,
        0.5,
        -3.0,
    ]


def test_kl_in_the_reward_enters_the_baseline() -> None:
    frame = group([1.0, 1.0]).with_columns(kl_penalty=pl.Series([0.0, 2.0]))
    algorithm = algorithm_of(name="rloo", kl=KlConfig(coef=0.05, place="reward"))
    table = advantage_table(frame, algorithm)
    assert table["reward"].to_list() == [1.0, 0.9]
    assert table["advantage"].to_list() == pytest.approx([0.1, -0.1])
    # the column is not read where the algorithm does not ask for it
    assert advantage_table(frame, algorithm_of())["reward"].to_list() == [1.0, 1.0]
    with pytest.raises(DataError, match="columns are missing"):
        advantage_table(frame.drop("kl_penalty"), algorithm)
    for bad in (math.nan, math.inf, None):
        with pytest.raises(NonFiniteError, match="not finite"):
            advantage_table(frame.with_columns(kl_penalty=pl.Series([0.0, bad], dtype=pl.Float64)), algorithm)


def test_kl_in_the_loss_keeps_rows_without_advantage() -> None:
    rows: list[Row] = [(1, 0, 1.0, False, 5), (1, 1, 1.0, False, 5), (2, 0, 3.0, False, 5), (2, 1, None, False, 5)]
    table = advantage_table(frame_of(rows), algorithm_of(kl=KlConfig(coef=0.1, place="loss")))
    assert table["keep"].to_list() == [True, True, True, False]
    assert table["drop_reason"].to_list() == [None, None, None, "unscored"]
    assert table["advantage"].to_list() == [0.0] * 4


def test_reinforce_takes_groups_of_one() -> None:
    table = advantage_table(frame_of([(i, 0, float(i), False, 5) for i in range(3)]), algorithm_of(name="reinforce"))
    assert table["advantage"].to_list() == [-1.0, 0.0, 1.0] and table["keep"].all()
    constant = advantage_table(frame_of([(i, 0, 1.0, False, 5) for i in range(3)]), algorithm_of(name="reinforce"))
    assert constant["drop_reason"].to_list() == ["no_signal"] * 3


def test_non_finite_rewards_become_null_and_unscored() -> None:
    """C04: rewards 1, NaN, 0, inf: rows 1 and 3 are marked by id, the others compare as if alone."""
    table = advantage_table(group([1.0, math.nan, 0.0, math.inf]), algorithm_of())
    assert table["reward"].to_list() == [1.0, None, 0.0, None]
    assert table["advantage"].to_list() == [0.5, 0.0, -0.5, 0.0]
    assert table["drop_reason"].to_list() == [None, "unscored", None, "unscored"]


def test_everything_truncated_and_masked() -> None:
    """C55: nothing is kept and nothing is in the denominators."""
    table = advantage_table(group([1.0, 0.0], truncated=[0, 1]), algorithm_of(truncation="mask_loss"))
    assert not table["keep"].any() and set(table["drop_reason"]) <= OUTSIDE_DENOMINATORS


def test_bad_tables_are_refused() -> None:
    with pytest.raises(DataError, match="appears twice") as caught:
        advantage_table(pl.concat([group([1.0, 0.0]), group([1.0])]), algorithm_of())
    assert "(3, 0)" in caught.value.got
    with pytest.raises(DataError, match="missing"):
        advantage_table(group([1.0]).drop("truncated"), algorithm_of())
    empty = advantage_table(group([]), algorithm_of())
    assert len(empty) == 0 and empty.columns == ADVANTAGES.names


def test_metrics_of_a_batch() -> None:
    rows: list[Row] = [
        (1, 0, 1.0, False, 4),
        (1, 1, 0.0, True, 20),
        (2, 0, 1.0, False, 16),
        (2, 1, 1.0, False, 20),
        (3, 0, 3.0, False, 0),
        (3, 1, None, False, 5),
        (4, 0, math.nan, False, 5),
        (4, 1, None, False, 10),
    ]
    frame = frame_of(rows)
    # the penalty gives group 2 variance; the metric still calls its task rewards equal
    table = advantage_table(frame, algorithm_of(name="dapo", truncation="mask_loss"))
    assert reward_metrics(frame, table) == pytest.approx(
        {
            "reward/mean": 6 / 5,
            "reward/std": math.sqrt((0.04 * 3 + 1.44 + 3.24) / 4),
            "reward/shaped_mean": (1.0 - 1.0 + 1.0 + 0.0 + 3.0) / 5,
            "reward/nonfinite_frac": 3 / 8,
            "groups/count": 4.0,
            "groups/singleton": 1.0,
            "groups/zero_var_frac": 1 / 2,
            "groups/kept_frac": 2 / 4,
            "completion/kept_frac": 3 / 8,
            "completion/truncated_frac": 1 / 8,
            "completion/empty_frac": 1 / 8,
            "completion/tokens_mean": 10.0,
            "completion/tokens_max": 20.0,
        }
    )


def test_metrics_that_are_not_defined_are_null() -> None:
    frame = group([None, None])
    metrics = reward_metrics(frame, advantage_table(frame, algorithm_of()))
    assert [metrics[k] for k in ("reward/mean", "reward/std", "reward/shaped_mean", "groups/zero_var_frac")] == [
        None
    ] * 4
    assert metrics["reward/nonfinite_frac"] == 1.0
    nothing = reward_metrics(group([]), advantage_table(group([]), algorithm_of()))
    assert nothing["completion/tokens_max"] is None and nothing["groups/count"] == 0.0

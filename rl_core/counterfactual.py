"""What other rewards would have changed: two scorings and two sets of advantages of the same completions, compared.

All statistics are in float64 over a frame with a row per completion (see `COLUMNS`) and, for each reward component, its
weighted value before and after in columns `old:<name>` and `new:<name>` (0 where the component does not exist, null
where it has no value). Groups go by (iteration, group_id).
"""

from __future__ import annotations

from dataclasses import dataclass

import polars as pl

GROUP = ["iteration", "group_id"]

COLUMNS = {
    "iteration": pl.Int64,
    "group_id": pl.Int64,
    "sample_id": pl.Int32,
    "old": pl.Float64,  # weighted total of the rewards; null where unscored
    "new": pl.Float64,
    "old_advantage": pl.Float64,
    "new_advantage": pl.Float64,
    "old_keep": pl.Boolean,  # the completion contributes to the loss
    "new_keep": pl.Boolean,
}


@dataclass(frozen=True)
class Correlation:
    """A rank correlation between -1 and 1; null with the reason where it is not defined."""

    value: float | None
    reason: str = ""
    groups: int = 0
    """Groups whose correlations were averaged."""


@dataclass(frozen=True)
class Component:
    """One reward component: how far its change moved completions against the mean of their group.

    Attributes:
        name: name of the reward.
        old_mean, new_mean: mean weighted value over the completions scored both times; null without any.
        mean_abs_shift: mean over those of |shift|, see `shifts`.
        share: part of the shift of the totals that is due to it, by projection: sum(shift x total shift) / sum(total
            shift squared). The shares add up to 1; one can be negative. Null where the totals did not shift.
    """

    name: str
    old_mean: float | None
    new_mean: float | None
    mean_abs_shift: float | None
    share: float | None


@dataclass(frozen=True)
class Effect:
    """What would have changed in a set of groups.

    Attributes:
        completions, groups: how many were compared; the shares below are of these.
        old_mean, new_mean: mean total over the completions scored then, and now; null without any.
        old_unscored, new_unscored: completions without a total.
        within: Spearman correlation of the totals inside a group, mean over the groups that have one.
        pooled: the same over all completions at once.
        best_changed: groups in which no completion is among the best both times.
        flipped: completions whose advantage changes sign; `flipped_groups` have at least one.
        mean_abs_advantage_shift: mean over all completions of |new - old advantage|.
        gained, lost: groups that have signal (a completion in the loss with an advantage other than 0) only now, or
            had it only before.
        components: one entry per reward.
    """

    completions: int
    groups: int
    old_mean: float | None
    new_mean: float | None
    old_unscored: int
    new_unscored: int
    within: Correlation
    pooled: Correlation
    best_changed: int
    flipped: int
    flipped_groups: int
    mean_abs_advantage_shift: float | None
    gained: int
    lost: int
    components: tuple[Component, ...]


def effect(frame: pl.DataFrame, names: list[str]) -> Effect:
    """Compare the two scorings of all completions of a frame; `names` are the reward components of either."""
    scored = _scored(frame)
    flips = pl.col("old_advantage") * pl.col("new_advantage") < 0
    best = [pl.col(column) == pl.col(column).max().over(GROUP) for column in ("old", "new")]
    signal = {c: (pl.col(f"{c}_keep") & (pl.col(f"{c}_advantage") != 0)).any().alias(c) for c in ("old", "new")}
    per_group = frame.group_by(GROUP).agg(flips.any().alias("flip"), signal["old"], signal["new"])
    kept_best = scored.with_columns((best[0] & best[1]).alias("both")).group_by(GROUP).agg(pl.col("both").any())
    return Effect(
        completions=len(frame),
        groups=len(per_group),
        old_mean=_mean(frame["old"]),
        new_mean=_mean(frame["new"]),
        old_unscored=frame["old"].null_count(),
        new_unscored=frame["new"].null_count(),
        within=within_groups(frame),
        pooled=pooled(frame),
        best_changed=int((~kept_best["both"]).sum()),
        flipped=int(frame.select(flips.sum()).item()),
        flipped_groups=int(per_group["flip"].sum()),
        mean_abs_advantage_shift=_mean((frame["new_advantage"] - frame["old_advantage"]).abs()),
        gained=len(per_group.filter(~pl.col("old") & pl.col("new"))),
        lost=len(per_group.filter(pl.col("old") & ~pl.col("new"))),
        components=_components(shifts(frame, names), names),
    )


def within_groups(frame: pl.DataFrame) -> Correlation:
    """Mean over groups of Spearman's correlation of old and new totals, ties by mean rank."""
    found = _spearman(_scored(frame), GROUP)
    defined = found.drop_nulls()
    if len(defined):
        return Correlation(_mean(defined), groups=len(defined))
    return Correlation(None, "every group has equal totals or fewer than two scored both times")


def pooled(frame: pl.DataFrame) -> Correlation:
    """Spearman's correlation of old and new totals over all completions, ties by mean rank."""
    scored = _scored(frame)
    if len(scored) < 2:
        return Correlation(None, "fewer than two completions are scored both times")
    value = _spearman(scored.with_columns(pl.lit(0).alias("all")), ["all"]).item()
    if value is not None:
        return Correlation(value)
    constant = [word for word in ("old", "new") if scored[word].n_unique() == 1]
    return Correlation(None, f"all {' and all '.join(constant)} totals are equal")


def _spearman(scored: pl.DataFrame, by: list[str]) -> pl.Series:
    """Per group, in order of appearance; null where old or new totals are all equal."""
    ranked = scored.with_columns(pl.col("old", "new").rank("average").over(by))
    varies = (pl.col("old").n_unique() > 1) & (pl.col("new").n_unique() > 1)
    found = ranked.group_by(by, maintain_order=True).agg(
        pl.when(varies).then(pl.corr("old", "new").clip(-1.0, 1.0)).alias("value")
    )
    return found["value"]


def shifts(frame: pl.DataFrame, names: list[str]) -> pl.DataFrame:
    """The completions scored both times with `shift:<name>` per component and `shift` of the totals.

    A shift is the change of the weighted value minus the mean change of the group: what is added to a whole group moves
    nobody. The components' shifts add up to that of the totals.
    """
    changes = {name: pl.col(f"new:{name}") - pl.col(f"old:{name}") for name in names}
    columns = {"shift": pl.col("new") - pl.col("old"), **{f"shift:{name}": c for name, c in changes.items()}}
    return _scored(frame).with_columns(
        (change - change.mean().over(GROUP)).alias(column) for column, change in columns.items()
    )


def _components(shifted: pl.DataFrame, names: list[str]) -> tuple[Component, ...]:
    total = shifted["shift"]
    scale = float((total * total).sum())
    # What is left of equal changes after the mean is taken off is rounding.
    moved = len(shifted) > 0 and float(total.abs().max() or 0.0) > 1e-12 * _magnitude(shifted)  # type: ignore[arg-type]
    return tuple(
        Component(
            name,
            _mean(shifted[f"old:{name}"]),
            _mean(shifted[f"new:{name}"]),
            _mean(shifted[f"shift:{name}"].abs()),
            float((shifted[f"shift:{name}"] * total).sum()) / scale if moved else None,
        )
        for name in names
    )


def _magnitude(shifted: pl.DataFrame) -> float:
    largest = shifted.select(pl.max_horizontal(pl.col("old", "new").abs().max())).item()
    return max(1.0, float(largest))


def _scored(frame: pl.DataFrame) -> pl.DataFrame:
    return frame.filter(pl.col("old").is_not_null() & pl.col("new").is_not_null())


def _mean(values: pl.Series) -> float | None:
    found = values.drop_nulls().to_numpy()
    return float(found.mean()) if len(found) else None

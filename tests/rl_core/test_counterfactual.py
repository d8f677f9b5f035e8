"""Two scorings compared: hand numbers, naive loops and scipy, and what is not defined."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import polars as pl
import pytest

from rl_core.counterfactual import COLUMNS, Component, effect, pooled, shifts, within_groups

Row = dict[str, Any]


def frame(rows: list[Row], names: tuple[str, ...] = ("a",)) -> pl.DataFrame:
    """Rows that say what matters; a component that is not named carries the whole total."""
    filled = []
    for number, given in enumerate(rows):
        row = {"iteration": 0, "group_id": 0, "sample_id": number, "old_advantage": 0.0, "new_advantage": 0.0}
        row |= {"old_keep": True, "new_keep": True} | given
        if len(names) == 1:
            row |= {f"old:{names[0]}": row["old"], f"new:{names[0]}": row["new"]}
        filled.append(row)
    extra = {f"{when}:{name}": pl.Float64 for name in names for when in ("old", "new")}
    return pl.DataFrame(filled, schema={**COLUMNS, **extra})


def totals(old: list[float | None], new: list[float | None], **more: Any) -> list[Row]:
    return [{"old": a, "new": b, **more} for a, b in zip(old, new, strict=True)]


def test_hand_numbers() -> None:
    """Two groups, two components: first doubled weight, second new. All numbers by hand."""
    rows = [
        {"group_id": 7, "old": 1.0, "new": 1.5, "old:a": 1.0, "new:a": 2.0, "old:b": 0.0, "new:b": -0.5},
        {"group_id": 7, "old": 0.0, "new": -0.25, "old:a": 0.0, "new:a": 0.0, "old:b": 0.0, "new:b": -0.25},
        {"group_id": 7, "old": 0.5, "new": 1.75, "old:a": 0.5, "new:a": 1.0, "old:b": 0.0, "new:b": 0.75},
        {"group_id": 8, "old": 0.0, "new": -1.0, "old:a": 0.0, "new:a": 0.0, "old:b": 0.0, "new:b": -1.0},
        {"group_id": 8, "old": 0.0, "new": 0.0, "old:a": 0.0, "new:a": 0.0, "old:b": 0.0, "new:b": 0.0},
    ]
    advantages = [(1.0, 0.5), (-1.0, -1.5), (-0.25, 1.0), (0.0, -1.0), (0.0, 1.0)]
    for row, (old, new) in zip(rows, advantages, strict=True):
        row |= {"old_advantage": old, "new_advantage": new}
    found = effect(frame(rows, ("a", "b")), ["a", "b"])
    assert (found.completions, found.groups) == (5, 2)
    assert (found.old_mean, found.new_mean) == (0.3, 0.4)
    # group 7: ranks 3 1 2 and 2 1 3; group 8 was constant, so it has no correlation and its best are all
    assert (found.within.value, found.within.groups) == (0.5, 1)
    assert found.best_changed == 1, "group 7: the first was best, the third is"
    assert (found.flipped, found.flipped_groups) == (1, 1), "from or to 0 is no change of sign"
    assert found.mean_abs_advantage_shift == (0.5 + 0.5 + 1.25 + 1.0 + 1.0) / 5
    assert (found.gained, found.lost) == (1, 0)
    # a: changes 1 0 0.5 | 0 0, less 0.5 and 0. b: -0.5 -0.25 0.75 | -1 0, less 0 and -0.5
    # totals: 0.5 -0.25... the sum of both: 0 -0.75 0.75 | -0.5 0.5
    a, b, total = [0.5, -0.5, 0, 0, 0], [-0.5, -0.25, 0.75, -0.5, 0.5], [0, -0.75, 0.75, -0.5, 0.5]
    scale = sum(t * t for t in total)
    assert found.components == (
        Component("a", 0.3, 0.6, 0.2, pytest.approx(np.dot(a, total) / scale)),
        Component("b", 0.0, -0.2, 0.5, pytest.approx(np.dot(b, total) / scale)),
    )


def random_frame(seed: int) -> pl.DataFrame:
    """Three iterations, groups of 1 to 6 with ids that repeat, coarse rewards (many ties), some of them missing."""
    rng = np.random.default_rng(seed)
    rows = []
    for iteration in range(3):
        for group in range(6):
            for sample in range(int(rng.integers(1, 7))):
                row: Row = {"iteration": iteration, "group_id": group, "sample_id": sample}
                for when in ("old", "new"):
                    parts = {name: float(rng.integers(-2, 3)) * scale for name, scale in (("a", 1), ("b", 0.1))}
                    if rng.random() < 0.1:
                        parts["b"] = None  # type: ignore[assignment]
                    row |= {f"{when}:{name}": value for name, value in parts.items()}
                    row[when] = None if None in parts.values() else sum(parts.values())
                    row[f"{when}_advantage"] = float(rng.integers(-1, 2))
                    row[f"{when}_keep"] = bool(rng.random() < 0.7)
                rows.append(row)
    return frame([rows[i] for i in rng.permutation(len(rows))], ("a", "b"))


def groups_of(table: pl.DataFrame) -> list[list[Row]]:
    found: dict[tuple[int, int], list[Row]] = {}
    for row in table.to_dicts():
        found.setdefault((row["iteration"], row["group_id"]), []).append(row)
    return list(found.values())


def both_scored(rows: list[Row]) -> list[Row]:
    return [row for row in rows if row["old"] is not None and row["new"] is not None]


@pytest.mark.parametrize("seed", range(8))
def test_against_naive_loops(seed: int) -> None:
    table = random_frame(seed)
    found, groups = effect(table, ["a", "b"]), groups_of(table)
    assert (found.completions, found.groups) == (len(table), len(groups))
    best_changed = flipped_groups = flipped = gained = lost = 0
    for rows in groups:
        signs = [row["old_advantage"] * row["new_advantage"] < 0 for row in rows]
        flipped, flipped_groups = flipped + sum(signs), flipped_groups + any(signs)
        old, new = (any(row[f"{w}_keep"] and row[f"{w}_advantage"] != 0 for row in rows) for w in ("old", "new"))
        gained, lost = gained + (new and not old), lost + (old and not new)
        scored = both_scored(rows)
        best = [{i for i, r in enumerate(scored) if r[w] == max(s[w] for s in scored)} for w in ("old", "new")]
        best_changed += bool(scored) and not best[0] & best[1]
    expected = (best_changed, flipped, flipped_groups, gained, lost)
    assert (found.best_changed, found.flipped, found.flipped_groups, found.gained, found.lost) == expected
    for side, mean, missing in (
        ("old", found.old_mean, found.old_unscored),
        ("new", found.new_mean, found.new_unscored),
    ):
        values = [row[side] for row in table.to_dicts() if row[side] is not None]
        assert mean == pytest.approx(math.fsum(values) / len(values))
        assert missing == len(table) - len(values)
    moved = [abs(row["new_advantage"] - row["old_advantage"]) for row in table.to_dicts()]
    assert found.mean_abs_advantage_shift == pytest.approx(sum(moved) / len(moved))


@pytest.mark.parametrize("seed", range(8))
def test_rank_correlations_against_scipy(seed: int) -> None:
    from scipy.stats import spearmanr

    table = random_frame(seed)
    scored = both_scored(table.to_dicts())
    everything = spearmanr([row["old"] for row in scored], [row["new"] for row in scored]).statistic
    assert pooled(table).value == pytest.approx(everything, abs=1e-12)
    inside = []
    for rows in map(both_scored, groups_of(table)):
        old, new = [row["old"] for row in rows], [row["new"] for row in rows]
        if len(set(old)) > 1 and len(set(new)) > 1:
            inside.append(spearmanr(old, new).statistic)
    assert inside, "the frame is too small to say anything"
    found = within_groups(table)
    assert found.value == pytest.approx(np.mean(inside), abs=1e-12) and found.groups == len(inside)


@pytest.mark.parametrize("seed", range(8))
def test_the_components_add_up(seed: int) -> None:
    """Shift of the centred totals, computed from the totals alone, is the sum of the components' shifts."""
    table = random_frame(seed)
    shifted = shifts(table, ["a", "b"])
    known = {(r["iteration"], r["group_id"], r["sample_id"]): r for r in shifted.to_dicts()}
    assert len(known) == sum(len(both_scored(rows)) for rows in groups_of(table))
    for rows in map(both_scored, groups_of(table)):
        for row in rows:
            centred = [row[w] - math.fsum(r[w] for r in rows) / len(rows) for w in ("new", "old")]
            found = known[row["iteration"], row["group_id"], row["sample_id"]]
            assert found["shift"] == pytest.approx(centred[0] - centred[1], abs=1e-12)
            assert found["shift:a"] + found["shift:b"] == pytest.approx(found["shift"], abs=1e-12)
    shares = [component.share for component in effect(table, ["a", "b"]).components]
    assert sum(share for share in shares if share is not None) == pytest.approx(1.0)


def test_what_is_added_to_a_whole_group_moves_nobody() -> None:
    assert 0.1 + 0.1 - 0.1 != 0.3 + 0.1 - 0.3
    rows = totals([0.1, 0.3], [0.1 + 0.1, 0.3 + 0.1]) + totals([0.3, 0.2], [-0.7, -0.8], group_id=1)
    found = effect(frame(rows), ["a"])
    assert found.components[0].share is None, "what is left is rounding"
    assert found.within.value == 1.0 and found.best_changed == 0


def test_ties_for_the_best() -> None:
    """A group's best changes only when none of the old best is among the new."""
    cases = [([1.0, 1.0, 0.0], [2.0, 1.0, 0.0], 0), ([1.0, 1.0, 0.0], [0.0, 0.0, 1.0], 1), ([0.0] * 3, [0.0, 1, 2], 0)]
    for old, new, changed in cases:
        assert effect(frame(totals(list(old), list(new))), ["a"]).best_changed == changed, (old, new)


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ([1.0, 1.0, 1.0], [0.0, 1.0, 2.0], "all old totals are equal"),
        ([0.0, 1.0, 2.0], [1.0, 1.0, 1.0], "all new totals are equal"),
        ([0.0, 0.0], [1.0, 1.0], "all old and all new totals are equal"),
        ([0.0, None, 1.0], [None, 1.0, 1.0], "fewer than two completions are scored both times"),
        ([None, None], [1.0, 2.0], "fewer than two completions are scored both times"),
    ],
)
def test_no_correlation_without_a_reason(old: list[float | None], new: list[float | None], reason: str) -> None:
    table = frame(totals(old, new))
    assert (pooled(table).value, pooled(table).reason) == (None, reason)
    assert within_groups(table).value is None and within_groups(table).reason
    found = effect(table, ["a"])
    assert found.within.value is None and found.completions == len(old)
    if None not in old:
        assert found.old_mean == sum(value or 0.0 for value in old) / len(old)


def test_signal_is_an_advantage_in_the_loss() -> None:
    """An advantage that is masked out of the loss is no signal, and 0 in the loss is none."""
    rows = totals([0.0], [0.0], old_advantage=1.0, old_keep=False, new_advantage=1.0)
    rows += totals([0.0], [0.0], group_id=1, old_advantage=1.0, new_advantage=0.0)
    rows += totals([0.0], [0.0], group_id=2, old_advantage=-1.0, new_advantage=2.0)
    found = effect(frame(rows), ["a"])
    assert (found.gained, found.lost, found.flipped_groups) == (1, 1, 1)

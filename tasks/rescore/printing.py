"""A rescoring in the terminal: a row per iteration, a row per reward component, and what it means in words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from rl_core.counterfactual import Correlation, Effect

if TYPE_CHECKING:
    from tasks.rescore import Rescoring

_SCALE = (
    (0.95, "almost as before"),
    (0.7, "much as before"),
    (0.3, "rather differently"),
    (-0.3, "with hardly any relation to the old order"),
    (-1.0, "rather the other way round"),
)
_COLUMNS = (
    "it",
    "reward\nold",
    "\nnew",
    "ranks\nin group",
    "\nover all",
    "groups\nnew best",
    "\nflip",
    "\nsignal",
    "samples\nflip",
    "adv.\nshift",
)


def print_comparison(console: Console, result: Rescoring) -> None:
    """Both tables and a paragraph, readable at 80 columns."""
    asked = ", ".join(result.overrides) or "the same settings, the rewards' source as it is now"
    console.print(f"[bold]{result.run}[/]  rescored with {escape(asked)}", highlight=False)
    console.print()
    console.print(_iterations(result))
    console.print()
    console.print(_components(result))
    for iteration, why in result.skipped.items():
        console.print(f"iteration {iteration} is not compared: {why}", highlight=False, style="yellow")
    console.print()
    console.print(conclusion(result), highlight=False)


def _iterations(result: Rescoring) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim", show_footer=False)
    for column in _COLUMNS:
        table.add_column(column, justify="right", no_wrap=True)
    for iteration, found in result.iterations.items():
        table.add_row(*_row(str(iteration), found))
    table.add_section()
    table.add_row(*_row("all", result.overall), style="bold")
    return table


def _row(label: str, found: Effect) -> tuple[str, ...]:
    return (
        label,
        _number(found.old_mean),
        _number(found.new_mean),
        _correlation(found.within),
        _correlation(found.pooled),
        f"{found.best_changed}/{found.groups}",
        f"{found.flipped_groups}/{found.groups}",
        f"+{found.gained} -{found.lost}",
        f"{found.flipped}/{found.completions}",
        _number(found.mean_abs_advantage_shift),
    )


def _components(result: Rescoring) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("component", "weight", "weighted mean", "shift in groups", "share of shift", "values"):
        table.add_column(column, justify="left" if column in ("component", "values") else "right")
    for found in result.overall.components:
        old, new = result.weights[found.name]
        calls = result.called.get(found.name)
        share = "-" if found.share is None else f"{found.share:.0%}"
        table.add_row(
            escape(found.name),
            f"{_weights(old)} → {_weights(new)}",
            f"{_number(found.old_mean)} → {_number(found.new_mean)}",
            _number(found.mean_abs_shift),
            share,
            "not used" if calls is None else f"computed for {calls}" if calls else "as stored",
        )
    return table


def conclusion(result: Rescoring) -> str:
    """What would have changed, in a paragraph."""
    found = result.overall
    if _unchanged(found):
        return f"Nothing would have changed: all {found.completions} completions keep their rewards and advantages."
    text = [_ranking(found), _flips(found)]
    if found.best_changed:
        text.append(f"In {found.best_changed} of {found.groups} groups another completion is the best.")
    if found.gained or found.lost:
        text.append(f"Groups that gain a training signal: {found.gained}, that lose it: {found.lost}.")
    if found.new_unscored != found.old_unscored:
        text.append(f"Completions without a score: {found.new_unscored} instead of {found.old_unscored}.")
    shares = [c for c in found.components if c.share is not None]
    if len(shares) > 1:
        most = max(shares, key=lambda c: abs(c.share or 0.0))
        text.append(f"{most.name} accounts for {most.share:.0%} of the shift inside the groups.")
    elif not shares:
        text.append("Inside the groups no reward moved: what changes comes from how advantages are made of them.")
    return " ".join(text)


def _ranking(found: Effect) -> str:
    rank = found.within
    if rank.value is None:
        return f"How the completions of a group rank cannot be compared: {rank.reason}."
    exactly = rank.value > 1.0 - 1e-12
    how = "exactly as before" if exactly else next(words for bound, words in _SCALE if rank.value >= bound)
    return (
        f"The new rewards would have ranked the completions of a group {how}: the rank correlation is "
        f"{rank.value:.2f}, the mean over the {rank.groups} of {found.groups} groups where both vary."
    )


def _flips(found: Effect) -> str:
    if not found.flipped:
        return f"None of {found.groups} groups flips: no advantage changes its sign."
    verb = "flips" if found.flipped_groups == 1 else "flip"
    return (
        f"{found.flipped_groups} of {found.groups} groups {verb}: pushed up before and down now, or the reverse, are "
        f"{found.flipped} of {found.completions} completions."
    )


def _unchanged(found: Effect) -> bool:
    moved = [found.mean_abs_advantage_shift, *(component.mean_abs_shift for component in found.components)]
    return (
        not any(moved)
        and (found.old_mean, found.old_unscored) == (found.new_mean, found.new_unscored)
        and found.gained == found.lost == 0
    )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _correlation(found: Correlation) -> str:
    return "-" if found.value is None else f"{found.value:.2f}"


def _weights(found: list[float]) -> str:
    return "/".join(f"{weight:g}" for weight in found) or "none"

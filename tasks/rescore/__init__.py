"""Counterfactual scoring: what other rewards would have said of all completions of a run.

Scores and advantages are made by the code of the two stages, in this process (reward functions in processes of their
own), into a temporary folder. The run is only read, so it needs no lock and may be at work meanwhile.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import polars as pl

from rl_core.counterfactual import COLUMNS, Effect, effect
from rl_core.errors import ConfigError, RunError
from rl_core.recipes import override_key
from tasks.display.status import open_run
from tasks.rescore.printing import print_comparison
from tasks.rescore.tables import Rescorer

__all__ = ["SETTINGS", "Rescoring", "print_comparison", "rescore"]

_ALGORITHM = ("name", "advantage", "std_ddof", "std_eps", "kl", "truncation", "truncated_reward", "overlong")
SETTINGS = ("rewards", "scoring", *(f"algorithm.{name}" for name in _ALGORITHM))
"""What decides scores and advantages, and nothing before them."""


@dataclass(frozen=True)
class Rescoring:
    """The comparison of a run with itself under other settings.

    Attributes:
        run, overrides: what was asked for.
        rows: a row per completion, columns as in `rl_core.counterfactual`.
        overall, iterations: the effect on all, and on each iteration.
        weights, called, skipped: as in `Rescorer`.
    """

    run: str
    overrides: list[str]
    rows: pl.DataFrame
    overall: Effect
    iterations: dict[int, Effect]
    weights: dict[str, tuple[list[float], list[float]]]
    called: dict[str, int]
    skipped: dict[int, str]


def rescore(run: str, overrides: list[str], progress: Callable[[int, int], None] | None = None) -> Rescoring:
    """Score every iteration of a run again with `overrides` on top of its own config, and compare.

    Without overrides the reward functions' present source is compared with what the run has. `progress` gets the
    iterations done and their number. Raises `ConfigError` for a setting that is none of `SETTINGS`, `RunError` when
    nothing has been scored yet, and whatever the two stages raise under the new settings.
    """
    _check(overrides)
    store = open_run(run)
    numbers = store.iteration_numbers()
    frames = []
    with tempfile.TemporaryDirectory(prefix="rlstages-rescore-") as folder:
        rescorer = Rescorer(store, overrides, Path(folder))
        try:
            for done, iteration in enumerate(numbers, 1):
                frame = rescorer.compare(iteration)
                frames += [] if frame is None else [frame]
                if progress is not None:
                    progress(done, len(numbers))
        finally:
            rescorer.close()
    if not frames:
        raise RunError(
            f"run {run!r} has no iteration that can be compared",
            expected="at least one with scores and advantages",
            got="; ".join(f"iteration {k}: {why}" for k, why in rescorer.skipped.items()) or "no iteration",
        )
    names = list(rescorer.weights)
    rows = pl.concat([_with_all(frame, names) for frame in frames])
    parts = {int(key[0]): part for key, part in rows.partition_by("iteration", as_dict=True).items()}
    effects = {iteration: effect(part, names) for iteration, part in parts.items()}
    return Rescoring(
        run, overrides, rows, effect(rows, names), effects, rescorer.weights, rescorer.called, rescorer.skipped
    )


def _check(overrides: list[str]) -> None:
    keys = [override_key(item) for item in overrides]
    refused = [key for key in keys if not any(key == s or key.startswith(f"{s}.") for s in SETTINGS)]
    if refused:
        raise ConfigError(
            f"rescoring cannot have another {', '.join(refused)}",
            expected=f"settings below {', '.join(SETTINGS)}",
            todo="what decides completions or training needs a fork: rlstages fork RUN NEW --iteration K --set ...",
        )


def _with_all(frame: pl.DataFrame, names: list[str]) -> pl.DataFrame:
    """A component that an iteration does not have adds nothing to its totals: 0, where null would be unscored."""
    columns = [f"{when}:{name}" for name in names for when in ("old", "new")]
    frame = frame.with_columns(pl.lit(0.0).alias(column) for column in columns if column not in frame.columns)
    return frame.select(*COLUMNS, *columns)

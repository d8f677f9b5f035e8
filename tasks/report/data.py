"""What a report tells about a run, read from its folder: tables for the charts, headline numbers, the verdict.

Every table is a dictionary of columns of equal length, JSON-plain; a missing value is null.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from rl_core.config import RunConfig
from rl_core.errors import RlstagesError
from rl_core.evaluation import bootstrap_interval, problem_means
from rl_core.manifest import Manifest
from rl_core.parent import Parent
from rl_core.schemas import EVALUATION, TOTAL_REWARDS, TRAJECTORIES
from rl_core.stages import STAGES
from tasks.display.status import first_evaluation, iteration_state, manifests, open_run
from tasks.iterations import Iterations
from tasks.live.adjustment_log import Adjustment, AdjustmentLog
from tasks.storage.store import RunStore
from tasks.storage.tables import read_table

Table = dict[str, list[Any]]

START = -1
"""Number under which the model a run starts from stands in tables."""
_BAND_DRAWS = 2000
_MAX_BINS = 24


@dataclass(frozen=True)
class Made:
    """An iteration as its record has it.

    Attributes:
        number: of the iteration.
        state: complete, stale (made from another policy than it would start from now) or begun.
        record: content of `iteration.json`.
        manifests: by stage; null where an output is missing or damaged.
    """

    number: int
    state: str
    record: dict[str, Any]
    manifests: dict[str, Manifest | None]

    def metrics(self) -> dict[str, float | None]:
        return {name: value for m in self.manifests.values() if m for name, value in m.metrics.items()}

    def seconds(self) -> dict[str, float]:
        """Wall time of each stage as its manifest has it, in seconds."""
        found = {stage: m.measured.get("seconds") for stage, m in self.manifests.items() if m}
        return {stage: float(value) for stage, value in found.items() if isinstance(value, (int, float))}


class RunData:
    """A run on disk. Outputs that cannot be read are named in `notes` and left out.

    Raises `RunError` when there is no such run.
    """

    def __init__(self, run: str) -> None:
        self.store: RunStore = open_run(run)
        self.record: dict[str, Any] = self.store.record()
        self.parent: Parent | None = self.store.parent()
        self.config: RunConfig = self.store.config()
        self.notes: list[str] = []
        self.iterations = self._iterations()
        self.complete = sum(made.state == "complete" for made in self.iterations)
        self.final = next((m for made in reversed(self.iterations) if (m := made.manifests.get("evaluate"))), None)
        self.start: tuple[Path, Manifest] | None = first_evaluation(self.store, self.final)
        """The starting model's evaluation, made like the last one."""

    def _iterations(self) -> list[Made]:
        done = Iterations(self.store, self.config, self.store.base_model()).complete()
        found = []
        for number in self.store.iteration_numbers():
            record = self.store.iteration(number)
            state = iteration_state(record, number < done)
            found.append(Made(number, state, record or {}, manifests(self.store, number)))
            damaged = [stage for stage, manifest in found[-1].manifests.items() if manifest is None]
            if damaged:
                self.notes.append(f"iteration {number}: the output of {', '.join(damaged)} is missing or damaged")
        return found

    def folder(self, made: Made, stage: str) -> Path | None:
        """Folder of a stage's output; null where there is none that is whole."""
        return self.store.folder(made.record["stages"][stage]["folder"]) if made.manifests.get(stage) else None

    def rows(self, folder: Path | None, schema: pa.Schema, where: str) -> list[dict[str, Any]]:
        """Rows of an output; none, and a note, where they cannot be read."""
        if folder is None:
            return []
        try:
            found: list[dict[str, Any]] = read_table(folder, schema).to_pylist()
        except RlstagesError as error:
            self.notes.append(f"{where}: {error.message}")
            return []
        return found

    # -- tables -------------------------------------------------------------------------------------------------------
    def tables(self) -> dict[str, Table]:
        """Everything that is drawn."""
        return {
            "metrics": self.metrics_table(),
            "heldout": self.heldout_table(),
            "seconds": self.seconds_table(),
            "components": self.components_table(),
            "lengths": self.lengths_table(),
        }

    def metrics_table(self) -> Table:
        """A row per iteration, a column per metric; `band/reward_low` and `_high` bound its mean reward."""
        found = [made.metrics() for made in self.iterations]
        names = list(dict.fromkeys(name for metrics in found for name in metrics))
        table: Table = {"iteration": [made.number for made in self.iterations]}
        table |= {name: [metrics.get(name) for metrics in found] for name in names}
        bands = [self._reward_band(made) for made in self.iterations]
        table["band/reward_low"] = [band[0] if band else None for band in bands]
        table["band/reward_high"] = [band[1] if band else None for band in bands]
        return table

    def _reward_band(self, made: Made) -> tuple[float, float] | None:
        """95% bootstrap interval over groups of the mean task reward; null below two groups."""
        rows = self.rows(self.folder(made, "score"), TOTAL_REWARDS, f"iteration {made.number}, score")
        groups: dict[int, list[float]] = {}
        for row in rows:
            if row["reward"] is not None and math.isfinite(row["reward"]):
                groups.setdefault(row["group_id"], []).append(row["reward"])
        if len(groups) < 2:
            return None
        n = sum(map(len, groups.values()))
        mean = math.fsum(reward for rewards in groups.values() for reward in rewards) / n
        # Of equal groups these are the groups' means; of unequal ones their mean is still that over completions.
        values = [mean + math.fsum(r - mean for r in rewards) * len(groups) / n for rewards in groups.values()]
        return bootstrap_interval(values, seed=0, draws=_BAND_DRAWS)

    def heldout_table(self) -> Table:
        """Accuracy with its interval per evaluated policy: greedy, and the mean of k sampled answers."""
        table: Table = {"iteration": [], "answers": [], "accuracy": [], "low": [], "high": []}
        evaluated = [(START, self.start[1].metrics)] if self.start else []
        evaluated += [(made.number, m.metrics) for made in self.iterations if (m := made.manifests.get("evaluate"))]
        for number, metrics in evaluated:
            for name, low, high in _accuracies(metrics):
                answers = "greedy" if "greedy" in name else f"mean of {name.rpartition('_')[2]} sampled"
                for column, value in zip(table, (number, answers, *map(metrics.get, (name, low, high))), strict=True):
                    table[column].append(value)
        return table

    def seconds_table(self) -> Table:
        rows = [
            (made.number, stage, order, seconds[stage])
            for made in self.iterations
            for seconds in [made.seconds()]
            for order, stage in enumerate(STAGES)
            if stage in seconds
        ]
        return _columns(("iteration", "stage", "order", "seconds"), rows)

    def components_table(self) -> Table:
        """Unweighted mean of every reward component per iteration."""
        rows = [
            (made.number, name.removeprefix("reward/").removesuffix("_mean"), value)
            for made in self.iterations
            if (scored := made.manifests.get("score"))
            for name, value in scored.metrics.items()
            if name.startswith("reward/") and name.endswith("_mean")
        ]
        return _columns(("iteration", "component", "mean"), rows)

    def lengths_table(self) -> Table:
        """Completions by length in bins of equal width, of the first and of the last iteration."""
        generated = [made for made in self.iterations if made.manifests.get("generate")]
        lengths = {}
        for made in {m.number: m for m in (*generated[:1], *generated[-1:])}.values():
            schema = pa.schema([TRAJECTORIES.field(name) for name in ("completion_ids", "truncated")])
            rows = self.rows(self.folder(made, "generate"), schema, f"iteration {made.number}, generate")
            lengths[made.number] = [(len(row["completion_ids"]), row["truncated"]) for row in rows]
        longest = max((n for found in lengths.values() for n, _ in found), default=0)
        width = max(1, math.ceil((longest + 1) / _MAX_BINS))
        counts: dict[tuple[int, int, str], int] = {}
        for number, found in lengths.items():
            for n, truncated in found:
                key = (number, n // width * width, "truncated" if truncated else "ended")
                counts[key] = counts.get(key, 0) + 1
        bins = [(number, low, low + width, end, count) for (number, low, end), count in sorted(counts.items())]
        return _columns(("iteration", "from_tokens", "to_tokens", "end", "completions"), bins)

    # -- the verdict --------------------------------------------------------------------------------------------------
    def gain(self) -> tuple[float, float, float, int] | None:
        """Last accuracy minus the starting model's on the same problems: difference, 95% bootstrap interval, problems.

        Greedy answers where there are any, else the mean of the sampled ones. Null without both evaluations.
        """
        last = next((made for made in reversed(self.iterations) if made.manifests.get("evaluate")), None)
        if self.start is None or last is None:
            return None
        before, after = self._scores(self.start[0]), self._scores(self.folder(last, "evaluate"))
        if not before or before.keys() != after.keys():
            return None
        differences = [after[key] - before[key] for key in sorted(before)]
        interval = bootstrap_interval(differences, seed=0)
        assert interval is not None
        return math.fsum(differences) / len(differences), *interval, len(differences)

    def _scores(self, folder: Path | None) -> dict[str, float]:
        schema = pa.schema([EVALUATION.field(name) for name in ("prompt_id", "mode", "correct")])
        rows = self.rows(folder, schema, "evaluation")
        rows = [row for row in rows if row["mode"] == "greedy"] or rows
        return problem_means([row["prompt_id"] for row in rows], [float(row["correct"]) for row in rows])

    def adjustments(self) -> list[Adjustment]:
        """Changes of settings while the run went on, oldest first."""
        return AdjustmentLog(self.store).entries


def _accuracies(metrics: dict[str, float | None]) -> list[tuple[str, str, str]]:
    """Names of every accuracy in an evaluation, with those of its interval's ends; greedy first."""
    found = [("eval/greedy_accuracy", "eval/greedy_low", "eval/greedy_high")]
    sampled = [name for name in metrics if "/avg_at_" in name and name.rpartition("_")[2].isdigit()]
    found += [(name, f"{name}_low", f"{name}_high") for name in sampled]
    return [names for names in found if names[0] in metrics]


def _columns(names: tuple[str, ...], rows: list[tuple[Any, ...]]) -> Table:
    return {name: [row[i] for row in rows] for i, name in enumerate(names)}

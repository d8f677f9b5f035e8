"""Live changes: settings of a run that change from one iteration to the next, while it runs or between two starts."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from rl_core.adjustable import ADJUSTABLE, changes, check_changes, settings
from rl_core.config import RunConfig
from rl_core.errors import ConfigError
from rl_core.recipes import apply_overrides, build_config, config_json
from tasks.events import StageEvent, tell
from tasks.iterations import Iterations
from tasks.live.adjustment_log import Adjustment, AdjustmentLog
from tasks.provenance import now, who
from tasks.settings import runs_dir
from tasks.storage.store import RunStore

if TYPE_CHECKING:
    from tasks.session import Session


def adjust(run: str, overrides: list[str], why: str = "") -> list[Adjustment]:
    """Change settings of a run from its first iteration that has not begun; returns what changed.

    Works while another process runs it. Raises `ConfigError`, and writes nothing, for a setting that is not adjustable
    and for a value that does not fit; `RunError` when there is no such run.
    """
    store = RunStore(runs_dir(), run)
    store.record()
    log = AdjustmentLog(store)
    with log.locked():
        log.reload()
        config = store.config()
        first = Iterations(store, config, store.base_model()).next_to_begin()
        starts = sorted({first, *(entry.from_iteration for entry in log.entries if entry.from_iteration > first)})
        before = {start: log.applied(config, start) for start in starts}
        after = {start: _changed(before[start], overrides) for start in starts}
        # A change that was to come into force later is overruled, even by the value that holds until then.
        keys = dict.fromkeys(key for start in starts for key in check_changes(before[start], after[start]))
        old, new = settings(before[first]), settings(after[first])
        at, by, why = now(), who(), why.strip()
        made = [
            Adjustment(id=number, at=at, by=by, why=why, key=key, old=old[key], new=new[key], from_iteration=first)
            for number, key in enumerate(keys, len(log.entries) + 1)
        ]
        _check_reruns(store, log, config, made)
        if made:
            log.append(made)
    return made


def _changed(config: RunConfig, overrides: list[str]) -> RunConfig:
    return build_config(apply_overrides(config_json(config), overrides), "the run with these changes")


def _check_reruns(store: RunStore, log: AdjustmentLog, config: RunConfig, made: list[Adjustment]) -> None:
    """Iterations that are to be made anew may have overrides of their own; the changes have to fit them too."""
    for entry in made[:1]:
        iteration = entry.from_iteration
        while record := store.iteration(iteration):
            data = config_json(log.applied(config, iteration, made))
            build_config(apply_overrides(data, record["overrides"]), f"iteration {iteration} with its own overrides")
            iteration += 1


def adjustments(store: RunStore) -> list[Adjustment]:
    """All live changes of a run, in the order they were made."""
    return AdjustmentLog(store).entries


def changes_at(store: RunStore, iteration: int) -> list[Adjustment]:
    """The live changes that came into force with an iteration."""
    return [entry for entry in adjustments(store) if entry.from_iteration == iteration]


def check_not_adjusted(store: RunStore, wanted: RunConfig) -> None:
    """Refuse to change a setting in the run's config that an adjustment overrules. Raises `ConfigError`."""
    adjusted = {entry.key for entry in adjustments(store)}
    if overruled := sorted(adjusted & changes(store.config(), wanted).keys()):
        options = " ".join(f"--set {key}=..." for key in overruled)
        raise ConfigError(
            f"{', '.join(overruled)} of run {store.name!r} was adjusted, which goes before its config",
            todo=f"change it by `rlstages adjust {store.name} {options}`",
        )


def print_adjustments(console: Console, run: str) -> None:
    """A row per live change, or what can be changed."""
    store = RunStore(runs_dir(), run)
    store.record()
    entries = adjustments(store)
    if not entries:
        console.print(f"no live changes; possible are {', '.join(ADJUSTABLE)}", highlight=False)
        return
    table = Table("from", "setting", "old", "new", "by", "at", "why", box=None, pad_edge=False, header_style="dim")
    for column in table.columns:
        column.overflow = "fold"
    for entry in entries:
        values = json.dumps(entry.old), json.dumps(entry.new)
        cells = [str(entry.from_iteration), entry.key, *values, entry.by, entry.at, entry.why]
        table.add_row(*(escape(cell) for cell in cells))
    console.print(table)


def publish_adjustments(session: Session) -> None:
    """Tell the terminal, Prefect and MLflow about live changes they do not know of yet."""
    fresh = [entry for entry in adjustments(session.store) if not session.tracker.has_tag(_tag(entry))]
    for entry in fresh:
        tell(StageEvent("notice", session.store.name, entry.from_iteration, message=str(entry)))
    if fresh:
        _publish_table(session.store)
    for entry in fresh:
        session.tracker.set_tag(_tag(entry), str(entry))


def _tag(entry: Adjustment) -> str:
    return f"rlstages.adjustment.{entry.id:04d}"


def _publish_table(store: RunStore) -> None:
    from prefect.artifacts import create_table_artifact

    rows = [entry.model_dump(mode="json") for entry in adjustments(store)]
    create_table_artifact(rows, key=f"{store.name}-adjustments", description=f"{store.name}: live changes")

"""What the terminal tells about a run on disk: nothing here starts a server or a worker."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from rl_core.config import RunConfig
from rl_core.errors import RunError, StageError
from rl_core.manifest import Manifest
from rl_core.schemas import ADVANTAGES, TOTAL_REWARDS, TRAJECTORIES
from rl_core.stages import STAGES
from tasks.attempts import attempts, is_worked_on
from tasks.display.summary import number
from tasks.iterations import Iterations
from tasks.lineage.references import describe_lineage
from tasks.live.adjustment_log import AdjustmentLog
from tasks.live.pausing import paused
from tasks.servers.up_record import pages
from tasks.settings import runs_dir, tracking_uri
from tasks.storage.files import read_manifest
from tasks.storage.store import RunStore
from tasks.storage.tables import read_table
from tasks.tracking.gate import CHALLENGER, CHAMPION


def open_run(run: str) -> RunStore:
    store = RunStore(runs_dir(), run)
    store.record()
    return store


def check_run(run: str, iteration: int) -> RunConfig:
    """The run's config; raises `RunError` when there is no such run or iteration."""
    store = open_run(run)
    if store.iteration(iteration) is None:
        last = _last_iteration(store)
        raise RunError(
            f"run {run!r} has no iteration {iteration}",
            expected=f"0 to {last}" if last >= 0 else "a run with at least one iteration",
            got=str(iteration),
        )
    return store.config()


def manifests(store: RunStore, iteration: int) -> dict[str, Manifest | None]:
    """Manifest by stage of what an iteration is made of; null where an output is missing or damaged.

    While an iteration is made anew its record still names outputs of the time before: those whose inputs are no longer
    the iteration's own are left out.
    """
    record = store.iteration(iteration) or {"stages": {}}
    made = record["stages"]
    found: dict[str, Manifest | None] = {}
    current = {"policy": record["policy"]["digest"]} if "policy" in record else {}
    for name, spec in STAGES.items():
        if name not in made:
            continue
        manifest = read_manifest(store.path / made[name]["folder"])
        if manifest is None or all(current.get(read) == manifest.inputs[read].digest for read in spec.reads):
            found[name], current[name] = manifest, made[name]["digest"]
    return found


def print_status(console: Console, run: str) -> None:
    """Config in a line, then a row per iteration."""
    store = open_run(run)
    config = store.config()
    size = f"{config.generate.prompts_per_iteration} prompts × {config.generate.group_size} completions"
    what = f"{config.algorithm.name} on {config.model.source}, {config.environment.kind}"
    console.print(f"[bold]{run}[/]  {what}, {size}, seed {config.seed}", highlight=False)
    for line in describe_lineage(store):
        console.print(line, highlight=False)
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("iteration", "state", "reward", "held-out", "signal", "tokens", "seconds", "gate"):
        table.add_column(column, justify="left" if column in ("iteration", "state", "gate") else "right")
    done = Iterations(store, config, store.base_model()).complete()
    for iteration in range(_last_iteration(store) + 1):
        table.add_row(*_status_row(store, iteration, iteration < done))
    console.print(table)
    for line in _standing(store, done == config.iterations):
        console.print(line, highlight=False, soft_wrap=True)
    console.print(
        f"{done} of {config.iterations} iterations complete, outputs in {store.path}", highlight=False, soft_wrap=True
    )


def print_runs(console: Console) -> None:
    """A row per run below `runs/`."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("run", "iterations", ""):
        table.add_column(column, justify="right" if column == "iterations" else "left")
    names = sorted(path.parent.name for path in runs_dir().glob("*/run.json") if ".partial-" not in path.parent.name)
    for name in names:
        store = RunStore(runs_dir(), name)
        done = Iterations(store, config := store.config(), store.base_model()).complete()
        standing = "; ".join(_standing(store, done == config.iterations))
        table.add_row(name, f"{done} of {config.iterations}", standing)
    console.print(table if names else f"there is no run below {runs_dir().absolute()}", soft_wrap=not names)


def _standing(store: RunStore, is_complete: bool) -> list[str]:
    """Whether somebody works on the run, whether it is paused, how often it was adjusted."""
    works, pause, changes = is_worked_on(store), paused(store), len(AdjustmentLog(store).entries)
    at_work = f"process {attempts(store)[-1]['pid']} works on it" if works and attempts(store) else ""
    stopped = "" if works or is_complete else f"nobody works on it: rlstages run {store.name}"
    changed = f"{changes} live changes: rlstages adjust {store.name}" if changes else ""
    return [line for line in (at_work, stopped, str(pause) if pause else "", changed) if line]


def _status_row(store: RunStore, iteration: int, current: bool) -> list[str]:
    record = store.iteration(iteration)
    found = manifests(store, iteration)
    metrics: dict[str, float | None] = {}
    for manifest in found.values():
        metrics |= manifest.metrics if manifest else {}
    names = ("reward/mean", "eval/greedy_accuracy", "groups/kept_frac", "completion/tokens_mean")
    values = [number(metrics[name]) if name in metrics else "-" for name in names]
    seconds = [m.measured.get("seconds") for m in found.values() if m]
    spent = sum(s for s in seconds if isinstance(s, (int, float)))
    damaged = [name for name, manifest in found.items() if manifest is None]
    state = f"damaged: {', '.join(damaged)}" if damaged else iteration_state(record, current)
    decision = found.get("register")
    gate = {CHAMPION: "passed", CHALLENGER: "refused"}.get(str(decision.state.get("alias")), "") if decision else ""
    return [str(iteration), state, *values, f"{spent:.1f}", gate]


def iteration_state(record: dict[str, Any] | None, current: bool) -> str:
    """In a word; `current` says that all before it are complete too, and that it is made from them."""
    return "missing" if record is None else "begun" if not record["complete"] else "complete" if current else "stale"


def _last_iteration(store: RunStore) -> int:
    return max(store.iteration_numbers(), default=-1)


def print_samples(console: Console, run: str, iteration: int, groups: int) -> None:
    """The groups with the highest and the lowest mean reward, every completion with reward and advantage."""
    check_run(run, iteration)
    rows = _sample_rows(open_run(run), iteration)
    by_group: dict[int, list[dict[str, Any]]] = {}
    for row in rows:
        by_group.setdefault(row["group_id"], []).append(row)
    ranked = sorted(by_group.values(), key=_mean_reward, reverse=True)
    console.rule(f"{run}, iteration {iteration}: best groups")
    for group in ranked[:groups]:
        _print_group(console, group)
    console.rule("worst groups")
    for group in ranked[::-1][: min(groups, max(0, len(ranked) - groups))]:
        _print_group(console, group)


def _sample_rows(store: RunStore, iteration: int) -> list[dict[str, Any]]:
    current = manifests(store, iteration)
    made = {name: record for name, record in (store.iteration(iteration) or {})["stages"].items() if name in current}
    if "generate" not in made:
        raise RunError(f"iteration {iteration} of run {store.name!r} has no trajectories yet")
    columns = ["group_id", "sample_id", "prompt_messages", "text", "finish_reason"]
    rows = read_table(store.path / made["generate"]["folder"], TRAJECTORIES).select(columns).to_pylist()
    for stage, schema in (("score", TOTAL_REWARDS), ("advantage", ADVANTAGES)):
        if stage in made:
            table = read_table(store.path / made[stage]["folder"], schema).to_pylist()
            known = {(row["group_id"], row["sample_id"]): row for row in table}
            rows = [{**known[row["group_id"], row["sample_id"]], **row} for row in rows]
    found: list[dict[str, Any]] = rows
    return found


def _mean_reward(group: list[dict[str, Any]]) -> float:
    scored = [row["reward"] for row in group if row.get("reward") is not None]
    return sum(scored) / len(scored) if scored else float("-inf")


def _print_group(console: Console, group: list[dict[str, Any]]) -> None:
    prompt = " / ".join(message["content"] for message in group[0]["prompt_messages"] if message["role"] != "system")
    console.print(
        f"[bold]group {group[0]['group_id']}[/]  {escape(_short(prompt, max(40, console.width - 16)))}", highlight=False
    )
    console.print("  sample  reward  advantage  finish  answer", style="dim")
    for row in sorted(group, key=lambda row: row["sample_id"]):
        reward = "-" if row.get("reward") is None else f"{row['reward']:.3f}"
        advantage = "-" if row.get("advantage") is None else f"{row['advantage']:+.3f}"
        note = row.get("drop_reason") or ""
        start = f"  {row['sample_id']:>6} {reward:>7} {advantage:>10}  {row['finish_reason']:<6}  "
        room = max(20, console.width - len(start) - len(note) - 1)
        console.print(f"{start}{escape(_short(row['text'], room))} [dim]{note}[/]", highlight=False, soft_wrap=True)


def _short(text: str, limit: int) -> str:
    """One line; what would move the cursor or change the terminal is shown as its escape."""
    flat = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text[:limit])
    return flat if len(text) <= limit and len(flat) <= limit else f"{flat[: limit - 1]}…"


def closing_lines(run: str) -> dict[str, str]:
    """What to know at the end of a run: result, folder, champion, how to open both UIs."""
    store = open_run(run)
    config = store.config()
    last = _last_iteration(store)
    lines = {"run folder": str(store.path)}
    final = manifests(store, last).get("evaluate")
    base = first_evaluation(store, final)
    if base and final and "eval/greedy_accuracy" in final.metrics:
        before, after = (number(m.metrics["eval/greedy_accuracy"]) for m in (base[1], final))
        lines["held-out"] = f"{before} before training, {after} after {last + 1} iterations"
    champion = _champion(config.model_name)
    if champion:
        lines["champion"] = champion
    program = _program()
    lines["samples"] = f"{program} show {run} --iteration {last}"
    there = pages()
    how = "" if there.are_up else f", after `{program} up`"
    lines["Prefect UI"] = f"{there.prefect}{how}"
    served = tracking_uri().startswith(("http://", "https://"))
    lines["MLflow UI"] = tracking_uri() if served else f"{there.mlflow}{how}"
    return lines


def _program() -> str:
    """How this command line was called, so that what it prints can be typed: it need not be on PATH."""
    return sys.argv[0] if Path(sys.argv[0]).name == "rlstages" else "rlstages"


def first_evaluation(store: RunStore, final: Manifest | None) -> tuple[Path, Manifest] | None:
    """Folder and manifest of the starting model's evaluation: same problems, same settings as `final`."""
    found = [(path, read_manifest(path)) for path in store.outputs(-1, "evaluate")]
    return next(((path, m) for path, m in found if m and final and m.identity == final.identity), None)


def _champion(model_name: str) -> str:
    from tasks.tracking.registry import champion_version

    try:
        version = champion_version(tracking_uri(), model_name)
    except StageError as error:
        return f"not known: {error.message}"
    return f"models:/{model_name}@champion is version {version}" if version else "none yet"

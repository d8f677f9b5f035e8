"""The tables of a report: iterations, metrics, config, changes, lineage."""

from __future__ import annotations

import json
from collections.abc import Iterable
from html import escape
from typing import Any

from rl_core.metrics import METRICS, glossary_entry
from rl_core.recipes import build_config
from rl_core.stages import STAGES
from tasks.display.summary import number
from tasks.report.data import Made, RunData, Table

_SHORT = 12


def _table(head: Iterable[str], rows: Iterable[Iterable[str]], tall: bool = True, label: str = "") -> str:
    """A table that scrolls inside its box. Head and cells are HTML; a cell that starts with `<td` is taken as it is."""
    cells = "".join(cell if cell.startswith("<th") else f"<th scope='col'>{cell}</th>" for cell in head)
    body = "".join(
        "<tr>" + "".join(c if c.startswith("<td") else f"<td>{c}</td>" for c in row) + "</tr>" for row in rows
    )
    box = f'class="scroll{" tall" if tall else ""}" tabindex="0" role="region" aria-label="{escape(label)}"'
    return f"<div {box}><table><thead><tr>{cells}</tr></thead><tbody>{body}</tbody></table></div>"


def _right(value: float | None, missing: str = "") -> str:
    return f'<td class="number">{escape(number(value)) if value is not None else missing}</td>'


def _term(name: str, text: str = "") -> str:
    """A metric's name with its meaning as a tooltip."""
    entry = glossary_entry(name)
    if entry is None:
        return escape(text or name)
    tip = f"{name} ({METRICS[entry].unit}): {METRICS[entry].about}"
    return f'<span class="term" tabindex="0" data-tip="{escape(tip)}">{escape(text or name)}</span>'


_COLUMNS = {
    "reward/mean": "reward",
    "eval/greedy_accuracy": "held-out",
    "groups/kept_frac": "signal",
    "completion/truncated_frac": "truncated",
    "completion/tokens_mean": "tokens",
    "policy/entropy": "entropy",
}


def iterations(run: RunData) -> str:
    """A row per iteration: its state, headline metrics, time and decision."""
    if not run.iterations:
        return "<p>The run has no iteration yet.</p>"
    numbers = [f'<th scope="col" class="number">{_term(name, text)}</th>' for name, text in _COLUMNS.items()]
    head = ["iteration", "state", *numbers, '<th scope="col" class="number">seconds</th>', "alias", "decision"]
    rows = []
    for made in run.iterations:
        values, decision = made.metrics(), made.manifests.get("register")
        said = decision.state if decision else {}
        cells = [_right(values.get(name)) for name in _COLUMNS]
        cells += [_right(sum(made.seconds().values())), escape(str(said.get("alias", "")))]
        reason = f'<td class="wrap">{escape(str(said.get("reason", "")))}</td>'
        rows.append([str(made.number), escape(made.state), *cells, reason])
    return _table(head, rows, label="iterations")


def metrics(run: RunData, tables: dict[str, Table]) -> str:
    """Every metric with its meaning and its course; the values themselves are in the page's data."""
    table, rows = tables["metrics"], []
    start = run.start[1].metrics if run.start else {}
    for name in sorted(key for key in table if glossary_entry(key)):
        values = [value for value in table[name] if value is not None]
        entry = METRICS[glossary_entry(name) or name]
        ends = [start.get(name), *((values[0], values[-1], min(values), max(values)) if values else (None,) * 4)]
        cells = [_right(value, "–" if i else "") for i, value in enumerate(ends)]
        rows.append(
            [f"<code>{escape(name)}</code>", *cells, escape(entry.unit), f'<td class="wrap">{escape(entry.about)}']
        )
    head = ["metric", *(f'<th scope="col" class="number">{h}</th>' for h in ("start", "first", "last", "min", "max"))]
    return _table([*head, "unit", "meaning"], rows, label="metrics") if rows else ""


# -- config, changes, lineage ----------------------------------------------------------------------------------------
def changes(run: RunData) -> str:
    """Adjustments made while the run went on, and settings that single iterations were made anew with."""
    rows = []
    for one in run.adjustments():
        change = " → ".join(json.dumps(value, ensure_ascii=False) for value in (one.old, one.new))
        rows.append([str(one.from_iteration), *map(escape, (one.key, change, one.by, one.why, one.at))])
    for made in run.iterations:
        for item in made.record.get("overrides") or []:
            key, _, value = str(item).partition("=")
            rows.append([f"{made.number} only", escape(key), escape(value), "", "rerun of this iteration", ""])
    if not rows:
        return "<p>No setting was changed after the start.</p>"
    return "<h3>Changes</h3>" + _table(
        ["from iteration", "setting", "change", "by", "why", "at"], rows, label="changes"
    )


def config_table(run: RunData) -> str:
    """Every setting; those that differ from the default are in bold."""
    data = run.record["config"]
    least = {"name": data["name"], "model": {"source": data["model"]["source"]}, "rewards": [{"function": "x"}]}
    least["environment"] = {"kind": data["environment"]["kind"]}
    default = dict(_flat(build_config(least, "defaults").model_dump(mode="json")))
    rows = []
    for key, value in _flat(data):
        text = escape(json.dumps(value, ensure_ascii=False))
        same = key in default and default[key] == value and key not in ("name", "model.source", "environment.kind")
        rows.append(
            [escape(key) if same else f"<strong>{escape(key)}</strong>", f'<td class="wrap"><code>{text}</code>']
        )
    shown = _table(["setting", "value"], rows, label="config")
    return f"<details><summary>All settings (bold: not the default)</summary>{shown}</details>"


def _flat(data: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for key, value in data.items():
        nested = isinstance(value, dict) and value
        found += _flat(value, f"{prefix}{key}.") if nested else [(f"{prefix}{key}", value)]
    return found


def lineage(run: RunData) -> str:
    """Which outputs, by digest, every iteration is made of, and whose they are."""
    base = run.record["base_model"]
    words = f"<p>Starting model <code>{escape(base['digest'][:_SHORT])}</code>, {escape(run.config.model.source)}."
    if run.parent:
        words += f" Forked from <strong>{escape(run.parent.run)}</strong>, iteration {run.parent.iteration}, "
        words += f"{run.parent.stage}: what lies before is the parent's."
    rows = [
        [str(made.number), _digest(made.record["policy"]["digest"], made.record["policy"]["path"])]
        for made in run.iterations
    ]
    for row, made in zip(rows, run.iterations, strict=True):
        row += [_output(run, made, stage) for stage in STAGES]
    head = ["iteration", "policy in", *STAGES]
    words += " A policy in is the train output of the iteration before.</p>"
    return words + (_table(head, rows, label="lineage") if rows else "")


def _output(run: RunData, made: Made, stage: str) -> str:
    manifest = made.manifests.get(stage)
    if manifest is None:
        return "damaged" if stage in made.manifests else ""
    folder = made.record["stages"][stage]["folder"]
    tip = f"{folder}\n{manifest.rows} rows, {manifest.code_version or 'unknown version'}"
    owner = f" <small>of {escape(manifest.run)}</small>" if manifest.run != run.store.name else ""
    return _digest(manifest.digest, tip) + owner


def _digest(digest: str, tip: str) -> str:
    return f'<code class="term" tabindex="0" data-tip="{escape(f"{digest} {tip}")}">{escape(digest[:_SHORT])}</code>'

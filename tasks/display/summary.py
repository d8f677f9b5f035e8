"""What an iteration looks like in the Prefect UI: a markdown summary, a table of metrics, a link to MLflow."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from uuid import UUID

from rl_core.algorithms import Algorithm, resolve
from rl_core.health import RULES, Health, judge, sparkline
from rl_core.metrics import METRICS
from tasks.display.history import Metrics, metric_history
from tasks.events import StageEvent, observed
from tasks.session import Session
from tasks.stage import StageResult
from tasks.storage.store import RunStore

_log = logging.getLogger("rlstages.summary")

TREND = {
    "reward/mean": "reward",
    "eval/greedy_accuracy": "held-out",
    "groups/kept_frac": "groups with signal",
    "completion/truncated_frac": "truncated",
    "completion/tokens_mean": "tokens",
    "policy/entropy": "entropy (nats)",
}
CURVES = ("reward/mean", "eval/greedy_accuracy")
TREND_ROWS = 8
_NEEDED = frozenset({*TREND, *(rule.metric for rule in RULES)})


def merged_metrics(results: list[StageResult]) -> dict[str, float | None]:
    return {name: value for result in results for name, value in result.metrics.items()}


def number(value: float | None) -> str:
    """A metric as a person reads it; an undefined one is said to be so."""
    if value is None:
        return "not defined"
    return f"{value:.3g}" if abs(value) < 999.5 else f"{value:,.0f}"


def summary_markdown(session: Session, iteration: int, results: list[StageResult], url: str = "") -> str:
    """The iteration on a page: a verdict in words, what is wrong and what to do, the trend, changes, stages."""
    config = session.iterations.config(iteration)
    current = merged_metrics(results)
    history = metric_history(session.store, iteration, _NEEDED)
    health = judge(history, current, skip=_meaningless(resolve(config.algorithm, config.generate)))
    verdict = health.verdict[0].upper() + health.verdict[1:]
    name, of = session.store.name, session.config.iterations
    lines = [f"# {verdict}", "", f"**{name}, iteration {iteration}** ({iteration + 1} of {of}): {_headline(current)}"]
    lines += ["", f"[Open the run in MLflow]({url})"] if url else []
    lines += [*_flags(health), *_trend(history, current), *_changes(session.store, iteration), *_stages(results)]
    return "\n".join(lines)


def _meaningless(algorithm: Algorithm) -> list[str]:
    """Rules that say nothing of this algorithm: groups where the batch is the baseline, a KL that it does not have."""
    found = {
        "groups without signal": algorithm.advantage == "reinforce",
        "KL to the reference": algorithm.kl.coef == 0 or algorithm.kl.place != "loss",
    }
    return [name for name, holds in found.items() if holds]


def _shown(name: str, metrics: Metrics) -> str:
    """A metric of the trend as a person reads it: shares in percent, a dash where the iteration does not have it."""
    if name not in metrics:
        return "-"
    value = metrics[name]
    return f"{100 * value:.3g}%" if METRICS[name].unit == "share" and value is not None else number(value)


def _headline(metrics: Metrics) -> str:
    found = [f"{TREND[name]} {_shown(name, metrics)}" for name in CURVES if name in metrics]
    if metrics.get("eval/greedy_low") is not None:
        found[-1] += f" (95% interval {_shown('eval/greedy_low', metrics)} to {_shown('eval/greedy_high', metrics)})"
    return ", ".join(found)


def _flags(health: Health) -> list[str]:
    # A list, since the cells of a table are not wrapped in the UI.
    lines = [""] if health.flags else []
    lines += [f"- **{flag.level}: {flag.name}**: {flag.reason}. To do: {flag.todo}." for flag in health.flags]
    reasons: dict[str, list[str]] = {}
    for name, why in health.unknown:
        reasons.setdefault(why, []).append(name)
    if reasons:
        lines += ["", "No verdict on " + "; ".join(f"{', '.join(names)} ({why})" for why, names in reasons.items())]
    return lines


def _trend(history: Sequence[Metrics], current: Metrics) -> list[str]:
    """Curves over all iterations, numbers of the last ones. Columns that nobody has are left out."""
    everything = [*history, current]
    columns = [name for name in TREND if any(name in metrics for metrics in everything)]
    lines = ["", "## Trend", "", "```"]
    for name in CURVES:
        values = [metrics.get(name) for metrics in everything]
        known = [metrics for metrics, value in zip(everything, values, strict=True) if value is not None]
        ends = f"{_shown(name, known[0])} → {_shown(name, known[-1])}" if known else "no value yet"
        lines.append(f"{TREND[name]:<9}{sparkline(values)}  {ends}")
    lines.append("```")
    last = list(enumerate(everything))[-TREND_ROWS:]
    rows = [[str(k), *(_shown(name, metrics) for name in columns)] for k, metrics in last[::-1]]
    return lines + _table(["iteration", *(TREND[name] for name in columns)], rows)


def _changes(store: RunStore, iteration: int) -> list[str]:
    """Settings that changed with this iteration, settings of its own, and the run it was forked from."""
    from tasks.live.adjustments import changes_at

    rows = [
        [entry.key, json.dumps(entry.old), json.dumps(entry.new), entry.by, entry.why]
        for entry in changes_at(store, iteration)
    ]
    own = (store.iteration(iteration) or {}).get("overrides", [])
    parent = store.record().get("parent")
    lines = ["", "## Changes"] if rows or own or parent else []
    lines += _table(["setting", "old", "new", "by", "why"], rows)
    lines += ["", "Of this iteration alone, by a rerun: " + ", ".join(f"`{item}`" for item in own)] if own else []
    if parent:
        text = f"Forked from run `{parent['run']}` at iteration {parent['iteration']}, {parent['stage']}."
        lines += ["", text]
    return lines


def _stages(results: list[StageResult]) -> list[str]:
    rows = [
        [r.stage, "reused" if r.reused else "executed", str(r.rows), f"{r.seconds:.1f}", f"`{r.folder}`"]
        for r in results
    ]
    return ["", "## Stages", *_table(["stage", "state", "rows", "seconds", "output"], rows)]


def _table(columns: list[str], rows: list[list[str]]) -> list[str]:
    """A Markdown table; nothing without rows. Text cannot end a cell or become HTML."""
    if not rows:
        return []
    safe = [[_cell(cell) for cell in row] for row in rows]
    return ["", *(f"| {' | '.join(row)} |" for row in [columns, ["---"] * len(columns), *safe])]


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def metrics_table(results: list[StageResult]) -> list[dict[str, Any]]:
    return [
        {"stage": result.stage, "metric": name, "value": value}
        for result in results
        for name, value in sorted(result.metrics.items())
    ]


def label_flow_run(run: str) -> None:
    """Give this flow run the name of the run it works on, which a recipe's is not, and its tag `run:<name>`."""
    from prefect.client.orchestration import get_client
    from prefect.runtime import flow_run

    with get_client(sync_client=True) as client:
        client.update_flow_run(UUID(flow_run.id), name=run, tags={*flow_run.tags, f"run:{run}"})


def publish_summary(session: Session, iteration: int, results: list[StageResult]) -> str:
    """Create the iteration's artifacts; returns it in a line: headline numbers and the verdict.

    Keys name the meaning, so the UI keeps one history per run and key.
    """
    from prefect.artifacts import create_link_artifact, create_markdown_artifact, create_table_artifact

    name = session.store.name
    about = f"{name}, iteration {iteration}"
    url = session.tracker.run_url()
    page = summary_markdown(session, iteration, results, url)
    verdict = page.split("\n", 1)[0].strip("# ")
    create_markdown_artifact(page, key=f"{name}-summary", description=f"{verdict} ({about})")
    create_table_artifact(metrics_table(results), key=f"{name}-metrics", description=about)
    create_link_artifact(url, key=f"{name}-mlflow", link_text="MLflow run", description=about)
    return f"{_headline(merged_metrics(results))}. {verdict}"


class GenerateProgress:
    """Observer that keeps Prefect's progress bar of the generate stage; at most one update every two seconds."""

    def __init__(self, seconds_between: float = 2.0) -> None:
        self._pause = seconds_between
        self._artifact: UUID | None = None
        self._updated = 0.0

    def __call__(self, event: StageEvent) -> None:
        if event.stage != "generate" or event.kind not in ("started", "progress", "finished"):
            return
        try:
            self._show(event)
        # Whatever the server answers: a bar that cannot be drawn must not end the generation it shows.
        except Exception as error:
            _log.warning("the progress of %s cannot be shown in Prefect: %s", event.run, error)

    def _show(self, event: StageEvent) -> None:
        from prefect.artifacts import create_progress_artifact, update_progress_artifact

        if event.kind == "started":
            self._artifact = None
        elif event.kind == "progress" and event.total:
            percent = 100.0 * event.done / event.total
            if self._artifact is None:
                about = f"{event.run}, iteration {event.iteration}: completions sampled"
                created = create_progress_artifact(percent, key=f"{event.run}-generate", description=about)
                self._artifact = created if isinstance(created, UUID) else None
            elif time.monotonic() - self._updated < self._pause:
                return
            else:
                update_progress_artifact(self._artifact, percent)
            self._updated = time.monotonic()
        elif event.kind == "finished" and self._artifact is not None:
            update_progress_artifact(self._artifact, 100.0)


@contextmanager
def generation_progress() -> Iterator[None]:
    """Show generation as a progress artifact in Prefect."""
    with observed(GenerateProgress()):
        yield

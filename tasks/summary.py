"""What an iteration looks like in the Prefect UI: a markdown summary, a table of metrics, a link to MLflow."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from uuid import UUID

from tasks.events import StageEvent, observed
from tasks.session import Session
from tasks.stage import StageResult

_log = logging.getLogger("rlstages.summary")

HEADLINES = {
    "reward/mean": "mean reward",
    "eval/greedy_accuracy": "held-out accuracy",
    "groups/kept_frac": "groups with signal",
    "completion/truncated_frac": "truncated completions",
    "completion/tokens_mean": "tokens per completion",
    "policy/entropy": "entropy (nats)",
    "learner/grad_norm": "gradient norm",
    "mismatch/k3": "sampler-learner mismatch (k3)",
}


def merged_metrics(results: list[StageResult]) -> dict[str, float | None]:
    return {name: value for result in results for name, value in result.metrics.items()}


def number(value: float | None) -> str:
    """A metric as a person reads it; an undefined one is said to be so."""
    if value is None:
        return "not defined"
    return f"{value:.3g}" if abs(value) < 999.5 else f"{value:,.0f}"


def summary_markdown(session: Session, iteration: int, results: list[StageResult]) -> str:
    """The iteration on half a page: headline numbers, then what each stage did and where its output is."""
    metrics = merged_metrics(results)
    lines = [f"# {session.store.name}, iteration {iteration}", "", "| | |", "|---|---|"]
    lines += [f"| {label} | {number(metrics[name])} |" for name, label in HEADLINES.items() if name in metrics]
    low, high = metrics.get("eval/greedy_low"), metrics.get("eval/greedy_high")
    if low is not None and high is not None:
        lines.append(f"| held-out 95% interval | {low:.3f} to {high:.3f} |")
    lines += ["", "| stage | state | rows | seconds | output |", "|---|---|---|---|---|"]
    for result in results:
        state = "reused" if result.reused else "executed"
        lines.append(f"| {result.stage} | {state} | {result.rows} | {result.seconds:.1f} | `{result.folder}` |")
    return "\n".join(lines)


def metrics_table(results: list[StageResult]) -> list[dict[str, Any]]:
    return [
        {"stage": result.stage, "metric": name, "value": value}
        for result in results
        for name, value in sorted(result.metrics.items())
    ]


def publish_summary(session: Session, iteration: int, results: list[StageResult]) -> None:
    """Create the iteration's artifacts. Keys name the meaning, so the UI keeps one history per run and key."""
    from prefect.artifacts import create_link_artifact, create_markdown_artifact, create_table_artifact

    name = session.store.name
    about = f"{name}, iteration {iteration}"
    create_markdown_artifact(summary_markdown(session, iteration, results), key=f"{name}-summary", description=about)
    create_table_artifact(metrics_table(results), key=f"{name}-metrics", description=about)
    create_link_artifact(session.tracker.run_url(), key=f"{name}-mlflow", link_text="MLflow run", description=about)


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

"""What a person sees in the terminal: a bar per stage of the running iteration, one line per finished iteration."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from rl_core.errors import RlstagesError
from rl_core.stages import STAGES
from tasks.events import StageEvent, observed
from tasks.stage import StageResult

HEADER = "        reward  held-out  groups  " + "".join(f"{name[:5]:>6}" for name in STAGES)


class Display:
    """Observer that draws the run; use it as a context manager around the flow."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._results: dict[int, dict[str, StageResult]] = {}
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            TextColumn("{task.fields[note]}", style="dim"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
        )
        self._bars: dict[str, TaskID] = {}
        self._observing = observed(self)
        self._printed = False

    def __enter__(self) -> Display:
        self._observing.__enter__()
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._observing.__exit__(kind, error, trace)
        self._progress.stop()

    def __call__(self, event: StageEvent) -> None:
        match event.kind:
            case "waiting":
                self._console.print(f"{_label(event.iteration)}/{event.stage} {escape(event.message)}", style="yellow")
            case "notice":
                self._console.print(escape(event.message), style="yellow", highlight=False, soft_wrap=True)
            case "started":
                self._start(event)
            case "progress":
                self._progress.update(self._bars[event.stage], total=event.total, completed=event.done)
            case "finished":
                self._finish(event)
            case "failed":
                self._progress.update(self._bars[event.stage], note="[red]failed")
                if isinstance(event.error, RlstagesError) and event.error.retryable:
                    message = escape(event.error.message)
                    self._console.print(f"[yellow]{_label(event.iteration)}/{event.stage} failed:[/] {message}")
            case "completed":
                self._print_line(event.iteration)

    def _start(self, event: StageEvent) -> None:
        if event.iteration not in self._results:
            self._results[event.iteration] = {}
            for bar in self._bars.values():
                self._progress.remove_task(bar)
            names = list(STAGES) if event.iteration >= 0 else ["evaluate"]
            self._bars = {
                name: self._progress.add_task(f"{_label(event.iteration)} {name:<9}", total=None, start=False, note="")
                for name in names
            }
        self._progress.reset(self._bars[event.stage], total=None, note="running")

    def _finish(self, event: StageEvent) -> None:
        assert event.result is not None
        self._results[event.iteration][event.stage] = event.result
        note = "reused" if event.result.reused else f"{event.result.rows} rows"
        self._progress.update(self._bars[event.stage], total=1, completed=1, note=note)
        self._progress.stop_task(self._bars[event.stage])
        if event.iteration < 0:
            self._print_line(event.iteration)

    def _print_line(self, iteration: int) -> None:
        if not self._printed:
            self._console.print(HEADER, style="dim", highlight=False)
        self._printed = True
        self._console.print(self.iteration_line(iteration), highlight=False, soft_wrap=True)

    def iteration_line(self, iteration: int) -> Text:
        """One line under `HEADER`; `=` in place of seconds where the output was there already."""
        results = self._results.get(iteration, {})
        metrics = {name: value for result in results.values() for name, value in result.metrics.items()}
        groups, kept = metrics.get("groups/count"), metrics.get("groups/kept_frac")
        signal = f"{round(groups * kept)}/{round(groups)}" if groups is not None and kept is not None else "-"
        text = Text.assemble(
            (f"{_label(iteration):<6}", "bold"),
            f"  {_value(metrics.get('reward/mean')):>6}  {_value(_accuracy(metrics)):>8}  {signal:>6}  ",
        )
        for name in STAGES:
            result = results.get(name)
            seconds = "-" if result is None else "=" if result.reused else f"{result.seconds:.1f}"
            text.append(f"{seconds:>6}", "dim")
        decision = results.get("register")
        if decision is not None and decision.state.get("alias") == "champion":
            text.append("  champion", "green")
        return text


def _label(iteration: int) -> str:
    return "start" if iteration < 0 else f"it{iteration:04d}"


def _value(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _accuracy(metrics: dict[str, float | None]) -> float | None:
    sampled = sorted(name for name in metrics if name.rpartition("_at_")[2].isdigit() and "/avg" in name)
    names = ["eval/greedy_accuracy", *sampled]
    return next((metrics[name] for name in names if metrics.get(name) is not None), None)


def print_error(console: Console, error: RlstagesError) -> None:
    """One readable block; a user's own traceback is part of it, ours never is."""
    body = Text(error.message + "\n")
    for label, text in (("expected", error.expected), ("got", error.got), ("to do", error.todo)):
        if text:
            body.append(f"{label:>9}  ", "bold")
            body.append(text + "\n")
    if error.details:
        body.append("\n" + error.details.rstrip() + "\n", "dim")
    body.rstrip()
    console.print(Panel(body, title=type(error).__name__, title_align="left", border_style="red"))


def print_end(console: Console, lines: dict[str, Any]) -> None:
    """The closing block: label and value per line."""
    width = max(len(label) for label in lines)
    for label, value in lines.items():
        console.print(f"[bold]{label:>{width}}[/]  {escape(str(value))}", highlight=False, soft_wrap=True)

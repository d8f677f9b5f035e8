"""The head of a report: what the run is, whether it made the model better, the figures looked for first, flags."""

from __future__ import annotations

from datetime import datetime, timedelta
from html import escape

from rl_core.algorithms import resolve
from rl_core.evaluation import FEW_PROBLEMS
from rl_core.health import Health, judge
from rl_core.manifest import Manifest
from tasks.report.data import RunData


def verdict(run: RunData) -> str:
    """What the run is, and in one sentence whether it made the model better."""
    config = run.config
    size = f"{config.generate.prompts_per_iteration} prompts × {config.generate.group_size} completions"
    about = f"{config.algorithm.name} on {config.model.source}, {config.environment.kind}, {size}, seed {config.seed}"
    return f'<p class="about">{escape(about)}</p><p class="verdict">{_verdict(run)}</p>'


def _verdict(run: RunData) -> str:
    values = accuracies(run)
    if not values:
        return "The held-out problems have not been evaluated yet."
    last = values[-1]
    gain = run.gain()
    if gain is None or run.start is None:
        return f"Held-out accuracy is {last:.1%}; the starting model was not evaluated on the same problems."
    difference, low, high, problems = gain
    word = "Better" if low > 0 else "Worse" if high < 0 else "No clear change"
    rough = f"; rough, with fewer than {FEW_PROBLEMS} problems" if problems < FEW_PROBLEMS else ""
    return (
        f'<strong class="{word.lower()}">{word}.</strong> Held-out accuracy went from {values[0]:.1%} to '
        f"{last:.1%}: {100 * difference:+.1f} points on {problems} problems, 95% interval "
        f"{100 * low:+.1f} to {100 * high:+.1f}{rough}."
    )


def accuracies(run: RunData) -> list[float]:
    """The headline accuracy of the starting model, if it was evaluated, and of every evaluated iteration."""
    table = run.heldout_table()
    kind = table["answers"][0] if table["answers"] else ""
    return [a for a, k in zip(table["accuracy"], table["answers"], strict=True) if k == kind and a is not None]


def facts(run: RunData) -> str:
    """The figures a reader looks for first."""
    values = accuracies(run)
    last = run.final.metrics if run.final else {}
    rewards = [v for made in run.iterations if (v := made.metrics().get("reward/mean")) is not None]
    found = [("iterations", f"{run.complete} of {run.config.iterations}", _states(run))]
    if values:
        low, high = last.get("eval/greedy_low"), last.get("eval/greedy_high")
        interval = f"95% interval {100 * low:.0f}–{high:.0%}" if low is not None and high is not None else ""
        before = f"{values[0]:.1%} → " if run.start else ""
        found.append(("held-out accuracy", f"{before}{values[-1]:.1%}", interval))
    if rewards:
        found.append(("training reward", f"{rewards[0]:.3f} → {rewards[-1]:.3f}", "first and last iteration"))
    found.append(("champion", *_champion(run)))
    found.append(("time in stages", *_times(run)))
    tokens = sum(made.metrics().get("completion/tokens_total") or 0.0 for made in run.iterations)
    found.append(("tokens sampled", f"{tokens:,.0f}", "for training"))
    if run.parent:
        found.append(("forked from", run.parent.run, f"at iteration {run.parent.iteration}, {run.parent.stage}"))
    cells = (
        f"<div><dt>{escape(k)}</dt><dd>{escape(v)}<small>{escape(more)}</small></dd></div>" for k, v, more in found
    )
    return f'<dl class="facts">{"".join(cells)}</dl>'


def _states(run: RunData) -> str:
    other = [made.state for made in run.iterations if made.state != "complete"]
    return ", ".join(f"{other.count(state)} {state}" for state in dict.fromkeys(other)) or "complete"


def _champion(run: RunData) -> tuple[str, str]:
    """The newest version of this run that became champion, by the run's own records."""
    for made in reversed(run.iterations):
        decision = made.manifests.get("register")
        if decision and decision.state.get("alias") == "champion":
            measured = decision.measured
            return (
                f"version {measured.get('version', '?')}",
                f"{measured.get('model_name', '')}, iteration {made.number}",
            )
    return "none yet", ""


def _times(run: RunData) -> tuple[str, str]:
    own = [m for made in run.iterations for m in made.manifests.values() if m and m.run == run.store.name]
    spent = sum(s for m in own if isinstance(s := m.measured.get("seconds"), (int, float)))
    spans = [span for m in own if (span := _span(m))]
    if not spans:
        return _duration(spent), ""
    elapsed = max(end for _, end in spans) - min(begin for begin, _ in spans)
    return _duration(spent), f"{_duration(elapsed.total_seconds())} start to end"


def _span(manifest: Manifest) -> tuple[datetime, datetime] | None:
    end, seconds = manifest.measured.get("finished_at"), manifest.measured.get("seconds")
    if not isinstance(end, str) or not isinstance(seconds, (int, float)):
        return None
    finished = datetime.fromisoformat(end)
    return finished - timedelta(seconds=seconds), finished


def _duration(seconds: float) -> str:
    minutes, hours = int(seconds) // 60, int(seconds) // 3600
    if hours:
        return f"{hours} h {minutes % 60} min"
    return f"{minutes} min {int(seconds) % 60} s" if minutes else f"{seconds:.1f} s"


def health(run: RunData) -> str:
    """Verdict on the last iteration with its flags, what could not be judged, and which iterations had flags before."""
    history = [metrics for made in run.iterations if (metrics := made.metrics())]
    if not history:
        return ""
    by_group = resolve(run.config.algorithm, run.config.generate).advantage != "reinforce"
    skip = () if by_group else ("no signal",)
    judged = [judge(history[:i], metrics, skip) for i, metrics in enumerate(history)]
    numbers = [made.number for made in run.iterations if made.metrics()]
    last = judged[-1]
    flags = "".join(
        f'<li><strong class="{flag.level}">{flag.level}: {escape(flag.name)}</strong>: {escape(flag.reason)}. '
        f"To do: {escape(flag.todo)}.</li>"
        for flag in last.flags
    )
    text = f"<p>Iteration {numbers[-1]}: {escape(last.verdict)}.</p>"
    text += f"<ul>{flags}</ul>" if flags else ""
    if last.unknown:
        reasons = "; ".join(f"{name} ({why})" for name, why in last.unknown)
        text += f'<p class="note">Not judged: {escape(reasons)}.</p>'
    names = dict.fromkeys(flag.name for found in judged[:-1] for flag in found.flags)
    before = [
        f"{name} in {_ranges([n for n, h in zip(numbers, judged[:-1], strict=False) if name in _names(h)])}"
        for name in names
    ]
    return text + (f'<p class="note">Earlier: {escape("; ".join(before))}.</p>' if before else "")


def _names(found: Health) -> set[str]:
    return {flag.name for flag in found.flags}


def _ranges(numbers: list[int]) -> str:
    """0–2, 5 for 0, 1, 2, 5."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(r[0]) if len(r) == 1 else f"{r[0]}–{r[-1]}" for r in runs)

"""Is the training healthy? Rules over the metrics of an iteration and the ones before; a curve in letters."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Level = Literal["note", "warning", "alarm"]
Against = Literal["limit", "first", "recent"]
Metrics = Mapping[str, float | None]

BASELINE_ITERATIONS = 3
"""The first iterations, whose mean is "first"; also the fewest earlier values that any comparison needs."""
RECENT_ITERATIONS = 8
"""The iterations before the judged one whose median is "recent"."""

_SEVERITY: dict[Level, int] = {"alarm": 0, "warning": 1, "note": 2}


@dataclass(frozen=True)
class Rule:
    """One way in which an iteration can be unhealthy.

    Attributes:
        name: what people call it; of several rules of one name the most severe that applies is told.
        level: how bad it is.
        metric: name from `rl_core/metrics.py`.
        compare, limit: the rule applies where the metric is above or below the limit.
        reason, todo: what to tell; `{value}`, `{limit}` and `{baseline}` are filled in.
        against: "limit" is an absolute bound; with the mean of the "first" or the median of the "recent" iterations
            the limit is that number times `limit`.
        beyond: such a rule applies only where the metric is beyond this absolute bound too.
    """

    name: str
    level: Level
    metric: str
    compare: Literal[">", "<"]
    limit: float
    reason: str
    todo: str
    against: Against = "limit"
    beyond: float | None = None


_SIGNAL = "mix in easier or harder prompts, raise generate.group_size, or make the reward finer"
_LENGTH = "raise generate.max_completion_tokens, or shorten answers with algorithm.overlong or a length_penalty"
_REWARD = "read the reasons in the score output, mend the reward, then rerun the iteration from score"
_ENTROPY = "lower learner.lr, raise algorithm.clip_high, or go back to an earlier iteration with a fork"
_STEP = "lower learner.lr or learner.update_epochs; a fork from the iteration before undoes the step"
_FAR = "lower learner.lr or raise algorithm.kl.coef; look at samples for answers that please only the reward"
_ENGINES = "compare sampler and learner: dtype, temperature, chat template, attention; do not trust the ratio till then"

RULES: tuple[Rule, ...] = (
    Rule(
        "groups without signal",
        "warning",
        "groups/zero_var_frac",
        ">",
        0.5,
        "{value:.0%} of groups have equal rewards",
        _SIGNAL,
    ),
    Rule(
        "truncated completions",
        "warning",
        "completion/truncated_frac",
        ">",
        0.25,
        "{value:.0%} of completions are cut",
        _LENGTH,
    ),
    Rule("failed rewards", "warning", "reward/nonfinite_frac", ">", 0.05, "{value:.1%} have no reward", _REWARD),
    Rule("failed rewards", "alarm", "reward/nonfinite_frac", ">", 0.25, "{value:.0%} have no reward", _REWARD),
    Rule(
        "failed held-out scores",
        "warning",
        "eval/unscored_frac",
        ">",
        0.05,
        "{value:.1%} count as not correct",
        _REWARD,
    ),
    Rule("entropy collapse", "alarm", "policy/entropy", "<", 0.02, "{value:.3g} nats, below {limit:g}", _ENTROPY),
    Rule(
        "entropy collapse",
        "warning",
        "policy/entropy",
        "<",
        0.2,
        "{value:.3g} nats, and {baseline:.3g} in the first iterations",
        _ENTROPY,
        "first",
    ),
    Rule("KL jump", "alarm", "policy/approx_kl", ">", 0.1, "{value:.3g} nats a token in one update", _STEP),
    Rule(
        "KL jump",
        "warning",
        "policy/approx_kl",
        ">",
        5.0,
        "{value:.3g} nats a token in one update, and {baseline:.3g} lately",
        _STEP,
        "recent",
        0.01,
    ),
    Rule("KL to the reference", "alarm", "policy/kl", ">", 1.0, "{value:.3g} nats a token, above {limit:g}", _FAR),
    Rule(
        "KL to the reference",
        "warning",
        "policy/kl",
        ">",
        3.0,
        "{value:.3g} nats a token, and {baseline:.3g} lately",
        _FAR,
        "recent",
        0.05,
    ),
    Rule("log-prob mismatch", "note", "mismatch/k3", ">", 1e-3, "k3 is {value:.2g}, above {limit:g}", _ENGINES),
    Rule("log-prob mismatch", "alarm", "mismatch/k3", ">", 1e-2, "k3 is {value:.2g}, above {limit:g}", _ENGINES),
    Rule("no update", "warning", "learner/steps_applied", "<", 1.0, "the policy is the one before", _SIGNAL),
)


@dataclass(frozen=True)
class Flag:
    """A rule that applies, in words."""

    name: str
    level: Level
    reason: str
    todo: str


@dataclass(frozen=True)
class Health:
    """Flags, the most severe first; and by name of a rule why it could not be judged."""

    flags: tuple[Flag, ...]
    unknown: tuple[tuple[str, str], ...]

    @property
    def verdict(self) -> str:
        """`healthy`, or the most severe flag with its level."""
        if not self.flags:
            return "healthy"
        first, more = self.flags[0], len(self.flags) - 1
        return f"{first.level}: {first.name}" + (f", and {more} more" if more else "")


def judge(history: Sequence[Metrics], current: Metrics, skip: Collection[str] = ()) -> Health:
    """The health of an iteration.

    Args:
        history: metrics of all iterations before it, from the first on.
        current: its own; a value that is missing, null or not a number gives no verdict and is said to.
        skip: names of rules that have no meaning for this run.
    """
    flags: dict[str, Flag] = {}
    unknown = []
    for rule in RULES:
        if rule.name in skip:
            continue
        value, baseline = _number(current.get(rule.metric)), _baseline(rule, history)
        if value is None or baseline is None:
            word = "is not defined" if rule.metric in current else "was not measured"
            earlier = f"{rule.metric} needs {BASELINE_ITERATIONS} earlier values"
            unknown.append((rule.name, f"{rule.metric} {word}" if value is None else earlier))
        elif _applies(rule, value, baseline):
            reason = rule.reason.format(value=value, limit=rule.limit, baseline=baseline)
            known = flags.get(rule.name)
            if known is None or _SEVERITY[rule.level] < _SEVERITY[known.level]:
                flags[rule.name] = Flag(rule.name, rule.level, reason, rule.todo)
    ordered = sorted(flags.values(), key=lambda flag: _SEVERITY[flag.level])
    return Health(tuple(ordered), tuple(dict.fromkeys(unknown)))


def _baseline(rule: Rule, history: Sequence[Metrics]) -> float | None:
    """What the limit is a multiple of; 1 for an absolute one, null without enough earlier values."""
    if rule.against == "limit":
        return 1.0
    values = [value for metrics in history if (value := _number(metrics.get(rule.metric))) is not None]
    if len(values) < BASELINE_ITERATIONS:
        return None
    if rule.against == "first":
        return statistics.fmean(values[:BASELINE_ITERATIONS])
    return statistics.median(values[-RECENT_ITERATIONS:])


def _applies(rule: Rule, value: float, baseline: float) -> bool:
    bounds = [rule.limit * baseline] + ([] if rule.beyond is None else [rule.beyond])
    return all(value > bound if rule.compare == ">" else value < bound for bound in bounds)


def _number(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


_BARS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float | None], width: int = 60) -> str:
    """A curve of at most `width` letters, from the lowest value to the highest; a dot where there is none.

    More values than letters are averaged, as evenly as it goes.
    """
    count = min(len(values), width)
    cells = [values[len(values) * i // count : len(values) * (i + 1) // count] for i in range(count)]
    found = [[value for cell in part if (value := _number(cell)) is not None] for part in cells]
    means = [statistics.fmean(part) if part else None for part in found]
    known = [value for value in means if value is not None]
    if not known:
        return "·" * count
    low, span = min(known), max(known) - min(known)
    return "".join(
        "·" if value is None else _BARS[min(7, int((value - low) / span * 8))] if span else _BARS[3] for value in means
    )

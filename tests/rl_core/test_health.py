"""Health flags at, just beside and beyond their limits; what cannot be judged is said; curves by hand."""

from __future__ import annotations

import math

import pytest

from rl_core.health import BASELINE_ITERATIONS, RECENT_ITERATIONS, RULES, Flag, Health, judge, sparkline
from rl_core.metrics import glossary_entry

HEALTHY: dict[str, float | None] = {
    "groups/zero_var_frac": 0.25,
    "completion/truncated_frac": 0.0,
    "reward/nonfinite_frac": 0.0,
    "eval/unscored_frac": 0.0,
    "policy/entropy": 0.5,
    "policy/approx_kl": 0.001,
    "policy/kl": 0.01,
    "mismatch/k3": 1e-5,
    "learner/steps_applied": 1.0,
}


def flags(history: list[dict[str, float | None]] | None = None, **changes: float | None) -> dict[str, str]:
    current = HEALTHY | {name.replace("__", "/"): value for name, value in changes.items()}
    return {flag.name: flag.level for flag in judge(history or [], current).flags}


def test_rules_speak_of_metrics_that_exist() -> None:
    assert [rule.metric for rule in RULES if glossary_entry(rule.metric) is None] == []
    assert {rule.metric for rule in RULES} == set(HEALTHY), "the tests below know every metric"
    for rule in RULES:
        assert rule.reason.format(value=0.5, limit=rule.limit, baseline=0.25) and rule.todo


def test_healthy() -> None:
    found = judge([HEALTHY] * 3, HEALTHY)
    assert found == Health((), ()) and found.verdict == "healthy"


@pytest.mark.parametrize(
    ("metric", "at", "beyond", "flag", "level"),
    [
        ("groups/zero_var_frac", 0.5, 0.51, "groups without signal", "warning"),
        ("completion/truncated_frac", 0.25, 0.26, "truncated completions", "warning"),
        ("reward/nonfinite_frac", 0.05, 0.051, "failed rewards", "warning"),
        ("reward/nonfinite_frac", None, 0.26, "failed rewards", "alarm"),
        ("eval/unscored_frac", 0.05, 0.06, "failed held-out scores", "warning"),
        ("policy/entropy", 0.02, 0.0199, "entropy collapse", "alarm"),
        ("policy/approx_kl", 0.1, 0.11, "KL jump", "alarm"),
        ("policy/kl", 1.0, 1.01, "KL to the reference", "alarm"),
        ("mismatch/k3", 1e-3, 1.1e-3, "log-prob mismatch", "note"),
        ("mismatch/k3", None, 1.1e-2, "log-prob mismatch", "alarm"),
        ("learner/steps_applied", 1.0, 0.0, "no update", "warning"),
    ],
)
def test_absolute_limits(metric: str, at: float | None, beyond: float, flag: str, level: str) -> None:
    """A value at the limit is no flag; of two limits of one flag the worse one is told, once."""
    if at is not None:
        assert flags(**{metric.replace("/", "__"): at}) == {}
    assert flags(**{metric.replace("/", "__"): beyond}) == {flag: level}


def entropies(*values: float | None) -> list[dict[str, float | None]]:
    return [{"policy/entropy": value} for value in values]


def test_entropy_against_the_first_iterations() -> None:
    """A fifth of the mean of the first three that have a value, whatever came later."""
    start = entropies(None, 0.9, 1.0, 1.1)
    assert flags(start, policy__entropy=0.2) == {}
    assert flags(start, policy__entropy=0.19) == {"entropy collapse": "warning"}
    assert flags([*start, *entropies(*[0.19] * 20)], policy__entropy=0.19) == {"entropy collapse": "warning"}
    assert flags(start[:-1], policy__entropy=0.19) == {}, "two values are no beginning"
    assert flags(start, policy__entropy=0.01) == {"entropy collapse": "alarm"}


def test_kl_against_recent_iterations() -> None:
    """Five times the median of the last eight, and not while it is tiny in itself."""
    old, recent = [0.05] * 9, [0.004] * 5 + [0.001] * 2 + [0.09]
    history = [{"policy/approx_kl": value} for value in (*old, *recent)]
    assert len(recent) == RECENT_ITERATIONS
    assert flags(history, policy__approx_kl=0.02) == {}
    assert flags(history, policy__approx_kl=0.021) == {"KL jump": "warning"}
    tiny = [{"policy/approx_kl": 1e-6}] * 8
    assert flags(tiny, policy__approx_kl=0.01) == {}, "ten thousand times of nothing"
    assert flags(tiny, policy__approx_kl=0.0101) == {"KL jump": "warning"}
    zero = [{"policy/approx_kl": 0.0}] * 8  # one optimizer step an iteration: the ratio is 1
    assert flags(zero, policy__approx_kl=0.0) == {}


def test_the_most_severe_comes_first() -> None:
    current = HEALTHY | {"mismatch/k3": 2e-3, "completion/truncated_frac": 0.5, "policy/approx_kl": 0.25}
    found = judge([HEALTHY] * 3, current)
    assert [flag.level for flag in found.flags] == ["alarm", "warning", "note"]
    assert found.verdict == "alarm: KL jump, and 2 more"
    only = judge([HEALTHY] * 3, HEALTHY | {"completion/truncated_frac": 0.5})
    assert only.verdict == "warning: truncated completions"
    assert isinstance(only.flags[0], Flag) and only.flags[0].reason == "50% of completions are cut"
    assert "max_completion_tokens" in only.flags[0].todo
    reason = judge(entropies(1.0, 1.0, 1.0), HEALTHY | {"policy/entropy": 0.125}).flags[0].reason
    assert reason == "0.125 nats, and 1 in the first iterations"


@pytest.mark.parametrize("value", [None, math.nan, math.inf])
def test_no_value_no_verdict(value: float | None) -> None:
    found = judge([HEALTHY] * 3, HEALTHY | {"mismatch/k3": value, "completion/truncated_frac": None})
    assert found.flags == ()
    assert found.unknown == (
        ("truncated completions", "completion/truncated_frac is not defined"),
        ("log-prob mismatch", "mismatch/k3 is not defined"),
    )
    absent = {name: value for name, value in HEALTHY.items() if name != "eval/unscored_frac"}
    assert judge([HEALTHY] * 3, absent).unknown == (("failed held-out scores", "eval/unscored_frac was not measured"),)
    few = judge([HEALTHY] * (BASELINE_ITERATIONS - 1), HEALTHY)
    assert [name for name, _ in few.unknown] == ["entropy collapse", "KL jump", "KL to the reference"]
    assert few.unknown[0][1] == "policy/entropy needs 3 earlier values"


def test_a_rule_without_meaning_is_left_out() -> None:
    current = HEALTHY | {"groups/zero_var_frac": 1.0}
    assert judge([], current, skip=("groups without signal",)).flags == () and judge([], current).flags


@pytest.mark.parametrize(
    ("values", "width", "drawn"),
    [
        ([], 5, ""),
        ([0.0, 1.0], 5, "▁█"),
        ([0, 1, 2, 3, 4, 5, 6, 7], 8, "▁▂▃▄▅▆▇█"),
        ([7.0, 0.0, 3.5], 9, "█▁▅"),
        ([2.0, 2.0], 5, "▄▄"),
        ([None, 1.0, math.nan, 2.0], 5, "·▁·█"),
        ([None, math.inf], 5, "··"),
        ([0.0, 2.0, 10.0, 20.0], 2, "▁█"),  # means 1 and 15
        ([0.0, None, 5.0, 5.0, None, None], 3, "▁█·"),
        ([0, 0, 8, 4, 4, 4, 8], 3, "▁██"),  # 0 0 | 8 4 | 4 4 8: means 0, 6, 16/3
    ],
)
def test_curves(values: list[float | None], width: int, drawn: str) -> None:
    assert sparkline(values, width) == drawn


def test_a_long_curve_has_every_value_in_one_letter() -> None:
    """1000 values in 60 letters: a single spike of any place shows."""
    for place in (0, 499, 999):
        values = [0.0] * 1000
        values[place] = 1.0
        found = sparkline(values)
        assert len(found) == 60 and found.count("█") == 1 and found.index("█") == place * 60 // 1000

"""Evaluation statistics against hand numbers, brute force and scipy."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest
from scipy import stats

from rl_core.errors import DataError
from rl_core.evaluation import (
    avg_at_k,
    bootstrap_interval,
    bootstrap_means,
    compare,
    mcnemar,
    mean_pass_at_k,
    pass_at_k,
    problem_means,
    wilson,
)


def paired(gained: int, lost: int, both: int, neither: int) -> tuple[dict[int, float], dict[int, float]]:
    """Challenger and champion with these numbers of problems."""
    new = [1.0] * gained + [0.0] * lost + [1.0] * both + [0.0] * neither
    old = [0.0] * gained + [1.0] * lost + [1.0] * both + [0.0] * neither
    return dict(enumerate(new)), dict(enumerate(old))


def test_pass_at_k_hand_numbers() -> None:
    assert pass_at_k(10, 3, 1) == pytest.approx(0.3, abs=1e-9)
    assert pass_at_k(10, 3, 5) == pytest.approx(0.916667, abs=1e-6)
    assert pass_at_k(10, 8, 5) == 1.0
    assert pass_at_k(10_000, 1, 10) == pytest.approx(0.001, abs=1e-12)


@pytest.mark.parametrize("n", range(1, 9))
def test_pass_at_k_equals_enumeration(n: int) -> None:
    for c, k in itertools.product(range(n + 1), range(1, n + 1)):
        draws = list(itertools.combinations(range(n), k))
        assert pass_at_k(n, c, k) == pytest.approx(sum(min(draw) < c for draw in draws) / len(draws), abs=1e-12)


@pytest.mark.parametrize(("n", "c", "k"), [(3, 1, 4), (3, 4, 1), (3, -1, 1), (3, 1, 0), (0, 0, 1)])
def test_pass_at_k_refuses_what_is_not_defined(n: int, c: int, k: int) -> None:
    with pytest.raises(DataError, match="not defined"):
        pass_at_k(n, c, k)


def test_avg_at_k_error_is_clustered_by_problem() -> None:
    scores = [*(1, 0, 0, 0), *(1, 1, 1, 0), *(1, 1, 1, 1), *(0, 0, 0, 0)]
    rows = list(zip([i // 4 for i in range(16)], map(float, scores), strict=True))
    random.Random(0).shuffle(rows)
    got = avg_at_k([i for i, _ in rows], [s for _, s in rows])
    assert got is not None and got.se is not None
    assert (got.mean, got.se, got.problems) == (0.5, pytest.approx(0.228218, abs=1e-6), 4)
    # taking the 16 answers for independent would claim a far smaller error
    assert got.se > math.sqrt(0.25 / 16) == 0.125


def test_avg_and_pass_go_by_problem_not_by_answer() -> None:
    ids, correct = ["b", "a", "b", "b", "a"], [True, False, True, False, True]
    assert problem_means(ids, [float(x) for x in correct]) == {"b": pytest.approx(2 / 3), "a": 0.5}
    average, passed = avg_at_k(ids, [float(x) for x in correct]), mean_pass_at_k(ids, correct, 2)
    assert average is not None and average.mean == pytest.approx((2 / 3 + 0.5) / 2)
    assert passed is not None and passed.mean == 1.0
    one = mean_pass_at_k(ids, correct, 1)
    assert one is not None and one.mean == pytest.approx(average.mean)


def test_nothing_is_null_and_one_problem_has_no_error() -> None:
    assert avg_at_k([], []) is None and mean_pass_at_k([], [], 1) is None
    assert wilson(0, 0) is None and bootstrap_interval([], seed=0) is None
    single = avg_at_k([1, 1], [0.0, 1.0])
    assert single is not None and single.mean == 0.5 and single.se is None


def test_a_score_that_is_not_finite_is_refused() -> None:
    with pytest.raises(DataError, match="'p'"):
        avg_at_k(["o", "p"], [1.0, math.nan])


@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    [(7, 10, 0.396778, 0.892209), (140, 200, 0.633209, 0.759253), (10, 10, 0.722467, 1.0), (0, 20, 0.0, 0.161125)],
)
def test_wilson_hand_numbers(successes: int, n: int, low: float, high: float) -> None:
    assert wilson(successes, n) == pytest.approx((low, high), abs=1e-6)
    oracle = stats.binomtest(successes, n).proportion_ci(0.9, method="wilson")
    assert wilson(successes, n, 0.9) == pytest.approx((oracle.low, oracle.high), abs=1e-9)


def test_wilson_refuses_more_successes_than_trials() -> None:
    with pytest.raises(DataError):
        wilson(3, 2)


def test_bootstrap_of_one_half_has_the_binomial_distribution() -> None:
    """30 problems, 12 right: resampled means follow Binomial(30, 0.4) / 30."""
    means = bootstrap_means([1.0] * 12 + [0.0] * 18, seed=3, draws=40_000)
    for quantile in (0.025, 0.5, 0.975):
        assert np.quantile(means, quantile) == pytest.approx(stats.binom.ppf(quantile, 30, 0.4) / 30, abs=1 / 30)
    assert means.std() == pytest.approx(math.sqrt(0.4 * 0.6 / 30), rel=0.02)


def test_bootstrap_is_repeatable_and_does_not_depend_on_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    values = [0.1, 0.9, 0.4, 0.4]
    first = bootstrap_means(values, seed=5, draws=1000)
    assert len(first) == 1000 and np.array_equal(first, bootstrap_means(values, seed=5, draws=1000))
    assert not np.array_equal(first, bootstrap_means(values, seed=6, draws=1000))
    monkeypatch.setattr("rl_core.evaluation._CHUNK_VALUES", 40)
    chunked = bootstrap_means(values, seed=5, draws=1000)
    assert chunked.mean() == pytest.approx(first.mean(), abs=0.03)


def test_mcnemar_hand_numbers() -> None:
    assert mcnemar(12, 4) == pytest.approx((0.076813, 0.049042), abs=1e-6)
    assert mcnemar(12, 4) == mcnemar(4, 12)
    assert mcnemar(0, 0) == (1.0, 1.0)


@pytest.mark.parametrize(("gained", "lost"), [(0, 1), (1, 1), (5, 5), (3, 9), (40, 61), (900, 1100)])
def test_mcnemar_equals_the_binomial_test(gained: int, lost: int) -> None:
    exact, midp = mcnemar(gained, lost)
    assert exact == pytest.approx(stats.binomtest(gained, gained + lost).pvalue, rel=1e-9)
    point = stats.binom.pmf(min(gained, lost), gained + lost, 0.5)
    assert midp == pytest.approx(min(1.0, exact - point) if gained != lost else 1.0, rel=1e-8)


def test_paired_numbers_of_the_worked_example() -> None:
    """12 gained, 4 lost of 100: difference, paired error, interval, and the error that loses the pairing."""
    new, old = paired(12, 4, 56, 28)
    differences = [new[k] - old[k] for k in new]
    estimate = avg_at_k(list(new), differences)
    assert estimate is not None and estimate.se is not None
    assert (estimate.mean, estimate.se) == pytest.approx((0.08, 0.039389), abs=1e-6)
    interval = (estimate.mean - 1.96 * estimate.se, estimate.mean + 1.96 * estimate.se)
    assert interval == pytest.approx((0.0028, 0.1572), abs=5e-5)
    p_new, p_old = 0.68, 0.60
    assert math.sqrt((p_new * (1 - p_new) + p_old * (1 - p_old)) / 100) == pytest.approx(0.067646, abs=1e-6)
    # share of resampled differences <= 0, exactly, from the trinomial of gains and losses
    exact = sum(
        math.comb(100, a) * math.comb(100 - a, b) * 0.12**a * 0.04**b * 0.84 ** (100 - a - b)
        for a in range(101)
        for b in range(a, 101 - a)
    )
    assert exact == pytest.approx(0.024, abs=0.002)
    got = compare(new, old, "paired_bootstrap", 0.0, 0.95, seed=0)
    assert got.p_value == pytest.approx(exact, abs=4 * math.sqrt(exact / 10_000))
    assert got.lower_bound == pytest.approx(0.08 - 1.645 * 0.0392, abs=0.011)
    assert got.difference == pytest.approx(0.08) and got.n == 100 and got.not_worse


def test_bootstrap_p_value_is_that_of_the_margin() -> None:
    """8 gained, 12 lost of 100 against a margin of 0.05: share of resampled differences <= -0.05, by enumeration."""
    exact = sum(
        math.comb(100, a) * math.comb(100 - a, b) * 0.08**a * 0.12**b * 0.80 ** (100 - a - b)
        for a in range(96)
        for b in range(a + 5, 101 - a)
    )
    got = compare(*paired(8, 12, 40, 40), "paired_bootstrap", 0.05, 0.95, seed=0)
    assert got.p_value == pytest.approx(exact, abs=4 * math.sqrt(exact * (1 - exact) / 10_000))
    assert 0.4 < exact < 0.5 and not got.not_worse


def test_mcnemar_comparison() -> None:
    new, old = paired(12, 4, 56, 28)
    got = compare(new, old, "mcnemar_midp", 0.0, 0.95, seed=0)
    assert got.p_value == pytest.approx(0.049042, abs=1e-6) and got.not_worse
    # the bound's share of gains is where the one-sided mid-p is exactly 5 %
    assert got.lower_bound is not None
    share = (got.lower_bound * 100 / 16 + 1) / 2
    tail = stats.binom.sf(12, 16, share) + 0.5 * stats.binom.pmf(12, 16, share)
    assert tail == pytest.approx(0.05, abs=1e-9)


@pytest.mark.parametrize("method", ["paired_bootstrap", "mcnemar_midp"])
def test_the_margin_decides(method: str) -> None:
    new, old = paired(4, 12, 56, 28)
    strict = compare(new, old, method, 0.05, 0.95, seed=0)  # type: ignore[arg-type]
    lenient = compare(new, old, method, 0.5, 0.95, seed=0)  # type: ignore[arg-type]
    assert not strict.not_worse and lenient.not_worse
    assert strict.lower_bound == lenient.lower_bound and "may be worse" in strict.reason
    assert strict.lower_bound is not None and strict.lower_bound < -0.08


@pytest.mark.parametrize("method", ["paired_bootstrap", "mcnemar_midp"])
def test_equal_policies_are_not_worse_within_a_margin(method: str) -> None:
    same, _ = paired(10, 0, 10, 20)
    got = compare(same, dict(reversed(same.items())), method, 0.05, 0.95, seed=0)  # type: ignore[arg-type]
    assert (got.difference, got.lower_bound, got.not_worse) == (0.0, 0.0, True)
    assert not compare(same, same, method, 0.0, 0.95, seed=0).not_worse  # type: ignore[arg-type]


def test_losing_everything_and_winning_everything() -> None:
    new, old = paired(0, 25, 0, 0)
    for method in ("paired_bootstrap", "mcnemar_midp"):
        lost = compare(new, old, method, 0.05, 0.95, seed=0)  # type: ignore[arg-type]
        won = compare(old, new, method, 0.05, 0.95, seed=0)  # type: ignore[arg-type]
        assert not lost.not_worse and lost.lower_bound == pytest.approx(-1.0)
        assert won.not_worse and won.lower_bound is not None and won.lower_bound > 0.7


def test_order_of_problems_does_not_matter() -> None:
    new, old = paired(9, 5, 20, 16)
    shuffled = random.Random(1).sample(list(new), len(new))
    again = compare({k: new[k] for k in shuffled}, old, "paired_bootstrap", 0.05, 0.95, seed=7)
    assert again == compare(new, old, "paired_bootstrap", 0.05, 0.95, seed=7)


def test_few_problems_are_said_to_be_rough() -> None:
    assert "rough" in compare({1: 1.0}, {1: 0.0}, "paired_bootstrap", 0.05, 0.95, seed=0).reason
    new, old = paired(9, 5, 20, 16)
    assert "rough" not in compare(new, old, "paired_bootstrap", 0.05, 0.95, seed=0).reason


@pytest.mark.parametrize(
    ("new", "old", "method", "reason"),
    [
        ({1: 1.0, 2: 0.0}, {1: 1.0}, "paired_bootstrap", "1 only the challenger's"),
        ({1: 1.0}, {2: 1.0}, "mcnemar_midp", "different problems"),
        ({}, {}, "paired_bootstrap", "no problems"),
        ({1: math.nan}, {1: 1.0}, "paired_bootstrap", "not finite"),
        ({1: 0.5}, {1: 1.0}, "mcnemar_midp", "0 and 1"),
    ],
)
def test_refusals(new: dict[int, float], old: dict[int, float], method: str, reason: str) -> None:
    got = compare(new, old, method, 0.05, 0.95, seed=0)  # type: ignore[arg-type]
    assert (got.difference, got.lower_bound, got.p_value, got.not_worse, got.n) == (None, None, None, False, 0)
    assert reason in got.reason

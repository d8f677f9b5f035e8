"""Statistics of an evaluation. The unit is the problem: samples of one problem are not independent.

Everything random has a fixed seed, so a decision can be repeated.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from rl_core.errors import DataError

Floats = npt.NDArray[np.float64]
Method = Literal["paired_bootstrap", "mcnemar_midp"]

BOOTSTRAP_DRAWS = 10_000
FEW_PROBLEMS = 20
"""Below this many problems a bootstrap bound is rough, and the decision says so."""
_CHUNK_VALUES = 4_000_000


@dataclass(frozen=True)
class Estimate:
    """A mean over problems. `se` is the standard error clustered by problem, null with fewer than two problems."""

    mean: float
    se: float | None
    problems: int


@dataclass(frozen=True)
class Comparison:
    """Challenger against champion on the same problems; numbers are null where the comparison was refused.

    Attributes:
        difference: mean score of the challenger minus the champion's.
        lower_bound: one-sided lower confidence bound of the difference.
        p_value: of the pre-declared test, see `compare`.
        not_worse: the lower bound lies above -margin.
        n: problems compared.
        reason: the decision in words.
    """

    difference: float | None
    lower_bound: float | None
    p_value: float | None
    not_worse: bool
    n: int
    reason: str


def pass_at_k(n: int, c: int, k: int) -> float:
    """Unbiased chance that one of k answers is correct, from c correct ones of n: 1 - C(n-c,k) / C(n,k) (2107.03374).

    Computed as a product, so large n does not overflow. Raises `DataError` unless 0 <= c <= n and 1 <= k <= n.
    """
    if not 0 <= c <= n or not 1 <= k <= n:
        raise DataError("pass@k is not defined", expected="0 <= c <= n and 1 <= k <= n", got=f"n={n}, c={c}, k={k}")
    if n - c < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / i for i in range(n - c + 1, n + 1))


def mean_pass_at_k(problem_ids: Sequence[Any], correct: Sequence[bool], k: int) -> Estimate | None:
    """pass@k averaged over problems; null without problems. Every problem needs at least k answers."""
    sums = _by_problem(problem_ids, [float(x) for x in correct])
    return _estimate([pass_at_k(n, round(total), k) for total, n in sums.values()])


def avg_at_k(problem_ids: Sequence[Any], scores: Sequence[float]) -> Estimate | None:
    """Mean over problems of the mean score of a problem's answers; null without problems."""
    return _estimate(list(problem_means(problem_ids, scores).values()))


def problem_means(problem_ids: Sequence[Any], scores: Sequence[float]) -> dict[Any, float]:
    """Mean score per problem id, in order of first appearance."""
    return {key: total / n for key, (total, n) in _by_problem(problem_ids, scores).items()}


def _by_problem(problem_ids: Sequence[Any], scores: Sequence[float]) -> dict[Any, tuple[float, int]]:
    sums: dict[Any, tuple[float, int]] = {}
    for key, score in zip(problem_ids, scores, strict=True):
        if not math.isfinite(score):
            raise DataError(f"evaluation: the score of problem {key!r} is not finite", got=repr(score))
        total, n = sums.get(key, (0.0, 0))
        sums[key] = (total + float(score), n + 1)
    return sums


def _estimate(values: Sequence[float]) -> Estimate | None:
    if not values:
        return None
    se = float(np.std(values, ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else None
    return Estimate(float(np.mean(values)), se, len(values))


def wilson(successes: int, n: int, confidence: float = 0.95) -> tuple[float, float] | None:
    """Two-sided Wilson interval of a proportion; null for n = 0. Only for one binary result per problem."""
    if not 0 <= successes <= n:
        raise DataError("wilson: more successes than trials", expected="0 <= successes <= n", got=f"{successes}, {n}")
    if n == 0:
        return None
    z = NormalDist().inv_cdf(0.5 + confidence / 2.0)
    p, spread = successes / n, z * z / n
    centre = (p + spread / 2.0) / (1.0 + spread)
    half = z * math.sqrt(p * (1.0 - p) / n + spread / (4.0 * n)) / (1.0 + spread)
    return (0.0 if successes == 0 else centre - half), (1.0 if successes == n else centre + half)


def bootstrap_means(values: Sequence[float] | Floats, *, seed: int, draws: int = BOOTSTRAP_DRAWS) -> Floats:
    """Means of resampled problems, [draws]. `values` is one number per problem, [problems], at least one."""
    data = np.asarray(values, dtype=np.float64)
    generator = np.random.default_rng(seed)
    means = np.empty(draws)
    step = max(1, _CHUNK_VALUES // len(data))
    for start in range(0, draws, step):
        rows = min(step, draws - start)
        means[start : start + rows] = data[generator.integers(0, len(data), (rows, len(data)))].mean(axis=1)
    return means


def bootstrap_interval(
    values: Sequence[float] | Floats, *, seed: int, confidence: float = 0.95, draws: int = BOOTSTRAP_DRAWS
) -> tuple[float, float] | None:
    """Two-sided percentile interval of the mean over problems; null without problems."""
    if len(values) == 0:
        return None
    tail = (1.0 - confidence) / 2.0
    low, high = np.quantile(bootstrap_means(values, seed=seed, draws=draws), [tail, 1.0 - tail])
    return float(low), float(high)


def mcnemar(gained: int, lost: int) -> tuple[float, float]:
    """Two-sided p-values (exact, mid-p) of a paired binary comparison.

    `gained` and `lost` count the problems only the new and only the old policy solves. mid-p counts the observed split
    half: less conservative than the exact test and still near its level. Both are 1 without a discordant problem.
    """
    n, low = gained + lost, min(gained, lost)
    if n == 0:
        return 1.0, 1.0
    tail = math.exp(_log_tail(n, low, 0.5))
    exact = min(1.0, 2.0 * tail)
    if gained == lost:
        # Both tails hold the observed split: with it counted half the two are exactly everything.
        return exact, 1.0
    return exact, 2.0 * tail - math.exp(_log_pmf(n, low, 0.5))


def _log_pmf(n: int, k: int, p: float) -> float:
    choose = math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
    return choose + (k * math.log(p) if k else 0.0) + ((n - k) * math.log1p(-p) if k < n else 0.0)


def _log_tail(n: int, k: int, p: float) -> float:
    """log P(X <= k) of a binomial."""
    terms = [_log_pmf(n, i, p) for i in range(k + 1)]
    top = max(terms)
    return top + math.log(math.fsum(math.exp(term - top) for term in terms))


def _midp_lower_share(gained: int, lost: int, confidence: float) -> float:
    """One-sided mid-p lower bound of the chance that a discordant problem is a gain."""
    if gained == 0:
        return 0.0
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2.0
        # P(X > gained) + P(X = gained) / 2 = P(Y < lost) + P(Y = lost) / 2 for Y = losses
        below = math.exp(_log_tail(gained + lost, lost, 1.0 - middle))
        upper_tail = below - 0.5 * math.exp(_log_pmf(gained + lost, lost, 1.0 - middle))
        low, high = (middle, high) if upper_tail < 1.0 - confidence else (low, middle)
    return low


def compare(
    challenger: Mapping[Any, float],
    champion: Mapping[Any, float],
    method: Method,
    margin: float,
    confidence: float,
    seed: int,
) -> Comparison:
    """Is the challenger not worse than the champion by `margin` or more, on the same problems?

    Args:
        challenger, champion: score per problem id.
        method: declared before the data is seen.
            `paired_bootstrap`: resamples per-problem differences; p_value is the share of resampled means <= -margin.
            `mcnemar_midp`: scores 0 or 1 only; p_value is the two-sided mid-p for "no difference", and the bound is
            that of the share of gains among the discordant problems, taken times their number.
        margin: largest loss that still counts as not worse, in units of the score.
        confidence: one-sided, of the lower bound.
        seed: of the bootstrap.

    Refuses, with the reason in the result: different problem sets, no problems, scores that are not finite, and with
    `mcnemar_midp` scores other than 0 and 1.
    """
    refusal = _refusal(challenger, champion, method)
    if refusal:
        return Comparison(None, None, None, False, 0, f"not compared: {refusal}")
    keys = sorted(challenger, key=lambda key: (str(type(key)), key))
    new, old = (np.asarray([float(scores[key]) for key in keys]) for scores in (challenger, champion))
    differences = new - old
    if method == "paired_bootstrap":
        means = bootstrap_means(differences, seed=seed)
        lower, p_value = float(np.quantile(means, 1.0 - confidence)), float((means <= -margin).mean())
    else:
        gained, lost = int((differences > 0).sum()), int((differences < 0).sum())
        share = _midp_lower_share(gained, lost, confidence)
        lower, p_value = (2.0 * share - 1.0) * (gained + lost) / len(keys), mcnemar(gained, lost)[1]
    difference, not_worse = float(differences.mean()), lower > -margin
    verdict = f"{'not worse' if not_worse else 'may be worse'}: difference {difference:+.4f} on {len(keys)} problems, "
    verdict += f"{100 * confidence:g}% lower bound {lower:+.4f} against -{margin:g} ({method})"
    rough = f"; rough, with fewer than {FEW_PROBLEMS} problems" if len(keys) < FEW_PROBLEMS else ""
    return Comparison(difference, lower, p_value, not_worse, len(keys), verdict + rough)


def _refusal(challenger: Mapping[Any, float], champion: Mapping[Any, float], method: Method) -> str:
    ours, theirs = challenger.keys() - champion.keys(), champion.keys() - challenger.keys()
    if ours or theirs:
        return f"different problems, {len(ours)} only the challenger's and {len(theirs)} only the champion's"
    if not challenger:
        return "there are no problems"
    scores = [*challenger.values(), *champion.values()]
    if not all(math.isfinite(score) for score in scores):
        return "a score is not finite"
    if method == "mcnemar_midp" and any(score not in (0, 1) for score in scores):
        return "mcnemar_midp needs scores of 0 and 1; take paired_bootstrap"
    return ""

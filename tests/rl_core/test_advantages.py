"""Advantage estimators against hand numbers, naive loops and invariances."""

from __future__ import annotations

import math
import random
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_core.advantages import advantages, overlong_penalty, sequence_kl
from rl_core.config import AdvantageName, OverlongConfig
from rl_core.errors import DataError, NonFiniteError
from rl_core.losses import kl_estimate

NAMES: tuple[AdvantageName, ...] = get_args(AdvantageName)
GROUP_NAMES: tuple[AdvantageName, ...] = tuple(name for name in NAMES if name != "reinforce")
WORKED = [1.0, 0.0, 0.0, 0.5]

rewards_lists = st.lists(st.integers(-20, 20).map(lambda n: n / 4), min_size=2, max_size=8)


def of_group(rewards: Any, name: AdvantageName, **options: Any) -> list[float]:
    return list(advantages([7] * len(rewards), rewards, name, **options))


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("rloo", {}, [0.833333, -0.5, -0.5, 0.166667]),
        ("grpo", {"std_eps": 1e-6}, [1.305580, -0.783348, -0.783348, 0.261116]),
        ("grpo", {"std_eps": 1e-4}, [1.305310, -0.783186, -0.783186, 0.261062]),
        ("grpo", {"std_ddof": 0, "std_eps": 1e-6}, [1.507553, -0.904532, -0.904532, 0.301511]),
        ("dr_grpo", {}, [0.625, -0.375, -0.375, 0.125]),
        ("reinforce", {}, [0.625, -0.375, -0.375, 0.125]),
    ],
)
def test_worked_group(name: AdvantageName, options: dict[str, Any], expected: list[float]) -> None:
    assert of_group(WORKED, name, **options) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("order", [[6, 10, 2], [2, 6, 10], [10, 2, 6]])
def test_groups_go_by_id_whatever_the_order(order: list[int]) -> None:
    """C46: groups A (2, 6) and B (10) in any row order; a mean over all three would give -1, 0, 1."""
    group_of = {2: "A", 6: "A", 10: "B"}
    got = dict(zip(order, advantages([group_of[r] for r in order], order, "grpo"), strict=True))
    assert got == pytest.approx({2: -0.707107, 6: 0.707107, 10: 0.0}, abs=1e-6)


@pytest.mark.parametrize("name", GROUP_NAMES)
def test_a_lone_survivor_gets_zero(name: AdvantageName) -> None:
    """C46: whatever the rest of the batch, and also when only its siblings' rewards are missing."""
    assert list(advantages([1, 2, 2], [5.0, None, 3.0], name)) == [0.0, 0.0, 0.0]


def test_reinforce_uses_the_batch() -> None:
    assert list(advantages([1, 2, 3], [1.0, 0.0, 2.0], "reinforce")) == [0.0, -1.0, 1.0]
    assert list(advantages([1, 2, 3], [1.0, None, 2.0], "reinforce")) == [-0.5, 0.0, 0.5]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "rewards",
    [
        np.full(7, np.float32(0.3)),
        np.array([0.3, 0.1 + 0.2, 0.3]),
        np.full(4, -1e9) + np.array([0.0, 100.0, 0.0, 0.0]),
        np.full(4, 3, dtype=np.float16),
        np.zeros(3),
    ],
)
def test_constant_groups_are_exactly_zero(name: AdvantageName, rewards: np.ndarray) -> None:
    """Seven copies of float32(0.3) are the trap: their float32 mean is an ulp off. C49: so is constant float16."""
    assert of_group(rewards, name, std_eps=1e-9) == [0.0] * len(rewards)


def test_small_but_real_differences_are_signal() -> None:
    assert of_group([0.0, 2e-6], "grpo", std_eps=0.0) == pytest.approx([-0.707107, 0.707107], abs=1e-6)
    assert of_group([0.0, 1e-6], "grpo", std_eps=0.0) == [0.0, 0.0]


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        (torch.tensor([2, 2, 2, 2.015625], dtype=torch.bfloat16), [-0.5, -0.5, -0.5, 1.5]),
        (np.array([0, 400, 0, 0], dtype=np.float16), [-0.5, 1.5, -0.5, -0.5]),
        (np.array([0, 0, 0, 1], dtype=np.int64), [-0.5, -0.5, -0.5, 1.5]),
        ([0.0, 1e300, 0.0, 0.0], [-0.5, 1.5, -0.5, -0.5]),
    ],
)
def test_statistics_do_not_use_the_type_of_the_rewards(rewards: Any, expected: list[float]) -> None:
    """C49: half precision, integers and numbers whose squares overflow give what float64 gives."""
    assert of_group(rewards, "grpo", std_eps=0.0) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_unscorable_rewards_are_out_of_the_statistics(name: AdvantageName) -> None:
    """C04: NaN, both infinities, float('1e400') and null get 0 and leave the others as if they were not there."""
    bad = [math.nan, math.inf, -math.inf, float("1e400"), None]
    mixed = [1.0, bad[0], 0.0, bad[1], *bad[2:]]
    got = of_group(mixed, name)
    assert got[1] == 0.0 and got[3:] == [0.0] * 4
    assert [got[0], got[2]] == of_group([1.0, 0.0], name)
    assert of_group(bad, name) == [0.0] * 5


def test_overflow_is_an_error_not_a_nan() -> None:
    with pytest.raises(NonFiniteError, match="scale the rewards"):
        of_group([1.7e308, -1.7e308, 1.7e308], "grpo")


def test_lengths_must_agree_and_nothing_is_nothing() -> None:
    with pytest.raises(DataError, match="differ in length"):
        advantages([1], [1.0, 2.0], "grpo")
    assert advantages([], [], "rloo").shape == (0,)


@given(
    st.lists(st.tuples(st.integers(0, 3), st.none() | st.integers(-8, 8)), min_size=1, max_size=20), st.integers(0, 1)
)
@settings(max_examples=100, deadline=None)
def test_equals_a_naive_loop(rows: list[tuple[int, int | None]], ddof: int) -> None:
    ids, rewards = [i for i, _ in rows], [r for _, r in rows]
    for name in NAMES:
        got = advantages(ids, rewards, name, std_ddof=ddof, std_eps=1e-3)
        for i, (group, reward) in enumerate(rows):
            members = [r for g, r in rows if r is not None and (g == group or name == "reinforce")]
            if reward is None or len(members) < 2 or len(set(members)) == 1:
                assert got[i] == 0.0
                continue
            mean = sum(members) / len(members)
            expected = reward - mean
            if name == "rloo":
                expected = reward - (sum(members) - reward) / (len(members) - 1)
            if name == "grpo":
                variance = sum((r - mean) ** 2 for r in members) / (len(members) - ddof)
                expected /= math.sqrt(variance) + 1e-3
            assert got[i] == pytest.approx(expected, abs=1e-9)


@given(rewards_lists, st.randoms(use_true_random=False))
@settings(max_examples=40, deadline=None)
def test_permuting_a_group_permutes_its_advantages(rewards: list[float], rng: random.Random) -> None:
    order = rng.sample(range(len(rewards)), len(rewards))
    for name in NAMES:
        straight = of_group(rewards, name)
        assert of_group([rewards[i] for i in order], name) == pytest.approx([straight[i] for i in order], abs=1e-9)


@given(rewards_lists, st.integers(-40, 40), st.sampled_from([0.25, 2.0, 16.0]))
@settings(max_examples=40, deadline=None)
def test_shift_and_scale(rewards: list[float], shift: int, scale: float) -> None:
    for name in NAMES:
        base = of_group(rewards, name, std_eps=0.0)
        assert of_group([r + shift for r in rewards], name, std_eps=0.0) == pytest.approx(base, abs=1e-9)
        scaled = of_group([r * scale for r in rewards], name, std_eps=0.0)
        factor = 1.0 if name == "grpo" else scale
        assert scaled == pytest.approx([a * factor for a in base], abs=1e-9)


@given(rewards_lists)
@settings(max_examples=40, deadline=None)
def test_advantages_of_a_group_sum_to_zero(rewards: list[float]) -> None:
    for name in NAMES:
        assert sum(of_group(rewards, name)) == pytest.approx(0.0, abs=1e-9)


def test_population_and_sample_deviation_and_rloo_differ_by_known_factors() -> None:
    sample, population = of_group(WORKED, "grpo", std_eps=0.0), of_group(WORKED, "grpo", std_ddof=0, std_eps=0.0)
    assert [p / s for p, s in zip(population, sample, strict=True)] == pytest.approx([math.sqrt(4 / 3)] * 4)
    ratios = [a / b for a, b in zip(of_group(WORKED, "rloo"), of_group(WORKED, "dr_grpo"), strict=True)]
    assert ratios == pytest.approx([4 / 3] * 4)


@pytest.mark.parametrize("name", GROUP_NAMES)
def test_a_split_between_groups_changes_nothing(name: AdvantageName) -> None:
    ids, rewards = [1, 2, 1, 2, 3, 3, 1], [0.5, 1.0, 0.25, 3.0, 1.0, 2.0, 0.0]
    whole = advantages(ids, rewards, name)
    for part in ({1}, {2, 3}):
        rows = [i for i, group in enumerate(ids) if group in part]
        alone = advantages([ids[i] for i in rows], [rewards[i] for i in rows], name)
        assert list(alone) == [whole[i] for i in rows]


def test_overlong_penalty_hand_numbers() -> None:
    lengths = np.array([0, 16384, 18432, 20480, 22528])
    got = overlong_penalty(lengths, 20480, OverlongConfig(buffer_tokens=4096))
    assert got.tolist() == pytest.approx([0.0, 0.0, -0.5, -1.0, -1.0])
    assert overlong_penalty(lengths, 20480, OverlongConfig(buffer_tokens=4096, factor=0.4)).tolist() == pytest.approx(
        [0.0, 0.0, -0.2, -0.4, -0.4]
    )


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "k3_st"])
def test_sequence_kl_sums_action_tokens(estimator: Any) -> None:
    sampler, ref, mask = [-1.0, -2.0, -0.5, -60.0], [-1.5, math.nan, -0.4, -1.0], [True, False, True, True]
    kept = [0, 2, 3]
    terms = kl_estimate(
        torch.tensor([sampler[i] for i in kept], dtype=torch.float64),
        torch.tensor([ref[i] for i in kept], dtype=torch.float64),
        estimator,
    )
    assert sequence_kl(sampler, ref, mask, estimator) == pytest.approx(float(terms.sum()))
    assert sequence_kl([], [], [], estimator) == 0.0

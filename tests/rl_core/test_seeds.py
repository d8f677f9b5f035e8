"""Random numbers are a function of (run seed, stage, iteration, row, step) and of nothing else."""

from __future__ import annotations

import hashlib
import itertools

import numpy as np
import pytest
from scipy import stats

from rl_core.seeds import seed, uniforms

U64 = np.uint64


def _row_seeds(rows: int, run_seed: int = 7) -> np.ndarray:
    return np.array([seed(run_seed, "generate", 0, row // 8, row % 8) for row in range(rows)], dtype=U64)


def _splitmix64(row_seed: int, step: int) -> float:
    """The generator in Python's own integers."""
    mask = 2**64 - 1
    z = (row_seed + 0x9E3779B97F4A7C15 * (step + 1)) & mask
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & mask
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & mask
    return ((z ^ (z >> 31)) >> 11) / 2**53


def test_values_are_these_on_every_machine() -> None:
    assert seed(7, "generate", 0, 0, 0) == 1664211816336824489
    assert seed(7, "generate", 0, 0, 0) == int(hashlib.sha256(b"rlstages:7:generate:0:0:0").hexdigest()[:16], 16) // 2
    assert seed(7, "train", 3) == 2706578740646706013
    assert seed(0, "evaluate", -1) == 1609793610729951366
    assert uniforms(np.array([0, 1, 2**63 - 1], dtype=U64), 0).tolist() == [
        0.8833108082136426,
        0.5665615751722809,
        0.16564699010451844,
    ]


@pytest.mark.parametrize("row_seed", [0, 1, 2**63 - 1, 2**64 - 1, 1664211816336824489])
@pytest.mark.parametrize("step", [0, 1, 63, 2**31])
def test_uniforms_are_splitmix64(row_seed: int, step: int) -> None:
    assert uniforms(np.array([row_seed], dtype=U64), step).tolist() == [_splitmix64(row_seed, step)]


def test_first_number_of_the_published_splitmix64_stream() -> None:
    """Seed 1234567 of the reference implementation starts with 6457827717110365317."""
    assert uniforms(np.array([1234567], dtype=U64), 0).tolist() == [(6457827717110365317 >> 11) / 2**53]


def test_no_two_streams_share_a_seed() -> None:
    """C39: rows of a group, groups with one prompt, iterations, stages and runs all draw from streams of their own."""
    keys = list(itertools.product((0, 7), ("generate", "evaluate", "train"), range(-1, 6), range(20), range(8)))
    seeds = {seed(run, stage, iteration, group, row) for run, stage, iteration, group, row in keys}
    assert len(seeds) == len(keys)
    shorter = {seed(run, stage, iteration) for run, stage, iteration, *_ in keys}
    assert len(shorter) == 2 * 3 * 7
    assert not shorter & seeds
    assert all(0 <= value < 2**63 for value in seeds)


def test_parts_of_a_key_do_not_run_together() -> None:
    assert (
        len({seed(1, "s", 23), seed(12, "s", 3), seed(1, "s", 2, 3), seed(1, "s", 2, 3, 0), seed(1, "s", 20, 3)}) == 5
    )


def test_eight_completions_of_one_prompt_in_two_groups_over_three_iterations() -> None:
    """C39: all 24 sub-streams differ, and drawing an iteration again reproduces exactly that iteration."""

    def draw(iteration: int) -> np.ndarray:
        rows = np.array([seed(7, "generate", iteration, group, i) for group in (0, 1) for i in range(4)], dtype=U64)
        return np.stack([uniforms(rows, step) for step in range(16)], axis=1)

    runs = [draw(iteration) for iteration in range(3)]
    assert len(np.unique(np.concatenate(runs), axis=0)) == 24
    assert np.array_equal(draw(2), runs[2])


def test_a_row_does_not_depend_on_its_batch() -> None:
    rows = _row_seeds(64)
    order = np.random.default_rng(0).permutation(64)
    for step in (0, 5, 1000):
        whole = uniforms(rows, step)
        assert np.array_equal(uniforms(rows[order], step), whole[order])
        assert np.array_equal(np.concatenate([uniforms(rows[i : i + 1], step) for i in range(64)]), whole)


def test_numbers_lie_in_the_half_open_unit_interval() -> None:
    found = uniforms(np.concatenate([_row_seeds(2000), np.arange(2000, dtype=U64)]), 3)
    assert found.dtype == np.float64
    assert found.min() >= 0.0
    assert found.max() < 1.0


def test_rows_and_steps_are_uniform() -> None:
    rows = _row_seeds(20_000)
    across_rows = uniforms(rows, 0)
    across_steps = np.concatenate([uniforms(rows[:1], step) for step in range(20_000)])
    neighbours = uniforms(np.arange(20_000, dtype=U64), 0)
    for sample in (across_rows, across_steps, neighbours):
        assert stats.kstest(sample, "uniform").pvalue > 0.01
        counts = np.histogram(sample, bins=64, range=(0, 1))[0]
        assert stats.chisquare(counts).pvalue > 0.01


def test_neighbouring_steps_rows_and_runs_are_unrelated() -> None:
    rows = _row_seeds(20_000)
    pairs = [
        (uniforms(rows, 0), uniforms(rows, 1)),
        (uniforms(rows, 0)[:-1], uniforms(rows, 0)[1:]),
        (uniforms(rows, 0), uniforms(_row_seeds(20_000, run_seed=8), 0)),
    ]
    for one, other in pairs:
        grid = np.histogram2d(one, other, bins=8, range=((0, 1), (0, 1)))[0]
        assert stats.chisquare(grid.ravel()).pvalue > 0.01
        assert abs(stats.pearsonr(one, other).statistic) < 4 / np.sqrt(len(one))


def test_seeds_fill_all_their_bits() -> None:
    """Each of the 63 bits is set in about half of the seeds."""
    seeds = _row_seeds(10_000)
    for bit in range(63):
        ones = int(((seeds >> U64(bit)) & U64(1)).sum())
        assert stats.binomtest(ones, len(seeds)).pvalue > 1e-4

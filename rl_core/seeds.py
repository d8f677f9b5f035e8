"""The one derivation of random numbers: everything random is a function of (run seed, stage, iteration, row, step)."""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def seed(run_seed: int, stage: str, iteration: int, *row: int) -> int:
    """A 63-bit seed for one row of one stage of one iteration.

    The parts are hashed with SHA-256, so neighbouring rows, iterations and runs get unrelated streams, and the value
    does not depend on batch order, process or machine.
    """
    text = ":".join(["rlstages", str(run_seed), stage, str(iteration), *map(str, row)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def uniforms(row_seeds: npt.NDArray[np.uint64], step: int) -> npt.NDArray[np.float64]:
    """One uniform number in [0, 1) per row for generation step `step`; shape [rows].

    A counter-based generator (the SplitMix64 finaliser over seed + step · golden ratio): a row's number depends only
    on its own seed and step, never on which other rows are in the batch.
    """
    with np.errstate(over="ignore"):
        z = row_seeds + _GOLDEN * np.uint64(step + 1)
        z = (z ^ (z >> np.uint64(30))) * _MIX_1
        z = (z ^ (z >> np.uint64(27))) * _MIX_2
        z = z ^ (z >> np.uint64(31))
    return (z >> np.uint64(11)).astype(np.float64) * 2.0**-53

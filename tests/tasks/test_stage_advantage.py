"""The advantage stage: rewards and trajectories meet by id, and what has no score has no advantage."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from rl_core.errors import DataError, NonFiniteError
from rl_core.manifest import Ref
from rl_core.schemas import rewards_schema

Row = dict[str, Any]
NAMES = ["last_integer"]


def scores(bench: Any, rewards: dict[tuple[int, int], float | None]) -> Ref:
    """A rewards table in the order given."""
    rows = [
        {"group_id": g, "sample_id": s, "reward": value, "reward_last_integer": value, "status": "ok"}
        for (g, s), value in rewards.items()
    ]
    found: Ref = bench.table(rows, rewards_schema(NAMES))
    return found


def batch(bench: Any, rewards: dict[tuple[int, int], float | None], **columns: Any) -> tuple[Ref, Ref]:
    rows = [{"group": g, "sample": s, **{k: v(g, s) for k, v in columns.items()}} for g, s in sorted(rewards)]
    return bench.trajectories(rows), scores(bench, rewards)


def by_key(rows: list[Row], column: str) -> dict[tuple[int, int], Any]:
    return {(row["group_id"], row["sample_id"]): row[column] for row in rows}


def test_rows_meet_by_id_whatever_their_order(bench: Any, rows: Any) -> None:
    """C46: groups A: 2, 6 and B: 10, with B and A mixed: by position the means would be wrong."""
    for order in ([(0, 1), (1, 0), (0, 0)], [(1, 0), (0, 0), (0, 1)], [(0, 0), (0, 1), (1, 0)]):
        given = {(0, 0): 2.0, (0, 1): 6.0, (1, 0): 10.0}
        trajectories, rewards = batch(bench, {key: given[key] for key in order})
        made = bench.run("advantage", bench.config(), generate=trajectories, score=rewards)
        found = by_key(rows(made), "advantage")
        assert found == {
            (0, 0): pytest.approx(-math.sqrt(0.5), abs=1e-6),
            (0, 1): pytest.approx(math.sqrt(0.5), abs=1e-6),
            (1, 0): 0.0,
        }
        assert by_key(rows(made), "drop_reason") == {(0, 0): None, (0, 1): None, (1, 0): "singleton"}


def test_many_rows_against_a_loop_per_group(bench: Any, rows: Any) -> None:
    """A shuffled table of uneven groups, with the statistics written out; the metrics of the same rows."""
    rng = random.Random(1)
    rewards = {(g, s): float(rng.randint(0, 3)) for g in range(12) for s in range(rng.randint(1, 5))}
    rewards |= {(12, s): 1.5 for s in range(3)} | {(13, 0): None, (13, 1): 1.0, (13, 2): 0.0}
    keys = list(rewards)
    rng.shuffle(keys)
    lengths = {key: rng.randint(0, 6) for key in keys}
    trajectories, table = batch(
        bench,
        {key: rewards[key] for key in keys},
        completion_ids=lambda g, s: [65] * lengths[g, s],
        truncated=lambda g, s: (g + s) % 3 == 0,
    )
    made = rows(bench.run("advantage", bench.config(), generate=trajectories, score=table))
    assert [(row["group_id"], row["sample_id"]) for row in made] == sorted(rewards)
    singleton = constant = 0
    for group in range(14):
        values = [v for (g, _), v in rewards.items() if g == group and v is not None]
        mean = sum(values) / len(values)
        std = math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - 1)) if len(values) > 1 else 0.0
        singleton += len(values) == 1
        constant += len(values) > 1 and std == 0
        for row in (row for row in made if row["group_id"] == group):
            reward = rewards[group, row["sample_id"]]
            expected = 0.0 if reward is None or std == 0 else (reward - mean) / (std + 1e-6)
            assert row["advantage"] == pytest.approx(expected, abs=1e-9)
            assert row["reward"] == reward
            empty = lengths[group, row["sample_id"]] == 0
            reason = (
                "unscored"
                if reward is None
                else "empty"
                if empty
                else "singleton"
                if len(values) == 1
                else "no_signal"
                if std == 0
                else None
            )
            assert (row["keep"], row["drop_reason"]) == (reason is None, reason)
    scored = [v for v in rewards.values() if v is not None]
    metrics = bench.reply["metrics"]
    assert metrics["reward/mean"] == pytest.approx(sum(scored) / len(scored))
    assert metrics["reward/nonfinite_frac"] == pytest.approx(1 / len(rewards))
    assert (metrics["groups/count"], metrics["groups/singleton"]) == (14, singleton)
    assert metrics["groups/zero_var_frac"] == pytest.approx(constant / (14 - singleton))
    assert metrics["groups/kept_frac"] == len({row["group_id"] for row in made if row["keep"]}) / 14
    assert metrics["completion/kept_frac"] == pytest.approx(sum(row["keep"] for row in made) / len(made))
    assert metrics["completion/empty_frac"] == pytest.approx(sum(n == 0 for n in lengths.values()) / len(lengths))
    assert metrics["completion/truncated_frac"] == pytest.approx(sum((g + s) % 3 == 0 for g, s in keys) / len(keys))
    assert metrics["completion/tokens_mean"] == pytest.approx(sum(lengths.values()) / len(lengths))


def test_an_unscored_row_is_out_of_its_group(bench: Any, rows: Any) -> None:
    """C02: 1, null, 0 and 1: the mean is 2/3, as if the row were not there, and the row stays out of the loss."""
    trajectories, rewards = batch(bench, {(0, 0): 1.0, (0, 1): None, (0, 2): 0.0, (0, 3): 1.0})
    config = bench.config(algorithm={"name": "dr_grpo"})
    found = rows(bench.run("advantage", config, generate=trajectories, score=rewards))
    assert [row["advantage"] for row in found] == pytest.approx([1 / 3, 0.0, -2 / 3, 1 / 3])
    assert [(row["keep"], row["drop_reason"]) for row in found] == [
        (True, None),
        (False, "unscored"),
        (True, None),
        (True, None),
    ]
    assert [row["reward"] for row in found] == [1.0, None, 0.0, 1.0]
    assert bench.reply["metrics"]["reward/nonfinite_frac"] == 0.25


def test_a_batch_without_any_score(bench: Any, rows: Any) -> None:
    """Metrics that have nothing to be computed of are null, not 0."""
    trajectories, rewards = batch(bench, {(g, s): None for g in range(2) for s in range(2)})
    found = rows(bench.run("advantage", bench.config(), generate=trajectories, score=rewards))
    assert [(row["advantage"], row["keep"], row["drop_reason"]) for row in found] == [(0.0, False, "unscored")] * 4
    metrics = bench.reply["metrics"]
    assert [metrics[name] for name in ("reward/mean", "reward/std", "reward/shaped_mean", "groups/zero_var_frac")] == (
        [None] * 4
    )
    assert (metrics["groups/kept_frac"], metrics["reward/nonfinite_frac"]) == (0.0, 1.0)


def test_rows_that_do_not_meet_are_refused(bench: Any) -> None:
    """A missing row, a row of another batch and a row twice are errors of the data, and nothing is written."""
    whole = {(0, 0): 1.0, (0, 1): 0.0, (0, 2): 0.5}
    trajectories, _ = batch(bench, whole)
    missing = scores(bench, {key: whole[key] for key in list(whole)[:2]})
    other = scores(bench, {(0, 0): 1.0, (0, 1): 0.0, (7, 2): 0.5})
    twice = bench.table(
        [{"group_id": 0, "sample_id": s, "reward": 1.0, "status": "ok"} for s in (0, 1, 1, 2)], rewards_schema(NAMES)
    )
    for table in (missing, other, twice):
        context = bench.context(bench.config(), generate=trajectories, score=table)
        with pytest.raises(DataError, match="do not have the same rows") as caught:
            bench.perform("advantage", context)
        assert caught.value.todo == "rerun from score"
        assert list(context.output.iterdir()) == []


def test_a_penalty_in_the_reward(bench: Any, rows: Any) -> None:
    """kl.place = reward: minus coef times the k1 sum of sampler minus reference over the action tokens."""
    sampled, reference = [[-1.0, -2.0], [-3.0, -1.0]], [[-1.5, -2.25], [-2.0, -9.0]]
    trajectories, rewards = batch(
        bench,
        {(0, 0): 1.0, (0, 1): 0.0},
        completion_ids=lambda g, s: [65, 66],
        action_mask=lambda g, s: [True, s == 0],
        sampler_logprobs=lambda g, s: sampled[s],
        ref_logprobs=lambda g, s: reference[s],
    )
    config = bench.config(algorithm={"name": "dr_grpo", "kl": {"coef": 0.5, "place": "reward"}})
    found = rows(bench.run("advantage", config, generate=trajectories, score=rewards))
    assert [row["reward"] for row in found] == pytest.approx([1.0 - 0.5 * 0.75, 0.0 - 0.5 * -1.0])
    assert [row["advantage"] for row in found] == pytest.approx([0.0625, -0.0625])
    assert bench.reply["metrics"]["reward/mean"] == 0.5
    assert bench.reply["metrics"]["reward/shaped_mean"] == pytest.approx(0.5625)

    trajectories, rewards = batch(
        bench, {(0, 0): 1.0, (0, 1): 0.0}, ref_logprobs=lambda g, s: [math.nan if s else -5.0] * 3
    )
    with pytest.raises(NonFiniteError, match="not finite"):
        bench.run("advantage", config, generate=trajectories, score=rewards)


def test_truncated_rows_by_policy(bench: Any, rows: Any) -> None:
    """The completion budget of the config shapes lengths; a cut row stays, leaves the loss, or changes its reward."""
    rewards = {(0, 0): 1.0, (0, 1): 0.0, (0, 2): 0.0}
    trajectories, table = batch(bench, rewards, truncated=lambda g, s: s == 0)
    expected = {
        "keep": ([1.0, 0.0, 0.0], [None, None, None]),
        "mask_loss": ([1.0, 0.0, 0.0], ["truncated", None, None]),
        "reward_override": ([-2.0, 0.0, 0.0], [None, None, None]),
    }
    for truncation, (shaped, reasons) in expected.items():
        algorithm = {"name": "dr_grpo", "truncation": truncation, "truncated_reward": -2.0}
        made = bench.run("advantage", bench.config(algorithm=algorithm), generate=trajectories, score=table)
        assert [row["reward"] for row in rows(made)] == shaped
        assert [row["drop_reason"] for row in rows(made)] == reasons
        assert [row["advantage"] for row in rows(made)] == pytest.approx([r - sum(shaped) / 3 for r in shaped])

    trajectories, table = batch(bench, rewards, completion_ids=lambda g, s: [65] * (10 - s))
    config = bench.config(algorithm={"name": "dapo"}, generate={"max_completion_tokens": 10})  # a buffer of 2 tokens
    made = bench.run("advantage", config, generate=trajectories, score=table)
    assert [row["reward"] for row in rows(made)] == pytest.approx([0.0, -0.5, 0.0])

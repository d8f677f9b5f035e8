"""The pool of processes that runs reward functions, and what comes of a reward that raises, hangs or dies.

Rows go out in batches of whole groups. A batch that fails is sent again row by row, so that only the guilty rows stay
without a value: each gets null and a reason. So a value must not depend on the other rows of a call. A process that
hangs is killed with all it started; the next batch finds a new one.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from rl_core.config import RewardConfig
from rl_core.errors import RewardContractError
from rl_core.rewards.contract import check_columns
from tasks.processes.child import ChildProcess
from tasks.scoring.job import Job, Row, RowScore

__all__ = ["RewardPool", "RowScore", "weighted_total"]
_LOAD_SECONDS = 300.0  # to import the modules of all rewards


def weighted_total(rewards: Sequence[RewardConfig], values: Mapping[str, float | None]) -> float | None:
    """Weighted sum of one completion's components; null when a value is missing or the sum is not finite."""
    found = {reward.name: values[reward.name] for reward in rewards}
    if None in found.values():
        return None
    total = sum(reward.weight * (found[reward.name] or 0.0) for reward in rewards)
    return total if math.isfinite(total) else None


class RewardPool:
    """Warm processes for a set of rewards.

    Args:
        rewards: the rewards, in the recipe's order.
        processes: processes that run at the same time.
        batch_rows: most rows of one call.
        timeout_seconds: limit of one call.
        log_dir: folder for what the functions print, one file per process.

    Attributes:
        seconds: seconds spent in each reward in the last `score`, summed over the processes.
        digests: source digest of each reward, as loaded.

    Raises `RewardContractError` when a reward cannot be imported or its signature does not fit its params.
    """

    def __init__(
        self, rewards: list[RewardConfig], processes: int, batch_rows: int, timeout_seconds: float, log_dir: Path
    ) -> None:
        self.rewards = {reward.name: reward for reward in rewards}
        self.processes, self.batch_rows, self.timeout_seconds = processes, batch_rows, timeout_seconds
        self.seconds: dict[str, float] = {}
        self.loaded: dict[str, Any] = {}
        self._log_dir = log_dir
        self._children: list[ChildProcess | None] = [None] * processes
        self._lock = threading.Lock()
        try:
            self.child(0)
        except BaseException:
            self.close()
            raise
        self.digests: dict[str, str] = {name: about["digest"] for name, about in self.loaded.items()}

    @property
    def pids(self) -> list[int]:
        """Process ids of the children that are alive."""
        return [child.pid for child in self._children if child is not None and child.alive]

    def score(
        self, rows: list[Row], only: Collection[str] | None = None, on_error: Literal["fail", "mark"] = "mark"
    ) -> list[RowScore]:
        """Run the rewards on rows and wait for all of them. Works in any thread; one call at a time.

        Args:
            rows: dictionaries with `group_id`, `sample_id`, `text`, `prompt_messages`, `completion_ids`, `truncated`
                and `data` (the environment's columns).
            only: names of the rewards to run; default all.
            on_error: fail: raise at the first row whose reward failed ("returned None" is no failure).

        Raises:
            RewardContractError: a result of the wrong form, or a column that a reward needs and no row has.
            RewardFailedError: with "fail": names the row and the function, with the reward's own traceback.
        """
        names = [name for name in self.rewards if only is None or name in only]
        columns = sorted({column for row in rows for column in row["data"]})
        for name in names if rows else []:
            check_columns(self.rewards[name].function, self.loaded[name]["needs"], self.rewards[name].params, columns)
        job = Job(self, rows, names, columns, on_error == "fail")
        job.run()
        self.seconds = job.seconds
        rewards = [self.rewards[name] for name in names]
        for score in job.scores:
            score.total = weighted_total(rewards, score.values)
        return job.scores

    def child(self, slot: int) -> ChildProcess:
        """The process of that slot, started and loaded where there is none alive."""
        child = self._children[slot]
        if child is not None and child.alive:
            return child
        if child is not None:
            child.kill()
        log = self._log_dir / f"reward-{slot}.log"
        child = self._children[slot] = ChildProcess("tasks.scoring.reward_process", [], log)
        rewards = [reward.model_dump(mode="json") for reward in self.rewards.values()]
        loaded = child.request({"op": "load", "rewards": rewards}, _LOAD_SECONDS)
        with self._lock:
            self.loaded = self.loaded or loaded
            changed = [name for name in loaded if loaded[name]["digest"] != self.loaded[name]["digest"]]
        if changed:
            raise RewardContractError(
                f"the source of reward {', '.join(changed)} changed while it was in use",
                expected="one source for all rows of a table",
                todo="run the stage again: it starts with the new source",
            )
        return child

    def kill(self) -> None:
        """End all processes at once; `score` starts them anew."""
        for child in self._children:
            if child is not None:
                child.kill()

    def close(self) -> None:
        for child in self._children:
            if child is not None:
                child.close()

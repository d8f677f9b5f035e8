"""One scoring: the queue of calls to reward functions, one thread per process, the results."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rl_core.errors import RewardFailedError, StageTimeoutError, WorkerError
from rl_core.rewards.contract import RESERVED
from tasks.processes.child import ChildProcess

if TYPE_CHECKING:
    from tasks.scoring.pool import RewardPool

Row = dict[str, Any]


@dataclass
class RowScore:
    """What the rewards said about one completion.

    Attributes:
        values: per reward, null where there is none.
        reasons: per reward, why there is no value: "ValueError: ...", "timeout after 2 s", "process died: signal 9",
            "not finite", "returned None".
        tracebacks: of the rewards that raised.
        total: weighted sum; null when a value is missing or the sum is not finite.
    """

    values: dict[str, float | None] = field(default_factory=dict)
    reasons: dict[str, str | None] = field(default_factory=dict)
    tracebacks: dict[str, str] = field(default_factory=dict)
    total: float | None = None


@dataclass(frozen=True)
class _Task:
    reward: str
    rows: Sequence[int]
    second_try: bool = False


class Job:
    """One `score`: the queue of calls, one thread per process, the results."""

    def __init__(
        self, pool: RewardPool, rows: list[Row], names: list[str], columns: list[str], fail_fast: bool
    ) -> None:
        self.pool, self.rows, self.columns, self.fail_fast = pool, rows, columns, fail_fast
        self.scores = [RowScore() for _ in rows]
        self.seconds = dict.fromkeys(names, 0.0)
        batches = list(_batches(rows, pool.batch_rows, pool.processes))
        self._tasks = deque(_Task(name, batch) for name in names for batch in batches)
        self._open = len(self._tasks)
        self._fatal: BaseException | None = None
        self._changed = threading.Condition()

    def run(self) -> None:
        threads = [
            threading.Thread(target=self._work, args=(slot,), name=f"reward-{slot}", daemon=True)
            for slot in range(min(self.pool.processes, self._open))
        ]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        except BaseException as error:  # interrupted: no process goes on
            self._stop(error)
            raise
        if self._fatal is not None:
            raise self._fatal

    def _work(self, slot: int) -> None:
        try:
            while (task := self._next()) is not None:
                self._perform(self.pool.child(slot), task)
                with self._changed:
                    self._open -= 1
                    self._changed.notify_all()
        except BaseException as error:
            self._stop(error)

    def _next(self) -> _Task | None:
        with self._changed:
            while self._open and not self._tasks and self._fatal is None:
                self._changed.wait()
            return self._tasks.popleft() if self._tasks and self._fatal is None else None

    def _stop(self, error: BaseException) -> None:
        with self._changed:
            self._fatal = self._fatal or error
            self._changed.notify_all()
        self.pool.kill()

    def _perform(self, child: ChildProcess, task: _Task) -> None:
        limit, started = self.pool.timeout_seconds, time.perf_counter()
        died, details = False, ""
        try:
            answer = child.request(self._message(task), limit)
            if "values" in answer:
                self._store(task, answer)
                return
            reason, details = answer["failure"], answer["traceback"]
        except StageTimeoutError as error:
            reason, details = f"timeout after {limit:g} s", error.details
        except WorkerError as error:
            reason, details, died = f"process died: {error.got}", error.details, True
        finally:
            with self._changed:
                self.seconds[task.reward] += time.perf_counter() - started
        if len(task.rows) > 1:
            self._add([_Task(task.reward, [row]) for row in task.rows])
        elif died and not task.second_try:  # killed from outside, perhaps: not the row's fault
            self._add([_Task(task.reward, task.rows, second_try=True)])
        else:
            self._record(task.reward, task.rows[0], None, reason, details)

    def _message(self, task: _Task) -> dict[str, Any]:
        """Only what the reward wants travels."""
        about = self.pool.loaded[task.reward]
        columns = [name for name in self.columns if about["takes_all"] or name in about["wants"]]
        keys = [key for name, key in RESERVED.items() if about["takes_all"] or name in about["wants"]]
        rows = [
            {key: self.rows[i][key] for key in keys}
            | {"data": {name: self.rows[i]["data"].get(name) for name in columns}}
            for i in task.rows
        ]
        return {"op": "call", "reward": task.reward, "rows": rows, "columns": columns}

    def _store(self, task: _Task, answer: dict[str, Any]) -> None:
        for row, value, reason in zip(task.rows, answer["values"], answer["reasons"], strict=True):
            self._record(task.reward, row, value, reason, "")

    def _record(self, name: str, row: int, value: float | None, reason: str | None, details: str) -> None:
        score = self.scores[row]
        score.values[name], score.reasons[name] = value, reason
        if details:
            score.tracebacks[name] = details
        if self.fail_fast and reason is not None and reason != "returned None":
            where = f"group {self.rows[row]['group_id']}, sample {self.rows[row]['sample_id']}"
            raise RewardFailedError(
                f"reward {self.pool.rewards[name].function!r} ({name}) failed for {where}",
                expected="a number for every completion",
                got=reason,
                todo="mend the reward, or set scoring.on_error = 'mark' to train without such rows",
                details=details,
            )

    def _add(self, tasks: list[_Task]) -> None:
        with self._changed:
            self._tasks.extend(tasks)
            self._open += len(tasks)
            self._changed.notify_all()


def _batches(rows: list[Row], limit: int, processes: int) -> Iterator[list[int]]:
    """Row numbers in batches: whole groups where they fit into `limit`, and a share for every process."""
    groups: dict[Any, list[int]] = {}
    for index, row in enumerate(rows):
        groups.setdefault(row["group_id"], []).append(index)
    share = min(limit, -(-len(rows) // processes))
    batch: list[int] = []
    for members in groups.values():
        if batch and len(batch) + len(members) > share:
            yield batch
            batch = []
        batch = batch + members
        while len(batch) > limit:
            yield batch[:limit]
            batch = batch[limit:]
    if batch:
        yield batch

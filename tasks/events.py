"""What happens in open runs, for whoever wants to show it: the terminal's bars, Prefect's progress artifact."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from tasks.stage import StageResult

EventKind = Literal["waiting", "started", "progress", "finished", "failed", "completed", "notice"]


@dataclass(frozen=True)
class StageEvent:
    """A stage waits to start, started, got on, finished or failed, a whole iteration is complete, or a person acted.

    Attributes:
        iteration: k; -1 for the evaluation of the base model.
        done, total: units of work, with `progress`.
        result: with `finished`.
        error: with `failed`.
        message: with `waiting`: for what, and who has it; with `notice`: what was done to the run.
    """

    kind: EventKind
    run: str
    iteration: int
    stage: str = ""
    done: int = 0
    total: int = 0
    result: StageResult | None = None
    error: BaseException | None = None
    message: str = ""


Observer = Callable[[StageEvent], None]
_OBSERVERS: list[Observer] = []


def tell(event: StageEvent) -> None:
    for observer in list(_OBSERVERS):
        observer(event)


@contextmanager
def observed(observer: Observer) -> Iterator[None]:
    """Call `observer` for every event of every run in this process."""
    _OBSERVERS.append(observer)
    try:
        yield
    finally:
        _OBSERVERS.remove(observer)

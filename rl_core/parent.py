"""Where a forked run leaves its parent."""

from __future__ import annotations

from rl_core.execution import StageName
from rl_core.section import Section
from rl_core.stages import STAGES


class Parent(Section):
    """The fork point: the first stage of the first iteration that is the new run's own."""

    run: str
    iteration: int
    stage: StageName

    def __str__(self) -> str:
        return f"{self.run}@{self.iteration}/{self.stage}"

    def has(self, iteration: int, stage: str) -> bool:
        """Whether a stage of an iteration lies before the fork point, so that the parent's output is the child's."""
        order: list[str] = list(STAGES)
        return (iteration, order.index(stage)) < (self.iteration, order.index(self.stage))

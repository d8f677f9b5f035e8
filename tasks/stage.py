"""The contract between a stage's work and everything around it: fingerprint, reuse, validation, manifest, Prefect task.

    @stage("score")
    def score(context: StageContext, services: Services, progress: Progress) -> Outcome: ...

The function does the work and nothing else: it reads `context.inputs`, writes into `context.output` and says what it
wrote. Called as a stage, `score(run, iteration, generate=trajectories)` is a Prefect task that executes the function
in the worker process, or takes the output that is already there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

import pyarrow.parquet as pq
from pydantic import JsonValue

from rl_core.config import RunConfig
from rl_core.engines.base import Progress
from rl_core.errors import DataError, RlstagesError
from rl_core.execution import StageName
from rl_core.manifest import FileEntry, Ref
from rl_core.recipes import build_config, config_json
from rl_core.section import Section
from rl_core.stages import STAGES, Facts, StageSpec
from tasks.storage.files import describe

if TYPE_CHECKING:
    from prefect.client.schemas.objects import State, TaskRun

Mode = Literal["reuse", "execute"]


@dataclass(frozen=True)
class StageContext:
    """Everything one execution of a stage may know.

    Attributes:
        config: the run's config with the overrides of this iteration.
        iteration: k; -1 for the evaluation of the base model.
        inputs: absolute folders and digests by input name.
        output: folder to write into; it is published when the function returns.
        facts: digests of what the config only names, the prompt cursor, the reference model's digest.
        base_model: the model the run starts from, also the frozen reference.
        previous: an earlier output of the same fingerprint, on a rerun.
    """

    config: RunConfig
    iteration: int
    inputs: dict[str, Ref]
    output: Path
    facts: Facts
    base_model: Ref
    previous: Path | None = None

    def folder(self, name: str) -> Path:
        return Path(self.inputs[name].path)

    def to_dict(self) -> dict[str, Any]:
        return {
            "config": config_json(self.config),
            "iteration": self.iteration,
            "inputs": {name: ref.model_dump() for name, ref in self.inputs.items()},
            "output": str(self.output),
            "facts": self.facts,
            "base_model": self.base_model.model_dump(),
            "previous": str(self.previous) if self.previous else None,
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> StageContext:
        return cls(
            config=build_config(data["config"], "stage context"),
            iteration=data["iteration"],
            inputs={name: Ref.model_validate(ref) for name, ref in data["inputs"].items()},
            output=Path(data["output"]),
            facts=data["facts"],
            base_model=Ref.model_validate(data["base_model"]),
            previous=Path(data["previous"]) if data["previous"] else None,
        )


@dataclass(frozen=True)
class Outcome:
    """What a stage says of its work: rows written, metrics, state for the next iteration, measurements.

    `metrics` and `state` are the same for two equal executions; whatever may differ belongs into `measured`.
    """

    rows: int
    metrics: dict[str, float | None] = field(default_factory=dict)
    state: dict[str, JsonValue] = field(default_factory=dict)
    measured: dict[str, JsonValue] = field(default_factory=dict)


class StageResult(Section):
    """What a stage's task returns: a reference and the few numbers that people look at."""

    stage: str
    folder: str
    """Folder of the output, from the run folder."""
    digest: str
    fingerprint: str
    rows: int
    reused: bool
    metrics: dict[str, float | None]
    state: dict[str, JsonValue]
    seconds: float
    """Wall time of the task's work; near 0 when reused."""

    @property
    def ref(self) -> Ref:
        return Ref(path=self.folder, digest=self.digest)


S = TypeVar("S")
"""What the work may use: `tasks.worker.Services` in the worker, a `Tracker` in the flow process."""

Work = Callable[[StageContext, S, Progress], Outcome]


class Stage(Generic[S]):
    """A stage's work function with its spec; calling it runs the Prefect task."""

    def __init__(self, spec: StageSpec, work: Work[S]) -> None:
        self.spec = spec
        self.work = work
        self.__doc__ = work.__doc__

    def perform(self, context: StageContext, services: S, progress: Progress) -> tuple[Outcome, list[FileEntry]]:
        """Do the work, check what was written against the schema, and describe the files."""
        outcome = self.work(context, services, progress)
        self._check_output(context, outcome)
        return outcome, describe(context.output)

    def _check_output(self, context: StageContext, outcome: Outcome) -> None:
        schema = self.spec.schema(context.config)
        parts = sorted(context.output.glob("part-*.parquet"))
        rows = 0
        for part in parts:
            found = pq.read_schema(part)
            if not found.equals(schema):
                raise DataError(
                    f"stage {self.spec.name} wrote {part.name} with another schema",
                    expected=str(schema.names),
                    got=str(found.names),
                )
            rows += pq.read_metadata(part).num_rows
        if not parts or rows != outcome.rows:
            raise DataError(
                f"stage {self.spec.name} did not write the rows it reports",
                expected=f"{outcome.rows} rows",
                got=f"{rows} rows in {len(parts)} files",
            )

    def __call__(self, run: str, iteration: int, mode: Mode = "reuse", **inputs: StageResult | Ref) -> StageResult:
        """Run the stage of one iteration as a Prefect task. `inputs` by name, as in `StageSpec.reads`."""
        from tasks.session import current_session
        from tasks.slots import lasting_tags, outlast_restart, slots_for

        session = current_session(run)
        execution = session.iterations.config(iteration).execution
        name = self.spec.name
        tags = [f"stage:{name}", *self.spec.tags, *execution.tags.get(name, [])]
        task = self._task.with_options(
            retries=execution.retries.get(name, 1), retry_delay_seconds=execution.retry_delay_seconds, tags=tags
        )
        refs = {key: (value.ref if isinstance(value, StageResult) else value) for key, value in inputs.items()}
        # A task that returns a state, as "Reused" does, hands out the state itself; `result` opens both kinds alike.
        with lasting_tags(), slots_for(session.store, iteration, name, tags):
            result: StageResult = outlast_restart(
                session.store, lambda: task(run, iteration, mode, refs, return_state=True).result()
            )
        return result

    @cached_property
    def _task(self) -> Any:
        from prefect import Task
        from prefect.cache_policies import NO_CACHE
        from prefect.states import Completed

        from tasks.session import current_session

        def run_as_task(run: str, iteration: int, mode: Mode, inputs: dict[str, Ref]) -> Any:
            result = current_session(run).run_stage(self, iteration, inputs, mode)
            if result.reused:
                return Completed(name="Reused", message=f"{result.folder} is complete", data=result)
            return result

        return Task(
            run_as_task,
            name=self.spec.name,
            description=(self.__doc__ or "").strip().split("\n")[0],
            task_run_name=lambda: _task_run_name(self.spec.name),
            cache_policy=NO_CACHE,
            persist_result=False,
            retry_condition_fn=_worth_retrying,
        )


def _task_run_name(stage: str) -> str:
    from prefect.runtime import task_run

    iteration = task_run.parameters["iteration"]
    return f"base/{stage}" if iteration < 0 else f"it{iteration:04d}/{stage}"


def _worth_retrying(task: Any, task_run: TaskRun, state: State[Any]) -> bool:
    """Errors of the machine are retried, errors of the user are not: they would come again."""
    error = state.result(raise_on_failure=False)
    return error.retryable if isinstance(error, RlstagesError) else isinstance(error, OSError)


def stage(name: StageName) -> Callable[[Work[S]], Stage[S]]:
    """Make a work function the stage `name` of `rl_core.stages.STAGES`."""

    def wrap(work: Work[S]) -> Stage[S]:
        return Stage(STAGES[name], work)

    return wrap


def load_stage(name: str) -> Stage[Any]:
    """The stage of a name: `tasks/<name>.py` holds it under that very name."""
    found: Stage[Any] = getattr(import_module(f"tasks.{name}"), name)
    return found

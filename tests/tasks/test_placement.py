"""Stages handed to another flow run: which attempt is taken up, how each bad end is told, what is left of it.

The server is real and so is the work; the flow runs of the deployment are moved through their states by the test.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from rl_core.errors import (
    ConfigError,
    RunError,
    StageError,
    StageTimeoutError,
    WorkerError,
)
from tasks import placement
from tasks.placement import check_placement, place, runs, supersede
from tasks.placement.attempt import Attempt, attempts, perform_attempt
from tasks.stage import StageContext
from tasks.storage.files import write_json
from tasks.storage.store import RunStore

pytestmark = pytest.mark.slow
MARK = "0123456789ab" + "c" * 52


@dataclass
class Place:
    """A run whose score stage is placed in a deployment that no worker serves."""

    bench: Any
    store: RunStore
    client: Any
    name: str
    context: StageContext

    def again(self, **changes: Any) -> StageContext:
        return replace(self.context, output=self.store.begin(0, "score", MARK), **changes)

    def place(self, context: StageContext | None = None) -> dict[str, Any]:
        return place("score", context or self.again(), self.store.name, lambda done, total: None)

    def flow_runs(self) -> list[Any]:
        """The deployment's flow runs, the oldest first."""
        from prefect.client.schemas.filters import DeploymentFilter, DeploymentFilterName
        from prefect.client.schemas.sorting import FlowRunSort

        wanted = DeploymentFilter(name=DeploymentFilterName(any_=[self.name]))
        found: list[Any] = self.client.read_flow_runs(
            deployment_filter=wanted, sort=FlowRunSort.EXPECTED_START_TIME_ASC
        )
        return found

    def set_state(self, name: str) -> None:
        import prefect.states

        self.client.set_flow_run_state(self.flow_runs()[-1].id, getattr(prefect.states, name)(), force=True)

    @property
    def left(self) -> list[Attempt]:
        return attempts(self.store.iteration_dir(0) / "score")

    @contextmanager
    def executed_by(self, work: Callable[[Any], None]) -> Iterator[None]:
        """`work` is called with the flow run that appears, in a thread, as a worker would."""
        known, errors = {made.id for made in self.flow_runs()}, []

        def wait() -> None:
            while not (new := [made for made in self.flow_runs() if made.id not in known]):
                time.sleep(0.05)
            try:
                work(new[0])
            except Exception as error:
                errors.append(error)

        thread = threading.Thread(target=wait)
        thread.start()
        try:
            yield
        finally:
            thread.join(60)
        if errors:
            raise errors[0]


@pytest.fixture(scope="module")
def client(prefect_api: str) -> Iterator[Any]:
    from prefect.client.orchestration import get_client
    from prefect.settings import PREFECT_API_URL, temporary_settings

    with temporary_settings({PREFECT_API_URL: prefect_api}), get_client(sync_client=True) as made:
        yield made


@pytest.fixture
def where(
    bench: Any, client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Place:
    from prefect.client.schemas.actions import WorkPoolCreate

    name = request.node.name.replace("_", "-")[:60]
    client.create_work_pool(WorkPoolCreate(name=name, type="process"))
    flow = client.create_flow_from_name("stage")
    schema = {"type": "object", "properties": {"attempt": {"type": "string"}}}
    client.create_deployment(flow, name, work_pool_name=name, parameter_openapi_schema=schema)
    config = bench.config(execution={"threads": 1, "placement": {"score": f"deployment:stage/{name}"}})
    store = RunStore(tmp_path / "runs", config.name)
    store.create(config, bench.base, "test")
    rows = bench.trajectories([{"group": 0, "sample": sample, "data": {"answer": "1"}} for sample in (0, 1)])
    context = bench.context(config, generate=rows)
    monkeypatch.setenv("RLSTAGES_RUNS_DIR", str(tmp_path / "runs"))
    monkeypatch.setattr(placement, "POLL_SECONDS", 0.05)
    return Place(bench, store, client, name, context)


def test_the_work_is_done_elsewhere_with_the_same_bytes(where: Place) -> None:
    locally = where.bench.perform("score", replace(where.context, output=where.bench.new_folder()))

    def work(flow_run: Any) -> None:
        where.set_state("Running")
        perform_attempt(
            **{
                ("stage" if key == "from_stage" else "name" if key == "attempt" else key): value
                for key, value in flow_run.parameters.items()
            }
        )
        where.set_state("Completed")

    context = where.again()
    with where.executed_by(work):
        result = where.place(context)
    assert where.bench.ref(context.output).digest == locally.digest
    assert result["rows"] == 2 and result["metrics"] == where.bench.reply["metrics"]
    (flow_run,) = where.flow_runs()
    assert result["measured"]["placed"] == {
        "deployment": f"deployment:stage/{where.name}",
        "flow_run": str(flow_run.id),
    }
    assert where.left == []
    with pytest.raises(RunError, match="there is nothing to do for attempt"):
        perform_attempt(where.store.name, 0, "score", flow_run.parameters["attempt"])
    with pytest.raises(RunError, match="there is nothing to do for attempt"):
        perform_attempt(where.store.name, 0, "score", "../score")


def test_an_error_of_the_work_is_the_stages_error(where: Place) -> None:
    """Other code, or another number format, on the other machine is refused there and told here."""
    context = where.again(facts={**where.context.facts, "dtype": "bfloat16"})

    def work(flow_run: Any) -> None:
        with pytest.raises(ConfigError):
            perform_attempt(where.store.name, 0, "score", flow_run.parameters["attempt"])
        where.set_state("Failed")

    with where.executed_by(work), pytest.raises(ConfigError, match="would compute something else: dtype") as caught:
        where.place(context)
    assert caught.value.got == "{'dtype': 'float32'}"
    assert where.left == []


def leave(where: Place, state: str | None, reply: dict[str, Any] | None = None) -> Attempt:
    """An attempt as a caller that was killed leaves it, with a flow run in some state."""
    context = where.again()
    request = {"deployment": f"deployment:stage/{where.name}", "context": {**context.to_dict(), "output": ""}}
    attempt = Attempt.create(context.output.parent, MARK, json.loads(json.dumps(request)))
    if state is not None:
        parameters = {"attempt": attempt.folder.name}
        runs.submit(where.client, request["deployment"], parameters, str(attempt.folder))
        where.set_state(state)
    if reply is not None:
        write_json(attempt.folder / "reply.json", reply)
    return attempt


RESULT = {"rows": 0, "metrics": {}, "state": {}, "measured": {}, "files": []}


@pytest.mark.parametrize(
    ("state", "reply", "kept"),
    [
        (None, None, True),  # killed before the flow run was made
        ("Running", None, True),
        ("Completed", {"result": RESULT}, True),
        ("Crashed", {"result": RESULT}, True),  # marked by mistake: the work is there
        ("Failed", {"error": StageError("no").to_dict()}, False),
        ("Crashed", None, False),
        ("Cancelled", None, False),
    ],
)
def test_which_attempt_is_taken_up(where: Place, state: str | None, reply: Any, kept: bool) -> None:
    """One that is at work or ended well; never one that failed, never one made for another request."""
    attempt = leave(where, state, reply)
    request = attempt.request
    assert request is not None
    assert where.store.sweep() and attempt.request == request, "the sweep must not touch what may be alive"
    stage_dir = attempt.folder.parent
    assert supersede(stage_dir, request) == (attempt if kept else None)
    assert where.left == ([attempt] if kept else [])
    if kept:
        assert supersede(stage_dir, {**request, "deployment": "deployment:stage/other"}) is None
        assert where.left == [] and all(made.state.is_final() for made in where.flow_runs())


def test_a_caller_that_comes_back_attaches(where: Place) -> None:
    leave(where, "Running")
    thread = threading.Timer(
        0.5, lambda: (write_json(where.left[0].folder / "reply.json", {"result": RESULT}), where.set_state("Completed"))
    )
    thread.start()
    assert where.place()["rows"] == 0
    assert len(where.flow_runs()) == 1 and where.left == []


@pytest.mark.parametrize(
    ("state", "kind", "message"),
    [("Crashed", WorkerError, "ended before it answered"), ("Cancelled", RunError, "was cancelled")],
)
def test_a_flow_run_that_ends_without_a_reply(where: Place, state: str, kind: type[Exception], message: str) -> None:
    with where.executed_by(lambda _: where.set_state(state)), pytest.raises(kind, match=message):
        where.place()
    assert where.left == []
    with where.executed_by(lambda _: where.set_state("Cancelled")), pytest.raises(RunError):
        where.place()
    assert len({made.idempotency_key for made in where.flow_runs()}) == 2


def test_without_a_worker_the_stage_says_how_to_start_one(where: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "UNPOLLED_SECONDS", 0.3)
    with pytest.raises(StageError, match="no worker takes the flow runs") as caught:
        where.place()
    assert caught.value.todo.endswith(f"prefect worker start --pool {where.name} --work-queue default")
    assert [made.state.name for made in where.flow_runs()] == ["Cancelled"] and where.left == []


@pytest.mark.parametrize(("limit", "silent"), [(0.2, 60.0), (None, 0.4)])
def test_past_its_limit_or_silent_it_is_given_up(
    where: Place, monkeypatch: pytest.MonkeyPatch, limit: float | None, silent: float
) -> None:
    """Its flow run is cancelled, or, when nobody answers that, marked as crashed: none is left running."""
    monkeypatch.setattr(placement, "SILENT_SECONDS", silent)
    monkeypatch.setattr(placement, "TIMEOUT_SLACK_SECONDS", 0.2)
    monkeypatch.setattr(runs, "CANCEL_SECONDS", 0.5)
    changes = {"timeout_seconds": {"score": limit}} if limit else {}
    execution = where.context.config.execution.model_copy(update=changes)
    context = where.again(config=where.context.config.model_copy(update={"execution": execution}))
    error = StageTimeoutError if limit else WorkerError
    with where.executed_by(lambda _: where.set_state("Running")), pytest.raises(error):
        where.place(context)
    assert [made.state.name for made in where.flow_runs()] == ["Crashed"] and where.left == []


def test_an_interrupted_caller_cancels_the_work(where: Place) -> None:
    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    def work(_: Any) -> None:
        write_json(where.left[0].folder / "progress.json", {"beat": 1, "done": 1, "total": 2})

    with where.executed_by(work), pytest.raises(KeyboardInterrupt):
        place("score", where.again(), where.store.name, interrupt)
    assert [made.state.name for made in where.flow_runs()] == ["Cancelled"] and where.left == []


def test_what_cannot_be_placed_is_refused_at_the_start(where: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    from prefect.settings import PREFECT_API_URL, temporary_settings

    def config(**placed: str) -> Any:
        return where.bench.config(execution={"placement": placed})

    check_placement(config(score=f"deployment:stage/{where.name}"))
    with pytest.raises(ConfigError, match="there is no deployment 'stage/nowhere'"):
        check_placement(config(score="deployment:stage/nowhere"))
    flow = where.client.create_flow_from_name("other")
    where.client.create_deployment(flow, where.name)
    with pytest.raises(ConfigError, match="cannot take a stage"):
        check_placement(config(score=f"deployment:other/{where.name}"))
    with temporary_settings({PREFECT_API_URL: None}):
        check_placement(config())
        with pytest.raises(ConfigError, match="needs a Prefect server"):
            check_placement(config(score=f"deployment:stage/{where.name}"))
    with pytest.raises(ConfigError, match=r"register runs beside the run's tracker"):
        config(register=f"deployment:stage/{where.name}")

"""An open run with a real worker: reuse, kills, time limits, and what reaches MLflow. No Prefect."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rl_core.errors import StageTimeoutError, WorkerError
from rl_core.manifest import Ref, content_digest
from rl_core.recipes import build_config
from tasks.iterations import Position
from tasks.provenance import code_version
from tasks.session import Session, open_session
from tasks.stage import Mode, StageResult, load_stage
from tasks.storage.files import describe, read_json
from tasks.storage.store import RunStore
from tasks.worker import Worker

# MLflow 3.17 sets up its own tables with a loader option that SQLAlchemy 2.1 has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy")

STAGES = ["generate", "score", "advantage", "train"]
LIMIT = 5.0
REWARDS = """
import os, pathlib, time
HERE = pathlib.Path(__file__).parent

def reward(completions):
    if (HERE / "kill the worker").exists():
        (HERE / "kill the worker").unlink()
        os.kill(os.getppid(), 9)
        time.sleep(60)
    if (HERE / "hang").exists():
        (HERE / "hang").write_text(str(os.getpid()))
        time.sleep(60)
    return [float(sum(map(ord, text)) % 5) for text in completions]
"""


class Place:
    """A folder with runs, an MLflow store, and a reward that can be told to misbehave."""

    def __init__(self, folder: Path, model: Path, template: Path) -> None:
        self.folder, self.runs = folder, folder / "runs"
        shutil.copy(template, folder / "mlflow.db")
        self.uri = f"sqlite:///{folder / 'mlflow.db'}"
        self.model = Ref(path=str(model), digest=content_digest(describe(model)))
        self.worker = Worker(folder / "logs", threads=1)

    @contextmanager
    def opened(self, name: str) -> Iterator[Session]:
        """A session that shares the one worker, so that not every test waits for a cold start."""
        with open_session(name, self.runs) as session:
            own, session.worker = session.worker, self.worker
            try:
                yield session
            finally:
                session.worker = own

    def create(self, name: str, **changes: Any) -> RunStore:
        data: dict[str, Any] = {
            "name": name,
            "iterations": 3,
            "model": {"source": self.model.path},
            "environment": {"kind": "reasoning_gym", "params": {"dataset": "chain_sum"}},
            "generate": {"prompts_per_iteration": 2, "group_size": 4, "max_completion_tokens": 6},
            "rewards": [{"function": "session_rewards:reward"}],
            "learner": {"lr": 1e-3},
            "evaluate": {"every": 3},
            "execution": {"threads": 1, "reward_processes": 1},
        }
        store = RunStore(self.runs, name)
        store.create(build_config(data | changes, name), self.model, "test")
        return store


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, mlflow_template: Path) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("place")
    (folder / "session_rewards.py").write_text(REWARDS)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        made = Place(folder, tiny_model, mlflow_template)
        patch.setenv("MLFLOW_TRACKING_URI", made.uri)
        patch.chdir(folder)
        yield made
        made.worker.close()
    sys.modules.pop("session_rewards", None)


class Steps:
    """The stages of one iteration, one after the other."""

    def __init__(self, session: Session, at: Position) -> None:
        self.session, self.at = session, at
        self.refs: dict[str, Ref] = {"policy": at.policy}
        session.iterations.begin(at)

    def run(self, name: str, mode: Mode = "reuse") -> StageResult:
        stage = load_stage(name)
        inputs = {read: self.refs[read] for read in stage.spec.reads}
        result = self.session.run_stage(stage, self.at.iteration, inputs, mode)
        self.refs[name] = result.ref
        return result

    def run_all(self) -> list[StageResult]:
        results = [self.run(name) for name in STAGES]
        self.session.end_iteration(self.at.iteration)
        return results


@pytest.fixture(scope="module")
def quiet(place: Place) -> Iterator[tuple[Session, list[StageResult]]]:
    """Iteration 0 of a run that nobody disturbs; the session stays open."""
    place.create("quiet")
    with place.opened("quiet") as session:
        yield session, Steps(session, session.iterations.resume_position()).run_all()


def stamps(store: RunStore) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in store.path.glob("iterations/*/*/*/**/*") if path.is_file()}


def ended(pid: str) -> bool:
    try:
        return Path("/proc", pid, "stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def partials(store: RunStore) -> list[Path]:
    return list(store.path.rglob("*.partial-*"))


@pytest.mark.slow
def test_what_is_there_is_reused_and_what_is_equal_stays(quiet: Any) -> None:
    """Executed on demand, an equal output leaves the old folder as it is; MLflow has each value once."""
    session, results = quiet
    assert [(result.reused, result.rows) for result in results[:3]] == [(False, 8)] * 3
    before, record = stamps(session.store), session.store.iteration(0)
    spent = session.worker_seconds
    again = Steps(session, Position(0, session.base_model, 0))
    found = [again.run(name) for name in STAGES]
    session.end_iteration(0)
    assert all(result.reused for result in found) and session.worker_seconds == spent
    assert [r.model_copy(update={"reused": False, "seconds": 0.0}) for r in found] == [
        r.model_copy(update={"seconds": 0.0}) for r in results
    ]
    for name in ("generate", "score", "train"):
        assert again.run(name, "execute").reused
    assert session.worker_seconds > spent
    session.end_iteration(0)
    assert (stamps(session.store), session.store.iteration(0), partials(session.store)) == (before, record, [])

    client, run = session.tracker.client, session.tracker.run_id
    logged = {name: client.get_metric_history(run, name) for name in client.get_run(run).data.metrics}
    assert {name: [m.step for m in values] for name, values in logged.items()} == {name: [0] for name in logged}
    wanted = {name: value for r in results for name, value in r.metrics.items() if value is not None}
    times = {f"time/{stage}_seconds" for stage in STAGES}
    assert {name: values[0].value for name, values in logged.items() if name not in times} == wanted
    assert times <= logged.keys()
    (dataset,) = client.get_run(run).inputs.dataset_inputs
    assert results[0].digest.startswith(dataset.dataset.digest)


@pytest.mark.slow
def test_the_manifest_says_what_from_what_by_what(quiet: Any) -> None:
    session, results = quiet
    manifest = read_json(session.store.path / results[3].folder / "manifest.json")
    assert manifest["run"] == "quiet" and manifest["stage"] == "train" and manifest["seed_key"] == [0, 0]
    assert {name: ref["digest"] for name, ref in manifest["inputs"].items()} == {
        "policy": session.base_model.digest,
        "generate": results[0].digest,
        "advantage": results[2].digest,
    }
    assert manifest["digest"] == results[3].digest and manifest["code_version"] == code_version()
    assert manifest["measured"]["threads"] == 1 and manifest["measured"]["execution"]["reward_processes"] == 1
    assert manifest["measured"]["pid"] == session.worker._child.pid
    assert "execution" not in manifest["identity"]
    made = session.store.iteration(0)
    assert made["complete"] and list(made["stages"]) == sorted(STAGES)
    position = session.iterations.resume_position()
    assert position == Position(1, results[3].ref, results[0].state["cursor"])
    assert session.facts(session.config, 0)["reference"] == session.base_model.digest


@pytest.mark.slow
def test_a_worker_that_is_killed_costs_its_stage(place: Place, quiet: Any) -> None:
    """C62: SIGKILL in the middle of a stage: nothing half-done stays, a new worker ends with the same bytes."""
    store = place.create("killed")
    with place.opened("killed") as session:
        steps = Steps(session, session.iterations.resume_position())
        steps.run("generate")
        first = session.worker._child
        (place.folder / "kill the worker").touch()
        with pytest.raises(WorkerError, match="ended before it answered") as caught:
            steps.run("score")
        assert caught.value.got == "signal 9"
        assert partials(store) == [] and not any((store.iteration_dir(0) / "score").iterdir())
        assert list((store.iteration(0) or {})["stages"]) == ["generate"]
        results = steps.run_all()
        assert session.worker._child is not first
    assert [result.reused for result in results] == [True, False, False, False]
    assert [result.digest for result in results] == [result.digest for result in quiet[1]]
    assert [result.fingerprint for result in results] == [result.fingerprint for result in quiet[1]]


def test_a_signal_while_the_folder_is_made_leaves_nothing(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C comes when the attempt's folder is there and its work has not begun."""
    store = place.create("early")
    begin = RunStore.begin

    def interrupted(*args: Any) -> Any:
        assert begin(*args).is_dir()
        raise KeyboardInterrupt

    with place.opened("early") as session:
        monkeypatch.setattr(RunStore, "begin", interrupted)
        with pytest.raises(KeyboardInterrupt):
            Steps(session, session.iterations.resume_position()).run("generate")
        assert partials(store) == []


@pytest.mark.slow
def test_a_stage_past_its_limit_is_stopped(place: Place, quiet: Any) -> None:
    """The work itself ends, with its reward process; nothing is published; the next request finds a new worker."""
    store = place.create("limited", execution={"threads": 1, "timeout_seconds": {"score": LIMIT}})
    hang = place.folder / "hang"
    with place.opened("limited") as session:
        steps = Steps(session, session.iterations.resume_position())
        steps.run("generate")
        hang.touch()
        started = time.monotonic()
        with pytest.raises(StageTimeoutError, match=f"no answer within {LIMIT:g} s"):
            steps.run("score")
        assert LIMIT <= time.monotonic() - started < LIMIT + 5
        assert ended(hang.read_text()), "the hanging reward lives on"
        hang.unlink()
        assert partials(store) == [] and not any((store.iteration_dir(0) / "score").iterdir())
        session.iterations.begin(steps.at, ["execution.timeout_seconds.score=300"])  # which includes a cold start
        assert steps.run("score").digest == quiet[1][1].digest


@pytest.mark.slow
@pytest.mark.parametrize(("error", "status"), [(KeyboardInterrupt, "KILLED"), (KeyError, "FAILED")])
def test_a_session_that_ends_early_says_how_in_mlflow(
    place: Place, quiet: Any, error: type[BaseException], status: str
) -> None:
    place.create(status.lower())
    with pytest.raises(error), place.opened(status.lower()) as session:
        tracker = session.tracker
        assert tracker.client.get_run(tracker.run_id).info.status == "RUNNING"
        raise error
    assert tracker.client.get_run(tracker.run_id).info.status == status
    assert tracker.client.get_run(quiet[0].tracker.run_id).info.status == "RUNNING"

"""C85: what changes on a resume or a rerun is said in MLflow beside what was; MLflow runs that a crash left RUNNING."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from rl_core.config import RunConfig
from rl_core.manifest import Ref
from rl_core.recipes import apply_overrides, build_config, config_json
from tasks import settings
from tasks.storage.store import RunStore
from tasks.tracking import tracker as tracker_module
from tasks.tracking.mlflow_client import MAX_TAG_CHARACTERS, safe_key
from tasks.tracking.tracker import Tracker, close_abandoned, open_tracker

# MLflow 3.17 sets up its own tables with a loader option that SQLAlchemy 2.1 has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy")

CONFIG = RunConfig.model_validate(
    {
        "name": "run",
        "iterations": 3,
        "model": {"source": "tiny-random"},
        "environment": {"kind": "reasoning_gym"},
        "rewards": [{"function": "last_integer"}],
    }
)


@pytest.fixture
def store(tmp_path: Path, mlflow_template: Path, monkeypatch: pytest.MonkeyPatch) -> RunStore:
    monkeypatch.setattr(tracker_module, "_RETRY_DELAYS", (0.0,))
    shutil.copy(mlflow_template, tmp_path / "mlflow.db")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    made = RunStore(tmp_path / "runs", "run")
    made.create(CONFIG, Ref(path="base", digest="base"), "test")
    return made


def opened(store: RunStore, *overrides: str) -> Tracker:
    return open_tracker(store, build_config(apply_overrides(config_json(CONFIG), [*overrides]), "test"))


def data(tracker: Tracker) -> Any:
    return tracker.client.get_run(tracker.run_id).data


def changed(tracker: Tracker) -> dict[str, str]:
    return {k.removeprefix("rlstages.changed."): v for k, v in data(tracker).tags.items() if ".changed." in k}


def test_a_changed_value_becomes_a_tag_and_its_parameter_stays(store: RunStore) -> None:
    """Hardware settings and iterations change on a resume, and change back; a table of settings gets an item."""
    first = opened(store)
    assert changed(first) == {} and data(first).params["iterations"] == "3"
    params = data(first).params
    second = opened(store, "iterations=5", "execution.generate_rows=8", "execution.retries.train=4")
    assert second.run_id == first.run_id
    assert changed(second) == {"iterations": "5", "execution.generate_rows": "8", "execution.retries": "not set"}
    assert data(second).params == params | {"execution.retries.train": "4"}
    third = opened(store, "iterations=5")
    now = {"execution.generate_rows": "512", "execution.retries": "{}", "execution.retries.train": "not set"}
    assert changed(third) == {"iterations": "5"} | now
    assert data(third).params == data(second).params


def test_many_values_change_at_once(store: RunStore) -> None:
    """MLflow takes 100 tags and 100 parameters in one call."""
    environment = {"many": {f"key@{number}": number for number in range(150)}}
    other = {"many": {f"key@{number}": -number for number in range(150)} | {f"new{n}": n for n in range(150)}}
    Tracker(settings.tracking_uri(), "e", "r", store.path / "l.jsonl", environment).finish("FINISHED")
    tracker = Tracker(settings.tracking_uri(), "e", "r", store.path / "l.jsonl", other)
    assert len(changed(tracker)) == 149 and len(data(tracker).params) == 300
    key = safe_key("rlstages.changed." + safe_key("many.key@7"))
    assert data(tracker).tags[key] == "-7"


def test_a_score_that_was_rerun_is_the_one_value_of_its_step(store: RunStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the clock says: of two values at a step the newer one has the newer time; the run's value is the last
    iteration's, and no step is lower than the one before it in the series that is shown."""
    tracker = opened(store)
    clock = iter(range(9_000_000_000, 0, -1_000_000_000))  # it goes backwards by a second from call to call
    monkeypatch.setattr("tasks.tracking.tracker.time.time_ns", lambda: next(clock))
    for k in range(3):
        tracker.log_stage("score", k, {"reward/mean": float(k)}, f"{k}")
    tracker.log_stage("score", 1, {"reward/mean": 0.5}, "again")
    tracker.log_stage("score", 1, {"reward/mean": 1.0}, "and back")
    series = sorted(
        tracker.client.get_metric_history(tracker.run_id, "reward/mean"), key=lambda m: (m.step, m.timestamp)
    )
    assert [(m.step, m.value) for m in series] == [(0, 0.0), (1, 1.0), (1, 0.5), (1, 1.0), (2, 2.0)]
    assert len({(m.step, m.timestamp) for m in series}) == 5
    current = {m.step: m.value for m in series}
    assert current == {0: 0.0, 1: 1.0, 2: 2.0}
    assert data(tracker).metrics == {"reward/mean": 2.0}


def test_tags_are_set_once_for_each_value_and_outlive_an_outage(store: RunStore) -> None:
    away = Tracker("http://127.0.0.1:9", "rlstages", "run", store.path / "tracking.jsonl", {})
    away.set_tag("rlstages.adjustment.0001", "from iteration 1")
    tracker = opened(store)
    assert tracker.has_tag("rlstages.adjustment.0001") and not tracker.has_tag("rlstages.adjustment.0002")
    tracker.set_tag("rlstages.adjustment.0002", "x" * 9000)
    lines = (store.path / "tracking.jsonl").read_text().splitlines(keepends=True)
    again = opened(store)
    again.set_tag("rlstages.adjustment.0001", "from iteration 1")
    again.set_tag("rlstages.adjustment.0002", "x" * 9000)
    assert (store.path / "tracking.jsonl").read_text().splitlines(keepends=True) == lines
    tags = data(again).tags
    assert tags["rlstages.adjustment.0001"] == "from iteration 1"
    assert tags["rlstages.adjustment.0002"] == "x" * MAX_TAG_CHARACTERS
    (store.path / "tracking.jsonl").write_text("".join(lines[:-1]))  # killed after it was sent
    again = opened(store)
    again.set_tag("rlstages.adjustment.0001", "from iteration 2")
    assert data(again).tags["rlstages.adjustment.0001"] == "from iteration 2"
    assert again._ledger.pending(again.run_id) == []


def test_a_fork_names_its_parent(store: RunStore) -> None:
    record = store.record() | {"parent": {"run": "parent", "iteration": 4, "stage": "score"}}
    tags = data(open_tracker_of(store, record)).tags
    assert [tags[f"rlstages.parent_{key}"] for key in ("run", "iteration", "stage")] == ["parent", "4", "score"]


def open_tracker_of(store: RunStore, record: dict[str, Any]) -> Tracker:
    from tasks.storage.files import write_json

    write_json(store.path / "run.json", record)
    return open_tracker(store, CONFIG)


def test_a_run_that_a_crash_left_running_is_closed_and_can_go_on(store: RunStore) -> None:
    assert close_abandoned(store) is None and not (store.path / "tracking.jsonl").exists()
    tracker = opened(store)
    tracker.log_stage("score", 0, {"a": 1.0}, "a")
    with store.lock():
        assert close_abandoned(store) is None, "somebody works on it"
    assert tracker.client.get_run(tracker.run_id).info.status == "RUNNING"
    lines = (store.path / "tracking.jsonl").read_text().splitlines(keepends=True)
    unnamed = [line for line in lines if '"mlflow_run"' not in line]  # killed before the run's id was written down
    (store.path / "tracking.jsonl").write_text("".join(unnamed))
    assert close_abandoned(store) == tracker.run_id
    assert tracker.client.get_run(tracker.run_id).info.status == "KILLED"
    assert close_abandoned(store) is None
    (store.path / "tracking.jsonl").write_text("".join(lines))
    again = opened(store)
    again.log_stage("score", 1, {"a": 2.0}, "b")
    assert again.run_id == tracker.run_id
    assert again.client.get_run(again.run_id).info.status == "RUNNING"
    again.finish("FINISHED")
    assert close_abandoned(store) is None
    assert again.client.get_run(again.run_id).info.status == "FINISHED"

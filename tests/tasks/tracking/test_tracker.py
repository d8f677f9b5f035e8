from __future__ import annotations

import json
import logging
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import tasks.tracking.tracker
from rl_core.errors import StageError
from tasks.tracking.ledger import Ledger
from tasks.tracking.mlflow_client import MAX_PARAM_CHARACTERS, open_client, safe_key, short_param
from tasks.tracking.mlflow_run import flatten
from tasks.tracking.tracker import Tracker

# MLflow 3.17 sets up its own tables with a loader option that SQLAlchemy 2.1 has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy")

ODD = "acc@k [%]"


@pytest.fixture
def folder(tmp_path: Path, mlflow_template: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tasks.tracking.tracker, "_RETRY_DELAYS", (0.0,))
    place = tmp_path / "my runs 50%"
    place.mkdir()
    shutil.copy(mlflow_template, place / "mlflow.db")
    return place


def open_here(folder: Path, config: dict[str, Any] | None = None, uri: str = "") -> Tracker:
    uri = uri or f"sqlite:///{folder}/mlflow.db"
    return Tracker(uri, "rlstages", "quickstart", folder / "run" / "tracking.jsonl", config or {"seed": 1})


def history(tracker: Tracker, name: str) -> list[tuple[int, float]]:
    return sorted((m.step, m.value) for m in tracker.client.get_metric_history(tracker.run_id, safe_key(name)))


def test_one_run_and_one_value_per_published_stage(folder: Path) -> None:
    tracker = open_here(folder)
    tracker.log_stage("score", 0, {"reward/mean": 0.25, "reward/std": None, "bad": float("nan")}, "a")
    tracker.log_stage("score", 0, {"reward/mean": 0.25}, "a")
    tracker.log_stage("score", 0, {"reward/mean": 0.25}, "a later execution with the same metrics")
    tracker.log_stage("evaluate", -1, {"eval/greedy_accuracy": 0.5}, "b")
    tracker.finish("FINISHED")
    run = tracker.client.get_run(tracker.run_id)
    assert run.data.metrics == {"reward/mean": 0.25, "eval/greedy_accuracy": 0.5}
    assert run.info.status == "FINISHED"
    assert tracker.run_url().endswith(f"/#/experiments/{run.info.experiment_id}/runs/{run.info.run_id}")

    again = open_here(folder)
    again.log_stage("score", 0, {"reward/mean": 0.25}, "a")
    again.log_stage("score", 1, {"reward/mean": 0.5}, "c")
    again.log_stage("score", 1, {"reward/mean": 0.75}, "c after a rerun with another reward")
    assert again.run_id == run.info.run_id
    assert history(again, "reward/mean") == [(0, 0.25), (1, 0.5), (1, 0.75)]
    assert history(again, "eval/greedy_accuracy") == [(-1, 0.5)]
    assert again.client.get_run(again.run_id).info.status == "RUNNING"
    again.finish("FAILED")
    assert again.client.get_run(again.run_id).info.status == "FAILED"


def test_a_crash_anywhere_around_sending_logs_once(folder: Path) -> None:
    """Killed before, in the middle of or after the call: the entry is sent again and stored once."""
    tracker = open_here(folder)
    tracker.log_stage("score", 0, {"reward/mean": 0.25, ODD: 1.0}, "a")
    ledger = tracker._ledger.path
    lines = ledger.read_text().splitlines(keepends=True)
    assert json.loads(lines[-1])["kind"] == "sent"
    for kept in (lines[:-1], lines[:-2], [*lines[:-1], lines[-1][:9]]):
        ledger.write_text("".join(kept))
        resumed = open_here(folder)
        resumed.log_stage("score", 0, {"reward/mean": 0.25, ODD: 1.0}, "a")
        assert resumed.run_id == tracker.run_id
        assert history(resumed, "reward/mean") == [(0, 0.25)]
        assert resumed._ledger.pending(resumed.run_id) == []
    assert len(resumed.client.search_runs(["1"])) == 1


def test_a_ledger_that_ends_in_half_a_line_is_cut_back(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl")
    ledger.add({"kind": "metrics", "metrics": {"a": 1.0}})
    with ledger.path.open("a") as file:
        file.write('{"kind": "metr')
    again = Ledger(ledger.path)
    again.add({"kind": "metrics", "metrics": {"a": 2.0}})
    assert [e["metrics"]["a"] for e in Ledger(ledger.path).pending(None)] == [1.0, 2.0]


def test_a_run_whose_id_was_not_written_down_is_found_by_its_tag(folder: Path) -> None:
    tracker = open_here(folder)
    run_id = tracker.run_id
    lines = [line for line in tracker._ledger.path.read_text().splitlines(keepends=True) if "mlflow_run" not in line]
    tracker._ledger.path.write_text("".join(lines))
    assert open_here(folder).run_id == run_id


def test_long_values_many_parameters_and_odd_names(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """C82: 7,000 characters, 150 parameters, `acc@k [%]`: shortened with a note, whole in config.json."""
    config = {"source": "x" * 7000, ODD: {"p%q": [1, None, {}]}, "many": {f"k{i}": i for i in range(150)}}
    with caplog.at_level(logging.WARNING):
        tracker = open_here(folder, config)
        tracker.log_stage("score", 0, {ODD: 0.5, "acc_k ___": 0.25, "../up": 1.0, "x" * 300: 2.0}, "a")
    params = tracker.client.get_run(tracker.run_id).data.params
    assert len(params) == 154
    assert params["many.k149"] == "149"
    assert len(params["source"]) == MAX_PARAM_CHARACTERS
    assert params["source"].endswith("[cut: 7000 characters, whole in config.json]")
    assert "parameter source is longer" in caplog.text
    whole = Path(tracker.client.download_artifacts(tracker.run_id, "config.json"))
    assert json.loads(whole.read_text()) == config  # through a folder name with a space and a percent sign
    assert history(tracker, ODD) == [(0, 0.5)]
    assert history(tracker, "acc_k ___") == [(0, 0.25)]
    assert len(tracker.client.get_run(tracker.run_id).data.metrics) == 4
    assert not [e for e in tracker._ledger.entries if e["kind"] == "refused"]


def test_a_changed_config_on_resume(folder: Path) -> None:
    open_here(folder, {"iterations": 10, "seed": 1}).log_stage("score", 0, {"a": 1.0}, "a")
    tracker = open_here(folder, {"iterations": 20, "seed": 1, "new": "x"})
    assert tracker.client.get_run(tracker.run_id).data.params == {"iterations": "10", "seed": "1", "new": "x"}
    whole = Path(tracker.client.download_artifacts(tracker.run_id, "config.json"))
    assert json.loads(whole.read_text())["iterations"] == 20


def test_names_stay_apart_and_good_ones_stay_as_they_are() -> None:
    assert safe_key("reward/mean_2.x-y z") == "reward/mean_2.x-y z"
    odd = ["a@b", "a%b", "a_b", "/a_b", "a_b/", "a//b", "a/b", "./a_b", "..", ".", "", "x" * 251, "x" * 252]
    assert len({safe_key(name) for name in odd}) == len(odd)
    assert all(len(safe_key(name)) <= 250 for name in odd)
    assert short_param("x" * MAX_PARAM_CHARACTERS) == "x" * MAX_PARAM_CHARACTERS
    nested = {"a": {"b": [1, {"c": None}], "d": {}, "e": []}, "f": "text", "g": True}
    expected = {"a.b.0": "1", "a.b.1.c": "null", "a.d": "{}", "a.e": "[]", "f": "text", "g": "true"}
    assert flatten(nested) == expected


def test_an_outage_loses_nothing(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """C82: nothing listens at the address; the run goes on, and everything arrives with the next tracker that works."""
    away = open_here(folder, uri="http://127.0.0.1:9")
    with caplog.at_level(logging.WARNING):
        away.log_stage("score", 0, {"reward/mean": 0.25}, "a")
        away.log_stage("score", 1, {"reward/mean": 0.5}, "b")
        away.log_dataset("trajectories-0001", folder / "x", "d" * 64, 64)
        away.finish("FAILED")
    assert "cannot be used and gets its data later" in caplog.text
    assert "3 entries did not reach MLflow" in caplog.text
    assert away.run_url() == "http://127.0.0.1:9"
    with pytest.raises(StageError, match=r"MLflow at http://127.0.0.1:9 cannot be used"):
        _ = away.run_id
    back = open_here(folder)
    back.log_stage("score", 2, {"reward/mean": 0.75}, "c")
    assert history(back, "reward/mean") == [(0, 0.25), (1, 0.5), (2, 0.75)]
    assert len(back.client.get_run(back.run_id).inputs.dataset_inputs) == 1


def test_a_new_store_gets_the_whole_history(folder: Path, mlflow_template: Path) -> None:
    first = open_here(folder)
    first.log_stage("score", 0, {"reward/mean": 0.25}, "a")
    shutil.copy(mlflow_template, folder / "other.db")
    other = open_here(folder, uri=f"sqlite:///{folder}/other.db")
    other.log_stage("score", 1, {"reward/mean": 0.5}, "b")
    assert other.run_id != first.run_id
    assert history(other, "reward/mean") == [(0, 0.25), (1, 0.5)]
    other.client.delete_run(other.run_id)
    replaced = open_here(folder, uri=f"sqlite:///{folder}/other.db")
    assert replaced.run_id != other.run_id
    replaced.log_stage("score", 1, {"reward/mean": 0.5}, "b")
    assert history(replaced, "reward/mean") == [(0, 0.25), (1, 0.5)]


def test_dataset_links_are_logged_once_and_read_no_rows(folder: Path) -> None:
    tracker = open_here(folder)
    for _ in range(2):
        tracker.log_dataset("trajectories-0003", folder / "not there", "0123456789abcdef" * 4, 64)
    inputs = tracker.client.get_run(tracker.run_id).inputs.dataset_inputs
    assert [(i.dataset.name, i.dataset.digest, i.dataset.profile) for i in inputs] == [
        ("trajectories-0003", ("0123456789abcdef" * 4)[:36], '{"num_rows": 64}')
    ]
    assert json.loads(inputs[0].dataset.source) == {"uri": str(folder / "not there")}


@pytest.mark.slow
def test_four_processes_share_a_fresh_store(tmp_path: Path) -> None:
    """Four processes that migrate one fresh SQLite file at once break each other without a lock."""
    code = (
        "import sys; from pathlib import Path; from tasks.tracking.tracker import Tracker\n"
        "folder = Path(sys.argv[1])\n"
        "uri = f'sqlite:///{folder}/mlflow.db'\n"
        "tracker = Tracker(uri, 'rlstages', 'r', folder / sys.argv[2] / 'tracking.jsonl', {})\n"
        "print(tracker.run_id)"
    )
    children = [
        subprocess.Popen([sys.executable, "-c", code, str(tmp_path), str(i)], stdout=subprocess.PIPE, text=True)
        for i in range(4)
    ]
    outputs = [child.communicate()[0].strip() for child in children]
    assert [child.returncode for child in children] == [0, 0, 0, 0]
    assert len(set(outputs)) == 4
    client = open_client(f"sqlite:///{tmp_path}/mlflow.db")
    experiment = client.get_experiment_by_name("rlstages")
    assert experiment is not None
    assert len(client.search_runs([experiment.experiment_id])) == 4

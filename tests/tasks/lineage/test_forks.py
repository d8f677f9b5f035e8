"""Forks: what a child reads from its parent, what it never touches there, and when a parent may go."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rl_core.errors import ConfigError, RunError
from rl_core.execution import StageName
from rl_core.manifest import Ref, content_digest
from rl_core.parent import Parent
from rl_core.stages import STAGES
from tasks.iterations import Iterations, Position
from tasks.lineage.deletion import check_deletable, delete
from tasks.lineage.forks import fork
from tasks.lineage.references import describe_lineage
from tasks.live.adjustment_log import Adjustment, AdjustmentLog
from tasks.storage.files import describe
from tasks.storage.store import RunStore
from tasks.tracking.mlflow_client import open_client

# MLflow 3.17 sets up its own tables with a loader option that SQLAlchemy 2.1 has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy")

ORDER: list[StageName] = list(STAGES)


@pytest.fixture
def parent(run_folder: Any, plain_config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A run with three of five iterations complete, the fourth begun up to advantage, and its base evaluation."""
    monkeypatch.setenv("RLSTAGES_RUNS_DIR", str(tmp_path / "runs"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    run = run_folder(plain_config(name="parent", iterations=5))
    at = Position(0, run.store.base_model(), 0)
    run.publish(-1, "evaluate", "base", {"train": at.policy})
    for k in range(3):
        at = run.complete(at, 2 * k + 2)
    run.iterations.begin(at)
    refs = {"policy": at.policy}
    for stage in ORDER[:3]:
        inputs = {name: refs[name] for name in STAGES[stage].reads}
        state = {"cursor": 8} if stage == "generate" else {}
        refs[stage] = run.publish(3, stage, f"{stage} 3", inputs, state=state)
    run.at = at
    (run.store.path / "lock").touch()
    return run


def store_of(parent: Any, name: str) -> RunStore:
    return RunStore(parent.store.path.parent, name)


def iterations_of(store: RunStore) -> Iterations:
    return Iterations(store, store.config(), store.base_model())


def stamps(store: RunStore) -> dict[Path, tuple[int, int, int]]:
    found = {path: path.stat() for path in [store.path, *store.path.rglob("*")] if path.name != "lock"}
    return {path: (stat.st_ino, stat.st_mtime_ns, stat.st_size) for path, stat in found.items()}


def outputs(store: RunStore) -> dict[tuple[int, StageName], str]:
    """Fingerprint by iteration and stage of everything a run has made, read from the names on disk."""
    found = {}
    for path in store.path.glob("iterations/*/*/*/manifest.json"):
        manifest = json.loads(path.read_text())
        found[manifest["iteration"], manifest["stage"]] = manifest["fingerprint"]
    return found


def test_a_fork_names_its_parents_outputs_and_copies_nothing(parent: Any) -> None:
    before = stamps(parent.store)
    fork("parent", "child", 2, "train", [])
    child = store_of(parent, "child")
    files = sorted(path.relative_to(child.path).as_posix() for path in child.path.rglob("*") if path.is_file())
    assert files == [*(f"iterations/000{k}/iteration.json" for k in range(3)), "run.json"]
    assert stamps(parent.store) == before
    for k in range(3):
        mine, theirs = child.iteration(k), parent.store.iteration(k)
        assert mine is not None
        taken = ORDER if k < 2 else ORDER[:3]
        assert set(mine["stages"]) == set(taken) and mine["complete"] == (k < 2)
        for stage in taken:
            folder = child.folder(mine["stages"][stage]["folder"])
            assert folder == parent.store.path / theirs["stages"][stage]["folder"] and folder.is_dir()
            assert mine["stages"][stage]["folder"].startswith("../parent/iterations/")
            assert mine["stages"][stage]["digest"] == theirs["stages"][stage]["digest"]
    made = parent.store.iteration(1)["stages"]["train"]
    position = iterations_of(child).resume_position()
    assert position == Position(2, Ref(path=f"../parent/{made['folder']}", digest=made["digest"]), 4)
    assert child.resolve(position.policy) == parent.store.path / made["folder"]
    assert child.parent() == Parent(run="parent", iteration=2, stage="train")
    assert describe_lineage(child) == ["fork of parent at iteration 2, train"]
    assert describe_lineage(parent.store) == ["forks: child at 2/train"]
    child.create(child.config(), child.base_model(), "another version")
    assert str(child.parent()) == "parent@2/train", "a change of the config keeps the parent"


@pytest.mark.parametrize(("iteration", "stage"), [(0, "generate"), (1, "score"), (2, "register"), (3, "train")])
def test_exactly_what_lies_before_the_fork_point_is_found(parent: Any, iteration: int, stage: StageName) -> None:
    """Every output of the parent is asked for by its fingerprint, also through a fork of the fork."""
    made = outputs(parent.store)
    assert len(made) == 1 + 3 * 6 + 3
    fork("parent", "child", iteration, stage, [])
    wanted = {key for key in made if (key[0], ORDER.index(key[1])) < (iteration, ORDER.index(stage))}
    child, before = store_of(parent, "child"), stamps(parent.store)
    found = {key: child.find(*key, fingerprint) for key, fingerprint in made.items()}
    assert {key for key, hit in found.items() if hit} == wanted
    for key in wanted:
        assert found[key] == parent.store.find(*key, made[key])
    assert stamps(parent.store) == before
    # The grandchild leaves at iteration 0: it sees what is before that in both.
    fork("child", "grandchild", 0, "generate", [])
    grandchild = store_of(parent, "grandchild")
    assert {key for key, mark in made.items() if grandchild.find(*key, mark)} == {(-1, "evaluate")}
    assert len(grandchild.outputs(-1, "evaluate")) == 1


def test_an_own_output_goes_before_the_parents_and_an_equal_one_is_not_kept_twice(parent: Any) -> None:
    fork("parent", "child", 2, "generate", [])
    child = store_of(parent, "child")
    mark = outputs(parent.store)[0, "score"]
    theirs = child.find(0, "score", mark)
    assert theirs is not None and theirs[0].is_relative_to(parent.store.path)

    def attempt(content: str) -> tuple[Path, Any, bool]:
        partial = child.begin(0, "score", mark)
        (partial / "content").write_text(content)
        files = describe(partial)
        changes = {"run": "child", "files": files, "digest": content_digest(files)}
        return child.publish(partial, theirs[1].model_copy(update=changes))

    assert attempt((theirs[0] / "content").read_text()) == (*theirs, False)
    own, _, new = attempt("other")
    assert new and own.is_relative_to(child.path)
    found = child.find(0, "score", mark)
    assert found is not None and found[0] == theirs[0], "the iteration is made of the parent's"
    record = child.iteration(0)
    assert record is not None
    del record["stages"]["score"]
    child.write_iteration(0, record)
    found = child.find(0, "score", mark)
    assert found is not None and found[0] == own


def test_what_is_damaged_in_the_parent_is_not_found_and_not_moved(parent: Any) -> None:
    fork("parent", "child", 2, "generate", [])
    child = store_of(parent, "child")
    mark = outputs(parent.store)[1, "train"]
    folder = parent.store.path / parent.store.iteration(1)["stages"]["train"]["folder"]
    content = (folder / "content").read_text()
    (folder / "content").write_text(content.upper())
    before = stamps(parent.store)
    assert child.find(1, "train", mark) is None
    assert iterations_of(child).resume_position().iteration == 1
    assert stamps(parent.store) == before and not (child.path / "damaged").exists()


def test_a_fork_of_a_fork_refers_to_where_things_lie(parent: Any) -> None:
    fork("parent", "child", 2, "generate", [])
    fork("child", "grandchild", 1, "advantage", [])
    grandchild = store_of(parent, "grandchild")
    record = grandchild.iteration(1)
    assert record is not None and set(record["stages"]) == {"generate", "score"}
    assert record["policy"]["path"] == f"../parent/{parent.store.iteration(0)['stages']['train']['folder']}"
    assert all(made["folder"].startswith("../parent/") for made in record["stages"].values())


REFUSED: dict[str, tuple[Callable[[], None], type[Exception], str]] = {
    "an iteration that is not complete": (lambda: fork("parent", "new", 4, "generate", []), RunError, "not got to"),
    "a stage not executed yet": (lambda: fork("parent", "new", 3, "evaluate", []), RunError, "no train of iteration 3"),
    "no such parent": (lambda: fork("nobody", "new", 0, "generate", []), RunError, "no run 'nobody'"),
    "a name in use": (lambda: fork("parent", "parent", 1, "generate", []), RunError, "already"),
    "a folder in the way": (lambda: fork("parent", "taken", 1, "generate", []), RunError, "already"),
    "a name that cannot be": (lambda: fork("parent", "../x", 1, "generate", []), ConfigError, "name"),
    "another seed": (lambda: fork("parent", "new", 1, "generate", ["seed=2"]), ConfigError, "seed"),
    "another model": (lambda: fork("parent", "new", 1, "generate", ["model.source=m"]), ConfigError, "model.source"),
    "another name": (lambda: fork("parent", "new", 1, "generate", ["name=n"]), ConfigError, "name"),
    "an unknown setting": (
        lambda: fork("parent", "new", 1, "generate", ["learner.rate=1"]),
        ConfigError,
        "not a valid",
    ),
    "nothing left to do": (lambda: fork("parent", "new", 2, "train", ["iterations=2"]), ConfigError, "nothing is left"),
    "a stage that is not due": (
        lambda: fork("parent", "new", 1, "register", ["evaluate.every=5"]),
        RunError,
        "has no stage register",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_forked_leaves_nothing(parent: Any, case: str) -> None:
    runs = parent.store.path.parent
    (runs / "taken").mkdir()
    (runs / "lineage.lock").touch()
    call, error, message = REFUSED[case]
    before = stamps(parent.store), sorted(runs.iterdir())
    with pytest.raises(error, match=message):
        call()
    assert (stamps(parent.store), sorted(runs.iterdir())) == before


def test_settings_hold_from_the_fork_point_on(parent: Any) -> None:
    """What an iteration was made with stays with it; of the fork point's own what its outputs were made with."""
    parent.iterations.begin(parent.reopened().position(1), ["rewards.0.weight=2"])
    parent.iterations.end(1)
    for name, stage, overrides in (("late", "train", ["rewards.0.weight=2"]), ("early", "generate", [])):
        fork("parent", name, 1, stage, ["learner.lr=0.5"])  # type: ignore[arg-type]
        child = store_of(parent, name)
        iterations = iterations_of(child)
        iterations.begin(iterations.resume_position())
        assert iterations.config(1).learner.lr == 0.5
        assert (iterations.config(1).rewards[0].weight == 2) == bool(overrides)
        record = child.iteration(1)
        wanted = ["rewards.0.weight=2", "learner.lr=0.5"] if overrides else []
        assert record is not None and record["overrides"] == wanted
    fork("parent", "other", 1, "train", ["rewards.last_integer.weight=3"])
    iterations = iterations_of(store_of(parent, "other"))
    iterations.begin(iterations.resume_position())
    assert iterations.config(1).rewards[0].weight == 3


def test_live_changes_in_force_go_with_the_fork(parent: Any) -> None:
    """Those up to the fork point, numbered anew; a setting of the fork goes before them from there on."""
    log = AdjustmentLog(parent.store)
    about = {"at": "2026-01-01T00:00:00Z", "by": "somebody", "why": ""}
    entries = [("learner.lr", 0.1, 4), ("learner.lr", 0.2, 2), ("learner.eps", 0.3, 3)]
    log.append(
        [
            Adjustment(id=n, key=key, old=1.0, new=new, from_iteration=first, **about)  # type: ignore[arg-type]
            for n, (key, new, first) in enumerate(entries, 1)
        ]
    )
    record = parent.store.iteration(2)
    parent.store.write_iteration(2, record | {"adjustments": [2]})
    fork("parent", "as-it-is", 3, "generate", [])
    child = store_of(parent, "as-it-is")
    assert [(e.id, e.key, e.new, e.from_iteration) for e in AdjustmentLog(child).entries] == [
        (1, "learner.lr", 0.2, 2),
        (2, "learner.eps", 0.3, 3),
    ]
    assert (child.iteration(2) or {})["adjustments"] == [1]
    assert iterations_of(child).complete() == 3
    fork("parent", "other", 3, "generate", ["learner.lr=0.7"])
    child = store_of(parent, "other")
    assert [(e.id, e.key, e.old, e.new, e.from_iteration) for e in AdjustmentLog(child).entries[2:]] == [
        (3, "learner.lr", 0.2, 0.7, 3)
    ]
    iterations = iterations_of(child)
    assert iterations.complete() == 3
    assert [iterations.config(k).learner.lr for k in (2, 3, 4)] == [0.2, 0.7, 0.7]
    assert iterations.config(3).learner.eps == 0.3


def test_a_live_change_of_a_reward_that_the_fork_replaces_is_left_behind(
    parent: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tasks.lineage.forks.check_config", lambda *_: None)  # this parent's environment is not real
    about = {"at": "2026-01-01T00:00:00Z", "by": "somebody", "why": "", "old": 1.0, "from_iteration": 2}
    entries = [("rewards.last_integer.weight", 2.0), ("learner.lr", 0.2)]
    AdjustmentLog(parent.store).append(
        [Adjustment(id=n, key=key, new=new, **about) for n, (key, new) in enumerate(entries, 1)]  # type: ignore[arg-type]
    )
    parent.store.write_iteration(2, parent.store.iteration(2) | {"adjustments": [1, 2]})
    fork("parent", "child", 3, "generate", ["rewards=[{function='math_answer'}]"])
    child = store_of(parent, "child")
    assert [(e.id, e.key) for e in AdjustmentLog(child).entries] == [(1, "learner.lr")]
    assert (child.iteration(2) or {})["adjustments"] == [1]
    iterations = iterations_of(child)
    assert iterations.complete() == 3
    found = iterations.config(3)
    assert [(r.name, r.weight) for r in found.rewards] == [("math_answer", 1.0)] and found.learner.lr == 0.2


def test_a_parent_at_work_can_be_forked_but_not_deleted(parent: Any) -> None:
    with parent.store.lock():
        fork("parent", "child", 1, "generate", [])
        assert iterations_of(store_of(parent, "child")).complete() == 1
        for call in (check_deletable, delete):
            with pytest.raises(RunError, match="in use"):
                call("parent")


def test_a_parent_goes_after_its_children(parent: Any) -> None:
    fork("parent", "child", 2, "generate", [])
    fork("child", "grandchild", 1, "generate", [])
    before = stamps(parent.store)
    for name, child in (("parent", "child"), ("child", "grandchild")):
        for call in (check_deletable, delete):
            with pytest.raises(RunError, match=f"run '{name}' is needed by its forks") as caught:
                call(name)
            assert caught.value.got.startswith(f"{child} goes on from iteration")
    delete("grandchild")
    delete("child")
    assert stamps(parent.store) == before
    files = [path for path in parent.store.path.rglob("*") if path.is_file() and path.name != "lock"]
    assert check_deletable("parent") >= sum(path.stat().st_size for path in files)
    delete("parent")
    assert sorted(path.name for path in parent.store.path.parent.iterdir()) == ["lineage.lock"]
    with pytest.raises(RunError, match="no run 'parent'"):
        delete("parent")


def test_a_run_that_an_alias_leads_to_stays(parent: Any, mlflow_template: Path, tmp_path: Path) -> None:
    shutil.copy(mlflow_template, tmp_path / "mlflow.db")
    client = open_client(f"sqlite:///{tmp_path / 'mlflow.db'}")
    client.create_registered_model("model")
    made = parent.store.iteration(0)["stages"]
    tags = {
        "checkpoint_path": str(parent.store.folder(made["train"]["folder"])),
        "checkpoint_sha256": made["train"]["digest"],
        "evaluation_path": str(parent.store.folder(made["evaluate"]["folder"])),
        "evaluation_digest": made["evaluate"]["digest"],
    }
    client.create_model_version("model", "runs:/0/policies", tags=tags)
    assert check_deletable("parent") > 0, "a version without an alias answers nobody"
    client.set_registered_model_alias("model", "champion", "1")
    fork("parent", "child", 1, "generate", [])
    delete("child")
    for call in (check_deletable, delete):
        with pytest.raises(RunError, match="registered models lead to") as caught:
            call("parent")
        assert caught.value.got == "models:/model@champion is version 1"
    assert "--with-versions" in caught.value.todo
    other = {**tags, "checkpoint_path": str(tmp_path / "elsewhere"), "evaluation_path": str(tmp_path / "elsewhere")}
    client.create_model_version("model", "runs:/0/policies", tags=other)
    assert check_deletable("parent", with_versions=True) > 0
    delete("parent", with_versions=True)
    assert not parent.store.path.exists()
    assert [version.version for version in client.search_model_versions("name='model'")] == [2], "another run's stays"
    assert client.get_registered_model("model").aliases == {}


KILLED = """
import os, signal, sys
from pathlib import Path
import tasks.lineage.deletion as deletion
import tasks.lineage.forks as lineage

def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)

if sys.argv[1] == "fork":
    lineage.publish_folder = die
    lineage.fork("parent", "child", 2, "train", [])
else:
    deletion.shutil.rmtree = die
    deletion.delete("parent")
"""


@pytest.mark.slow
def test_a_fork_or_a_deletion_that_is_killed_leaves_all_or_nothing(parent: Any) -> None:
    """C63: killed before it is published, and before the first file is removed; the next command cleans up."""
    runs, before = parent.store.path.parent, stamps(parent.store)

    def killed(what: str) -> None:
        done = subprocess.run([sys.executable, "-c", KILLED, what], timeout=120)
        assert done.returncode == -signal.SIGKILL

    killed("fork")
    assert stamps(parent.store) == before
    assert not store_of(parent, "child").path.exists() and len(list(runs.glob("*.partial-*"))) == 1
    assert describe_lineage(parent.store) == []
    fork("parent", "child", 2, "train", [])
    assert list(runs.glob("*.partial-*")) == []
    delete("child")
    killed("delete")
    assert not parent.store.exists() and len(list(runs.glob("*.partial-*"))) == 1
    with pytest.raises(RunError, match="no run 'parent'"):
        delete("parent")

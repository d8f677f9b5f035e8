"""What is removed of a run and what stays, against lists made by hand; and what a crash in the middle leaves."""

from __future__ import annotations

import io
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from rl_core.errors import ModelError, RunError
from rl_core.manifest import FileEntry, Manifest, Ref, content_digest
from rl_core.stages import STAGES
from tasks.iterations import Position
from tasks.lineage.forks import fork
from tasks.lineage.references import lineage_lock
from tasks.lineage.retention import plan, print_plan, remove
from tasks.lineage.trainer_states import Retention, require_trainer_state
from tasks.storage.files import describe, folder_digest, prune_files, read_manifest, verify, write_json
from tasks.storage.store import RunStore
from tasks.tracking.gate import complete
from tasks.tracking.mlflow_client import open_client

pytestmark = [
    # MLflow 3.17 sets up its own tables with a loader option that SQLAlchemy 2.1 has deprecated.
    pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy"),
    # `import mlflow.pyfunc` warns of a type hint in a class of its own.
    pytest.mark.filterwarnings("ignore:.*Any type hint is inferred as AnyType"),
]

STATE = {"trainer/optimizer.safetensors": b"m" * 3000, "trainer/state.json": b"{}"}


class Runs:
    """A run whose checkpoints have weights and optimizer states, beside an MLflow store that is there if asked for."""

    def __init__(self, made: Any, database: Path, template: Path) -> None:
        self.run, self.store = made, made.store
        self.at = Position(0, made.store.base_model(), 0)
        self._database, self._template = database, template
        self._retention: Retention | None = None

    def train(self, k: int, inputs: dict[str, Ref], word: str) -> tuple[Path, Manifest, bool]:
        mark = f"{k}{word}".encode().hex().ljust(64, "0")
        partial = self.store.begin(k, "train", mark)
        (partial / "trainer").mkdir()
        for name, content in {"model.safetensors": f"weights {k} {word}".encode(), **STATE}.items():
            (partial / name).write_bytes(content)
        files = describe(partial)
        manifest = Manifest(
            run=self.store.name,
            iteration=k,
            stage="train",
            stage_version=1,
            fingerprint=mark,
            identity={},
            seed_key=[],
            inputs=inputs,
            digest=content_digest(files),
            files=files,
            rows=1,
        )
        published: tuple[Path, Manifest, bool] = self.store.publish(partial, manifest)
        return published

    def step(self, at: Position, word: str = "") -> Position:
        """A complete iteration."""
        k, iterations = at.iteration, self.run.iterations
        iterations.begin(at)
        refs = {"policy": at.policy}
        for stage, spec in STAGES.items():
            inputs = {name: refs[name] for name in spec.reads}
            if stage == "train":
                folder, manifest, _ = self.train(k, inputs, word)
                refs[stage] = Ref(path=self.store.relative(folder), digest=manifest.digest)
                made = {"folder": refs[stage].path, "fingerprint": manifest.fingerprint, "digest": manifest.digest}
                iterations.add(k, stage, made)
            else:
                state = {"cursor": 2 * k + 2} if stage == "generate" else {}
                content = f"{stage} {k} {word if stage in ('evaluate', 'register') else ''}"
                refs[stage] = self.run.publish(k, stage, content, inputs, state=state)
        iterations.end(k)
        return Position(k + 1, refs["train"], 2 * k + 2)

    def steps(self, count: int) -> Position:
        for _ in range(count):
            self.at = self.step(self.at)
        return self.at

    def checkpoint(self, k: int) -> Path:
        """What iteration k made."""
        found: Path = self.store.folder(self.store.iteration(k)["stages"]["train"]["folder"])
        return found

    def states(self) -> list[str]:
        """Iterations, with the word of a rerun, whose checkpoints have their optimizer state."""
        found = self.store.path.glob("iterations/*/train/*/trainer")
        return sorted(bytes.fromhex(path.parent.name[:12]).rstrip(b"\0").decode() for path in found)

    def register(self, k: int, alias: str) -> None:
        """A version of iteration k's checkpoint in a real registry."""
        if not self._database.exists():
            shutil.copy(self._template, self._database)
        client, made = open_client(f"sqlite:///{self._database}"), self.store.iteration(k)["stages"]
        if not client.search_registered_models(filter_string="name = 'run'"):
            client.create_registered_model("run")
        tags = {
            "checkpoint_path": str(self.checkpoint(k)),
            "checkpoint_sha256": made["train"]["digest"],
            "evaluation_path": str(self.store.folder(made["evaluate"]["folder"])),
            "evaluation_digest": made["evaluate"]["digest"],
        }
        version = client.create_model_version("run", "runs:/0/policies", tags=tags)
        if alias:
            client.set_registered_model_alias("run", alias, version.version)

    def retain(self, keep: int, ended: int, *, same_process: bool = False) -> None:
        config = self.run.config
        execution = config.execution.model_copy(update={"keep_trainer_states": keep})
        if self._retention is None or not same_process:
            self._retention = Retention(self.store)
        self._retention.retain(config.model_copy(update={"execution": execution}), ended)


@pytest.fixture
def runs(
    run_folder: Any, plain_config: Any, mlflow_template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Runs:
    monkeypatch.setenv("RLSTAGES_RUNS_DIR", str(tmp_path / "runs"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    return Runs(run_folder(plain_config(name="run", iterations=9)), tmp_path / "mlflow.db", mlflow_template)


def contents(folder: Path) -> dict[str, tuple[int, int, bytes]]:
    files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    return {
        name: (path.stat().st_ino, path.stat().st_mtime_ns, path.read_bytes())
        for name, path in files.items()
        if name not in ("lock", "adjustments.lock")
    }


def test_prune_removes_exactly_what_nobody_needs(runs: Runs, tmp_path: Path) -> None:
    """Superseded outputs go, but for those a version or a fork needs; then damage and leftovers; nothing else."""
    store = runs.store
    base = runs.run.publish(-1, "evaluate", "base", {"train": runs.at.policy})
    runs.run.publish(-1, "evaluate", "base of other problems", {"train": runs.at.policy}, identity={"problems": 9})
    at = [runs.at]
    for _ in range(4):
        at.append(runs.step(at[-1]))
    runs.register(2, "")  # superseded below, and a version leads to its checkpoint and its evaluation
    fork("run", "child", 1, "evaluate", [])  # needs what iteration 0 is made of now, and 1 up to train
    named = {k: {stage: made["folder"] for stage, made in store.iteration(k)["stages"].items()} for k in range(4)}
    for k in range(4):
        runs.step(at[k], "again")
    gone_stages = {1: ["evaluate", "register"], 2: ["register"], 3: ["train", "evaluate", "register"]}
    expected = {named[k][stage]: "superseded" for k, stages in gone_stages.items() for stage in stages}
    others = {path.name for path in (store.path / "iterations/base/evaluate").iterdir()} - {Path(base.path).name}
    expected[f"iterations/base/evaluate/{others.pop()}"] = "superseded"
    (store.path / "damaged" / "0001-score-x").mkdir(parents=True)
    (store.path / "damaged" / "0001-score-x" / "content").write_bytes(b"x" * 700)
    expected["damaged/0001-score-x"] = "damaged"
    dead = store.path / "iterations/0001/train/abc.partial-1"
    (dead / "trainer.partial-2").mkdir(parents=True)
    expected[store.relative(dead)] = "left by"
    placed = store.path / "iterations/0001/train/placed-abc"
    (placed / "output.partial-3").mkdir(parents=True)

    found = plan("run")
    reasons = {store.relative(item.path): item.reason for item in found}
    assert reasons.keys() == expected.keys()
    assert all(reasons[path].startswith(reason) for path, reason in expected.items())
    sizes = {store.relative(item.path): item.bytes for item in found}
    assert sizes["damaged/0001-score-x"] == 700
    trained = [path for path in (store.path / named[3]["train"]).rglob("*") if path.is_file()]
    assert sizes[named[3]["train"]] == sum(path.stat().st_size for path in trained) > 3000
    console = Console(file=io.StringIO(), width=200, record=True)
    print_plan(console, "run", found)
    text = console.export_text()
    assert all(path in text for path in expected) and "GB in all" in text

    before, child = contents(store.path), contents(tmp_path / "runs" / "child")
    with store.lock(), pytest.raises(RunError, match="in use"):
        remove("run")
    assert contents(store.path) == before, "a run at work is left alone"
    remove("run")
    gone = {name for name in before if any(Path(name).is_relative_to(path) for path in expected)}
    assert contents(store.path) == {name: value for name, value in before.items() if name not in gone}
    assert contents(tmp_path / "runs" / "child") == child and placed.is_dir()
    assert plan("run") == []
    assert runs.run.reopened().complete() == 1, "iteration 1 was made from another policy 1, and that stays so"
    print_plan(console, "run", [])
    assert "nothing to remove" in console.export_text()


@pytest.mark.parametrize(
    ("keep", "champion", "forks", "expected"),
    [
        (1, None, [], ["4"]),
        (2, None, [], ["3", "4"]),
        (9, None, [], ["0", "1", "2", "3", "4"]),
        (1, 0, [], ["0", "4"]),
        (1, 4, [], ["4"]),
        (1, None, [(2, "generate")], ["1", "4"]),
        (1, None, [(2, "evaluate")], ["1", "2", "4"]),
        (2, 1, [(1, "train"), (4, "register")], ["0", "1", "3", "4"]),
    ],
)
def test_the_newest_the_champion_and_fork_points_keep_their_states(
    runs: Runs, keep: int, champion: int | None, forks: list[Any], expected: list[str]
) -> None:
    """By hand: iteration k makes policy k + 1; a fork at k trains from policy k, or goes on from k + 1."""
    at = runs.steps(5)
    if champion is not None:
        runs.register(champion, "champion")
    for number, (k, stage) in enumerate(forks):
        fork("run", f"fork-{number}", k, stage, [])
    weights = {k: (runs.checkpoint(k) / "model.safetensors").stat() for k in range(5)}
    assert len(plan("run", keep)) == 5 - len(expected)
    if keep == 2 or champion is None:
        runs.retain(keep, ended=4)
    else:
        remove("run", keep)
    assert runs.states() == expected
    assert {k: (runs.checkpoint(k) / "model.safetensors").stat() for k in range(5)} == weights
    for k in range(5):
        kept = read_manifest(runs.checkpoint(k))
        assert kept is not None and kept.pruned == ([] if str(k) in expected else sorted(STATE))
    assert plan("run", keep) == [] and runs.run.reopened().resume_position() == at


@pytest.mark.parametrize("same", [False, True])
def test_a_run_may_go_on_at_every_end_of_its_line(runs: Runs, same: bool) -> None:
    """A rerun of a past iteration makes a new end; the old end keeps its state until the run has gone on."""
    at = [runs.at]
    for _ in range(4):
        at.append(runs.step(at[-1]))
        runs.retain(1, ended=at[-1].iteration - 1, same_process=same)
    assert runs.states() == ["3"]
    following = runs.step(at[1], "x")
    runs.retain(1, ended=1, same_process=same)
    assert runs.states() == ["1x", "3"]
    assert runs.run.reopened().resume_position() == following
    runs.step(at[1])  # put back as it was: reused, and the old line holds again
    runs.retain(1, ended=1, same_process=same)
    assert runs.run.reopened().resume_position() == at[4] and "3" in runs.states()
    following = runs.step(runs.step(runs.step(at[1], "x"), "x"), "x")
    runs.retain(1, ended=3, same_process=same)
    assert runs.run.reopened().resume_position() == following and "3x" in runs.states()


def test_a_long_run_looks_at_few_states_and_forgets_none(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """A champion's state goes when another is one, and what was left while MLflow was away goes once it is back."""
    looked: list[int] = []
    real = Path.glob

    def counted(self: Path, pattern: str) -> Any:
        found = list(real(self, pattern))
        looked.append(len(found) if pattern.endswith("trainer/") else 0)
        return iter(found)

    monkeypatch.setattr(Path, "glob", counted)
    left = []
    for k in range(12):
        runs.steps(1)
        if k in (2, 7):
            runs.register(k, "champion")
        with monkeypatch.context() as patch:
            if k in (4, 5):
                patch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
            looked.clear()
            runs.retain(2, ended=k, same_process=True)
            assert sum(looked) == 1, "the state that the iteration has made"
        left.append([int(state) for state in runs.states()])
    away = [[2, 3, 4], [2, 3, 4, 5], [2, 5, 6], [6, 7], [7, 8], [7, 8, 9], [7, 9, 10], [7, 10, 11]]
    assert [sorted(states) for states in left] == [[0], [0, 1], [1, 2], [2, 3], *away]


def test_without_its_state_a_checkpoint_serves_everybody_but_a_learner(runs: Runs) -> None:
    from tasks.tracking.policy_pyfunc import verify as verify_served

    runs.steps(4)
    folder, manifest = runs.checkpoint(1), read_manifest(runs.checkpoint(1))
    assert manifest is not None
    require_trainer_state(folder)
    assert prune_files(folder, list(STATE)) == 3002
    assert sorted(path.name for path in folder.iterdir()) == ["manifest.json", "model.safetensors"]
    verify(folder, manifest.digest)
    verify_served(folder, manifest.digest)
    found = complete(folder, manifest.digest)
    assert found is not None and found.files == manifest.files and found.pruned == sorted(STATE)
    assert runs.store.find(1, "train", manifest.fingerprint) == (folder, found)
    assert not (runs.store.path / "damaged").exists()
    with pytest.raises(ModelError, match="optimizer state of policy 2 of run 'run' was removed") as caught:
        require_trainer_state(folder)
    assert caught.value.expected == "policy 0, 1, 3, 4, whose state is there"
    assert "rerun iteration 1 from train" in caught.value.todo
    with pytest.raises(ModelError, match="policy 2"):
        fork("run", "child", 2, "train", [])
    with pytest.raises(ModelError, match="policy 2"):
        fork("run", "child", 1, "register", [])
    fork("run", "child", 1, "train", [])
    # What is left is still checked.
    (folder / "model.safetensors").write_bytes(b"weights 1 !")
    assert folder_digest(folder) != manifest.digest
    assert runs.store.find(1, "train", manifest.fingerprint) is None


def test_an_equal_attempt_brings_the_state_back(runs: Runs) -> None:
    runs.steps(2)
    folder = runs.checkpoint(0)
    before, manifest = contents(folder), read_manifest(folder)
    prune_files(folder, list(STATE))
    again = runs.train(0, {"policy": runs.store.base_model()}, "")
    assert again == (folder, manifest, False) and read_manifest(folder) == manifest
    after = contents(folder)
    assert {name: value[2] for name, value in after.items()} == {name: value[2] for name, value in before.items()}
    assert after["model.safetensors"] == before["model.safetensors"]
    require_trainer_state(folder)
    assert list(runs.store.path.rglob("*.partial-*")) == []


@pytest.mark.parametrize("removed", [0, 1])
def test_killed_between_the_manifest_and_the_last_file(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, removed: int
) -> None:
    """C63: the checkpoint is whole for every reader, no learner takes half a state, and the next time finishes it."""
    at = runs.steps(3)
    folder, unlink, done = runs.checkpoint(0), Path.unlink, []

    def die(path: Path, missing_ok: bool = False) -> None:
        if path.parent.name == "trainer":
            if len(done) == removed:
                raise KeyboardInterrupt
            done.append(path)
        unlink(path, missing_ok)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", die)
        with pytest.raises(KeyboardInterrupt):
            runs.retain(2, ended=2)
    assert len(list(folder.glob("trainer/*"))) == 2 - removed
    found = read_manifest(folder)
    assert found is not None and found.pruned == sorted(STATE)
    verify(folder, found.digest)
    assert runs.store.find(0, "train", found.fingerprint) == (folder, found)
    assert runs.run.reopened().resume_position() == at
    with pytest.raises(ModelError):
        require_trainer_state(folder)
    assert [item.reason for item in plan("run")] == ["optimizer state, removed in part"]
    runs.retain(2, ended=2)
    assert runs.states() == ["1", "2"] and plan("run") == []


def test_no_room_for_the_manifest_costs_no_state(runs: Runs, caplog: pytest.LogCaptureFixture) -> None:
    """C63: /dev/full refuses the manifest with ENOSPC before the first file goes; then there is room."""
    runs.steps(3)
    folder = runs.checkpoint(0)
    before = contents(folder)
    full = folder / f"manifest.json.partial-{os.getpid()}"
    full.symlink_to("/dev/full")
    runs.retain(2, ended=2)  # the run goes on, and fails where it has to write
    assert "No space left" in caplog.text
    assert contents(folder) == before and not full.is_symlink()
    runs.retain(2, ended=2)
    assert runs.states() == ["1", "2"]


def test_killed_while_an_output_is_removed(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """C63: half a folder never has the name of a whole one; the next opening of the run sweeps it."""
    start = runs.at
    runs.step(start)
    runs.step(start, "again")

    def half(folder: Path) -> None:
        min(path for path in folder.rglob("*") if path.is_file()).unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", half)
        with pytest.raises(KeyboardInterrupt):
            remove("run")
    assert len(list(runs.store.path.rglob("*.partial-*"))) == 1
    for path in runs.store.path.glob("iterations/*/*/*"):
        assert ".partial-" in path.name or read_manifest(path) is not None
    with runs.store.lock():
        runs.store.sweep()
    remove("run")
    assert plan("run") == [] and list(runs.store.path.rglob("*.partial-*")) == []
    assert runs.run.reopened().complete() == 1


def test_while_mlflow_is_away_nothing_is_removed(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody can say which policy is the champion; the run goes on, and the next iteration makes up for it."""
    runs.steps(3)
    with monkeypatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
        runs.retain(1, ended=2)
    assert runs.states() == ["0", "1", "2"] and "kept for now" in caplog.text
    runs.retain(1, ended=2)
    assert runs.states() == ["2"]


def test_while_another_process_removes_something_nothing_is_removed(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A deletion that takes long is no reason for a training run to fail; the next iteration makes up for it."""
    runs.steps(3)
    monkeypatch.setattr("tasks.lineage.trainer_states._PATIENCE_SECONDS", 0.1)
    with lineage_lock(runs.store.path.parent):
        runs.retain(1, ended=2, same_process=True)
    assert runs.states() == ["0", "1", "2"] and "lineage.lock was not free" in caplog.text
    runs.retain(1, ended=2, same_process=True)
    assert runs.states() == ["2"]


def test_a_checkpoint_with_an_empty_trainer_folder_stays(runs: Runs) -> None:
    monkeypatched = STATE.copy()
    STATE.clear()
    try:
        runs.steps(3)
        runs.retain(1, ended=2)
        assert all((runs.checkpoint(k) / "model.safetensors").is_file() for k in range(3))
        assert plan("run", 1) == []
    finally:
        STATE.update(monkeypatched)


def test_an_evaluation_that_a_person_asked_for_is_not_pruned(runs: Runs) -> None:
    """It enters no record, and nothing is made of it: it is looked at."""
    runs.steps(2)
    refs = {"train": Ref(path="p", digest=runs.store.iteration(1)["stages"]["train"]["digest"])}
    made = runs.store.iteration(1)["stages"]["evaluate"]
    asked = runs.run.publish(1, "evaluate", "500 problems", refs, measured={"seconds": 1.0, "detached": True})
    other = runs.run.publish(1, "evaluate", "another judge", refs)
    runs.run.iterations.add(1, "evaluate", made)
    assert [item.path for item in plan("run")] == [runs.store.folder(other.path)]
    remove("run")
    assert runs.store.folder(asked.path).is_dir()


def test_forks_keep_and_lose_states_of_their_own_only(runs: Runs, tmp_path: Path) -> None:
    runs.steps(3)
    fork("run", "child", 3, "generate", [])
    before = contents(runs.store.path)
    child = RunStore(tmp_path / "runs", "child")
    made = Runs(runs.run, tmp_path / "mlflow.db", tmp_path)
    made.run, made.store = type(runs.run).__new__(type(runs.run)), child
    made.run.store, made.run.config = child, child.config()
    made.run.iterations = made.run.reopened()
    made.at = made.run.iterations.resume_position()
    made.steps(3)
    made.retain(1, ended=5)
    assert made.states() == ["5"]
    assert contents(runs.store.path) == before
    runs.retain(1, ended=2)
    assert runs.states() == ["2"], "the newest of its own, and the fork's start"


def test_the_worker_trains_nothing_without_its_state(bench: Any) -> None:
    """An optimizer that silently starts anew would be another run; log-probs and samples need none."""
    folder = bench.new_folder()
    shutil.copytree(bench.model, folder, dirs_exist_ok=True)
    lost = FileEntry(name="trainer/state.json", bytes=2, sha256="0" * 64)
    files = [*describe(folder), lost]
    manifest = Manifest(
        run="run",
        iteration=4,
        stage="train",
        stage_version=1,
        fingerprint="f",
        identity={},
        seed_key=[],
        inputs={},
        digest=content_digest(files),
        files=files,
        pruned=[lost.name],
        rows=1,
    )
    write_json(folder / "manifest.json", manifest.model_dump(mode="json"))
    ref, config = Ref(path=str(folder), digest=manifest.digest), bench.config()
    with pytest.raises(ModelError, match="optimizer state of policy 5 of run 'run' was removed"):
        bench.services.learner(ref, config)
    assert bench.services.scorer(ref, config).policy is bench.services.policy(ref, config)
    with pytest.raises(ModelError, match="policy 5"):
        bench.services.learner(ref, config)

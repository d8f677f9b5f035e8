"""From a recipe or a name to a run folder: what is found, what is refused, what is made once."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rl_core.errors import ConfigError, DataError, ModelError, WorkerError
from rl_core.manifest import Ref, content_digest
from tasks import launch
from tasks.storage.files import describe
from tasks.storage.store import RunStore
from tasks.worker import Worker

RECIPE = """
name = "trial"
seed = 5
iterations = 2
model = { source = "MODEL" }
rewards = [{ function = "last_integer" }]
[environment]
kind = "reasoning_gym"
params = { dataset = "chain_sum" }
[evaluate]
problems = 8
"""


@pytest.fixture
def here(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a recipe of the user's own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RLSTAGES_RUNS_DIR", raising=False)
    (tmp_path / "mine.toml").write_text(RECIPE.replace("MODEL", str(tiny_model)))
    return tmp_path


@pytest.fixture
def run(here: Path, tiny_model: Path) -> RunStore:
    """The recipe's run, as `prepare_run` makes it."""
    store = RunStore(here / "runs", "trial")
    model = Ref(path=str(tiny_model), digest=content_digest(describe(tiny_model)))
    store.create(launch.resolve_config("mine.toml", []), model, "test")
    return store


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    made = Worker(tmp_path_factory.mktemp("worker"), threads=1)
    yield made
    made.close()


def test_a_file_a_recipe_or_a_run(here: Path, run: RunStore) -> None:
    """A path to a TOML file, a short name below deployments/recipes, the name of a run; overrides on top of each."""
    assert launch.resolve_config("mine.toml", ["seed=9"]).seed == 9
    assert launch.resolve_config(str(here / "mine.toml"), []).name == "trial"
    assert launch.resolve_config("smoke", []).model.source == "tiny-random"
    run.create(launch.resolve_config("mine.toml", ["seed=7"]), run.base_model(), "test")
    assert launch.resolve_config("trial", []).seed == 7
    assert launch.resolve_config("trial", ["rewards.last_integer.weight=2"]).rewards[0].weight == 2.0
    for unknown in ("other", "mine", "other.toml", "deployments"):
        with pytest.raises(ConfigError, match=f"no recipe and no run '{unknown}'") as caught:
            launch.resolve_config(unknown, [])
        assert "smoke" in caught.value.expected and "(trial)" in caught.value.expected


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"name = [", "is not valid TOML"),
        (b'name = "\xff"', "cannot be read"),
        (RECIPE.encode() + b"[learner]\nlearning_rate = 1\n", "is not a valid run config"),
    ],
)
def test_a_recipe_that_cannot_be_read(here: Path, content: bytes, words: str) -> None:
    (here / "bad.toml").write_bytes(content)
    with pytest.raises(ConfigError, match=rf"bad.toml {words}"):
        launch.prepare_run("bad.toml", [])
    assert sorted(path.name for path in here.iterdir()) == ["bad.toml", "mine.toml"]


def test_a_run_that_exists_keeps_what_decides_its_numbers(here: Path, run: RunStore) -> None:
    """Every changed key is named; more iterations and other hardware settings are taken over; nothing else is."""
    before = (run.path / "run.json").read_bytes()
    overrides = ["learner.lr=0.5", "rewards.last_integer.weight=2", "seed=1", "iterations=9", "execution.threads=3"]
    with pytest.raises(ConfigError, match="run 'trial' exists with another config") as caught:
        launch.prepare_run("mine.toml", overrides)
    assert caught.value.got == "different: learner.lr, rewards, seed"
    assert "rlstages run trial" in caught.value.todo
    with pytest.raises(ConfigError) as caught:
        launch.prepare_run("trial", ["learner.lr=0.5", "rewards.last_integer.weight=2"])
    assert "`rlstages adjust trial --set learner.lr=0.5 --set rewards.last_integer.weight=2`" in caught.value.todo
    assert (run.path / "run.json").read_bytes() == before
    assert launch.prepare_run("mine.toml", []) == launch.prepare_run("trial", []) == "trial"
    assert (run.path / "run.json").read_bytes() == before, "rewritten although nothing changed"
    launch.prepare_run("trial", ["iterations=9", "execution.threads=3", "execution.timeout_seconds.score=5"])
    config = run.config()
    assert (config.iterations, config.execution.threads) == (9, 3)
    assert config.execution.timeout_seconds == {"score": 5.0}
    assert run.base_model() == Ref.model_validate(run.record()["base_model"])
    assert launch.prepare_run("mine.toml", []) == "trial" and run.config().iterations == 9, "undone by the recipe"


def test_the_advice_for_a_run_named_as_a_recipe(here: Path, run: RunStore) -> None:
    """`rlstages run smoke` means the recipe: it must not be recommended as the way to the run of that name."""
    other = RunStore(here / "runs", "smoke")
    other.create(launch.resolve_config("smoke", ["seed=4"]), run.base_model(), "test")
    with pytest.raises(ConfigError, match="run 'smoke' exists with another config") as caught:
        launch.prepare_run("smoke", [])
    assert caught.value.todo.startswith("repeat the --set options it was started with")


@pytest.mark.slow
def test_a_new_run(here: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its record holds the resolved config and the digest of the model's files; a second call changes nothing."""
    monkeypatch.setenv("RLSTAGES_RUNS_DIR", str(here / "elsewhere"))
    assert launch.prepare_run("mine.toml", ["name=second", "learner.lr=1e-5"]) == "second"
    store = RunStore(here / "elsewhere", "second")
    assert store.config() == launch.resolve_config("mine.toml", ["name=second", "learner.lr=1e-5"])
    assert store.base_model() == Ref(path=str(tiny_model), digest=content_digest(describe(tiny_model)))
    before = (store.path / "run.json").read_bytes()
    launch.prepare_run("second", [])
    assert (store.path / "run.json").read_bytes() == before


@pytest.mark.slow
def test_what_a_config_names_is_checked_before_anything_is_written(here: Path, worker: Worker) -> None:
    (here / "rows.jsonl").write_text("".join(f'{{"prompt": "p{i}", "answer": "{i}"}}\n' for i in range(5)))
    rows = f'environment={{kind="dataset", params={{path="{here}/rows.jsonl", heldout_rows=2}}}}'
    launch.check_config(launch.resolve_config("mine.toml", [rows, "evaluate.problems=2"]), worker)
    with pytest.raises(ConfigError, match="fewer held-out problems than the evaluation wants") as caught:
        launch.check_config(launch.resolve_config("mine.toml", [rows, "evaluate.problems=3"]), worker)
    assert (caught.value.expected, caught.value.got) == ("evaluate.problems = 3", "2 held-out problems")
    with pytest.raises(DataError, match="no training rows are left"):
        launch.check_config(launch.resolve_config("mine.toml", [rows.replace("=2}", "=5}")]), worker)
    assert not (here / "runs").exists()


def test_a_model_by_its_folder(here: Path, worker: Worker, tiny_model: Path) -> None:
    """Relative or absolute, it is one model; its digest is of the files."""
    shutil.copytree(tiny_model, here / "my model")
    found = launch.base_model_ref("my model", worker)
    assert found == launch.base_model_ref(str(here / "my model"), worker)
    assert found == Ref(path=str(here / "my model"), digest=content_digest(describe(tiny_model)))
    (here / "my model" / "config.json").write_text("{}")
    assert launch.base_model_ref("my model", worker).digest != found.digest
    (here / "my model" / "config.json").unlink()
    for source in ("my model", "nowhere"):
        with pytest.raises(ModelError, match=f"there is no model '{source}'") as caught:
            launch.base_model_ref(source, worker)
        assert "tiny-random" in caught.value.expected
    with pytest.raises(ModelError, match="no known model 'big'"):
        launch.ensure_model("big", worker)


@pytest.mark.slow
def test_a_model_is_made_whole_or_not_at_all(here: Path, worker: Worker, tiny_model: Path) -> None:
    """C62: killed in the middle nothing is there under its name, and the next attempt clears the leftovers away."""
    models = here / "models"

    def kill_when_begun() -> None:
        while not (list(models.glob("*.partial-*")) and worker._child):
            time.sleep(0.001)
        os.kill(worker._child.pid, signal.SIGKILL)

    killer = threading.Thread(target=kill_when_begun)
    killer.start()
    with pytest.raises(WorkerError, match="ended before it answered"):
        launch.ensure_model("tiny-random", worker)
    killer.join()
    assert list(models.iterdir()) == []

    dead, living = models / "tiny-random.partial-999999999", models / f"tiny-random.partial-{os.getppid()}"
    for folder in (dead, living):
        folder.mkdir()
        (folder / "config.json").write_text("{}")
    made = launch.ensure_model("tiny-random", worker)
    assert made == models / "tiny-random" and describe(made) == describe(tiny_model)
    assert sorted(models.iterdir()) == [made, living]
    stamps = {path: path.stat().st_mtime_ns for path in made.iterdir()}
    assert launch.base_model_ref("tiny-random", worker).digest == content_digest(describe(tiny_model))
    assert {path: path.stat().st_mtime_ns for path in made.iterdir()} == stamps

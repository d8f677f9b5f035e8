"""What a run folder keeps of the run itself, and of each iteration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rl_core.config import RunConfig
from rl_core.errors import CorruptOutputError, RunError
from rl_core.manifest import Ref
from rl_core.recipes import build_config
from tasks.storage.files import write_json
from tasks.storage.store import RunStore


@pytest.fixture
def store(tmp_path: Path) -> RunStore:
    store = RunStore(tmp_path, "r")
    store.iteration_dir(3).mkdir(parents=True)
    return store


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def _config(**changes: Any) -> RunConfig:
    base = {"name": "r", "model": {"source": "m"}, "environment": {"kind": "k"}, "rewards": [{"function": "f"}]}
    return build_config(base | changes, "test")


def test_a_run_keeps_its_config_and_base_model_exactly(tmp_path: Path) -> None:
    store, model = RunStore(tmp_path, "r"), Ref(path="models/m", digest="d")
    config = _config(seed=2**63 - 1, learner={"lr": 1e-7}, environment={"kind": "k", "params": {"ü": ["\u202e", 1.0]}})
    assert not store.exists()
    store.create(config, model, "1.0")
    assert (store.exists(), store.config(), store.base_model()) == (True, config, model)
    assert names(store.path) == ["run.json"]


def test_a_run_that_does_not_exist_is_named_with_those_that_do(tmp_path: Path) -> None:
    RunStore(tmp_path, "other").create(_config(name="other"), Ref(path="p", digest="d"), "")
    with pytest.raises(RunError, match="there is no run 'r'") as caught:
        RunStore(tmp_path, "r").config()
    assert caught.value.expected == "other"


@pytest.mark.parametrize("content", [b"", b'{"format": 1', b"\xff"])
def test_an_unreadable_record_is_named(tmp_path: Path, content: bytes) -> None:
    store = RunStore(tmp_path, "r")
    store.create(_config(), Ref(path="p", digest="d"), "")
    store.iteration_dir(0).mkdir(parents=True)
    for path, read in (
        (store.path / "run.json", store.config),
        (store.iteration_dir(0) / "iteration.json", store.iteration),
    ):
        path.write_bytes(content)
        with pytest.raises(CorruptOutputError, match=str(path)):
            read(0) if read == store.iteration else read()


def test_an_iteration_record_is_replaced_whole(store: RunStore) -> None:
    assert store.iteration(3) is None
    store.write_iteration(3, {"complete": False, "text": "ü"})
    store.write_iteration(3, {"complete": True})
    assert store.iteration(3) == {"complete": True}
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(store.iteration_dir(3) / "iteration.json", {"a": float("nan")})
    assert store.iteration(3) == {"complete": True}
    assert names(store.iteration_dir(3)) == ["iteration.json"]
    assert store.iteration_dir(-1).name == "base"


@pytest.mark.parametrize("name", ["b/", "./b", "a/../b", "..", ".", "", "a/b"])
def test_a_path_is_not_the_name_of_a_run(tmp_path: Path, name: str) -> None:
    """Under another name than its own a run would have no forks, and its deletion no end."""
    RunStore(tmp_path / "runs", "b").create(_config(), Ref(path="p", digest="d"), "test")
    with pytest.raises(RunError, match="there is no run"):
        RunStore(tmp_path / "runs", name).record()

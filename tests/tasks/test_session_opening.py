"""Opening a run: once per process, cleaned up first, and nothing started that is not needed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rl_core.errors import RunError
from tasks.provenance import code_version
from tasks.session import current_session, open_session


def test_a_run_is_open_between_enter_and_exit(bench: Any, run_folder: Any) -> None:
    """Opened again inside, it is the same session; leftovers of dead attempts go first; no worker, no tracker yet."""
    store = run_folder(bench.config()).store
    leftover = store.begin(0, "train", "a" * 64).rename(store.iteration_dir(0) / "train" / "aaaaaaaaaaaa.partial-1")
    with pytest.raises(RunError, match="'bench' is not open in this process"):
        current_session("bench")
    with open_session("bench", store.path.parent) as session:
        assert not leftover.exists()
        with open_session("bench", store.path.parent) as same:
            assert same is session
        assert current_session("bench") is session
        assert session.worker._child is None and session._tracker is None
    with pytest.raises(RunError):
        current_session("bench")
    with pytest.raises(KeyError), open_session("bench", store.path.parent) as another:
        assert another is not session
        raise KeyError
    with open_session("bench", store.path.parent):
        pass  # the lock was let go


def test_a_run_that_does_not_exist_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="there is no run 'nobody'"), open_session("nobody", tmp_path / "runs"):
        pass
    assert not (tmp_path / "runs").exists()


def test_the_version_of_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without git still publishes."""
    from importlib.metadata import version

    plain = f"rlstages {version('rlstages')}"
    assert code_version().startswith(plain)
    monkeypatch.setenv("PATH", "")
    assert code_version.__wrapped__() == plain

"""A run that crashes without getting on is not resumed for ever; one that gets on is."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rl_core.errors import ConfigError, StageError
from rl_core.manifest import Ref
from tasks.launch import RECIPES, continue_or_prepare, resolve_config
from tasks.live.pausing import pause, resume
from tasks.servers.autoresume import counted_attempt
from tasks.storage.store import RunStore

STARTED = {"PREFECT__RUNTIME__DEPLOYMENT__ID": "d", "PREFECT__RUNTIME__FLOW_RUN__ID": "flow-run-1"}


@pytest.fixture(autouse=True)
def deployed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process as Prefect's runtime shows a deployed flow run, by the variables Prefect has for that."""
    monkeypatch.chdir(tmp_path)
    for name, value in STARTED.items():
        monkeypatch.setenv(name, value)


def attempt(target: str, overrides: list[str], end: BaseException | None = None) -> None:
    """One attempt, which ends with that exception; a crash leaves no exception, nor anything else."""
    with counted_attempt(target, overrides):
        if end is not None:
            raise end


def finish_stage(number: int) -> None:
    folder = Path("runs/smoke/iterations/0000/score") / str(number)
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text("{}")


def test_attempts_without_progress_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLSTAGES_MAX_ATTEMPTS", "3")
    for _ in range(3):
        attempt("smoke", [])
    with pytest.raises(StageError, match="3 times in a row"):
        attempt("smoke", [])
    attempt("smoke", [])  # who retries it by hand begins anew


def test_progress_starts_the_count_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two attempts a stage, for ever; half-written outputs are no progress."""
    monkeypatch.setenv("RLSTAGES_MAX_ATTEMPTS", "2")
    for number in range(4):
        finish_stage(number)
        attempt("smoke", [])
        attempt("smoke", [])
    partial = Path("runs/smoke/iterations/0000/train/abc.partial-7")
    partial.mkdir(parents=True)
    (partial / "manifest.json").write_text("{}")
    with pytest.raises(StageError, match="2 times in a row"):
        attempt("smoke", [])


def test_runs_and_flow_runs_are_counted_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Progress is that of the run the recipe and its overrides mean; another flow run has attempts of its own."""
    monkeypatch.setenv("RLSTAGES_MAX_ATTEMPTS", "1")
    attempt("smoke", ["name=other"])
    finish_stage(0)  # of the run `smoke`
    with pytest.raises(StageError, match="run 'other'"):
        attempt("smoke", ["name=other"])
    monkeypatch.setenv("PREFECT__RUNTIME__FLOW_RUN__ID", "flow-run-2")
    attempt("smoke", ["name=other"])
    assert json.loads(Path(".state/attempts/flow-run-2.json").read_text())["attempts"] == 1


def test_a_run_of_the_command_line_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLSTAGES_MAX_ATTEMPTS", "1")
    monkeypatch.delenv("PREFECT__RUNTIME__DEPLOYMENT__ID")
    for _ in range(3):
        attempt("smoke", [])
    assert not Path(".state").exists()


@pytest.mark.parametrize("text", ["0", "-1", "many", ""])
def test_the_limit_is_a_number(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("RLSTAGES_MAX_ATTEMPTS", text)
    with pytest.raises(ConfigError, match="RLSTAGES_MAX_ATTEMPTS"):
        attempt("smoke", [])


def test_a_flow_run_that_was_started_twice_waits_for_its_other_process() -> None:
    """Another process holds the run's lock: the same flow run waits for it, any other one goes on to be refused."""
    folder = Path("runs/smoke")
    folder.mkdir(parents=True)
    holder = "import fcntl, time; f = open('lock', 'ab'); fcntl.flock(f, 2); print(flush=True); time.sleep(2.5)"
    with subprocess.Popen([sys.executable, "-c", holder], cwd=folder, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline()
        (folder / "attempts.jsonl").write_text(json.dumps({"flow_run": "flow-run-0", "began_at": 0.0}) + "\n")
        attempt("smoke", [])
        assert process.poll() is None
        (folder / "attempts.jsonl").write_text(json.dumps({"flow_run": "flow-run-1", "began_at": 0.0}) + "\n")
        attempt("smoke", [])
        assert process.wait(0.5) == 0


def test_who_stops_a_run_does_not_count_as_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal ends an attempt in order; an error that the run ended with is one of its crashes."""
    monkeypatch.setenv("RLSTAGES_MAX_ATTEMPTS", "2")
    for _ in range(5):
        with pytest.raises(KeyboardInterrupt):
            attempt("smoke", [], end=KeyboardInterrupt())
    for _ in range(2):
        with pytest.raises(OSError):
            attempt("smoke", [], end=OSError())
    with pytest.raises(StageError, match="2 times in a row"):
        attempt("smoke", [])


def test_starts_of_a_paused_run_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """It finishes no stage by design, however often its machine is restarted."""
    monkeypatch.setenv("RLSTAGES_MAX_ATTEMPTS", "1")
    run = RunStore(Path("runs"), "smoke")
    run.create(resolve_config("smoke", []), Ref(path="base", digest="base"), "test")
    pause("smoke")
    for _ in range(3):
        attempt("smoke", [])
    resume("smoke")
    attempt("smoke", [])
    with pytest.raises(StageError, match="1 times in a row"):
        attempt("smoke", [])


def test_a_flow_run_goes_on_with_its_run_whatever_the_recipe_says_by_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """The recipe was edited, or cannot even be read, when the flow run is resumed at night."""
    recipe = Path("mine.toml")
    recipe.write_text((RECIPES / "smoke.toml").read_text())
    run = RunStore(Path("runs"), "mine")
    run.create(resolve_config("mine.toml", ["name=mine"]), Ref(path="base", digest="base"), "test")
    line = {"pid": 1, "host": "h", "began_at": 1.0, "flow_run": "flow-run-1"}
    (run.path / "attempts.jsonl").write_text(json.dumps(line) + "\n")
    for text in (recipe.read_text().replace("group_size = 4", "group_size = 8"), "name = "):
        recipe.write_text(text)
        attempt("mine.toml", ["name=mine"])
        assert continue_or_prepare("mine.toml", ["name=mine"]) == "mine"
    assert json.loads(Path(".state/attempts/flow-run-1.json").read_text())["run"] == "mine"
    monkeypatch.setenv("PREFECT__RUNTIME__FLOW_RUN__ID", "flow-run-2")
    with pytest.raises(ConfigError, match="not valid TOML"):
        continue_or_prepare("mine.toml", ["name=mine"])

"""Pausing a run: the file, the wait, and what a real Prefect server shows and does meanwhile."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from rl_core.config import RunConfig
from rl_core.errors import RunError
from rl_core.manifest import Ref
from tasks.events import StageEvent, observed
from tasks.live.pausing import pause, paused, resume, wait_while_paused
from tasks.provenance import who
from tasks.session import Session
from tasks.storage.store import RunStore

FLOWS = Path(__file__).with_name("pausing_flows.py")


def new_run(runs: Path, name: str) -> RunStore:
    data = {
        "name": name,
        "model": {"source": "tiny-random"},
        "environment": {"kind": "reasoning_gym"},
        "rewards": [{"function": "last_integer"}],
    }
    store = RunStore(runs, name)
    store.create(RunConfig.model_validate(data), Ref(path="base", digest="base"), "test")
    return store


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunStore:
    monkeypatch.setenv("RLSTAGES_RUNS_DIR", str(tmp_path / "runs"))
    return new_run(tmp_path / "runs", "run")


def test_a_pause_says_who_and_why_until_it_is_over(store: RunStore) -> None:
    assert paused(store) is None
    with store.lock():  # it is at work
        pause("run", " lunch ")
    found = paused(store)
    assert found is not None and (found.by, found.why) == (who(), "lunch")
    assert str(found) == f"paused by {who()} at {found.at}: lunch"
    pause("run")
    again = paused(store)
    assert again is not None and again.why == "" and not str(again).endswith(": ")
    resume("run")
    assert paused(store) is None
    with pytest.raises(RunError, match="is not paused"):
        resume("run")
    for act in (pause, resume):
        with pytest.raises(RunError, match="there is no run 'other'"):
            act("other")


def test_a_run_that_is_being_opened_does_not_sweep_a_pause_away(store: RunStore) -> None:
    over = threading.Event()

    def sweep() -> None:
        while not over.is_set():
            store.sweep()
            time.sleep(0.001)

    sweeper = threading.Thread(target=sweep)
    sweeper.start()
    try:
        for _ in range(20):
            pause("run")
            resume("run")
    finally:
        over.set()
        sweeper.join()


def test_a_session_waits_without_a_worker_and_says_so(store: RunStore) -> None:
    session = Session(store)
    told: list[StageEvent] = []
    with observed(told.append):
        wait_while_paused(session)
        assert told == []
        pause("run", "lunch")
        timer = threading.Timer(1.2, resume, ["run"])
        timer.start()
        began = time.monotonic()
        wait_while_paused(session)
    assert 1.0 < time.monotonic() - began < 60
    assert [event.kind for event in told] == ["notice", "notice"]
    assert "lunch" in told[0].message and "rlstages resume run" in told[0].message
    assert told[1].message == "run goes on"
    assert session.worker._child is None


class Person:
    """Who sits before the Prefect UI."""

    def __init__(self, api: str) -> None:
        self.api = api

    def flow_run(self, name: str) -> dict[str, Any]:
        body = {"flow_runs": {"name": {"any_": [f"pausing-{name}"]}}}
        found = httpx.post(f"{self.api}/flow_runs/filter", json=body).json()
        return found[0] if found else {"state_name": ""}

    def wait_for(self, name: str, state: str) -> dict[str, Any]:
        deadline = time.monotonic() + 60
        while (found := self.flow_run(name))["state_name"] != state:
            assert time.monotonic() < deadline, found
            time.sleep(0.1)
        return found

    def states(self, flow_run: dict[str, Any]) -> list[str]:
        found = httpx.get(f"{self.api}/flow_run_states/", params={"flow_run_id": flow_run["id"]}).json()
        return [state["name"] for state in found]


@pytest.mark.slow
def test_what_prefect_shows_and_its_resume_and_cancel_buttons(project: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Resumed by the UI, by the file, under a deployment's limit, cancelled, and ended by SIGTERM."""
    names = ["button", "file", "leased", "cancelled", "ended"]
    monkeypatch.setenv("RLSTAGES_RUNS_DIR", str(project.folder / "runs"))
    stores = {name: new_run(project.folder / "runs", name) for name in names}
    for name in names:
        pause(name, "lunch")
    person = Person(project.env["PREFECT_API_URL"])
    process = project.start(*names, driver=FLOWS)
    try:
        shown = person.wait_for("button", "Paused")
        assert "lunch; `rlstages resume button`" in shown["state"]["message"]
        assert httpx.post(f"{person.api}/flow_runs/{shown['id']}/resume").json()["status"] == "ACCEPT"
        course = ["Pending", "Running", "Paused", "Running", "Completed"]
        assert person.states(person.wait_for("button", "Completed")) == course
        assert paused(stores["button"]) is None

        shown = person.wait_for("file", "Paused")
        resume("file")
        assert person.states(person.wait_for("file", "Completed")) == course

        # Its slot would be free in a state of any other type, and Prefect would end the process.
        shown = person.wait_for("leased", "Paused")
        lease = shown["state"]["state_details"]["deployment_concurrency_lease_id"]
        renewal = httpx.post(f"{person.api}/v2/concurrency_limits/leases/{lease}/renew", json={"lease_duration": 300})
        assert shown["state_type"] == "RUNNING" and renewal.status_code == 204
        assert "rlstages resume leased" in shown["state"]["message"]
        resume("leased")
        assert person.states(person.wait_for("leased", "Completed"))[-4:] == course[1:]

        shown = person.wait_for("cancelled", "Paused")
        httpx.post(f"{person.api}/flow_runs/{shown['id']}/set_state", json={"state": {"type": "CANCELLING"}})
        person.wait_for("cancelled", "Cancelled")
        assert paused(stores["cancelled"]) is not None

        person.wait_for("ended", "Paused")
        os.kill(process.pid, signal.SIGTERM)
        output, _ = process.communicate(timeout=30)
        person.wait_for("ended", "Crashed")
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
    assert all(f"{name}: went on" in output for name in ("button", "file", "leased"))
    assert "cancelled: RunError: the flow run was cancelled while it was paused" in output
    assert "ended:" not in output and paused(stores["ended"]) is not None

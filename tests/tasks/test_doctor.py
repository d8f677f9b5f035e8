"""`doctor` finds what crashes leave behind, repairs it on demand, and touches nothing that lives."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tasks import attempts, doctor
from tasks.doctor import checks, server
from tasks.processes.tree import MARK, PARENT
from tasks.servers.provision import POOL
from tasks.storage.store import RunStore


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty project folder, as the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RLSTAGES_RUNS_DIR", str(tmp_path / "runs"))
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path / "home"))
    return tmp_path


@pytest.fixture
def dead_pid() -> int:
    ended = subprocess.Popen(["true"])
    ended.wait()
    return ended.pid


def store(folder: Path, name: str) -> RunStore:
    made = RunStore(folder / "runs", name)
    made.path.mkdir(parents=True)
    (made.path / "run.json").write_text("{}")
    return made


def todo(findings: list[doctor.Finding]) -> list[str]:
    return [finding.what for finding in findings if not finding.repaired]


def test_half_written_folders_of_the_dead_only(folder: Path, dead_pid: int) -> None:
    """A dead process's are found and removed; those of a living one, of a locked run and of another machine stay."""
    idle, busy = store(folder, "idle"), store(folder, "busy")
    stale = [
        idle.path / f"iterations/0000/train/abc.partial-{dead_pid}",
        folder / f"models/tiny.partial-{dead_pid}",
    ]
    kept = [
        idle.path / f"iterations/0000/score/abc.partial-{os.getpid()}",
        idle.path / f"iterations/0000/train/placed-1/abc.partial-{dead_pid}",
        busy.path / f"iterations/0000/train/abc.partial-{dead_pid}",
    ]
    for path in [*stale, *kept]:
        (path / "deep").mkdir(parents=True)
        (path / "deep" / f"x.partial-{dead_pid}").write_bytes(b"x" * 1000)
    (folder / f"runs/deleted.partial-{dead_pid}").mkdir()
    (folder / f"runs/deleted.partial-{dead_pid}/run.json").write_text("{}")
    assert [found.name for found in doctor.known_stores()] == ["busy", "idle"], "nor a deletion that was killed"
    file = idle.path / f"run.json.partial-{dead_pid}"
    file.write_text("{")
    shutil.rmtree(kept[0] / "deep")
    with busy.lock():
        found = checks.folders(doctor.known_stores(), fix=False)
        assert len(todo(found)) == 4 and all(path.exists() for path in [*stale, *kept, file])
        assert any("0.0 MB" in what and "models/tiny" in what for what in todo(found))
        assert todo(checks.folders(doctor.known_stores(), fix=True)) == []
    assert [path.exists() for path in [*stale, file]] == [False] * 3
    assert sorted(path.name for path in (folder / "runs").iterdir()) == ["busy", "idle"]
    assert all(path.exists() for path in kept)
    assert [finding.todo for finding in checks.folders([idle], fix=False)] == [""]


def test_placed_attempts_that_nobody_works_on(folder: Path) -> None:
    """Without a sign of life for ten minutes one goes; with a fresh one, or a reply to be taken, it stays."""
    idle, busy = store(folder, "idle"), store(folder, "busy")
    long_ago = time.time() - 700
    made = {}
    for name, run, reply, beats in [
        *(("queued", idle, False, False), ("beating", idle, False, True)),
        *(("answered", idle, True, False), ("locked", busy, False, False)),
    ]:
        attempt = made[name] = run.path / f"iterations/0003/train/placed-{name}"
        (attempt / "output").mkdir(parents=True)
        for file in ["request.json"] + ["progress.json"] * beats + ["reply.json"] * reply:
            (attempt / file).write_text("{}")
        for path in (attempt / "request.json", attempt):
            os.utime(path, (long_ago, long_ago))
    with busy.lock():
        [what] = todo(checks.folders([idle, busy], fix=False))
        assert "placed-queued: placed on another worker" in what
        assert todo(checks.folders([idle, busy], fix=True)) == []
    assert {name: path.exists() for name, path in made.items()} == {n: n != "queued" for n in made}


def test_a_flow_run_that_stays_pending_is_scheduled_again(
    folder: Path, prefect_api: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its worker died before it had started a process: nothing else ends it, and it holds its deployment's slot."""
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.actions import WorkPoolCreate
    from prefect.exceptions import ObjectAlreadyExists
    from prefect.states import Pending

    monkeypatch.setenv("PREFECT_API_URL", prefect_api)
    with SyncPrefectClient(prefect_api) as client:
        with contextlib.suppress(ObjectAlreadyExists):
            client.create_work_pool(WorkPoolCreate(name=POOL, type="process"))
        flow = client.create_flow_from_name(f"pending-{os.getpid()}")
        here = client.create_deployment(flow, "here", work_pool_name=POOL, entrypoint="flows/none.py:none")
        elsewhere = client.create_deployment(flow, "elsewhere", entrypoint="flows/none.py:none")
        runs = {name: client.create_flow_run_from_deployment(of).id for name, of in [("a", here), ("b", elsewhere)]}
        for flow_run in runs.values():
            client.set_flow_run_state(flow_run, Pending())
        told = [finding.what for finding in server.server([], fix=True)]
        assert not any(str(flow_run) in what for what in told for flow_run in runs.values()), "just taken"
        monkeypatch.setattr(server, "_STARTING_SECONDS", 0.0)
        told = [finding.what for finding in server.server([], fix=False)]
        assert [str(runs["a"]) in what and "is pending" in what for what in told].count(True) == 1
        assert not any(str(runs["b"]) in what for what in told), "of another pool"
        assert all(finding.repaired for finding in server.server([], fix=True) if str(runs["a"]) in finding.what)
        states = {name: client.read_flow_run(flow_run).state for name, flow_run in runs.items()}
        assert {name: state.name for name, state in states.items() if state} == {"a": "AwaitingRetry", "b": "Pending"}


@pytest.fixture
def client(prefect_api: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    from prefect.client.orchestration import SyncPrefectClient

    monkeypatch.setenv("PREFECT_API_URL", prefect_api)
    with SyncPrefectClient(prefect_api) as made:
        yield made


def test_only_what_is_dead_is_set_to_crashed(folder: Path, client: Any, dead_pid: int) -> None:
    """Not what a worker has resumed meanwhile, nor what is about to say how it ended, nor a placed stage at work."""
    from prefect.states import AwaitingRetry, Running

    run, flow = store(folder, "run"), client.create_flow_from_name(f"dying-{os.getpid()}")
    deployment = client.create_deployment(flow, "of-run", entrypoint="flows/none.py:none")
    started = {name: client.create_flow_run_from_deployment(deployment).id for name in ("dead", "resumed", "ending")}
    placed = client.create_flow_run_from_deployment(deployment, parameters={"attempt": "placed-1"}).id
    for flow_run in [*started.values(), placed]:
        client.set_flow_run_state(flow_run, Running(), force=True)
    lines = [
        {"pid": pid, "host": platform.node(), "began_at": time.time(), "flow_run": str(started[name])}
        for name, pid in (("dead", dead_pid), ("resumed", dead_pid), ("ending", os.getpid()))
    ]
    (run.path / "attempts.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    flows, _ = server._zombies(client, [run])
    assert {flow.id for flow in flows} == {started["dead"], started["resumed"]}
    client.set_flow_run_state(started["resumed"], AwaitingRetry())
    server._runs(client, flows, [], fix=True)
    states = {name: client.read_flow_run(flow_run).state.name for name, flow_run in started.items()}
    assert states == {"dead": "Crashed", "resumed": "AwaitingRetry", "ending": "Running"}


@pytest.fixture
def sleepers(folder: Path, dead_pid: int) -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    """Processes that carry the mark of a child: with a dead parent, with a living one, and of another project."""

    def sleeper(parent: int, home: str) -> subprocess.Popen[bytes]:
        env = {**os.environ, MARK: "mark", PARENT: str(parent), "PREFECT_HOME": home}
        return subprocess.Popen(["sleep", "300"], env=env)

    home = os.environ["PREFECT_HOME"]
    made = {"dead": sleeper(dead_pid, home), "alive": sleeper(os.getpid(), home), "other": sleeper(dead_pid, "/other")}
    yield made
    for process in made.values():
        process.kill()
        process.wait()


def test_orphans_of_this_project_only(sleepers: dict[str, subprocess.Popen[bytes]]) -> None:
    deadline = time.monotonic() + 5
    while not todo(checks.processes(fix=False)) and time.monotonic() < deadline:
        time.sleep(0.01)  # the kernel shows the new environment only after exec
    (what,) = todo(checks.processes(fix=False))
    assert what == f"{sleepers['dead'].pid} has outlived its run: sleep 300"
    assert todo(checks.processes(fix=True)) == []
    assert sleepers["dead"].wait(5) == -signal.SIGKILL
    assert sleepers["alive"].poll() is None and sleepers["other"].poll() is None


def test_disk_that_does_not_hold_the_next_checkpoint(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest checkpoint of any run counts, against what is free where the runs are."""
    for name, size in (("small", 1_000), ("large", 5_000_000)):
        checkpoint = store(folder, name).path / "iterations/0000/train/abc"
        checkpoint.mkdir(parents=True)
        (checkpoint / "model.safetensors").write_bytes(bytes(size))
    found = checks.disk(doctor.known_stores())
    assert todo(found) == [] and "checkpoints of large" in found[-1].what
    usage = shutil.disk_usage(folder)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=4_999_999))
    (what,) = todo(checks.disk(doctor.known_stores()))
    assert "a checkpoint of large takes" in what


def test_a_prefect_database_that_has_grown(folder: Path) -> None:
    """Events go after a week, flow runs do not; the journal beside the database counts too."""
    assert not any("database" in finding.what for finding in checks.disk([])), "there is none"
    (folder / "home").mkdir()
    for name, size in (("prefect.db", 4_000_000_000), ("prefect.db-wal", 1_100_000_000)):
        with (folder / "home" / name).open("wb") as file:
            file.truncate(size)  # takes no room
        found = checks.disk([])
        assert len(todo(found)) == (name == "prefect.db-wal")
    assert todo(found) == ["the Prefect database has 5.10 GB"] and "DB_VACUUM" in found[0].todo


def test_which_attempts_are_over(folder: Path) -> None:
    """All but the last; the last too when nobody holds the lock. One flow run may have made several attempts."""
    run = store(folder, "run")
    assert attempts.past(run) == attempts.Past({}, [], 0.0)
    ids = ["a", "b", "a", None, "c"]
    lines = [f'{{"pid": 1, "host": "h", "began_at": {n}, "flow_run": "{i}"}}' for n, i in enumerate(ids)]
    (run.path / "attempts.jsonl").write_text("\n".join(lines).replace('"None"', "null") + "\n")
    before = time.time()
    over = attempts.past(run)
    assert over.flow_runs == {"a": 2.0, "b": 1.0, "c": 4.0}
    assert before <= over.until <= time.time()
    with run.lock():
        assert attempts.past(run) == attempts.Past({"a": 2.0, "b": 1.0}, ["a", "b", "c"], 4.0)
    assert attempts.past(run).flow_runs == over.flow_runs, "looking must not take the lock"


LOOKER = "import sys; from tasks import attempts; from tasks.storage.store import RunStore; from pathlib import Path\n"
LOOKER += "while True: attempts.is_worked_on(RunStore(Path(sys.argv[1]), 'run'))"


@pytest.mark.slow
def test_looking_at_a_lock_refuses_nobody(folder: Path) -> None:
    """A run that starts while somebody looks is not told that the run is in use."""
    run = store(folder, "run")
    (run.path / "lock").touch()
    looker = subprocess.Popen([sys.executable, "-c", LOOKER, str(folder / "runs")])
    try:
        time.sleep(1)
        for _ in range(500):
            with run.lock():
                pass
        assert looker.poll() is None
    finally:
        looker.kill()
        looker.wait()


@pytest.mark.slow
def test_a_killed_run_is_cleared_and_a_living_one_beside_it_is_not(project: Any) -> None:
    """Slot, flow and task runs, half-written output and MLflow run of the dead; everything of the living goes on."""
    api = project.env["PREFECT_API_URL"]
    limit = {"name": "tag:doctor", "limit": 3, "active": True}
    httpx.post(f"{api}/v2/concurrency_limits/", json=limit).raise_for_status()
    tags = ["--set", "iterations=4", "--set", 'execution.tags={train=["doctor"]}', "--set", "learner.update_epochs=60"]
    runs: dict[str, Any] = {}
    try:
        for name in ("alive", "dead"):
            process = runs[name] = project.start("run", "smoke", "--set", f"name={name}", *tags)
            deadline = time.monotonic() + 300
            while not (project.run_folder(name) / "slot.json").exists():
                assert process.poll() is None and time.monotonic() < deadline
                time.sleep(0.01)
        os.killpg(runs["dead"].pid, signal.SIGKILL)
        runs["dead"].communicate()
        # A slot that was counted and got no lease: its server died in between.
        body = {"names": ["tag:doctor"], "slots": 1, "mode": "concurrency"}
        httpx.post(f"{api}/v2/concurrency_limits/increment", json=body).raise_for_status()

        output = project.call("doctor", expect=1)
        lines = [line for line in output.splitlines() if line.startswith("wrong")]
        assert not any("alive" in line for line in lines), output
        kinds = [line.split()[1] for line in lines]
        assert kinds.count("slot") == 2 and {"flow", "task", "folder", "mlflow"} <= set(kinds), output
        output = project.call("doctor", "--fix")
        repaired = {line.split()[1] for line in output.splitlines() if line.startswith("repaired")}
        assert repaired >= {"slot", "flow", "task", "folder", "mlflow"} and "all is well" in output, output
        assert "wrong" not in project.call("doctor")

        runs["alive"].communicate(timeout=240)
        assert runs["alive"].returncode == 0
        found = httpx.post(f"{api}/flow_runs/filter", json={"flow_runs": {"name": {"any_": ["alive", "dead"]}}}).json()
        assert {run["name"]: run["state_type"] for run in found} == {"alive": "COMPLETED", "dead": "CRASHED"}
        assert httpx.get(f"{api}/v2/concurrency_limits/tag:doctor").json()["active_slots"] == 0
        assert "wrong" not in project.call("doctor")
    finally:
        for process in runs.values():
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            if not process.stdout.closed:
                process.communicate()
        httpx.delete(f"{api}/v2/concurrency_limits/tag:doctor").raise_for_status()

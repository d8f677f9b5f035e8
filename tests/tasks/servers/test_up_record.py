"""What `up` started is found by its mark, and nothing else is ever signalled."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tasks.servers.up_record import MARK, UP_FILE, UpRecord, read_record, start_ticks

SLEEP = "import time; time.sleep(60)"
# Ignores SIGTERM, and has a child in a session of its own whose parent has ended.
STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
command = [sys.executable, "-c", "import time; time.sleep(60)"]
if os.fork() == 0:
    subprocess.Popen(command, start_new_session=True)
    os._exit(0)
os.wait()
print("ready", flush=True)
time.sleep(60)
"""


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> UpRecord:
    monkeypatch.chdir(tmp_path)
    UP_FILE.parent.mkdir()
    made = UpRecord("http://api", "http://mlflow", uuid.uuid4().hex, os.getpid(), start_ticks(os.getpid()))
    return made.write()


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[str]]]:
    found: list[subprocess.Popen[str]] = []
    yield found
    for process in found:
        process.kill()
        process.communicate()


def start(started: list[subprocess.Popen[str]], code: str, env: dict[str, str]) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", code]
    started.append(subprocess.Popen(command, env=os.environ | env, stdout=subprocess.PIPE, text=True))
    return started[-1]


def test_record_survives_as_it_was_written(record: UpRecord) -> None:
    assert read_record() == record
    changed = record.write(ready=True, pid=None, started=None)
    assert read_record() == changed and changed.ready and changed.mark == record.mark


def test_end_takes_all_that_carries_the_mark_and_nothing_else(
    record: UpRecord, started: list[subprocess.Popen[str]]
) -> None:
    """One that ignores SIGTERM, an orphan in its own session; not the one of another `up`, nor one without a mark."""
    worker = start(started, SLEEP, record.environment("worker"))
    stubborn = start(started, STUBBORN, record.environment("servers"))
    other = start(started, SLEEP, {MARK: f"{uuid.uuid4().hex}/servers"})
    plain = start(started, SLEEP, {})
    assert stubborn.stdout is not None and stubborn.stdout.readline() == "ready\n"
    deadline = time.monotonic() + 10
    while len(record.processes("servers")) != 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert set(record.processes("worker")) == {worker.pid}
    assert len(record.processes("servers")) == 2 and len(record.processes()) == 3
    record.end(patience_seconds=0.5)
    assert record.processes() == {}
    assert worker.wait(5) == -signal.SIGTERM and stubborn.wait(5) == -signal.SIGKILL
    assert other.poll() is None and plain.poll() is None
    assert read_record() is None


def test_a_process_id_that_was_given_away_is_not_the_owner(
    record: UpRecord, started: list[subprocess.Popen[str]]
) -> None:
    """Same id, other start: the process that waits for Ctrl-C is gone, whoever has its id now."""
    process = start(started, SLEEP, {})
    ticks = start_ticks(process.pid)
    assert ticks is not None
    assert record.write(pid=process.pid, started=ticks).owner_lives()
    assert not record.write(pid=process.pid, started=ticks - 1).owner_lives()
    assert not record.write(pid=None, started=None).owner_lives()
    process.kill()
    process.wait()
    assert start_ticks(process.pid) is None and not record.write(pid=process.pid, started=ticks).owner_lives()

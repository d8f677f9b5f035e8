"""What `rlstages up` refuses before it starts anything, and what its servers inherit."""

from __future__ import annotations

import io
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from rl_core.errors import ConfigError, RunError
from tasks.servers.local import _alone, running_api, stop, up
from tasks.servers.processes import UpOptions
from tasks.servers.up_record import UP_FILE, UpRecord

# Prints what a child of a process that ignores `number` does with SIGINT, before and after `_answer_signals`.
IGNORED = """
import signal, subprocess, sys
from tasks.servers.local import _answer_signals
signal.signal(signal.SIGINT, signal.SIG_IGN)
ask = [sys.executable, "-c", "import signal; print(signal.getsignal(signal.SIGINT) == signal.SIG_IGN, flush=True)"]
subprocess.run(ask)
_answer_signals()
subprocess.run(ask)
signal.raise_signal(signal.SIGINT)
print("still here", flush=True)
signal.raise_signal(signal.SIGTERM)
print("not reached")
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (UpOptions(limits=["train"]), "tag=slots"),
        (UpOptions(database_url="mysql://somewhere"), "--database-url"),
        (UpOptions(database_url="postgresql://somewhere"), "--database-url"),
        (UpOptions(host="my machine"), "--host"),
    ],
)
def test_wrong_options_start_nothing(folder: Path, options: UpOptions, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        up(Console(file=io.StringIO()), options)
    assert list(folder.iterdir()) == []


def test_a_taken_port_is_told_before_anything_starts() -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(RunError, match=f"port {port} "):
            up(Console(file=io.StringIO()), UpOptions(prefect_port=port))
    assert not UP_FILE.exists() and running_api() is None
    assert {number: signal.getsignal(number) for number in before} == before


def test_two_at_a_time_are_refused(folder: Path) -> None:
    UP_FILE.parent.mkdir()
    with _alone(), pytest.raises(RunError, match="up already"):
        up(Console(file=io.StringIO()), UpOptions())


def test_stop_forgets_servers_that_are_gone_and_says_so_where_there_are_none() -> None:
    out = io.StringIO()
    stop(Console(file=out))
    assert out.getvalue() == "nothing is up in this folder\n"
    UP_FILE.parent.mkdir()
    UpRecord("http://127.0.0.1:1/api", "http://127.0.0.1:1", "no-such-mark", None, None, ready=True).write()
    assert running_api() is None
    stop(Console(file=out))
    assert not UP_FILE.exists()


def test_servers_do_not_inherit_ignored_signals() -> None:
    """Below `&` of a script SIGINT is ignored: `up` leaves it without effect, the worker must hear it all the same."""
    env = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[3])}
    result = subprocess.run([sys.executable, "-c", IGNORED], env=env, capture_output=True, text=True, timeout=60)
    assert result.stdout.split("\n") == ["True", "False", "still here", ""], result.stderr
    assert result.returncode == 143

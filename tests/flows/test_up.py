"""`rlstages up`: both servers answer, the deployments are there, and nothing is left when it is stopped."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

pytestmark = pytest.mark.slow


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def session_members(folder: Path) -> list[int]:
    """Living processes that were started in a folder."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and (entry / "cwd").readlink() == folder:
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                found += [int(entry.name)] if state != "Z" else []
        except OSError:
            continue
    return found


def test_up_serves_until_it_is_stopped(project: Any) -> None:
    project.env.pop("PREFECT_API_URL")
    prefect, mlflow = free_port(), free_port()
    ports = ["--prefect-port", str(prefect), "--mlflow-port", str(mlflow)]
    process = project.start("up", *ports)
    up_file = project.folder / ".state" / "up.json"
    deadline = time.monotonic() + 240
    while not up_file.exists():
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()[0]
        time.sleep(0.2)
    try:
        addresses = json.loads(up_file.read_text())
        assert addresses["prefect_api"] == f"http://127.0.0.1:{prefect}/api"
        found = httpx.post(f"{addresses['prefect_api']}/deployments/filter", json={}).json()
        assert {deployment["name"] for deployment in found} == {"train", "rerun", "evaluate"}
        assert httpx.get(f"{addresses['mlflow']}/health").text == "OK"
        assert "up already" in project.call("up", *ports, expect=2)
    finally:
        os.kill(process.pid, signal.SIGTERM)
        output, _ = process.communicate(timeout=60)
    assert "Traceback" not in output
    assert not up_file.exists()
    deadline = time.monotonic() + 10
    while session_members(project.folder) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert session_members(project.folder) == []

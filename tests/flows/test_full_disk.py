"""A disk that is full again and again: the run says so and what to do, and goes on as soon as there is room."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow
FULL_IN = {12: "base/evaluate", 200: "0000/train", 1500: "0001/train"}
"""Size of the disk in KiB, and the stage that does not fit."""


def mount(folder: Path, kib: int, *, again: bool = False) -> bool:
    options = f"{'remount,' if again else ''}size={kib}k"
    return not subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], capture_output=True
    ).returncode


@pytest.fixture
def runs(project: Any) -> Iterator[Path]:
    """The folder of runs, on a file system of its own."""
    folder: Path = project.folder / "runs"
    folder.mkdir()
    if shutil.which("mount") is None or not mount(folder, min(FULL_IN)):
        pytest.skip("mounting is refused here; tests/tasks/storage/test_store_full_disk.py covers the same errors")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_disk_full_during_publish(project: Any, runs: Path, quiet_smoke: dict[str, str]) -> None:
    """C63: what is finished stays and is not made again, and the end is byte for byte that of a run with room."""
    published: dict[Path, int] = {}
    for kib, where in FULL_IN.items():
        assert mount(runs, kib, again=True)
        output = "".join(project.call("run", "smoke", expect=1).replace("│", "").split())
        assert "StorageError" in output and "Traceback" not in output
        assert f"cannotwritebelow{runs}/smoke/iterations/{where}/" in output, output
        assert "Nospaceleftondevice" in output and "todofreesomespaceandrunagain" in output
        assert {path: path.stat().st_mtime_ns for path in published} == published
        manifests = runs.glob("smoke/iterations/*/*/*/manifest.json")
        published = {path: path.stat().st_mtime_ns for path in manifests if ".partial-" not in path.parent.name}
        assert project.workers() == []
        assert "smoke" in project.call("status", "smoke"), "a run can be looked at while the disk is full"
    assert len(published) == 10, "base evaluation, six stages of the first iteration, three of the second"
    assert mount(runs, 64 * 1024, again=True)
    project.call("run", "smoke")
    assert {path: path.stat().st_mtime_ns for path in published} == published
    assert project.digests("smoke") == quiet_smoke
    assert list(runs.rglob("*.partial-*")) == []

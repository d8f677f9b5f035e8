"""The run folder under fire: killed processes, two processes at once, a reader beside the writer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from rl_core.errors import RunError
from rl_core.manifest import Manifest, content_digest
from rl_core.schemas import TRAIN_STEPS
from tasks.storage.files import describe, read_manifest
from tasks.storage.store import RunStore
from tasks.storage.tables import read_table, write_table

PRINT = "0123456789abcdef" * 4

# A process that writes the output of a stage and is killed at one point of it. The points are reached by letting the
# process kill itself where a call begins or ends; everything it did before that is what the kernel keeps of it.
WRITER = """
import json, os, signal, sys
from pathlib import Path
import tasks.storage.files as module
from tasks.storage.files import describe
from tasks.storage.store import RunStore
from rl_core.manifest import Manifest, content_digest

runs, point, fingerprint = Path(sys.argv[1]), sys.argv[2], sys.argv[3]

def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)

def half(data, file, **options):
    file.write(json.dumps(data)[:40])
    file.flush()
    die()

rename, publish_folder = Path.rename, module.publish_folder
store = RunStore(runs, "r")
with store.lock():
    store.sweep()
    partial = store.begin(0, "train", fingerprint)
    if point == "empty folder":
        die()
    (partial / "part-0000.parquet").write_bytes(b"a" * 1000)
    with (partial / "model.safetensors").open("wb") as file:
        file.write(b"b" * 70_000)
        file.flush()
        if point == "mid file":
            die()
        file.write(b"b" * 30_000)
    if point == "between two files":
        die()
    (partial / "trainer").mkdir()
    (partial / "trainer" / "state.json").write_text("{}")
    files = describe(partial)
    manifest = Manifest(run="r", iteration=0, stage="train", stage_version=1, fingerprint=fingerprint, identity={},
                        seed_key=[0, 0], inputs={}, digest=content_digest(files), files=files, rows=1)
    if point == "before the manifest":
        die()
    if point == "mid manifest":
        module.json.dump = half
    if point == "before the rename":
        Path.rename = die
    if point == "after the rename":
        module._sync_entry = die
    folder, _, _ = store.publish(partial, manifest)
    record = {"complete": True, "stages": {"train": {"folder": folder.relative_to(store.path).as_posix()}}}
    if point == "mid record":
        module.json.dump = half
    if point == "before the record is replaced":
        Path.replace = die
    store.write_iteration(0, record)
"""
BEFORE = ["empty folder", "mid file", "between two files", "before the manifest", "mid manifest", "before the rename"]
AFTER = ["after the rename", "mid record", "before the record is replaced"]


def write_and_die(runs: Path, point: str, fingerprint: str = PRINT) -> None:
    done = subprocess.run([sys.executable, "-c", WRITER, str(runs), point, fingerprint], timeout=60)
    assert done.returncode == (0 if point == "never" else -signal.SIGKILL)


def partials(runs: Path) -> list[str]:
    return sorted(path.name for path in runs.rglob("*.partial-*"))


@pytest.mark.slow
@pytest.mark.parametrize("point", [*BEFORE, *AFTER])
def test_after_a_kill_exactly_the_complete_output_is_there(tmp_path: Path, point: str) -> None:
    """C62, C75: an attempt killed anywhere leaves all or nothing, is swept, and hinders neither lock nor retry."""
    earlier = PRINT[::-1]
    write_and_die(tmp_path, "never", earlier)
    write_and_die(tmp_path, point)
    store = RunStore(tmp_path, "r")
    left = partials(tmp_path)
    assert (left != []) == (point != "after the rename")
    with store.lock():
        before = store.find(0, "train", PRINT)
        swept = store.sweep()
        assert {path.name for path in swept} <= set(left)
        assert partials(tmp_path) == []
        found = store.find(0, "train", PRINT)
        assert (found is not None) == (before is not None) == (point in AFTER)
        kept = store.find(0, "train", earlier)
        assert kept is not None
        record = store.iteration(0)
        assert record == {"complete": True, "stages": {"train": {"folder": f"iterations/0000/train/{earlier[:12]}"}}}
    assert not (store.path / "damaged").exists()
    write_and_die(tmp_path, "never")
    with store.lock():
        again = store.find(0, "train", PRINT)
        assert again is not None and content_digest(describe(again[0])) == kept[1].digest
        assert found is None or again == found
        record = store.iteration(0)
        assert record is not None and record["stages"]["train"]["folder"] == f"iterations/0000/train/{PRINT[:12]}"
    folders = sorted(path.name for path in (store.iteration_dir(0) / "train").iterdir())
    assert folders == sorted([PRINT[:12], earlier[:12]])


def publish(store: RunStore, shards: list[int], fingerprint: str = PRINT) -> tuple[Path, Manifest, bool]:
    """Publish a table of `sum(shards)` rows in that many files."""
    partial = store.begin(0, "train", fingerprint)
    number = 0
    for index, rows in enumerate(shards):
        table = [{"step": number + i, "applied": True, "metric": "m" * 40, "value": i / 7} for i in range(rows)]
        write_table(partial / f"part-{index:04d}.parquet", table, TRAIN_STEPS)
        number += rows
    files = describe(partial)
    manifest = Manifest(
        run="r",
        iteration=0,
        stage="train",
        stage_version=1,
        fingerprint=fingerprint,
        identity={},
        seed_key=[0, 0],
        inputs={},
        digest=content_digest(files),
        files=files,
        rows=number,
    )
    return store.publish(partial, manifest)


def test_a_retry_with_fewer_shards_holds_exactly_its_own_rows(tmp_path: Path) -> None:
    """C75: the attempt before died in the middle of shard 1 of 3, in another process and in this one."""
    store = RunStore(tmp_path, "r")
    for pid in (2**22 + 1, os.getpid()):
        dead = store.begin(0, "train", PRINT).with_name(f"{PRINT[:12]}.partial-{pid}")
        dead.mkdir(exist_ok=True)
        write_table(dead / "part-0000.parquet", [{"step": 9, "applied": True, "metric": "m"}], TRAIN_STEPS)
        (dead / "part-0001.parquet").write_bytes((dead / "part-0000.parquet").read_bytes()[:-100])
    folder, manifest, new = publish(store, [3, 2])
    assert new
    assert [file.name for file in manifest.files] == ["part-0000.parquet", "part-0001.parquet"]
    assert read_table(folder, TRAIN_STEPS).column("step").to_pylist() == [0, 1, 2, 3, 4]
    assert [path.name for path in store.sweep()] == [f"{PRINT[:12]}.partial-{2**22 + 1}"]
    assert read_manifest(folder) == manifest


def test_a_reader_beside_the_writer_sees_whole_outputs_only(tmp_path: Path) -> None:
    """C75: whatever has a final name can be read to the last row at any moment."""
    store, stop, seen = RunStore(tmp_path, "r"), threading.Event(), set()
    mistakes: list[str] = []

    def read() -> None:
        while not stop.is_set():
            for folder in (store.iteration_dir(0) / "train").glob("*"):
                if ".partial-" not in folder.name:
                    manifest = read_manifest(folder)
                    rows = read_table(folder, TRAIN_STEPS).num_rows if manifest else None
                    seen.add(folder.name)
                    if manifest is None or rows != manifest.rows:
                        mistakes.append(f"{folder.name}: {rows}")

    thread = threading.Thread(target=read)
    thread.start()
    try:
        for count in range(1, 16):
            publish(store, [count, count], fingerprint=f"{count:064x}"[::-1])
    finally:
        stop.set()
        thread.join()
    assert mistakes == []
    assert len(seen) > 1


HOLDER = """
import sys, time
from pathlib import Path
from tasks.storage.store import RunStore
with RunStore(Path(sys.argv[1]), "r").lock():
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.mark.slow
def test_a_second_process_is_refused_by_pid_until_the_first_is_dead(tmp_path: Path) -> None:
    """Two runs of one name at once: the kernel frees the lock of a killed process, so nothing has to be deleted."""
    store = RunStore(tmp_path, "r")
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE) as holder:
        try:
            assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
            with pytest.raises(RunError, match="run 'r' is in use") as caught, store.lock():
                raise AssertionError("two processes hold one lock")
            assert caught.value.got == f"process {holder.pid} holds it"
            with RunStore(tmp_path, "s").lock():
                pass
        finally:
            holder.kill()
    with store.lock():
        assert (store.path / "lock").read_text() == str(os.getpid())
        with pytest.raises(RunError, match=r"in use"), store.lock():
            raise AssertionError("one process holds a lock twice")
    with store.lock():
        pass

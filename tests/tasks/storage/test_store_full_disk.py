"""A full disk fails the attempt with the folder's name; what was complete stays, and the retry succeeds."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from rl_core.config import RunConfig
from rl_core.errors import StorageError
from rl_core.manifest import Manifest, Ref, content_digest
from rl_core.recipes import build_config
from rl_core.schemas import TRAIN_STEPS
from tasks.storage.files import describe, storage_errors, write_json
from tasks.storage.store import RunStore
from tasks.storage.tables import write_table

PRINT = "0123456789abcdef" * 4


def partials(runs: Path) -> list[str]:
    return sorted(path.name for path in runs.rglob("*.partial-*"))


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


def _config(**changes: Any) -> RunConfig:
    base = {"name": "r", "model": {"source": "m"}, "environment": {"kind": "k"}, "rewards": [{"function": "f"}]}
    return build_config(base | changes, "test")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB of its own."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting is refused here; the tests with /dev/full cover the same errors")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def fill(disk: Path, leave: int) -> Path:
    filler = disk / "filler"
    filler.write_bytes(b"x" * max(0, shutil.disk_usage(disk).free - leave))
    return filler


def noise(count: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(0).standard_normal(count, dtype=np.float32)


def test_a_full_disk_fails_the_attempt_and_nothing_else(small_disk: Path) -> None:
    """C63: the second of two checkpoint files does not fit; the old output stays and the retry succeeds."""
    store = RunStore(small_disk, "r")
    store.create(_config(), Ref(path="p", digest="d"), "")
    old = publish(store, [50], fingerprint=PRINT[::-1])
    store.write_iteration(0, {"complete": True, "stages": {}})
    filler = fill(small_disk, leave=256 * 1024)
    partial = store.begin(0, "train", PRINT)
    with (
        pytest.raises(StorageError, match=f"cannot write below {partial}: No space left") as caught,
        storage_errors(partial),
    ):
        save_file({"w": noise(40_000)}, partial / "model.safetensors")
        save_file({"w": noise(40_000)}, partial / "optimizer.safetensors")
    assert "MiB free" in caught.value.got
    assert caught.value.retryable
    rows = [{"step": i, "applied": True, "metric": f"{value}", "value": value} for i, value in enumerate(noise(40_000))]
    with pytest.raises(StorageError), storage_errors(partial):
        write_table(partial / "part-0000.parquet", rows, TRAIN_STEPS)
    assert not (partial / "part-0000.parquet").exists()
    assert store.find(0, "train", PRINT) is None
    assert store.find(0, "train", PRINT[::-1]) == old[:2]
    store.sweep()
    filler.unlink()
    assert publish(store, [50])[2]
    assert store.iteration(0) == {"complete": True, "stages": {}}


def test_a_disk_without_a_single_free_byte_is_reported_by_every_way_to_write(small_disk: Path) -> None:
    """C63: the record that is there stays whole, and no temporary file is left."""
    store = RunStore(small_disk, "r")
    store.create(_config(), Ref(path="p", digest="d"), "1")
    before = (store.path / "run.json").read_bytes()
    filler = fill(small_disk, leave=0)
    with pytest.raises(StorageError, match="No space left"):
        store.create(_config(), Ref(path="p", digest="e"), "2")
    with pytest.raises(StorageError, match="No space left"), store.lock():
        raise AssertionError("locked without room for the holder's name")
    assert (store.path / "run.json").read_bytes() == before
    assert partials(small_disk) == []
    filler.unlink()
    with store.lock():
        store.create(_config(), Ref(path="p", digest="e"), "2")
    assert store.base_model().digest == "e"


def test_a_write_that_the_kernel_refuses_leaves_no_output(tmp_path: Path) -> None:
    """C63: /dev/full refuses every byte with ENOSPC, for a table, a record and the manifest; then there is room."""
    store, full = RunStore(tmp_path, "r"), Path("/dev/full")
    store.iteration_dir(0).mkdir(parents=True)
    record = store.iteration_dir(0) / "iteration.json"
    write_json(record, {"old": 1, "stages": {}})
    partial = store.begin(0, "train", PRINT)
    (partial / "part-0000.parquet").symlink_to(full)
    with pytest.raises(StorageError, match="No space left"), storage_errors(partial):
        write_table(partial / "part-0000.parquet", [{"step": 1, "applied": True, "metric": "m"}], TRAIN_STEPS)
    record.with_name(f"iteration.json.partial-{os.getpid()}").symlink_to(full)
    with pytest.raises(StorageError, match=f"cannot write below {record}"):
        store.write_iteration(0, {"new": 1})
    assert store.iteration(0) == {"old": 1, "stages": {}}
    (partial / "part-0000.parquet").write_bytes(b"rows")
    files = describe(partial)
    manifest = publish(store, [1], fingerprint=PRINT[::-1])[1].model_copy(
        update={"fingerprint": PRINT, "files": files, "digest": content_digest(files)}
    )
    (partial / f"manifest.json.partial-{os.getpid()}").symlink_to(full)
    with pytest.raises(StorageError, match="No space left"):
        store.publish(partial, manifest)
    assert store.find(0, "train", PRINT) is None
    assert partials(tmp_path) == [partial.name]
    assert store.publish(partial, manifest)[2]
    assert store.find(0, "train", PRINT) is not None


def test_other_errors_of_the_system_pass_unchanged(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), storage_errors(tmp_path):
        (tmp_path / "gone" / "file").write_bytes(b"")

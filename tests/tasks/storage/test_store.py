"""The run folder: a folder under its final name is complete, one output has one folder, damage is never read."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rl_core.errors import CorruptOutputError
from rl_core.manifest import Manifest, Ref, content_digest
from tasks.storage.files import describe, read_manifest, verify
from tasks.storage.store import RunStore

PRINT = "0123456789abcdef" * 4
FILES = {"part-0000.parquet": b"rows" * 100, "trainer/state.json": b"{}"}


@pytest.fixture
def store(tmp_path: Path) -> RunStore:
    store = RunStore(tmp_path, "r")
    store.iteration_dir(3).mkdir(parents=True)
    return store


def attempt(store: RunStore, files: dict[str, bytes], fingerprint: str = PRINT) -> tuple[Path, Manifest]:
    """What a stage leaves behind when its work is done and nothing is published yet."""
    partial = store.begin(3, "train", fingerprint)
    for name, content in files.items():
        (partial / name).parent.mkdir(exist_ok=True)
        (partial / name).write_bytes(content)
    entries = describe(partial)
    manifest = Manifest(
        run="r",
        iteration=3,
        stage="train",
        stage_version=1,
        fingerprint=fingerprint,
        identity={"lr": 1e-6, "text": "ü \u202e"},
        seed_key=[7, 3],
        inputs={"policy": Ref(path="p", digest="d")},
        digest=content_digest(entries),
        files=entries,
        rows=1,
        metrics={"learner/loss": None},
    )
    return partial, manifest


def publish(store: RunStore, files: dict[str, bytes] = FILES, fingerprint: str = PRINT) -> tuple[Path, Manifest, bool]:
    return store.publish(*attempt(store, files, fingerprint))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_published_output_is_found_with_its_manifest(store: RunStore) -> None:
    partial, manifest = attempt(store, FILES)
    folder, published, new = store.publish(partial, manifest)
    assert (folder.name, new, published) == (PRINT[:12], True, manifest)
    assert not partial.exists()
    assert store.find(3, "train", PRINT) == (folder, manifest)
    assert {path: (folder / path).read_bytes() for path in FILES} == FILES
    assert [(e.name, e.bytes) for e in manifest.files] == [("part-0000.parquet", 400), ("trainer/state.json", 2)]
    verify(folder, manifest.digest)
    assert store.find(3, "train", PRINT.replace("f", "e")) is None
    assert store.find(2, "train", PRINT) is None


def test_the_digest_is_of_names_and_contents_only(store: RunStore, tmp_path: Path) -> None:
    before = describe(publish(store)[0])
    other = tmp_path / "elsewhere"
    for name in reversed(FILES):
        (other / name).parent.mkdir(parents=True, exist_ok=True)
        (other / name).write_bytes(FILES[name])
    assert describe(other) == before
    (other / "manifest.json").write_text("the record of the files is not one of them")
    assert content_digest(describe(other)) == content_digest(before)
    (other / "trainer" / "manifest.json").write_text("deeper down it is a file like others")
    assert content_digest(describe(other)) != content_digest(before)


def test_an_equal_output_leaves_the_old_folder_untouched(store: RunStore) -> None:
    folder, manifest, _ = publish(store)
    before = {path: path.stat().st_mtime_ns for path in [folder, *folder.rglob("*")]}
    partial, again = attempt(store, FILES)
    assert store.publish(partial, again) == (folder, manifest, False)
    assert {path: path.stat().st_mtime_ns for path in [folder, *folder.rglob("*")]} == before
    assert names(folder.parent) == [PRINT[:12]]


def test_a_different_output_of_one_fingerprint_lies_beside_the_old_one(store: RunStore) -> None:
    """The newest is taken, beyond -9 too; an older one that comes out again is not written a third time."""
    folders = [publish(store, {"a": bytes([i])})[0] for i in range(11)]
    expected = [PRINT[:12], *(f"{PRINT[:12]}-{i}" for i in range(2, 12))]
    assert [folder.name for folder in folders] == expected
    found = store.find(3, "train", PRINT)
    assert found is not None and found[0] == folders[-1]
    assert publish(store, {"a": bytes([4])})[::2] == (folders[4], False)


def test_the_output_that_the_iteration_is_made_of_goes_before_a_newer_one(store: RunStore) -> None:
    """A rerun that came out like the first execution names the first folder; what follows must not read the second."""
    first, second = (publish(store, {"a": content})[0] for content in (b"1", b"2"))
    store.write_iteration(3, {"stages": {"train": {"folder": first.relative_to(store.path).as_posix()}}})
    found = store.find(3, "train", PRINT)
    assert found is not None and found[0] == first
    (first / "a").unlink()
    found = store.find(3, "train", PRINT)
    assert found is not None and found[0] == second


def test_fingerprints_that_begin_alike_do_not_share_an_output(store: RunStore) -> None:
    other = PRINT[:12] + "0" * 52
    first, second = publish(store), publish(store, fingerprint=other)
    assert (first[0].name, second[0].name) == (PRINT[:12], f"{PRINT[:12]}-2")
    assert store.find(3, "train", PRINT) == first[:2]
    assert store.find(3, "train", other) == second[:2]


# -- damage ------------------------------------------------------------------------------------------------------------


def _rewrite(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        path = folder / name
        stat = path.stat()
        path.write_bytes(change(path.read_bytes()))
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # a copy or a failing disk may keep the old time

    return damage


DAMAGE: dict[str, Callable[[Path], None]] = {
    "truncated by one byte": _rewrite("part-0000.parquet", lambda b: b[:-1]),
    "one byte longer": _rewrite("part-0000.parquet", lambda b: b + b"x"),
    "one byte altered": _rewrite("part-0000.parquet", lambda b: b[:-1] + b"x"),
    "emptied": _rewrite("trainer/state.json", lambda b: b""),
    "a file is missing": lambda folder: (folder / "trainer" / "state.json").unlink(),
    "a file is a folder": lambda folder: [
        (folder / "part-0000.parquet").unlink(),
        (folder / "part-0000.parquet").mkdir(),
    ],
    "a file too many": lambda folder: (folder / "part-0001.parquet").write_bytes(b""),
    "no manifest": lambda folder: (folder / "manifest.json").unlink(),
    "manifest empty": _rewrite("manifest.json", lambda b: b""),
    "manifest cut": _rewrite("manifest.json", lambda b: b[: len(b) // 2]),
    "manifest not UTF-8": _rewrite("manifest.json", lambda b: b.replace(b'"r"', b'"\xff"')),
    "manifest of another form": _rewrite("manifest.json", lambda b: b'{"format": 1}'),
    "manifest of a later format": _rewrite("manifest.json", lambda b: b.replace(b'"format": 1', b'"format": 2')),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=list(DAMAGE))
@pytest.mark.parametrize("seen", [False, True], ids=["unseen", "seen whole before"])
def test_a_damaged_output_is_put_aside_and_never_found(
    store: RunStore, damage: Callable[[Path], None], seen: bool
) -> None:
    """C62 (e), C76: size and content are checked before anything is read; the retry takes the free name."""
    folder, manifest, _ = publish(store)
    if seen:
        assert store.find(3, "train", PRINT) is not None
        time.sleep(0.02)  # a file system's clock moves in steps of some milliseconds
    damage(folder)
    if (folder / "manifest.json").exists() and read_manifest(folder) == manifest:
        with pytest.raises(CorruptOutputError, match=str(folder)):
            verify(folder, manifest.digest)
    assert store.find(3, "train", PRINT) is None
    assert not folder.exists()
    assert names(store.path / "damaged") == [f"0003-train-{PRINT[:12]}"]
    again, _, new = publish(store)
    assert (again, new) == (folder, True)
    assert store.find(3, "train", PRINT) == (folder, manifest)


def test_outputs_damaged_one_after_the_other_are_all_kept(store: RunStore) -> None:
    for _ in range(3):
        (publish(store)[0] / "manifest.json").unlink()
        assert store.find(3, "train", PRINT) is None
    assert len(names(store.path / "damaged")) == 3


def test_damage_found_while_publishing_does_not_stop_it(store: RunStore) -> None:
    folder, manifest, _ = publish(store)
    partial, _ = attempt(store, FILES)
    (folder / "trainer" / "state.json").write_bytes(b"[]")
    assert store.publish(partial, manifest) == (folder, manifest, True)
    assert store.find(3, "train", PRINT) == (folder, manifest)


def test_verify_refuses_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(CorruptOutputError, match="does not hold what its digest says") as caught:
        verify(tmp_path / "gone", "0" * 64)
    assert caught.value.got.startswith("nothing")

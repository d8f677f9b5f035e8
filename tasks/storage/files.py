"""Files below a run folder: digests, atomic replacement, and a full disk that says so."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from safetensors import SafetensorError

from rl_core.errors import CorruptOutputError, StorageError
from rl_core.manifest import MANIFEST_NAME, FileEntry, Manifest, content_digest

_VERIFIED: dict[tuple[str, int, int, int], str] = {}
"""sha256 by (path, bytes, mtime, ctime in ns): a file is hashed once per process as long as it does not change."""


def _sha256(path: Path) -> str:
    stat = path.stat()
    key = (str(path), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
    if key not in _VERIFIED:
        with path.open("rb") as file:
            _VERIFIED[key] = hashlib.file_digest(file, "sha256").hexdigest()
    return _VERIFIED[key]


def describe(folder: Path, but: frozenset[str] = frozenset()) -> list[FileEntry]:
    """Name, size and digest of every file below `folder` but the manifest and those named, sorted by name."""
    found = {p.relative_to(folder).as_posix(): p for p in folder.rglob("*") if p.is_file()}
    names = sorted(found.keys() - but - {MANIFEST_NAME})
    with ThreadPoolExecutor(max_workers=4) as pool:
        digests = list(pool.map(_sha256, (found[name] for name in names)))
    return [
        FileEntry(name=name, bytes=found[name].stat().st_size, sha256=digest)
        for name, digest in zip(names, digests, strict=True)
    ]


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest of an output folder; null when it is missing, unreadable or names a file that is not there whole."""
    try:
        manifest = Manifest.model_validate_json((folder / MANIFEST_NAME).read_bytes())
    except (OSError, ValidationError):
        return None
    for entry in manifest.files:
        path = folder / entry.name
        if entry.name not in manifest.pruned and (not path.is_file() or path.stat().st_size != entry.bytes):
            return None
    return manifest


def folder_digest(folder: Path) -> str:
    """`content_digest` of what lies in a folder; what its manifest says was pruned counts as it was."""
    manifest = read_manifest(folder)
    pruned = frozenset(manifest.pruned) if manifest else frozenset[str]()
    recorded = [entry for entry in manifest.files if entry.name in pruned] if manifest else []
    return content_digest([*describe(folder, but=pruned), *recorded])


def prune_files(folder: Path, names: list[str]) -> int:
    """Remove files of an output and say so in its manifest; returns the bytes gained. May be repeated after a crash.

    The manifest goes first: were it the files, a crash in between would leave an output that looks damaged.
    """
    manifest = read_manifest(folder)
    if manifest is None:
        raise CorruptOutputError(f"{folder} is not complete, so nothing of it is pruned")
    pruned = sorted({*manifest.pruned, *names} & {entry.name for entry in manifest.files})
    if pruned != manifest.pruned:
        changed = manifest.model_copy(update={"pruned": pruned})
        write_json(folder / MANIFEST_NAME, changed.model_dump(mode="json"))
        _sync_entry(folder)
    paths = [path for name in pruned if (path := folder / name).is_file()]
    gained = sum(path.stat().st_size for path in paths)
    for path in paths:
        path.unlink()
    for parent in {path.parent for path in paths} - {folder}:
        if not any(parent.iterdir()):
            parent.rmdir()
    return gained


def restore_files(attempt: Path, folder: Path, manifest: Manifest) -> Manifest:
    """Give an output back what was pruned, out of an equal attempt; returns the manifest it has then.

    Here the files go first: until the manifest says that they are there again, nothing reads them.
    """
    for name in manifest.pruned:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (attempt / name).replace(folder / name)
    _sync(folder)
    whole = manifest.model_copy(update={"pruned": []})
    write_json(folder / MANIFEST_NAME, whole.model_dump(mode="json"))
    return whole


def verify(folder: Path, digest: str) -> None:
    """Raise `CorruptOutputError` unless the files of `folder` are those that `digest` names, pruned ones apart."""
    found = folder_digest(folder) if folder.is_dir() else "nothing there"
    if found != digest:
        raise CorruptOutputError(
            f"{folder} does not hold what its digest says",
            expected=digest[:12],
            got=found[:12],
            todo="rerun the stage that wrote it; a damaged starting model has to be restored",
        )


@contextmanager
def storage_errors(folder: Path) -> Iterator[None]:
    """Turn a full or failing disk into a `StorageError` that names the folder."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        number = _error_number(error)
        if number not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO):
            raise
        free = shutil.disk_usage(_existing(folder)).free
        raise StorageError(
            f"cannot write below {folder}: {os.strerror(number)}",
            got=f"{free / 2**20:,.1f} MiB free",
            todo="free some space and run again; finished stages are kept",
        ) from error


def _error_number(error: OSError | SafetensorError) -> int | None:
    if isinstance(error, OSError):
        return error.errno
    found = re.search(r"\(os error (\d+)\)", str(error))  # safetensors hands the system's error on as text only
    return int(found[1]) if found else None


def _existing(folder: Path) -> Path:
    while not folder.exists():
        folder = folder.parent
    return folder


def write_json(path: Path, data: Any) -> None:
    """Replace a small JSON file atomically."""
    partial = path.with_name(f"{path.name}.partial-{os.getpid()}")
    try:
        with storage_errors(path), partial.open("w", encoding="utf-8") as file:
            json.dump(data, file, indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def iteration_name(iteration: int) -> str:
    """Name of an iteration's folder; -1 is the evaluation of the starting model."""
    return "base" if iteration < 0 else f"{iteration:04d}"


def read_json(path: Path) -> dict[str, Any]:
    try:
        data: dict[str, Any] = json.loads(path.read_bytes())
    except ValueError as error:
        raise CorruptOutputError(f"{path} is not valid JSON", got=str(error), todo="restore the file") from error
    return data


def _sync(folder: Path) -> None:
    for path in [*folder.rglob("*"), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def publish_folder(partial: Path, final: Path) -> None:
    """Make a folder appear under its final name with everything in it on disk."""
    with storage_errors(final):
        _sync(partial)
        partial.rename(final)
        _sync_entry(final.parent)


def _sync_entry(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

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

from safetensors import SafetensorError

from rl_core.errors import CorruptOutputError, StorageError
from rl_core.manifest import MANIFEST_NAME, FileEntry, content_digest

_VERIFIED: dict[tuple[str, int, int, int], str] = {}
"""sha256 by (path, bytes, mtime, ctime in ns): a file is hashed once per process as long as it does not change."""


def _sha256(path: Path) -> str:
    stat = path.stat()
    key = (str(path), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
    if key not in _VERIFIED:
        with path.open("rb") as file:
            _VERIFIED[key] = hashlib.file_digest(file, "sha256").hexdigest()
    return _VERIFIED[key]


def describe(folder: Path) -> list[FileEntry]:
    """Name, size and digest of every file below `folder` but the manifest, sorted by name."""
    manifest = folder / MANIFEST_NAME
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p != manifest)
    with ThreadPoolExecutor(max_workers=4) as pool:
        digests = list(pool.map(_sha256, files))
    return [
        FileEntry(name=path.relative_to(folder).as_posix(), bytes=path.stat().st_size, sha256=digest)
        for path, digest in zip(files, digests, strict=True)
    ]


def verify(folder: Path, digest: str) -> None:
    """Raise `CorruptOutputError` unless the files of `folder` are exactly those that `digest` names."""
    found = content_digest(describe(folder)) if folder.is_dir() else "nothing there"
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
            got=f"{free / 2**20:,.0f} MiB free",
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

"""Something of a run folder that is to be removed, and how: at no moment a whole name on half a folder."""

from __future__ import annotations

import contextlib
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from tasks.storage.files import prune_files


@dataclass(frozen=True)
class Removal:
    """Something to remove.

    Attributes:
        path: a folder, or a file that a dead attempt left.
        bytes: what is gained.
        reason: why nobody needs it.
        files: names inside the folder, where not all of it goes; the folder is an output and stays one.
    """

    path: Path
    bytes: int
    reason: str
    files: tuple[str, ...] = ()


def size(path: Path) -> int:
    """Bytes of a file, or of all files below a folder."""
    total = 0
    for file in path.rglob("*") if path.is_dir() else [path]:
        with contextlib.suppress(OSError):  # it went while we looked
            total += file.lstat().st_size if file.is_file() and not file.is_symlink() else 0
    return total


def take_away(item: Removal) -> None:
    if item.files:
        prune_files(item.path, list(item.files))
    elif item.path.is_dir():
        # Killed halfway, it must not look like an output that lost files.
        going = item.path
        if ".partial-" not in going.name:
            going = item.path.rename(item.path.with_name(f"{item.path.name}.partial-{os.getpid()}"))
        shutil.rmtree(going)
    else:
        item.path.unlink(missing_ok=True)

"""Files of one JSON object a line that survive crashes, and the lock for those that several processes write."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rl_core.errors import CorruptOutputError, StageError
from tasks.storage.files import storage_errors

Entry = dict[str, Any]
_LOCK_SECONDS = 120.0


class Journal:
    """A file that only grows. Of a last line cut short, by a crash or a full disk, nothing is seen by any reader.

    Args:
        path: the file; its folder is made with the first line.
        todo: what to do about a damaged file.
    """

    def __init__(self, path: Path, todo: str) -> None:
        self.path = path
        self._todo = todo

    def read(self) -> list[Entry]:
        """All entries. Any process may read while another one writes. Raises `CorruptOutputError`."""
        try:
            return [json.loads(line) for line in self._whole().splitlines()]
        except ValueError as error:
            raise CorruptOutputError(f"{self.path} is damaged", got=str(error), todo=self._todo) from error

    def append(self, entries: Sequence[Entry]) -> None:
        """Add entries, on disk when this returns. Only one process at a time may do so."""
        lines = "".join(json.dumps(entry, allow_nan=False) + "\n" for entry in entries)
        with storage_errors(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if self._is_cut():
                os.truncate(self.path, len(self._whole()))
            with self.path.open("a", encoding="utf-8") as file:
                file.write(lines)
                file.flush()
                os.fsync(file.fileno())

    def _is_cut(self) -> bool:
        if not self.path.exists() or self.path.stat().st_size == 0:
            return False
        with self.path.open("rb") as file:
            file.seek(-1, os.SEEK_END)
            return file.read(1) != b"\n"

    def _whole(self) -> bytes:
        """The whole lines."""
        content = self.path.read_bytes() if self.path.exists() else b""
        return content[: content.rfind(b"\n") + 1]


@contextmanager
def file_lock(path: Path, patience_seconds: float = _LOCK_SECONDS) -> Iterator[None]:
    """Hold a lock between processes of this machine; the kernel lets go when the holder dies.

    Raises `StageError` when it was not to be had for `patience_seconds`.
    """
    with storage_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a")
    deadline = time.monotonic() + patience_seconds
    with file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() > deadline:
                    raise StageError(
                        f"{path.name} was not free for {patience_seconds:.0f} s", todo="end the process that holds it"
                    ) from error
                time.sleep(0.05)
        yield

"""The run folder: the one place that decides what exists, what is complete and what is garbage.

    runs/<run>/run.json                                   resolved config and the model it starts from
    runs/<run>/iterations/0003/<stage>/<fingerprint12>/   part-*.parquet or checkpoint files, manifest.json
    runs/<run>/iterations/0003/iteration.json             which output of each stage the iteration is made of

A folder under its final name is complete: it is written under `<fingerprint12>.partial-<pid>`, gets its manifest last,
is synced and renamed. A second, different output of one fingerprint gets the suffix `-2`, `-3`, ...
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rl_core.config import RunConfig
from rl_core.errors import RunError
from rl_core.manifest import MANIFEST_NAME, Manifest, Ref, content_digest
from rl_core.recipes import build_config
from tasks.files import describe, publish_folder, read_json, storage_errors, write_json


class RunStore:
    """Paths, manifests and publishing of one run. Open it under `lock()` to write."""

    def __init__(self, runs_dir: Path, name: str) -> None:
        self.name = name
        self.path = runs_dir.resolve() / name

    # -- the run ------------------------------------------------------------------------------------------------------
    def exists(self) -> bool:
        return (self.path / "run.json").is_file()

    def create(self, config: RunConfig, base_model: Ref, code_version: str) -> None:
        with storage_errors(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
        record = {
            "format": 1,
            "config": config.model_dump(mode="json"),
            "base_model": base_model.model_dump(),
            "code_version": code_version,
        }
        write_json(self.path / "run.json", record)

    def record(self) -> dict[str, Any]:
        if not self.exists():
            near = sorted(p.parent.name for p in self.path.parent.glob("*/run.json"))
            raise RunError(
                f"there is no run {self.name!r}", expected=", ".join(near) or "a run below runs/", got=self.name
            )
        return read_json(self.path / "run.json")

    def config(self) -> RunConfig:
        return build_config(self.record()["config"], f"{self.name}/run.json")

    def base_model(self) -> Ref:
        return Ref.model_validate(self.record()["base_model"])

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the run for this process; the kernel lets go when the process dies, however it dies."""
        with storage_errors(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
        with (self.path / "lock").open("a+b", buffering=0) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                file.seek(0)
                raise RunError(
                    f"run {self.name!r} is in use",
                    got=f"process {file.read().decode() or 'unknown'} holds it",
                    todo="wait for it or stop it; take another name with --set name=... for a second run",
                ) from error
            with storage_errors(self.path):
                file.truncate(0)
                file.write(str(os.getpid()).encode())
            yield

    def sweep(self) -> list[Path]:
        """Remove what dead attempts left behind and return it. Only under `lock()`."""
        leftovers = []
        for path in sorted(self.path.glob("**/*.partial-*")):
            if path.is_dir():
                shutil.rmtree(path)
            elif path.exists():  # else it went with the folder it was in
                path.unlink()
            else:
                continue
            leftovers.append(path)
        return leftovers

    # -- iterations ---------------------------------------------------------------------------------------------------
    def iteration_dir(self, iteration: int) -> Path:
        return self.path / "iterations" / ("base" if iteration < 0 else f"{iteration:04d}")

    def iteration(self, iteration: int) -> dict[str, Any] | None:
        path = self.iteration_dir(iteration) / "iteration.json"
        return read_json(path) if path.is_file() else None

    def write_iteration(self, iteration: int, record: dict[str, Any]) -> None:
        write_json(self.iteration_dir(iteration) / "iteration.json", record)

    def resolve(self, ref: Ref) -> Path:
        return self.path / ref.path

    def relative(self, folder: Path) -> str:
        """How a folder is written down in records and references of this run; `..` where it is another run's."""
        return Path(os.path.relpath(folder, self.path)).as_posix()

    # -- outputs ------------------------------------------------------------------------------------------------------
    def begin(self, iteration: int, stage: str, fingerprint: str) -> Path:
        """An empty folder for one attempt of a stage."""
        partial = self.iteration_dir(iteration) / stage / f"{fingerprint[:12]}.partial-{os.getpid()}"
        with storage_errors(partial):
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        return partial

    def find(self, iteration: int, stage: str, fingerprint: str) -> tuple[Path, Manifest] | None:
        """The complete output of a fingerprint: of several the one the iteration is made of, else the newest.

        What is damaged is put aside. Only under `lock()`.
        """
        found = self._attempts(iteration, stage, fingerprint)
        made = (self.iteration(iteration) or {"stages": {}})["stages"].get(stage)
        for path, manifest in found:
            if made and path == self.path / made["folder"]:
                return path, manifest
        return found[-1] if found else None

    def _attempts(self, iteration: int, stage: str, fingerprint: str) -> list[tuple[Path, Manifest]]:
        folder = self.iteration_dir(iteration) / stage
        found = []
        for path in sorted(folder.glob(f"{fingerprint[:12]}*"), key=lambda p: (len(p.name), p.name)):
            if ".partial-" in path.name:
                continue
            manifest = read_manifest(path)
            if manifest is None or content_digest(describe(path)) != manifest.digest:
                self._put_aside(path, iteration, stage)
            elif manifest.fingerprint == fingerprint:
                found.append((path, manifest))
        return found

    def _put_aside(self, path: Path, iteration: int, stage: str) -> None:
        """Move a damaged output out of every reader's way; it is not deleted, somebody may want to know why."""
        corner = self.path / "damaged"
        corner.mkdir(exist_ok=True)
        path.rename(self._free_name(corner, f"{self.iteration_dir(iteration).name}-{stage}-{path.name}"))

    def publish(self, partial: Path, manifest: Manifest) -> tuple[Path, Manifest, bool]:
        """Give a finished attempt its final name; (folder, manifest, whether it is new).

        An equal output that is there already stays untouched and the attempt is thrown away.
        """
        for path, other in self._attempts(manifest.iteration, manifest.stage, manifest.fingerprint):
            if other.digest == manifest.digest:
                shutil.rmtree(partial)
                return path, other, False
        write_json(partial / MANIFEST_NAME, manifest.model_dump(mode="json"))
        final = self._free_name(partial.parent, manifest.fingerprint[:12])
        publish_folder(partial, final)
        return final, manifest, True

    def _free_name(self, folder: Path, prefix: str) -> Path:
        taken = {p.name for p in folder.iterdir()}
        number = 1
        while (name := prefix if number == 1 else f"{prefix}-{number}") in taken:
            number += 1
        return folder / name


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest of an output folder; null when it is missing, unreadable or names a file that is not there whole."""
    try:
        manifest = Manifest.model_validate_json((folder / MANIFEST_NAME).read_bytes())
    except (OSError, ValidationError):
        return None
    for entry in manifest.files:
        path = folder / entry.name
        if not path.is_file() or path.stat().st_size != entry.bytes:
            return None
    return manifest

"""The run folder: the one place that decides what exists, what is complete and what is garbage.

    runs/<run>/run.json                                   resolved config and the model it starts from
    runs/<run>/iterations/0003/<stage>/<fingerprint12>/   part-*.parquet or checkpoint files, manifest.json
    runs/<run>/iterations/0003/iteration.json             which output of each stage the iteration is made of

A folder under its final name is complete: it is written under `<fingerprint12>.partial-<pid>`, gets its manifest last,
is synced and renamed. A second, different output of one fingerprint gets the suffix `-2`, `-3`, ...

A forked run reads what lies before its fork point from its parent, `../<parent>/iterations/...`; it never writes there.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from rl_core.config import RunConfig
from rl_core.errors import RunError
from rl_core.manifest import MANIFEST_NAME, Manifest, Ref
from rl_core.parent import Parent
from rl_core.recipes import build_config
from tasks.storage.files import (
    folder_digest,
    iteration_name,
    publish_folder,
    read_json,
    read_manifest,
    restore_files,
    storage_errors,
    write_json,
)

PLACED = "placed-"
"""Begin of the folder names of attempts that another machine makes (`tasks.placement`): nobody's leftovers."""
Found = tuple[Path, Manifest]


def is_output(folder: Path) -> bool:
    """Whether a folder below a stage's has the name of a complete output."""
    return folder.is_dir() and ".partial-" not in folder.name and not folder.name.startswith(PLACED)


class RunStore:
    """Paths, manifests and publishing of one run. Open it under `lock()` to write."""

    def __init__(self, runs_dir: Path, name: str) -> None:
        self.name = name
        self.path = runs_dir.resolve() / name

    # -- the run ------------------------------------------------------------------------------------------------------
    def exists(self) -> bool:
        return self.name == self.path.name and (self.path / "run.json").is_file()  # `a/` is not the name of run `a`

    def create(self, config: RunConfig, base_model: Ref, code_version: str, parent: Parent | None = None) -> None:
        """Write what the run is. A run that exists keeps its parent."""
        with storage_errors(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
        parent = parent or (self.parent() if self.exists() else None)
        record = {
            "format": 1,
            "config": config.model_dump(mode="json"),
            "base_model": base_model.model_dump(),
            "code_version": code_version,
            "parent": parent.model_dump() if parent else None,
        }
        write_json(self.path / "run.json", record)

    def record(self) -> dict[str, Any]:
        if not self.exists():
            near = ", ".join(sorted(p.parent.name for p in self.path.parent.glob("*/run.json")))
            wanted = near or f"a run below {self.path.parent}"
            raise RunError(f"there is no run {self.name!r}", expected=wanted, got=self.name)
        return read_json(self.path / "run.json")

    def config(self) -> RunConfig:
        return build_config(self.record()["config"], f"{self.name}/run.json")

    def base_model(self) -> Ref:
        return Ref.model_validate(self.record()["base_model"])

    def parent(self) -> Parent | None:
        found = self.record().get("parent")
        return Parent.model_validate(found) if found else None

    def _inherits_from(self, iteration: int, stage: str) -> RunStore | None:
        """The parent, if this stage of the iteration lies before the fork point."""
        parent = self.parent() if self.exists() else None
        return RunStore(self.path.parent, parent.run) if parent and parent.has(iteration, stage) else None

    @contextmanager
    def lock(self, patience_seconds: float = 0.2) -> Iterator[None]:
        """Hold the run for this process; the kernel lets go when the process dies, however it dies."""
        with storage_errors(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
        with (self.path / "lock").open("a+b", buffering=0) as file:
            if not _locked(file, patience_seconds):
                file.seek(0)
                raise RunError(
                    f"run {self.name!r} is in use",
                    got=f"process {file.read().decode() or 'unknown'} holds it",
                    todo="wait for it or stop it; a second run needs another name",
                )
            with storage_errors(self.path):
                file.truncate(0)
                file.write(str(os.getpid()).encode())
            yield

    def sweep(self) -> list[Path]:
        """Remove what dead attempts left behind and return it. Only under `lock()`."""
        for path in (found := self.leftovers()):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        return found

    def leftovers(self) -> list[Path]:
        """Files and folders of attempts that have not ended well; what lies inside of one goes with it."""
        found: list[Path] = []
        for path in sorted(self.path.glob("**/*.partial-*")):
            placed = any(part.startswith(PLACED) for part in path.relative_to(self.path).parts)
            if not placed and not any(other in path.parents for other in found):  # who works at a placed one may live
                found.append(path)
        return found

    # -- iterations ---------------------------------------------------------------------------------------------------
    def iteration_dir(self, iteration: int) -> Path:
        return self.path / "iterations" / iteration_name(iteration)

    def iteration(self, iteration: int) -> dict[str, Any] | None:
        path = self.iteration_dir(iteration) / "iteration.json"
        return read_json(path) if path.is_file() else None

    def iteration_numbers(self) -> list[int]:
        """Iterations that have a record, in order."""
        return sorted(int(path.parent.name) for path in self.path.glob("iterations/[0-9]*/iteration.json"))

    def write_iteration(self, iteration: int, record: dict[str, Any]) -> None:
        write_json(self.iteration_dir(iteration) / "iteration.json", record)

    def resolve(self, ref: Ref) -> Path:
        """The absolute folder, without `..`: it goes into other stores, where this run may be unknown or gone."""
        return self.folder(ref.path)

    def folder(self, path: str) -> Path:  # of a path in a record of this run
        return Path(os.path.normpath(self.path / path))

    def relative(self, folder: Path) -> str:
        """How a folder is written down in records and references of this run; `..` where it is another run's."""
        return Path(os.path.relpath(folder, self.path)).as_posix()

    # -- outputs ------------------------------------------------------------------------------------------------------
    def partial(self, iteration: int, stage: str, fingerprint: str) -> Path:
        """The folder of this process's attempt of a stage, begun or not."""
        return self.iteration_dir(iteration) / stage / f"{fingerprint[:12]}.partial-{os.getpid()}"

    def begin(self, iteration: int, stage: str, fingerprint: str) -> Path:
        """An empty folder for one attempt of a stage."""
        partial = self.partial(iteration, stage, fingerprint)
        with storage_errors(partial):
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        return partial

    def find(self, iteration: int, stage: str, fingerprint: str) -> Found | None:
        """The complete output of a fingerprint: of several the one the iteration is made of, else the newest own one,
        else the parent's, if that lies before the fork point.

        What is damaged is put aside. Only under `lock()`.
        """
        found = self._complete(iteration, stage, fingerprint, put_aside=True)
        return found[-1] if found else None

    def _complete(self, iteration: int, stage: str, fingerprint: str, put_aside: bool) -> list[Found]:
        """Complete outputs, the parents' first, from old to new; the one that the iteration is made of at the end."""
        own = self._attempts(iteration, stage, fingerprint, put_aside)
        made = (self.iteration(iteration) or {"stages": {}})["stages"].get(stage)
        named = self.folder(made["folder"]) if made else None
        return sorted([*self._inherited(iteration, stage, fingerprint), *own], key=lambda one: one[0] == named)

    def _inherited(self, iteration: int, stage: str, fingerprint: str) -> list[Found]:
        """Those of the line of parents; nothing is touched there."""
        store = self._inherits_from(iteration, stage)
        return store._complete(iteration, stage, fingerprint, put_aside=False) if store else []

    def _attempts(self, iteration: int, stage: str, fingerprint: str, put_aside: bool) -> list[Found]:
        """Complete outputs in this run's own folder, the newest last."""
        folder = self.iteration_dir(iteration) / stage
        found = []
        for path in sorted(folder.glob(f"{fingerprint[:12]}*"), key=lambda p: (len(p.name), p.name)):
            if ".partial-" in path.name:
                continue
            manifest = read_manifest(path)
            if manifest is None or folder_digest(path) != manifest.digest:
                if put_aside:
                    self._put_aside(path, iteration, stage)
            elif manifest.fingerprint == fingerprint:
                found.append((path, manifest))
        return found

    def outputs(self, iteration: int, stage: str) -> list[Path]:
        """Folders of all outputs of a stage, the parents' before the fork point included."""
        own = [p for p in sorted((self.iteration_dir(iteration) / stage).glob("*")) if is_output(p)]
        store = self._inherits_from(iteration, stage)
        return (store.outputs(iteration, stage) if store else []) + own

    def _put_aside(self, path: Path, iteration: int, stage: str) -> None:
        """Move a damaged output out of every reader's way; it is not deleted, somebody may want to know why."""
        corner = self.path / "damaged"
        corner.mkdir(exist_ok=True)
        path.rename(self._free_name(corner, f"{self.iteration_dir(iteration).name}-{stage}-{path.name}"))

    def publish(self, partial: Path, manifest: Manifest) -> tuple[Path, Manifest, bool]:
        """Give a finished attempt its final name; (folder, manifest, whether it is new).

        An equal output that is there already stays and the attempt is thrown away; files it was pruned of come back.
        """
        key = manifest.iteration, manifest.stage, manifest.fingerprint
        inherited = [(path, other) for path, other in self._inherited(*key) if not other.pruned]
        for path, other in [*self._attempts(*key, put_aside=True), *inherited]:
            if other.digest == manifest.digest:
                if other.pruned:
                    other = restore_files(partial, path, other)
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


def _locked(file: IO[bytes], patience_seconds: float) -> bool:
    for _ in range(int(patience_seconds * 100)):  # whoever only looks whether it is taken lets go in an instant
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            time.sleep(0.01)
    return False

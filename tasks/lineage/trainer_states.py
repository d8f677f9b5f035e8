"""Optimizer states: where a run may go on from, and the removal of all others.

They are needed at the newest policies, at the champion and where a fork leaves the run. A checkpoint without one can be
sampled from, evaluated, registered and served; its digest still stands for everything that was once in it.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from rl_core.config import RunConfig
from rl_core.errors import ModelError, StageError
from tasks.lineage.references import champion_digest, descendants, lineage_lock
from tasks.lineage.removal import Removal, size, take_away
from tasks.settings import tracking_uri
from tasks.storage.files import read_manifest
from tasks.storage.store import RunStore, is_output

TRAINER = "trainer/"
"""Files of a checkpoint that only a learner needs which goes on from it."""

_PATIENCE_SECONDS = 5.0

_log = logging.getLogger("rlstages.retention")


def _fork_states(store: RunStore) -> set[Path]:
    """Checkpoints from which a fork of the run trains on."""
    found = set()
    for child in descendants(store):
        point = child.parent()
        record = child.iteration(point.iteration) if point else None
        if record is not None:
            found.add(child.folder(record["policy"]["path"]))
            if "train" in record["stages"]:
                found.add(child.folder(record["stages"]["train"]["folder"]))
    return found


class _Line:
    """The newest policies of a run: those before each place where it may go on."""

    def __init__(self, store: RunStore, keep: int, ended: int | None) -> None:
        self._store = store
        self._keep = keep
        self._ended = ended  # a rerun of a past iteration is followed by a rerun of the next one
        self._known: dict[int, dict[str, Any] | None] = {}

    def keeps(self, iteration: int) -> bool:
        """Whether the policy that an iteration made is one of the newest `keep` at some place to go on from."""
        return any(self._is_end(number) for number in range(iteration, iteration + self._keep))

    def made(self, iteration: int) -> dict[str, Any] | None:
        record = self._record(iteration)
        found: dict[str, Any] | None = record["stages"].get("train") if record else None
        return found

    def _is_end(self, iteration: int) -> bool:
        """The next iteration is not there, not complete, or made from another policy: the run may go on after this."""
        made, following = self.made(iteration), self._record(iteration + 1)
        if made is None:
            return False
        if iteration == self._ended or following is None or not following["complete"]:
            return True
        return bool(following["policy"]["digest"] != made["digest"])

    def _record(self, iteration: int) -> dict[str, Any] | None:
        if iteration not in self._known:
            self._known[iteration] = self._store.iteration(iteration)
        return self._known[iteration]


def _states(store: RunStore, iteration: str = "[0-9]*") -> set[Path]:
    """Checkpoints that have an optimizer state, or a part of one."""
    return {trainer.parent for trainer in store.path.glob(f"iterations/{iteration}/train/*/{TRAINER}")}


def removable_states(
    store: RunStore,
    keep: int | None,
    champions: set[str],
    *,
    among: set[Path] | None = None,
    ended: int | None = None,
    superseded: bool = True,
) -> list[Removal]:
    """Optimizer states to remove; without `keep` only what an earlier removal left behind when it was killed."""
    line = _Line(store, keep or 1, ended)
    forked: set[Path] | None = None
    found = []
    for folder in sorted(_states(store) if among is None else among):
        trainer = folder / TRAINER
        manifest = read_manifest(folder) if is_output(folder) else None
        if manifest is None:
            continue
        names = tuple(entry.name for entry in manifest.files if entry.name.startswith(TRAINER))
        made = line.made(manifest.iteration)
        current = made is not None and store.folder(made["folder"]) == folder
        if not names:
            continue
        if set(names) <= set(manifest.pruned):
            found.append(Removal(folder, size(trainer), "optimizer state, removed in part", names))
            continue
        is_needed = line.keeps(manifest.iteration) if current else not superseded
        if keep is None or manifest.digest in champions or is_needed:
            continue
        if folder not in (forked := _fork_states(store) if forked is None else forked):
            found.append(Removal(folder, size(trainer), "optimizer state of an older policy", names))
    return found


class Retention:
    """Keeps the optimizer states of an open run that `execution.keep_trainer_states` asks for, and removes the others.

    All iterations are looked through once; from then on only the states that were left and the newest, so that the
    thousandth iteration costs what the tenth does.
    """

    def __init__(self, store: RunStore) -> None:
        self._store = store
        self._left: set[Path] | None = None

    def retain(self, config: RunConfig, iteration: int) -> list[Removal]:
        """Call it when an iteration has ended, under the run's lock.

        While MLflow cannot say which policy is the champion, or another process removes something, nothing is removed;
        the next iteration makes up for it.
        """
        keep, store = config.execution.keep_trainer_states, self._store
        if keep is None:
            return []
        new = store.iteration_dir(iteration).name if self._left is not None else "[0-9]*"
        self._left = (self._left or set()) | _states(store, new)
        if not removable_states(store, keep, set(), among=self._left, ended=iteration, superseded=False):
            return []
        gone: list[Removal] = []
        try:
            champion = champion_digest(tracking_uri(), config.model_name)
            champions = {champion} if champion else set()
            with lineage_lock(store.path.parent, _PATIENCE_SECONDS):
                found = removable_states(store, keep, champions, among=self._left, ended=iteration, superseded=False)
                for item in found:
                    take_away(item)
                    gone.append(item)
                    self._left.discard(item.path)
        except (StageError, OSError) as error:  # no reason for a run to fail
            _log.warning("optimizer states are kept for now: %s", error)
        return gone


def require_trainer_state(folder: Path) -> None:
    """Raise `ModelError` when the optimizer state of a checkpoint was removed, so that nobody trains on without it."""
    manifest = read_manifest(folder)
    if manifest is None or not any(name.startswith(TRAINER) for name in manifest.pruned):
        return
    policy = manifest.iteration + 1
    kept = [0]
    for trainer in folder.parents[2].glob(f"[0-9]*/train/*/{TRAINER}"):
        other = read_manifest(trainer.parent)
        if other is not None and not other.pruned:
            kept.append(other.iteration + 1)
    before = max(number for number in kept if number < policy)
    again = (
        f"iteration {before}" if before == policy - 1 else f"iterations {before} to {policy - 1}, one after the other,"
    )
    raise ModelError(
        f"the optimizer state of policy {policy} of run {manifest.run!r} was removed, so it cannot be trained on",
        expected=f"policy {', '.join(str(number) for number in sorted(set(kept)))}, whose state is there",
        got=f"policy {policy} without {TRAINER} in {folder}",
        todo=f"rerun or fork from an iteration of one of these numbers, or rerun {again} from train, which makes "
        "the state again; `rerun --reset` puts an iteration back as it was",
    )

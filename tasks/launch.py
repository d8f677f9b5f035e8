"""From a recipe or a run's name to a run folder that can be worked on.

Every mistake in what a recipe names surfaces here, before anything is written or paid for.
"""

from __future__ import annotations

import os
import shlex
import shutil
from pathlib import Path
from typing import Any

from rl_core.adjustable import is_adjustable
from rl_core.config import RunConfig
from rl_core.errors import ConfigError, ModelError
from rl_core.manifest import Ref, content_digest
from rl_core.models import MODELS
from rl_core.recipes import apply_overrides, build_config, config_json, override_key, parse_recipe
from tasks.attempts import run_of
from tasks.live.adjustments import check_not_adjusted
from tasks.provenance import code_version
from tasks.settings import STATE_DIR, runs_dir
from tasks.storage.files import describe, publish_folder, storage_errors
from tasks.storage.store import RunStore
from tasks.worker import Worker

RECIPES = Path(__file__).resolve().parent.parent / "deployments" / "recipes"
MODELS_DIR = Path("models")
CHANGEABLE = ("iterations", "execution")
"""What a run that exists may be continued with: more iterations, other hardware settings."""


def recipe_path(target: str) -> Path | None:
    """The recipe file of a path or a short name below deployments/recipes; null when there is none."""
    for path in (Path(target), RECIPES / f"{target}.toml"):
        if path.suffix == ".toml" and path.is_file():
            return path
    return None


def resolve_config(target: str, overrides: list[str]) -> RunConfig:
    """The run config that a recipe, or the name of a run, stands for."""
    path = recipe_path(target)
    if path is not None:
        return build_config(apply_overrides(parse_recipe(_read_recipe(path), str(path)), overrides), path.name)
    store = RunStore(runs_dir(), target)
    if not store.exists():
        known = sorted(p.stem for p in RECIPES.glob("*.toml"))
        runs = sorted(p.parent.name for p in runs_dir().glob("*/run.json"))
        raise ConfigError(
            f"there is no recipe and no run {target!r}",
            expected=f"a TOML file, a recipe ({', '.join(known)}) or a run ({', '.join(runs) or 'none yet'})",
            got=target,
        )
    return build_config(apply_overrides(store.record()["config"], overrides), f"run {target}")


def _read_recipe(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read", expected="a TOML file in UTF-8", got=str(error)) from error


def continue_or_prepare(target: str, overrides: list[str]) -> str:
    """The run that this flow run has worked on before, or the run of that name where nothing is to change.

    Both go on as they are, whatever their recipe says by now. Else as `prepare_run`.
    """
    from prefect.runtime import flow_run

    known = run_of(flow_run.id, runs_dir()) if flow_run.id else None
    if known is not None:
        return known
    if not overrides and RunStore(runs_dir(), target).exists():
        return target
    return prepare_run(target, overrides)


def prepare_run(target: str, overrides: list[str]) -> str:
    """Create the run of a recipe, or find the one that exists; returns its name.

    Raises `ConfigError` when a run of that name exists with another config, or when something the config names (model,
    environment, reward) cannot be had. Nothing is written then.
    """
    config = resolve_config(target, overrides)
    store = RunStore(runs_dir(), config.name)
    if store.exists():
        _change_run(store, config, overrides)
        return config.name
    worker = Worker(STATE_DIR / "logs")
    try:
        check_config(config, worker)
        base_model = base_model_ref(config.model.source, worker)
    finally:
        worker.close()
    with store.lock():
        if store.exists():
            raise ConfigError(
                f"another process has created the run {config.name!r} meanwhile",
                todo="give this one another name with --set name=...",
            )
        store.create(config, base_model, code_version())
    return config.name


def _how_to_continue(name: str) -> str:
    if recipe_path(name) is not None:  # a recipe's name means the recipe
        return "repeat the --set options it was started with"
    return f"continue it with `rlstages run {name}`"


def _how_to_change(name: str, refused: list[str], overrides: list[str]) -> str:
    live = [item for item in overrides if is_adjustable(override_key(item))]
    if all(any(override_key(item).startswith(key) for item in live) for key in refused):
        sets = " ".join(f"--set {shlex.quote(item)}" for item in live)
        return f"change it from the next iteration on with `rlstages adjust {name} {sets}`"
    return _how_to_continue(name)


def _change_run(store: RunStore, wanted: RunConfig, overrides: list[str]) -> None:
    """Apply overrides to a run that exists; its own iterations and hardware settings outlive the recipe's."""
    changed = _changes(config_json(store.config()), config_json(wanted))
    refused = [key for key in changed if key.split(".")[0] not in CHANGEABLE]
    if refused:
        raise ConfigError(
            f"run {store.name!r} exists with another config",
            expected="the same config; only iterations and execution may change",
            got="different: " + ", ".join(refused),
            todo=f"{_how_to_change(store.name, refused, overrides)}, or add --set name=... for a new run",
        )
    config = build_config(apply_overrides(config_json(store.config()), overrides), f"run {store.name}")
    made = len(store.iteration_numbers())
    if config.iterations < min(made, store.config().iterations):
        raise ConfigError(
            f"run {store.name!r} has {made} iterations already",
            expected=f"iterations >= {made}",
            got=f"iterations = {config.iterations}",
        )
    if config != store.config():
        check_not_adjusted(store, config)
        with store.lock():
            store.create(config, store.base_model(), code_version())


def check_config(config: RunConfig, worker: Worker) -> None:
    """Open what the config names: environment, held-out problems, rewards."""
    found = worker.inspect(config)
    heldout = found["heldout"]
    if heldout is not None and heldout < config.evaluate.problems:
        raise ConfigError(
            "there are fewer held-out problems than the evaluation wants",
            expected=f"evaluate.problems = {config.evaluate.problems}",
            got=f"{heldout} held-out problems",
            todo="lower evaluate.problems or give the environment more held-out problems",
        )


def base_model_ref(source: str, worker: Worker) -> Ref:
    """Folder and digest of the model a run starts from; a model known by name is made when it is missing."""
    if source in MODELS:
        folder = ensure_model(source, worker)
    else:
        folder = Path(source)
        if not (folder / "config.json").is_file():
            raise ModelError(
                f"model.source: there is no model {source!r}",
                expected=f"a Hugging Face model folder, or one of {', '.join(MODELS)}",
                got=f"no {folder / 'config.json'}",
            )
    return Ref(path=str(folder.resolve()), digest=content_digest(describe(folder)))


def ensure_model(name: str, worker: Worker) -> Path:
    """The folder of a model known by name; it is made once and appears whole or not at all."""
    if name not in MODELS:
        raise ModelError(f"there is no known model {name!r}", expected=", ".join(MODELS), got=name)
    folder = MODELS_DIR.resolve() / name
    if folder.is_dir():
        return folder
    partial = folder.with_name(f"{name}.partial-{os.getpid()}")
    with storage_errors(folder):
        for leftover in folder.parent.glob(f"{name}.partial-*"):  # of attempts that were killed
            if leftover == partial or not Path("/proc", leftover.name.rpartition("-")[2]).exists():
                shutil.rmtree(leftover)
        partial.mkdir(parents=True)
        try:
            worker.request({"op": "fetch_model", "name": name, "folder": str(partial)}, timeout_seconds=900)
            if not folder.is_dir():  # else another process has made it meanwhile
                publish_folder(partial, folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return folder


def _changes(old: Any, new: Any, path: str = "") -> list[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        keys = sorted(old.keys() | new.keys())
        return [found for key in keys for found in _changes(old.get(key), new.get(key), f"{path}.{key}".lstrip("."))]
    return [] if old == new else [path]

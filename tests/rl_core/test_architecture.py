"""The layers hold at run time: what an import brings along, and how long a file may be."""

from __future__ import annotations

import ast
import importlib.util
import json
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MAX_LINES, MAX_FLOW_LINES, MAX_FUNCTION_LINES = 250, 80, 50
IN_CHILD = {"tasks.tracking.policy_pyfunc"}
"""Runs in a process of its own, where the model is."""


def modules(package: str) -> list[str]:
    found = [info.name for info in pkgutil.walk_packages([str(ROOT / package)], f"{package}.")]
    return [package, *sorted(found)]


def imported(names: list[str], watched: tuple[str, ...]) -> dict[str, str]:
    """Import the modules one after the other in a fresh process; watched package → the module that brought it in."""
    code = (
        "import importlib, json, sys\n"
        "names, watched = json.loads(sys.argv[1])\n"
        "found = {}\n"
        "for name in names:\n"
        "    importlib.import_module(name)\n"
        "    for package in watched:\n"
        "        if package in sys.modules: found.setdefault(package, name)\n"
        "print(json.dumps(found))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps([names, watched])],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return result


def sources() -> list[Path]:
    return sorted(path for package in ("rl_core", "tasks", "flows") for path in (ROOT / package).rglob("*.py"))


def test_import_rl_core_alone_brings_nothing_heavy() -> None:
    heavy = ("prefect", "mlflow", "vllm", "deepspeed", "torch", "transformers", "polars", "pyarrow")
    assert imported(["rl_core"], heavy) == {}


@pytest.mark.slow
def test_no_module_of_rl_core_knows_an_orchestrator_a_tracker_or_an_optional_engine() -> None:
    names = modules("rl_core")
    assert {"rl_core.config", "rl_core.engines.open", "rl_core.rewards.contract"} <= set(names)
    assert imported(names, ("prefect", "mlflow", "vllm", "deepspeed")) == {}


@pytest.mark.slow
def test_the_flow_process_imports_no_torch_and_no_transformers() -> None:
    """The command line, the flows, and every module of `tasks`, the stages among them; work happens in the worker."""
    names = [*modules("flows"), *(name for name in modules("tasks") if name not in IN_CHILD)]
    assert {"tasks.session", "tasks.launch", "tasks.generate", "tasks.train", "flows.cli"} <= set(names)
    assert imported(names, ("torch", "transformers", "vllm", "deepspeed")) == {}


@pytest.mark.slow
def test_the_command_line_answers_without_loading_the_machinery() -> None:
    assert imported(["flows.cli"], ("prefect", "mlflow", "torch", "transformers", "polars")) == {}


def test_transformers_is_named_only_where_models_live() -> None:
    allowed = {"rl_core/models.py", "rl_core/known_models.py"}
    for path in sources():
        name = path.relative_to(ROOT).as_posix()
        if name in allowed or name.startswith("rl_core/engines/"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            targets = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            targets += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {target.split(".")[0] for target in targets} & {"transformers", "vllm", "deepspeed"}, name


@pytest.mark.parametrize("path", sources(), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_files_and_functions_are_short(path: Path) -> None:
    text = path.read_text()
    flow = path.parent.name == "flows" and path.name not in ("cli.py", "operate.py")
    lines = text.count("\n")
    assert lines <= (MAX_FLOW_LINES if flow else MAX_LINES)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            assert (node.end_lineno or 0) - node.lineno + 1 <= MAX_FUNCTION_LINES, node.name


def test_every_stage_is_a_file_of_its_name() -> None:
    from rl_core.stages import STAGES

    for name in STAGES:
        assert importlib.util.find_spec(f"tasks.{name}") is not None, name

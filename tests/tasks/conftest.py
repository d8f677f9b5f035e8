"""A bench for stages: the worker's own code, called in this process on hand-made inputs; and hand-made run folders."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rl_core.config import RunConfig
from rl_core.execution import StageName
from rl_core.fingerprint import sha256_text
from rl_core.manifest import Manifest, Ref, content_digest
from rl_core.recipes import build_config
from rl_core.schemas import TRAJECTORIES
from rl_core.stages import STAGES
from tasks.iterations import Iterations, Position
from tasks.stage import StageContext
from tasks.storage.files import describe
from tasks.storage.store import RunStore
from tasks.storage.tables import write_table
from tasks.worker import Services, _handle, _inspect

Row = dict[str, Any]


class Bench:
    """Executes stages as the worker does, in a folder of its own."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder = folder
        self.model = model
        self.services = Services(folder / "logs")
        self.base = self.ref(model)
        self.reply: dict[str, Any] = {}
        self.progress: list[dict[str, Any]] = []
        self._made = 0

    def new_folder(self) -> Path:
        self._made += 1
        folder = self.folder / f"made-{self._made}"
        folder.mkdir(parents=True)
        return folder

    def ref(self, folder: Path) -> Ref:
        return Ref(path=str(folder), digest=content_digest(describe(folder)))

    def config(self, **changes: Any) -> RunConfig:
        """A small run of the tiny model; a dictionary replaces single keys of its section."""
        data: dict[str, Any] = {
            "name": "bench",
            "seed": 3,
            "iterations": 3,
            "model": {"source": str(self.model)},
            "environment": {
                "kind": "reasoning_gym",
                "params": {
                    "dataset": "chain_sum",
                    "dataset_params": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
                },
            },
            "generate": {"prompts_per_iteration": 2, "group_size": 4, "max_completion_tokens": 6},
            "rewards": [{"function": "last_integer"}],
            "learner": {"lr": 1e-3},
            "evaluate": {"problems": 6},
            "execution": {"reward_processes": 1},
        }
        for key, value in changes.items():
            data[key] = {**data[key], **value} if isinstance(value, dict) and isinstance(data.get(key), dict) else value
        return build_config(data, "bench")

    def prompts(self, texts: list[str], data: list[Row] | None = None) -> dict[str, Any]:
        """An environment of these user turns, in this order, with one held-out problem."""
        folder = self.new_folder()
        data = data or [{"answer": str(number)} for number in range(len(texts))]
        rows = [{"prompt": text, **columns} for text, columns in zip(texts, data, strict=True)]
        for name, items in (("train", rows), ("heldout", [rows[0] | {"prompt": "held out"}])):
            (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in items))
        params = {"path": str(folder / "train.jsonl"), "heldout_path": str(folder / "heldout.jsonl"), "shuffle": False}
        return {"kind": "dataset", "params": params}

    def context(
        self, config: RunConfig, iteration: int = 0, cursor: int = 0, previous: Path | None = None, **inputs: Ref
    ) -> StageContext:
        facts = _inspect(config, self.services) | {"cursor": cursor, "reference": self.base.digest}
        return StageContext(config, iteration, inputs, self.new_folder(), facts, self.base, previous)

    def perform(self, stage: str, context: StageContext) -> Ref:
        """The worker's handling of a request; what it answers is in `reply`."""
        message = {"op": "perform", "stage": stage, "context": context.to_dict()}
        self.reply = json.loads(json.dumps(_handle(message, self.services, self.progress.append)))
        return self.ref(context.output)

    def run(self, stage: str, config: RunConfig, **more: Any) -> Ref:
        return self.perform(stage, self.context(config, **more))

    def table(self, rows: list[Row], schema: pa.Schema) -> Ref:
        """Hand-made rows as the output of a stage."""
        folder = self.new_folder()
        write_table(folder / "part-0000.parquet", rows, schema)
        return self.ref(folder)

    def trajectories(self, rows: list[Row]) -> Ref:
        """Rows of the trajectories table; each says what matters, the rest is made up."""
        return self.table([self._trajectory(**row) for row in rows], TRAJECTORIES)

    def _trajectory(self, group: int, sample: int, **row: Any) -> Row:
        ids = row.get("completion_ids", [65, 66, 257])
        made = {
            "group_id": group,
            "sample_id": sample,
            "prompt_id": f"p{group}",
            "prompt_messages": [{"role": "user", "content": f"prompt {group}"}],
            "prompt_ids": [256, 72 + group, 105],
            "completion_ids": ids,
            "sampler_logprobs": [-5.5] * len(ids),
            "ref_logprobs": None,
            "action_mask": [True] * len(ids),
            "turns": [{"role": "assistant", "start": 0, "end": len(ids)}],
            "finish_reason": "length" if row.get("truncated") else "stop",
            "truncated": False,
            "temperature": 1.0,
            "policy_version": 0,
            "policy_digest": self.base.digest,
            "seed": 0,
            "text": "text",
            "env_data": json.dumps(row.pop("data", {"answer": "1"})),
        }
        return made | row

    def cold(self) -> None:
        """Forget everything that is warm."""
        self.services.close_rewards()
        self.services = Services(self.folder / "logs")

    def copy(self, ref: Ref) -> Ref:
        folder = self.new_folder()
        shutil.copytree(ref.path, folder, dirs_exist_ok=True)
        return Ref(path=str(folder), digest=ref.digest)


class RunFolder:
    """A run on disk, its outputs hand-made and published as a session publishes them."""

    def __init__(self, runs: Path, config: RunConfig, base: Ref) -> None:
        self.config = config
        self.store = RunStore(runs, config.name)
        self.store.create(config, base, "test")
        self.iterations = self.reopened()

    def reopened(self) -> Iterations:
        return Iterations(self.store, self.store.config(), self.store.base_model())

    def publish(
        self, iteration: int, stage: StageName, content: str | list[Row], inputs: dict[str, Ref], **fields: Any
    ) -> Ref:
        """An output of this text, or of these rows under the stage's schema."""
        mark = sha256_text(f"{stage} {iteration} {content}")
        partial = self.store.begin(iteration, stage, mark)
        if isinstance(content, str):
            (partial / "content").write_text(content)
        else:
            write_table(partial / "part-0000.parquet", content, STAGES[stage].schema(self.config))
        files = describe(partial)
        fields = {"identity": {}, "rows": len(content), "measured": {"seconds": 1.5}, **fields}
        manifest = Manifest(
            run=self.store.name,
            iteration=iteration,
            stage=stage,
            stage_version=1,
            fingerprint=mark,
            seed_key=[],
            inputs=inputs,
            digest=content_digest(files),
            files=files,
            **fields,
        )
        folder, manifest, _ = self.store.publish(partial, manifest)
        made = {
            "folder": folder.relative_to(self.store.path).as_posix(),
            "fingerprint": mark,
            "digest": manifest.digest,
        }
        self.iterations.add(iteration, stage, made)
        return Ref(path=made["folder"], digest=made["digest"])

    def complete(self, at: Position, cursor: int, word: str = "") -> Position:
        """Make a whole iteration whose outputs say `word`."""
        self.iterations.begin(at)
        refs = {"policy": at.policy}
        for stage in self.iterations.stages_due(at.iteration):
            spec = STAGES[stage]  # type: ignore[index]
            state = {"cursor": cursor} if stage == "generate" else {}
            inputs = {name: refs[name] for name in spec.reads}
            content = f"{stage} {at.iteration} {state} {word if stage == 'train' else ''}"
            refs[stage] = self.publish(at.iteration, spec.name, content, inputs, state=state)
        self.iterations.end(at.iteration)
        return Position(at.iteration + 1, refs["train"], cursor)


@pytest.fixture(scope="session")
def rows() -> Any:
    """Reads the rows of a stage's output."""
    return lambda ref: pq.read_table(Path(ref.path) / "part-0000.parquet").to_pylist()


@pytest.fixture
def bench(tmp_path: Path, tiny_model: Path) -> Iterator[Bench]:
    import torch

    before = torch.are_deterministic_algorithms_enabled()
    made = Bench(tmp_path / "bench", tiny_model)
    yield made
    made.services.close_rewards()
    torch.use_deterministic_algorithms(before)


@pytest.fixture
def run_folder(tmp_path: Path) -> Any:
    """Makes the folder of a run from a config, below `runs/`."""

    def make(config: RunConfig) -> RunFolder:
        return RunFolder(tmp_path / "runs", config, Ref(path=str(tmp_path / "base"), digest="base"))

    return make


@pytest.fixture(scope="session")
def plain_config() -> Any:
    """Makes the config of a run whose environment is never opened; keywords replace whole sections."""
    data: dict[str, Any] = {
        "name": "run",
        "iterations": 5,
        "model": {"source": "tiny-random"},
        "environment": {"kind": "reasoning_gym"},
        "rewards": [{"function": "last_integer"}],
    }
    return lambda **changes: RunConfig.model_validate(data | changes)


@pytest.fixture
def three(run_folder: Any, plain_config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The folder of a run with three of five iterations complete, two prompts each; `at` is where it goes on."""
    monkeypatch.setenv("RLSTAGES_RUNS_DIR", str(tmp_path / "runs"))
    run = run_folder(plain_config())
    at = Position(0, run.store.base_model(), 0)
    for k in range(3):
        at = run.complete(at, 2 * k + 2)
    run.at = at
    return run


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Makes a module of a user's own rewards; returns its name and its file."""
    made: list[str] = []
    monkeypatch.syspath_prepend(tmp_path)

    def make(source: str) -> tuple[str, Path]:
        name = f"rewards_of_{tmp_path.name.replace('-', '_')}_{len(made)}".lower()
        made.append(name)
        (tmp_path / f"{name}.py").write_text(source)
        return name, tmp_path / f"{name}.py"

    yield make
    for name in made:
        sys.modules.pop(name, None)

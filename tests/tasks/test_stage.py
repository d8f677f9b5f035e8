"""The contract of a stage: what is checked of its output, what is retried, what survives the way to the worker."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from rl_core import errors
from rl_core.manifest import Ref
from rl_core.schemas import ADVANTAGES, TRAIN_STEPS
from rl_core.stages import STAGES
from tasks.stage import Outcome, Stage, StageContext, StageResult, _worth_retrying, load_stage
from tasks.storage.tables import write_table

ROW = {"group_id": 1, "sample_id": 2, "reward": None, "advantage": 0.5, "keep": True, "drop_reason": None}
STEP = {"step": 1, "applied": True, "metric": "policy/entropy", "value": 1.0}


@pytest.mark.parametrize("name", STAGES)
def test_every_stage_has_its_file(name: Any) -> None:
    """The file name is the stage's name everywhere, and the stage's own words describe its task."""
    found = load_stage(name)
    assert found is getattr(importlib.import_module(f"tasks.{name}"), name)
    assert found.spec is STAGES[name]
    assert (found.__doc__ or "").strip().endswith(".")
    assert found.spec.in_worker == (name != "register")


def context(output: Path, bench: Any) -> StageContext:
    output.mkdir()
    return StageContext(bench.config(), 2, {"generate": Ref(path="g", digest="d")}, output, {}, bench.base)


def made_of(write: Any, rows: int) -> Stage[None]:
    def work(context: StageContext, services: None, progress: Any) -> Outcome:
        write(context.output)
        return Outcome(rows=rows)

    return Stage(STAGES["advantage"], work)


def shards(*sizes: int) -> Any:
    def write(folder: Path) -> None:
        for number, size in enumerate(sizes):
            write_table(folder / f"part-{number:04d}.parquet", [ROW] * size, ADVANTAGES)

    return write


def test_an_output_as_reported_passes(tmp_path: Path, bench: Any) -> None:
    """Rows are counted over all parts; every file is described."""
    at = context(tmp_path / "out", bench)
    outcome, files = made_of(shards(2, 0, 3), 5).perform(at, None, lambda done, total: None)
    assert outcome.rows == 5
    assert [file.name for file in files] == [f"part-000{i}.parquet" for i in range(3)]
    assert all((at.output / file.name).stat().st_size == file.bytes for file in files)


@pytest.mark.parametrize(
    ("write", "rows", "words"),
    [
        (shards(2), 3, "did not write the rows it reports"),
        (shards(2, 2), 2, "did not write the rows it reports"),
        (lambda folder: None, 0, "did not write the rows it reports"),
        (lambda folder: write_table(folder / "rows.parquet", [ROW], ADVANTAGES), 1, "did not write the rows"),
        (lambda folder: write_table(folder / "part-0000.parquet", [STEP], TRAIN_STEPS), 1, "with another schema"),
    ],
    ids=["fewer", "more", "nothing", "no part", "another schema"],
)
def test_an_output_that_is_not_as_reported_is_refused(
    tmp_path: Path, bench: Any, write: Any, rows: int, words: str
) -> None:
    with pytest.raises(errors.DataError, match=words):
        made_of(write, rows).perform(context(tmp_path / "out", bench), None, lambda done, total: None)


def test_a_context_survives_the_pipe(tmp_path: Path, bench: Any) -> None:
    """As JSON it comes back equal, config, facts and all."""
    full = bench.context(
        bench.config(learner={"lr": 1e-7}, execution={"timeout_seconds": {"score": 0.5}}),
        iteration=-1,
        cursor=3,
        previous=tmp_path,
        train=Ref(path="p", digest="d"),
    )
    for made in (full, context(tmp_path / "out", bench)):
        assert StageContext.from_dict(json.loads(json.dumps(made.to_dict()))) == made
    assert full.folder("train") == Path("p")


USER = [errors.ConfigError, errors.DataError, errors.RewardContractError, errors.ModelError, errors.RunError]
MACHINE = [errors.WorkerError, errors.StageTimeoutError, errors.StorageError]


def test_what_is_retried() -> None:
    """Errors of the machine, and of judges that may be back; never the user's own, NaNs or unknown faults."""
    from prefect.states import Failed

    def retried(error: BaseException) -> bool:
        found = _worth_retrying(None, None, Failed(data=error))  # type: ignore[arg-type]
        assert found == _worth_retrying(None, None, Failed(data=error)), "asked twice"  # type: ignore[arg-type]
        return found

    assert [kind.__name__ for kind in USER if retried(kind("x"))] == []
    assert [kind.__name__ for kind in MACHINE if not retried(kind("x"))] == []
    assert retried(errors.RewardFailedError("x")) and retried(OSError(28, "no space left"))
    assert not retried(errors.NonFiniteError("x")) and not retried(errors.CorruptOutputError("x"))
    assert not retried(KeyError("a bug")) and not retried(KeyboardInterrupt())


def test_every_error_of_the_tree_is_sorted() -> None:
    """A new error class must say whether it is worth a retry."""
    assert set(errors._tree(errors.RlstagesError)) == {
        *(kind.__name__ for kind in [*USER, *MACHINE]),
        *("RlstagesError", "UserError", "StageError", "RewardFailedError", "NonFiniteError", "CorruptOutputError"),
    }
    for kind in errors._tree(errors.RlstagesError).values():
        assert not (kind.user_error and kind.retryable)


def test_a_result_is_a_reference() -> None:
    """What travels between tasks is small, JSON-plain and names folder and digest."""
    result = StageResult(
        stage="score",
        folder="iterations/0000/score/abc",
        digest="d",
        fingerprint="f",
        rows=8,
        reused=False,
        metrics={"reward/mean": None},
        state={},
        seconds=1.0,
    )
    assert result.ref == Ref(path="iterations/0000/score/abc", digest="d")
    assert StageResult.model_validate_json(result.model_dump_json()) == result

"""The iteration's page in the Prefect UI: right numbers, and what is not defined said to be so."""

from __future__ import annotations

from typing import Any

import pytest

from tasks.display.summary import merged_metrics, metrics_table, number, summary_markdown
from tasks.iterations import Position
from tasks.live.adjustments import adjust
from tasks.session import Session
from tasks.stage import StageResult
from tasks.storage.files import write_json


def result(stage: str, seconds: float, reused: bool = False, **metrics: float | None) -> StageResult:
    return StageResult(
        stage=stage,
        folder=f"iterations/0003/{stage}/abc",
        digest="d",
        fingerprint="f",
        rows=64,
        reused=reused,
        metrics={name.replace("__", "/"): value for name, value in metrics.items()},
        state={},
        seconds=seconds,
    )


RESULTS = [
    result("generate", 12.34, completion__tokens_total=812.0),
    result("score", 0.04, reused=True, reward__last_integer_mean=0.25),
    result("advantage", 0.1, reward__mean=0.123456, groups__kept_frac=0.625, completion__tokens_mean=12.6875),
    result("train", 8.0, policy__entropy=None, learner__grad_norm=1234.5, mismatch__k3=0.0000012),
    result("evaluate", 3.0, eval__greedy_accuracy=0.5, eval__greedy_low=0.41234, eval__greedy_high=0.58766),
]


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "not defined"),
        (0.0, "0"),
        (0.123456, "0.123"),
        (1.0, "1"),
        (-12.345, "-12.3"),
        (999.4, "999"),
        (999.7, "1,000"),
        (-999.7, "-1,000"),
        (1234567.0, "1,234,567"),
        (1.2e-6, "1.2e-06"),
    ],
)
def test_a_number_as_people_read_it(value: float | None, shown: str) -> None:
    assert number(value) == shown


@pytest.fixture
def run(bench: Any, run_folder: Any) -> Any:
    return run_folder(bench.config(iterations=12))


def past(run: Any, iteration: int, **metrics: float | None) -> None:
    """One complete iteration with these metrics, told by two of its stages."""
    run.iterations.begin(Position(iteration, run.store.base_model(), 0))
    for stage, prefix in (("advantage", ("reward", "groups", "completion")), ("train", ("policy", "learner"))):
        own = {name.replace("__", "/"): v for name, v in metrics.items() if name.startswith(prefix)}
        run.publish(iteration, stage, f"{stage} {iteration} {own}", {}, metrics=own)
    run.iterations.end(iteration)


def page(run: Any, iteration: int, results: list[StageResult] | None = None, url: str = "") -> list[str]:
    return summary_markdown(Session(run.store), iteration, results or RESULTS, url).splitlines()


def test_the_first_iteration(run: Any) -> None:
    found = page(run, 0, url="http://127.0.0.1:5000/#/x")
    assert found[0] == "# Healthy"
    wanted = [
        "**bench, iteration 0** (1 of 12): reward 0.123, held-out 50% (95% interval 41.2% to 58.8%)",
        "[Open the run in MLflow](http://127.0.0.1:5000/#/x)",
        "reward   ▄  0.123 → 0.123",
        "| iteration | reward | held-out | groups with signal | tokens | entropy (nats) |",
        "| 0 | 0.123 | 50% | 62.5% | 12.7 | not defined |",
        "| generate | executed | 64 | 12.3 | `iterations/0003/generate/abc` |",
        "| score | reused | 64 | 0.0 | `iterations/0003/score/abc` |",
    ]
    assert [line for line in wanted if line not in found] == []
    [unknown] = [line for line in found if line.startswith("No verdict on ")]
    assert "entropy collapse (policy/entropy is not defined)" in unknown
    assert "truncated completions (completion/truncated_frac was not measured)" in unknown
    assert not any("truncated" in line and line.startswith("|") for line in found), "a column nobody has"
    assert not any(line.startswith(("## Changes", "- **")) for line in found)


def test_what_is_wrong_stands_first_with_what_to_do(run: Any) -> None:
    bad = [*RESULTS[:2], result("advantage", 0.1, completion__truncated_frac=0.75, groups__zero_var_frac=0.75)]
    bad.append(result("train", 8.0, mismatch__k3=0.5))
    found = page(run, 0, bad)
    assert found[0] == "# Alarm: log-prob mismatch, and 2 more"
    rows = [line for line in found if line.startswith("- **")]
    assert [row.split("**")[1] for row in rows] == [
        "alarm: log-prob mismatch",
        "warning: groups without signal",
        "warning: truncated completions",
    ]
    assert "75% of completions are cut. To do: raise generate.max_completion_tokens" in rows[2]


def test_rules_without_meaning_for_the_algorithm(bench: Any, run_folder: Any) -> None:
    """Equal rewards in a group are no flag where the batch is the baseline; no KL term, no word about KL."""
    results = [result("advantage", 0.1, groups__zero_var_frac=1.0), result("train", 1.0, policy__kl=None)]
    batch = run_folder(bench.config(algorithm={"name": "reinforce", "kl": {"coef": 0.1}}))
    found = page(batch, 0, results)
    assert found[0] == "# Healthy" and any("KL to the reference (policy/kl is not defined)" in line for line in found)
    found = page(run_folder(bench.config()), 0, results)
    assert found[0] == "# Warning: groups without signal" and not any("KL to the reference" in line for line in found)


def test_the_trend(run: Any) -> None:
    """Eight rows, the newest first; the curve over all, with a dot for an iteration that has lost its numbers."""
    for k in range(10):
        past(run, k, reward__mean=k / 10, policy__entropy=1.0, completion__truncated_frac=None)
    made = run.store.iteration(2)["stages"]["advantage"]["folder"]
    (run.store.path / made / "manifest.json").write_text("{")
    results = [result("advantage", 0.1, reward__mean=1.0), result("train", 1.0, policy__entropy=0.1)]
    found = page(run, 10, results)
    assert found[0] == "# Warning: entropy collapse", "of 1 nat in the first three iterations a tenth is left"
    assert "reward   ▁▁·▃▄▅▅▆▇██  0 → 1" in found
    rows = [line for line in found if line[:3] in {f"| {digit}" for digit in "0123456789"}]
    assert [row.split("|")[1].strip() for row in rows] == ["10", "9", "8", "7", "6", "5", "4", "3"]
    assert rows[:2] == ["| 10 | 1 | - | 0.1 |", "| 9 | 0.9 | not defined | 1 |"]
    assert "| 2 | - | - | - |" in page(run, 3, results)


def test_a_past_iteration_that_was_made_anew(run: Any) -> None:
    """Metrics of past iterations are kept in memory, and read again when the iteration has changed."""
    past(run, 0, reward__mean=0.25)
    assert "| 0 | 0.25 | - |" in page(run, 1, [result("train", 1.0, policy__entropy=2.0)])
    past(run, 0, reward__mean=0.75)
    assert "| 0 | 0.75 | - |" in page(run, 1, [result("train", 1.0, policy__entropy=2.0)])


def test_changes_and_lineage(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Live changes that came into force, settings of a rerun, the parent; no text of a person breaks the table."""
    monkeypatch.setenv("RLSTAGES_RUNS_DIR", str(run.store.path.parent))
    past(run, 0)
    adjust("bench", ["learner.lr=5e-6"], "a | b\n<script>")
    run.iterations = run.reopened()
    run.iterations.begin(Position(1, run.store.base_model(), 0), ["learner.max_grad_norm=0.5"])
    record = run.store.record() | {"parent": {"run": "mother", "iteration": 1, "stage": "score"}}
    write_json(run.store.path / "run.json", record)
    found = page(run, 1)
    [row] = [line for line in found if line.startswith("| learner.lr")]
    assert row.startswith("| learner.lr | 0.001 | 5e-06 | ") and row.endswith(" | a \\| b &lt;script> |")
    assert "Of this iteration alone, by a rerun: `learner.max_grad_norm=0.5`" in found
    assert "Forked from run `mother` at iteration 1, score." in found
    assert not any("learner.lr" in line for line in page(run, 0))


def test_every_metric_is_in_the_table() -> None:
    rows = metrics_table(RESULTS)
    assert {row["metric"]: row["value"] for row in rows} == merged_metrics(RESULTS)
    assert [row["metric"] for row in rows if row["stage"] == "advantage"] == [
        "completion/tokens_mean",
        "groups/kept_frac",
        "reward/mean",
    ]
    assert len(rows) == sum(len(result.metrics) for result in RESULTS)

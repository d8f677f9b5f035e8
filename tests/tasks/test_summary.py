"""The iteration's page in the Prefect UI: right numbers, and what is not defined said to be so."""

from __future__ import annotations

from typing import Any

import pytest

from tasks.session import Session
from tasks.stage import StageResult
from tasks.summary import HEADLINES, merged_metrics, metrics_table, number, summary_markdown


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


def test_the_page(run_folder: Any, bench: Any) -> None:
    page = summary_markdown(Session(run_folder(bench.config()).store), 3, RESULTS).splitlines()
    assert page[0] == "# bench, iteration 3"
    wanted = [
        "| mean reward | 0.123 |",
        "| held-out accuracy | 0.5 |",
        "| groups with signal | 0.625 |",
        "| tokens per completion | 12.7 |",
        "| entropy (nats) | not defined |",
        "| gradient norm | 1,234 |",
        "| sampler-learner mismatch (k3) | 1.2e-06 |",
        "| held-out 95% interval | 0.412 to 0.588 |",
        "| generate | executed | 64 | 12.3 | `iterations/0003/generate/abc` |",
        "| score | reused | 64 | 0.0 | `iterations/0003/score/abc` |",
    ]
    assert [line for line in wanted if line not in page] == []
    assert not any(HEADLINES["completion/truncated_frac"] in line for line in page), "a value nobody has"
    short = summary_markdown(Session(run_folder(bench.config()).store), 3, RESULTS[:4])
    assert "held-out" not in short and short.count("| executed |") == 3


def test_every_metric_is_in_the_table() -> None:
    rows = metrics_table(RESULTS)
    assert {row["metric"]: row["value"] for row in rows} == merged_metrics(RESULTS)
    assert [row["metric"] for row in rows if row["stage"] == "advantage"] == [
        "completion/tokens_mean",
        "groups/kept_frac",
        "reward/mean",
    ]
    assert len(rows) == sum(len(result.metrics) for result in RESULTS)

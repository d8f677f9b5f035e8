"""The glossary: complete for what the code logs, unambiguous, and a well-formed table."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rl_core.metrics import METRICS, glossary_entry, glossary_markdown

ROOT = Path(__file__).resolve().parents[2]
PREFIXES = "reward|groups|policy|mismatch|learner|eval|completion|time|prompt"
LOGGED = re.compile(rf"""f?["']((?:{PREFIXES})/[^"'\s]*[^"'\s_])["']""")


def logged_names() -> dict[str, str]:
    """Metric names in the code, a `{...}` of an f-string standing for a number, and where they were found."""
    found = {}
    for package in ("rl_core", "tasks", "flows"):
        for path in sorted((ROOT / package).rglob("*.py")):
            if path.name != "metrics.py":
                for name in LOGGED.findall(path.read_text(encoding="utf-8")):
                    found[re.sub(r"\{[^}]*\}", "1", name)] = str(path.relative_to(ROOT))
    return found


def test_every_logged_name_has_an_entry() -> None:
    names = logged_names()
    assert {"policy/entropy", "reward/mean", "groups/zero_var_frac"} <= names.keys()
    missing = {name: path for name, path in names.items() if glossary_entry(name) is None}
    assert not missing


@pytest.mark.parametrize(
    ("name", "entry"),
    [
        ("reward/mean", "reward/mean"),
        ("reward/shaped_mean", "reward/shaped_mean"),
        ("reward/last_integer_mean", "reward/<name>_mean"),
        ("reward/last_integer_unscored_frac", "reward/<name>_unscored_frac"),
        ("time/score_seconds", "time/<stage>_seconds"),
        ("eval/pass_at_8", "eval/pass_at_<k>"),
        ("eval/avg_at_16_se", "eval/avg_at_<k>_se"),
        ("eval/pass_at_x", None),
        ("policy/nothing", None),
        ("mean", None),
    ],
)
def test_entry_of_a_name(name: str, entry: str | None) -> None:
    assert glossary_entry(name) == entry


def test_entries_say_a_unit_and_a_meaning() -> None:
    for name, metric in METRICS.items():
        assert re.fullmatch(rf"(?:{PREFIXES})/[a-z0-9_<>]+", name), name
        assert metric.unit and metric.about and not metric.about.endswith("."), name


def test_markdown_is_one_row_of_three_cells_per_metric() -> None:
    header, rule, *rows = glossary_markdown().splitlines()
    assert header == "| metric | unit | meaning |" and rule == "|---|---|---|"
    assert len(rows) == len(METRICS)
    for row, (name, metric) in zip(rows, METRICS.items(), strict=True):
        cells = re.split(r"(?<!\\)\|", row)
        assert [cell.strip() for cell in cells] == ["", f"`{name}`", metric.unit, metric.about.replace("|", r"\|"), ""]

"""The ledger answers as a search through all its entries would, while it grows and after it is read again."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import pytest

from tasks.tracking.ledger import Ledger

RUNS = ["a", "b", None]


def pending(entries: list[dict[str, Any]], run_id: str | None) -> list[dict[str, Any]]:
    settled = [e["number"] for e in entries if e["kind"] in ("sent", "refused") and e["run_id"] == run_id]
    return [e for e in entries if e["kind"] in ("metrics", "dataset", "tag") and e["number"] not in settled]


def latest(entries: list[dict[str, Any]], kind: str, **where: Any) -> dict[str, Any] | None:
    found = [e for e in entries if e["kind"] == kind and where.items() <= e.items()]
    return found[-1] if found else None


@pytest.mark.parametrize("seed", range(5))
def test_answers_equal_a_search_through_all_entries(tmp_path: Path, seed: int) -> None:
    dice = random.Random(seed)
    ledger, asked = Ledger(tmp_path / "tracking.jsonl"), list(RUNS)
    for step in range(120):
        about = {"stage": dice.choice("xy"), "iteration": dice.randrange(3)}
        match dice.randrange(5):
            case 0:
                ledger.add({"kind": "metrics", **about, "marker": dice.randrange(2)})
            case 1:
                ledger.add({"kind": "dataset", "name": dice.choice("xy"), "digest": dice.choice("pq")})
            case 2:
                ledger.add({"kind": "tag", "key": dice.choice("xy"), "value": step})
            case 3 if waiting := ledger.pending("a"):
                ledger.append({"kind": dice.choice(["sent", "refused"]), "run_id": "a", "number": waiting[0]["number"]})
            case _:
                ledger.append({"kind": "mlflow_run", "uri": "u", "run_id": dice.choice("ab")})
        for run in asked:
            assert ledger.pending(run) == pending(ledger.entries, run)
        assert ledger.latest("metrics", **about) == latest(ledger.entries, "metrics", **about)
        assert ledger.latest("dataset", name="x", digest="p") == latest(ledger.entries, "dataset", name="x", digest="p")
        assert ledger.latest("tag", key="y") == latest(ledger.entries, "tag", key="y")
    again = Ledger(ledger.path)
    assert again.entries == ledger.entries
    assert [again.pending(run) for run in RUNS] == [ledger.pending(run) for run in RUNS]


def test_a_thousand_iterations_do_not_slow_it_down(tmp_path: Path) -> None:
    """What an iteration asks and adds takes as long behind 10,000 entries as behind none, the disk apart."""

    def seconds(ledger: Ledger) -> float:
        started = time.process_time()
        for iteration in range(25):
            for stage in ("generate", "score", "advantage", "train"):
                ledger.latest("metrics", stage=stage, iteration=10_000 + iteration)
                entry = ledger.add({"kind": "metrics", "stage": stage, "iteration": 10_000 + iteration})
                assert [e["number"] for e in ledger.pending("a")] == [entry["number"]]
                ledger.append({"kind": "sent", "run_id": "a", "number": entry["number"]})
        return time.process_time() - started

    path = tmp_path / "long.jsonl"
    lines = [
        f'{{"kind": "metrics", "stage": "s", "iteration": {n}, "number": {n}}}\n'
        f'{{"kind": "sent", "run_id": "a", "number": {n}}}\n'
        for n in range(5_000)
    ]
    path.write_text("".join(lines))
    long, short = Ledger(path), Ledger(tmp_path / "short.jsonl")
    assert long.pending("a") == [] == short.pending("a")
    # A search through all entries takes 30 times as long here; twice leaves room for a busy machine.
    assert min(seconds(long) for _ in range(2)) < 2 * min(seconds(short) for _ in range(2)) + 0.02

"""The reward pool: contained failures, real time limits, the contract enforced, everything cleaned up."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rl_core.config import RewardConfig
from rl_core.errors import RewardContractError, RewardFailedError
from tasks.scoring.job import _batches
from tasks.scoring.pool import RewardPool

pytestmark = pytest.mark.slow

USER_REWARDS = r"""
import os, re, subprocess, sys, time
from decimal import Decimal
import numpy as np

def length(completions):
    return [float(len(text)) for text in completions]

def index(completions, index):
    return [float(i) for i in index]

def hangs(completions, index):
    for text, i in zip(completions, index):
        if i == 3:
            while True:
                pass
        if i == 9:
            re.match(r"(a+)+$", "a" * 40 + "b")
    return [float(i) for i in index]

def refused(completions, index):
    if 5 in index:
        raise ConnectionError("judge refused \ud83d the call")
    return [float(i) for i in index]

def dies(completions, index, how="kill"):
    if 2 in index:
        if how == "exit":
            sys.exit(3)
        if how == "_exit":
            os._exit(0)
        os.kill(os.getpid(), 9)
    return [float(i) for i in index]

def once(completions, index, marker):
    if 2 in index and not os.path.exists(marker):
        open(marker, "w").close()
        os.kill(os.getpid(), 9)
    return [float(i) for i in index]

def breeds(completions, pidfile):
    children = [
        subprocess.Popen(["sleep", "300"]),
        subprocess.Popen(["setsid", "sleep", "300"]),
        subprocess.Popen(["sh", "-c", "(setsid sleep 300 & echo $! >> %s) & wait" % pidfile]),
    ]
    with open(pidfile, "a") as file:
        file.write("".join(f"{child.pid}\n" for child in children))
    while True:
        time.sleep(1)

def slow(completions):
    time.sleep(0.5)
    return [float(os.getpid())] * len(completions)

def wrong(completions, form):
    n = len(completions)
    forms = {
        "one": [1.0], "more": [1.0] * (n + 1), "tuple": (1.0,) * n, "generator": (1.0 for _ in range(n)),
        "float": 1.0, "dict": {i: 1.0 for i in range(n)}, "array": np.ones(n), "text": ["0.25"] * n,
        "types": [np.bool_(True), np.float32(0.5), 1, Decimal("0.25")],
    }
    return forms[form]

def mixed(completions):
    return [1.0, float("nan"), 0.0, float("1e400")][: len(completions)] if len(completions) > 1 else [1.0]

def sees(completions, prompts, completion_ids, truncated, answer, tests, **kwargs):
    assert all(prompt[0]["role"] == "user" for prompt in prompts)
    assert kwargs["index"] == [t["case"] for t in tests], (kwargs, tests)
    assert all(len(ids) == i for ids, i in zip(completion_ids, kwargs["index"]))
    assert truncated == [i % 2 == 0 for i in kwargs["index"]]
    return [None if a is None else float(a) for a in answer]

async def awaits(completions, index):
    import asyncio
    await asyncio.sleep(0.01)
    return [float(i) for i in index]

def echo(completions):
    print("scoring", len(completions))
    return [float(sum(map(ord, text[:1000])) + len(text)) for text in completions]
"""


def _rows(count: int, group_size: int = 4, **data: Any) -> list[dict[str, Any]]:
    return [
        {
            "group_id": i // group_size,
            "sample_id": i % group_size,
            "text": f"text {i}",
            "prompt_messages": [{"role": "user", "content": "?"}],
            "completion_ids": list(range(i)),
            "truncated": i % 2 == 0,
            "data": {"index": i, **data},
        }
        for i in range(count)
    ]


@pytest.fixture
def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., RewardPool]]:
    (tmp_path / "user_rewards.py").write_text(USER_REWARDS, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    pools = []

    def make(
        *functions: str | dict[str, Any], timeout: float = 30.0, processes: int = 2, batch: int = 64
    ) -> RewardPool:
        rewards = [
            RewardConfig(function=f"user_rewards:{f}") if isinstance(f, str) else RewardConfig.model_validate(f)
            for f in functions
        ]
        pools.append(RewardPool(rewards, processes, batch, timeout, tmp_path / "logs"))
        return pools[-1]

    yield make
    for each in pools:
        each.close()
        assert each.pids == []


def _gone(pid: int) -> bool:
    """No such process; a zombie that is another process's to reap counts as gone."""
    try:
        state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state == "Z" and int(parent) != os.getpid()


def test_hanging_rows_cost_only_themselves(pool: Callable[..., RewardPool]) -> None:
    """C07: a busy loop and a catastrophic regex, scored from a thread, then a second batch at full width."""
    subject = pool("hangs", "slow", timeout=2.0)
    results: dict[str, Any] = {}

    def work() -> None:
        started = time.monotonic()
        results["scores"] = subject.score(_rows(16), only=["hangs"])
        results["seconds"] = time.monotonic() - started
        started = time.monotonic()
        results["second"] = subject.score(_rows(16), only=["slow"])
        results["again"] = time.monotonic() - started

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(60)
    assert results["seconds"] < 10
    for i, score in enumerate(results["scores"]):
        guilty = i in (3, 9)
        assert score.values == {"hangs": None if guilty else float(i)}
        assert score.reasons == {"hangs": "timeout after 2 s" if guilty else None}
        assert score.total == (None if guilty else float(i))
    pids = {score.values["slow"] for score in results["second"]}
    assert len(pids) == 2 and pids == {float(pid) for pid in subject.pids}
    assert results["again"] < 5
    workers = subject.pids
    subject.close()
    assert all(_gone(pid) for pid in workers)


def test_descendants_of_a_hanging_reward_are_killed(pool: Callable[..., RewardPool], tmp_path: Path) -> None:
    """C07, C24: children that changed their session or were orphaned by a double fork do not survive the time limit."""
    pidfile = tmp_path / "pids"
    subject = pool({"function": "user_rewards:breeds", "params": {"pidfile": str(pidfile)}}, timeout=1.5, processes=1)
    (score,) = subject.score(_rows(1))
    assert score.reasons == {"breeds": "timeout after 1.5 s"}
    pids = [int(line) for line in pidfile.read_text().split()]
    assert len(pids) == 4
    assert all(_gone(pid) for pid in pids)


def test_a_row_that_raises_is_marked(pool: Callable[..., RewardPool]) -> None:
    """C02 mark: seven values kept, row 5 null with a reason that can be stored, never 0."""
    scores = pool("refused").score(_rows(8))
    assert [score.values["refused"] for score in scores] == [0, 1, 2, 3, 4, None, 6, 7]
    assert scores[5].reasons["refused"] == "ConnectionError: judge refused \ufffd the call"
    assert scores[5].total is None
    assert 'raise ConnectionError("judge refused' in scores[5].tracebacks["refused"]
    assert [score.reasons["refused"] for score in scores[:5] + scores[6:]] == [None] * 7


def test_a_row_that_raises_fails(pool: Callable[..., RewardPool]) -> None:
    """C02 fail: the error names row, function and the original traceback."""
    with pytest.raises(RewardFailedError) as caught:
        pool("refused").score(_rows(8), on_error="fail")
    assert "group 1, sample 1" in caught.value.message and "user_rewards:refused" in caught.value.message
    assert "ConnectionError" in caught.value.got
    assert "Traceback" in caught.value.details and "raise ConnectionError" in caught.value.details


@pytest.mark.parametrize(
    ("how", "reason"),
    [("kill", "process died: signal 9"), ("_exit", "process died: exit status 0"), ("exit", "SystemExit: 3")],
)
def test_a_row_that_ends_its_process(pool: Callable[..., RewardPool], how: str, reason: str) -> None:
    subject = pool({"function": "user_rewards:dies", "params": {"how": how}})
    scores = subject.score(_rows(6, group_size=3))
    assert [score.values["dies"] for score in scores] == [0, 1, None, 3, 4, 5]
    assert scores[2].reasons["dies"] == reason


def test_a_process_killed_from_outside_costs_no_row(pool: Callable[..., RewardPool], tmp_path: Path) -> None:
    """The first call of the single row dies by an accident that does not repeat."""
    marker = str(tmp_path / "marker")
    subject = pool({"function": "user_rewards:once", "params": {"marker": marker}}, batch=1)
    assert [score.values["once"] for score in subject.score(_rows(4))] == [0, 1, 2, 3]
    os.kill(subject.pids[0], signal.SIGKILL)
    assert [score.values["once"] for score in subject.score(_rows(4))] == [0, 1, 2, 3]


@pytest.mark.parametrize("form", ["one", "more", "generator", "float", "dict", "array", "text"])
def test_a_result_of_the_wrong_form_stops_the_scoring(pool: Callable[..., RewardPool], form: str) -> None:
    """C01, C05: one value for many rows is not spread over them, text is no number; nothing is retried."""
    subject = pool({"function": "user_rewards:wrong", "params": {"form": form}}, "slow", processes=1)
    with pytest.raises(RewardContractError) as caught:
        subject.score(_rows(4), only=["wrong"])
    assert "user_rewards:wrong" in caught.value.message
    assert caught.value.got
    if form in ("one", "more"):
        assert caught.value.expected == "4 values" and caught.value.got == f"{1 if form == 'one' else 5} values"
    assert len({score.values["slow"] for score in subject.score(_rows(4), only=["slow"])}) == 1  # the pool works on


def test_accepted_forms_and_types(pool: Callable[..., RewardPool]) -> None:
    """C01: a tuple. C05: numpy, int and Decimal values become floats."""
    subject = pool(
        {"function": "user_rewards:wrong", "name": "a", "params": {"form": "tuple"}},
        {"function": "user_rewards:wrong", "name": "b", "params": {"form": "types"}},
        processes=1,
    )
    scores = subject.score(_rows(4))
    assert [score.values["a"] for score in scores] == [1.0] * 4
    assert [score.values["b"] for score in scores] == [1.0, 0.5, 1.0, 0.25]
    assert all(type(value) is float for score in scores for value in score.values.values())


def test_values_that_are_not_finite(pool: Callable[..., RewardPool]) -> None:
    """C04: NaN and infinity are no values; with `fail` the first one stops the scoring."""
    subject = pool("mixed", processes=1)
    scores = subject.score(_rows(4))
    assert [score.values["mixed"] for score in scores] == [1.0, None, 0.0, None]
    assert [score.reasons["mixed"] for score in scores] == [None, "not finite", None, "not finite"]
    with pytest.raises(RewardFailedError, match="group 0, sample 1"):
        subject.score(_rows(4), on_error="fail")


def test_columns_reach_the_function_aligned(pool: Callable[..., RewardPool]) -> None:
    """C09: dictionaries in columns, missing keys as null, several batches; None means unscored, also with `fail`."""
    rows = _rows(10, group_size=2)
    for row in rows:
        i = row["data"]["index"]
        row["data"] |= {"tests": {"case": i}} | ({"answer": i * 10} if i != 7 else {})
    scores = pool("sees", batch=4).score(rows, on_error="fail")
    assert [score.values["sees"] for score in scores] == [None if i == 7 else i * 10.0 for i in range(10)]
    assert scores[7].reasons["sees"] == "returned None"


def test_reserved_and_missing_columns_are_refused(pool: Callable[..., RewardPool]) -> None:
    """C09: a data column named like an argument of ours is refused, not overwritten."""
    subject = pool("index", processes=1)
    with pytest.raises(RewardContractError, match="completions"):
        subject.score(_rows(2, completions="x"))
    rows = _rows(2)
    for row in rows:
        row["data"] = {"answer": 1}
    with pytest.raises(RewardContractError, match="needs 'index'") as caught:
        subject.score(rows)
    assert "answer" in caught.value.expected


def test_async_rewards_and_odd_texts(pool: Callable[..., RewardPool]) -> None:
    """C06 a: an async function. C10: NUL, bidirectional marks, U+FFFD and an 8 MB line arrive unchanged."""
    texts = ["ok \ufffd", "a\x00b", "\u202e42", "x" * 8_000_000]
    rows = _rows(4)
    for row, text in zip(rows, texts, strict=True):
        row["text"] = text
    subject = pool("awaits", "echo", processes=1)
    scores = subject.score(rows)
    assert [score.values["awaits"] for score in scores] == [0, 1, 2, 3]
    assert [score.values["echo"] for score in scores] == [float(sum(map(ord, t[:1000])) + len(t)) for t in texts]
    assert "scoring 4" in (subject._log_dir / "reward-0.log").read_text()
    assert set(subject.seconds) == {"awaits", "echo"} and all(s > 0 for s in subject.seconds.values())


def test_weighted_total(pool: Callable[..., RewardPool]) -> None:
    subject = pool(
        {"function": "user_rewards:index", "weight": 0.5},
        {"function": "user_rewards:refused", "weight": -2.0},
        {"function": "length_penalty", "weight": 1.0, "params": {"per_unit": 0.1, "max_penalty": 5.0}},
    )
    for i, score in enumerate(subject.score(_rows(8))):
        expected = None if i == 5 else 0.5 * i - 2.0 * i - 0.1 * i
        assert score.total is None if expected is None else math.isclose(score.total or 0.0, expected, abs_tol=1e-12)
    assert subject.score([]) == []


def test_source_that_changes_while_in_use(pool: Callable[..., RewardPool], tmp_path: Path) -> None:
    """A process started later must run the same source as the first one."""
    subject = pool("index")
    with (tmp_path / "user_rewards.py").open("a") as file:
        file.write("\n# changed\n")
    os.kill(subject.pids[0], signal.SIGKILL)
    with pytest.raises(RewardContractError, match="changed while it was in use"):
        subject.score(_rows(16))


def test_a_reward_that_cannot_be_loaded(pool: Callable[..., RewardPool]) -> None:
    with pytest.raises(RewardContractError, match="cannot be imported"):
        pool("no_such_function")


def test_batches_keep_groups_whole() -> None:
    rows = [{"group_id": g} for g in (0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3)]
    assert list(_batches(rows, limit=64, processes=2)) == [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]]
    assert list(_batches(rows, limit=4, processes=1)) == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]
    small = list(_batches(rows, limit=2, processes=1))
    assert max(map(len, small)) == 2 and [i for batch in small for i in batch] == list(range(12))

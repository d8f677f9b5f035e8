"""Counterfactual scoring of a run on disk: the numbers of the stages themselves, and the run stays as it is."""

from __future__ import annotations

import hashlib
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from rl_core.errors import ConfigError, RewardFailedError, RunError
from rl_core.manifest import Ref
from rl_core.recipes import build_config, config_json
from rl_core.stages import STAGES
from tasks.iterations import Position
from tasks.rescore import Rescoring, print_comparison, rescore
from tasks.storage.store import RunStore

pytestmark = pytest.mark.slow  # nearly every test starts processes for the rewards

Row = dict[str, Any]

REWARDS = """
import pathlib
CALLS = pathlib.Path(__file__).parent / "calls.txt"

def judge(completions, value, scale=1.0):
    with open(CALLS, "a") as file:
        file.write("judge\\n" * len(completions))
    if None in value:
        raise ConnectionError("the judge refused")
    return [scale * v for v in value]

def brevity(completions):
    with open(CALLS, "a") as file:
        file.write("brevity\\n" * len(completions))
    return [-0.25 * len(text) for text in completions]
"""

VALUES: list[list[float | None]] = [[1.0, 0.5, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0], [0.1, 0.2, 0.3, 0.7]]


class Made:
    """A run whose scores and advantages the stages made, with the module of its rewards."""

    def __init__(self, bench: Any, run_folder: Any, user_module: Any, rows: Any) -> None:
        self.name, self.source = user_module(REWARDS)
        self.bench, self.rows = bench, rows
        self.judge = {"function": f"{self.name}:judge", "name": "judge"}
        self.config = bench.config(
            rewards=[self.judge], environment=bench.prompts(["x"], [{"value": 1.0}]), scoring={"on_error": "mark"}
        )
        self.run = run_folder(self.config)
        self.at = Position(0, self.run.store.base_model(), 0)

    def calls(self) -> dict[str, int]:
        path = self.source.parent / "calls.txt"
        found = path.read_text().split() if path.exists() else []
        return {word: found.count(word) for word in set(found)}

    def trajectories(self, values: list[list[float | None]]) -> Ref:
        found: Ref = self.bench.trajectories(
            [
                {"group": g, "sample": s, "text": "x" * (g + 2 * s), "data": {"value": value}}
                for g, group in enumerate(values)
                for s, value in enumerate(group)
            ]
        )
        return found

    def stages(self, config: Any, made: Ref) -> tuple[Ref, Ref, Any]:
        """The two stages, executed on trajectories: rewards, advantages, the score stage's context."""
        context = self.bench.context(config, generate=made)
        scored = self.bench.perform("score", context)
        return scored, self.bench.run("advantage", config, generate=made, score=scored), context

    def add(self, values: list[list[float | None]] = VALUES, overrides: list[str] | None = None) -> Ref:
        """One more iteration with these values of the judge, under overrides of its own."""
        k, run, made = self.at.iteration, self.run, self.trajectories(values)
        run.iterations.begin(self.at, overrides or [])
        config = run.iterations.config(k)
        scored, advantages, context = self.stages(config, made)
        policy = {"policy": self.at.policy}
        published = run.publish(
            k, "generate", self.rows(made), policy, identity={"reference": None}, state={"cursor": 0}
        )
        identity = STAGES["score"].identity(config, context.facts)
        inputs = {"generate": published}
        run.config = config
        inputs["score"] = run.publish(k, "score", self.rows(scored), inputs, identity=identity)
        run.publish(k, "advantage", self.rows(advantages), inputs, identity={})
        self.at = Position(k + 1, Ref(path=f"iterations/{k:04d}/train", digest=f"policy {k + 1}"), 0)
        return made


@pytest.fixture
def made(
    bench: Any, run_folder: Any, user_module: Any, rows: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Made:
    monkeypatch.setenv("RLSTAGES_RUNS_DIR", str(tmp_path / "runs"))
    return Made(bench, run_folder, user_module, rows)


def listing(folder: Path) -> dict[str, tuple[int, str]]:
    """Time of change of everything below a folder, and the digest of every file."""
    return {
        str(path.relative_to(folder)): (
            path.stat().st_mtime_ns,
            hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "",
        )
        for path in sorted(folder.rglob("*"))
    }


def text_of(result: Rescoring) -> str:
    console = Console(file=io.StringIO(), width=100, record=True)
    print_comparison(console, result)
    return console.export_text()


def flat(text: str) -> str:
    return " ".join(text.split())


def test_the_same_settings_change_nothing_and_touch_nothing(made: Made) -> None:
    """Also while another process holds the run; no function is called, every number is the stored one."""
    made.add()
    made.add([[0.5, 1.0]] * 3)
    before, calls = listing(made.run.store.path.parent), made.calls()
    with made.run.store.lock():
        before = listing(made.run.store.path.parent)
        result = rescore("bench", [])
        assert listing(made.run.store.path.parent) == before
    assert made.calls() == calls and result.called == {"judge": 0}
    assert result.rows["old"].equals(result.rows["new"].alias("old")) and len(result.rows) == 18
    assert result.rows["old_advantage"].to_list() == result.rows["new_advantage"].to_list()
    assert "Nothing would have changed: all 18 completions keep" in flat(text_of(result))
    assert result.overall.within.value == result.overall.pooled.value == 1.0


def test_other_weights_need_no_call_and_give_what_the_stages_give(made: Made) -> None:
    """Each iteration has its own config: the second one's weight of 3 stays where only the estimator changes."""
    first, second = made.add(), made.add([[0.1, 0.2, 0.7]] * 3, ["rewards.judge.weight=3"])
    calls = made.calls()
    for sets in (["rewards.0.weight=0.3"], ["algorithm.name=dr_grpo"]):
        result = rescore("bench", sets)
        assert made.calls() == calls, "functions were called"
        for k, (ref, own) in enumerate([(first, []), (second, ["rewards.judge.weight=3"])]):
            config = made.run.iterations.overridden(k, [*own, *sets])
            scored, advantages, _ = made.stages(config, ref)
            calls = made.calls()
            mine = result.rows.filter(iteration=k)
            assert mine["new"].to_list() == [row["reward"] for row in made.rows(scored)]
            assert mine["new_advantage"].to_list() == [row["advantage"] for row in made.rows(advantages)]
            assert mine["new_keep"].to_list() == [row["keep"] for row in made.rows(advantages)]
    assert result.weights == {"judge": ([1.0, 3.0], [1.0, 3.0])}
    assert "comes from how advantages are made" in flat(text_of(result))


def test_only_a_new_component_is_called(made: Made) -> None:
    ref = made.add()
    made.add()
    calls = made.calls()
    brevity = f'{{function="{made.name}:brevity",weight=0.5}}'
    sets = [f'rewards=[{{function="{made.name}:judge",weight=2}},{brevity}]']
    result = rescore("bench", sets)
    assert made.calls() == calls | {"brevity": 24}
    assert result.called == {"judge": 0, "brevity": 24}
    scored, advantages, _ = made.stages(made.run.iterations.overridden(0, sets), ref)
    first = result.rows.filter(iteration=0)
    assert first["new"].to_list() == [row["reward"] for row in made.rows(scored)]
    assert first["new_advantage"].to_list() == [row["advantage"] for row in made.rows(advantages)]
    assert first["new:brevity"].to_list() == [0.5 * row["reward_brevity"] for row in made.rows(scored)]
    assert first["old:brevity"].to_list() == [0.0] * 12
    # Totals of group 0: 1 .5 0 0 before, and 2 - 0, 1 - .25, -.5, -.75. Group 1 had no signal; group 2: .1 .2 .3 .7
    # before, .2 - .25, .4 - .5, .6 - .75, 1.4 - 1 now.
    by_hand = [2, 0.75, -0.5, -0.75, -0.125, -0.375, -0.625, -0.875, -0.05, -0.1, -0.15, 0.4]
    assert first["new"].to_list() == pytest.approx(by_hand)
    found = result.iterations[0]
    assert (found.gained, found.lost, found.best_changed) == (1, 0, 0)
    text = text_of(result)
    assert max(map(len, text.splitlines())) <= 100
    row = next(line.split() for line in text.splitlines() if line.split()[:1] == ["1"])
    assert row[1:3] == [f"{found.old_mean:.3f}", f"{found.new_mean:.3f}"] and row[7:9] == ["+1", "-0"]
    assert "computed for 24" in text and "none → 0.5" in text and "1 → 2" in text


def test_a_component_whose_source_has_changed_is_called(made: Made) -> None:
    """After a mistake is mended, `rescore RUN` alone says what it did; the stored values are of the old source."""
    made.add()
    made.source.write_text(REWARDS.replace("scale * v", "-scale * v"))
    result = rescore("bench", [])
    assert result.called == {"judge": 12}
    assert result.rows["new"].to_list() == [-value for value in result.rows["old"].to_list()]
    assert result.overall.within.value == pytest.approx(-1.0) and result.overall.best_changed == 2
    assert result.overall.flipped_groups == 2
    assert "2 of 3 groups flip" in flat(text_of(result))


def test_rows_without_a_score(made: Made) -> None:
    """Gaps are part of a column; other limits might fill them, so under those the function is asked again."""
    made.add([[1.0, None, 0.0], [0.5, 0.25, 0.75]])
    calls = made.calls()["judge"]
    result = rescore("bench", ["rewards.0.weight=2"])
    assert made.calls()["judge"] == calls
    assert result.rows["new"].to_list() == [2.0, None, 0.0, 1.0, 0.5, 1.5]
    assert (result.overall.old_unscored, result.overall.new_unscored) == (1, 1)
    assert rescore("bench", ["scoring.timeout_seconds=20"]).called == {"judge": 6}
    with pytest.raises(RewardFailedError, match="group 0, sample 1"):
        rescore("bench", ["scoring.on_error=fail"])
    with pytest.raises(RewardFailedError, match="1 of 6 completions have no score"):
        rescore("bench", ["scoring.max_unscored_fraction=0.1"])


def test_what_cannot_be_compared_is_said(made: Made) -> None:
    with pytest.raises(RunError, match="no run 'other'"):
        rescore("other", [])
    with pytest.raises(RunError, match="no iteration that can be compared"):
        rescore("bench", [])
    made.add()
    made.add()
    made.run.iterations.begin(made.at)
    made.run.publish(2, "generate", made.rows(made.trajectories(VALUES)), {"policy": made.at.policy})
    folder = made.run.store.path / made.run.store.iteration(1)["stages"]["score"]["folder"]
    (folder / "part-0000.parquet").unlink()
    result = rescore("bench", ["rewards.0.weight=2"])
    assert list(result.iterations) == [0]
    assert result.skipped == {1: "its score output is damaged", 2: "its score output is not made yet"}
    assert "iteration 2 is not compared: its score output is not made yet" in text_of(result)


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (["learner.lr=1"], "another learner.lr"),
        (["rewards.0.weight=2", "algorithm.clip_low=0.1"], "another algorithm.clip_low"),
        (["algorithm={name='rloo'}"], "another algorithm"),
        (["rewardsx=1"], "another rewardsx"),
        (["rewards.4.weight=1"], "there is no item '4'"),
        (["algorithm.kl.coef=0.1", "algorithm.kl.place=reward"], "no log-probs of the reference policy"),
    ],
)
def test_settings_that_are_refused(made: Made, sets: list[str], message: str) -> None:
    made.add()
    with pytest.raises(ConfigError, match=message):
        rescore("bench", sets)


def test_outputs_of_another_run(made: Made) -> None:
    """A fork refers to its parent's folders: what is compared is what was made there, not the fork's own settings."""
    made.add()
    child = RunStore(made.run.store.path.parent, "child")
    other = build_config(
        config_json(made.config) | {"name": "child", "algorithm": {"name": "rloo"}, "scoring": {"on_error": "fail"}}, ""
    )
    child.create(other, made.run.store.base_model(), "test")
    record = json.loads(json.dumps(made.run.store.iteration(0)))
    for stage in record["stages"].values():
        stage["folder"] = f"../bench/{stage['folder']}"
    child.iteration_dir(0).mkdir(parents=True)
    child.write_iteration(0, record)
    assert "Nothing would have changed" in flat(text_of(rescore("child", [])))
    result = rescore("child", ["rewards.0.weight=2"])
    assert result.rows["new"].to_list() == [2 * value for group in VALUES for value in group if value is not None]


def test_the_command_brings_in_no_orchestrator_no_tracker_and_no_model(made: Made, tmp_path: Path) -> None:
    made.add()
    code = (
        "import sys\nfrom flows.cli import app\n"
        "app(['rescore', 'bench', '--set', 'rewards.0.weight=2'], standalone_mode=False)\n"
        "print('found', [m for m in ('prefect', 'mlflow', 'torch', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "found []"
    assert "exactly as before" in flat(done.stdout)
    assert sorted(path.name for path in tmp_path.glob("*.partial*")) == [] and not (tmp_path / ".state").exists()

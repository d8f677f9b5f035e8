"""The report of a run: its numbers, its samples, and that nothing a model or a user wrote becomes markup."""

from __future__ import annotations

import json
import math
import random
import shutil
import subprocess
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from rl_core.errors import RunError
from rl_core.manifest import Ref
from tasks.iterations import Position
from tasks.live.adjustment_log import Adjustment, AdjustmentLog
from tasks.report import samples, write_report
from tasks.report.samples import spread, token_texts

Row = dict[str, Any]
EVIL = "</script><img src=x onerror=\"document.title='owned'\"><!-- <script>alert(1)</script> & \u2028 \u202e €😀"


class Page(HTMLParser):
    """Tags, scripts and visible text of a page, as a browser without JavaScript would see them."""

    def __init__(self, path: Path) -> None:
        super().__init__(convert_charrefs=True)
        self.html = path.read_text("utf-8")
        self.tags: Counter[str] = Counter()
        self.attributes: list[tuple[str, str | None]] = []
        self.scripts: list[str] = []
        self.text = ""
        self._in_script = False
        self.feed(self.html)
        self.data: dict[str, Any] = json.loads(self.scripts[1])

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += attrs
        if tag == "script":
            self._in_script = True
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self._in_script = self._in_script and tag != "script"

    def handle_data(self, data: str) -> None:
        if self._in_script:
            self.scripts[-1] += data
        else:
            self.text += data

    def samples(self, iteration: int) -> list[Row]:
        return next(it["groups"] for it in self.data["samples"] if it["iteration"] == iteration)

    def text_of(self, completion: Row, special: bool = True) -> str:
        tokens = [self.data["tokens"][index] for index in completion["tokens"]]
        return "".join(text for _, text, is_special in tokens if special or not is_special)


@pytest.fixture
def run(bench: Any, run_folder: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """An empty run; its starting model is the tokenizer of the tiny model, a byte a token."""
    monkeypatch.setenv("RLSTAGES_RUNS_DIR", str(tmp_path / "runs"))
    shutil.copytree(bench.model, tmp_path / "base")
    made = run_folder(bench.config(iterations=2))
    made.tokenizer = Tokenizer.from_file(str(bench.model / "tokenizer.json"))
    return made


def publish(run: Any, bench: Any, rows: Any, at: Position, table: list[Row], **more: float) -> dict[str, Ref]:
    """Generate, score and advantage of an iteration, complete rows made of what the test says of each."""
    run.iterations.begin(at)
    ids = {id(row): row.get("ids") or run.tokenizer.encode(row["text"], add_special_tokens=False).ids for row in table}
    made = [
        {
            "group": r["group"],
            "sample": r["sample"],
            "text": r["text"],
            "completion_ids": ids[id(r)],
            **r.get("more", {}),
        }
        for r in table
    ]
    refs = {"policy": at.policy}
    refs["generate"] = run.publish(at.iteration, "generate", rows(bench.trajectories(made)), dict(refs))
    scores, advantages = [], []
    for row in table:
        key, reward = {"group_id": row["group"], "sample_id": row["sample"]}, row["reward"]
        why = {"reason_last_integer": None if reward is not None else EVIL}
        scores.append(key | why | {"reward": reward, "reward_last_integer": reward, "status": "ok"})
        shaped = {"reward": reward, "advantage": row.get("advantage", 0.0)}
        advantages.append(key | shaped | {"keep": reward is not None, "drop_reason": row.get("why")})
    inputs = {"generate": refs["generate"]}
    metrics = {"reward/last_integer_mean": 0.25}
    refs["score"] = run.publish(at.iteration, "score", scores, inputs, metrics=metrics)
    metrics = {"reward/mean": 0.25 + at.iteration, "groups/kept_frac": None, **more}
    inputs["score"] = refs["score"]
    refs["advantage"] = run.publish(at.iteration, "advantage", advantages, inputs, metrics=metrics)
    return refs


def start(run: Any, iteration: int = 0) -> Position:
    return Position(iteration, run.store.base_model(), 0)


def table(groups: int, samples: int, text: str = "answer", **more: Any) -> list[Row]:
    """Group g has mean reward g."""
    return [
        {"group": g, "sample": s, "reward": float(g), "advantage": s - 1.0, "text": text, "more": more}
        for g in range(groups)
        for s in range(samples)
    ]


# -- text ------------------------------------------------------------------------------------------------------------
def test_what_models_and_users_write_stays_text(run: Any, bench: Any, rows: Any, tmp_path: Path) -> None:
    messages = [{"role": "user", "content": EVIL}]
    written = [
        {"group": 0, "sample": s, "reward": [1.0, None][s], "text": EVIL, "why": "unscored" if s else None}
        | {"more": {"prompt_messages": messages, "data": {"answer": EVIL}}}
        for s in range(2)
    ]
    publish(run, bench, rows, start(run), written)
    change = {"key": "learner.lr", "old": 1e-3, "new": 1e-4, "from_iteration": 1, "by": EVIL, "why": EVIL}
    AdjustmentLog(run.store).append([Adjustment(id=1, at="2026-01-02T03:04:05Z", **change)])
    page = Page(write_report(run.store.name))
    assert (page.tags["script"], page.tags["img"]) == (3, 0)
    assert page.text.count(EVIL) == 2  # who changed a setting, and why
    [group] = page.samples(0)
    assert group["messages"] == [["user", EVIL]] and json.loads(group["task"])["answer"] == EVIL
    assert [page.text_of(completion) for completion in group["completions"]] == [EVIL, EVIL]
    assert group["completions"][1]["components"]["last_integer"] == [None, EVIL]


def test_page_asks_for_nothing_outside_itself(run: Any, bench: Any, rows: Any) -> None:
    publish(run, bench, rows, start(run), table(2, 2))
    page = Page(write_report(run.store.name))
    policy = next(value for key, value in page.attributes if key == "content" and value and "default-src" in value)
    assert "default-src 'none'" in policy and "unsafe-eval" not in policy and "connect-src" not in policy
    assert not {"link", "iframe", "object", "embed", "form", "base"} & page.tags.keys()
    for key, value in page.attributes:
        assert key not in ("src", "srcset", "action") and not key.startswith("on")
        assert key != "href" or (value or "").startswith("#")
    style = page.html.partition("<style>")[2].partition("</style>")[0]
    assert "url(" not in style and "@import" not in style


def test_every_token_has_its_text(run: Any) -> None:
    text = "é€😀 plain"
    ids = run.tokenizer.encode(text, add_special_tokens=False).ids
    texts = token_texts(run.tokenizer, ids)
    assert len(texts) == len(ids) == len(text.encode()) and "".join(texts) == text
    assert texts[:9] == ["", "é", "", "", "€", "", "", "", "😀"]


def test_bytes_that_are_no_text_do_not_hold_it_up(run: Any) -> None:
    broken = run.tokenizer.encode("€", add_special_tokens=False).ids[:1] * 500
    letter = run.tokenizer.encode("a", add_special_tokens=False).ids
    assert token_texts(run.tokenizer, broken + letter)[-1].endswith("a")
    assert "".join(token_texts(run.tokenizer, letter + broken[:1])) == "a\ufffd"
    end = run.tokenizer.token_to_id("<eos>")
    assert token_texts(run.tokenizer, [*letter, *broken[:2], end]) == ["a", "", "\ufffd\ufffd", "<eos>"]


@pytest.mark.parametrize("space", [pre_tokenizers.Metaspace(), pre_tokenizers.ByteLevel(add_prefix_space=False)])
def test_spaces_between_tokens_are_kept(space: Any) -> None:
    """A token decoded alone loses its space under Metaspace; joined texts must be what decoding the whole gives."""
    metaspace = isinstance(space, pre_tokenizers.Metaspace)
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([space, pre_tokenizers.Split(Regex(r"\d"), "isolated")])
    tokenizer.decoder = decoders.Metaspace() if metaspace else decoders.ByteLevel()
    text = "one two three 12 naïve two one"
    alphabet = [] if metaspace else pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<unk>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([text], trainer)
    ids = tokenizer.encode(text).ids
    texts = token_texts(tokenizer, ids)
    assert len(texts) == len(ids) and "".join(texts) == tokenizer.decode(ids) == text
    assert any(t.startswith(" ") for t in texts)


# -- what is shown, what is left out ---------------------------------------------------------------------------------
def test_groups_stand_from_best_to_worst(run: Any, bench: Any, rows: Any) -> None:
    written = table(3, 2, temperature=1.0)
    written[0]["more"]["action_mask"] = [True, False, True, True, True, True]
    publish(run, bench, rows, start(run), written)
    groups = Page(write_report(run.store.name)).samples(0)
    assert [(g["group"], g["rank"], g["mean"]) for g in groups] == [(2, 0, 2.0), (1, 1, 1.0), (0, 2, 0.0)]
    first, second = groups[-1]["completions"]
    assert (first["advantage"], second["advantage"]) == (-1.0, 0.0)
    assert first["actions"] == [1, 0, 1, 1, 1, 1]


def test_a_long_run_says_what_it_leaves_out(
    run: Any, bench: Any, rows: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(samples, "MAX_ITERATIONS", 3)
    monkeypatch.setattr(samples, "MAX_TOKENS", 144)
    monkeypatch.setattr(samples, "MAX_GROUP_COMPLETIONS", 2)
    monkeypatch.setattr(samples, "HEAD_TOKENS", 4)
    monkeypatch.setattr(samples, "TAIL_TOKENS", 2)
    for iteration in range(7):
        publish(run, bench, rows, start(run, iteration), table(9, 4, text="0123456789"))
    page = Page(write_report(run.store.name, tmp_path / "page.html"))
    assert [it["iteration"] for it in page.data["samples"]] == [0, 3, 6]
    assert "completions of 3 of 7 iterations" in page.text
    for it in page.data["samples"]:
        # 48 tokens an iteration are four groups: the two best and the two worst
        assert [g["group"] for g in it["groups"]] == [8, 7, 1, 0] and it["groups_left_out"] == 5
        for group in it["groups"]:
            assert [c["sample"] for c in group["completions"]] == [0, 3] and group["completions_left_out"] == 2
            assert all(page.text_of(c) == "012389" and c["gap"] == [4, 8] for c in group["completions"])
            assert all(len(c["logprobs"]) == 6 and c["length"] == 10 for c in group["completions"])


def test_page_of_long_completions_stays_small(run: Any, bench: Any, rows: Any) -> None:
    """650,000 tokens of an iteration, of which a page of 10 MB cannot hold all."""
    rng = random.Random(0)
    written = table(32, 32)
    for row in written:
        row["ids"] = [rng.randrange(256) for _ in range(640)]
    publish(run, bench, rows, start(run), written)
    path = write_report(run.store.name)
    assert path.stat().st_size < 10e6
    [it] = Page(path).data["samples"]
    assert it["groups"] and len(it["groups"]) + it["groups_left_out"] == 32


@pytest.mark.parametrize(("count", "limit", "expected"), [(0, 3, []), (3, 3, [0, 1, 2]), (9, 3, [0, 4, 8])])
def test_spread(count: int, limit: int, expected: list[int]) -> None:
    assert spread(count, limit) == expected


def test_a_run_without_tokenizer_shows_text(run: Any, bench: Any, rows: Any, tmp_path: Path) -> None:
    publish(run, bench, rows, start(run), table(1, 2))
    (tmp_path / "base" / "tokenizer.json").unlink()
    page = Page(write_report(run.store.name))
    assert page.data["samples"][0]["tokens"] is False
    assert [c["text"] for c in page.samples(0)[0]["completions"]] == ["answer", "answer"]


def test_a_run_without_outputs_has_a_page(run: Any) -> None:
    page = Page(write_report(run.store.name))
    assert "0 of 2" in page.text and "have not been evaluated yet" in page.text
    assert page.data["charts"] == {} and page.data["samples"] == []


def test_damaged_outputs_are_named_and_left_out(run: Any, bench: Any, rows: Any) -> None:
    for iteration in range(2):
        publish(run, bench, rows, start(run, iteration), table(2, 2))
    made = {k: run.store.path / run.store.iteration(0)["stages"][k]["folder"] for k in ("score", "generate")}
    (made["score"] / "part-0000.parquet").unlink()
    part = made["generate"] / "part-0000.parquet"
    part.write_bytes(b"\0" * part.stat().st_size)  # whole by its size, and not a table
    page = Page(write_report(run.store.name))
    assert "iteration 0: the output of score is missing or damaged" in page.text
    assert "iteration 0, generate: " in page.text
    assert page.data["tables"]["metrics"]["reward/mean"] == [0.25, 1.25]
    assert page.samples(0) == [] and len(page.samples(1)) == 2


# -- numbers ---------------------------------------------------------------------------------------------------------
def test_interval_of_the_mean_reward_is_over_groups(run: Any, bench: Any, rows: Any) -> None:
    """Of two groups a bootstrap draws both, or one of them twice, each in a quarter of the draws."""
    publish(run, bench, rows, start(run), table(2, 4))
    publish(run, bench, rows, start(run, 1), table(1, 4))
    metrics = Page(write_report(run.store.name)).data["tables"]["metrics"]
    assert (metrics["band/reward_low"], metrics["band/reward_high"]) == ([0.0, None], [1.0, None])


def test_changes_and_settings_are_listed(run: Any, bench: Any, rows: Any) -> None:
    publish(run, bench, rows, start(run), table(2, 2))
    run.iterations.begin(start(run, 1), ["learner.lr=0.5"])
    page = Page(write_report(run.store.name))
    assert "1 only" in page.text and "learner.lr0.5rerun of this iteration" in page.text
    # bold: what the run set itself, here the group size and not the temperature
    assert "<strong>generate.group_size</strong>" in page.html and "<strong>generate.temperature<" not in page.html


def test_health_names_the_flags_of_the_last_iteration_and_when_others_were_raised(
    run: Any, bench: Any, rows: Any
) -> None:
    for iteration, cut in enumerate((0.5, 0.5, 0.0, 0.5, 0.1)):
        metrics = {"completion/truncated_frac": cut, "reward/nonfinite_frac": 0.3 if iteration == 4 else 0.0}
        publish(run, bench, rows, start(run, iteration), table(2, 2), **metrics)
    page = Page(write_report(run.store.name))
    assert "Iteration 4: alarm: failed rewards." in page.text and "30% have no reward" in page.text
    assert "Earlier: truncated completions in 0–1, 3." in page.text


def test_verdict_is_of_the_same_problems(run: Any, bench: Any, rows: Any) -> None:
    """0 of 6 before, 4 of 6 after: the interval of the paired difference lies above 0."""

    def answers(right: int) -> list[Row]:
        made = bench.trajectories([{"group": g, "sample": 0} for g in range(6)])
        more = {"mode": "greedy", "score": 1.0, "reason": None}
        return [row | more | {"correct": row["group_id"] < right} for row in rows(made)]

    refs = publish(run, bench, rows, start(run), table(2, 2))
    trained = run.publish(0, "train", "weights", {name: refs[name] for name in ("policy", "generate", "advantage")})
    before = {"eval/greedy_accuracy": 0.0, "eval/greedy_low": 0.0, "eval/greedy_high": 0.39}
    run.iterations.begin_evaluation(0, [])
    run.publish(-1, "evaluate", answers(0), {}, metrics=before)
    run.iterations = run.reopened()
    run.iterations.begin(start(run))
    after = {"eval/greedy_accuracy": 4 / 6, "eval/greedy_low": 0.3, "eval/greedy_high": 0.9}
    run.publish(0, "evaluate", answers(4), {"train": trained}, metrics=after)
    page = Page(write_report(run.store.name))
    assert "Better. Held-out accuracy went from 0.0% to 66.7%: +66.7 points on 6 problems" in page.text
    assert page.data["tables"]["heldout"] == {
        "iteration": [-1, 0],
        "answers": ["greedy", "greedy"],
        "accuracy": [0.0, 4 / 6],
        "low": [0.0, 0.3],
        "high": [0.39, 0.9],
    }


def test_errors_say_what_is_wrong(run: Any, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="there is no run"):
        write_report("nobody")
    with pytest.raises(RunError, match="cannot be written"):
        write_report(run.store.name, tmp_path / "no" / "folder.html")
    with pytest.raises(RunError, match="cannot be written"):
        write_report(run.store.name, tmp_path)


# -- a real run, a real browser --------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def real(new_project: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Page]:
    """A run of the smoke recipe and its report, made by the command line."""
    project = new_project(tmp_path_factory.mktemp("report") / "project")
    project.call("run", "smoke", "--set", "iterations=2", "--set", "execution.threads=1")
    path = Path(project.call("report", "smoke").strip().splitlines()[-1])
    assert path == project.run_folder("smoke") / "report.html"
    return project.run_folder("smoke"), Page(path)


def outputs(run: Path, iteration: int) -> dict[str, Path]:
    record = json.loads((run / "iterations" / f"{iteration:04d}" / "iteration.json").read_text())
    return {stage: run / made["folder"] for stage, made in record["stages"].items()}


@pytest.mark.slow
def test_charts_draw_what_the_manifests_say(real: tuple[Path, Page]) -> None:
    run, page = real
    tables = page.data["tables"]
    assert tables["metrics"]["iteration"] == [0, 1]
    seconds = {}
    for iteration in range(2):
        values: Row = {}
        for stage, folder in outputs(run, iteration).items():
            manifest = json.loads((folder / "manifest.json").read_text())
            values |= manifest["metrics"]
            seconds[iteration, stage] = manifest["measured"]["seconds"]
        assert {name: tables["metrics"][name][iteration] for name in values} == values
        at = tables["heldout"]["iteration"].index(iteration)
        assert tables["heldout"]["answers"][at] == "greedy"
        drawn = [tables["heldout"][name][at] for name in ("accuracy", "low", "high")]
        assert drawn == [values[f"eval/greedy_{name}"] for name in ("accuracy", "low", "high")]
        at = tables["components"]["iteration"].index(iteration)
        assert tables["components"]["mean"][at] == values["reward/format_regex_mean"]
    table = tables["seconds"]
    assert dict(zip(zip(table["iteration"], table["stage"], strict=True), table["seconds"], strict=True)) == seconds


@pytest.mark.slow
def test_samples_and_lengths_are_those_of_the_parquet_files(real: tuple[Path, Page]) -> None:
    run, page = real
    for iteration in range(2):
        folders = outputs(run, iteration)
        frames = {s: pl.read_parquet(folders[s] / "part-0000.parquet") for s in ("generate", "score", "advantage")}
        shown = {(g["group"], c["sample"]): c for g in page.samples(iteration) for c in g["completions"]}
        assert len(shown) == frames["generate"].height == 16
        rewards = []
        for row in frames["generate"].iter_rows(named=True):
            key = row["group_id"], row["sample_id"]
            here = (pl.col("group_id") == key[0]) & (pl.col("sample_id") == key[1])
            score = frames["score"].filter(here).row(0, named=True)
            advantage = frames["advantage"].filter(here).row(0, named=True)
            completion = shown[key]
            assert [page.data["tokens"][i][0] for i in completion["tokens"]] == row["completion_ids"]
            assert page.text_of(completion, special=False) == row["text"]
            assert completion["logprobs"] == pytest.approx(row["sampler_logprobs"], abs=1e-4)
            assert (completion["reward"], completion["advantage"]) == (score["reward"], advantage["advantage"])
            assert completion["truncated"] == row["truncated"]
            rewards.append(score["reward"])
        at = page.data["tables"]["metrics"]
        assert at["reward/mean"][iteration] == pytest.approx(math.fsum(rewards) / len(rewards), abs=1e-12)
        assert at["band/reward_low"][iteration] <= at["reward/mean"][iteration] <= at["band/reward_high"][iteration]
        counted: Counter[tuple[int, str]] = Counter()
        for ids, truncated in frames["generate"].select("completion_ids", "truncated").iter_rows():
            counted[len(ids), "truncated" if truncated else "ended"] += 1
        lengths = page.data["tables"]["lengths"]
        drawn = zip(*(lengths[name] for name in ("iteration", "from_tokens", "end", "completions")), strict=True)
        assert {(low, end): n for it, low, end, n in drawn if it == iteration} == counted


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium")
def test_a_browser_draws_every_chart_and_runs_no_foreign_script(
    run: Any, bench: Any, rows: Any, real: tuple[Path, Page], tmp_path: Path
) -> None:
    for iteration in range(2):
        publish(run, bench, rows, start(run, iteration), table(3, 2, text=EVIL))
    evil = write_report(run.store.name)
    for path in (real[0] / "report.html", evil):
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
        command = ["chromium", *options, "--virtual-time-budget=5000", "--dump-dom", path.as_uri()]
        dom = tmp_path / f"{path.parent.name}.html"
        dom.write_bytes(subprocess.run(command, check=True, capture_output=True, timeout=120).stdout)
        drawn = Page(dom)
        assert drawn.tags["svg"] == len(drawn.data["charts"]) > 3
        assert drawn.tags["article"] > 0 and drawn.tags["img"] == 0
        assert f"<title>{drawn.data['run']}: report</title>" in drawn.html

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

import tasks.tracking.tracker
from rl_core.config import RegistryConfig
from rl_core.errors import ConfigError, CorruptOutputError, StageError
from rl_core.manifest import Manifest, content_digest
from rl_core.models import fetch_model
from rl_core.schemas import DECISIONS, EVALUATION
from tasks.storage.files import describe, write_json
from tasks.storage.tables import write_table
from tasks.tracking.gate import Candidate
from tasks.tracking.mlflow_client import open_client
from tasks.tracking.registry import Registration, champion_version, register_policy
from tasks.tracking.tracker import Tracker

pytestmark = [
    # MLflow 3.17 sets up its own tables with a loader option that SQLAlchemy 2.1 has deprecated.
    pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy"),
    # `import mlflow.pyfunc` warns of a type hint in a class of its own.
    pytest.mark.filterwarnings("ignore:.*Any type hint is inferred as AnyType:UserWarning"),
]

CONFIG = RegistryConfig()
NAME = "quickstart"


@pytest.fixture
def folder(tmp_path: Path, mlflow_template: Path) -> Path:
    shutil.copy(mlflow_template, tmp_path / "mlflow.db")
    return tmp_path


def uri_of(folder: Path) -> str:
    return f"sqlite:///{folder}/mlflow.db"


def open_here(folder: Path, uri: str = "") -> Tracker:
    return Tracker(uri or uri_of(folder), "rlstages", NAME, folder / "run" / "tracking.jsonl", {"seed": 1})


def publish(folder: Path, stage: str, iteration: int, identity: dict[str, Any] | None = None) -> str:
    files = describe(folder)
    manifest = Manifest(
        run=NAME,
        iteration=iteration,
        stage=stage,
        stage_version=1,
        fingerprint="f" * 64,
        identity=identity or {},
        seed_key=[0, iteration],
        inputs={},
        digest=content_digest(files),
        files=files,
        rows=0,
    )
    write_json(folder / "manifest.json", manifest.model_dump(mode="json"))
    return manifest.digest


def evaluation(folder: Path, correct: list[bool], iteration: int, identity: dict[str, Any] | None = None) -> str:
    folder.mkdir(parents=True)
    row = {
        "sample_id": 0,
        "mode": "greedy",
        "prompt_messages": [],
        "completion_ids": [],
        "text": f"answer of {iteration}",
        "score": 0.0,
        "reason": None,
        "finish_reason": "stop",
        "truncated": False,
        "policy_digest": "",
        "env_data": "{}",
    }
    rows = [row | {"group_id": i, "prompt_id": f"p{i}", "correct": value} for i, value in enumerate(correct)]
    write_table(folder / "part-0000.parquet", rows, EVALUATION)
    return publish(folder, "evaluate", iteration, identity)


def candidate(
    folder: Path, iteration: int, right: int, problems: int = 40, identity: dict[str, Any] | None = None
) -> Candidate:
    """A checkpoint that solves the first `right` problems."""
    checkpoint, evaluated = folder / f"train{iteration}", folder / f"evaluate{iteration}-{right}-{problems}"
    if not checkpoint.exists():
        checkpoint.mkdir()
        (checkpoint / "model.safetensors").write_text(f"weights {iteration}")
        publish(checkpoint, "train", iteration)
    digest = evaluation(evaluated, [i < right for i in range(problems)], iteration, identity)
    trained = content_digest(describe(checkpoint))
    return Candidate(NAME, NAME, iteration, checkpoint, trained, evaluated, digest, 8, 5)


def register(tracker: Tracker, what: Candidate, config: RegistryConfig = CONFIG) -> Registration:
    return register_policy(tracker, what, config, what.checkpoint.parent / "registry.lock")


def aliases(client: MlflowClient) -> dict[str, str]:
    return {alias: str(number) for alias, number in client.get_registered_model(NAME).aliases.items()}


def versions(client: MlflowClient) -> list[Any]:
    return sorted(client.search_model_versions(f"name = '{NAME}'"), key=lambda version: int(version.version))


def test_the_gate(folder: Path) -> None:
    tracker = open_here(folder)
    first = register(tracker, candidate(folder, 0, right=20))
    better = register(tracker, candidate(folder, 1, right=30))
    worse = register(tracker, candidate(folder, 2, right=15))
    assert [(r.version, r.alias, r.created) for r in (first, better, worse)] == [
        ("1", "champion", True),
        ("2", "champion", True),
        ("3", "challenger", True),
    ]
    assert aliases(tracker.client) == {"champion": "2", "previous_champion": "1", "challenger": "3"}
    assert champion_version(uri_of(folder), NAME) == "2"
    # By hand: 10 of 40 problems gained, then 15 of 40 lost; the bound of equal differences has a closed form only here.
    assert better.decision["difference"] == pytest.approx(0.25)
    assert worse.decision["difference"] == pytest.approx(-0.375)
    assert better.decision["lower_bound"] > -CONFIG.margin > worse.decision["lower_bound"]
    assert better.decision["champion_digest"] == first.decision["policy_digest"]
    for found in (first, better, worse):
        assert list(found.decision) == DECISIONS.names
        assert write_table(folder / "decision.parquet", [found.decision], DECISIONS) == 1
    tags = versions(tracker.client)[2].tags
    assert tags["gate"] == "refused"
    assert [v.tags["gate"] for v in versions(tracker.client)] == ["first", "passed", "refused"]
    assert tags["checkpoint_sha256"] == worse.decision["policy_digest"]
    assert (tags["iteration"], tags["run"], tags["gate_method"], tags["gate_margin"]) == (
        "2",
        NAME,
        "paired_bootstrap",
        "0.05",
    )
    assert float(tags["gate_difference"]) == worse.decision["difference"]
    assert float(tags["gate_lower_bound"]) == worse.decision["lower_bound"]
    assert tags["gate_reason"] == worse.decision["reason"]
    assert versions(tracker.client)[2].description == worse.decision["reason"]


def test_repeating_and_old_iterations_move_nothing(folder: Path) -> None:
    """C84: the stage run three times, and an old iteration run again after newer ones."""
    tracker = open_here(folder)
    candidates = [candidate(folder, k, right) for k, right in enumerate([20, 30, 15])]
    results = [register(tracker, what) for what in candidates]
    before = aliases(tracker.client)
    for _ in range(3):
        for what, result in zip(candidates, results, strict=True):
            again = register(open_here(folder), what)
            assert (again.version, again.alias, again.created) == (result.version, result.alias, False)
            assert again.decision == result.decision
            assert list(again.decision) == list(result.decision)
    assert aliases(tracker.client) == before
    assert len(versions(tracker.client)) == 3


MUTATIONS = (
    "create_registered_model",
    "log_artifacts",
    "create_model_version",
    "set_registered_model_alias",
    "set_model_version_tag",
)


@pytest.mark.parametrize("happened", [False, True], ids=["before the call", "after it, before the reply"])
def test_a_crash_at_every_call_ends_like_no_crash(
    folder: Path, monkeypatch: pytest.MonkeyPatch, happened: bool
) -> None:
    """C84 (a), (b), (c): whichever call is the last one, trying again leaves one version, the same aliases and row."""
    calls = 0
    crash_at = 0

    def breaking(real: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls != crash_at:
                return real(*args, **kwargs)
            if happened:
                real(*args, **kwargs)
            raise ConnectionError("the line went dead")

        return call

    candidates = [candidate(folder, 0, right=20), candidate(folder, 1, right=30)]
    tracker = open_here(folder)
    for name in MUTATIONS:
        monkeypatch.setattr(MlflowClient, name, breaking(getattr(MlflowClient, name)))
    expected = [register(tracker, what) for what in candidates]
    state = aliases(tracker.client), [v.tags for v in versions(tracker.client)]
    # Model, upload, version, challenger, champion, gate; the second time previous_champion as well.
    assert calls == 6 + 7
    for crash_at in range(1, calls + 1):
        tracker.client.delete_registered_model(NAME)
        calls = 0
        for what, result in zip(candidates, expected, strict=True):
            try:
                found = register(tracker, what)
            except StageError as error:
                assert "the line went dead" in str(error)
                found = register(tracker, what)
            assert (found.version, found.alias, found.decision) == (result.version, result.alias, result.decision)
        assert calls > crash_at
        assert (aliases(tracker.client), [v.tags for v in versions(tracker.client)]) == state


def test_a_version_without_files_is_never_made_or_aliased(folder: Path) -> None:
    """C84: missing checkpoint or evaluation files are refused; a dead version's twin gets a version of its own."""
    tracker = open_here(folder)
    what = candidate(folder, 0, right=20)
    for broken in (what.checkpoint / "model.safetensors", what.evaluation / "part-0000.parquet"):
        content = broken.read_bytes()
        broken.write_bytes(content[:-1])
        with pytest.raises(CorruptOutputError, match="not complete"):
            register(tracker, what)
        broken.write_bytes(content)
    with pytest.raises(ConfigError, match="cannot be the name"):
        register(tracker, Candidate(**{**vars(what), "model_name": "a/b'c"}))
    assert tracker.client.search_registered_models() == []
    register(tracker, what)
    moved = folder / "moved"
    what.checkpoint.rename(moved)
    again = register(tracker, Candidate(**{**vars(what), "checkpoint": moved}))
    assert (again.version, again.created) == ("2", True)


def test_what_cannot_be_compared_stays_challenger(folder: Path) -> None:
    tracker = open_here(folder)
    judged = {"judge": {"name": "last_integer"}, "evaluate": {"problems": 40, "greedy": True}}
    register(tracker, candidate(folder, 0, right=20, identity=judged))
    others = {
        1: (candidate(folder, 1, right=40, problems=50, identity=judged), "different problems, 10 only the challenger"),
        2: (candidate(folder, 2, right=40, identity={**judged, "judge": {"name": "other"}}), "differently (judge)"),
    }
    for iteration, (what, words) in others.items():
        found = register(tracker, what)
        assert (found.alias, found.decision["difference"]) == ("challenger", None)
        assert words in found.decision["reason"]
        assert aliases(tracker.client)["challenger"] == str(iteration + 1)
    more = {**judged, "evaluate": {"problems": 99, "greedy": True}}
    assert register(tracker, candidate(folder, 3, right=40, identity=more)).alias == "champion"
    shutil.rmtree(folder / "evaluate3-40-40")
    gone = register(tracker, candidate(folder, 4, right=40, problems=40, identity=judged))
    assert gone.alias == "challenger"
    assert "no longer where its tags say" in gone.decision["reason"]


def test_new_grounds_are_decided_anew_but_aliases_only_move_forward(folder: Path) -> None:
    tracker = open_here(folder)
    first, second = candidate(folder, 0, right=30), candidate(folder, 1, right=29)
    register(tracker, first)
    assert register(tracker, second).alias == "challenger"
    lenient = RegistryConfig(margin=0.2)
    promoted = register(tracker, second, lenient)
    assert (promoted.version, promoted.alias, promoted.created) == ("2", "champion", False)
    assert versions(tracker.client)[1].tags["gate"] == "passed"
    old = register(tracker, first, lenient)
    assert (old.version, old.alias) == ("1", "challenger")
    assert "older than the champion" in old.decision["reason"]
    evaluated_again = candidate(folder, 1, right=31)
    assert register(tracker, evaluated_again).decision["reason"] == "is the champion already"
    assert versions(tracker.client)[1].tags["evaluation_digest"] == evaluated_again.evaluation_digest
    assert aliases(tracker.client) == {"champion": "2", "previous_champion": "1", "challenger": "2"}


def test_a_pending_decision_is_made_anew_when_the_champion_has_moved(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C84: decided against one champion, killed before the alias, and another run moved the champion in between."""
    tracker = open_here(folder)
    register(tracker, candidate(folder, 0, right=10))
    middling = candidate(folder, 1, right=20)
    real = MlflowClient.set_registered_model_alias
    monkeypatch.setattr(MlflowClient, "set_registered_model_alias", lambda *_: (_ for _ in ()).throw(OSError("killed")))
    with pytest.raises(StageError, match="registering a policy"):
        register(tracker, middling)
    monkeypatch.setattr(MlflowClient, "set_registered_model_alias", real)
    best = candidate(folder, 2, right=40)
    assert register(tracker, best).alias == "champion"
    found = register(tracker, middling)
    assert (found.version, found.alias) == ("2", "challenger")
    assert found.decision["champion_digest"] == best.digest
    assert aliases(tracker.client) == {"champion": "3", "previous_champion": "1", "challenger": "3"}


def test_twins_of_a_repeated_create_call_are_removed(folder: Path) -> None:
    """C84 (b): a create call repeated below the client made two versions."""
    tracker = open_here(folder)
    what = candidate(folder, 0, right=20)
    register(tracker, what)
    made = versions(tracker.client)[0]
    tags = {**made.tags, "gate": "pending"}
    tracker.client.create_model_version(NAME, made.source, run_id=tracker.run_id, tags=tags)
    assert register(tracker, what).version == "1"
    assert [str(v.version) for v in versions(tracker.client)] == ["1"]


def test_the_champion_of_an_empty_registry(folder: Path) -> None:
    assert champion_version(uri_of(folder), NAME) is None
    assert champion_version(f"sqlite:///{folder}/none.db", NAME) is None
    assert not (folder / "none.db").exists()
    with pytest.raises(StageError, match="reading the registry"):
        champion_version("http://127.0.0.1:9", NAME)


def real_candidate(folder: Path) -> Candidate:
    checkpoint = folder / "train0"
    fetch_model("tiny-random", checkpoint)
    publish(checkpoint, "train", 0)
    return candidate(folder, 0, right=20)


_ASK = """
import json, sys, mlflow
mlflow.set_tracking_uri(sys.argv[1])
model = mlflow.pyfunc.load_model("models:/quickstart@champion")
print(json.dumps(model.predict(["What is 2 + 3?", "Hi"])))
"""


def ask(uri: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", _ASK, uri], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    answers: list[str] = json.loads(done.stdout)
    return answers


def expected_answers(checkpoint: Path) -> list[str]:
    """Greedy answers by the plain `generate` of transformers."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    answers = []
    for text in ("What is 2 + 3?", "Hi"):
        messages = [{"role": "user", "content": text}]
        inputs = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        output = model.generate(**inputs, max_new_tokens=8, do_sample=False)
        answers.append(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
    return answers


@pytest.mark.slow
def test_the_champion_answers_in_another_process(folder: Path) -> None:
    what = real_candidate(folder)
    register(open_here(folder), what)
    answers = ask(uri_of(folder))
    assert answers == expected_answers(what.checkpoint)
    weights = what.checkpoint / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(bytes(content))
    done = subprocess.run([sys.executable, "-c", _ASK, uri_of(folder)], capture_output=True, text=True, check=False)
    assert "model.safetensors does not match its digest" in done.stderr


_REGISTER = """
import sys
from pathlib import Path
from rl_core.config import RegistryConfig
from tasks.tracking.gate import Candidate
from tasks.tracking.registry import register_policy
from tasks.tracking.tracker import Tracker
import json
fields = json.loads(sys.argv[2])
fields["checkpoint"], fields["evaluation"] = Path(fields["checkpoint"]), Path(fields["evaluation"])
tracker = Tracker(sys.argv[1], "rlstages", "quickstart", Path(sys.argv[3]), {})
print(register_policy(tracker, Candidate(**fields), RegistryConfig(), fields["checkpoint"].parent / "lock").version)
"""


@pytest.mark.slow
def test_two_processes_register_one_checkpoint_at_once(folder: Path) -> None:
    """C84: two at once make one version."""
    what = candidate(folder, 0, right=20)
    fields = json.dumps({key: str(value) if isinstance(value, Path) else value for key, value in vars(what).items()})
    children = [
        subprocess.Popen(
            [sys.executable, "-c", _REGISTER, uri_of(folder), fields, str(folder / name)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for name in ("one.jsonl", "two.jsonl")
    ]
    assert [child.communicate()[0].strip() for child in children] == ["1", "1"]
    client = open_client(uri_of(folder))
    assert len(versions(client)) == 1
    assert aliases(client) == {"champion": "1", "challenger": "1"}


class Server:
    """A real `mlflow server` on a free port of the loopback interface."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        self.uri = f"http://127.0.0.1:{self.port}"
        self.folder = folder
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--workers", "1", "--backend-store-uri", uri_of(self.folder)]
        command += ["--artifacts-destination", str(self.folder / "artifacts")]
        environ = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
        with (self.folder / "server.log").open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=environ, start_new_session=True)
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            try:
                with urllib.request.urlopen(f"{self.uri}/health", timeout=2):
                    return
            except OSError:
                time.sleep(0.2)
        raise AssertionError((self.folder / "server.log").read_text())

    def stop(self) -> None:
        if self.process is not None:
            os.killpg(self.process.pid, 15)
            self.process.wait(30)
            self.process = None


@pytest.fixture
def server(folder: Path) -> Iterator[Server]:
    one = Server(folder)
    one.start()
    yield one
    one.stop()


@pytest.mark.slow
def test_over_a_server_that_goes_down_and_comes_back(
    folder: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C82: metrics of the outage arrive once; C84: registering fails plainly while it lasts and then works."""
    monkeypatch.setattr(tasks.tracking.tracker, "_PAUSE_SECONDS", 0.0)
    what = real_candidate(folder)
    tracker = open_here(folder, server.uri)
    tracker.log_stage("score", 0, {"reward/mean": 0.25, "acc@k [%]": 1.0}, "a")
    server.stop()
    tracker.log_stage("score", 1, {"reward/mean": 0.5}, "b")
    with pytest.raises(StageError, match="registering a policy"):
        register(tracker, what)
    server.start()
    tracker.log_stage("score", 2, {"reward/mean": 0.75}, "c")
    history = tracker.client.get_metric_history(tracker.run_id, "reward/mean")
    assert sorted((m.step, m.value) for m in history) == [(0, 0.25), (1, 0.5), (2, 0.75)]
    first, again = register(tracker, what), register(tracker, what)
    assert (first.version, first.created, again.version, again.created) == ("1", True, "1", False)
    assert aliases(tracker.client) == {"champion": "1", "challenger": "1"}
    assert ask(server.uri) == expected_answers(what.checkpoint)
    tracker.finish("FINISHED")
    assert tracker.client.get_run(tracker.run_id).info.status == "FINISHED"
    assert tracker.run_url().startswith(f"{server.uri}/#/experiments/")

"""The worker: what it keeps warm and when it lets go; errors and deaths as the flow's process sees them."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rl_core.errors import ConfigError, CorruptOutputError, DataError, RewardContractError, WorkerError
from rl_core.manifest import FileEntry, Ref, content_digest
from rl_core.rewards.contract import reward_digest
from tasks.worker import Worker, _environment, _handle, _inspect


def test_an_engine_that_holds_the_digest_reads_nothing(bench: Any) -> None:
    """Speed from warmth: the folder may even be gone. Another digest is loaded, and the same one not twice."""
    config = bench.config()
    copy = bench.copy(bench.base)
    model = bench.services.policy(copy, config).model
    shutil.rmtree(copy.path)
    assert bench.services.policy(copy, config).model is model
    other = bench.services.policy(bench.base, config).model
    assert other is model, "the same digest elsewhere is the same policy"
    (Path(bench.copy(bench.base).path) / "extra").touch()
    changed = bench.ref(bench.folder / f"made-{bench._made}")
    assert bench.services.policy(changed, config).model is not model


def test_nothing_is_loaded_unverified(bench: Any) -> None:
    """Correctness from digests: policy and reference alike."""
    gone = Ref(path=str(bench.folder / "nowhere"), digest=bench.base.digest)
    other = Ref(path=bench.base.path, digest="0" * 64)
    for ref in (gone, other):
        for load in (bench.services.policy, bench.services.reference, bench.services.learner):
            with pytest.raises(CorruptOutputError, match="does not hold what its digest says"):
                load(ref, bench.config())
    assert bench.services.policy(bench.base, bench.config()).model is not None


def test_the_reference_is_frozen_and_apart(bench: Any) -> None:
    policy, reference = (getattr(bench.services, name)(bench.base, bench.config()) for name in ("policy", "reference"))
    assert policy.model is not reference.model
    assert all(weight.requires_grad for weight in policy.model.parameters())
    assert not any(weight.requires_grad for weight in reference.model.parameters())
    assert bench.services.reference(bench.base, bench.config()) is reference


def test_weights_in_training_have_no_name(bench: Any) -> None:
    """From `learner` to `adopt` the engine equals no checkpoint; a policy asked for in between is loaded anew."""
    config = bench.config()
    learner = bench.services.learner(bench.base, config)
    assert learner.policy is not bench.services.policy(bench.base, config)
    learner = bench.services.learner(bench.base, config)
    bench.services.adopt("next")
    assert bench.services.policy(Ref(path="", digest="next"), config) is learner.policy
    assert bench.services.learner(Ref(path="", digest="next"), config) is learner


def test_environments_by_params_and_seed(bench: Any) -> None:
    config = bench.config()
    first = bench.services.environment(config)
    assert bench.services.environment(bench.config(learner={"lr": 0.5}, iterations=9)) is first
    assert bench.services.environment(bench.config(seed=4)) is not first
    assert bench.services.environment(bench.config(environment=bench.prompts(["x"]))) is not first


@pytest.mark.slow
def test_reward_processes_stay_until_rewards_or_limits_change(bench: Any) -> None:
    pool = bench.services.rewards(bench.config())
    pids = pool.pids
    assert bench.services.rewards(bench.config(learner={"lr": 0.5})) is pool and pool.pids == pids
    changed = bench.services.rewards(bench.config(scoring={"timeout_seconds": 1.0}))
    assert changed is not pool and pool.pids == []
    assert changed.timeout_seconds == 1.0
    other = bench.services.rewards(bench.config(rewards=[{"function": "exact_match"}]))
    assert changed.pids == [] and list(other.rewards) == ["exact_match"]


def test_what_a_config_names_is_opened_and_digested(bench: Any, user_module: Any) -> None:
    """`inspect` gives the facts of the fingerprint, and raises the user's mistakes as what they are."""
    name, _ = user_module("def reward(completions, gold):\n    return gold\n")
    environment = bench.prompts(["a", "b"])
    config = bench.config(environment=environment)

    def inspect(config: Any) -> dict[str, Any]:
        return _handle({"op": "inspect", "config": config.model_dump(mode="json")}, bench.services, lambda _: None)

    found = inspect(config)
    assert found["environment"] == bench.services.environment(config).digest
    assert found["rewards"] == {"last_integer": reward_digest(config.rewards[0], ["answer"])}
    assert (found["heldout"], found["dtype"]) == (1, "float32")
    with pytest.raises(RewardContractError, match="'gold', and nothing provides it"):
        inspect(bench.config(environment=environment, rewards=[{"function": f"{name}:reward"}]))
    with pytest.raises(ConfigError, match="unknown"):
        inspect(bench.config(environment={"kind": "reasonig_gym"}))
    Path(environment["params"]["path"]).write_text("")
    bench.cold()
    with pytest.raises(DataError, match="has no rows"):
        inspect(config)
    with pytest.raises(WorkerError, match="does not know the operation 'dance'"):
        _handle({"op": "dance"}, bench.services, lambda _: None)


def test_threads_are_fixed_before_torch_is_imported() -> None:
    found = _environment(3)
    assert (found["OMP_NUM_THREADS"], found["MKL_NUM_THREADS"]) == ("3", "3")


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Worker]:
    made = Worker(tmp_path / "worker-logs", threads=1)
    yield made
    made.close()


@pytest.mark.slow
def test_a_real_worker(worker: Worker, bench: Any, rows: Any, tmp_path: Path) -> None:
    """Stages answer as in this process; errors keep their type and cost nothing; a death costs a start."""
    config = bench.config()
    assert worker._child is None, "nothing is started before it is needed"
    assert worker.inspect(config) == _inspect(config, bench.services)
    child = worker._child
    assert child is not None
    with pytest.raises(ConfigError, match="unknown") as caught:
        worker.inspect(bench.config(environment={"kind": "nothing"}))
    assert "reasoning_gym" in caught.value.expected
    assert worker._child is child and child.alive

    here = rows(bench.run("generate", config, policy=bench.base))
    context = bench.context(config, policy=bench.base)
    told: list[dict[str, Any]] = []
    request = {"op": "perform", "stage": "generate", "context": context.to_dict()}
    reply = worker.request(request, 60, told.append)
    made = bench.ref(context.output)
    assert [row["completion_ids"] for row in rows(made)] == [row["completion_ids"] for row in here]
    assert content_digest([FileEntry.model_validate(entry) for entry in reply["files"]]) == made.digest
    assert told[-1] == {"done": 8, "total": 8}
    assert reply["measured"]["pid"] == child.pid and reply["measured"]["threads"] == 1

    os.kill(child.pid, signal.SIGKILL)
    while child.alive:
        time.sleep(0.01)
    assert worker.inspect(config) == _inspect(config, bench.services)
    assert worker._child is not None and worker._child.pid != child.pid
    pid = worker._child.pid
    worker.close()
    worker.close()
    assert not Path(f"/proc/{pid}").exists() and (tmp_path / "worker-logs" / "worker.log").exists()

"""prefect.yaml: every key one that counts, every parameter one of its flow, a server as the file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prefect.cli.deploy._models import PrefectYamlModel
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import DeploymentScheduleCreate
from prefect.client.schemas.schedules import CronSchedule
from ruamel.yaml import YAML

from rl_core.errors import ConfigError
from tasks.launch import resolve_config
from tasks.servers.deployments import PREFECT_FILE, PrefectFile, deploy, read_file, schedule_differences
from tasks.servers.provision import QUEUES, create_pool

pytestmark = pytest.mark.slow


def load() -> dict[str, Any]:
    data: dict[str, Any] = YAML(typ="safe", pure=True).load(PREFECT_FILE)
    return data


def written(folder: Path, data: dict[str, Any]) -> Path:
    path = folder / "prefect.yaml"
    YAML(typ="safe", pure=True).dump(data, path)
    return path


def test_the_file_is_right_for_us_and_for_prefect() -> None:
    file = read_file()
    theirs = PrefectYamlModel.model_validate(load())
    assert [entry.name for entry in theirs.deployments] == [entry.name for entry in file.deployments]
    training = {entry.name: entry for entry in file.deployments if entry.flow().name == "training-run"}
    assert set(training) == {"train", "nightly"}
    for entry in training.values():
        assert entry.concurrency_limit is not None and entry.concurrency_limit.limit == 1
        assert entry.concurrency_limit.collision_strategy == "CANCEL_NEW"
    assert not any(schedule.active for entry in file.deployments for schedule in entry.schedules)
    assert {entry.work_pool.work_queue_name for entry in file.deployments} == set(QUEUES)


@pytest.mark.parametrize(
    ("place", "key"),
    [
        ((), "deployment"),
        (("deployments", 1), "concurrency"),
        (("deployments", 1, "concurrency_limit"), "strategy"),
        (("deployments", 1, "schedules", 0), "enabled"),
        (("deployments", 1, "work_pool"), "queue"),
    ],
)
def test_an_unknown_key_is_an_error_at_every_level(tmp_path: Path, place: tuple[Any, ...], key: str) -> None:
    data = load()
    node: Any = data
    for step in place:
        node = node[step]
    node[key] = "x"
    with pytest.raises(ConfigError) as error:
        read_file(written(tmp_path, data))
    assert ".".join(map(str, (*place, key))) in error.value.details


def test_mistakes_that_prefect_would_take(tmp_path: Path) -> None:
    """C81: a parameter the flow does not have, a flow that is not there, two of one name, no slug, local time."""
    data = load()
    train, nightly = data["deployments"][:2]
    train["parameters"]["recipe"] = "smoke"
    nightly["schedules"][0]["parameters"] = {"lr": 1}
    data["deployments"].append({**train, "parameters": {}, "entrypoint": "flows.training_run.train"})
    data["deployments"].append(data["deployments"][2])
    with pytest.raises(ConfigError) as error:
        read_file(written(tmp_path, data))
    for text in ("no parameter 'recipe'", "no parameter 'lr'", "has no attribute 'train'", "evaluate: is there twice"):
        assert text in error.value.details
    for change in ({"slug": None}, {"timezone": "Europe/Berlin"}, {"active": None}):
        data = load()
        data["deployments"][1]["schedules"][0].update(change)
        with pytest.raises(ConfigError, match="not what it should be"):
            read_file(written(tmp_path, data))


@pytest.mark.parametrize(
    ("override", "field", "value"),
    [
        (f"seed={2**70}", "seed", None),
        ("learner.lr=nan", "learner.lr", None),
        ("algorithm.kl.coef=inf", "algorithm.kl.coef", None),
        ("iterations=1.5", "iterations", None),
        ("learner.lr=1e-6", "learner.lr", 1e-6),
        ('learner.lr="1e-6"', "learner.lr", 1e-6),
    ],
)
def test_a_form_means_what_the_command_line_means(override: str, field: str, value: float | None) -> None:
    """C81: Prefect hands an override on as the text it was given, and the flow reads it as `--set` does."""
    flow = next(entry.flow() for entry in read_file().deployments if entry.name == "train")
    given = json.loads(json.dumps({"run": "smoke", "overrides": [override]}))  # as it comes from the server
    assert flow.validate_parameters(given) == given
    if value is None:
        with pytest.raises(ConfigError) as error:
            resolve_config(given["run"], given["overrides"])
        assert f"{field}: Input should be" in error.value.details
    else:
        assert resolve_config(given["run"], given["overrides"]).learner.lr == value


@pytest.fixture
def client(prefect_api: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[SyncPrefectClient]:
    monkeypatch.setenv("RLSTAGES_DIR", str(tmp_path))
    with SyncPrefectClient(prefect_api) as found:
        create_pool(found)
        yield found
        for deployment in found.read_deployments():
            found.delete_deployment(deployment.id)


def changed(file: PrefectFile, **fields: Any) -> PrefectFile:
    """The file with other fields of its nightly deployment."""
    entries = [entry.model_copy(update=fields if entry.name == "nightly" else {}) for entry in file.deployments]
    return file.model_copy(update={"deployments": entries})


def test_deploying_makes_the_server_as_the_file(client: SyncPrefectClient, tmp_path: Path) -> None:
    """Ids stay; a schedule that was changed or left the file is told and put right; one made in the UI stays."""
    file = read_file()
    assert schedule_differences(client, file) == []  # nothing is deployed yet
    made = deploy(client, file)
    assert schedule_differences(client, file) == []
    nightly = made["training-run/nightly"]
    [schedule] = client.read_deployment_schedules(nightly)
    there = client.read_deployment(nightly)
    assert there.pull_steps == [{"prefect.deployments.steps.set_working_directory": {"directory": str(tmp_path)}}]
    assert (there.work_pool_name, there.work_queue_name) == ("local", "default")
    assert there.global_concurrency_limit is not None and there.global_concurrency_limit.limit == 1

    client.update_deployment_schedule(nightly, schedule.id, active=True)
    own = DeploymentScheduleCreate(schedule=CronSchedule(cron="5 5 * * *", timezone="UTC"), active=False)
    client.create_deployment_schedules(nightly, [own])
    name = "schedule nightly of training-run/nightly"
    difference = f"{name}: 0 2 * * * UTC, active on the server, 0 2 * * * UTC, inactive in the file"
    assert schedule_differences(client, file) == [difference]
    assert deploy(client, file) == made
    assert schedule_differences(client, file) == []
    assert {s.id for s in client.read_deployment_schedules(nightly)} > {schedule.id}

    without = changed(file, schedules=[], description="other", concurrency_limit=None)
    assert schedule_differences(client, without) == [
        f"{name}: 0 2 * * * UTC, inactive on the server, missing in the file"
    ]
    assert deploy(client, without) == made
    assert [s.slug for s in client.read_deployment_schedules(nightly)] == [None]
    there = client.read_deployment(nightly)
    assert there.description == "other" and there.global_concurrency_limit is None

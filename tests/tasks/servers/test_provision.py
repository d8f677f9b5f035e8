"""What `up` creates: once, however often it is called, and without undoing what people have set."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from prefect.client.orchestration import SyncPrefectClient
from prefect.events import AutomationCore
from prefect.settings import PREFECT_FLOWS_HEARTBEAT_FREQUENCY

from rl_core.errors import ConfigError
from tasks.servers.deployments import read_file
from tasks.servers.provision import (
    RESUME,
    ZOMBIES,
    create_pool,
    gpu_count,
    parse_limits,
    provision,
    put_automations,
    queues_here,
    set_limits,
)

pytestmark = pytest.mark.slow


@pytest.fixture
def client(prefect_api: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[SyncPrefectClient]:
    monkeypatch.setenv("RLSTAGES_DIR", str(tmp_path))
    with SyncPrefectClient(prefect_api) as found:
        clean(found)
        create_pool(found)
        yield found
        clean(found)


def clean(client: SyncPrefectClient) -> None:
    for automation in client.read_automations():
        client.delete_automation(automation.id)
    for deployment in client.read_deployments():
        client.delete_deployment(deployment.id)
    for limit in client.read_global_concurrency_limits(limit=200, offset=0):
        client.delete_global_concurrency_limit_by_name(limit.name)


def limits(client: SyncPrefectClient) -> dict[str, int]:
    found = client.read_global_concurrency_limits(limit=200, offset=0)
    return {limit.name: limit.limit for limit in found if limit.name.startswith("tag:") and limit.active}


def test_limits_are_given_as_tag_and_slots() -> None:
    assert parse_limits(["train=1", " gpu = 2 ", "score=0"]) == {"train": 1, "gpu": 2, "score": 0}
    for text in ("train", "=1", "train=", "train=one", "train=-1", "train=1.5"):
        with pytest.raises(ConfigError, match="tag=slots"):
            parse_limits([text])


def test_limits_of_the_command_line_win_and_others_stay(client: SyncPrefectClient) -> None:
    gpus = max(1, gpu_count())
    set_limits(client, {})
    assert limits(client) == {"tag:gpu": gpus}
    set_limits(client, {"gpu": 5, "train": 1})
    set_limits(client, {"rollout": 3})
    assert limits(client) == {"tag:gpu": 5, "tag:train": 1, "tag:rollout": 3}
    set_limits(client, {"train": 2, "rollout": 0})
    assert limits(client) == {"tag:gpu": 5, "tag:train": 2}
    set_limits(client, {"gpu": 0})
    set_limits(client, {})
    assert limits(client) == {"tag:train": 2}, "no limit stays no limit"
    set_limits(client, {"gpu": 3})
    assert limits(client) == {"tag:gpu": 3, "tag:train": 2}
    found = client.read_global_concurrency_limits(limit=200, offset=0)
    assert [limit.name for limit in found if not limit.active] == ["tag:rollout"]


def test_a_second_time_changes_nothing_that_is_right(client: SyncPrefectClient) -> None:
    """Automations keep their state on the server, which an update would lose; doubles go; a disabled one stays so."""
    file = read_file()
    assert provision(client, file, {"train": 1}) == []
    first = {automation.name: automation for automation in client.read_automations()}
    assert set(first) == {ZOMBIES, RESUME} and len(client.read_automations()) == 2
    pool = client.read_work_pool("local")
    create_pool(client)
    assert client.read_work_pool("local").id == pool.id and len(client.read_work_queues(work_pool_name="local")) == 3

    provision(client, file, {})
    again = {automation.name: automation for automation in client.read_automations()}
    assert again == first, "an automation was written although it was right"

    client.create_automation(AutomationCore.model_validate(first[RESUME].model_dump(exclude={"id"})))
    client.pause_automation(first[RESUME].id)
    assert len(client.read_automations()) == 3
    older = first[ZOMBIES].model_dump(exclude={"id", "owner_resource"}) | {"description": "of an older version"}
    client.update_automation(first[ZOMBIES].id, AutomationCore.model_validate(older))
    provision(client, file, {})
    found = {automation.name: automation for automation in client.read_automations()}
    assert len(client.read_automations()) == 2
    assert not found[RESUME].enabled
    assert found[ZOMBIES].description == first[ZOMBIES].description and found[ZOMBIES].id == first[ZOMBIES].id
    put_automations(client, [])
    assert len(client.read_automations()) == 2


def test_automations_leave_alone_what_they_must(client: SyncPrefectClient) -> None:
    """Only flows of ours that did send a heartbeat are called dead, after three of them; only `auto-resume` goes on."""
    file = read_file()
    provision(client, file, {})
    found = {automation.name: automation.trigger for automation in client.read_automations()}
    zombies, resume = found[ZOMBIES].model_dump(mode="json"), found[RESUME].model_dump(mode="json")
    assert zombies["after"] == ["prefect.flow-run.heartbeat"] and zombies["posture"] == "Proactive"
    assert zombies["within"] == 3 * PREFECT_FLOWS_HEARTBEAT_FREQUENCY.value()
    assert set(zombies["match_related"]["prefect.resource.name"]) == {entry.flow().name for entry in file.deployments}
    wanted = {client.read_deployment_by_name(f"training-run/{name}").id for name in ("train", "nightly")}
    assert set(resume["match_related"]["prefect.resource.id"]) == {f"prefect.deployment.{id_}" for id_ in wanted}


def test_stages_for_a_gpu_are_left_to_a_machine_that_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for gpus, queues in ((0, ["default", "cpu"]), (2, ["default", "cpu", "gpu"])):
        monkeypatch.setattr("tasks.servers.provision.gpu_count", lambda gpus=gpus: gpus)
        assert queues_here() == queues

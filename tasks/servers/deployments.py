"""prefect.yaml: read strictly, put on the server, compared with what is there.

Prefect ignores keys it does not know, in the file and among the parameters, and keeps schedules that have left the
file. Here each of these is an error or put right.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from uuid import UUID

from pydantic import Field, JsonValue, ValidationError

from rl_core.errors import ConfigError
from rl_core.section import Section

if TYPE_CHECKING:
    from prefect import Flow
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.objects import DeploymentSchedule

PREFECT_FILE = Path(__file__).resolve().parents[2] / "prefect.yaml"
AUTO_RESUME = "auto-resume"
"""Tag of the deployments whose crashed runs go on by themselves."""


class CronEntry(Section):
    cron: str
    timezone: Literal["UTC"]
    """Local times skip or repeat a run when the clocks change."""
    slug: str
    active: bool
    parameters: dict[str, JsonValue] = Field(default_factory=dict)

    @property
    def text(self) -> str:
        return f"{self.cron} {self.timezone}, {'active' if self.active else 'inactive'}"


class ConcurrencyEntry(Section):
    limit: int = Field(ge=1)
    collision_strategy: Literal["CANCEL_NEW", "ENQUEUE"]
    grace_period_seconds: int = Field(ge=60, le=86400)


class PoolEntry(Section):
    name: str
    work_queue_name: str
    job_variables: dict[str, JsonValue] = Field(default_factory=dict)


class DeploymentEntry(Section):
    name: str
    entrypoint: str
    description: str
    tags: list[str]
    parameters: dict[str, JsonValue] = Field(default_factory=dict)
    enforce_parameter_schema: Literal[True]
    concurrency_limit: ConcurrencyEntry | None = None
    schedules: list[CronEntry] = Field(default_factory=list)
    work_pool: PoolEntry

    def flow(self) -> Flow[..., Any]:
        module, _, name = self.entrypoint.rpartition(".")
        found: Flow[..., Any] = getattr(import_module(module), name)
        return found


class PrefectFile(Section):
    name: str
    pull: list[dict[str, dict[str, str]]]
    definitions: dict[str, Any] = Field(default_factory=dict)
    """Anchors for YAML; Prefect does not read it."""
    deployments: list[DeploymentEntry] = Field(min_length=1)


def read_file(path: Path = PREFECT_FILE) -> PrefectFile:
    """The file, every key known and every parameter one of its flow. Raises `ConfigError` with all mistakes."""
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    try:
        file = PrefectFile.model_validate(YAML(typ="safe", pure=True).load(path))
    except (OSError, YAMLError) as error:
        raise ConfigError(f"{path.name} cannot be read", expected="YAML", details=str(error)) from error
    except ValidationError as error:
        lines = [f"  {'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors(include_url=False)]
        raise ConfigError(f"{path.name} is not what it should be", details="\n".join(lines)) from error
    lines = [line for entry in file.deployments for line in _mistakes(entry)]
    names = [(entry.entrypoint, entry.name) for entry in file.deployments]
    lines += [f"  {name}: is there twice" for entrypoint, name in set(names) if names.count((entrypoint, name)) > 1]
    if lines:
        raise ConfigError(f"{path.name} is not what it should be", details="\n".join(lines))
    return file


def _mistakes(entry: DeploymentEntry) -> list[str]:
    try:
        flow = entry.flow()
    except (ImportError, AttributeError) as error:
        return [f"  {entry.name}.entrypoint: {error}"]
    given = {*entry.parameters, *(name for schedule in entry.schedules for name in schedule.parameters)}
    unknown = sorted(given - set(flow.parameters.properties))
    slugs = [schedule.slug for schedule in entry.schedules]
    lines = [f"  {entry.name}.parameters: {flow.name} has no parameter {name!r}" for name in unknown]
    return lines + [f"  {entry.name}.schedules: two with slug {slug!r}" for slug in set(slugs) if slugs.count(slug) > 1]


def deploy(client: SyncPrefectClient, file: PrefectFile) -> dict[str, UUID]:
    """Create or update every deployment with its schedules; ids by `<flow>/<deployment>`.

    Schedules with a slug become what the file says, and those that left it are removed. Schedules without a slug were
    made in the UI and stay.
    """
    from prefect.utilities.templating import apply_values

    pull = apply_values(file.pull, {}, remove_notset=False)  # {{ $NAME }} is taken from the environment
    made = {}
    for entry in file.deployments:
        name = f"{entry.flow().name}/{entry.name}"
        made[name] = _deploy(client, entry, pull, name)
        _put_schedules(client, entry, made[name])
    return made


def _deploy(client: SyncPrefectClient, entry: DeploymentEntry, pull: Any, name: str) -> UUID:
    from prefect.client.schemas.actions import DeploymentUpdate
    from prefect.exceptions import ObjectNotFound

    limit, flow = entry.concurrency_limit, entry.flow()
    options = limit.model_dump(exclude={"limit"}) if limit else None
    fields: dict[str, Any] = {
        "description": entry.description,
        "tags": entry.tags,
        "parameters": entry.parameters,
        "parameter_openapi_schema": flow.parameters.model_dump(),
        "enforce_parameter_schema": True,
        "concurrency_limit": limit.limit if limit else None,
        "concurrency_options": options,
        "work_pool_name": entry.work_pool.name,
        "work_queue_name": entry.work_pool.work_queue_name,
        "job_variables": entry.work_pool.job_variables,
        "pull_steps": pull,
        "entrypoint": entry.entrypoint,
        "path": ".",
    }
    try:
        there = client.read_deployment_by_name(name)
    except ObjectNotFound:
        return client.create_deployment(client.create_flow(flow), entry.name, **fields)
    client.update_deployment(there.id, DeploymentUpdate(**fields))
    return there.id


def _put_schedules(client: SyncPrefectClient, entry: DeploymentEntry, deployment: UUID) -> None:
    from prefect.client.schemas.actions import DeploymentScheduleCreate
    from prefect.client.schemas.schedules import CronSchedule

    there = {schedule.slug: schedule for schedule in client.read_deployment_schedules(deployment) if schedule.slug}
    for wanted in entry.schedules:
        cron = CronSchedule(cron=wanted.cron, timezone=wanted.timezone)
        found = there.pop(wanted.slug, None)
        if found is None:
            created = DeploymentScheduleCreate(
                schedule=cron, active=wanted.active, slug=wanted.slug, parameters=wanted.parameters
            )
            client.create_deployment_schedules(deployment, [created])
        elif _text(found) != wanted.text or found.parameters != wanted.parameters:
            client.update_deployment_schedule(
                deployment, found.id, active=wanted.active, schedule=cron, parameters=wanted.parameters
            )
    for left in there.values():
        client.delete_deployment_schedule(deployment, left.id)


def _text(schedule: DeploymentSchedule) -> str:
    """What `CronEntry.text` says, of a schedule on the server."""
    plan = schedule.schedule
    when = getattr(plan, "cron", None) or getattr(plan, "interval", None) or getattr(plan, "rrule", None)
    return f"{when} {getattr(plan, 'timezone', None)}, {'active' if schedule.active else 'inactive'}"


def schedule_differences(client: SyncPrefectClient, file: PrefectFile) -> list[str]:
    """Where the server's schedules are not those of the file; deployments that are not there are none."""
    from prefect.exceptions import ObjectNotFound

    lines = []
    for entry in file.deployments:
        name = f"{entry.flow().name}/{entry.name}"
        try:
            there = client.read_deployment_schedules(client.read_deployment_by_name(name).id)
        except ObjectNotFound:
            continue
        server = {schedule.slug: _text(schedule) for schedule in there if schedule.slug}
        wanted = {schedule.slug: schedule.text for schedule in entry.schedules}
        for slug in sorted(server.keys() | wanted.keys()):
            on_server, in_file = server.get(slug, "missing"), wanted.get(slug, "missing")
            if on_server != in_file:
                lines.append(f"schedule {slug} of {name}: {on_server} on the server, {in_file} in the file")
    return lines

"""Slots of tags with a concurrency limit: who holds them, what is shown while a stage waits, how a dead holder's go.

Prefect takes a slot of every limited tag when a task starts, under a lease that the process renews. The lease of a
process that died runs out within 65 s; the run itself, when it goes on earlier, gives its old slot back at once.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar
from uuid import UUID

from tasks import attempts
from tasks.events import StageEvent, observed, tell
from tasks.servers.embedded import answers
from tasks.storage.store import RunStore

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient

T = TypeVar("T")
_LIMITS_SECONDS = 30.0
_PATIENCE_SECONDS = 1.5  # a shorter wait is not worth a word
_REPEAT_SECONDS = 60.0
_PAGE = 200
ITERATION_TAG = "it:"
_known: tuple[float, frozenset[str]] = (-_LIMITS_SECONDS, frozenset())
_log = logging.getLogger("rlstages.slots")


@dataclass(frozen=True)
class Slots:
    """A limited tag.

    Attributes:
        used: slots that are taken, as the server counts.
        holders: task runs with a valid lease.
    """

    tag: str
    limit: int
    used: int
    holders: list[UUID]


def read_slots(client: SyncPrefectClient, tags: list[str] | None = None) -> list[Slots]:
    """The limited ones of these tags; all limited tags without an argument."""
    return [
        Slots(tag, limit.limit, limit.active_slots, client.read_concurrency_limit_by_tag(tag).active_slots)
        for limit in read_limits(client)
        for tag in [limit.name.removeprefix("tag:")]
        if limit.name.startswith("tag:") and limit.active and (tags is None or tag in tags)
    ]


def read_limits(client: SyncPrefectClient) -> list[Any]:
    """All global concurrency limits of the server, page by page."""
    found: list[Any] = []
    while len(part := client.read_global_concurrency_limits(limit=_PAGE, offset=len(found))) == _PAGE:
        found += part
    return found + part


def limited_tags(tags: list[str]) -> list[str]:
    """Those of the tags that have a limit. Prefect is spared the question for slots of tags that have none.

    It asks its server before every task with tags, and an SQLite server that is busy with events takes seconds to
    answer. Prefect keeps the answer "no limits" for 5 s itself; here one look at the list of limits serves for 30 s.
    """
    global _known
    from prefect.client.orchestration import get_client
    from prefect.concurrency import services
    from prefect.context import TagsContext

    if time.monotonic() - _known[0] > _LIMITS_SECONDS:
        with get_client(sync_client=True) as client:
            _known = (time.monotonic(), frozenset(limit.name for limit in read_limits(client) if limit.active))
    names = frozenset(f"tag:{tag}" for tag in {*tags, *TagsContext.get().current_tags})  # a task has its flow's too
    if not names & _known[1]:
        with services._cache_lock:
            services._no_limits_cache[names] = True
    return sorted(name.removeprefix("tag:") for name in names & _known[1])


@contextmanager
def lasting_tags() -> Iterator[None]:
    """Tasks called herein have the tags of their flow, but for the iteration's.

    Prefect keeps a thread and a client (about 1 MiB) for every set of tags it has seen, until the process ends: a tag
    that changes with every iteration would add as many as there are stages each time.
    """
    from prefect.context import TagsContext

    tags = {tag for tag in TagsContext.get().current_tags if not tag.startswith(ITERATION_TAG)}
    with TagsContext(current_tags=tags):
        yield


@contextmanager
def slots_for(store: RunStore, iteration: int, stage: str, tags: list[str]) -> Iterator[None]:
    """Around the call of a stage's task: tell who is waited for, and write down which slots the run holds."""
    from prefect.context import FlowRunContext
    from prefect.logging import get_run_logger

    limited = limited_tags(tags)
    if not limited:
        yield
        return
    begun = threading.Event()
    log = get_run_logger() if FlowRunContext.get() else _log

    def waits(message: str) -> None:
        tell(StageEvent("waiting", store.name, iteration, stage, message=message))
        log.warning("%s %s", stage, message)

    def on_event(event: StageEvent) -> None:
        if event.kind == "started":
            from prefect.runtime import task_run

            begun.set()
            attempts.note_slot(store, str(task_run.id), limited)

    watch = threading.Thread(target=_watch, args=(limited, begun, waits), name="slots", daemon=True)
    watch.start()
    try:
        with observed(on_event):
            yield
    finally:
        begun.set()
        attempts.forget_slot(store)


def _watch(tags: list[str], begun: threading.Event, waits: Callable[[str], None]) -> None:
    pause = _PATIENCE_SECONDS
    while not begun.wait(pause):
        try:
            message = _holders(tags)
        except Exception as error:  # the wait itself goes on; only its reason cannot be told
            message = f"waits for a slot of {' and '.join(tags)}; its holder is not known: {error}"
        if message and not begun.is_set():
            waits(message)
            pause = _REPEAT_SECONDS


def _holders(tags: list[str]) -> str:
    """What is waited for and who has it; empty when there is a free slot of every tag."""
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.settings import PREFECT_API_URL

    with SyncPrefectClient(PREFECT_API_URL.value()) as client:
        full = [slots for slots in read_slots(client, tags) if slots.used >= slots.limit]
        words = [
            f"waits for tag {slots.tag}: {slots.used} of {slots.limit} slots held by "
            + (", ".join(describe_task_run(client, holder) for holder in slots.holders) or "a process that is gone")
            for slots in full
        ]
    return "; ".join(words)


def describe_task_run(client: SyncPrefectClient, task_run: UUID) -> str:
    """`run it0003/train`, as far as the server knows it; it learns of task runs with some delay."""
    from prefect.exceptions import ObjectNotFound

    try:
        found = client.read_task_run(task_run)
        flow = client.read_flow_run(found.flow_run_id) if found.flow_run_id else None
    except ObjectNotFound:
        return f"task run {task_run}"
    return f"{flow.name.partition('/')[0]} {found.name}" if flow else found.name


def free_slot(client: SyncPrefectClient, task_run: str, tags: list[str]) -> None:
    """Give back the slots of a task run whose process is gone."""
    client.decrement_v1_concurrency_slots(tags, UUID(task_run), 1.0)


def free_own_slot(store: RunStore) -> None:
    """Give back what the last attempt held when it died. Only under the lock of the run, which says that it is dead."""
    held = attempts.held_slot(store)
    if held is None:
        return
    from prefect.client.orchestration import get_client

    try:
        with get_client(sync_client=True) as client:
            free_slot(client, held["task_run"], held["tags"])
    except Exception as error:  # its lease ends by itself
        _log.warning("the slot of the last attempt frees itself within 65 s: %s", error)
    attempts.forget_slot(store)


def outlast_restart(store: RunStore, call: Callable[[], T]) -> T:
    """Call again what failed because the Prefect server was away, once it is back; what had got through is reused then.

    Prefect's client tries again where it has reached its server before. A slot is given back by a new client, which
    does not; it is left, and freed here.
    """
    from httpx import TransportError

    try:
        return call()
    except TransportError:
        from prefect.settings import PREFECT_API_URL, PREFECT_CLIENT_MAX_RETRIES

        # As long as Prefect's client itself would go on trying: 1 + 2 + 4 + ... seconds.
        deadline = time.monotonic() + 2.0 ** (PREFECT_CLIENT_MAX_RETRIES.value() + 1)
        while not answers(f"{PREFECT_API_URL.value()}/health"):
            if time.monotonic() > deadline:
                raise
            time.sleep(0.5)
        free_own_slot(store)
        return call()

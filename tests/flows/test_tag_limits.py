"""Prefect is spared the question for slots of unlimited tags, and only of those."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

SCRIPT = """
from tasks.servers import local
from tasks import settings
settings.apply_defaults()
local.connect()
from prefect.concurrency import services
from tasks import slots
slots._PAGE = 2
for tag in ("limited-here-4", "limited-here-0", "free-here"):
    print(*slots.limited_tags([tag, "other"]), frozenset([f"tag:{tag}", "tag:other"]) in services._no_limits_cache)
"""


@pytest.mark.slow
def test_a_limited_tag_is_still_asked_for(project: Any) -> None:
    """Also one that is not on the first page of the list of limits."""
    url = f"{project.env['PREFECT_API_URL']}/v2/concurrency_limits/"
    names = [f"tag:limited-here-{number}" for number in range(5)]
    try:
        for name in names:
            httpx.post(url, json={"name": name, "limit": 1, "active": True}).raise_for_status()
        script = project.folder / "ask.py"
        script.write_text(SCRIPT)
        lines = project.call(driver=script).splitlines()
        assert lines == ["limited-here-4 False", "limited-here-0 False", "True"]
    finally:
        for name in names:
            httpx.delete(f"{url}{name}")


THREADS = """
import sys, threading
from flows import cli
try:
    cli.main()
finally:
    print("threads:", sum(thread.name.startswith("ConcurrencySlot") for thread in threading.enumerate()))
"""


@pytest.mark.slow
def test_threads_do_not_grow_with_iterations(project: Any) -> None:
    """Prefect keeps one for every set of tags it is asked for: one a stage, not one a stage and iteration."""
    sets = ["--set", "iterations=4", "--set", "generate.prompts_per_iteration=1", "--set", "evaluate.problems=1"]
    script = project.folder / "count.py"
    script.write_text(THREADS)
    output = project.call("run", "smoke", *sets, driver=script)
    assert output.splitlines()[-1] == "threads: 7", (
        "six stages, and the evaluation of the base model outside iterations"
    )

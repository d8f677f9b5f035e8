"""Prefect is spared the question for slots of unlimited tags, and only of those."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

SCRIPT = """
from tasks import servers, settings
settings.apply_defaults()
servers.connect()
from prefect.concurrency import services
for tag in ("limited-here", "free-here"):
    settings.skip_unlimited([tag])
    print(tag, frozenset([f"tag:{tag}"]) in services._no_limits_cache)
"""


@pytest.mark.slow
def test_a_limited_tag_is_still_asked_for(project: Any) -> None:
    limit = {"name": "tag:limited-here", "limit": 1, "active": True}
    httpx.post(f"{project.env['PREFECT_API_URL']}/v2/concurrency_limits/", json=limit).raise_for_status()
    script = project.folder / "ask.py"
    script.write_text(SCRIPT)
    assert project.call(driver=script).split() == ["limited-here", "False", "free-here", "True"]

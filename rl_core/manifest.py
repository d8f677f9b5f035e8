"""The record written last beside a stage's output, and the digests that identify that output."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, JsonValue

from rl_core.fingerprint import canonical_json, sha256_text
from rl_core.section import Section

MANIFEST_NAME = "manifest.json"


class FileEntry(Section):
    name: str
    """Path inside the output folder, with `/`."""
    bytes: int
    sha256: str


class Ref(Section):
    """What travels between stages: where an output lies and what it is, never the data itself."""

    path: str
    """Folder; relative paths start at the run folder."""
    digest: str
    """`content_digest` of the folder."""


class Manifest(Section):
    format: Literal[1] = 1
    run: str
    iteration: int
    """-1 for the evaluation of the model a run starts from."""
    stage: str
    stage_version: int
    fingerprint: str
    """SHA-256 of everything that decides the output."""
    identity: dict[str, JsonValue]
    seed_key: list[int]
    inputs: dict[str, Ref]
    digest: str
    """SHA-256 of everything that was written."""
    files: list[FileEntry]
    pruned: list[str] = Field(default_factory=list)
    """Names out of `files` that were removed on purpose afterwards; the digest still stands for all of them."""
    rows: int
    metrics: dict[str, float | None] = Field(default_factory=dict)
    """Values by metric name; null where a metric is not defined."""
    state: dict[str, JsonValue] = Field(default_factory=dict)
    """What the next iteration continues from, such as the prompt cursor."""
    measured: dict[str, JsonValue] = Field(default_factory=dict)
    """What differs between two equal executions: seconds, host, process, device, threads, reward seconds."""
    code_version: str = ""
    parent: str | None = None
    """`run@iteration/stage` from which a forked run goes on; null in a run of its own."""


def content_digest(files: list[FileEntry]) -> str:
    """One digest of a set of files: names and contents count, order and times do not."""
    return sha256_text(canonical_json([[f.name, f.sha256] for f in sorted(files, key=lambda f: f.name)]))

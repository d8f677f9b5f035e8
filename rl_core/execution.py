"""Where and how fast a run is computed, apart from what it computes."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rl_core.section import Section

StageName = Literal["generate", "score", "advantage", "train", "evaluate", "register"]
Placement = Annotated[str, Field(pattern=r"^deployment:[^/\s]+/[^/\s]+$")]


class ExecutionConfig(Section):
    """Where and how fast: never part of a fingerprint, always recorded."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the embedded engines."""
    threads: int | None = Field(default=None, ge=1)
    """Compute threads of the worker; null takes all cores it may use."""
    micro_batch_tokens: int = Field(default=4096, ge=16)
    """Padded tokens of one forward and backward pass."""
    logit_chunk_tokens: int = Field(default=256, ge=1)
    """Positions whose logits exist at the same time."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""
    generate_rows: int = Field(default=512, ge=1)
    """Completions decoded together."""
    reward_processes: int = Field(default=2, ge=1)
    """Processes that run reward functions."""
    reward_batch_rows: int = Field(default=64, ge=1)
    """Rows in one call of a reward function; groups are kept whole where they fit."""
    timeout_seconds: dict[StageName, Annotated[float, Field(gt=0)]] = Field(default_factory=dict)
    """Limit per stage that runs in the worker (all but register); its processes are killed when it is passed."""
    retries: dict[StageName, Annotated[int, Field(ge=0)]] = Field(default_factory=dict)
    """Retries per stage; a stage not named has one."""
    retry_delay_seconds: float = Field(default=1.0, ge=0)
    """Pause before a retry."""
    placement: dict[StageName, Placement] = Field(default_factory=dict)
    """Where a stage runs: `deployment:<flow>/<deployment>` hands it to that Prefect deployment, which any worker of
    its work queue executes; a stage not named runs in this run's own worker."""
    keep_trainer_states: int | None = Field(default=None, ge=1)
    """Newest policies that keep their optimizer state when an iteration ends; null keeps all. The champion's and those
    that forks start from are kept in any case, and weights are never removed."""
    tags: dict[StageName, list[str]] = Field(default_factory=dict)
    """Resource tags per stage, beside the built-in ones; Prefect limits concurrency by tag."""

"""The gate before `champion`: compare challenger and champion on the same problems, and keep the decision in tags."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq

from rl_core.config import RegistryConfig
from rl_core.evaluation import compare, problem_means
from rl_core.fingerprint import canonical_json
from rl_core.manifest import Manifest
from rl_core.schemas import DECISIONS
from tasks.storage.files import read_manifest

if TYPE_CHECKING:
    from mlflow.entities.model_registry import ModelVersion

CHAMPION, CHALLENGER = "champion", "challenger"
_FIRST = "the first champion: there was none to compare with"
_MEASURE = ("judge", "evaluate", "prompt", "max_completion_tokens", "max_context_tokens")
"""What must be equal in two evaluations for their scores to be compared."""

Decision = dict[str, Any]
"""A row of `rl_core.schemas.DECISIONS`."""


@dataclass(frozen=True)
class Candidate:
    """A policy to be registered.

    Attributes:
        model_name: registered model.
        run: name of the run.
        iteration: iteration that made the checkpoint.
        checkpoint: absolute folder of the checkpoint, with its manifest.
        digest: digest of the checkpoint.
        evaluation: absolute folder of its evaluation rows, with their manifest.
        evaluation_digest: digest of that folder.
        max_completion_tokens: budget of an answer when the registered model is asked.
        seed: seed of the comparison's bootstrap.
    """

    model_name: str
    run: str
    iteration: int
    checkpoint: Path
    digest: str
    evaluation: Path
    evaluation_digest: str
    max_completion_tokens: int
    seed: int


def recorded(
    version: ModelVersion, champion: ModelVersion | None, candidate: Candidate, config: RegistryConfig
) -> Decision | None:
    """The decision in a version's tags, unless it was made on other grounds or the champion has changed before it."""
    tags = version.tags
    if tags.get("evaluation_digest") != candidate.evaluation_digest or tags.get("criteria") != _criteria(config):
        return None
    written = {**json.loads(tags["decision"]), "iteration": candidate.iteration}
    decision: Decision = {name: written[name] for name in DECISIONS.names}
    if tags["gate"] == "pending" and (champion is None or str(champion.version) != str(version.version)):
        current = champion.tags.get("checkpoint_sha256") if champion is not None else None
        return decision if current == decision["champion_digest"] else None
    return decision


def decide(
    version: ModelVersion | None, champion: ModelVersion | None, candidate: Candidate, config: RegistryConfig
) -> Decision:
    """Whether the candidate becomes champion. `version` is the one it has already, if any."""
    decision: Decision = {
        "iteration": candidate.iteration,
        "policy_digest": candidate.digest,
        "alias": CHAMPION,
        "champion_digest": None,
        "method": config.method,
        "margin": config.margin,
        "difference": None,
        "lower_bound": None,
        "p_value": None,
    }
    if champion is None:
        return decision | {"reason": _FIRST}
    if version is not None and str(version.version) == str(champion.version):
        return decision | {"reason": "is the champion already"}
    decision |= {"alias": CHALLENGER, "champion_digest": champion.tags.get("checkpoint_sha256")}
    theirs, refusal = _champion_scores(champion, candidate)
    if refusal:
        todo = "evaluate the champion in the same way, or remove its alias to start anew"
        return decision | {"reason": f"not compared: {refusal}; {todo}"}
    ours = _scores(candidate.evaluation)
    found = compare(ours, theirs, config.method, config.margin, config.confidence, candidate.seed)
    decision |= {"difference": found.difference, "lower_bound": found.lower_bound, "p_value": found.p_value}
    if found.not_worse and version is not None and int(version.version) < int(champion.version):
        return decision | {"reason": f"{found.reason}; but older than the champion, and aliases only move forward"}
    return decision | {"alias": CHAMPION if found.not_worse else CHALLENGER, "reason": found.reason}


def _champion_scores(champion: ModelVersion, candidate: Candidate) -> tuple[dict[str, float], str]:
    """The champion's score per problem, or the reason why they cannot be compared with."""
    path, digest = champion.tags.get("evaluation_path"), champion.tags.get("evaluation_digest")
    if not path or not digest:
        return {}, "the champion has no evaluation in its tags"
    theirs, ours = complete(Path(path), digest), complete(candidate.evaluation, candidate.evaluation_digest)
    if theirs is None or ours is None:
        return {}, "the evaluation of the champion is no longer where its tags say"
    differing = [key for key in _MEASURE if _measure(theirs, key) != _measure(ours, key)]
    if differing:
        return {}, f"the champion was evaluated differently ({', '.join(differing)})"
    return _scores(Path(path)), ""


def _measure(manifest: Manifest, key: str) -> Any:
    value = manifest.identity.get(key)
    if key == "evaluate" and isinstance(value, dict):
        return {name: item for name, item in value.items() if name != "problems"}
    return value


def _scores(folder: Path) -> dict[str, float]:
    """Share of correct answers per problem."""
    tables = [pq.read_table(path, columns=["prompt_id", "correct"]) for path in sorted(folder.glob("part-*.parquet"))]
    ids = [value for table in tables for value in table["prompt_id"].to_pylist()]
    correct = [float(value) for table in tables for value in table["correct"].to_pylist()]
    return problem_means(ids, correct)


def complete(folder: Path, digest: str) -> Manifest | None:
    """The manifest of a folder that holds what `digest` names, every file in its full size; null otherwise."""
    manifest = read_manifest(folder)
    return manifest if manifest is not None and manifest.digest == digest else None


def _criteria(config: RegistryConfig) -> str:
    return canonical_json(config.model_dump(mode="json", exclude={"model_name"}))


def gate_word(decision: Decision) -> str:
    """Final value of the `gate` tag: first, passed or refused."""
    if decision["alias"] == CHALLENGER:
        return "refused"
    return "first" if decision["reason"] == _FIRST else "passed"


def tags_of(candidate: Candidate, config: RegistryConfig, decision: Decision) -> dict[str, str]:
    """Text for people, and the decision itself for whoever has to finish it."""
    return {
        "checkpoint_sha256": candidate.digest,
        "checkpoint_path": str(candidate.checkpoint),
        "run": candidate.run,
        "iteration": str(candidate.iteration),
        "evaluation_path": str(candidate.evaluation),
        "evaluation_digest": candidate.evaluation_digest,
        "criteria": _criteria(config),
        "decision": canonical_json(decision),
        "gate": "pending",
        "gate_method": config.method,
        "gate_margin": str(config.margin),
        "gate_difference": str(decision["difference"]),
        "gate_lower_bound": str(decision["lower_bound"]),
        "gate_reason": decision["reason"],
    }

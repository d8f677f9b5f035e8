"""What decides a stage's output and what does not, field by field of the config."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from rl_core.config import RunConfig
from rl_core.execution import ExecutionConfig, StageName
from rl_core.fingerprint import fingerprint
from rl_core.recipes import apply_overrides, build_config
from rl_core.stages import STAGES, Facts, stages_from

BASE: dict[str, Any] = {
    "name": "r",
    "model": {"source": "tiny-random"},
    "environment": {"kind": "reasoning_gym"},
    "rewards": [{"function": "judge"}, {"function": "other"}],
}
FACTS: Facts = {
    "dtype": "float32",
    "environment": "e",
    "rewards": {"judge": "j", "other": "o"},
    "cursor": 8,
    "reference": "m",
}


def prints(config: RunConfig, facts: Facts = FACTS) -> dict[str, str]:
    """Fingerprint of every stage for fixed inputs."""
    return {
        name: fingerprint(
            name, spec.version, spec.identity(config, facts), [config.seed, 3], dict.fromkeys(spec.reads, "d")
        )
        for name, spec in STAGES.items()
    }


def changed(one: RunConfig, other: RunConfig) -> set[str]:
    before, after = prints(one), prints(other)
    return {name for name in before if before[name] != after[name]}


def config(*overrides: str) -> RunConfig:
    return build_config(apply_overrides(BASE, list(overrides)), "test")


def readable(value: object) -> str:
    """A test's name that is the same in every process: sets have no order of their own."""
    return ("+".join(sorted(value)) if isinstance(value, set) else str(value)) or "-"


ALL = set(STAGES)
MODEL_STAGES = {"generate", "train", "evaluate"}
FIXED_NORM = "algorithm.aggregation=seq_sum_fixed_norm"
KL_LOSS, KL_REWARD = "algorithm.kl.coef=0.1", "algorithm.kl={coef=0.1, place='reward'}"
OVERLONG = "algorithm.overlong={buffer_tokens=8}"

# (settings before, one more setting, the stages whose output it decides)
TABLE: list[tuple[list[str], str, set[str]]] = [
    ([], "name=s", {"register"}),  # through the registered model's name; a run has a store of its own anyway
    (["registry.model_name=m"], "name=s", set()),
    ([], "seed=1", ALL),
    ([], "iterations=20", set()),
    (["learner.schedule=linear"], "iterations=20", {"train"}),
    ([], "model.source=other", set()),  # the policy is an input, by digest
    ([], "model.dtype=bfloat16", set()),  # through the compute type it stands for, a fact
    ([], "model.max_context_tokens=512", {"generate", "evaluate"}),
    ([], "environment.kind=dataset", set()),  # through its digest, a fact
    ([], "environment.params.x=1", set()),
    ([], "generate.prompts_per_iteration=9", {"generate"}),
    ([], "generate.group_size=9", {"generate"}),
    ([], "generate.max_prompt_tokens=99", {"generate", "evaluate"}),
    ([], "generate.overlong_prompt=drop", {"generate", "evaluate"}),
    ([], "generate.max_completion_tokens=65", {"generate", "evaluate"}),
    (["evaluate.max_completion_tokens=64"], "generate.max_completion_tokens=65", {"generate"}),
    ([FIXED_NORM], "generate.max_completion_tokens=65", {"generate", "evaluate", "train"}),
    ([OVERLONG], "generate.max_completion_tokens=65", {"generate", "evaluate", "advantage"}),
    ([], "generate.temperature=0.9", {"generate", "train"}),
    ([], "rewards.judge.weight=2", {"score"}),
    ([], "rewards.other.weight=2", {"score"}),
    ([], "rewards.judge.params.x=1", {"score", "evaluate"}),
    ([], "rewards.other.params.x=1", {"score"}),
    (["rewards.0.name=judge"], "rewards.other.function=m:other", {"score"}),
    (["rewards.0.name=judge"], "rewards.judge.function=m:judge", {"score", "evaluate"}),
    (["rewards=[{function='judge'}]"], "rewards=[{function='judge'}, {function='other'}]", {"score"}),
    ([], "scoring.on_error=mark", {"score"}),
    ([], "scoring.timeout_seconds=1", {"score", "evaluate"}),
    ([], "scoring.max_unscored_fraction=0.1", {"score", "evaluate"}),
    ([], "algorithm.name=dr_grpo", {"advantage", "train"}),
    ([], "algorithm.name=rloo", {"advantage", "train"}),
    ([], "algorithm.name=dapo", {"advantage", "train"}),
    ([], "algorithm.name=reinforce", {"advantage", "train"}),
    ([], "algorithm.advantage=rloo", {"advantage"}),
    ([], "algorithm.advantage=grpo", set()),  # what the algorithm's row says already
    ([], "algorithm.std_ddof=0", {"advantage"}),
    ([], "algorithm.std_eps=1e-4", {"advantage"}),
    (["algorithm.name=rloo"], "algorithm.std_ddof=0", set()),
    (["algorithm.name=rloo"], "algorithm.std_eps=1e-4", set()),
    ([], "algorithm.clip_low=0.1", {"train"}),
    ([], "algorithm.clip_low=0.2", set()),
    ([], "algorithm.clip_high=0.28", {"train"}),
    ([], "algorithm.dual_clip=3", {"train"}),
    ([], "algorithm.aggregation=token_mean", {"train"}),
    ([], "algorithm.kl.coef=0.1", {"advantage", "train"}),
    ([KL_LOSS], "algorithm.kl.coef=0.2", {"train"}),
    ([KL_REWARD], "algorithm.kl.coef=0.2", {"advantage"}),
    ([], "algorithm.kl.estimator=k1", set()),
    ([KL_LOSS], "algorithm.kl.estimator=k1", {"train"}),
    ([KL_REWARD], "algorithm.kl.estimator=k1", set()),  # what null stands for there
    ([KL_REWARD], "algorithm.kl.estimator=k2", {"advantage"}),
    ([], "algorithm.kl.place=reward", set()),
    ([KL_LOSS], "algorithm.kl.place=reward", {"generate", "advantage", "train"}),
    ([], KL_REWARD, {"generate", "advantage"}),
    ([], "algorithm.truncation=mask_loss", {"advantage"}),
    ([], "algorithm.truncated_reward=-1", set()),
    (["algorithm.truncation=reward_override"], "algorithm.truncated_reward=-1", {"advantage"}),
    ([], OVERLONG, {"advantage"}),
    ([OVERLONG], "algorithm.overlong.buffer_tokens=9", {"advantage"}),
    ([OVERLONG], "algorithm.overlong.factor=2", {"advantage"}),
    *(
        ([], f"learner.{setting}", {"train"})
        for setting in (
            *("lr=1e-5", "betas=[0.9, 0.99]", "eps=1e-7", "weight_decay=0.1", "max_grad_norm=2", "warmup_steps=1"),
            *("schedule=cosine", "update_epochs=2", "minibatches=2"),
        )
    ),
    *(
        ([], f"evaluate.{setting}", {"evaluate"})
        for setting in ("problems=65", "samples=2", "temperature=0.9", "max_completion_tokens=65", "correct_at=0.5")
    ),
    (["evaluate.samples=1"], "evaluate.greedy=false", {"evaluate"}),
    ([], "evaluate.max_completion_tokens=64", set()),  # the training limit
    ([], "evaluate.reward=judge", set()),  # the first reward
    ([], "evaluate.reward=other", {"evaluate"}),
    ([], "evaluate.every=2", set()),  # which iterations are evaluated, not how
    ([], "registry.model_name=m", {"register"}),
    ([], "registry.model_name=r", set()),
    ([], "registry.method=mcnemar_midp", {"register"}),
    ([], "registry.margin=0.1", {"register"}),
    ([], "registry.confidence=0.9", {"register"}),
]


@pytest.mark.parametrize(("before", "setting", "stages"), TABLE, ids=readable)
def test_a_setting_changes_the_identity_of_the_stages_it_decides(
    before: list[str], setting: str, stages: set[str]
) -> None:
    assert changed(config(*before), config(*before, setting)) == stages


def _leaves(model: type[BaseModel], path: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        kinds = [k for k in (field.annotation, *get_args(field.annotation)) if isinstance(k, type)]
        inner = next((kind for kind in kinds if issubclass(kind, BaseModel)), None)
        if inner is None:
            yield f"{path}{name}"
        elif inner is not ExecutionConfig:
            yield from _leaves(inner, f"{path}{name}.")


def test_the_table_above_holds_every_setting() -> None:
    """A new setting needs a line that says which stages it decides."""
    named = {setting.partition("=")[0].replace(".judge.", ".").replace(".other.", ".") for _, setting, _ in TABLE}
    missing = {leaf for leaf in _leaves(RunConfig) if not any(leaf == n or n.startswith(f"{leaf}.") for n in named)}
    assert missing == {"rewards.name"}  # below: a new name needs a fact of that name


def test_a_new_name_of_a_reward_is_a_new_column() -> None:
    facts = FACTS | {"rewards": {"judge": "j", "second": "o"}}
    renamed = config("rewards.1.name=second")
    before, after = prints(config()), prints(renamed, facts)
    assert {name for name in before if before[name] != after[name]} == {"score"}
    assert "reward_second" in STAGES["score"].schema(renamed).names


@pytest.mark.parametrize(
    ("before", "fact", "stages"),
    [
        ([], {"dtype": "bfloat16"}, MODEL_STAGES),
        ([], {"environment": "x"}, {"generate", "evaluate"}),
        ([], {"rewards": {"judge": "x", "other": "o"}}, {"score", "evaluate"}),
        ([], {"rewards": {"judge": "j", "other": "x"}}, {"score"}),
        ([], {"cursor": 9}, {"generate"}),
        ([], {"reference": "x"}, set()),
        ([KL_LOSS], {"reference": "x"}, {"train"}),
        ([KL_REWARD], {"reference": "x"}, {"generate"}),
    ],
    ids=readable,
)
def test_what_the_config_only_names_counts_by_digest(before: list[str], fact: Facts, stages: set[str]) -> None:
    one = config(*before)
    old, new = prints(one), prints(one, FACTS | fact)
    assert {name for name in old if old[name] != new[name]} == stages


PER_STAGE = st.sampled_from(get_args(StageName))
EXECUTION: dict[str, st.SearchStrategy[Any]] = {
    "device": st.sampled_from(["auto", "cpu", "cuda"]),
    "threads": st.none() | st.integers(1, 256),
    "micro_batch_tokens": st.integers(16, 2**20),
    "logit_chunk_tokens": st.integers(1, 2**16),
    "gradient_checkpointing": st.booleans(),
    "generate_rows": st.integers(1, 2**16),
    "reward_processes": st.integers(1, 256),
    "reward_batch_rows": st.integers(1, 2**16),
    "timeout_seconds": st.dictionaries(PER_STAGE, st.floats(0.1, 1e6)),
    "retries": st.dictionaries(PER_STAGE, st.integers(0, 9)),
    "retry_delay_seconds": st.floats(0, 1e4),
    "placement": st.dictionaries(st.sampled_from(get_args(StageName)[:-1]), st.just("deployment:stage/gpu")),
    "keep_trainer_states": st.none() | st.integers(1, 9),
    "tags": st.dictionaries(PER_STAGE, st.lists(st.text(max_size=3), max_size=2)),
}
VARIANTS = [[], [KL_LOSS], [KL_REWARD], ["algorithm.name=dapo"], ["algorithm.name=dr_grpo", "learner.schedule=cosine"]]


@settings(deadline=None)
@given(st.sampled_from(VARIANTS), st.fixed_dictionaries({}, optional=EXECUTION))
def test_no_execution_setting_enters_any_identity(variant: list[str], execution: dict[str, Any]) -> None:
    assert set(EXECUTION) == set(ExecutionConfig.model_fields)
    before = config(*variant)
    after = before.model_copy(update={"execution": ExecutionConfig(**execution)})
    assert changed(before, after) == set()


def test_order_and_inputs_of_the_stages() -> None:
    """Every input is the run's policy or a stage that comes before, and every stage has rows of a declared schema."""
    assert tuple(STAGES) == get_args(StageName)
    for index, (name, spec) in enumerate(STAGES.items()):
        assert spec.name == name
        assert set(spec.reads) <= {"policy", *list(STAGES)[:index]}
        assert len(spec.schema(config()).names) > 0
    assert stages_from("generate") == list(STAGES)
    assert stages_from("evaluate") == ["evaluate", "register"]

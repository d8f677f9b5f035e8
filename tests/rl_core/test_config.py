"""Bounds and combinations that a run config refuses, in words that name the setting."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from pydantic import BaseModel, ValidationError

from rl_core.algorithms import ALGORITHMS
from rl_core.config import AlgorithmName, RewardConfig, RunConfig
from rl_core.errors import ConfigError
from rl_core.recipes import apply_overrides, build_config, config_json

BASE: dict[str, Any] = {
    "name": "r",
    "model": {"source": "tiny-random"},
    "environment": {"kind": "reasoning_gym"},
    "rewards": [{"function": "last_integer"}],
}


def config(*overrides: str) -> RunConfig:
    return build_config(apply_overrides(BASE, list(overrides)), "r.toml")


def refusal(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        config(*overrides)
    return str(caught.value)


def _fields(model: type[BaseModel], path: str = "") -> Iterator[tuple[str, Any]]:
    for name, field in model.model_fields.items():
        yield f"{path}{name}", field
        for kind in (field.annotation, *get_args(field.annotation)):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from _fields(kind, f"{path}{name}.")


FIELDS = dict(_fields(RunConfig))


def test_minimal_config_has_the_documented_defaults() -> None:
    found = config()
    assert (found.seed, found.iterations, found.algorithm.name, found.generate.group_size) == (0, 10, "grpo", 8)
    assert found.model_name == "r"
    assert config("registry.model_name=m").model_name == "m"


def test_names_of_algorithms_are_those_of_the_table() -> None:
    assert set(get_args(AlgorithmName)) == set(ALGORITHMS)


@pytest.mark.parametrize("path", [path for path in FIELDS if "." in path or path in ("name", "seed", "iterations")])
def test_every_setting_has_a_description(path: str) -> None:
    """The Prefect form shows it."""
    section = path.rsplit(".", 1)[-1] in ("kl",)
    assert section or FIELDS[path].description


@pytest.mark.parametrize("path", ["", "model", "generate", "rewards.0", "algorithm.kl", "execution", "learner"])
def test_unknown_keys_are_refused_in_every_section(path: str) -> None:
    key = f"{path}.nonsense_key".lstrip(".")
    assert f"{key}: unknown key" in refusal(f"{key}=1")


@pytest.mark.parametrize(
    "setting",
    [
        *("name=''", "name=A", "name=a_b", "name=-a", "name=a/b", "name='../a'", f"name={'a' * 64}"),
        *("seed=-1", f"seed={2**63}", "iterations=0", "rewards=[]", "model.source=''", "environment.kind=''"),
        *("model.dtype=float16", "model.max_context_tokens=1"),
        *("generate.prompts_per_iteration=0", "generate.group_size=0", "generate.max_prompt_tokens=0"),
        *("generate.max_completion_tokens=0", "generate.temperature=0", "generate.temperature=10.5"),
        *("generate.overlong_prompt=cut", "generate.group_size=2.5", "generate.temperature=nan"),
        *("rewards.0.function=''", "rewards.0.name='A b'", "rewards.0.weight=inf", "rewards.0.params={x=nan}"),
        *("scoring.on_error=skip", "scoring.timeout_seconds=0", "scoring.max_unscored_fraction=1.1"),
        *("scoring.max_unscored_fraction=-0.1", "algorithm.kl.coef=-1", "algorithm.kl.estimator=k4"),
        *(
            "algorithm.kl.place=both",
            "algorithm.overlong.buffer_tokens=0",
            "algorithm.overlong={buffer_tokens=4, factor=0}",
        ),
        *("algorithm.name=ppo", "algorithm.advantage=dapo", "algorithm.std_ddof=2", "algorithm.std_eps=-1e-9"),
        *("algorithm.clip_low=1", "algorithm.clip_low=-0.1", "algorithm.clip_high=-0.1", "algorithm.dual_clip=1"),
        *("algorithm.aggregation=mean", "algorithm.truncation=drop", "algorithm.truncated_reward=nan"),
        *("learner.lr=0", "learner.lr=nan", "learner.eps=0", "learner.weight_decay=-1", "learner.max_grad_norm=0"),
        *("learner.warmup_steps=-1", "learner.schedule=step", "learner.update_epochs=0", "learner.minibatches=0"),
        *("learner.betas=[0.9]", "evaluate.problems=0", "evaluate.samples=-1", "evaluate.temperature=0"),
        *("evaluate.max_completion_tokens=0", "evaluate.every=0", "evaluate.correct_at=inf"),
        *("registry.method=t_test", "registry.margin=-0.1", "registry.confidence=0.5", "registry.confidence=1"),
        *("execution.device=tpu", "execution.threads=0", "execution.micro_batch_tokens=15"),
        *("execution.logit_chunk_tokens=0", "execution.generate_rows=0", "execution.reward_processes=0"),
        *("execution.reward_batch_rows=0", "execution.retry_delay_seconds=-1", "execution.retries.sample=1"),
        "execution.timeout_seconds.sample=1",
        "execution.tags.sample=['a']",
    ],
)
def test_values_out_of_bounds_are_refused_by_name(setting: str) -> None:
    path = setting.partition("=")[0]
    assert path.removesuffix(".sample") in refusal(setting)


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("iterations=true", "iterations: Input should not be true or false (got true)"),
        ("seed=false", "seed: Input should not be true or false (got false)"),
        ("learner.lr=true", "learner.lr: Input should not be true or false"),
        ("learner.betas=[true, 0.9]", "learner.betas: Input should not be true or false"),
        ("algorithm.clip_low=false", "algorithm.clip_low: Input should not be true or false"),
        ("algorithm.overlong={buffer_tokens=true}", "algorithm.overlong.buffer_tokens: Input should not be true"),
        ("rewards.0.weight=true", "rewards.0.weight: Input should not be true or false"),
        ("execution.retries.train=true", "execution.retries: Input should not be true or false"),
        ("execution.tags.train=[true]", "execution.tags: Input should not be true or false"),
        ("evaluate.greedy=maybe", "evaluate.greedy: Input should be a valid boolean"),
        (f"seed={2**70}", "seed: Input should be less than 9223372036854775808"),
        ("algorithm.kl.coef=nan", "algorithm.kl.coef: Input should be a finite number"),
    ],
)
def test_a_value_that_python_or_json_would_bend_is_refused(setting: str, words: str) -> None:
    """C81: true is no number, 2**70 is no JSON integer, NaN would be sent as null; each is refused once, by name."""
    found = refusal(setting)
    assert words in found and found.count("\n  ") == 1, found


def test_values_of_numpy_and_numbers_as_text() -> None:
    """C81: what another program hands over is the plain number it means, or refused; also in free parameters."""
    params = {"a": np.int64(3), "list": (np.int32(4), True)}
    data = BASE | {"seed": np.int64(3), "iterations": np.uint8(4), "learner": {"lr": "1e-6", "eps": np.float32(0.5)}}
    found = build_config(data | {"environment": {"kind": "k", "params": params}}, "r")
    assert (found.seed, type(found.seed), found.iterations) == (3, int, 4)
    assert (found.learner.lr, found.learner.eps, type(found.learner.eps)) == (1e-6, 0.5, float)
    assert json.dumps(found.environment.params) == '{"a": 3, "list": [4, true]}'
    for path, value in [("model", {"source": Path("/x")}), ("environment", {"kind": "k", "params": {"p": Path("/x")}})]:
        with pytest.raises(ConfigError, match=f"{path}\\.(source|params.p): "):
            build_config(BASE | {path: value}, "r")


def test_bulk_data_is_no_override() -> None:
    """C81: Prefect refuses parameters of 512 KiB; long before, the run asks for a file."""
    text = "a prompt " * 66_667
    found = refusal(f"environment.params.prompts=['{text}']")
    assert "the override of environment.params.prompts is too long" in found and "600,0" in found
    assert "give its path" in found


@pytest.mark.parametrize(
    "setting",
    [
        *("name=0", "name='2024-01-01'", f"name={'a' * 63}", f"seed={2**63 - 1}", "generate.temperature=10"),
        *("algorithm.clip_low=0", "algorithm.clip_low=0.999", "algorithm.clip_high=3", "algorithm.std_eps=0"),
        *("scoring.max_unscored_fraction=0", "scoring.max_unscored_fraction=1", "rewards.0.weight=-1"),
        *("execution.micro_batch_tokens=16", "registry.margin=0", "model.max_context_tokens=257"),
    ],
)
def test_values_at_the_bounds_are_taken(setting: str) -> None:
    if setting != "name=0":
        config(setting)
    else:
        config("name='0'")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["rewards=[{function='a'}, {function='m:a'}]"], "two rewards have one name (a, a)"),
        (["evaluate.reward=other"], "'other' is none of the rewards ['last_integer']"),
        (["evaluate.greedy=false"], "set greedy = true or samples >= 1"),
        (["generate.group_size=1"], "generate.group_size: grpo compares the completions of one prompt"),
        (["generate.group_size=1", "algorithm.name=dapo"], "needs at least 2"),
        (["generate.group_size=1", "algorithm.name=reinforce", "algorithm.advantage=rloo"], "rloo compares"),
        (["learner.minibatches=9"], "9 steps need at least as many prompts"),
        (["algorithm.overlong.buffer_tokens=65"], "larger than generate.max_completion_tokens"),
        (["model.max_context_tokens=256"], "256 leaves no room for a completion in model.max_context_tokens = 256"),
    ],
)
def test_combinations_that_cannot_work_are_refused_with_what_to_do(settings: list[str], message: str) -> None:
    assert message in refusal(*settings)


@pytest.mark.parametrize(
    "settings",
    [
        ["rewards=[{function='a'}, {function='m:a', name='b'}]", "evaluate.reward=b"],
        ["evaluate.greedy=false", "evaluate.samples=1"],
        ["generate.group_size=1", "algorithm.name=reinforce"],
        ["generate.group_size=1", "algorithm.advantage=reinforce"],
        ["learner.minibatches=8"],
        ["algorithm.overlong.buffer_tokens=64"],
        ["model.max_context_tokens=257"],
    ],
)
def test_the_nearest_combination_that_works_is_taken(settings: list[str]) -> None:
    config(*settings)


@pytest.mark.parametrize(
    ("function", "name"),
    [("last_integer", "last_integer"), ("pkg.mod:Fn", "fn"), ("pkg.mod:Cls.method", "method"), ("a.b", "b")],
)
def test_a_reward_is_named_after_its_function(function: str, name: str) -> None:
    assert RewardConfig(function=function).name == name
    assert RewardConfig(function=function, name="given").name == "given"


def test_the_judge_is_the_named_reward_or_the_first() -> None:
    two = "rewards=[{function='a', weight=2}, {function='b'}]"
    assert config(two).judge.name == "a"
    assert config(two, "evaluate.reward=b").judge.name == "b"


def test_configs_are_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        config().generate.group_size = 2  # type: ignore[misc]


@pytest.mark.parametrize(
    "settings",
    [
        [],
        ["algorithm.overlong={buffer_tokens=4, factor=0.5}", "algorithm.kl.coef=0.1", "algorithm.dual_clip=3"],
        [f"environment.params={{a=[1, 1.0, true, 'x', {{}}, []], big={2**63 - 1}, tiny=5e-324, 'ü'='\u202e'}}"],
        ["execution.timeout_seconds={train=3.5}", "execution.retries={score=0}", "execution.tags={train=['gpu']}"],
        ["learner.lr=1", "learner.betas=[0.1, 0.2]", "rewards.0.weight=-3", f"seed={2**63 - 1}"],
    ],
)
def test_json_round_trip_is_exact(settings: list[str]) -> None:
    """Through the text of a file, as `run.json` keeps it; whole numbers in float fields are floats before and after."""
    before = config(*settings)
    text = json.dumps(config_json(before))
    after = build_config(json.loads(text), "run.json")
    assert after == before
    assert json.dumps(config_json(after)) == text


def test_whole_numbers_become_floats_where_a_float_is_meant() -> None:
    """`1` and `1.0` differ in a fingerprint, so both spellings of a recipe must give one of them."""
    one, other = (json.dumps(config_json(config(f"rewards.0.weight={v}", f"learner.lr={v}"))) for v in ("1", "1.0"))
    assert one == other
    assert re.search(r'"weight": 1\.0', one)

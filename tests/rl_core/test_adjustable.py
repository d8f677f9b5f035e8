"""Which settings may change in a live run, against the config itself."""

from __future__ import annotations

from typing import Any

import pytest

from rl_core.adjustable import ADJUSTABLE, changes, check_changes, is_adjustable, settings, with_setting
from rl_core.config import RunConfig
from rl_core.errors import ConfigError
from rl_core.recipes import apply_overrides, build_config, config_json


def config(*overrides: str, **sections: Any) -> RunConfig:
    data: dict[str, Any] = {
        "name": "run",
        "model": {"source": "tiny-random"},
        "environment": {"kind": "reasoning_gym"},
        "rewards": [{"function": "last_integer"}, {"function": "format_regex", "params": {"pattern": "x"}}],
    }
    return build_config(apply_overrides(data | sections, [*overrides]), "test")


def test_every_adjustable_setting_is_a_field_of_the_config() -> None:
    known = {key.replace("last_integer", "*") for key in settings(config())}
    assert set(ADJUSTABLE) <= known
    assert len(set(ADJUSTABLE)) == len(ADJUSTABLE)


def test_settings_name_every_leaf_once() -> None:
    """Put together again, they are the config: nothing can change unseen."""
    start = config("algorithm.overlong.buffer_tokens=4", "execution.retries.train=2")
    found = settings(start)
    assert found["rewards"] == ["last_integer", "format_regex"]
    assert found["algorithm.overlong.buffer_tokens"] == 4 and found["execution.retries"] == {"train": 2}
    blank = {key: None for key in found if key != "rewards" and not key.endswith(".name")}
    data = config_json(start)
    for key in blank:
        data = with_setting(data, key, "gone")
    for key in blank:
        data = with_setting(data, key, found[key])
    assert data == config_json(start)
    assert with_setting(config_json(start), "rewards.format_regex.weight", 3.0)["rewards"][1]["weight"] == 3.0


@pytest.mark.parametrize(
    ("override", "change"),
    [
        ("learner.lr=5e-6", {"learner.lr": (1e-6, 5e-6)}),
        ("learner.betas=[0.8, 0.9]", {"learner.betas": ([0.9, 0.999], [0.8, 0.9])}),
        ("rewards.0.weight=2", {"rewards.last_integer.weight": (1.0, 2.0)}),
        ("rewards.format_regex.weight=0", {"rewards.format_regex.weight": (1.0, 0.0)}),
        ("algorithm.clip_high=0.3", {"algorithm.clip_high": (None, 0.3)}),
        ("scoring={on_error='mark'}", {"scoring.on_error": ("fail", "mark")}),
        ("execution.retries.train=3", {"execution.retries": ({}, {"train": 3})}),
        ("learner.minibatches=2", {"learner.minibatches": (1, 2)}),
        ("learner.lr=1e-6", {}),
    ],
)
def test_a_live_change_by_setting(override: str, change: dict[str, Any]) -> None:
    before = config()
    after = build_config(apply_overrides(config_json(before), [override]), "test")
    assert check_changes(before, after) == change


@pytest.mark.parametrize(
    "override",
    [
        "seed=3",
        "name=other",
        "iterations=20",
        "model.dtype=bfloat16",
        "environment.params={dataset='chain_sum'}",
        "rewards.0.params={strict=true}",
        "rewards=[{function='format_regex', params={pattern='x'}}, {function='last_integer'}]",
        "rewards=[{function='last_integer'}]",
        "learner.schedule=cosine",
        "learner.warmup_steps=5",
        "evaluate.problems=3",
        "registry.margin=0.1",
        "algorithm.name=rloo",
        "execution.device=cuda",
        "execution.threads=1",
    ],
)
def test_what_makes_iterations_incomparable_is_refused_with_the_list(override: str) -> None:
    before = config()
    after = build_config(apply_overrides(config_json(before), [override, "learner.lr=1.0"]), "test")
    with pytest.raises(ConfigError, match="cannot change in a live run") as caught:
        check_changes(before, after)
    assert caught.value.expected == ", ".join(ADJUSTABLE)
    assert override.partition("=")[0].split(".")[0] in caught.value.got and "learner.lr" not in caught.value.got


def test_a_schedule_and_the_limit_of_heldout_answers_stay() -> None:
    """Steps per iteration stretch a decaying learning rate; the training budget may be the held-out one too."""
    before = config(learner={"schedule": "cosine"})
    for key in ("update_epochs", "minibatches"):
        with pytest.raises(ConfigError, match="follows a schedule"):
            check_changes(before, config(f"learner.{key}=2", learner={"schedule": "cosine"}))
    assert set(check_changes(before, config("learner.lr=1", learner={"schedule": "cosine"}))) == {"learner.lr"}
    key = "generate.max_completion_tokens"
    with pytest.raises(ConfigError, match="limit of held-out answers"):
        check_changes(config(), config(f"{key}=32"))
    apart = {"max_completion_tokens": 64}
    assert check_changes(config(evaluate=apart), config(f"{key}=32", evaluate=apart)) == {key: (64, 32)}


def test_changes_name_what_only_one_config_has() -> None:
    found = changes(config(), config("algorithm.overlong.buffer_tokens=4"))
    assert found["algorithm.overlong.buffer_tokens"] == (None, 4)
    assert not is_adjustable("algorithm.overlong.buffer_tokens") and is_adjustable("rewards.any.weight")

"""Recipes and `--set`: every shipped recipe parses, every mistake is named in the user's own words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rl_core.errors import ConfigError
from rl_core.recipes import apply_overrides, build_config, config_json, parse_recipe, parse_value

RECIPES = sorted((Path(__file__).resolve().parents[2] / "deployments" / "recipes").glob("*.toml"))
DATA: dict[str, Any] = {
    "name": "r",
    "seed": 7,
    "model": {"source": "tiny-random"},
    "environment": {"kind": "reasoning_gym", "params": {"dataset_params": {"min_terms": 2}, "list": [1, 2]}},
    "rewards": [{"function": "last_integer"}, {"function": "my.mod:Fn"}, {"function": "my.mod:fn", "name": "other"}],
}


def message(*overrides: str, data: dict[str, Any] = DATA) -> str:
    with pytest.raises(ConfigError) as caught:
        build_config(apply_overrides(data, list(overrides)), "r.toml")
    return str(caught.value)


def test_there_are_recipes() -> None:
    assert {"quickstart", "smoke"} <= {path.stem for path in RECIPES}


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_parses_and_is_named_after_its_file(path: Path) -> None:
    config = build_config(parse_recipe(path.read_text(), path.name), path.name)
    assert config.name == path.stem
    assert build_config(json.loads(json.dumps(config_json(config))), "run.json") == config


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *(("1", 1), ("-1", -1), ("1.0", 1.0), ("1e-6", 1e-6), ("true", True), ("false", False), ("0x10", 16)),
        *(("abc", "abc"), ("'1'", "1"), ('"a b"', "a b"), ("a b", "a b"), ("", ""), ("True", "True")),
        *(("[1, 2]", [1, 2]), ("{a = 1}", {"a": 1}), ("['gpu']", ["gpu"]), ("[]", []), ("null", "null")),
        *(("my.mod:fn", "my.mod:fn"), ("run-2", "run-2"), ("7b", "7b"), ("a=b", "a=b"), ("/data/x", "/data/x")),
        *(("2024-01-01", "2024-01-01"), ("10:30:00", "10:30:00"), ("1\nother = 2", "1\nother = 2"), ("'", "'")),
    ],
)
def test_values_are_typed_as_in_toml_and_else_text(text: str, value: object) -> None:
    found = parse_value(text)
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("seed=8", ("seed",), 8),
        (" seed = 8 ", ("seed",), 8),
        ("learner.lr=1e-6", ("learner", "lr"), 1e-6),
        ("algorithm.kl.coef=0.1", ("algorithm", "kl", "coef"), 0.1),
        ("environment.params.dataset_params.min_terms=3", ("environment", "params", "dataset_params", "min_terms"), 3),
        ("environment.params.list.1=5", ("environment", "params", "list", 1), 5),
        ("environment.params.text=a=b", ("environment", "params", "text"), "a=b"),
        ("rewards.0.weight=2", ("rewards", 0, "weight"), 2),
        ("rewards.last_integer.weight=2", ("rewards", 0, "weight"), 2),
        ("rewards.fn.weight=2", ("rewards", 1, "weight"), 2),
        ("rewards.other.weight=2", ("rewards", 2, "weight"), 2),
        ("rewards.other.params.deep.er=1", ("rewards", 2, "params", "deep", "er"), 1),
        ("execution={device = 'cpu'}", ("execution",), {"device": "cpu"}),
    ],
)
def test_an_override_sets_exactly_one_value(override: str, path: tuple[Any, ...], value: object) -> None:
    changed = apply_overrides(DATA, [override])
    found: Any = changed
    for part in path:
        found = found[part]
    assert found == value
    expected: Any = json.loads(json.dumps(DATA))
    node = expected
    for part in path[:-1]:
        node = node[part] if isinstance(node, list) else node.setdefault(part, {})
    node[path[-1]] = value
    assert changed == expected


def test_overrides_leave_the_original_alone_and_the_last_one_wins() -> None:
    before = json.dumps(DATA)
    changed = apply_overrides(DATA, ["seed=1", "seed=2", "rewards.0.weight=3", "environment.params.list=[]"])
    assert (changed["seed"], changed["rewards"][0]["weight"], changed["environment"]["params"]["list"]) == (2, 3, [])
    assert json.dumps(DATA) == before


def test_a_null_section_of_a_resolved_config_can_be_filled() -> None:
    resolved = config_json(build_config(DATA, "r"))
    assert resolved["algorithm"]["overlong"] is None
    config = build_config(apply_overrides(resolved, ["algorithm.overlong.buffer_tokens=4"]), "r")
    assert config.algorithm.overlong is not None
    assert config.algorithm.overlong.buffer_tokens == 4


@pytest.mark.parametrize("override", ["seed", "=1", " =1", ""])
def test_what_is_no_assignment_is_refused(override: str) -> None:
    assert "not of the form key=value" in message(override)


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("rewards.3.weight=1", ["there is no item '3'", "0 (last_integer), 1 (fn), 2 (other)"]),
        ("rewards.-1.weight=1", ["there is no item '-1'"]),
        ("rewards.².weight=1", ["there is no item '²'"]),
        ("rewards..weight=1", ["there is no item ''"]),
        ("rewards.othr.weight=1", ["there is no item 'othr'"]),
        ("environment.params.list.x=1", ["there is no item 'x'", "0, 1"]),
        ("seed.x=1", ["'x' lies below a plain value"]),
        ("rewards.0.function.x=1", ["'x' lies below a plain value"]),
        ("environment.params.list.0.x=1", ["'x' lies below a plain value"]),
        ("learner=5", ["learner: Input should be"]),
        ("learner.=1", ["learner.: unknown key"]),
        ("seed=abc", ["seed: Input should be a valid integer", "(got 'abc')"]),
    ],
)
def test_overrides_that_fit_nowhere_are_refused_with_their_text(override: str, parts: list[str]) -> None:
    found = message(override)
    assert all(part in found for part in parts), found


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("lerner.lr=1", "lerner: unknown key; did you mean 'learner'?"),
        ("learner.learning_rte=1", "learner.learning_rte: unknown key"),
        ("learner.warmup_step=1", "learner.warmup_step: unknown key; did you mean 'warmup_steps'?"),
        ("algorithm.kl.coeff=1", "algorithm.kl.coeff: unknown key; did you mean 'coef'?"),
        ("rewards.1.wieght=1", "rewards.1.wieght: unknown key; did you mean 'weight'?"),
        (
            "algorithm.overlong={buffer_token=1}",
            "algorithm.overlong.buffer_token: unknown key; did you mean 'buffer_tokens'?",
        ),
        ("execution.thread=1", "execution.thread: unknown key; did you mean 'threads'?"),
        ("zzz=1", "zzz: unknown key\n"),
    ],
)
def test_unknown_keys_are_named_with_the_nearest_known_one(override: str, line: str) -> None:
    assert f"  {line}" in message(override) + "\n"


def test_all_mistakes_are_listed_at_once() -> None:
    found = message("seed=-1", "learner.lr=0", "generate.grup_size=4", "iterations=x")
    assert found.startswith("r.toml is not a valid run config")
    for path in ("seed:", "learner.lr:", "generate.grup_size: unknown key; did you mean 'group_size'?", "iterations:"):
        assert path in found


def test_a_missing_section_is_named() -> None:
    assert "model: Field required" in message(data={k: v for k, v in DATA.items() if k != "model"})


def test_a_syntax_error_says_where() -> None:
    with pytest.raises(ConfigError, match=r"bad\.toml is not valid TOML") as caught:
        parse_recipe('name = "a"\nseed = = 1\n', "bad.toml")
    assert "line 2" in caught.value.got


def test_a_date_in_a_recipe_is_refused_by_name() -> None:
    """TOML has dates and JSON has none, so a date could not be kept with the run."""
    data = DATA | parse_recipe("[environment]\nkind = 'k'\nparams = { since = 2024-01-01 }", "d.toml")
    assert "environment.params.since" in message(data=data)


def test_numbers_that_are_not_finite_are_refused_in_free_parameters() -> None:
    data = DATA | parse_recipe("[environment]\nkind = 'k'\nparams = { x = [nan] }", "d.toml")
    assert "environment.params.x" in message(data=data)

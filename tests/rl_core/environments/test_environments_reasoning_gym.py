from __future__ import annotations

import enum
import json
import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from rl_core.config import EnvironmentConfig
from rl_core.environments.base import open_environment
from rl_core.environments.reasoning_gym import HASH_ORDERED, UNREPEATABLE, plain
from rl_core.errors import ConfigError, DataError

SUMS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}
ONE_DIGIT = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


def open_gym(run_seed: int = 0, **params: Any) -> Any:
    return open_environment(EnvironmentConfig(kind="reasoning_gym", params=params), run_seed, lambda _: [])


def test_chain_sum_in_the_words_of_the_recipe() -> None:
    environment = open_gym(
        dataset="chain_sum",
        dataset_params=SUMS,
        template="What is {expression}? Answer with just the number.",
        system="You add.",
    )
    for position in range(50):
        prompt = environment.prompt("train", position)
        expression = prompt.data["metadata"]["expression"]
        assert prompt.messages == [
            {"role": "system", "content": "You add."},
            {"role": "user", "content": f"What is {expression}? Answer with just the number."},
        ]
        left, sign, right = expression.split()
        value = int(left) + int(right) if sign == "+" else int(left) - int(right)
        assert prompt.data["answer"] == str(value)
        assert json.loads(json.dumps(prompt.data)) == prompt.data


@pytest.mark.parametrize("size", [None, 30])
def test_no_heldout_question_is_trained_on(size: int | None) -> None:
    """One-digit sums have 200 questions; with 60 of them held out, an unchecked draw would hit one at once."""
    environment = open_gym(dataset="chain_sum", dataset_params=ONE_DIGIT, heldout_size=60, size=size)
    held_out = [environment.prompt("heldout", position).data["question"] for position in range(60)]
    assert environment.size("heldout") == len(set(held_out)) == 60
    trained = {environment.prompt("train", position).data["question"] for position in range(1500)}
    assert not trained & set(held_out)
    if size is None:
        assert len(trained) == 140  # all the others


def test_heldout_problems_do_not_depend_on_the_run() -> None:
    one, two = (open_gym(run_seed, dataset="chain_sum", dataset_params=SUMS) for run_seed in (1, 2))
    assert [one.prompt("heldout", i) for i in range(128)] == [two.prompt("heldout", i) for i in range(128)]
    assert one.digest == two.digest
    assert [one.prompt("train", i) for i in range(8)] != [two.prompt("train", i) for i in range(8)]


def test_a_finite_size_repeats_its_problems_and_an_endless_one_does_not() -> None:
    """C66: with a size, every problem comes once an epoch."""
    finite = open_gym(dataset="chain_sum", dataset_params={"min_digits": 6, "max_digits": 6}, size=20)
    epochs = [[finite.prompt("train", 20 * epoch + i).prompt_id for i in range(20)] for epoch in range(3)]
    assert len(set(epochs[0])) == 20
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(epochs[2])
    assert epochs[0] != epochs[1]
    endless = open_gym(dataset="chain_sum", dataset_params={"min_digits": 6, "max_digits": 6})
    assert endless.size("train") is None
    assert len({endless.prompt("train", i).prompt_id for i in range(3000)}) == 3000


def test_prompts_are_a_function_of_the_position() -> None:
    ordered = open_gym(dataset="gcd")
    whole = [ordered.prompt("train", position) for position in range(40)]
    backwards = open_gym(dataset="gcd")
    assert [backwards.prompt("train", position) for position in reversed(range(40))] == whole[::-1]


def test_a_mixture_of_data_sets() -> None:
    specs = [{"name": name, "weight": 1.0, "config": {}} for name in ("gcd", "lcm")]
    environment = open_gym(dataset="composite", dataset_params={"datasets": specs}, heldout_size=8)
    sources = {environment.prompt("train", i).data["metadata"]["source_dataset"] for i in range(40)}
    assert sources == {"gcd", "lcm"}


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"dataset": "chain_sums"}, ["no data set 'chain_sums'", "'chain_sum'"]),
        ({"dataset": "chain_sum", "dataset_params": {"min_term": 2}}, ["dataset_params.min_term", "'min_terms'"]),
        ({"dataset": "chain_sum", "dataset_params": {"seed": 2}}, ["dataset_params.seed", "set by the environment"]),
        ({"dataset": "chain_sum", "dataset_params": {"min_terms": 9, "max_terms": 2}}, ["max_terms must be"]),
        ({"dataset": "chain_sum", "template": "What is {expresion}?"}, ["'expresion'", "'expression'"]),
        ({"dataset": "chain_sum", "template": "What is it?"}, ["no field"]),
        ({"dataset": "chain_sum", "template": "{question.__class__}"}, ["plain names in braces"]),
        ({"dataset": "chain_sum", "sise": 3}, ["environment.params.sise", "'size'"]),
        ({"dataset": "chain_sum", "dataset_params": ONE_DIGIT, "heldout_size": 300}, ["only 200 different", "300"]),
        ({"dataset": "chain_sum", "dataset_params": ONE_DIGIT, "heldout_size": 200}, ["only held-out questions"]),
    ],
)
def test_mistakes_are_named(params: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        open_gym(**params)
    for word in words:
        assert word in str(caught.value)


def test_digest_follows_what_decides_the_prompts() -> None:
    base = open_gym(dataset="gcd").digest
    assert open_gym(dataset="gcd").digest == base
    for change in ({"template": "{question} Think."}, {"heldout_seed": 1}, {"heldout_size": 64}, {"size": 9}):
        assert open_gym(dataset="gcd", **change).digest != base


class Colour(enum.Enum):
    RED = 1


class Level(int, enum.Enum):
    LOW = 1


def test_metadata_becomes_plain_json() -> None:
    value = {1: (np.int64(2), np.str_("a")), "set": {3, 1}, "colour": Colour.RED, "level": Level.LOW, "none": None}
    expected = {"1": [2, "a"], "set": [1, 3], "colour": "RED", "level": "LOW", "none": None}
    assert plain(value, "metadata") == expected
    assert type(plain(np.str_("a"), "metadata")) is str
    with pytest.raises(DataError, match="without a JSON form"):
        plain(object(), "metadata")


_DUMP = """
import json, sys
from reasoning_gym.factory import DATASETS
from rl_core.config import EnvironmentConfig
from rl_core.environments.base import open_environment
prompts = {}
for name in sorted(DATASETS.keys() - {"composite"}):
    config = EnvironmentConfig(kind="reasoning_gym", params={"dataset": name, "heldout_size": 2})
    try:
        environment = open_environment(config, 5, lambda _: [])
    except ValueError as error:
        prompts[name] = error.message
        continue
    drawn = [environment.prompt("train", position) for position in range(2)]
    prompts[name] = [[p.prompt_id, p.messages, json.loads(json.dumps(p.data, allow_nan=False))] for p in drawn]
print("\\n" + json.dumps(prompts))
"""


@pytest.mark.slow
def test_all_data_sets_are_the_same_in_every_process_or_refused() -> None:
    outputs = []
    for hash_seed in ("1", "2"):
        environ = {**os.environ, "PYTHONHASHSEED": hash_seed}
        done = subprocess.run([sys.executable, "-c", _DUMP], capture_output=True, text=True, check=True, env=environ)
        outputs.append(json.loads(done.stdout.splitlines()[-1]))  # some data sets print while they load
    assert outputs[0] == outputs[1]
    refused = {name for name, prompts in outputs[0].items() if isinstance(prompts, str)}
    assert refused == HASH_ORDERED | UNREPEATABLE
    assert all("differ from process to process" in outputs[0][name] for name in refused)
    assert len(outputs[0]) > 100


@pytest.mark.slow
def test_hash_ordered_data_sets_work_with_a_fixed_hash_seed() -> None:
    code = _DUMP.replace('DATASETS.keys() - {"composite"}', repr(set(HASH_ORDERED)))
    environ = {**os.environ, "PYTHONHASHSEED": "0"}
    done = [
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environ).stdout
        for _ in range(2)
    ]
    assert done[0] == done[1]
    assert all(isinstance(prompts, list) for prompts in json.loads(done[0].splitlines()[-1]).values())

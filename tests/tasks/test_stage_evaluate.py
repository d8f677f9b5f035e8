"""The evaluate stage: answers against transformers' own generation, statistics against naive counts."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from itertools import combinations
from typing import Any

import pytest
import torch

from rl_core.errors import DataError, RewardContractError, RewardFailedError
from rl_core.schemas import ADVANTAGES

pytestmark = pytest.mark.slow  # each test starts a process for the rewards

JUDGE = """
def by_sum(completion_ids, completions):
    return [float(sum(ids) % 2 == 0) for ids in completion_ids]

def by_index(completions, answer):
    values = []
    for wanted in answer:
        if int(wanted) % 4 == 1:
            raise RuntimeError("no verdict")
        values.append(None if int(wanted) % 4 == 2 else 0.5 + 0.25 * (int(wanted) // 4 % 2))
    return values
"""


@pytest.fixture
def judge(user_module: Any) -> Callable[[str], list[dict[str, Any]]]:
    name, _ = user_module(JUDGE)
    return lambda function: [{"function": "length_penalty"}, {"function": f"{name}:{function}", "name": "judge"}]


def test_greedy_answers_are_those_of_transformers(bench: Any, rows: Any) -> None:
    """Token by token what `generate(do_sample=False)` gives for the same prompt and limit."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    config = bench.config(evaluate={"max_completion_tokens": 16})
    found = rows(bench.run("evaluate", config, train=bench.base))
    assert [(row["group_id"], row["sample_id"], row["mode"]) for row in found] == [(i, 0, "greedy") for i in range(6)]
    model: Any = AutoModelForCausalLM.from_pretrained(bench.model, dtype=torch.float32)
    tokenizer: Any = AutoTokenizer.from_pretrained(bench.model)
    environment = bench.services.environment(config)
    for row in found:
        problem = environment.prompt("heldout", row["group_id"])
        assert (row["prompt_id"], row["prompt_messages"]) == (problem.prompt_id, problem.messages)
        assert json.loads(row["env_data"]) == problem.data
        prompt = tokenizer.apply_chat_template(problem.messages, add_generation_prompt=True, return_tensors="pt")
        wanted = model.generate(**prompt, do_sample=False, max_new_tokens=16)[0, prompt["input_ids"].shape[1] :]
        assert row["completion_ids"] == wanted.tolist()
        assert row["text"] == tokenizer.decode(wanted, skip_special_tokens=True)
        assert row["truncated"] == (row["finish_reason"] == "length") == (wanted[-1] != tokenizer.eos_token_id)
        assert row["policy_digest"] == bench.base.digest


def wilson(p: float, n: int) -> tuple[float, float]:
    z = 1.959963984540054
    centre, half = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return (centre - half) / (1 + z * z / n), (centre + half) / (1 + z * z / n)


def test_metrics_are_those_of_a_count(bench: Any, rows: Any, judge: Any) -> None:
    """Greedy accuracy with Wilson's interval; avg@k and pass@k over problems; sampled rows beside the greedy one."""
    evaluate = {"problems": 10, "samples": 3, "max_completion_tokens": 9, "reward": "judge"}
    found = rows(bench.run("evaluate", bench.config(rewards=judge("by_sum"), evaluate=evaluate), train=bench.base))
    assert [(row["group_id"], row["sample_id"]) for row in found] == [(g, s) for g in range(10) for s in range(4)]
    assert [row["mode"] for row in found] == ["greedy", "sample", "sample", "sample"] * 10
    assert all(row["correct"] == (sum(row["completion_ids"]) % 2 == 0) for row in found)
    greedy = [row["correct"] for row in found if row["mode"] == "greedy"]
    sampled = [[row["correct"] for row in found if row["group_id"] == g and row["mode"] == "sample"] for g in range(10)]
    means = [sum(answers) / 3 for answers in sampled]
    assert 0 < sum(means) < 10 and len(set(means)) > 1, "an evaluation that distinguishes nothing"
    mean = sum(means) / 10
    metrics = bench.reply["metrics"]
    assert metrics["eval/greedy_accuracy"] == sum(greedy) / 10
    low, high = wilson(sum(greedy) / 10, 10)
    assert (metrics["eval/greedy_low"], metrics["eval/greedy_high"]) == (pytest.approx(low), pytest.approx(high))
    assert metrics["eval/avg_at_3"] == pytest.approx(mean)
    assert metrics["eval/avg_at_3_se"] == pytest.approx(math.sqrt(sum((m - mean) ** 2 for m in means) / 9 / 10))
    assert metrics["eval/avg_at_3_low"] <= mean <= metrics["eval/avg_at_3_high"]
    passed = [any(any(chosen) for chosen in combinations(answers, 3)) for answers in sampled]
    assert metrics["eval/pass_at_3"] == pytest.approx(sum(passed) / 10)
    assert metrics["eval/truncated_frac"] == sum(row["truncated"] for row in found) / 40
    assert metrics["eval/unscored_frac"] == 0.0

    evaluate |= {"greedy": False, "samples": 2}
    found = rows(bench.run("evaluate", bench.config(rewards=judge("by_sum"), evaluate=evaluate), train=bench.base))
    assert {row["mode"] for row in found} == {"sample"} and [row["sample_id"] for row in found] == [0, 1] * 10
    assert "eval/greedy_accuracy" not in bench.reply["metrics"] and "eval/pass_at_2" in bench.reply["metrics"]


def test_an_unscored_answer_is_not_correct(bench: Any, rows: Any, judge: Any) -> None:
    """A judge that raises or returns None: null and a reason, counted as not correct and reported; never an error."""
    environment = bench.prompts(["x"])
    folder = bench.new_folder()
    lines = [json.dumps({"prompt": f"problem {i}", "answer": str(i)}) + "\n" for i in range(12)]
    (folder / "heldout.jsonl").write_text("".join(lines))
    environment["params"]["heldout_path"] = str(folder / "heldout.jsonl")
    settings = {
        "environment": environment,
        "rewards": judge("by_index"),
        "evaluate": {"problems": 12, "reward": "judge", "correct_at": 0.75},
    }
    with pytest.raises(RewardFailedError, match="6 of 12 held-out answers have no score"):
        bench.run("evaluate", bench.config(**settings, scoring={"max_unscored_fraction": 0.4}), train=bench.base)
    config = bench.config(**settings, scoring={"max_unscored_fraction": 0.5})
    found = rows(bench.run("evaluate", config, train=bench.base))
    for row in found:
        kind = row["group_id"] % 4
        score = None if kind in (1, 2) else 0.5 + 0.25 * (row["group_id"] // 4 % 2)
        reason = {1: "RuntimeError: no verdict", 2: "returned None"}.get(kind)
        assert (row["score"], row["reason"]) == (score, reason)
        assert row["correct"] is (score is not None and score >= 0.75)
    assert {row["correct"] for row in found if row["score"] is not None} == {True, False}
    assert bench.reply["metrics"]["eval/unscored_frac"] == 0.5
    assert bench.reply["metrics"]["eval/greedy_accuracy"] == sum(row["correct"] for row in found) / 12


def test_one_held_out_set_for_all_iterations_and_seeds(bench: Any, rows: Any) -> None:
    """The same policy gives the same bytes whenever it is asked; run seeds share the problems."""
    config = bench.config(evaluate={"problems": 4, "samples": 2})
    made = [bench.run("evaluate", config, iteration=k, cursor=9 * k, train=bench.base) for k in (-1, 0, 5)]
    assert len({ref.digest for ref in made}) == 1
    bench.cold()
    other = rows(bench.run("evaluate", bench.config(seed=4, evaluate={"problems": 4, "samples": 2}), train=bench.base))
    first = rows(made[0])
    assert [row["prompt_id"] for row in other] == [row["prompt_id"] for row in first]
    greedy, sampled = ([i for i, row in enumerate(first) if row["mode"] == mode] for mode in ("greedy", "sample"))
    assert [other[i]["completion_ids"] for i in greedy] == [first[i]["completion_ids"] for i in greedy]
    assert all(other[i]["completion_ids"] != first[i]["completion_ids"] for i in sampled)


def test_evaluation_after_training_in_the_same_process(bench: Any, rows: Any) -> None:
    """The warm weights of policy k+1 answer as the checkpoint does, and policy k as it did before."""
    config = bench.config(learner={"lr": 0.1})
    before = bench.run("evaluate", config, train=bench.base)
    trajectories = bench.trajectories([{"group": 0, "sample": s} for s in range(2)])
    table = [{"group_id": 0, "sample_id": s, "advantage": 1.0 - 2 * s, "keep": True} for s in range(2)]
    advantages = bench.table(table, ADVANTAGES)
    trained = bench.run("train", config, policy=bench.base, generate=trajectories, advantage=advantages)
    warm = bench.run("evaluate", config, train=trained)
    bench.cold()
    assert bench.run("evaluate", config, train=trained).digest == warm.digest != before.digest
    assert bench.run("evaluate", config, train=bench.base).digest == before.digest


def test_a_judge_or_problems_that_changed_after_the_fingerprint(bench: Any, user_module: Any) -> None:
    """The answers are judged by the very source, and are to the very problems, that the fingerprint names."""
    name, file = user_module(JUDGE)
    environment = bench.prompts(["x"])
    config = bench.config(
        environment=environment, rewards=[{"function": f"{name}:by_sum", "name": "r"}], evaluate={"problems": 1}
    )
    context = bench.context(config, train=bench.base)
    file.write_text(JUDGE.replace("% 2 == 0", "% 2 != 0"))
    with pytest.raises(RewardContractError, match="the source of reward r changed"):
        bench.perform("evaluate", context)
    assert list(context.output.iterdir()) == []

    file.write_text(JUDGE)
    bench.cold()
    heldout = environment["params"]["heldout_path"]
    with open(heldout, "w") as rows:
        rows.write(json.dumps({"prompt": "another", "answer": "1"}) + "\n")
    with pytest.raises(DataError, match="changed after the run was opened"):
        bench.perform("evaluate", context)

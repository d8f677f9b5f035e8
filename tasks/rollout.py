"""Prompts in, completions out: what generating and evaluating have in common."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rl_core.config import RunConfig
from rl_core.engines.base import Completion, Progress, Sampler, SampleRequest
from rl_core.engines.prompting import completion_budget, decode_completion, fit_prompt
from rl_core.environments.base import Environment, Prompt, Split
from rl_core.errors import DataError
from rl_core.fingerprint import canonical_json
from rl_core.models import Policy
from tasks.stage import StageContext
from tasks.worker import Services


@dataclass(frozen=True)
class Encoded:
    """A prompt at a position of its split, with its token ids and the completion budget in tokens."""

    position: int
    prompt: Prompt
    messages: list[dict[str, str]]
    ids: list[int]
    budget: int


def context_limit(config: RunConfig, policy: Policy) -> int:
    return min(config.model.max_context_tokens or policy.context_tokens, policy.context_tokens)


def environment_of(context: StageContext, services: Services) -> Environment:
    """The environment that the fingerprint names. A worker started later may find other rows in the files."""
    environment = services.environment(context.config)
    if environment.digest != context.facts["environment"]:
        raise DataError(
            "the prompts of the environment changed after the run was opened",
            expected="one set of prompts for the fingerprint and the rows",
            todo="run again: the new prompts give a new output",
        )
    return environment


def encode_prompts(
    environment: Environment, policy: Policy, config: RunConfig, split: Split, start: int, count: int, max_new: int
) -> tuple[list[Encoded], int, int]:
    """The next `count` prompts from position `start` that fit; (prompts, position after the last, prompts dropped)."""
    found: list[Encoded] = []
    position, dropped, in_a_row = start, 0, 0
    limit = context_limit(config, policy)
    while len(found) < count:
        prompt = environment.prompt(split, position)
        fitted = fit_prompt(
            policy.tokenizer,
            prompt.messages,
            limit=min(config.generate.max_prompt_tokens, limit),
            overlong=config.generate.overlong_prompt,
            where=f"prompt {prompt.prompt_id}",
        )
        if fitted is None:
            dropped, in_a_row = dropped + 1, in_a_row + 1
            size = environment.size(split)
            if in_a_row > (2 * size if size is not None else 100 * count):  # two epochs hold every prompt once
                raise DataError(
                    "no prompt fits the limit",
                    expected=f"prompts of at most {config.generate.max_prompt_tokens} tokens",
                    got=f"{in_a_row} longer ones in a row",
                    todo="raise generate.max_prompt_tokens",
                )
        else:
            messages, ids = fitted
            budget = completion_budget(len(ids), max_new, limit)
            found.append(Encoded(position, prompt, messages, ids, budget))
            in_a_row = 0
        position += 1
    return found, position, dropped


def sample(
    sampler: Sampler,
    policy: Policy,
    prompts: list[Encoded],
    row_seed: Callable[[Encoded, int], int],
    count: int,
    temperature: float,
    progress: Progress,
) -> list[dict[str, Any]]:
    """`count` completions of each prompt as rows of the trajectories table, less the columns that name the policy."""
    requests = [SampleRequest(p.ids, [row_seed(p, index) for index in range(count)], p.budget) for p in prompts]
    groups = sampler.sample(requests, temperature, progress)
    return [
        _row(policy, prompt, request.seeds[index], index, completion, temperature)
        for prompt, request, group in zip(prompts, requests, groups, strict=True)
        for index, completion in enumerate(group)
    ]


def _row(
    policy: Policy, prompt: Encoded, row_seed: int, index: int, completion: Completion, temperature: float
) -> dict[str, Any]:
    length = len(completion.token_ids)
    return {
        "group_id": prompt.position,
        "sample_id": index,
        "prompt_id": prompt.prompt.prompt_id,
        "prompt_messages": prompt.messages,
        "prompt_ids": prompt.ids,
        "completion_ids": completion.token_ids,
        "sampler_logprobs": completion.logprobs,
        "ref_logprobs": None,
        "action_mask": [True] * length,
        "turns": [{"role": "assistant", "start": 0, "end": length}],
        "finish_reason": completion.finish_reason,
        "truncated": completion.finish_reason == "length",
        "temperature": temperature,
        "seed": row_seed,
        "text": decode_completion(policy.tokenizer, completion.token_ids),
        "env_data": canonical_json(prompt.prompt.data, f"data of prompt {prompt.prompt.prompt_id}"),
    }

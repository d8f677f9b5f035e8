"""This project's sampler against transformers `generate`: same model, same prompts, same temperature, one process.

    python benchmarks/sampler.py --model models/smollm2-135m-instruct

Work: 8 chat prompts of reasoning_gym's `chain_sum` × 8 completions of at most 32 tokens at temperature 1. `generate`
gets every prompt eight times, as trainers call it. The two take turns, first as they are (a completion ends at its end
token), then with the end token disabled for both, so that every completion has all 32 tokens. Only sampled tokens
count, the end token included. The ratio is that of the medians over the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import reasoning_gym
import torch

from rl_core.engines.base import SampleRequest
from rl_core.engines.prompting import encode_prompt
from rl_core.engines.sampler_transformers import TransformersSampler
from rl_core.models import Policy, fetch_model, load_policy
from rl_core.seeds import seed

PROMPTS, GROUP_SIZE, MAX_NEW_TOKENS, TEMPERATURE = 8, 8, 32, 1.0
TARGET = 1.8


def make_prompts(policy: Policy) -> list[list[int]]:
    problems = reasoning_gym.create_dataset(
        "chain_sum", min_terms=2, max_terms=2, min_digits=1, max_digits=2, size=PROMPTS, seed=0
    )
    texts = [f"What is {problem['metadata']['expression']}? Answer with just the number." for problem in problems]
    return [encode_prompt(policy.tokenizer, [{"role": "user", "content": text}]) for text in texts]


def with_generate(policy: Policy, prompts: list[list[int]], ends: bool, round_number: int) -> int:
    """Sampled tokens of one `generate` call; prompts padded on the left."""
    rows = [prompt for prompt in prompts for _ in range(GROUP_SIZE)]
    width = max(map(len, rows))
    ids = torch.tensor([[policy.pad_id] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    torch.manual_seed(round_number)
    model: Any = policy.model
    out = model.generate(
        input_ids=ids,
        attention_mask=mask,
        do_sample=True,
        temperature=TEMPERATURE,
        top_k=0,
        top_p=1.0,
        max_new_tokens=MAX_NEW_TOKENS,
        min_new_tokens=None if ends else MAX_NEW_TOKENS,
    )
    completions = out[:, width:].tolist()
    eos = set(policy.eos_ids)
    return sum(next((i + 1 for i, token in enumerate(row) if token in eos), len(row)) for row in completions)


def with_ours(policy: Policy, prompts: list[list[int]], ends: bool, round_number: int) -> int:
    """Sampled tokens of one call of this project's sampler."""
    sampler = TransformersSampler(policy if ends else replace(policy, eos_ids=()), rows_limit=512)
    requests = [
        SampleRequest(prompt, [seed(0, "benchmark", round_number, group, i) for i in range(GROUP_SIZE)], MAX_NEW_TOKENS)
        for group, prompt in enumerate(prompts)
    ]
    groups = sampler.sample(requests, TEMPERATURE)
    return sum(len(completion.token_ids) for group in groups for completion in group)


def compare(policy: Policy, prompts: list[list[int]], ends: bool, rounds: int) -> dict[str, Any]:
    """Tokens per second of both, by turns."""
    variants: dict[str, Callable[..., int]] = {"generate": with_generate, "ours": with_ours}
    rates: dict[str, list[float]] = {name: [] for name in variants}
    for round_number in range(rounds):
        for name, variant in variants.items():
            start = time.perf_counter()
            tokens = variant(policy, prompts, ends, round_number)
            seconds = time.perf_counter() - start
            rates[name].append(tokens / seconds)
            print(f"  {name:9s} {tokens:5d} tokens in {seconds:6.2f} s: {tokens / seconds:6.1f} tokens/s", flush=True)
    medians = {name: statistics.median(values) for name, values in rates.items()}
    return {"tokens_per_second": medians, "rounds": rates, "ratio": medians["ours"] / medians["generate"]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("models/smollm2-135m-instruct"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "sampler.json")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if not options.model.exists():
        fetch_model("smollm2-135m-instruct", options.model)
    policy = load_policy(options.model, "cpu", torch.float32)
    prompts = make_prompts(policy)
    result: dict[str, Any] = {
        "prompts": len(prompts),
        "prompt_tokens": sorted(map(len, prompts)),
        "group_size": GROUP_SIZE,
        "max_new_tokens": MAX_NEW_TOKENS,
        "temperature": TEMPERATURE,
        "threads": options.threads,
        "torch": torch.__version__,
        "target_ratio": TARGET,
    }
    for variant in (with_generate, with_ours):
        variant(policy, prompts[:1], True, 0)
    for key, ends in (("with_end_token", True), ("all_tokens", False)):
        print(f"{key}:")
        result[key] = compare(policy, prompts, ends, options.rounds)
        print(f"  ratio {result[key]['ratio']:.2f} (target {TARGET})")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=2) + "\n")
    return 0 if result["with_end_token"]["ratio"] >= TARGET else 1


if __name__ == "__main__":
    sys.exit(main())

"""Shared-prefix learner against a plain padded one: same rows, same loss, forward and backward of one optimizer step.

    python benchmarks/learner.py --model models/smollm2-135m-instruct

Work: 8 groups of 8 completions of 5 to 32 tokens, once with prompts of 43 tokens and once of 256. Variants:

    shared      this project's learner; micro-batches of `--micro-batch-tokens` padded tokens
    padded16    prompt + completion per row, micro-batches of 16 rows, full logits
    padded64    the same in one batch of 64 rows (43-token prompts only: with 256 it needs more than 24 GiB)

Seconds are the least of `--rounds` rounds that take the variants in turn in one process: on a shared machine other
work only ever adds to them. padded64 and the 256-token prompts take two rounds. Peak memory is the peak resident set of
a process of its own that loads the model and takes one such pass. The target holds for the whole process; the figure
above the loaded model stands beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from rl_core.config import AlgorithmConfig, LearnerConfig
from rl_core.engines.base import StepPlan, TrainRow
from rl_core.engines.learner_torch import TorchLearner
from rl_core.models import Policy, fetch_model, load_policy

GROUPS, SAMPLES, SHORTEST, LONGEST = 8, 8, 5, 32
VARIANTS = {43: ("shared", "padded16", "padded64"), 256: ("shared", "padded16")}  # by prompt tokens
TARGETS = {"loss_difference": 1e-5, "gradient_difference": 1e-4, "speed": 2.5, "memory": 0.6}


def make_rows(prompt_tokens: int, vocabulary: int) -> list[TrainRow]:
    """Seeded random tokens; every completion carries an advantage, so that no variant may leave one out."""
    rng = random.Random(0)
    rows = []
    for group in range(GROUPS):
        prompt = [rng.randrange(3, vocabulary) for _ in range(prompt_tokens)]
        for sample in range(SAMPLES):
            ids = [rng.randrange(3, vocabulary) for _ in range(rng.randint(SHORTEST, LONGEST))]
            advantage = rng.choice((-1, 1)) * rng.uniform(0.5, 1.5)
            rows.append(TrainRow(group, sample, prompt, ids, [True] * len(ids), advantage, [-3.0] * len(ids), True))
    return rows


def padded_pass(policy: Policy, rows: list[TrainRow], batch_rows: int) -> float:
    """The plain way: rows padded on the right to the longest of the batch, logits of all positions, same GRPO loss."""
    total = 0.0
    for at in range(0, len(rows), batch_rows):
        part = rows[at : at + batch_rows]
        prompt = len(part[0].prompt_ids)
        width = prompt + max(len(row.completion_ids) for row in part)
        ids = torch.zeros(len(part), width, dtype=torch.int64)
        mask = torch.zeros(len(part), width, dtype=torch.int64)
        for i, row in enumerate(part):
            tokens = [*row.prompt_ids, *row.completion_ids]
            ids[i, : len(tokens)], mask[i, : len(tokens)] = torch.tensor(tokens), 1
        logits = policy.model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        logprobs = logits[:, prompt - 1 : -1].float().log_softmax(-1).gather(2, ids[:, prompt:, None]).squeeze(2)
        ratio = (logprobs - logprobs.detach()).exp()
        advantage = torch.tensor([[row.advantage] for row in part])
        token_loss = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2))
        inside = mask[:, prompt:].float()
        loss = ((token_loss * inside).sum(1) / inside.sum(1)).sum() / len(rows)
        loss.backward()
        total += float(loss.detach())
    return total


def shared_pass(learner: TorchLearner, rows: list[TrainRow], micro_batch_tokens: int) -> float:
    plan = StepPlan(AlgorithmConfig(), LearnerConfig(), 1.0, LONGEST, 1, 0, micro_batch_tokens, 256, False)
    loss = learner.gradients(rows, plan).metrics["learner/loss"]
    assert loss is not None
    return loss


def variants(policy: Policy, prompt_tokens: int, micro_batch_tokens: int) -> dict[str, Callable[[], float]]:
    rows = make_rows(prompt_tokens, policy.model.get_input_embeddings().weight.shape[0])
    learner = TorchLearner(policy)
    runs: dict[str, Callable[[], float]] = {
        "shared": lambda: shared_pass(learner, rows, micro_batch_tokens),
        "padded16": lambda: padded_pass(policy, rows, 16),
        "padded64": lambda: padded_pass(policy, rows, 64),
    }
    return {name: runs[name] for name in VARIANTS[prompt_tokens]}


def peak(args: argparse.Namespace) -> None:
    """Child process: print peak resident memory in GiB, whole and above the loaded model."""
    policy = load_policy(args.model, "cpu", torch.float32)
    run = variants(policy, args.prompt, args.micro_batch_tokens)[args.peak]
    loaded = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    run()
    whole = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"peak_gib": whole / 2**30, "above_model_gib": (whole - loaded) / 2**30}))


def measure_peak(args: argparse.Namespace, prompt_tokens: int, name: str) -> dict[str, float]:
    command = [sys.executable, __file__, "--model", str(args.model), "--peak", name, "--prompt", str(prompt_tokens)]
    command += ["--micro-batch-tokens", str(args.micro_batch_tokens)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def measure_time(args: argparse.Namespace, policy: Policy, prompt_tokens: int) -> dict[str, dict[str, Any]]:
    """Seconds, loss and gradients by variant; the first round gives loss and gradients."""
    runs = variants(policy, prompt_tokens, args.micro_batch_tokens)
    found: dict[str, dict[str, Any]] = {name: {"seconds_all": []} for name in runs}
    for turn in range(args.rounds):
        for name, run in runs.items():
            if turn > 1 and (name == "padded64" or prompt_tokens > 43):
                continue
            policy.model.zero_grad()
            start = time.perf_counter()
            loss = run()
            found[name]["seconds_all"].append(round(time.perf_counter() - start, 3))
            found[name]["loss"] = loss
            if turn == 0 and name != "padded64":
                found[name]["gradient"] = [p.grad.clone() for p in policy.model.parameters()]
    for entry in found.values():
        entry["seconds"] = min(entry["seconds_all"])
    return found


def compare(
    args: argparse.Namespace, policy: Policy, prompt_tokens: int, peaks: dict[str, dict[str, float]]
) -> dict[str, Any]:
    found = measure_time(args, policy, prompt_tokens)
    ours, plain = found["shared"].pop("gradient"), found["padded16"].pop("gradient")
    error = sum(float((a.double() - b.double()).square().sum()) for a, b in zip(ours, plain, strict=True))
    size = sum(float(b.double().square().sum()) for b in plain)
    del ours, plain
    policy.model.zero_grad()
    for name, entry in found.items():
        entry |= peaks[name]
    shared = found["shared"]
    result: dict[str, Any] = {
        "prompt_tokens": prompt_tokens,
        "variants": found,
        "loss_difference": abs(shared["loss"] - found["padded16"]["loss"]),
        "gradient_difference": (error / size) ** 0.5,
    }
    for name in found.keys() - {"shared"}:
        result[f"speed_vs_{name}"] = found[name]["seconds"] / shared["seconds"]
        result[f"memory_vs_{name}"] = shared["peak_gib"] / found[name]["peak_gib"]
        result[f"memory_above_model_vs_{name}"] = shared["above_model_gib"] / found[name]["above_model_gib"]
    return result


def report(result: dict[str, Any]) -> bool:
    print(f"\nprompt of {result['prompt_tokens']} tokens, 64 completions of {SHORTEST} to {LONGEST}")
    for name, entry in result["variants"].items():
        print(
            f"  {name:9} {entry['seconds']:7.2f} s   peak {entry['peak_gib']:5.2f} GiB"
            f" ({entry['above_model_gib']:5.2f} above the loaded model)   loss {entry['loss']:.8f}"
        )
    checks = [
        ("loss difference", result["loss_difference"], "<=", TARGETS["loss_difference"]),
        ("gradient difference, relative", result["gradient_difference"], "<=", TARGETS["gradient_difference"]),
        ("speed, padded16 / shared", result["speed_vs_padded16"], ">=", TARGETS["speed"]),
        ("peak memory of the process, shared / padded16", result["memory_vs_padded16"], "<=", TARGETS["memory"]),
    ]
    passed = True
    for label, value, sign, target in checks:
        good = value <= target if sign == "<=" else value >= target
        passed &= good
        print(f"  {label}: {value:.3g} (target {sign} {target:g}) {'ok' if good else 'MISSED'}")
    print(f"  peak memory above the loaded model, shared / padded16: {result['memory_above_model_vs_padded16']:.3g}")
    if "speed_vs_padded64" in result:
        print(f"  against one padded batch of 64: speed {result['speed_vs_padded64']:.3g}, ", end="")
        print(f"memory {result['memory_vs_padded64']:.3g}")
    return passed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("models/smollm2-135m-instruct"))
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "learner.json")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--micro-batch-tokens", type=int, default=512)
    parser.add_argument("--peak", choices=["shared", "padded16", "padded64"], help=argparse.SUPPRESS)
    parser.add_argument("--prompt", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not args.model.exists():
        fetch_model(args.model.name, args.model)
    if args.peak:
        peak(args)
        return 0
    # Peaks first: afterwards this process holds memory itself.
    peaks = {prompt: {name: measure_peak(args, prompt, name) for name in names} for prompt, names in VARIANTS.items()}
    policy = load_policy(args.model, "cpu", torch.float32)
    results = [compare(args, policy, prompt, peaks[prompt]) for prompt in VARIANTS]
    met = [report(result) for result in results]
    args.out.parent.mkdir(parents=True, exist_ok=True)
    settings = {
        "micro_batch_tokens": args.micro_batch_tokens,
        "rounds": args.rounds,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
    args.out.write_text(json.dumps({"settings": settings, "targets": TARGETS, "results": results}, indent=2) + "\n")
    return 0 if all(met) else 1


if __name__ == "__main__":
    sys.exit(main())

from __future__ import annotations

import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rl_core.engines.base import Completion, SampleRequest
from rl_core.engines.packed_linear import packed_linears
from rl_core.engines.sampler_transformers import TransformersSampler
from rl_core.errors import DataError, NonFiniteError
from rl_core.models import Policy, fetch_model, load_policy
from rl_core.seeds import seed, uniforms

HEAD = [256, *b"the same beginning of "]  # long enough to be prefilled once


@pytest.fixture(scope="module")
def policy(tiny_model: Path) -> Policy:
    """The tiny model; every eleventh token ends a completion, so that lengths differ."""
    return replace(load_policy(tiny_model, "cpu", torch.float32), eos_ids=(257, *range(0, 256, 11)))


def request(prompt: list[int], rows: int, budget: int, run_seed: int = 7) -> SampleRequest:
    return SampleRequest(prompt, [seed(run_seed, "generate", 0, len(prompt), row) for row in range(rows)], budget)


BATCHES = {
    "shared beginning": [request([*HEAD, *b"all"], 5, 12), request([*HEAD, *b"a few of them"], 3, 7)],
    "nothing shared": [request([*b"x"], 4, 9), request([*b"quite another prompt"], 4, 9), request([*b"third"], 1, 1)],
    "one is the beginning of the other": [request(HEAD, 3, 10), request([*HEAD, 65], 3, 10), request(HEAD, 2, 10)],
    "alone": [request([*b"only this"], 6, 12)],
}


def one_by_one(policy: Policy, wanted: SampleRequest, row_seed: int, temperature: float) -> Completion:
    """The plain loop: a full forward pass per token, exact probabilities in float64, no cache, no batch."""
    ids, logprobs = list(wanted.prompt_ids), []
    for step in range(wanted.max_new_tokens):
        with torch.no_grad():
            logits = policy.model(torch.tensor([ids])).logits[0, -1].double()
        scores = (logits / (temperature or 1.0)).log_softmax(-1).numpy()
        u = uniforms(np.array([row_seed], np.uint64), step)[0]
        token = int(np.argmax(np.cumsum(np.exp(scores)) > u)) if temperature else int(scores.argmax())
        ids.append(token)
        logprobs.append(float(scores[token]))
        if token in policy.eos_ids:
            return Completion(ids[len(wanted.prompt_ids) :], logprobs, "stop")
    return Completion(ids[len(wanted.prompt_ids) :], logprobs, "length")


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7, 0.0])
def test_equals_the_plain_loop(policy: Policy, temperature: float) -> None:
    """C57, C36: tokens, log-probs at the sampling temperature (greedy: at 1), finish reasons and order of every row."""
    reasons = set()
    for requests in BATCHES.values():
        found = TransformersSampler(policy, 64).sample(requests, temperature)
        for wanted, group in zip(requests, found, strict=True):
            for row_seed, completion in zip(wanted.seeds, group, strict=True):
                expected = one_by_one(policy, wanted, row_seed, temperature)
                assert completion.token_ids == expected.token_ids
                assert completion.finish_reason == expected.finish_reason
                np.testing.assert_allclose(completion.logprobs, expected.logprobs, atol=1e-4)
                reasons.add(completion.finish_reason)
    assert temperature == 0 or reasons == {"stop", "length"}


@pytest.mark.parametrize("rows_limit", [1, 3, 8, 512])
def test_a_row_does_not_depend_on_the_rows_beside_it(policy: Policy, rows_limit: int) -> None:
    everything = [request for batch in BATCHES.values() for request in batch]
    together = TransformersSampler(policy, 512).sample(everything, 1.0)
    backwards = TransformersSampler(policy, rows_limit).sample(everything[::-1], 1.0)[::-1]
    for wanted, group, other in zip(everything, together, backwards, strict=True):
        assert [c.token_ids for c in group] == [c.token_ids for c in other]
        last = replace(wanted, seeds=wanted.seeds[-1:])
        (alone,) = TransformersSampler(policy, rows_limit).sample([last], 1.0)
        assert alone[0].token_ids == group[-1].token_ids


def test_repeats_exactly_and_seeds_decide(policy: Policy) -> None:
    """C39: one prompt in two groups, three iterations: all streams differ; made again, cold or warm, they are equal."""

    def iteration(number: int, policy: Policy) -> list[list[Completion]]:
        requests = [SampleRequest(HEAD, [seed(7, "generate", number, g, i) for i in range(4)], 8) for g in (0, 1)]
        return TransformersSampler(policy, 512).sample(requests, 1.0)

    patient = replace(policy, eos_ids=(257,))
    made = [iteration(number, patient) for number in range(3)]
    streams = {tuple(c.token_ids) for groups in made for group in groups for c in group}
    assert len(streams) == 3 * 2 * 4
    assert iteration(1, patient) == made[1]


def test_padding_is_known_by_length_not_by_value(policy: Policy) -> None:
    """C29: pad = eos, and the end token stands in the middle of a prompt that is padded beside a longer one."""
    requests = [request([256, 65, 257, 66, 257, 67], 4, 8), request([256, *b"a longer prompt than that"], 4, 8)]
    expected = TransformersSampler(replace(policy, eos_ids=(257,)), 64).sample(requests, 1.0)
    found = TransformersSampler(replace(policy, eos_ids=(257,), pad_id=257), 64).sample(requests, 1.0)
    assert found == expected
    rows = [one_by_one(replace(policy, eos_ids=(257,)), requests[0], s, 1.0).token_ids for s in requests[0].seeds]
    assert [completion.token_ids for completion in found[0]] == rows


def test_a_cut_completion_holds_what_was_sampled_and_nothing_else(policy: Policy) -> None:
    """C30, C36: no end token is added; ended at once is one token; a budget of 0 gives an empty one."""
    patient = replace(policy, eos_ids=())
    (longer,) = TransformersSampler(patient, 64).sample([request(HEAD, 4, 9)], 1.0)
    (cut,) = TransformersSampler(patient, 64).sample([request(HEAD, 4, 4)], 1.0)
    for completion, whole in zip(cut, longer, strict=True):
        assert completion.token_ids == whole.token_ids[:4]
        assert len(completion.logprobs) == 4
        assert completion.finish_reason == "length"
    first = replace(policy, eos_ids=(longer[2].token_ids[0],))
    ended = TransformersSampler(first, 64).sample([request(HEAD, 4, 9), request(HEAD, 2, 0)], 1.0)
    assert ended[0][2].token_ids == longer[2].token_ids[:1]
    assert ended[0][2].logprobs == pytest.approx(longer[2].logprobs[:1], abs=1e-5)
    assert ended[0][2].finish_reason == "stop"
    assert ended[1] == [Completion([], [], "length")] * 2


def test_an_end_token_at_the_last_step_stops(policy: Policy) -> None:
    (longer,) = TransformersSampler(replace(policy, eos_ids=()), 64).sample([request(HEAD, 1, 5)], 1.0)
    last = replace(policy, eos_ids=(longer[0].token_ids[4],))
    if last.eos_ids[0] not in longer[0].token_ids[:4]:
        ((completion,),) = TransformersSampler(last, 64).sample([request(HEAD, 1, 5)], 1.0)
        assert completion.finish_reason == "stop"
        assert completion.token_ids == longer[0].token_ids


def test_progress_and_mode(policy: Policy) -> None:
    seen: list[tuple[int, int]] = []
    policy.model.train()
    TransformersSampler(policy, 4).sample(
        BATCHES["nothing shared"], 1.0, lambda done, total: seen.append((done, total))
    )
    assert seen == [(4, 9), (8, 9), (9, 9)]
    assert policy.model.training
    policy.model.eval()
    TransformersSampler(policy, 4).sample(BATCHES["alone"], 1.0)
    assert not policy.model.training
    assert TransformersSampler(policy, 4).sample([], 1.0) == []


@pytest.mark.parametrize(
    ("wanted", "temperature", "message"),
    [
        (SampleRequest([], [1], 4), 1.0, "request 0 has an empty prompt"),
        (SampleRequest([1, 259], [1], 4), 1.0, "does not know"),
        (SampleRequest([-1, 2], [1], 4), 1.0, "does not know"),
        (SampleRequest([1] * 1000, [1], 25), 1.0, "does not fit"),
        (SampleRequest([1], [1], -1), 1.0, "does not fit"),
        (SampleRequest([1], [1], 4), -1.0, "temperature"),
        (SampleRequest([1], [1], 4), math.nan, "temperature"),
    ],
)
def test_bad_requests(policy: Policy, wanted: SampleRequest, temperature: float, message: str) -> None:
    """C35."""
    with pytest.raises(DataError, match=message):
        TransformersSampler(policy, 4).sample([wanted], temperature)


def test_the_whole_context_can_be_used(policy: Policy) -> None:
    """C35."""
    patient = replace(policy, eos_ids=())
    ((completion,),) = TransformersSampler(patient, 4).sample([SampleRequest([65] * 1020, [1], 4)], 1.0)
    assert len(completion.token_ids) == 4


def test_logits_that_are_not_finite_stop_the_stage(tiny_model: Path) -> None:
    broken = load_policy(tiny_model, "cpu", torch.float32)
    with torch.no_grad():
        broken.model.get_parameter("model.norm.weight")[0] = math.nan
    for temperature in (1.0, 0.0):
        with pytest.raises(NonFiniteError):
            TransformersSampler(broken, 4).sample([request(HEAD, 2, 3)], temperature)


def test_packed_layers_compute_the_same_and_are_taken_out_again(policy: Policy) -> None:
    model: Any = policy.model
    ids = torch.arange(40).view(4, 10)
    with torch.inference_mode():
        plain = model(ids).logits
        with packed_linears(model, 4):
            torch.testing.assert_close(model(ids).logits, plain, atol=1e-5, rtol=0)
            assert "forward" in vars(model.lm_head)
        with pytest.raises(KeyError), packed_linears(model, 4):
            raise KeyError
        assert torch.equal(model(ids).logits, plain)
    assert not any("forward" in vars(module) for module in model.modules())
    model(ids).logits.sum().backward()
    assert model.lm_head.weight.grad is not None
    model.zero_grad()


SCRIPT = """
import hashlib, sys, torch
from pathlib import Path
from rl_core.engines.base import SampleRequest
from rl_core.engines.sampler_transformers import TransformersSampler
from rl_core.models import load_policy
torch.use_deterministic_algorithms(True)
policy = load_policy(Path(sys.argv[1]), "cpu", torch.float32)
requests = [SampleRequest([256, *text], list(range(i, i + 8)), 16) for i, text in enumerate((b"one", b"twenty-two"))]
for _ in range(2):
    print(hashlib.sha256(repr(TransformersSampler(policy, 64).sample(requests, 1.0)).encode()).hexdigest())
"""


@pytest.mark.slow
def test_same_bits_in_every_process(tiny_model: Path) -> None:
    """Tokens and log-probs to the last bit, first and second time, in two processes."""
    hashes = []
    for _ in range(2):
        command = [sys.executable, "-W", "error", "-c", SCRIPT, str(tiny_model)]
        done = subprocess.run(
            command, check=True, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "2"}
        )
        hashes += done.stdout.split()
    assert len(hashes) == 4
    assert len(set(hashes)) == 1


@pytest.mark.slow
def test_real_model(tmp_path: Path) -> None:
    """SmolLM2-135M-Instruct, fetched, answers in words; its stored log-probs equal a teacher-forced recomputation."""
    from rl_core.engines.prompting import decode_completion, encode_prompt

    fetch_model("smollm2-135m-instruct", tmp_path)
    policy = load_policy(tmp_path, "cpu", torch.float32)
    questions = ["What is the capital of France?", "What is 7 - 12? Answer with just the number."]
    prompts = [encode_prompt(policy.tokenizer, [{"role": "user", "content": text}]) for text in questions]
    greedy = TransformersSampler(policy, 64).sample([SampleRequest(prompt, [0], 12) for prompt in prompts], 0.0)
    assert "Paris" in decode_completion(policy.tokenizer, greedy[0][0].token_ids)
    requests = [SampleRequest(prompt, [1, 2, 3], 12) for prompt in prompts]
    for temperature in (1.0, 0.7):
        for wanted, group in zip(requests, TransformersSampler(policy, 64).sample(requests, temperature), strict=True):
            for completion in group:
                ids = torch.tensor([[*wanted.prompt_ids, *completion.token_ids]])
                start = len(wanted.prompt_ids)
                with torch.no_grad():
                    logits = policy.model(ids).logits[0, start - 1 : -1]
                scores = (logits / temperature).log_softmax(-1).gather(1, ids[0, start:, None])[:, 0]
                np.testing.assert_allclose(completion.logprobs, scores, atol=1e-4)

"""What the learner refuses before a step, and what an optimizer step reads and reports."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rl_core.algorithms import Algorithm
from rl_core.batching import Arranged, MicroBatch, microbatches, minibatches, rows_with_signal
from rl_core.engines.base import Progress, StepPlan
from rl_core.errors import DataError, NonFiniteError
from rl_core.losses import step_totals, token_weights
from rl_core.metrics import METRICS


def check_rows(arranged: Arranged, limit: int) -> None:
    """Refuse rows that are longer than `limit` tokens or hold a number that is not finite where one is read.

    Raises:
        DataError: a row too long.
        NonFiniteError: an advantage, or a sampler log-prob of an action token in a kept row.
    """
    for row, start in zip(arranged.rows, arranged.starts.tolist(), strict=True):
        where = f"group {row.group_id}, sample {row.sample_id}"
        tokens = slice(start, start + len(row.completion_ids))
        if not math.isfinite(row.advantage):
            raise non_finite("advantage", where, row.advantage)
        length = len(row.prompt_ids) + len(row.completion_ids)
        if length > limit:
            raise DataError(
                f"a train row is longer than the model's context ({where})",
                expected=f"at most {limit} tokens",
                got=str(length),
                todo="lower generate.max_prompt_tokens or generate.max_completion_tokens",
            )
        read = arranged.sampler_logprobs[tokens][arranged.action_mask[tokens]]
        if row.keep and not bool(read.isfinite().all()):
            raise non_finite("sampler log-prob", where, float(read[~read.isfinite()][0]))


def non_finite(what: str, where: str, value: float) -> NonFiniteError:
    return NonFiniteError(
        f"non-finite {what} ({where}); no weight was changed",
        expected="a finite number",
        got=str(value),
        todo="look at the rewards and log-probs of that iteration; lower learner.lr if the run had diverged",
    )


def ticker(progress: Progress | None, total: int) -> Callable[[], None]:
    """A function to call after each of `total` units of work."""
    done = 0

    def tick() -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress(done, total)

    return tick


@dataclass(frozen=True)
class Minibatch:
    """What one optimizer step reads; B rows in the whole update.

    Attributes:
        batches: micro-batches of the rows that carry signal.
        weights: [B] float64, the weight of each token of a row in the loss; 0 for rows of other steps.
        tokens: action tokens of all its rows, with signal or not.
    """

    batches: list[MicroBatch]
    weights: Tensor
    tokens: int


def split_update(arranged: Arranged, plan: StepPlan, algorithm: Algorithm) -> list[Minibatch]:
    """The minibatches of a pass. Rows without signal are not computed, and stay in their step's denominators."""
    counts = arranged.action_lengths
    signal = set(rows_with_signal(arranged, algorithm.needs(plan.learner).ref_in_loss))
    steps = []
    for rows in minibatches(arranged, plan.learner.minibatches, plan.seed):
        tokens, sequences = step_totals(counts[rows].tolist())
        weights = torch.zeros(len(counts), dtype=torch.float64)
        weights[rows] = token_weights(
            algorithm.aggregation,
            counts[rows],
            total_tokens=tokens,
            total_sequences=sequences,
            norm_length=algorithm.norm_length,
        )
        batches = microbatches(arranged, [i for i in rows if i in signal], plan.micro_batch_tokens)
        steps.append(Minibatch(batches, weights, tokens))
    return steps


@dataclass
class Tally:
    """Sums over the micro-batches of one optimizer step."""

    loss: float = 0.0
    tokens: int = 0
    sums: dict[str, float] = field(default_factory=dict)
    peaks: dict[str, float] = field(default_factory=dict)

    def add(self, loss: float, tokens: int, terms: dict[str, Tensor], peaks: dict[str, Tensor]) -> None:
        """Add a micro-batch: its share of the loss, its computed tokens, per-token terms [N], extremes."""
        self.loss += loss
        self.tokens += tokens
        for name, values in terms.items():
            self.sums[name] = self.sums.get(name, 0.0) + float(values.double().sum())
        for name, value in peaks.items():
            pick = max if name.endswith("_max") else min
            self.peaks[name] = pick(self.peaks.get(name, float(value)), float(value))

    def metrics(self) -> dict[str, float | None]:
        """Means over the computed tokens and extremes; null for what this step does not have."""
        found: dict[str, float | None] = dict.fromkeys(n for n in METRICS if n.startswith(("policy/", "mismatch/")))
        if not self.tokens:
            return found
        found |= {name: value / self.tokens for name, value in self.sums.items()}
        found |= self.peaks
        if "mismatch/chi2" in self.sums:
            # Effective share of the tokens under weights w: (mean w)² / mean w², and chi2 = w² - 1.
            mean_w = self.sums["mismatch/mean_w"] / self.tokens
            found["mismatch/ess"] = mean_w**2 / (self.sums["mismatch/chi2"] / self.tokens + 1.0)
        return found

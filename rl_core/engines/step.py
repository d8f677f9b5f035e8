"""What one optimizer step of the learner reads and reports."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from rl_core.algorithms import Algorithm
from rl_core.batching import Arranged, MicroBatch, microbatches, minibatches, rows_with_signal
from rl_core.engines.base import StepPlan
from rl_core.losses import step_totals, token_weights
from rl_core.metrics import METRICS


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

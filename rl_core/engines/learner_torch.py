"""The torch learner: shared-prefix rows, one global denominator per optimizer step, all or nothing per update.

Shapes: T completion tokens of all rows end to end, N scored tokens of a micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from rl_core.algorithms import Algorithm, resolve, token_loss
from rl_core.batching import Arranged, MicroBatch, arrange, microbatches, step_order
from rl_core.engines.base import Progress, StepPlan, StepStats, TrainRow
from rl_core.engines.forward import check_shared_prefix, forward_mode, score_tokens
from rl_core.engines.optimizer import Optimizer, learning_rate
from rl_core.engines.step import Minibatch, Tally, check_rows, non_finite, split_update, ticker
from rl_core.errors import ConfigError
from rl_core.losses import TokenBatch
from rl_core.models import Policy, save_policy


@dataclass(frozen=True)
class _Update:
    """Everything about one update that its steps share; log-probs are [T], null where no pass is needed."""

    arranged: Arranged
    advantages: Tensor
    plan: StepPlan
    algorithm: Algorithm
    old: Tensor | None
    ref: Tensor | None
    tick: Callable[[], None]


class TorchLearner:
    """Trains the policy object it is given, in place.

    Args:
        policy: the weights to train; may be shared with a sampler.
        reference: frozen policy of the KL term; needed only while `kl.coef` > 0 with `kl.place` = "loss".

    Raises:
        ModelError: the model cannot be trained on shared-prefix rows.
    """

    def __init__(self, policy: Policy, reference: Policy | None = None) -> None:
        check_shared_prefix(policy)
        self.policy = policy
        self.reference = reference
        self.optimizer = Optimizer(policy.model)

    def update(self, rows: Sequence[TrainRow], plan: StepPlan, progress: Progress | None = None) -> Iterator[StepStats]:
        """Take `update_epochs` × `minibatches` optimizer steps; yields after each.

        An error in any step puts weights, moments and counters back to where they were at the call, bit for bit.
        Closing the iterator early keeps the steps taken. Progress counts micro-batches.

        Raises:
            DataError: rows that break their contract (`batching.arrange`), or longer than the model's context.
            NonFiniteError: a NaN or infinity in an advantage or a sampler log-prob (nothing was computed), in a loss or
                in a gradient.
            ConfigError: a KL term in the loss without a reference.
        """
        arranged = arrange(rows)
        check_rows(arranged, self.policy.context_tokens)
        return self._update(arranged, plan, progress)

    def logprobs(
        self, rows: Sequence[TrainRow], plan: StepPlan, *, reference: bool = False
    ) -> list[list[float | None]]:
        """Log-probs in nats at the plan's temperature, per row in the order given; null where not an action token."""
        arranged = arrange(rows)
        check_rows(arranged, self.policy.context_tokens)
        policy = self._reference_policy() if reference else self.policy
        batches = microbatches(arranged, range(len(arranged.rows)), plan.micro_batch_tokens)
        values = self._score(policy, arranged, batches, plan, lambda: None).tolist()
        found: dict[tuple[int, int], list[float | None]] = {}
        for row, start in zip(arranged.rows, arranged.starts.tolist(), strict=True):
            pairs = zip(values[start : start + len(row.action_mask)], row.action_mask, strict=True)
            found[row.group_id, row.sample_id] = [value if chosen else None for value, chosen in pairs]
        return [found[row.group_id, row.sample_id] for row in rows]

    def save(self, folder: Path) -> None:
        """Write the policy as a Hugging Face model folder plus `trainer/`; the same state gives the same bytes."""
        folder.mkdir(parents=True, exist_ok=True)
        save_policy(self.policy, folder)
        self.optimizer.save(folder / "trainer")

    def load_trainer_state(self, folder: Path) -> None:
        """Take over the optimizer state of the checkpoint whose weights the policy holds. Raises `ModelError`."""
        self.optimizer.load(folder / "trainer")

    def _reference_policy(self) -> Policy:
        if self.reference is None:
            raise ConfigError(
                "the KL term needs a reference policy and the learner has none",
                expected="a frozen policy as TorchLearner(policy, reference)",
                todo="load the run's starting policy, or set algorithm.kl.coef = 0",
            )
        return self.reference

    def gradients(self, rows: Sequence[TrainRow], plan: StepPlan) -> StepStats:
        """Loss and metrics of one step over all rows; its gradients stay in the weights' `grad`, no step is taken."""
        arranged = arrange(rows)
        check_rows(arranged, self.policy.context_tokens)
        single = plan.learner.model_copy(update={"minibatches": 1, "update_epochs": 1})
        update, (mini,) = self._prepare(arranged, replace(plan, learner=single), None)
        self.optimizer.forget_gradients()
        return self._backward(update, mini)

    def _prepare(
        self, arranged: Arranged, plan: StepPlan, progress: Progress | None
    ) -> tuple[_Update, list[Minibatch]]:
        """Everything before the first step: the minibatches, and the old and reference log-probs where needed."""
        algorithm = resolve(plan.algorithm, plan)
        needs = algorithm.needs(plan.learner)
        reference = self._reference_policy() if needs.ref_in_loss else None
        minis = split_update(arranged, plan, algorithm)
        batches = [batch for mini in minis for batch in mini.batches]
        tick = ticker(progress, len(batches) * (plan.learner.update_epochs + needs.old + needs.ref_in_loss))
        update = _Update(
            arranged=arranged,
            advantages=torch.tensor([row.advantage for row in arranged.rows], dtype=torch.float32),
            plan=plan,
            algorithm=algorithm,
            old=self._score(self.policy, arranged, batches, plan, tick) if needs.old else None,
            ref=self._score(reference, arranged, batches, plan, tick) if reference else None,
            tick=tick,
        )
        return update, minis

    def _update(self, arranged: Arranged, plan: StepPlan, progress: Progress | None) -> Iterator[StepStats]:
        update, minis = self._prepare(arranged, plan, progress)
        self.optimizer.forget_gradients()
        # A single step is refused before it touches a weight; only later steps need the way back.
        snapshot = self.optimizer.snapshot() if plan.learner.update_epochs * len(minis) > 1 else None
        try:
            for epoch in range(plan.learner.update_epochs):
                for place in step_order(len(minis), plan.seed, epoch):
                    stats = self._backward(update, minis[place])
                    if stats.applied:
                        lr, norm = stats.metrics["learner/lr"], stats.metrics["learner/grad_norm"]
                        assert lr is not None and norm is not None
                        self.optimizer.apply(plan.learner, lr, norm)
                    else:
                        self.optimizer.skip()
                    yield stats
        except GeneratorExit:
            raise
        except BaseException:
            self.optimizer.forget_gradients()
            if snapshot is not None:
                self.optimizer.restore(snapshot)
            raise

    def _score(
        self, policy: Policy, arranged: Arranged, batches: list[MicroBatch], plan: StepPlan, tick: Callable[[], None]
    ) -> Tensor:
        """Log-probs [T] without gradient, NaN at tokens of no micro-batch."""
        values = torch.full(arranged.completion_ids.shape, math.nan)
        with torch.no_grad(), forward_mode(policy.model, False):
            for batch in batches:
                targets = arranged.completion_ids[batch.tokens]
                scored, _ = score_tokens(policy, batch, targets, plan.temperature, plan.logit_chunk_tokens)
                values[batch.tokens] = scored.cpu()
                tick()
        return values

    def _backward(self, update: _Update, mini: Minibatch) -> StepStats:
        """Gradients of all micro-batches of the next optimizer step; refused if they or the loss are not finite."""
        number = self.optimizer.step + 1
        tally = Tally()
        with forward_mode(self.policy.model, update.plan.gradient_checkpointing):
            for batch in mini.batches:
                self._accumulate(update, mini, batch, tally)
                update.tick()
        norm = self.optimizer.gradient_norm()
        for what, value in (("loss", tally.loss), ("gradient norm", norm)):
            if not math.isfinite(value):
                raise non_finite(what, f"optimizer step {number}", value)
        metrics = tally.metrics() | {
            "learner/loss": tally.loss,
            "learner/grad_norm": norm,
            "learner/lr": learning_rate(update.plan.learner, number, update.plan.total_steps),
            "learner/tokens": float(mini.tokens),
            "learner/tokens_computed": float(tally.tokens),
            "learner/micro_batches": float(len(mini.batches)),
            "learner/applied": float(bool(mini.batches)),
        }
        return StepStats(number, bool(mini.batches), metrics)

    def _accumulate(self, update: _Update, mini: Minibatch, batch: MicroBatch, tally: Tally) -> None:
        arranged, plan, device = update.arranged, update.plan, self.policy.device
        row = arranged.row_of_token[batch.tokens]
        sequences, sequence_ids = torch.unique(row, return_inverse=True)
        targets = arranged.completion_ids[batch.tokens]
        logprobs, entropy = score_tokens(self.policy, batch, targets, plan.temperature, plan.logit_chunk_tokens)
        tokens = TokenBatch(
            logprobs=logprobs,
            entropy=entropy,
            old_logprobs=logprobs.detach() if update.old is None else update.old[batch.tokens].to(device),
            sampler_logprobs=arranged.sampler_logprobs[batch.tokens].to(device),
            advantages=update.advantages[row].to(device),
            mask=torch.ones_like(logprobs, dtype=torch.bool),
            sequence_ids=sequence_ids.to(device),
            sequences=len(sequences),
            ref_logprobs=None if update.ref is None else update.ref[batch.tokens].to(device),
        )
        result = token_loss(tokens, update.algorithm)
        loss = (result.loss.double() * mini.weights[row].to(device)).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.collect()
        tally.add(float(loss.detach()), len(targets), result.metrics, result.peaks)

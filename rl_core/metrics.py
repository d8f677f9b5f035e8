"""Every metric that is logged: one table, from which the README's glossary is made. Nothing here imports torch."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Metric:
    """What a number is: its unit, and how it is estimated, over what, when it is null."""

    unit: str
    about: str


METRICS: dict[str, Metric] = {
    # score and advantage, one value per iteration
    "reward/mean": Metric("reward", "mean task reward of the scored completions, before shaping"),
    "reward/std": Metric("reward", "sample standard deviation of the same; null with fewer than two"),
    "reward/shaped_mean": Metric("reward", "mean after length penalty, override and KL, as the estimator saw it"),
    "reward/nonfinite_frac": Metric("share", "completions without a finite reward: out of every mean, not trained on"),
    "reward/<name>_mean": Metric("reward", "mean of one reward component over the rows that have it, unweighted"),
    "reward/<name>_unscored_frac": Metric("share", "completions for which this component has no value"),
    "groups/count": Metric("groups", "prompts of the iteration"),
    "groups/singleton": Metric("groups", "groups with one scored completion, which has nothing to be compared with"),
    "groups/zero_var_frac": Metric(
        "share", "groups of equal task rewards, of those with two or more scored completions"
    ),
    "groups/kept_frac": Metric("share", "groups with at least one completion in the loss"),
    "completion/kept_frac": Metric("share", "completions in the loss"),
    "completion/truncated_frac": Metric("share", "completions cut by the budget or the context"),
    "completion/empty_frac": Metric("share", "completions without a token of the policy"),
    "completion/tokens_mean": Metric("tokens", "tokens of the policy per completion"),
    "completion/tokens_max": Metric("tokens", "the longest of them"),
    "completion/tokens_total": Metric("tokens", "tokens sampled in the iteration"),
    "prompt/tokens_mean": Metric("tokens", "tokens of a prompt, chat template included"),
    "prompt/dropped": Metric("prompts", "prompts passed over because they were longer than the limit"),
    # train, one value per optimizer step; means and extremes over the tokens it computed, null without any
    "policy/entropy": Metric(
        "nats", "mean entropy of the policy's next-token distribution at the sampling temperature"
    ),
    "policy/ratio": Metric("1", "mean of r = current / old probability of a token; 1 for a single step"),
    "policy/approx_kl": Metric("nats per token", "KL(old || current) by k3 = r - 1 - log r on the old policy's tokens"),
    "policy/clip_frac_low": Metric("share", "tokens of negative advantage at the lower bound, without gradient"),
    "policy/clip_frac_high": Metric("share", "tokens of positive advantage at the upper bound, without gradient"),
    "policy/dual_clip_frac": Metric("share", "tokens of negative advantage at the dual-clip bound; null without it"),
    "policy/ratio_clamp_frac": Metric("share", "tokens whose log-ratio lies beyond 20 nats and was clamped"),
    "policy/log_ratio_max": Metric("nats", "largest log r of a token"),
    "policy/log_ratio_min": Metric("nats", "smallest log r of a token"),
    "policy/kl": Metric("nats per token", "KL(current || reference) by k3; null without a KL term in the loss"),
    "policy/kl_clamp_frac": Metric("share", "tokens more than 20 nats from the reference; null like policy/kl"),
    "mismatch/k1": Metric("nats per token", "KL(sampler || learner) by k1 = -log w, w = learner / sampler probability"),
    "mismatch/k3": Metric("nats per token", "the same by k3 = w - 1 - log w; below 1e-3 when the engines agree"),
    "mismatch/mean_w": Metric("1", "mean of w; 1 when the engines agree"),
    "mismatch/chi2": Metric("1", "mean of w^2, minus 1"),
    "mismatch/ess": Metric("share", "effective sample size (sum w)^2 / (n sum w^2); 1 when the engines agree"),
    "mismatch/mult_prob_error": Metric("1", "mean of exp|log w|; 1 when the engines agree"),
    "mismatch/log_w_max": Metric("nats", "largest log w of a token"),
    "mismatch/log_w_min": Metric("nats", "smallest log w of a token"),
    "learner/loss": Metric("1", "the step's loss: token losses under the aggregation's global denominators"),
    "learner/grad_norm": Metric("1", "norm of the gradient before it is clipped"),
    "learner/lr": Metric("1", "learning rate of the step"),
    "learner/tokens": Metric("tokens", "tokens of the policy in the denominators of the step, computed or not"),
    "learner/tokens_computed": Metric("tokens", "those that went through the model: rows without signal do not"),
    "learner/micro_batches": Metric("passes", "forward and backward passes of the step"),
    "learner/applied": Metric("0 or 1", "0: no token carried signal and the optimizer was not called"),
    "learner/steps_applied": Metric("steps", "optimizer steps of the iteration that were applied"),
    # evaluate, one value per evaluated iteration
    "eval/greedy_accuracy": Metric("share", "held-out problems whose greedy answer is correct"),
    "eval/greedy_low": Metric("share", "lower end of its 95% Wilson interval"),
    "eval/greedy_high": Metric("share", "upper end of its 95% Wilson interval"),
    "eval/avg_at_<k>": Metric("share", "mean over problems of the share of k sampled answers that is correct"),
    "eval/avg_at_<k>_se": Metric("share", "its standard error, clustered by problem; null with one problem"),
    "eval/avg_at_<k>_low": Metric("share", "lower end of its 95% interval, a bootstrap over problems"),
    "eval/avg_at_<k>_high": Metric("share", "upper end of its 95% interval, a bootstrap over problems"),
    "eval/pass_at_<k>": Metric("share", "chance that one of k answers is correct, unbiased, mean over problems"),
    "eval/truncated_frac": Metric("share", "held-out answers that were cut"),
    "eval/unscored_frac": Metric("share", "held-out answers without a score, counted as not correct"),
    "time/<stage>_seconds": Metric("s", "wall time of the stage as its manifest has it; no value where it was reused"),
}
"""Name to meaning. `<...>` in a name stands for the name of a reward or a stage, or for a number."""

_PLACE = re.compile(r"<[a-z]+>")
_PATTERNS = {
    name: re.compile(_PLACE.sub(lambda m: r"\d+" if m[0] == "<k>" else "[a-z0-9_.]+", name)) for name in METRICS
}


def glossary_entry(name: str) -> str | None:
    """The entry of `METRICS` that explains a logged name, an exact one before one with a place; null if none does."""
    if name in METRICS:
        return name
    # The longest template first: `reward/<name>_unscored_frac` is not a component called `..._unscored`.
    found = [entry for entry, pattern in _PATTERNS.items() if "<" in entry and pattern.fullmatch(name)]
    return max(found, key=len, default=None)


def glossary_markdown() -> str:
    """The glossary as a Markdown table."""
    rows = [
        f"| `{name}` | {metric.unit} | {metric.about.replace('|', chr(92) + '|')} |" for name, metric in METRICS.items()
    ]
    return "\n".join(["| metric | unit | meaning |", "|---|---|---|", *rows]) + "\n"

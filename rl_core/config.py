"""What a run is: one frozen, validated model per concern. Field descriptions are what the Prefect form shows.

Everything outside `execution` decides the numbers and may enter a fingerprint. `execution` says where and how fast the
same numbers are computed and never does.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, JsonValue, model_validator

from rl_core.execution import ExecutionConfig
from rl_core.section import Section

AlgorithmName = Literal["grpo", "dr_grpo", "rloo", "dapo", "reinforce"]
AdvantageName = Literal["grpo", "dr_grpo", "rloo", "reinforce"]
KlName = Literal["k1", "k2", "k3", "k3_st"]
AggregationName = Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_sum_fixed_norm"]


class ModelConfig(Section):
    source: str = Field(min_length=1)
    """A name known to `rlstages models` (`smollm2-135m-instruct`, `tiny-random`) or a Hugging Face model folder."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of the weights. `auto` takes bfloat16 on a GPU that has it in hardware, else float32."""
    max_context_tokens: int | None = Field(default=None, ge=2)
    """Context limit in tokens, prompt and completion together; null takes the model's own."""


class EnvironmentConfig(Section):
    kind: str = Field(min_length=1)
    """Short name (`reasoning_gym`, `dataset`) or import path `package.module:Class`."""
    params: dict[str, JsonValue] = Field(default_factory=dict)
    """Parameters of that environment; it validates them itself."""


class GenerateConfig(Section):
    prompts_per_iteration: int = Field(default=8, ge=1)
    """Prompts (groups) per iteration."""
    group_size: int = Field(default=8, ge=1)
    """Completions sampled for each prompt."""
    max_prompt_tokens: int = Field(default=256, ge=1)
    """Limit of the templated prompt in tokens."""
    overlong_prompt: Literal["fail", "drop", "truncate"] = "fail"
    """A prompt over the limit: fail the stage, drop it and take the next one, or cut its oldest text."""
    max_completion_tokens: int = Field(default=64, ge=1)
    """Limit of a completion in tokens."""
    temperature: float = Field(default=1.0, gt=0.0, le=10.0)
    """Sampling temperature of training rollouts; the learner's log-probs use the same one."""


class RewardConfig(Section):
    function: str = Field(min_length=1)
    """Short name (`last_integer`, `math_answer`, ...) or import path `package.module:function`."""
    name: str = Field(default="", pattern=r"^[a-z0-9_]*$")
    """Name of the reward's column; empty takes the function's own name."""
    weight: float = 1.0
    """Weight in the total."""
    params: dict[str, JsonValue] = Field(default_factory=dict)
    """Keyword arguments handed to the function."""

    @model_validator(mode="before")
    @classmethod
    def _default_name(cls, data: Any) -> Any:
        if isinstance(data, dict) and not data.get("name") and isinstance(data.get("function"), str):
            return {**data, "name": data["function"].replace(":", ".").rsplit(".", 1)[-1].lower()}
        return data


class ScoringConfig(Section):
    on_error: Literal["fail", "mark"] = "fail"
    """A row whose reward fails: fail the stage, or mark it (null and a reason) and train without it."""
    timeout_seconds: float = Field(default=30.0, gt=0)
    """Limit of one call of a reward function."""
    max_unscored_fraction: float = Field(default=0.5, ge=0, le=1)
    """With `mark`: the stage fails when more than this share of rows has no total."""


class KlConfig(Section):
    coef: float = Field(default=0.0, ge=0)
    """Weight of the KL term to the frozen starting policy; 0 loads no reference."""
    estimator: KlName | None = None
    """Estimator of the per-token KL; null takes the sound one: k3_st (value of k3, gradient of k2) in the loss, k1 in
    the reward. k1 in the loss has no gradient on average."""
    place: Literal["loss", "reward"] = "loss"
    """Add the term to the loss, or take it off the reward before advantages are computed."""

    @property
    def resolved_estimator(self) -> KlName:
        return self.estimator or ("k3_st" if self.place == "loss" else "k1")


class OverlongConfig(Section):
    buffer_tokens: int = Field(ge=1)
    """Length of the soft zone before `max_completion_tokens` (DAPO)."""
    factor: float = Field(default=1.0, gt=0)
    """Largest penalty."""


class AlgorithmConfig(Section):
    name: AlgorithmName = "grpo"
    """Row of the algorithm table; the fields below override single entries of that row."""
    advantage: AdvantageName | None = None
    """Advantage estimator; null takes the algorithm's."""
    std_ddof: Literal[0, 1] = 1
    """1: sample standard deviation of the group, 0: population."""
    std_eps: float = Field(default=1e-6, ge=0)
    """Added to the group's standard deviation."""
    clip_low: float | None = Field(default=None, ge=0, lt=1)
    """The ratio's lower bound is 1 - clip_low; null takes the algorithm's."""
    clip_high: float | None = Field(default=None, ge=0)
    """The ratio's upper bound is 1 + clip_high; null takes the algorithm's."""
    dual_clip: float | None = Field(default=None, gt=1)
    """Bound on the loss of a token with negative advantage, in units of it; null takes the algorithm's."""
    aggregation: AggregationName | None = None
    """How token losses become one number; null takes the algorithm's."""
    kl: KlConfig = KlConfig()
    truncation: Literal["keep", "mask_loss", "reward_override"] = "keep"
    """A completion cut by the budget: train on it, keep it in the baseline only, or replace its reward."""
    truncated_reward: float = 0.0
    """The reward that `reward_override` gives."""
    overlong: OverlongConfig | None = None
    """Soft length penalty before the budget; null takes the algorithm's."""


class LearnerConfig(Section):
    lr: float = Field(default=1e-6, gt=0)
    """Peak learning rate of AdamW."""
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.999)
    """AdamW moment decay rates."""
    eps: float = Field(default=1e-8, gt=0)
    """AdamW epsilon."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradients are scaled down to this global norm."""
    warmup_steps: int = Field(default=0, ge=0)
    """Optimizer steps of linear warm-up."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Course of the learning rate after warm-up, to 0 at the run's last step."""
    update_epochs: int = Field(default=1, ge=1)
    """Passes over the rollouts of an iteration."""
    minibatches: int = Field(default=1, ge=1)
    """Optimizer steps per pass; groups are never split."""


class EvaluateConfig(Section):
    problems: int = Field(default=64, ge=1)
    """Held-out problems."""
    greedy: bool = True
    """One greedy completion per problem."""
    samples: int = Field(default=0, ge=0)
    """Sampled completions per problem, for avg@k and pass@k."""
    temperature: float = Field(default=1.0, gt=0)
    """Temperature of the sampled completions."""
    max_completion_tokens: int | None = Field(default=None, ge=1)
    """Limit of a completion; null takes the training limit."""
    reward: str = ""
    """Reward that judges an answer; empty takes the first one."""
    correct_at: float = 1.0
    """An answer counts as correct from this reward on."""
    every: int = Field(default=1, ge=1)
    """Evaluate (and register) every so many iterations; the last iteration always."""


class RegistryConfig(Section):
    model_name: str = Field(default="", pattern=r"^[\w.\- ]*$")
    """Registered model in MLflow; empty takes the run's name."""
    method: Literal["paired_bootstrap", "mcnemar_midp"] = "paired_bootstrap"
    """Comparison of challenger and champion on the same problems."""
    margin: float = Field(default=0.05, ge=0)
    """Largest loss of accuracy that still counts as not worse."""
    confidence: float = Field(default=0.95, gt=0.5, lt=1)
    """One-sided confidence of the comparison."""


class RunConfig(Section):
    """One training run."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9-]{0,62}$")
    """Name of the run and of its folder."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """The run's one seed."""
    iterations: int = Field(default=10, ge=1)
    """Iterations to train."""
    model: ModelConfig
    environment: EnvironmentConfig
    generate: GenerateConfig = GenerateConfig()
    rewards: tuple[RewardConfig, ...] = Field(min_length=1)
    scoring: ScoringConfig = ScoringConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    learner: LearnerConfig = LearnerConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    registry: RegistryConfig = RegistryConfig()
    execution: ExecutionConfig = ExecutionConfig()

    @model_validator(mode="after")
    def _check_across_sections(self) -> RunConfig:
        names = [reward.name for reward in self.rewards]
        if len(set(names)) != len(names):
            raise ValueError(f"rewards: two rewards have one name ({', '.join(names)}); give each its own `name`")
        if self.evaluate.reward and self.evaluate.reward not in names:
            raise ValueError(f"evaluate.reward: {self.evaluate.reward!r} is none of the rewards {names}")
        if not self.evaluate.greedy and self.evaluate.samples == 0:
            raise ValueError("evaluate: nothing to do; set greedy = true or samples >= 1")
        advantage = self.algorithm.advantage or self.algorithm.name
        if advantage != "reinforce" and self.generate.group_size < 2:
            raise ValueError(
                f"generate.group_size: {advantage} compares the completions of one prompt and needs at least 2; "
                "raise group_size, or take algorithm.name = 'reinforce'"
            )
        if self.learner.minibatches > self.generate.prompts_per_iteration:
            raise ValueError(
                f"learner.minibatches: {self.learner.minibatches} steps need at least as many prompts, "
                f"and generate.prompts_per_iteration is {self.generate.prompts_per_iteration}"
            )
        overlong = self.algorithm.overlong
        if overlong and overlong.buffer_tokens > self.generate.max_completion_tokens:
            raise ValueError("algorithm.overlong.buffer_tokens: larger than generate.max_completion_tokens")
        if "register" in self.execution.placement:
            raise ValueError("execution.placement.register: register runs beside the run's tracker and stays there")
        limit = self.model.max_context_tokens
        if limit is not None and self.generate.max_prompt_tokens >= limit:
            raise ValueError(
                f"generate.max_prompt_tokens: {self.generate.max_prompt_tokens} leaves no room for a completion "
                f"in model.max_context_tokens = {limit}"
            )
        return self

    @property
    def model_name(self) -> str:
        """Name of the registered model."""
        return self.registry.model_name or self.name

    @property
    def judge(self) -> RewardConfig:
        """The reward that decides whether a held-out answer is correct."""
        wanted = self.evaluate.reward or self.rewards[0].name
        return next(reward for reward in self.rewards if reward.name == wanted)

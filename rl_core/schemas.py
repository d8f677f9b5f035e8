"""The tables between stages, each declared once: Arrow schemas with unit and shape in the field metadata.

Key everywhere: (`group_id`, `sample_id`). Identity goes by id, never by text or position. A missing value is null with
a reason in a column of its own, never a number.
"""

from __future__ import annotations

import pyarrow as pa


def _field(name: str, kind: pa.DataType, about: str, nullable: bool = False) -> pa.Field:
    return pa.field(name, kind, nullable=nullable, metadata={"about": about})


_TOKENS = pa.large_list(pa.field("item", pa.int32(), nullable=False))
_FLOATS = pa.large_list(pa.field("item", pa.float32(), nullable=False))
_BOOLS = pa.large_list(pa.field("item", pa.bool_(), nullable=False))
_MESSAGES = pa.large_list(
    pa.field(
        "item",
        pa.struct(
            [pa.field("role", pa.string(), nullable=False), pa.field("content", pa.large_string(), nullable=False)]
        ),
        nullable=False,
    )
)
_TURNS = pa.large_list(
    pa.field(
        "item",
        pa.struct(
            [
                pa.field("role", pa.string(), nullable=False),
                pa.field("start", pa.int32(), nullable=False),
                pa.field("end", pa.int32(), nullable=False),
            ]
        ),
        nullable=False,
    )
)

KEY = [
    _field("group_id", pa.int64(), "prompt's position in the run's prompt stream; unique in the run"),
    _field("sample_id", pa.int32(), "index of the completion in its group"),
]

TRAJECTORIES = pa.schema(
    [
        *KEY,
        _field("prompt_id", pa.large_string(), "the environment's own name of the task"),
        _field("prompt_messages", _MESSAGES, "chat messages; a raw prompt is one message of role `raw`"),
        _field("prompt_ids", _TOKENS, "token ids fed to the model, [prompt tokens]"),
        _field("completion_ids", _TOKENS, "token ids after the prompt, end token included, [completion tokens]"),
        _field(
            "sampler_logprobs",
            _FLOATS,
            "log-prob in nats of each completion token at `temperature`, [completion tokens]",
        ),
        _field(
            "ref_logprobs",
            _FLOATS,
            "same tokens under the frozen reference; null when no stage needs it",
            nullable=True,
        ),
        _field("action_mask", _BOOLS, "true where the policy chose the token itself, [completion tokens]"),
        _field("turns", _TURNS, "turn boundaries as [start, end) positions in completion_ids"),
        _field("finish_reason", pa.string(), "stop: end token sampled; length: budget or context used up"),
        _field("truncated", pa.bool_(), "the completion was cut, not ended"),
        _field("temperature", pa.float64(), "sampling temperature; 0 is greedy"),
        _field("policy_version", pa.int32(), "k of the policy that sampled"),
        _field("policy_digest", pa.string(), "digest of that policy's checkpoint"),
        _field("seed", pa.int64(), "seed of this row's random numbers"),
        _field("text", pa.large_string(), "completion as text, special tokens left out, lone surrogates as U+FFFD"),
        _field("env_data", pa.large_string(), "the task's data for rewards, as JSON"),
    ]
)

ADVANTAGES = pa.schema(
    [
        *KEY,
        _field("reward", pa.float64(), "reward after shaping, as the estimator saw it", nullable=True),
        _field("advantage", pa.float64(), "advantage of every action token of the completion"),
        _field("keep", pa.bool_(), "the completion contributes to the loss"),
        _field("drop_reason", pa.string(), "why not: no_signal, unscored, truncated, singleton, empty", nullable=True),
    ]
)

EVALUATION = pa.schema(
    [
        *KEY,
        _field("prompt_id", pa.large_string(), "the environment's own name of the problem"),
        _field("mode", pa.string(), "greedy or sample"),
        _field("prompt_messages", _MESSAGES, "chat messages"),
        _field("completion_ids", _TOKENS, "token ids of the answer"),
        _field("text", pa.large_string(), "the answer"),
        _field("score", pa.float64(), "value of the judging reward", nullable=True),
        _field("reason", pa.string(), "why there is no score", nullable=True),
        _field("correct", pa.bool_(), "score reached evaluate.correct_at; an unscored answer is not correct"),
        _field("finish_reason", pa.string(), "stop or length"),
        _field("truncated", pa.bool_(), "the answer was cut, not ended"),
        _field("policy_digest", pa.string(), "digest of the policy that answered"),
        _field("env_data", pa.large_string(), "the problem's data, as JSON"),
    ]
)

TRAIN_STEPS = pa.schema(
    [
        _field("step", pa.int64(), "optimizer step of the run, from 1"),
        _field("applied", pa.bool_(), "false: no token carried signal, the step was skipped"),
        _field("metric", pa.string(), "name from rl_core/metrics.py"),
        _field("value", pa.float64(), "its value", nullable=True),
    ]
)

DECISIONS = pa.schema(
    [
        _field("iteration", pa.int32(), "iteration that made the checkpoint"),
        _field("policy_digest", pa.string(), "digest of the registered checkpoint"),
        _field("alias", pa.string(), "champion or challenger"),
        _field("champion_digest", pa.string(), "digest of the champion it was compared with", nullable=True),
        _field("method", pa.string(), "comparison used"),
        _field("margin", pa.float64(), "largest loss of accuracy that counts as not worse"),
        _field("difference", pa.float64(), "accuracy of challenger minus champion on the same problems", nullable=True),
        _field("lower_bound", pa.float64(), "one-sided lower confidence bound of the difference", nullable=True),
        _field("p_value", pa.float64(), "p-value of the pre-declared test", nullable=True),
        _field("reason", pa.string(), "the decision in words"),
    ]
)


def rewards_schema(names: list[str]) -> pa.Schema:
    """Schema of the score stage: a value and a reason column per reward component, the weighted total, a status."""
    columns = []
    for name in names:
        columns.append(_field(f"reward_{name}", pa.float64(), f"value of reward {name}", nullable=True))
        columns.append(_field(f"reason_{name}", pa.large_string(), f"why {name} has no value", nullable=True))
    total = _field("reward", pa.float64(), "weighted sum of the components; null when one is missing", nullable=True)
    status = _field("status", pa.string(), "ok or unscored")
    return pa.schema([*KEY, *columns, total, status])


TOTAL_REWARDS = pa.schema([*KEY, rewards_schema([]).field("reward")])
"""What the score tables of all runs have in common."""

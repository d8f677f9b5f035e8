"""From messages to token ids and back: the one way, whether a rollout, an evaluation or a loaded model asks.

A message is `{"role": ..., "content": ...}`. A single message of role `raw` is plain text that gets no template.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from rl_core.errors import DataError, ModelError

Messages = Sequence[dict[str, str]]
RAW = "raw"


def encode_prompt(tokenizer: Any, messages: Messages) -> list[int]:
    """Token ids of the templated prompt, ready for a completion to follow.

    It begins as the tokenizer begins any text (with one start token, or with none), whether or not the template
    writes that beginning too; and nothing is added at the end.
    """
    if any(message["role"] == RAW for message in messages):
        if len(messages) != 1:
            raise DataError(
                "a raw prompt is one message", expected=f"one message of role {RAW!r}", got=f"{len(messages)}"
            )
        text = messages[0]["content"]
    elif not tokenizer.chat_template:
        raise ModelError(
            "the model's tokenizer has no chat template",
            expected=f"a chat template, or prompts of role {RAW!r}",
            got="chat messages",
            todo=f"take an instruction-tuned model, or give each prompt as one message of role {RAW!r}",
        )
    else:
        text = _templated(tokenizer, messages)
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    beginning = _beginning(tokenizer)
    start = beginning or ([] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id])
    while start and ids[: 2 * len(start)] == start * 2:
        ids = ids[len(start) :]
    return ids if ids[: len(beginning)] == beginning else beginning + ids


def _templated(tokenizer: Any, messages: Messages) -> str:
    from jinja2 import TemplateError

    try:
        text: str = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
    except TemplateError as error:
        raise DataError(
            "the model's chat template refuses a prompt",
            expected="roles in an order that the template knows",
            got=f"{[message['role'] for message in messages]}: {error}",
        ) from error
    return text


def _beginning(tokenizer: Any) -> list[int]:
    """What the tokenizer puts before any text by default."""
    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    whole: list[int] = tokenizer("a")["input_ids"]
    return next((whole[:i] for i in range(len(whole)) if whole[i : i + len(plain)] == plain), [])


def fit_prompt(
    tokenizer: Any, messages: Messages, *, limit: int, overlong: Literal["fail", "drop", "truncate"], where: str
) -> tuple[list[dict[str, str]], list[int]] | None:
    """A prompt within `limit` tokens of templated length: its messages and its token ids; null if it is dropped.

    `truncate` takes characters away from the front of the first turn that is not the system's, then of the next; the
    template around them, with the header of the answer, stays whole.

    Args:
        where: names the prompt in errors.

    Raises:
        DataError: the prompt is empty, or too long under `fail`, or too long even with its text cut away.
    """
    texts = [message["content"] for message in messages if message["role"] != "system"]
    if not any(text.strip() for text in texts):
        raise DataError(f"{where} is empty", expected="a turn with text", got=f"{len(messages)} messages without any")
    ids = encode_prompt(tokenizer, messages)
    if len(ids) <= limit:
        return [dict(message) for message in messages], ids
    if overlong == "drop":
        return None
    if overlong == "truncate":
        # one character stays: a prompt that asks nothing is not a shorter prompt
        cut = _smallest_cut(tokenizer, messages, limit, longest=len("".join(texts).rstrip()) - 1)
        if cut is not None:
            shorter = _cut(messages, cut)
            return shorter, encode_prompt(tokenizer, shorter)
    raise DataError(
        f"{where} is longer than the limit",
        expected=f"at most {limit} tokens with the template",
        got=f"{len(ids)} tokens" + (", and too many even with its text cut away" if overlong == "truncate" else ""),
        todo="raise generate.max_prompt_tokens, or set generate.overlong_prompt to 'drop' or 'truncate'",
    )


def _smallest_cut(tokenizer: Any, messages: Messages, limit: int, longest: int) -> int | None:
    """Fewest characters to cut so that the prompt fits, by bisection; null when `longest` is not enough."""

    def fits(cut: int) -> bool:
        return len(encode_prompt(tokenizer, _cut(messages, cut))) <= limit

    if not fits(longest):
        return None
    low, high = 0, longest  # does not fit, fits
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


def _cut(messages: Messages, characters: int) -> list[dict[str, str]]:
    """The messages without the first `characters` characters of the turns that are not the system's."""
    shorter = []
    for message in messages:
        taken = 0 if message["role"] == "system" else min(characters, len(message["content"]))
        characters -= taken
        shorter.append({**message, "content": message["content"][taken:]})
    return shorter


def completion_budget(prompt_tokens: int, max_completion_tokens: int, context_limit: int) -> int:
    """Tokens a completion may have: the configured limit, or what the prompt leaves of the context; at least 0."""
    return max(0, min(max_completion_tokens, context_limit - prompt_tokens))


def decode_completion(tokenizer: Any, ids: Sequence[int]) -> str:
    """The text of a completion without special tokens, always storable as UTF-8."""
    return clean_text(tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))


def clean_text(text: str) -> str:
    """The text with half characters (lone UTF-16 surrogates) replaced by U+FFFD."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")

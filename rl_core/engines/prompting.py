"""From chat messages to token ids and back: the one code path of rollout and evaluation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from rl_core.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedTokenizerFast

Messages = list[dict[str, str]]


def encode_prompt(tokenizer: PreTrainedTokenizerFast, messages: Messages) -> list[int]:
    """Token ids of a prompt, [tokens]; messages go through the chat template, one message of role `raw` does not.

    Exactly one start token where the tokenizer's own default puts one, whoever writes it (template or tokenizer), and
    none where it has none; never an end token at the end.
    """
    text = _render(tokenizer, messages)
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    default: list[int] = tokenizer.encode("", add_special_tokens=True)
    bos = tokenizer.bos_token_id
    if bos is not None and bos in default and ids[:1] != [bos]:
        ids = [bos, *ids]
    return ids


def _render(tokenizer: PreTrainedTokenizerFast, messages: Messages) -> str:
    if len(messages) == 1 and messages[0]["role"] == "raw":
        return messages[0]["content"]
    text: Any = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return str(text)


def fit_prompt(
    tokenizer: PreTrainedTokenizerFast,
    messages: Messages,
    *,
    limit: int,
    overlong: Literal["fail", "drop", "truncate"],
    where: str,
) -> tuple[Messages, list[int]] | None:
    """Messages and token ids within `limit` templated tokens; null when an overlong prompt is dropped.

    `truncate` takes as little as possible from the start of the first user turn (or raw text), so that the template's
    own parts, the assistant header above all, stay whole.

    Raises:
        DataError: an empty prompt, an overlong one under `fail`, or one that no cut makes fit.
    """
    if not messages or not any(message["content"].strip() for message in messages):
        raise DataError(f"{where} is empty", expected="at least one message with text")
    ids = encode_prompt(tokenizer, messages)
    if len(ids) <= limit:
        return messages, ids
    if overlong == "drop":
        return None
    if overlong == "fail":
        raise DataError(
            f"{where} is longer than the limit",
            expected=f"at most {limit} tokens after the chat template",
            got=f"{len(ids)} tokens",
            todo="raise generate.max_prompt_tokens, or set generate.overlong_prompt to 'drop' or 'truncate'",
        )
    return _truncate(tokenizer, messages, limit, where)


def _truncate(
    tokenizer: PreTrainedTokenizerFast, messages: Messages, limit: int, where: str
) -> tuple[Messages, list[int]]:
    index = next((i for i, message in enumerate(messages) if message["role"] in ("user", "raw")), 0)
    text = messages[index]["content"]

    def cut(characters: int) -> tuple[Messages, list[int]]:
        shorter = [*messages]
        shorter[index] = {**messages[index], "content": text[characters:]}
        return shorter, encode_prompt(tokenizer, shorter)

    low, high = 1, len(text) - 1  # the smallest cut that fits; one character must stay
    if high < low or len(cut(high)[1]) > limit:
        raise DataError(
            f"{where} does not fit even when its text is cut",
            expected=f"at most {limit} tokens",
            todo="raise generate.max_prompt_tokens",
        )
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if len(cut(middle)[1]) <= limit else (middle + 1, high)
    return cut(low)


def completion_budget(prompt_tokens: int, max_completion_tokens: int, context_tokens: int) -> int:
    """Tokens a completion may have: the limit, or what the context leaves; 0 when the prompt fills it."""
    return max(0, min(max_completion_tokens, context_tokens - prompt_tokens))


def decode_completion(tokenizer: PreTrainedTokenizerFast, ids: Sequence[int]) -> str:
    """A completion as text: special tokens left out, code units that UTF-8 cannot hold as U+FFFD."""
    text = str(tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))
    return text.encode("utf-8", "surrogatepass").decode("utf-8", "replace")

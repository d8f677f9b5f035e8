from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from rl_core.engines.prompting import clean_text, completion_budget, decode_completion, encode_prompt, fit_prompt
from rl_core.errors import DataError, ModelError

PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}A:{% endif %}"
CHAT = [{"role": "user", "content": "What is 1 + 1?"}]
RAW = [{"role": "raw", "content": "One plus one is"}]


def byte_tokenizer(adds_bos: bool, has_bos: bool, template: str | None) -> Any:
    """One token per byte; ids of the special tokens come last, `<s>` first among them where there is one."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(["<s>", "</s>"] if has_bos else ["</s>"])
    if adds_bos:
        ends = [("<s>", inner.token_to_id("<s>")), ("</s>", inner.token_to_id("</s>"))]
        inner.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=ends)
    bos = {"bos_token": "<s>"} if has_bos else {}
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>", chat_template=template, **bos)


TOKENIZERS = {
    "template and post-processor": (byte_tokenizer(True, True, "{{ bos_token }}" + PLAIN), 1),
    "post-processor only": (byte_tokenizer(True, True, PLAIN), 1),
    "template only": (byte_tokenizer(False, True, "{{ bos_token }}" + PLAIN), 1),
    "no start token": (byte_tokenizer(False, False, PLAIN), 0),
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_chat_prompt_has_one_start_token_or_none(name: str) -> None:
    """C28."""
    tokenizer, starts = TOKENIZERS[name]
    ids = encode_prompt(tokenizer, CHAT)
    text = [tokenizer.convert_tokens_to_ids(letter) for letter in "user:ĠWhatĠisĠ1Ġ+Ġ1?ĊA:"]
    assert ids == [tokenizer.convert_tokens_to_ids("<s>")] * starts + text


@pytest.mark.parametrize("name", TOKENIZERS)
def test_raw_prompt_begins_as_the_tokenizer_begins(name: str) -> None:
    """C28: the tokenizer's own default decides, and no end token follows."""
    tokenizer, _ = TOKENIZERS[name]
    default = tokenizer("One plus one is")["input_ids"]
    expected = default[:-1] if default[-1] == tokenizer.eos_token_id else default
    assert encode_prompt(tokenizer, RAW) == expected


def test_start_token_typed_into_a_raw_prompt_is_not_doubled() -> None:
    """C28."""
    tokenizer, _ = TOKENIZERS["post-processor only"]
    typed = encode_prompt(tokenizer, [{"role": "raw", "content": "<s><s>One plus one is"}])
    assert typed == encode_prompt(tokenizer, RAW)
    assert typed.count(tokenizer.bos_token_id) == 1


def test_a_chat_needs_a_template_and_raw_is_alone() -> None:
    tokenizer = byte_tokenizer(True, True, None)
    with pytest.raises(ModelError, match="no chat template"):
        encode_prompt(tokenizer, CHAT)
    with pytest.raises(DataError, match="one message"):
        encode_prompt(tokenizer, [*RAW, *CHAT])


def test_what_the_template_refuses_is_a_data_error() -> None:
    tokenizer = byte_tokenizer(True, True, "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(DataError, match="roles must alternate"):
        encode_prompt(tokenizer, CHAT)


def templated_length(tokenizer: Any, content: str) -> int:
    return len(encode_prompt(tokenizer, [{"role": "user", "content": content}]))


def test_overlong_prompts_by_templated_length() -> None:
    """C35: context 32, templated prompts of 20, 40 and 30 tokens, completions of at most 8."""
    tokenizer, _ = TOKENIZERS["template and post-processor"]
    empty = templated_length(tokenizer, "")
    prompts = {n: [{"role": "user", "content": "a" * (n - empty)}] for n in (20, 40, 30)}

    def fit(tokens: int, overlong: Any) -> Any:
        return fit_prompt(tokenizer, prompts[tokens], limit=31, overlong=overlong, where=f"prompt {tokens}")

    for tokens, budget in ((20, 8), (30, 2)):
        messages, ids = fit(tokens, "fail")
        assert messages == prompts[tokens]
        assert len(ids) == tokens
        assert completion_budget(len(ids), 8, 32) == budget
    with pytest.raises(DataError, match="prompt 40") as caught:
        fit(40, "fail")
    assert "31" in caught.value.expected
    assert "40" in caught.value.got
    assert fit(40, "drop") is None
    _, ids = fit(40, "truncate")
    assert len(ids) == 31
    assert completion_budget(len(ids), 8, 32) == 1


def test_truncation_cuts_the_oldest_text_and_keeps_the_header() -> None:
    """C35."""
    tokenizer, _ = TOKENIZERS["template and post-processor"]
    system = {"role": "system", "content": "Be brief."}
    messages = [system, {"role": "user", "content": "old text, new text"}, {"role": "assistant", "content": "Yes?"}]
    messages.append({"role": "user", "content": "Go on."})
    whole = len(encode_prompt(tokenizer, messages))
    shorter, ids = fit_prompt(tokenizer, messages, limit=whole - 10, overlong="truncate", where="prompt 1") or ([], [])
    assert shorter == [system, {"role": "user", "content": "new text"}, *messages[2:]]
    assert len(ids) == whole - 10
    assert tokenizer.decode(ids).endswith("user: Go on.\nA:")
    assert messages[1]["content"] == "old text, new text"
    # beyond the first turn the next one is cut, but never the whole of the last one
    shorter, _ = fit_prompt(tokenizer, messages, limit=whole - 24, overlong="truncate", where="prompt 1") or ([], [])
    assert [message["content"] for message in shorter] == ["Be brief.", "", "", " on."]
    with pytest.raises(DataError, match="prompt 1"):
        fit_prompt(tokenizer, messages, limit=whole - 28, overlong="truncate", where="prompt 1")


def test_truncation_keeps_all_it_can_when_characters_are_not_tokens() -> None:
    """C35: characters of one to four bytes, and the longest text that fits found by trying every cut."""
    tokenizer, _ = TOKENIZERS["no start token"]
    text = "aé€😀" * 9
    for limit in range(20, 60, 3):
        fitted = fit_prompt(tokenizer, [{"role": "user", "content": text}], limit=limit, overlong="truncate", where="p")
        assert fitted is not None
        best = next(text[i:] for i in range(len(text)) if templated_length(tokenizer, text[i:]) <= limit)
        assert fitted[0][0]["content"] == best


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [{"role": "raw", "content": ""}],
        [{"role": "user", "content": " \n"}],
        [{"role": "system", "content": "Hi."}],
    ],
)
def test_empty_prompt_is_refused_by_name(messages: list[dict[str, str]]) -> None:
    """C35."""
    tokenizer, _ = TOKENIZERS["post-processor only"]
    with pytest.raises(DataError, match="prompt 17 is empty"):
        fit_prompt(tokenizer, messages, limit=100, overlong="truncate", where="prompt 17")


def test_budget_is_never_negative() -> None:
    assert completion_budget(40, 8, 32) == 0
    assert completion_budget(32, 8, 32) == 0


def test_text_of_a_completion_is_always_storable() -> None:
    """C10."""
    assert clean_text("ok \ud83d") == "ok \ufffd"
    assert clean_text("\udc00b\ud83d\ude00") == "\ufffdb😀"
    for text in ("a\x00b", "\u202e42", "x" * 100_000):
        assert clean_text(text) == text
    tokenizer, _ = TOKENIZERS["post-processor only"]
    half = tokenizer("😀", add_special_tokens=False)["input_ids"][:2]
    text = decode_completion(tokenizer, [*tokenizer("ok ", add_special_tokens=False)["input_ids"], *half])
    assert text.startswith("ok \ufffd")
    assert text.encode()


def test_decoding_leaves_special_tokens_and_nothing_else_out() -> None:
    tokenizer, _ = TOKENIZERS["post-processor only"]
    ids = tokenizer("<s> a , b .</s>", add_special_tokens=False)["input_ids"]
    assert decode_completion(tokenizer, ids) == " a , b ."
    assert decode_completion(tokenizer, []) == ""


def test_the_tiny_model_has_one_start_token(tiny_model: Path) -> None:
    """C28: its template and its post-processor both write one."""
    tokenizer: Any = AutoTokenizer.from_pretrained(tiny_model)
    for messages in (CHAT, RAW):
        ids = encode_prompt(tokenizer, messages)
        assert ids[0] == tokenizer.bos_token_id
        assert ids.count(tokenizer.bos_token_id) == 1
        assert tokenizer.eos_token_id not in ids

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from rl_core.errors import ModelError
from rl_core.models import MODELS, Policy, choose_dtype, fetch_model, load_policy, save_policy

IDS = torch.tensor([[256, 65, 66, 67, 10, 200]])


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def load(folder: Path) -> Policy:
    return load_policy(folder, "cpu", torch.float32)


def logits(policy: Policy) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = policy.model(IDS).logits
    return result


def storages(policy: Policy) -> int:
    model: Any = policy.model
    return len({model.lm_head.weight.data_ptr(), model.model.embed_tokens.weight.data_ptr()})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tiny model of its own for a test that changes it."""
    fetch_model("tiny-random", tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def untied(tmp_path: Path, tiny_model: Path) -> Path:
    """A tiny model with an output head of its own and dropout in its config."""
    torch.manual_seed(0)
    config = LlamaConfig.from_pretrained(tiny_model)
    config.tie_word_embeddings, config.attention_dropout = False, 0.5
    LlamaForCausalLM(config).save_pretrained(tmp_path / "untied")
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(tmp_path / "untied")
    return tmp_path / "untied"


def edit_json(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_tiny_model_is_the_same_every_time(tiny_model: Path, folder: Path) -> None:
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    fetch_model("tiny-random", folder.parent / "again")
    assert torch.equal(torch.random.get_rng_state(), before)
    assert contents(folder) == contents(tiny_model) == contents(folder.parent / "again")


def test_tiny_tokenizer_knows_every_byte(tiny_model: Path) -> None:
    policy = load(tiny_model)
    tokenizer: Any = policy.tokenizer
    text = "".join(map(chr, range(1, 0x250))) + " \n😀  end "
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text
    assert (policy.eos_ids, policy.pad_id, policy.context_tokens) == ((257,), 258, 1024)


@pytest.mark.parametrize("kind", ["tied", "untied"])
def test_save_and_load(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """C69: equal logits before and after, one storage where tied, config and file agree; the bytes repeat."""
    policy = load(request.getfixturevalue("untied" if kind == "untied" else "folder"))
    with torch.no_grad():
        policy.model.get_input_embeddings().weight[65] += 0.25  # type: ignore[union-attr, operator]
    expected = logits(policy)
    for name in ("a", "b"):
        save_policy(policy, tmp_path / name)
    again = load(tmp_path / "a")
    save_policy(again, tmp_path / "c")
    assert contents(tmp_path / "a") == contents(tmp_path / "b") == contents(tmp_path / "c")
    torch.testing.assert_close(logits(again), expected, atol=1e-6, rtol=0)
    assert storages(policy) == storages(again) == (1 if kind == "tied" else 2)
    in_file = "lm_head.weight" in load_file(tmp_path / "a" / "model.safetensors")
    in_config = json.loads((tmp_path / "a" / "config.json").read_text())["tie_word_embeddings"]
    assert (in_file, in_config) == ((False, True) if kind == "tied" else (True, False))
    assert again.tokenizer.chat_template == policy.tokenizer.chat_template
    assert (again.eos_ids, again.pad_id, again.context_tokens) == (policy.eos_ids, policy.pad_id, policy.context_tokens)


def test_dropout_is_off_in_train_mode(untied: Path) -> None:
    policy = load(untied)
    expected = logits(policy)
    policy.model.train()
    assert torch.equal(logits(policy), expected)


def test_weights_have_the_wanted_type(tiny_model: Path) -> None:
    policy = load_policy(tiny_model, "cpu", torch.bfloat16)
    assert {parameter.dtype for parameter in policy.model.parameters()} == {torch.bfloat16} == {policy.dtype}
    assert storages(policy) == 1


@pytest.mark.parametrize("change", ["missing", "unexpected", "shape"])
def test_other_weights_than_the_config_names_are_refused(folder: Path, change: str) -> None:
    weights = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    if change == "missing":
        del weights[name]
    elif change == "unexpected":
        weights[name.replace("1", "2")] = weights[name].clone()
    else:
        weights[name] = weights[name][:-1].clone()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"mlp\.up_proj"):
        load(folder)


def test_an_untied_config_over_tied_weights_is_refused(folder: Path) -> None:
    """C69."""
    edit_json(folder / "config.json", tie_word_embeddings=False)
    with pytest.raises(ModelError, match="lm_head"):
        load(folder)


def test_a_tied_config_over_two_matrices_is_refused(untied: Path) -> None:
    """C69."""
    edit_json(untied / "config.json", tie_word_embeddings=True)
    with pytest.raises(ModelError, match="tied embeddings"):
        load(untied)


def test_broken_folders_are_refused(folder: Path, tmp_path: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(ModelError, match="cannot be loaded"):
        load(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="cannot be loaded"):
        load(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ModelError, match=r"no config\.json"):
        load(folder)
    with pytest.raises(ModelError, match=r"no config\.json"):
        load(tmp_path / "nowhere")


def test_a_generation_config_that_could_not_be_saved_is_refused_at_once(folder: Path) -> None:
    edit_json(folder / "generation_config.json", do_sample=False, temperature=0.7)
    with pytest.raises(ModelError, match="temperature"):
        load(folder)


def test_every_end_token_counts(folder: Path) -> None:
    edit_json(folder / "generation_config.json", eos_token_id=[10, 257, 3])
    assert load(folder).eos_ids == (3, 10, 257)


def test_a_window_limits_the_context(tmp_path: Path, tiny_model: Path) -> None:
    from transformers import MistralConfig, MistralForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = MistralConfig(vocab_size=259, num_key_value_heads=1, head_dim=8, sliding_window=48, **sizes)
    MistralForCausalLM(config).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(tmp_path)
    assert load(tmp_path).context_tokens == 48


def test_fetching_by_name(tmp_path: Path) -> None:
    assert set(MODELS) >= {"smollm2-135m-instruct", "tiny-random"}
    with pytest.raises(ModelError, match="tiny-randon"):
        fetch_model("tiny-randon", tmp_path / "m")
    assert not (tmp_path / "m").exists()
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ModelError, match="not empty"):
        fetch_model("tiny-random", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_choice_of_the_type() -> None:
    cpu = torch.device("cpu")
    assert choose_dtype("bfloat16", cpu)[0] is torch.bfloat16
    dtype, reason = choose_dtype("auto", cpu)
    assert dtype is torch.float32
    assert "cpu" in reason

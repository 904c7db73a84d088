"""Writes the ``config.json`` of a decoder, in the form that transformers reads if it has such a model."""

from __future__ import annotations

import re
from typing import Any

from lowtri.errors import DataError
from lowtri.masks import as_mask, causal, window
from lowtri.nn.config import DecoderConfig, GPT2Config
from lowtri.nn.layout import GPT2_KEYS, SIZES

__all__ = ["to_json"]


_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
}


def to_json(config: DecoderConfig) -> dict[str, Any]:
    """The content of config.json."""
    kind = _kind_of(config)
    content: dict[str, Any] = {"model_type": kind, "lowtri_mask": repr(as_mask(config.mask))}
    content["architectures"] = [_ARCHITECTURES[kind]]
    sizes = {name: getattr(config, name) for name in SIZES}
    if isinstance(config, GPT2Config):
        content |= {name: sizes[name] for name in ("vocab_size", "tie_word_embeddings")}
        content |= {theirs: sizes[ours] for theirs, ours in GPT2_KEYS.items()}
        return content | {"activation_function": "gelu_new"}
    content |= {**sizes, "rope_theta": config.rope_theta, "rope_scaling": _scaling_as_json(config)}
    content |= {"hidden_act": "silu", "mlp_bias": config.mlp_bias, "attention_bias": config.o_bias}
    if config.rope_layers is not None:
        content["pad_token_id"] = None  # or transformers defaults to SmolLM3's
        content["no_rope_layers"] = [int(rotary) for rotary in config.rope_layers]
    n = _window_size(config)
    if n is not None:
        content |= {"sliding_window": n, "use_sliding_window": True, "max_window_layers": 0}
    return content


def _kind_of(config: DecoderConfig) -> str:
    """The model_type with which transformers computes the same."""
    if isinstance(config, GPT2Config):
        return "gpt2"
    features = (config.qk_norm, config.rope_layers is not None, config.qkv_bias, config.o_bias, config.mlp_bias)
    windowed = _window_size(config) is not None
    kinds = {
        (False, False, False, False, False): "mistral" if windowed else "llama",
        (False, False, True, False, False): "qwen2",
        (True, False, False, False, False): "qwen3",
        (True, False, True, True, False): "qwen3",
    }
    if features in kinds:
        return kinds[features]
    if not config.qk_norm and config.qkv_bias == config.o_bias and not windowed:
        return "smollm3" if config.rope_layers is not None else "llama"
    raise DataError(
        "save: no model_type of transformers has this decoder's biases, norms and mask together:\n"
        f"  qk_norm {config.qk_norm}, qkv_bias {config.qkv_bias}, o_bias {config.o_bias}, mlp_bias {config.mlp_bias}, "
        f"mask {config.mask}, rope_layers {config.rope_layers}\n"
        "Fix: qkv_bias and o_bias alike, without the rest."
    )


def _window_size(config: DecoderConfig) -> int | None:
    """The n of ``window(n)``, with or without ``causal &``, which it implies; None for any other mask."""
    mask = as_mask(config.mask)
    match = re.search(r"window\((\d+)\)", repr(mask))
    n = int(match.group(1)) if match else 0
    return n if match and mask in (window(n), causal() & window(n), window(n) & causal()) else None


def _scaling_as_json(config: DecoderConfig) -> dict[str, Any] | None:
    scaling = config.rope_scaling
    if scaling is None:
        return None
    if scaling.linear:
        return {"rope_type": "linear", "factor": scaling.factor}
    bounds = {"low_freq_factor": scaling.low_freq_factor, "high_freq_factor": scaling.high_freq_factor}
    return {
        "rope_type": "llama3",
        "factor": scaling.factor,
        **bounds,
        "original_max_position_embeddings": scaling.original,
    }

"""Maps GGUF metadata and tensor names to those of config.json and model.safetensors."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lowtri.errors import DataError
from lowtri.nn.files import brief

__all__ = ["config_of", "tensor_name"]

ARCHITECTURES = ("llama", "qwen2", "qwen3", "gpt2")

_SIZES = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.layer_norm_epsilon": "layer_norm_epsilon",
    "rope.freq_base": "rope_theta",
}
# Read below, or irrelevant to the computation.
_ALSO = {"attention.value_length", "attention.causal", "rope.dimension_count", "attention.sliding_window", "vocab_size"}
_ALSO |= {"rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length", "rope.scaling.finetuned"}
_GPT2 = {"num_hidden_layers": "n_layer", "max_position_embeddings": "n_positions", "hidden_size": "n_embd"}
_GPT2 |= {"num_attention_heads": "n_head", "intermediate_size": "n_inner"}

_LLAMA_TENSORS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GPT2_TENSORS = {
    "token_embd": "transformer.wte",
    "position_embd": "transformer.wpe",
    "output_norm": "transformer.ln_f",
    "output": "lm_head",
    "attn_norm": "ln_1",
    "ffn_norm": "ln_2",
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}


def config_of(fields: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], path: Path) -> dict[str, Any]:
    """The content of config.json, from the metadata fields and the tensor shapes (in NumPy's order).

    Raises:
        DataError: for another architecture, or a field that the Decoder does not support.
    """
    kind = fields.get("general.architecture")
    if not isinstance(kind, str) or kind not in ARCHITECTURES:
        raise DataError(f"{path}: general.architecture {kind!r:.60} came, lowtri reads {', '.join(ARCHITECTURES)}")
    own = {key.removeprefix(f"{kind}."): value for key, value in fields.items() if key.startswith(f"{kind}.")}
    for key, value in own.items():
        if key not in _SIZES and key not in _ALSO and value:
            raise DataError(
                f"{path}: {kind}.{brief(key)} {value!r:.60} came, and lowtri's Decoder has nothing of the kind"
            )
    config: dict[str, Any] = {_SIZES[key]: value for key, value in own.items() if key in _SIZES}
    if "token_embd.weight" not in shapes:
        raise DataError(f"{path}: it has no token_embd.weight, so it is no language model")
    config |= {"model_type": kind, "vocab_size": shapes["token_embd.weight"][0]}
    config["tie_word_embeddings"] = "output.weight" not in shapes
    config["eos_token_id"] = _ends(fields)
    config["bos_token_id"] = fields.get("tokenizer.ggml.bos_token_id")
    config["architectures"] = [{"gpt2": "GPT2LMHeadModel"}.get(kind, f"{kind.capitalize()}ForCausalLM")]
    if kind == "gpt2":
        heads = config.get("num_attention_heads")
        config.setdefault("num_key_value_heads", heads)
        return {_GPT2.get(key, key): value for key, value in config.items()} | {
            "num_attention_heads": heads,
            "activation_function": "gelu_new",
        }
    config.setdefault("num_key_value_heads", config.get("num_attention_heads"))
    _whole(own, kind, path)
    config.setdefault("head_dim", config.get("hidden_size", 0) // max(1, config.get("num_attention_heads", 1)))
    config.setdefault("rope_theta", 10000.0)
    config["hidden_act"] = "silu"
    biased = "blk.0.attn_q.bias" in shapes
    if kind in ("llama", "qwen3"):
        config["attention_bias"] = biased
    if kind == "llama":
        config["mlp_bias"] = "blk.0.ffn_up.bias" in shapes
    _check_heads(own, config, kind, path)
    scaling = own.get("rope.scaling.type", "none")
    if scaling == "linear":
        config["rope_scaling"] = {"rope_type": "linear", "factor": own["rope.scaling.factor"]}
    elif scaling != "none":
        raise DataError(f"{path}: {kind}.rope.scaling.type {scaling!r} came, lowtri's Decoder has none and linear")
    n = own.get("attention.sliding_window")
    if n and kind == "llama":
        config |= {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": n}
    elif n:
        config |= {"use_sliding_window": True, "sliding_window": n, "max_window_layers": 0}
    return config


def tensor_name(name: str, kind: str, path: Path) -> str:
    """The name of a tensor in model.safetensors.

    Raises:
        DataError: for a tensor that the Decoder does not have.
    """
    names = _GPT2_TENSORS if kind == "gpt2" else _LLAMA_TENSORS
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    if match is None or match.group(2) not in names:
        raise DataError(f"{path}: the tensor {brief(name)} has no place in lowtri's Decoder")
    layer, part, end = match.groups()
    layers = "transformer.h" if kind == "gpt2" else "model.layers"
    return f"{layers}.{layer}.{names[part]}.{end}" if layer is not None else f"{names[part]}.{end}"


def _whole(own: Mapping[str, Any], kind: str, path: Path) -> None:
    """Counts must be integers, the same for all layers; some architectures have lists, one entry per layer."""
    for key, name in _SIZES.items():
        if key in own and not name.endswith(("eps", "theta")) and not isinstance(own[key], int):
            raise DataError(f"{path}: {kind}.{key} {own[key]!r:.60} came, expected a whole number")


def _check_heads(own: Mapping[str, Any], config: Mapping[str, Any], kind: str, path: Path) -> None:
    for key in ("attention.value_length", "rope.dimension_count"):
        if own.get(key, config["head_dim"]) != config["head_dim"]:
            raise DataError(
                f"{path}: {kind}.{key} {own[key]} came, lowtri's Decoder has the head size {config['head_dim']} only"
            )


def _ends(fields: Mapping[str, Any]) -> int | list[int] | None:
    """End-of-text and, if different, end-of-turn token ids."""
    named = [fields.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")]
    ends = list(dict.fromkeys(one for one in named if one is not None))
    return ends[0] if len(ends) == 1 else ends or None

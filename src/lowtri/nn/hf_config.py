"""Reads and writes the layout of transformers: ``config.json`` of Llama and related models, and the names of GPT-2's weights.

    model_type  differences from Llama's decoder
    llama       scaled rotary frequencies (rope_scaling linear, llama3), biases
    mistral     a sliding window
    qwen2       biases of queries, keys and values; a sliding window
    qwen3       RMSNorm of queries and keys; a sliding window
    smollm3     layers without rotary embedding
    gpt2        other layers, and other names and layouts of weights

A RecurrentLM has a model_type of its own, lowtri_recurrent, which transformers does not know. Unsupported keys that change the
computation raise an error that names them. :mod:`lowtri.nn.checkpoint` describes how a mask is stored.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lowtri.errors import DataError
from lowtri.masks import Mask, as_mask, causal, window
from lowtri.nn.config import DecoderConfig, GPT2Config, RecurrentConfig
from lowtri.nn.files import brief
from lowtri.nn.positions import RopeScaling

# For each model_type: transformers' class, and the fields of DecoderConfig that it always has, or that a key of config.json sets.
_BIASES = {"qkv_bias": "attention_bias", "o_bias": "attention_bias", "mlp_bias": "mlp_bias"}
_KINDS: dict[str, tuple[str, dict[str, str | bool]]] = {
    "llama": ("LlamaForCausalLM", {**_BIASES}),
    "mistral": ("MistralForCausalLM", {}),
    "qwen2": ("Qwen2ForCausalLM", {"qkv_bias": True}),
    "qwen3": ("Qwen3ForCausalLM", {"qkv_bias": "attention_bias", "o_bias": "attention_bias", "qk_norm": True}),
    "smollm3": ("SmolLM3ForCausalLM", {**_BIASES}),
    "gpt2": ("GPT2LMHeadModel", {}),
}
_RECURRENT = "lowtri_recurrent"

# Keys that change the computation, and their supported values. They may be absent or null.
_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
    "partial_rotary_factor": (1.0,),
    "rope_interleaved": (False,),
    "quantization_config": (),
    "num_experts": (0,),
    "num_local_experts": (0,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
}
# Keys that are fields of DecoderConfig under the same name; the other fields derive from several keys.
_SIZES = ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"]
_SIZES += ["num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings"]
_GPT2_KEYS = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_positions": "max_position_embeddings",
    "n_inner": "intermediate_size",
    "layer_norm_epsilon": "rms_norm_eps",
}
_LLAMA3_KEYS = {name: name for name in ("factor", "low_freq_factor", "high_freq_factor")}
_LLAMA3_KEYS["original_max_position_embeddings"] = "original"
_MOST_LAYERS = 10_000
_LONGEST_MASK = 4096  # characters


def from_json(
    content: Mapping[str, Any], path: Path, mask: Mask | str | None = None
) -> DecoderConfig | RecurrentConfig:
    """The configuration in the content of a config.json; ``path`` is named in messages, ``mask`` replaces the mask of the file.

    Raises:
        DataError: for another kind of model, an unsupported value of a key, or a value of the wrong type.
    """
    mask_text = None if mask is None else repr(as_mask(mask))
    if content.get("model_type") != _RECURRENT:
        with damaged_config(path, "a decoder"):
            return _decoder_config(content, path, mask_text)
    known = {key: content[key] for key in RecurrentConfig.__dataclass_fields__ if content.get(key) is not None}
    with damaged_config(path, "a recurrent model"):
        config = RecurrentConfig(**known)
    return config if mask_text is None else replace(config, mask=mask_text)


@contextmanager
def damaged_config(path: Path, model: str) -> Iterator[None]:
    """What untrusted sizes raise becomes a DataError that names the file and the kind of model."""
    try:
        yield
    except DataError:
        raise
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else brief(error)
        raise DataError(f"{path} does not describe {model}: {reason}") from None


def check_layers(layers: Any, path: Path) -> None:
    """Limit the number of layers, before anything is built for each."""
    if isinstance(layers, int) and layers > _MOST_LAYERS:
        raise DataError(f"{path}: got num_hidden_layers {layers!r:.30}; at most {_MOST_LAYERS} are read")


def gpt2_config(**sizes: Any) -> GPT2Config:
    """The configuration of a file, which may leave out what is usual in a GPT-2."""
    return GPT2Config(**{"rms_norm_eps": 1e-5, "intermediate_size": 4 * sizes.get("hidden_size", 0)} | sizes)


def _decoder_config(content: Mapping[str, Any], path: Path, mask_text: str | None) -> DecoderConfig:
    kind = content.get("model_type")
    if not isinstance(kind, str) or kind not in _KINDS:
        raise DataError(f"{path}: got model_type {kind!r:.60}; lowtri's Decoder reads {', '.join(_KINDS)}")
    # transformers 5 has rope_parameters, earlier versions rope_scaling.
    rope = {**(content.get("rope_scaling") or {}), **(content.get("rope_parameters") or {})} if kind != "gpt2" else {}
    for key, supported in _SUPPORTED.items():
        for value in (content.get(key), rope.get(key)):
            if value is not None and value not in supported:
                only = " or ".join(map(repr, supported)) or "none"
                raise DataError(f"{path}: got {key} {value!r:.60}; lowtri's Decoder has {only} only")
    names = {name: name for name in _SIZES} | (_GPT2_KEYS if kind == "gpt2" else {})
    fields: dict[str, Any] = {"tie_word_embeddings": kind in ("smollm3", "gpt2")}
    fields |= {ours: content[theirs] for theirs, ours in names.items() if content.get(theirs) is not None}
    check_layers(fields.get("num_hidden_layers"), path)
    fields |= {"eos_token_id": end_ids(content.get("eos_token_id"), path)}
    fields |= {"mask": mask_text or _declared_mask(content, path)}
    if kind == "gpt2":
        return gpt2_config(**fields)
    for name, switch in _KINDS[kind][1].items():
        fields[name] = bool(content.get(switch)) if isinstance(switch, str) else switch
    theta = rope.get("rope_theta") or content.get("rope_theta") or (2e6 if kind == "smollm3" else 1e4)
    layers = _rotary_layers(content) if kind == "smollm3" else None
    return DecoderConfig(**fields, rope_theta=theta, rope_scaling=_scaling_of(rope, content, path), rope_layers=layers)


def _declared_mask(content: Mapping[str, Any], path: Path) -> str:
    """The mask that the file declares. Lengths of documents and padding describe one text: only the caller sets them."""
    text = content.get("lowtri_mask")
    if text is None:
        return _window_mask(content, path)
    if not isinstance(text, str) or len(text) > _LONGEST_MASK:
        got = f"{len(text)} characters" if isinstance(text, str) else repr(text)[:60]
        raise DataError(
            f"{path}: lowtri_mask: got {got}; expected a mask as text, of at most {_LONGEST_MASK} characters"
        )
    match = re.search(r"\b(documents|keys)\b", text)
    if match:
        raise DataError(
            f"{path}: lowtri_mask names {match.group()}, which describes one text and not a model: a file may not set it.\n"
            "Fix: give the mask yourself: from_pretrained(path, mask=...), or --mask"
        )
    return text


def _window_mask(content: Mapping[str, Any], path: Path) -> str:
    """The mask of a file without ``lowtri_mask``: causal, with a sliding window if every layer has one."""
    kind, n, types = content["model_type"], content.get("sliding_window"), content.get("layer_types")
    if n is None or kind in ("llama", "gpt2") or (kind != "mistral" and not content.get("use_sliding_window")):
        return "causal"
    if kind != "mistral":
        if types is None:
            first, layers = content.get("max_window_layers", 28), range(content.get("num_hidden_layers", 0))
            full = _rotary_layers(content) if kind == "smollm3" else [index < first for index in layers]
            types = ["full_attention" if one else "sliding_attention" for one in full]
        if set(types) == {"full_attention"}:
            return "causal"
        if set(types) != {"sliding_attention"}:
            raise DataError(f"{path}: layer_types differ from layer to layer, lowtri's Decoder has one mask for all")
    return sliding_mask(n, path)


def sliding_mask(n: Any, path: Path) -> str:
    """The mask of a ``sliding_window``."""
    if not isinstance(n, int) or isinstance(n, bool):  # it becomes a part of the mask's text
        raise DataError(f"{path}: got sliding_window {n!r:.60}; expected a whole number")
    return f"causal & window({n})"


def _rotary_layers(content: Mapping[str, Any]) -> tuple[bool, ...]:
    """For each layer of a SmolLM3, whether it has rotary embedding: no_rope_layers is 1 where it does."""
    layers, interval = content.get("num_hidden_layers", 0), content.get("no_rope_layer_interval", 4)
    rotary = content.get("no_rope_layers") or [(index + 1) % interval != 0 for index in range(layers)]
    return tuple(map(bool, rotary))[:layers]


def _scaling_of(rope: Mapping[str, Any], content: Mapping[str, Any], path: Path) -> RopeScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind == "linear":
        return RopeScaling(rope["factor"])
    if kind == "llama3":
        original = rope.get("original_max_position_embeddings") or content["max_position_embeddings"]
        values = {**rope, "original_max_position_embeddings": original}
        return RopeScaling(**{ours: values[theirs] for theirs, ours in _LLAMA3_KEYS.items()})
    raise DataError(
        f"{path}: got rope_scaling of rope_type {kind!r:.60}; lowtri's Decoder has default, linear and llama3"
    )


def end_ids(value: Any, path: Path) -> tuple[int, ...] | None:
    """The ids of ``eos_token_id``, which is one id, a list of them, or null."""
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(index, int) and not isinstance(index, bool) for index in ids):
        raise DataError(f"{path}: got eos_token_id {value!r:.60}; expected an id, or a list of ids")
    return tuple(ids) or None


def to_json(config: DecoderConfig | RecurrentConfig) -> dict[str, Any]:
    """The content of config.json: of the first model_type from which the same configuration is read again.

    Raises:
        DataError: if there is none, such as for a GPT-2 with another head_dim.
    """
    if isinstance(config, RecurrentConfig):
        return {"model_type": _RECURRENT, **asdict(config), "lowtri_mask": config.mask}
    if isinstance(config, GPT2Config):
        heads, kv_heads, size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        if heads != kv_heads or heads * size != config.hidden_size:
            raise DataError(
                f"save: GPT-2's config.json has no keys for head_dim {size} and num_key_value_heads {kv_heads} "
                f"with hidden_size {config.hidden_size} and num_attention_heads {heads}.\n"
                "Fix: GPT2Config without head_dim and num_key_value_heads, or a DecoderConfig."
            )
        return _written(config, "gpt2", None)
    n = _window_size(config)
    for kind in ("llama", "qwen2", "qwen3", "smollm3") if n is None else ("mistral", "qwen2", "qwen3"):
        content = _written(config, kind, n)
        read = _decoder_config(content, Path("config.json"), config.mask)
        same = all(getattr(read, name) == getattr(config, name) for name in (*_BIASES, "qk_norm"))
        if same and (read.rope_layers is None) == (config.rope_layers is None):
            return content
    raise DataError(
        "save: no model_type of transformers has this decoder's biases, norms and mask together:\n"
        f"  qk_norm {config.qk_norm}, qkv_bias {config.qkv_bias}, o_bias {config.o_bias}, mlp_bias {config.mlp_bias}, "
        f"mask {config.mask}, rope_layers {config.rope_layers}\n"
        "Fix: qkv_bias and o_bias alike, without the rest."
    )


def _written(config: DecoderConfig, kind: str, window_size: int | None) -> dict[str, Any]:
    ends = list(config.eos_token_id or ()) or None
    content: dict[str, Any] = {"model_type": kind, "lowtri_mask": repr(as_mask(config.mask))}
    content |= {"architectures": [_KINDS[kind][0]], "bos_token_id": None}
    content["eos_token_id"] = ends[0] if ends is not None and len(ends) == 1 else ends
    if kind == "gpt2":
        names = {name: name for name in ("vocab_size", "tie_word_embeddings")} | _GPT2_KEYS
        content |= {theirs: getattr(config, ours) for theirs, ours in names.items()}
        return content | {"activation_function": "gelu_new"}
    content |= {name: getattr(config, name) for name in (*_SIZES, "rope_theta", "mlp_bias")}
    content |= {"hidden_act": "silu", "attention_bias": config.o_bias, "rope_scaling": None}
    if (scaling := config.rope_scaling) is not None and scaling.linear:
        content["rope_scaling"] = {"rope_type": "linear", "factor": scaling.factor}
    elif scaling is not None:
        bounds = {theirs: getattr(scaling, ours) for theirs, ours in _LLAMA3_KEYS.items()}
        content["rope_scaling"] = {"rope_type": "llama3", **bounds}
    if config.rope_layers is not None:
        content["pad_token_id"] = None  # or transformers defaults to SmolLM3's
        content["no_rope_layers"] = [int(rotary) for rotary in config.rope_layers]
    if window_size is not None:
        content |= {"sliding_window": window_size, "use_sliding_window": True, "max_window_layers": 0}
    return content


def _window_size(config: DecoderConfig) -> int | None:
    """The n of ``window(n)``, with or without ``causal &``, which it implies; None for any other mask."""
    mask = as_mask(config.mask)
    match = re.search(r"window\((\d+)\)", repr(mask))
    n = int(match.group(1)) if match else 0
    return n if match and mask in (window(n), causal() & window(n), window(n) & causal()) else None


# GPT-2 checkpoints store projections as (in, out), and those of queries, keys and values as one fused tensor.

_NAMES = {
    "wte": "embed_tokens",
    "wpe": "embed_positions",
    "ln_f": "norm",
    "ln_1": "input_layernorm",
    "ln_2": "post_attention_layernorm",
    "attn.c_proj": "self_attn.o_proj",
    "mlp.c_fc": "up_proj",
    "mlp.c_proj": "down_proj",
}
_MAPS = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")


def from_conv1d(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of a GPT-2 checkpoint (old and new names), renamed and transposed for a :class:`Decoder` of GPT-2."""
    renamed: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        match = re.fullmatch(r"(?:transformer\.)?(?:h\.(\d+)\.)?([\w.]+)\.(weight|bias|masked_bias)", name)
        layer, part, kind = match.groups() if match else (None, name, "")
        if part == "attn":
            continue  # old checkpoints store the causal table as a weight
        if part in _MAPS and kind == "weight" and tensor.ndim == 2:
            tensor = tensor.T
        prefix = "model." if layer is None else f"model.layers.{layer}."
        if part == "attn.c_attn" and tensor.ndim and tensor.shape[0] % 3 == 0:
            renamed |= {f"{prefix}{own}.{kind}": x for own, x in zip(_QKV, tensor.chunk(3), strict=True)}
        else:
            renamed[f"{prefix}{_NAMES[part]}.{kind}" if part in _NAMES else name] = tensor
    return renamed


def to_conv1d(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inverse: tensors of such a decoder in the checkpoint's names and layout."""
    theirs = {ours: theirs for theirs, ours in _NAMES.items()} | {_QKV[0]: "attn.c_attn"}
    renamed: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        match = re.fullmatch(r"model\.(?:layers\.(\d+)\.)?([\w.]+)\.(weight|bias)", name)
        layer, part, kind = match.groups() if match else (None, "", "")
        if part == _QKV[0]:
            tensor = torch.cat([tensors[name.replace(part, other)] for other in _QKV])
        elif part in _QKV:
            continue
        prefix = "transformer." if layer is None else f"transformer.h.{layer}."
        new = theirs.get(part)
        renamed[f"{prefix}{new}.{kind}" if new else name] = tensor.T if new in _MAPS and kind == "weight" else tensor
    return renamed

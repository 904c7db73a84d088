"""The weights of the package glassllm, 0.85 million parameters in NumPy's npz, as a Decoder.

The model is Llama-style with its own names, projections stored as (in, out), and interleaved rotary pairs. Its tokenizer
merges characters, not bytes; unknown characters become ``<unk>``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lowtri.errors import DataError

if TYPE_CHECKING:
    import torch
    from tokenizers import Tokenizer

    from lowtri.nn import Decoder

__all__ = ["read"]

_SIZES = {
    "vocab_size": "vocab_size",
    "d_model": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "max_len": "max_position_embeddings",
    "rope_base": "rope_theta",
    "eps": "rms_norm_eps",
}
_NAMES = {
    "norm1.gamma": "input_layernorm",
    "norm2.gamma": "post_attention_layernorm",
    "attn.W_Q": "self_attn.q_proj",
    "attn.W_K": "self_attn.k_proj",
    "attn.W_V": "self_attn.v_proj",
    "attn.W_O": "self_attn.o_proj",
    "ffn.W1": "mlp.gate_proj",
    "ffn.W3": "mlp.up_proj",
    "ffn.W2": "mlp.down_proj",
}
_SPECIAL = ("<pad>", "<unk>", "<bos>", "<eos>")


def read(path: Path, dtype: torch.dtype | str | None = None) -> Decoder:
    """The model in an npz file of glassllm, float32 unless ``dtype`` is given, with the tokenizer in the same folder.

    Raises:
        DataError: if a file does not have the package's format.
    """
    import torch

    from lowtri.nn.decoder import Decoder, DecoderConfig
    from lowtri.nn.pretrained import as_dtype

    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        found: Mapping[str, Any] = json.loads(str(arrays.pop("__config__")))
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"{path} is no file of glassllm: {error}") from None
    sizes = {ours: found[theirs] for theirs, ours in _SIZES.items()}
    width = int(arrays["blocks.0.ffn.W1"].shape[1])
    config = DecoderConfig(
        **sizes, intermediate_size=width, tie_word_embeddings=True, eos_token_id=(_SPECIAL.index("<eos>"),)
    )
    tensors = {
        name: torch.from_numpy(np.ascontiguousarray(values, np.float32))
        for name, values in _renamed(arrays, config.num_attention_heads, config.num_key_value_heads).items()
    }
    model = Decoder(config)
    model.load_state_dict(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]})
    model.tokenizer = _tokenizer(path.with_name(path.name.replace(".npz", ".tokenizer.json")))
    wanted = as_dtype(dtype)
    return (model if wanted is None else model.to(wanted)).eval()


def _renamed(arrays: Mapping[str, Any], heads: int, kv_heads: int) -> dict[str, Any]:
    """Arrays with Llama's names, as (out, in), with half-split rotary pairs."""
    from lowtri.nn.rotary import from_pairs

    rotary = {"attn.W_Q": heads, "attn.W_K": kv_heads}
    found = {"model.embed_tokens.weight": arrays["E"], "model.norm.weight": arrays["norm_f.gamma"]}
    for name, values in arrays.items():
        if name.startswith("blocks."):
            _, layer, part = name.split(".", 2)
            rows = from_pairs(values.T, rotary[part]) if part in rotary else values.T
            found[f"model.layers.{layer}.{_NAMES[part]}.weight"] = rows
    return found


def _tokenizer(path: Path) -> Tokenizer:
    """Character merges within words; a space is U+2581 and belongs to the following word."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        merges = [(left, right) for left, right in found["merges"]]
        tokens = [*_SPECIAL, *found["alphabet"], *(left + right for left, right in merges)]
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"{path} is no tokenizer of glassllm: {error}") from None
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Replace(" ", "▁")])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n|▁*[^▁\n]+|▁+"), behavior="isolated")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("<unk>", "⁇"), decoders.Replace("▁", " "), decoders.Fuse()])
    return tokenizer

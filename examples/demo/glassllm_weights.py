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
import torch

from lowtri.errors import DataError
from lowtri.nn import Decoder, DecoderConfig
from lowtri.nn.names import Packaged
from lowtri.nn.positions import from_pairs

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["GLASSLLM", "load_glassllm", "read"]

GLASSLLM = Packaged(
    "glassllm",
    "0.1.0",
    "glassllm/weights/en.npz",
    "261ae219ab98caa1f3641e23deb3d9d91b7b7a276f991cbd494f67cfa5abce4d",
    "pip install glassllm==0.1.0   (3 MB)",
)

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


def load_glassllm() -> Decoder:
    """The model of the installed package, with its tokenizer.

    >>> import lowtri
    >>> "".join(lowtri.generate(load_glassllm(), "The White", 1))
    ' Queen'

    Raises:
        DataError: if the package is not installed, or a file is damaged.
    """
    return read(GLASSLLM.path())


def read(path: Path) -> Decoder:
    """The model in an npz file of glassllm, in float32, with the tokenizer in the same folder.

    Raises:
        DataError: if a file does not have the package's format.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        stored: Mapping[str, Any] = json.loads(str(arrays.pop("__config__")))
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"{path} is not a file of glassllm: {error}") from None
    sizes = {ours: stored[theirs] for theirs, ours in _SIZES.items()}
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
    return model.eval()


def _renamed(arrays: Mapping[str, Any], heads: int, kv_heads: int) -> dict[str, Any]:
    """Arrays with Llama's names, as (out, in), with half-split rotary pairs."""
    rotary = {"attn.W_Q": heads, "attn.W_K": kv_heads}
    renamed = {"model.embed_tokens.weight": arrays["E"], "model.norm.weight": arrays["norm_f.gamma"]}
    for name, values in arrays.items():
        if name.startswith("blocks."):
            _, layer, part = name.split(".", 2)
            rows = from_pairs(values.T, rotary[part]) if part in rotary else values.T
            renamed[f"model.layers.{layer}.{_NAMES[part]}.weight"] = rows
    return renamed


def _tokenizer(path: Path) -> Tokenizer:
    """Character merges within words; a space is U+2581 and belongs to the following word."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        merges = [(left, right) for left, right in stored["merges"]]
        tokens = [*_SPECIAL, *stored["alphabet"], *(left + right for left, right in merges)]
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"{path} is not a tokenizer of glassllm: {error}") from None
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Replace(" ", "▁")])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n|▁*[^▁\n]+|▁+"), behavior="isolated")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("<unk>", "⁇"), decoders.Replace("▁", " "), decoders.Fuse()])
    return tokenizer

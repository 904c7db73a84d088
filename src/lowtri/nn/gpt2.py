"""GPT-2's layers: learned position embeddings, LayerNorm and GELU instead of Llama's rotary embedding, RMSNorm and SwiGLU.

    ids -> embedding + position -> layers of (LayerNorm, attention, LayerNorm, GELU), each added to its input -> LayerNorm

>>> from lowtri.nn import Decoder
>>> from lowtri.nn.gpt2 import GPT2Config
>>> model = Decoder(GPT2Config(vocab_size=50, hidden_size=32, num_hidden_layers=2, max_position_embeddings=16))
>>> model(torch.tensor([[3, 1, 4, 1, 5]])).shape
torch.Size([1, 5, 50])

Source: Radford et al. 2019.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from lowtri.masks import Mask
from lowtri.nn.config import DecoderConfig, GPT2Config
from lowtri.nn.llama import Embedding, embed
from lowtri.nn.multi_head import MultiHeadAttention

if TYPE_CHECKING:
    from lowtri.nn.cache import Cache

__all__ = ["GPT2Body", "GPT2Config", "from_conv1d", "to_conv1d"]


class GPT2Body(nn.Module):
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.embed_positions = Embedding(config.max_position_embeddings, config.hidden_size)
        self.layers = nn.ModuleList(_Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.LayerNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self,
        ids: Tensor,
        mask: Mask,
        positions: NDArray[np.int64] | None,
        cache: Cache | None,
        attend: Callable[..., Any] | None,
    ) -> Tensor:
        # Padding, position -1, may take any embedding.
        index = np.arange(ids.shape[1]) if positions is None else np.maximum(positions, 0)
        x = embed(ids, self.embed_tokens)  # (B, N, hidden)
        x = x + self.embed_positions(torch.from_numpy(index).to(ids.device))
        for number, layer in enumerate(self.layers):
            x = layer(x, mask=mask, positions=positions, cache=cache, layer=number, attend=attend)
        return self.norm(x)


class _Layer(nn.Module):
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.self_attn = MultiHeadAttention(
            config.hidden_size,
            config.num_attention_heads,
            config.num_key_value_heads,
            head_dim=config.head_dim,
            mask=config.mask,
            bias=True,
        )
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size)
        self.input_layernorm = nn.LayerNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = nn.LayerNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), **options)
        y = self.up_proj(self.post_attention_layernorm(x))
        return x + self.down_proj(nn.functional.gelu(y, approximate="tanh"))


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
    theirs = {ours: theirs for theirs, ours in _NAMES.items()}
    renamed: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        match = re.fullmatch(r"model\.(?:layers\.(\d+)\.)?([\w.]+)\.(weight|bias)", name)
        if match is None:
            renamed[name] = tensor
            continue
        layer, part, kind = match.groups()
        if part == _QKV[0]:
            tensor = torch.cat([tensors[name.replace(_QKV[0], other)] for other in _QKV])
        elif part in _QKV:
            continue
        own = theirs.get(part, "attn.c_attn")
        prefix = "transformer." if layer is None else f"transformer.h.{layer}."
        renamed[f"{prefix}{own}.{kind}"] = tensor.T if own in _MAPS and kind == "weight" else tensor
    return renamed

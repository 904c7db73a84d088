"""Llama's layers, below the output projection; :mod:`lowtri.nn.gpt2` has those of GPT-2.

ids -> embedding -> layers of (RMSNorm, attention, RMSNorm, SwiGLU), each added to its input -> RMSNorm
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from lowtri.errors import CallError
from lowtri.masks import Mask
from lowtri.nn.config import DecoderConfig
from lowtri.nn.joined import joined
from lowtri.nn.multi_head import MultiHeadAttention
from lowtri.nn.rotary import rotary_tables

if TYPE_CHECKING:
    from lowtri.nn.cache import Cache

__all__ = ["Embedding", "LlamaBody", "embed"]


class Embedding(nn.Embedding):
    """torch's, which draws no weights on the meta device: for that torch loads its compiler, which takes a second."""

    def reset_parameters(self) -> None:
        if not self.weight.is_meta:
            super().reset_parameters()


class LlamaBody(nn.Module):
    """``model`` in a checkpoint."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(_Layer(config, index) for index in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self,
        ids: Tensor,
        mask: Mask,
        positions: NDArray[np.int64] | None,
        cache: Cache | None,
        attend: Callable[..., Any] | None,
    ) -> Tensor:
        x = embed(ids, self.embed_tokens)  # (B, N, hidden)
        c = self.config
        rotary = rotary_tables(
            np.arange(ids.shape[1]) if positions is None else positions,
            c.head_dim,
            c.rope_theta,
            c.rope_scaling,
            device=x.device,
        )
        for index, layer in enumerate(self.layers):
            x = layer(x, mask=mask, positions=positions, cache=cache, layer=index, rotary=rotary, attend=attend)
        return self.norm(x)


class _Layer(nn.Module):
    def __init__(self, config: DecoderConfig, index: int) -> None:
        super().__init__()
        rotary = config.rope_layers is None or config.rope_layers[index]
        self.self_attn = MultiHeadAttention(
            config.hidden_size,
            config.num_attention_heads,
            config.num_key_value_heads,
            head_dim=config.head_dim,
            mask=config.mask,
            rope_theta=config.rope_theta if rotary else None,
            rope_scaling=config.rope_scaling,
            bias=config.qkv_bias,
            out_bias=config.o_bias,
            qk_norm=config.rms_norm_eps if config.qk_norm else None,
        )
        self.mlp = _SwiGLU(config.hidden_size, config.intermediate_size, config.mlp_bias)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), **options)
        return x + self.mlp(self.post_attention_layernorm(x))


class _SwiGLU(nn.Module):
    def __init__(self, size: int, width: int, bias: bool) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(size, width, bias=bias)
        self.up_proj = nn.Linear(size, width, bias=bias)
        self.down_proj = nn.Linear(width, size, bias=bias)
        self.gate_up_proj: nn.Linear | None = None  # the first two in one, after join_projections

    def forward(self, x: Tensor) -> Tensor:
        if self.gate_up_proj is None:
            gate, up = self.gate_proj(x), self.up_proj(x)
        else:
            gate, up = self.gate_up_proj(x).chunk(2, -1)
        return self.down_proj(nn.functional.silu(gate) * up)

    def join_projections(self) -> None:
        """Replace the two projections of the input by one: fewer calls for a single token."""
        if self.gate_up_proj is None:
            self.gate_up_proj = joined(self.gate_proj, self.up_proj)
            del self.gate_proj, self.up_proj


def embed(ids: Tensor, table: nn.Embedding) -> Tensor:
    """Embeddings (B, N, hidden) of ids (B, N); ids outside of the vocabulary raise a CallError."""
    try:
        return table(ids)
    except IndexError:
        raise CallError(
            f"Decoder: ids reach from {int(ids.min())} to {int(ids.max())}, but the vocabulary has the ids "
            f"0 .. {table.num_embeddings - 1}. Fix: the tokenizer that the model was trained with."
        ) from None

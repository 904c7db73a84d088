"""The layers of a Decoder, below the output projection.

Llama   ids -> embedding -> layers of (RMSNorm, attention, RMSNorm, SwiGLU), each added to its input -> RMSNorm
GPT-2   ids -> embedding + position -> layers of (LayerNorm, attention, LayerNorm, GELU), each added to its input -> LayerNorm

>>> from lowtri.nn import Decoder, GPT2Config
>>> model = Decoder(GPT2Config(vocab_size=50, hidden_size=32, num_hidden_layers=2, max_position_embeddings=16))
>>> model(torch.tensor([[3, 1, 4, 1, 5]])).shape
torch.Size([1, 5, 50])

Source: Touvron et al. 2023; Radford et al. 2019.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from lowtri.errors import CallError
from lowtri.masks import Mask
from lowtri.nn.attention import MultiHeadAttention
from lowtri.nn.config import DecoderConfig
from lowtri.nn.few_tokens import fuse_linears
from lowtri.nn.positions import rotary_tables

if TYPE_CHECKING:
    from lowtri.nn.attention import Cache

__all__ = ["Embedding", "GPT2Body", "LlamaBody", "embed"]


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
        self.layers = nn.ModuleList(_LlamaLayer(config, index) for index in range(config.num_hidden_layers))
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


class _LlamaLayer(nn.Module):
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
        self.gate_up_proj: nn.Linear | None = None  # the first two in one, after fuse_projections

    def forward(self, x: Tensor) -> Tensor:
        if self.gate_up_proj is None:
            gate, up = self.gate_proj(x), self.up_proj(x)
        else:
            gate, up = self.gate_up_proj(x).chunk(2, -1)
        return self.down_proj(nn.functional.silu(gate) * up)

    def fuse_projections(self) -> None:
        """Replace the two projections of the input by one: fewer calls for a single token."""
        if self.gate_up_proj is None:
            self.gate_up_proj = fuse_linears(self.gate_proj, self.up_proj)
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


class GPT2Body(nn.Module):
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.embed_positions = Embedding(config.max_position_embeddings, config.hidden_size)
        self.layers = nn.ModuleList(_GPT2Layer(config) for _ in range(config.num_hidden_layers))
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


class _GPT2Layer(nn.Module):
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

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
from lowtri.nn.config import DecoderConfig, GPT2Config
from lowtri.nn.positions import rotary_tables
from lowtri.nn.quantized import fuse_linears

if TYPE_CHECKING:
    from lowtri.nn.attention import Cache


class Embedding(nn.Embedding):
    """torch's, which draws no weights on the meta device: for that torch loads its compiler, which takes a second."""

    def reset_parameters(self) -> None:
        if not self.weight.is_meta:
            super().reset_parameters()


def body_of(config: DecoderConfig) -> LlamaBody:
    """The newly initialised layers of a configuration."""
    return GPT2Body(config) if isinstance(config, GPT2Config) else LlamaBody(config)


class LlamaBody(nn.Module):
    """``model`` in a checkpoint."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(_LlamaLayer(config, index) for index in range(config.num_hidden_layers))
        self.norm: nn.Module = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self,
        ids: Tensor,
        mask: Mask,
        positions: NDArray[np.int64] | None,
        cache: Cache | None,
        attend: Callable[..., Any] | None,
    ) -> Tensor:
        try:
            x = self.embed_tokens(ids)  # (B, N, hidden)
        except IndexError:
            raise CallError(
                f"Decoder: ids reach from {int(ids.min())} to {int(ids.max())}, but the vocabulary has the ids "
                f"0 .. {self.embed_tokens.num_embeddings - 1}. Fix: the tokenizer that the model was trained with."
            ) from None
        x, rotary = self.with_positions(x, np.arange(ids.shape[1]) if positions is None else positions)
        for index, layer in enumerate(self.layers):
            x = layer(x, mask=mask, positions=positions, cache=cache, layer=index, rotary=rotary, attend=attend)
        return self.norm(x)

    def with_positions(self, x: Tensor, positions: NDArray[np.int64]) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
        """The input of the first layer, and the rotary tables of all of them."""
        c = self.config
        return x, rotary_tables(positions, c.head_dim, c.rope_theta, c.rope_scaling, device=x.device)


class GPT2Body(LlamaBody):
    def __init__(self, config: DecoderConfig) -> None:
        nn.Module.__init__(self)
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.embed_positions = Embedding(config.max_position_embeddings, config.hidden_size)
        self.layers = nn.ModuleList(_GPT2Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.LayerNorm(config.hidden_size, config.rms_norm_eps)

    def with_positions(self, x: Tensor, positions: NDArray[np.int64]) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
        index = np.maximum(positions, 0)  # padding, position -1, may take any embedding
        return x + self.embed_positions(torch.from_numpy(index).to(x.device)), None


class _Layer(nn.Module):
    """Attention and a feed-forward network, each of the normalized input, added to it."""

    self_attn: MultiHeadAttention
    input_layernorm: nn.Module
    post_attention_layernorm: nn.Module

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), **options)
        return x + self.feed_forward(self.post_attention_layernorm(x))

    def feed_forward(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class _LlamaLayer(_Layer):
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

    def feed_forward(self, x: Tensor) -> Tensor:
        return self.mlp(x)


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


class _GPT2Layer(_Layer):
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

    def feed_forward(self, x: Tensor) -> Tensor:
        return self.down_proj(nn.functional.gelu(self.up_proj(x), approximate="tanh"))

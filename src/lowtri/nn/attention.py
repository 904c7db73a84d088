"""Self-attention as it is taught, with one head; and multi-head, grouped-query and multi-query attention.

    MaskedSelfAttention             the projections W_q, W_k and W_v
    MultiHeadAttention
        num_kv_heads == num_heads   multi-head attention          (Vaswani et al. 2017)
        1 < num_kv_heads < ...      grouped-query attention       (Ainslie et al. 2023)
        num_kv_heads == 1           multi-query attention         (Shazeer 2019)

and the layers of a Decoder, below the output projection, for which the projections have Llama's names:

    Llama   ids -> embedding -> layers of (RMSNorm, attention, RMSNorm, SwiGLU), each added to its input -> RMSNorm
    GPT-2   ids -> embedding + position -> layers of (LayerNorm, attention, LayerNorm, GELU), each added to its input -> LayerNorm

Source of the layers: Touvron et al. 2023; Radford et al. 2019.
"""

from __future__ import annotations

from collections.abc import Callable
from numbers import Integral
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from lowtri.dispatch.attend import attention
from lowtri.errors import CallError
from lowtri.masks import Mask, as_mask
from lowtri.masks.tile import check_flag, short_repr
from lowtri.nn.config import DecoderConfig, GPT2Config, check_size, head_size
from lowtri.nn.positions import RopeScaling, apply_rotary, rotary_tables


class Cache(Protocol):
    """Keys and values of all layers. A cache may also have ``attend``, as :class:`lowtri.KVCache` does, which saves time."""

    mask: Mask

    def next_positions(self, n: int, layer: int = 0) -> NDArray[np.int64]:
        """Positions of a layer's next ``n`` tokens, (n,) or (B, n)."""
        ...

    def append(self, k: Any, v: Any, positions: Any = None, layer: int = 0) -> tuple[Any, Any, NDArray[np.int64]]:
        """Add new tokens; return the keys and values that their queries can see, and the positions of these."""
        ...


def _check_tensor(module: str, name: str, x: Any) -> None:
    if not isinstance(x, Tensor):
        raise CallError(
            f"{module}: {name} is {type(x).__name__}; expected a torch tensor. Fix: torch.as_tensor({name})."
        )


class MaskedSelfAttention(nn.Module):
    """Single-head self-attention; the mask defines which keys each query sees.

    >>> import torch
    >>> _ = torch.manual_seed(42)
    >>> attend = MaskedSelfAttention(2)
    >>> write_a_poem = torch.tensor([[1.16, 0.23], [0.57, 1.36], [4.41, -2.16]])
    >>> output, weights = attend(write_a_poem, return_weights=True)
    >>> weights.detach()
    tensor([[1.0000, 0.0000, 0.0000],
            [0.3606, 0.6394, 0.0000],
            [0.0722, 0.0320, 0.8959]])

    Args:
        d_model: the size of a token's vector, and of q, k and v.
        mask: the module's own mask, or its text.

    Source: Vaswani et al. 2017, section 3.2.1.
    """

    def __init__(self, d_model: int, mask: Mask | str = "causal") -> None:
        super().__init__()
        check_size("MaskedSelfAttention", "d_model", d_model)
        self.mask = as_mask(mask)
        # Created in this order, so that a seed gives the same weights as in the common tutorials.
        self.W_q = nn.Linear(d_model, d_model, bias=False)
        self.W_k = nn.Linear(d_model, d_model, bias=False)
        self.W_v = nn.Linear(d_model, d_model, bias=False)

    def forward(self, x: Tensor, mask: Mask | str | None = None, *, return_weights: bool = False) -> Any:
        """Attention of the tokens of ``x`` to each other.

        Args:
            x: (N, d_model) or (B, N, d_model).
            mask: replaces the module's own mask in this call; ``"full"`` hides nothing.
            return_weights: also return the weights.

        Returns:
            output in the shape of ``x``; with ``return_weights`` also the weights, (N, N) or (B, N, N).

        Raises:
            CallError: if ``x`` has another shape.
            MaskError: if the mask is a bare tensor, in which the meaning of True is ambiguous.
        """
        _check_tensor("MaskedSelfAttention", "x", x)
        if type(return_weights) is not bool:
            return_weights = check_flag("MaskedSelfAttention", "return_weights", return_weights)
        if x.ndim not in (2, 3) or x.shape[-1] != self.W_q.in_features:
            raise CallError(
                f"MaskedSelfAttention: x is {tuple(x.shape)}, expected (N, {self.W_q.in_features}) "
                f"or (B, N, {self.W_q.in_features})."
            )
        q, k, v = (project(x).unsqueeze(-3) for project in (self.W_q, self.W_k, self.W_v))  # (..., 1, N, D): one head
        result: Any = attention(q, k, v, self.mask if mask is None else mask, return_weights=return_weights)
        return (result[0].squeeze(-3), result[1].squeeze(-3)) if return_weights else result.squeeze(-3)

    def extra_repr(self) -> str:
        return f"mask={self.mask!r}"


class MultiHeadAttention(nn.Module):
    """Self-attention, or cross-attention when a context is given.

    >>> import torch
    >>> from lowtri.nn import MultiHeadAttention
    >>> attend = MultiHeadAttention(64, 8, num_kv_heads=2, rope_theta=10000.0)
    >>> attend(torch.randn(3, 10, 64)).shape
    torch.Size([3, 10, 64])
    >>> translate = MultiHeadAttention(64, 8, mask="full", context_size=32)
    >>> output, weights = translate(torch.randn(3, 10, 64), torch.randn(3, 7, 32), return_weights=True)
    >>> weights.shape
    torch.Size([3, 8, 10, 7])

    Args:
        d_model: the size of a token's vector.
        num_heads: number of query heads.
        num_kv_heads: number of key/value heads, a divisor of ``num_heads``; default ``num_heads``.
        head_dim: the size of a head; default ``d_model // num_heads``.
        context_size: the size of a context's vectors, for cross-attention; default ``d_model``.
        mask: the module's own mask, or its text.
        rope_theta: the base of rotary embedding; None: no rotary embedding.
        rope_scaling: scaled rotary frequencies, for a longer context.
        bias: whether the four projections have biases.
        out_bias: whether the output projection has a bias; default ``bias``.
        qk_norm: the epsilon of an RMSNorm of queries and keys, per head, before rotary embedding (Henry et al. 2020); None:
            no such norm.

    Raises:
        CallError: if the sizes do not fit together.
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        *,
        head_dim: int | None = None,
        context_size: int | None = None,
        mask: Mask | str = "causal",
        rope_theta: float | None = None,
        rope_scaling: RopeScaling | None = None,
        bias: bool = False,
        out_bias: bool | None = None,
        qk_norm: float | None = None,
    ) -> None:
        super().__init__()
        self.d_model, self.num_heads = d_model, num_heads
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.mask = as_mask(mask)
        self.rope_theta = rope_theta
        self.rope_scaling = rope_scaling
        sizes = {"d_model": d_model, "num_heads": num_heads, "num_kv_heads": self.num_kv_heads}
        self.head_dim = head_size("MultiHeadAttention", head_dim, rope_theta is not None, sizes)
        if context_size is not None and not isinstance(context_size, Integral):
            check_size("MultiHeadAttention", "context_size", context_size)
        self.context_size, width = context_size or d_model, self.num_kv_heads * self.head_dim
        bias = check_flag("MultiHeadAttention", "bias", bias)
        out_bias = bias if out_bias is None else check_flag("MultiHeadAttention", "out_bias", out_bias)
        self.q_proj = nn.Linear(d_model, num_heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(self.context_size, width, bias=bias)
        self.v_proj = nn.Linear(self.context_size, width, bias=bias)
        self.qkv_proj: nn.Linear | None = None  # the three in one, after fuse_projections
        self.o_proj = nn.Linear(num_heads * self.head_dim, d_model, bias=out_bias)
        self.q_norm, self.k_norm = (None if qk_norm is None else nn.RMSNorm(self.head_dim, qk_norm) for _ in range(2))

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        mask: Mask | str | None = None,
        positions: Any = None,
        context_positions: Any = None,
        cache: Cache | None = None,
        layer: int = 0,
        rotary: tuple[Tensor, Tensor] | None = None,
        attend: Callable[..., Any] | None = None,
        return_weights: bool = False,
    ) -> Any:
        """Attention of the tokens of ``x`` to each other (and to the cache), or to a context.

        Args:
            x: (B, N, d_model) or (N, d_model).
            context: (B, M, context_size) or (M, context_size); keys and values come from it instead of ``x``.
            mask: replaces the module's own mask in this call.
            positions: positions of ``x``, (N,) or (B, N), -1 for padding; default 0 .. N-1, or the next ones in the cache.
            context_positions: positions of the context, default 0 .. M-1; the mask compares them with ``positions``.
            cache: a :class:`lowtri.KVCache` with this module's mask; ``x`` then holds the new tokens only.
            layer: this module's layer number in the cache.
            rotary: rotary tables of ``positions``, if several layers share them.
            attend: a function with the arguments of :func:`lowtri.attention`, called instead of it, such as
                ``ContextParallel.attend`` where other processes hold the rest of the tokens.
            return_weights: also return the weights.

        Returns:
            output in the shape of ``x``; with ``return_weights`` also the weights, (B, Hq, N, Nk), or (Hq, N, Nk) without a batch.
        """
        _check_tensor("MultiHeadAttention", "x", x)
        if context is not None:
            _check_tensor("MultiHeadAttention", "context", context)
        if attend is not None and not callable(attend):
            raise CallError(
                f"MultiHeadAttention: attend is {short_repr(attend)}; expected a function. Fix: attend=lowtri.attention, or None."
            )
        if type(return_weights) is not bool:
            return_weights = check_flag("MultiHeadAttention", "return_weights", return_weights)
        if cache is not None and not hasattr(cache, "mask"):
            raise CallError(f"MultiHeadAttention: cache is {type(cache).__name__}. Fix: lowtri.KVCache(mask).")
        batched = x.ndim != 2
        if not batched:
            x, context = x[None], None if context is None else context[None]
        self._check(x, context, cache)
        mask = self.mask if mask is None else as_mask(mask)
        if cache is not None and mask is not cache.mask and mask != cache.mask:
            raise CallError(
                f"MultiHeadAttention: the mask is {mask!r}, but the cache drops keys by {cache.mask!r}.\n"
                "Fix: KVCache(mask) with the same mask."
            )
        source = x if context is None else context
        if self.qkv_proj is None:
            parts = (self.q_proj(x), self.k_proj(source), self.v_proj(source))
        else:
            width = self.num_kv_heads * self.head_dim
            parts = self.qkv_proj(x).split([self.num_heads * self.head_dim, width, width], -1)
        counts = (self.num_heads, self.num_kv_heads, self.num_kv_heads)
        q, k, v = (
            part.reshape(*part.shape[:2], count, self.head_dim).transpose(1, 2)  # (B, N, H * D) -> (B, H, N, D)
            for part, count in zip(parts, counts, strict=True)
        )
        q_positions = k_positions = positions  # None: 0 .. N-1
        if context is not None:
            q_positions = np.arange(x.shape[1]) if positions is None else positions
            k_positions = np.arange(context.shape[1]) if context_positions is None else context_positions
        elif cache is not None and positions is None:
            q_positions = cache.next_positions(x.shape[1], layer)
        if rotary is None and self.rope_theta is not None:
            rotary = self.tables(np.arange(x.shape[1]) if q_positions is None else q_positions, x.device)
        q, k = self.normalize_and_rotate(q, k, rotary)
        through_cache = None if attend is not None or return_weights else getattr(cache, "attend", None)
        if through_cache is not None:
            result: Any = through_cache(q, k, v, q_positions, layer)
        else:
            if cache is not None:
                k, v, k_positions = cache.append(k, v, q_positions, layer)
            result = (attend or attention)(
                q, k, v, mask, q_positions=q_positions, k_positions=k_positions, return_weights=return_weights
            )
        output, weights = result if return_weights else (result, None)  # (B, Hq, N, D)
        output = self.o_proj(output.transpose(1, 2).flatten(2))  # (B, N, d_model)
        if not batched:
            output, weights = output[0], None if weights is None else weights[0]
        return (output, weights) if return_weights else output

    def tables(self, positions: Any, device: Any = None) -> tuple[Tensor, Tensor] | None:
        """Rotary tables of positions (N,) or (B, N); None without rotary embedding."""
        if self.rope_theta is None:
            return None
        return rotary_tables(positions, self.head_dim, self.rope_theta, self.rope_scaling, device=device)

    def normalize_and_rotate(self, q: Tensor, k: Tensor, rotary: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor]:
        """Queries and keys (..., H, N, D) after the module's norm and rotary embedding, if any."""
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rope_theta is None or rotary is None:
            return q, k
        return apply_rotary(q, *rotary), apply_rotary(k, *rotary)

    def fuse_projections(self) -> None:
        """Replace the projections of queries, keys and values by one: fewer calls for a single token. For self-attention only."""
        if self.qkv_proj is None:
            self.qkv_proj = fuse_linears(self.q_proj, self.k_proj, self.v_proj)
            del self.q_proj, self.k_proj, self.v_proj

    def _check(self, x: Tensor, context: Tensor | None, cache: Cache | None) -> None:
        if x.ndim != 3 or x.shape[2] != self.d_model:
            raise CallError(
                f"MultiHeadAttention: x is {tuple(x.shape)}, expected (B, N, {self.d_model}) or (N, {self.d_model})."
            )
        if context is None:
            if self.context_size != self.d_model:
                raise CallError(
                    f"MultiHeadAttention: there is no context, but context_size is {self.context_size}. "
                    "Fix: pass context."
                )
            return
        if self.qkv_proj is not None:
            raise CallError(
                "MultiHeadAttention: got a context, but its projections are joined, for self-attention.\n"
                "Fix: leave out fuse_projections(), or attend to x alone."
            )
        if context.ndim != 3 or context.shape[2] != self.context_size or context.shape[0] != x.shape[0]:
            raise CallError(
                f"MultiHeadAttention: context is {tuple(context.shape)}, expected "
                f"({x.shape[0]}, M, {self.context_size}), with the batch of x."
            )
        if cache is not None or self.rope_theta is not None:
            extra, why = "a cache", "a context does not grow"
            if cache is None:
                extra, why = "rope_theta", "the positions of x and of a context are unrelated"
            raise CallError(f"MultiHeadAttention: got a context with {extra}, but {why}.\nFix: leave {extra} out.")

    def extra_repr(self) -> str:
        return f"heads={self.num_heads}, kv_heads={self.num_kv_heads}, head_dim={self.head_dim}, mask={self.mask!r}"


class Embedding(nn.Embedding):
    """torch's, which draws no weights on the meta device: for that torch loads its compiler, which takes a second."""

    def reset_parameters(self) -> None:
        if not self.weight.is_meta:
            super().reset_parameters()


class Body(nn.Module):
    """``model`` in a checkpoint."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        n = config.max_position_embeddings
        self.embed_positions = Embedding(n, config.hidden_size) if isinstance(config, GPT2Config) else None
        self.layers = nn.ModuleList(_Layer(config, index) for index in range(config.num_hidden_layers))
        self.norm = _norm(config)

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
        known, rotary = np.arange(ids.shape[1]) if positions is None else positions, None
        if self.embed_positions is None:
            c = self.config
            rotary = rotary_tables(known, c.head_dim, c.rope_theta, c.rope_scaling, device=x.device)
        else:  # padding, position -1, may take any embedding
            x = x + self.embed_positions(torch.from_numpy(np.maximum(known, 0)).to(x.device))
        for index, layer in enumerate(self.layers):
            x = layer(x, mask=mask, positions=positions, cache=cache, layer=index, rotary=rotary, attend=attend)
        return self.norm(x)


def _norm(config: DecoderConfig) -> nn.Module:
    kind = nn.LayerNorm if isinstance(config, GPT2Config) else nn.RMSNorm
    return kind(config.hidden_size, config.rms_norm_eps)


class _Layer(nn.Module):
    """Attention and a feed-forward network, each of the normalized input, added to it."""

    def __init__(self, config: DecoderConfig, index: int) -> None:
        super().__init__()
        gpt2 = isinstance(config, GPT2Config)
        rotary = not gpt2 and (config.rope_layers is None or config.rope_layers[index])
        self.self_attn = MultiHeadAttention(
            config.hidden_size,
            config.num_attention_heads,
            config.num_key_value_heads,
            head_dim=config.head_dim,
            mask=config.mask,
            rope_theta=config.rope_theta if rotary else None,
            rope_scaling=config.rope_scaling,
            bias=gpt2 or config.qkv_bias,
            out_bias=gpt2 or config.o_bias,
            qk_norm=config.rms_norm_eps if config.qk_norm and not gpt2 else None,
        )
        self.mlp = None if gpt2 else _SwiGLU(config.hidden_size, config.intermediate_size, config.mlp_bias)
        if gpt2:
            self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size)
            self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size)
        self.input_layernorm, self.post_attention_layernorm = _norm(config), _norm(config)

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), **options)
        y = self.post_attention_layernorm(x)
        if self.mlp is not None:
            return x + self.mlp(y)
        return x + self.down_proj(nn.functional.gelu(self.up_proj(y), approximate="tanh"))


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


def fuse_linears(*layers: nn.Linear) -> nn.Linear:
    """One layer whose outputs are those of the layers, one after the other; it has no gradients."""
    biases = [layer.bias for layer in layers if layer.bias is not None]
    weight = torch.cat([layer.weight.detach() for layer in layers])  # (sum of out, in)
    result = nn.Linear(weight.shape[1], weight.shape[0], bias=bool(biases), device="meta")
    result.weight = nn.Parameter(weight, requires_grad=False)
    if biases:
        result.bias = nn.Parameter(torch.cat([bias.detach() for bias in biases]), requires_grad=False)
    return result

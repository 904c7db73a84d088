"""Self-attention as it is taught, with one head; and multi-head, grouped-query and multi-query attention.

    MaskedSelfAttention             the projections W_q, W_k and W_v
    MultiHeadAttention
        num_kv_heads == num_heads   multi-head attention          (Vaswani et al. 2017)
        1 < num_kv_heads < ...      grouped-query attention       (Ainslie et al. 2023)
        num_kv_heads == 1           multi-query attention         (Shazeer 2019)

The projections of the second have Llama's names, so the decoder uses this module unchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from lowtri.dispatch.attend import attention
from lowtri.errors import CallError
from lowtri.masks import Mask, as_mask
from lowtri.nn.positions import RopeScaling, apply_rotary, rotary_tables
from lowtri.nn.quantized import fuse_linears


class Cache(Protocol):
    """Keys and values of all layers. A cache may also have ``contiguous``, as :class:`lowtri.KVCache` does."""

    mask: Mask

    def next_positions(self, n: int, layer: int = 0) -> NDArray[np.int64]:
        """Positions of a layer's next ``n`` tokens, (n,) or (B, n)."""
        ...

    def append(self, k: Any, v: Any, positions: Any = None, layer: int = 0) -> tuple[Any, Any, NDArray[np.int64]]:
        """Add new tokens; return the keys and values that their queries can see, and the positions of these."""
        ...


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
        if d_model < 1:
            raise CallError(f"MaskedSelfAttention: d_model is {d_model}; expected at least 1.")
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
        if x.ndim not in (2, 3) or x.shape[-1] != self.W_q.in_features:
            raise CallError(
                f"MaskedSelfAttention: x is {tuple(x.shape)}, expected (N, {self.W_q.in_features}) "
                f"or (B, N, {self.W_q.in_features})."
            )
        q, k, v = self.W_q(x), self.W_k(x), self.W_v(x)  # (N, D) or (B, N, D)
        if x.ndim == 3:
            q, k, v = q[:, None], k[:, None], v[:, None]  # one head: (B, 1, N, D)
        mask = self.mask if mask is None else mask
        if not return_weights:
            output = attention(q, k, v, mask)
            return output[:, 0] if x.ndim == 3 else output
        output, weights = attention(q, k, v, mask, return_weights=True)
        return (output[:, 0], weights[:, 0]) if x.ndim == 3 else (output, weights)

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
        self.mask, self.rope_theta, self.rope_scaling = as_mask(mask), rope_theta, rope_scaling
        if min(d_model, num_heads, self.num_kv_heads) < 1 or num_heads % self.num_kv_heads:
            raise CallError(
                f"MultiHeadAttention: d_model {d_model}, num_heads {num_heads}, num_kv_heads {self.num_kv_heads}: "
                "each key/value head serves an equal number of query heads.\n"
                "Fix: num_heads a multiple of num_kv_heads."
            )
        if head_dim is None and d_model % num_heads:
            raise CallError(
                f"MultiHeadAttention: d_model {d_model} is not a multiple of num_heads {num_heads}. "
                "Fix: change one of them, or pass head_dim=."
            )
        self.head_dim = d_model // num_heads if head_dim is None else head_dim
        if rope_theta is not None and self.head_dim % 2:
            raise CallError(
                f"MultiHeadAttention: head_dim is {self.head_dim}, but rotary embedding rotates entries in pairs. "
                "Fix: an even head_dim."
            )
        self.context_size, width = context_size or d_model, self.num_kv_heads * self.head_dim
        self.q_proj = nn.Linear(d_model, num_heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(self.context_size, width, bias=bias)
        self.v_proj = nn.Linear(self.context_size, width, bias=bias)
        self.qkv_proj: nn.Linear | None = None  # the three in one, after fuse_projections
        self.o_proj = nn.Linear(num_heads * self.head_dim, d_model, bias=bias if out_bias is None else out_bias)
        self.q_norm: nn.Module | None = None if qk_norm is None else nn.RMSNorm(self.head_dim, qk_norm)
        self.k_norm: nn.Module | None = None if qk_norm is None else nn.RMSNorm(self.head_dim, qk_norm)

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
        q, k, v = self._projected(x, source)  # (B, Hq, N, D), (B, Hkv, Nk, D) twice
        q_positions = k_positions = positions  # None: 0 .. N-1
        if context is not None:
            q_positions = np.arange(x.shape[1]) if positions is None else positions
            k_positions = np.arange(context.shape[1]) if context_positions is None else context_positions
        elif cache is not None and positions is None:
            q_positions = cache.next_positions(x.shape[1], layer)
        if rotary is None and self.rope_theta is not None:
            rotary = self.tables(np.arange(x.shape[1]) if q_positions is None else q_positions, x.device)
        q, k = self.normalize_and_rotate(q, k, rotary)
        if cache is not None:
            k, v, k_positions = cache.append(k, v, q_positions, layer)
            if getattr(cache, "contiguous", False):
                q_positions = k_positions = None  # attention's defaults, which it need not read
        result: Any = (attend or attention)(
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

    def _projected(self, x: Tensor, source: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if self.qkv_proj is None:
            q, k, v = self.q_proj(x), self.k_proj(source), self.v_proj(source)
        else:
            width = self.num_kv_heads * self.head_dim
            q, k, v = self.qkv_proj(x).split([self.num_heads * self.head_dim, width, width], -1)
        return self._heads(q, self.num_heads), self._heads(k, self.num_kv_heads), self._heads(v, self.num_kv_heads)

    def _heads(self, x: Tensor, count: int) -> Tensor:
        return x.reshape(x.shape[0], x.shape[1], count, self.head_dim).transpose(1, 2)  # (B, N, H * D) -> (B, H, N, D)

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

"""``flash_attn_func`` and its packed forms: every sequence of a batch has the same length."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lowtri.integrations.flash_attn.arguments import check_shapes, check_slopes, check_tensor
from lowtri.integrations.flash_attn.real import real_function
from lowtri.integrations.flash_attn.settings import Settings, aligned, seen

__all__ = ["flash_attn_func", "flash_attn_kvpacked_func", "flash_attn_qkvpacked_func"]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Attention in flash-attn's layout.

    >>> import torch
    >>> from lowtri.integrations.flash_attn import flash_attn_func
    >>> q, kv = torch.randn(2, 3, 4, 8), torch.randn(2, 5, 2, 8)  # (B, N, H, D)
    >>> flash_attn_func(q, kv, kv, causal=True).shape
    torch.Size([2, 3, 4, 8])

    Args:
        q: (B, Nq, Hq, D).  k, v: (B, Nk, Hkv, D); query head h uses key/value head h // (Hq // Hkv).
        dropout_p: the probability with which a weight is dropped, also in evaluation.
        softmax_scale: factor on the scores; 1 / sqrt(D) by default.
        causal: the last query sees the last key, the one before it one key less, and so on.
        window_size: (left, right), how many keys each query sees before and after its own position, which is that of the last key
            for the last query; -1 for no limit.
        softcap: c > 0 caps the scaled scores at c * tanh(score / c); 0: no cap.
        alibi_slopes: (Hq,) or (B, Hq); -slope * distance is added to the scores. No gradient.
        deterministic: accepted; lowtri is always deterministic.
        return_attn_probs: also return the log-sum-exp (B, Hq, Nq), inf where a query sees no key, and with dropout the weights
            (B, Hq, Nq, Nk) before dropout, else an empty tensor.

    Returns:
        (B, Nq, Hq, D), 0 where a query sees no key; or a tuple with the two above.

    Raises:
        CallError: if the arguments do not fit together.
    """
    name = "flash_attn_func"
    options: tuple[Any, ...] = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes)
    if (real := real_function(name, q)) is not None:
        return real(q, k, v, *options, deterministic, return_attn_probs)
    for argument, x in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, argument, x, "(B, N, H, D)")
    check_shapes(name, q, k, v)
    check_slopes(name, alibi_slopes, q.shape[0], q.shape[2])
    settings = Settings(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, return_attn_probs)
    at = aligned(q.shape[1], k.shape[1])
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # (B, H, N, D)
    output, lse, weights = settings.run(q, k, v, settings.mask(name), at)
    output = output.transpose(1, 2).contiguous()  # callers use view
    return (output, seen(lse), weights) if return_attn_probs else output


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """:func:`flash_attn_func` of qkv (B, N, 3, H, D)."""
    check_tensor("flash_attn_qkvpacked_func", "qkv", qkv, "(B, N, 3, H, D)")
    options: tuple[Any, ...] = (
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )
    q, k, v = qkv.unbind(2)
    return flash_attn_func(q, k, v, *options)


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """:func:`flash_attn_func` of q (B, Nq, Hq, D) and kv (B, Nk, 2, Hkv, D)."""
    check_tensor("flash_attn_kvpacked_func", "kv", kv, "(B, N, 2, H, D)")
    options: tuple[Any, ...] = (
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )
    k, v = kv.unbind(2)
    return flash_attn_func(q, k, v, *options)

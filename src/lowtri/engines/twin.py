"""torch's ``scaled_dot_product_attention`` with torch's meanings exactly, on lowtri's engines."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from lowtri.engines.attend import attention
from lowtri.errors import CallError
from lowtri.masks.atoms import causal, full
from lowtri.masks.holders import table
from lowtri.masks.mask import Mask

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

__all__ = ["scaled_dot_product_attention"]


@overload
def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor: ...
@overload
def scaled_dot_product_attention(
    query: NDArray[Any],
    key: NDArray[Any],
    value: NDArray[Any],
    attn_mask: NDArray[Any] | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> NDArray[Any]: ...
def scaled_dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """torch's function with torch's meanings exactly, on lowtri's engines; for code that cannot be changed yet.

    >>> import numpy as np, lowtri
    >>> x = np.eye(3)
    >>> bool(np.allclose(lowtri.scaled_dot_product_attention(x, x, x, is_causal=True), lowtri.attention(x, x, x, "causal")))
    True

    Args:
        query: (..., L, E).  key: (..., S, E).  value: (..., S, Ev). The dimensions in front broadcast.
        attn_mask: bools, True = attend, or numbers to add to the scores; broadcasts to (..., L, S).
        dropout_p: the probability with which a weight is dropped, whether or not a module trains.
        is_causal: query i sees keys 0 .. i: aligned at the top left, also where L and S differ.
        scale: factor on the scores; 1 / sqrt(E) by default.
        enable_gqa: the third dimension from the end is heads, and each of key's serves neighbouring ones of query's.

    Returns:
        (..., L, Ev), an array of query's kind and dtype. One difference: a query that sees nothing gives 0 on every device.

    Raises:
        CallError: where torch raises too.

    Source: the documentation of torch.nn.functional.scaled_dot_product_attention.
    """
    if attn_mask is not None and is_causal:
        raise _error("attn_mask and is_causal exclude each other, as in torch.")
    arrays = {"query": query, "key": key, "value": value}
    for name, x in arrays.items():
        if not hasattr(x, "dtype") or x.ndim < 2:
            came = tuple(x.shape) if hasattr(x, "shape") else type(x).__name__
            raise _error(
                f"{name} is {came}, but it takes an array or a tensor of at least two dimensions, (..., N, E)."
            )
    shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in arrays.items())
    q, k, v = (x[None] if x.ndim == 2 and not enable_gqa else x for x in (query, key, value))
    if min(q.ndim, k.ndim, v.ndim) < 3:
        raise _error(f"enable_gqa=True, but where are the heads? {shapes}. Fix: (..., H, N, E).")
    heads = [x.shape[-3] for x in (q, k, v)]
    if not enable_gqa and any(n not in (1, max(heads)) for n in heads):
        raise _error(f"the heads do not broadcast: {shapes}. Fix: enable_gqa=True if key/value heads are shared.")
    most = heads[0] if enable_gqa else 0 if 0 in heads else max(heads)
    try:
        batch = np.broadcast_shapes(*(tuple(x.shape[:-3]) for x in (q, k, v)))
    except ValueError:
        raise _error(f"the dimensions in front do not broadcast: {shapes}.") from None
    (nq, nk), rows = (q.shape[-2], k.shape[-2]), math.prod(batch)
    # One head that serves all is a group; only unequal ones must be spread out.
    shared = heads[1:] if enable_gqa or heads[1:] == [1, 1] else [most, most]
    q, k, v = (
        _spread(x, (*batch, n, *x.shape[-2:])).reshape(rows, n, *x.shape[-2:])
        for x, n in zip((q, k, v), (most, *shared), strict=True)
    )
    lead = (*batch, most) if max(query.ndim, key.ndim, value.ndim) > 2 else ()
    mask, bias = _mask(attn_mask, is_causal, (*batch, most, nq, nk))
    places = np.arange(nq) if is_causal and nq != nk else None  # index is place: what torch means by is_causal
    output = attention(q, k, v, mask, scale=scale, bias=bias, dropout=dropout_p, q_positions=places)
    return output.reshape(*lead, nq, value.shape[-1])


def _mask(attn_mask: Any, is_causal: bool, shape: tuple[int, ...]) -> tuple[Mask, Any]:
    """torch's mask as a mask of ours and a bias (B|1, H|1, L|1, S|1).  shape: (..., H, L, S)."""
    if attn_mask is None:
        return (causal() if is_causal else full()), None
    if not hasattr(attn_mask, "dtype"):
        raise _error(f"attn_mask is {type(attn_mask).__name__}, but it takes an array or a tensor.")
    kind, came = str(attn_mask.dtype).removeprefix("torch."), tuple(attn_mask.shape)
    if kind != "bool" and "float" not in kind:
        raise _error(f"attn_mask is {kind}, but it takes bools (True = attend) or numbers to add. Fix: attn_mask != 0.")
    padded = (1,) * (len(shape) - len(came)) + came
    if len(came) < 2 or len(padded) > len(shape) or any(n not in (1, m) for n, m in zip(padded, shape, strict=True)):
        raise _error(f"attn_mask is {came}, which does not broadcast to {shape}.")
    if math.prod(padded[:-3]) > 1:  # dimensions in front become rows, as those of query do
        padded = (*shape[:-3], *padded[-3:])
        attn_mask = _spread(attn_mask, padded)
    attn_mask = attn_mask.reshape(math.prod(padded[:-3]), *padded[-3:])
    if kind != "bool":
        return full(), attn_mask
    if 0 in shape:
        return full(), None  # nobody is there to be hidden
    wide = _spread(attn_mask, (*attn_mask.shape[:2], *shape[-2:]))
    return table(wide[0, 0] if wide.shape[:2] == (1, 1) else wide), None


def _spread(x: Any, shape: tuple[int, ...]) -> Any:
    return np.broadcast_to(x, shape) if isinstance(x, np.ndarray) else x.expand(shape)


def _error(text: str) -> CallError:
    return CallError(f"scaled_dot_product_attention: {text}")

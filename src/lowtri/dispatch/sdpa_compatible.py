"""torch's ``scaled_dot_product_attention`` with torch's meanings exactly, on lowtri's engines."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from lowtri.dispatch.attend import attention
from lowtri.dispatch.dense_tables import lowest_number, read_bools, read_numbers
from lowtri.dispatch.prepared import is_traced
from lowtri.errors import CallError
from lowtri.masks.array_masks import Keys, keys, table
from lowtri.masks.formulas import Full, causal, full
from lowtri.masks.mask import Mask
from lowtri.masks.tile import check_flag
from lowtri.ops.arguments import plain_array
from lowtri.ops.call import CallOptions

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

_NAME = "scaled_dot_product_attention"


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
    """A drop-in replacement for torch's function of this name, with torch's meanings of all arguments, on lowtri's engines.

    >>> import numpy as np, lowtri
    >>> x = np.eye(3)
    >>> bool(np.allclose(lowtri.scaled_dot_product_attention(x, x, x, is_causal=True), lowtri.attention(x, x, x, "causal")))
    True

    Args:
        query: (..., L, E).  key: (..., S, E).  value: (..., S, Ev). The leading dimensions broadcast. Or jagged nested tensors.
        attn_mask: bools, True = attend, or numbers to add to the scores; broadcasts to (..., L, S); or torch's
            ``causal_upper_left`` or ``causal_lower_right``. One of keys alone, (S,) or (B, 1, 1, S), is never widened to all pairs.
        dropout_p: the probability with which a weight is dropped, in training and in evaluation alike.
        is_causal: query i sees keys 0 .. i, also where L and S differ (upper-left alignment); of these, those that attn_mask shows.
        scale: factor on the scores; 1 / sqrt(E) by default.
        enable_gqa: dimension -3 is the heads, and neighbouring query heads share a key/value head.

    Returns:
        (..., L, Ev), an array or tensor like ``query``, in its dtype. One difference from torch: a query that sees no key gives 0
        on every device.

    Raises:
        CallError: where torch also raises. It is a RuntimeError, as in torch.

    Source: the documentation of torch.nn.functional.scaled_dot_product_attention.
    """
    if type(is_causal) is not bool or type(enable_gqa) is not bool:
        is_causal, enable_gqa = check_flag(_NAME, "is_causal", is_causal), check_flag(_NAME, "enable_gqa", enable_gqa)
    if type(query).__name__ == "NestedTensor" and not is_traced():  # torch's class of jagged tensors
        return _jagged(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    usual = _is_usual(query, key, value, enable_gqa)
    q = query
    k, v = key, value
    front: tuple[int, ...] = ()
    if not usual:
        arrays, front = _to_4d(query, key, value, enable_gqa)
        q, k, v = arrays
        if q.shape[-1] == k.shape[-1] == 0:  # every score is an empty sum
            q, k = _of_zeros(q), _of_zeros(k)
            scale = 1.0
    mask, bias, q_positions = _read_masks(attn_mask, is_causal, q, k, front)
    output = attention(q, k, v, mask, scale=scale, bias=bias, dropout=dropout_p, q_positions=q_positions)
    if usual:
        return output
    batch_shape = front if max(query.ndim, key.ndim, value.ndim) > 2 else ()
    return output.reshape(*batch_shape, *output.shape[-2:])


def _jagged(
    q: Any, k: Any, v: Any, attn_mask: Any, dropout_p: float, is_causal: bool, scale: float | None, enable_gqa: bool
) -> Any:
    """Jagged nested tensors, as torch takes them: without attn_mask."""
    from lowtri.dispatch.jagged import attend_jagged

    if attn_mask is not None:
        raise _error(
            "attn_mask is not taken with nested tensors. Fix: lowtri.attention(q, k, v, mask), from position 0 of each sequence."
        )
    if not enable_gqa and q.dim() == getattr(k, "ndim", 0) == 4 and q.shape[1] != k.shape[1]:
        raise _error(f"query has {q.shape[1]} heads, and key {k.shape[1]}. Fix: enable_gqa=True.")
    options = CallOptions(scale, dropout=dropout_p)
    return attend_jagged(attention, q, k, v, causal() if is_causal else full(), options, name=_NAME, from_top=True)


def _is_usual(q: Any, k: Any, v: Any, enable_gqa: bool) -> bool:
    """Whether attention takes these as they are, as in nearly all calls: arrays (B, H, N, E) with nothing to broadcast.

    What else must hold of arrays, attention checks.
    """
    try:
        of_q = q.shape
        of_k, of_v = k.shape, v.shape
        if not len(of_q) == len(of_k) == len(of_v) == 4:
            return False
    except (AttributeError, RuntimeError, TypeError):  # no arrays, or nested tensors
        return False
    if of_q[0] != of_k[0] or of_q[3] != of_k[3] or of_q[3] == 0 or (of_k != of_v and of_k[:3] != of_v[:3]):
        return False
    heads, kv_heads = of_q[1], of_k[1]
    return bool(heads == kv_heads or (enable_gqa and 0 < kv_heads <= heads and heads % kv_heads == 0))


def _to_4d(query: Any, key: Any, value: Any, enable_gqa: bool) -> tuple[tuple[Any, ...], tuple[int, ...]]:
    """Queries, keys and values (B, H, N, E), broadcast, and the leading dimensions (..., H) of the output."""
    if not is_traced():
        query, key, value = (plain_array(*named, _NAME) for named in (("query", query), ("key", key), ("value", value)))
    for name, x in (("query", query), ("key", key), ("value", value)):
        if isinstance(x, type) or not hasattr(x, "dtype") or x.ndim < 2:
            got = type(x).__name__ if isinstance(x, type) or not hasattr(x, "shape") else tuple(x.shape)
            raise _error(f"{name} is {got}, but it takes an array or a tensor of at least two dimensions, (..., N, E).")
    q, k, v = (x[None] if x.ndim == 2 and not enable_gqa else x for x in (query, key, value))
    if min(q.ndim, k.ndim, v.ndim) < 3:
        raise _error(f"enable_gqa=True, but where are the heads? {_shapes(query, key, value)}. Fix: (..., H, N, E).")
    heads = [x.shape[-3] for x in (q, k, v)]
    if not enable_gqa and any(n not in (1, max(heads)) for n in heads):
        shapes = _shapes(query, key, value)
        raise _error(f"the heads do not broadcast: {shapes}. Fix: enable_gqa=True if key/value heads are shared.")
    most = heads[0] if enable_gqa else max(heads)
    if 0 in heads and not enable_gqa:
        most = 0
    batch = _broadcast(*(tuple(x.shape[:-3]) for x in (q, k, v)))
    if batch is None:
        raise _error(f"the leading dimensions do not broadcast: {_shapes(query, key, value)}.")
    rows = math.prod(batch)
    if enable_gqa and most == 0:
        k, v = k[..., :0, :, :], v[..., :0, :, :]
        heads = [0, 0, 0]
    # A single key/value head is a group; other unequal heads are expanded.
    shared = heads[1:] if enable_gqa or (most and heads[1:] == [1, 1]) else [most, most]
    arrays = (
        _spread(x, (*batch, n, *x.shape[-2:])).reshape(rows, n, *x.shape[-2:])
        for x, n in zip((q, k, v), (most, *shared), strict=True)
    )
    return tuple(arrays), (*batch, most)


def _positions_of(bias: Any, nq: int, nk: int) -> NDArray[np.int64]:
    """The positions of queries under torch's CausalBias, which has a shape and an alignment, and no data.

    It compares indices: query i sees keys 0 .. i under ``causal_upper_left``, keys 0 .. i + Nk - Nq under ``causal_lower_right``.
    """
    made_for = (bias.seq_len_q, bias.seq_len_kv)
    if made_for != (nq, nk):
        raise _error(f"attn_mask is a CausalBias of {made_for}, but there are {nq} queries and {nk} keys.")
    return np.arange(nq) + (0 if bias.variant.name == "UPPER_LEFT" else nk - nq)


def _read_masks(
    attn_mask: Any, is_causal: bool, q: Any, k: Any, front: tuple[int, ...]
) -> tuple[Mask | str, Any, NDArray[np.int64] | None]:
    """The mask, the bias (B|1, H|1, L|1, S|1) and the positions of the queries in torch's ``attn_mask`` and ``is_causal``.

    Args:
        q, k: in four dimensions.  front: the leading dimensions of the output, () where they are those of q.
    """
    if attn_mask is None:
        positions = _from_the_top(q, k) if is_causal else None
        return "causal" if is_causal else "full", None, positions  # Python keeps the hash of a text
    nq, nk = q.shape[-2], k.shape[-2]
    if type(attn_mask).__name__ == "CausalBias" and hasattr(attn_mask, "variant"):  # results of operators have none
        if is_causal:
            raise _error("attn_mask is a CausalBias, and is_causal=True another one. Fix: one of them, as in torch.")
        return "causal", None, _positions_of(attn_mask, nq, nk)
    if not is_traced():
        attn_mask = plain_array("attn_mask", attn_mask, _NAME)
    if isinstance(attn_mask, type) or not hasattr(attn_mask, "dtype"):
        raise _error(f"attn_mask is {type(attn_mask).__name__}, but it takes an array or a tensor.")
    kind, given_shape = str(attn_mask.dtype).removeprefix("torch."), tuple(attn_mask.shape)
    if kind != "bool" and "float" not in kind:
        raise _error(f"attn_mask is {kind}, but it takes bools (True = attend) or numbers to add. Fix: attn_mask != 0.")
    shape = (*(front or q.shape[:2]), nq, nk)
    padded = (1,) * (len(shape) - len(given_shape)) + given_shape
    if not given_shape or len(padded) > len(shape) or any(n not in (1, m) for n, m in zip(padded, shape, strict=True)):
        raise _error(f"attn_mask is {given_shape}, which does not broadcast to {shape}.")
    if math.prod(padded[:-3]) > 1:  # leading dimensions are flattened, as those of query are
        padded = (*shape[:-3], *padded[-3:])
        attn_mask = _spread(attn_mask, padded)
    attn_mask = attn_mask.reshape(math.prod(padded[:-3]), *padded[-3:])
    triangle = causal() if is_causal else full()
    indices = _from_the_top(q, k) if is_causal else None
    if 0 in shape:  # there are no pairs
        return triangle, None if kind == "bool" else attn_mask, indices
    if kind != "bool":
        return *_numbers(attn_mask, is_causal, nq, nk, q.dtype), indices
    rows, heads, of_queries = attn_mask.shape[:3]
    if heads == of_queries == 1:  # of keys, whatever the query
        of_keys = None if is_traced() else read_bools(attn_mask, nq, nk)
        if of_keys is None:
            valid = _spread(attn_mask, (rows, 1, 1, nk))[:, 0, 0]
            of_keys = keys(valid[0] if rows == 1 else valid)
        return triangle & of_keys if is_causal else of_keys, None, indices
    if is_causal:  # the rows of a table are the last queries, so the triangle becomes part of it
        attn_mask = _spread(attn_mask, (rows, heads, nq, nk)) & _triangle(attn_mask, nq, nk)
    of_pairs = None if is_traced() else read_bools(attn_mask, nq, nk)
    if of_pairs is None:
        wide = _spread(attn_mask, (rows, heads, nq, nk))
        of_pairs = table(wide[0, 0] if rows == heads == 1 else wide)
    return of_pairs, None, None


def _from_the_top(q: Any, k: Any) -> NDArray[np.int64] | None:
    """The positions of the queries where torch's is_causal compares indices; None for the default, as many queries as keys."""
    nq, nk = q.shape[-2], k.shape[-2]
    return None if nq == nk else np.arange(nq)


def _numbers(attn_mask: Any, is_causal: bool, nq: int, nk: int, dtype: Any) -> tuple[Mask, Any]:
    """The mask and the bias in a table of numbers, (B|1, H|1, L|1, S|1)."""
    triangle = causal() if is_causal else full()
    # Whether a query has no key but those with the lowest number would depend on the triangle, too.
    greatest_hidden = -math.inf if is_causal else lowest_number(attn_mask.dtype, dtype)
    read = None if is_traced() else read_numbers(attn_mask, nq, nk, greatest_hidden)
    if read is None:
        return triangle, attn_mask
    bias = read.bias(attn_mask)
    if not is_causal:
        return read.mask, bias
    if isinstance(read.mask, Full):
        return triangle, bias
    if nq == nk or isinstance(read.mask, Keys):
        return triangle & read.mask, bias
    return triangle, attn_mask  # the rows of a table are the last queries, those of the triangle the first ones


def _triangle(like: Any, nq: int, nk: int) -> Any:
    """Query i sees keys 0 .. i: bools (L, S), an array or a tensor as ``like`` is."""
    return np.tri(nq, nk, dtype=bool) if isinstance(like, np.ndarray) else like.new_ones((nq, nk)).tril()


def _broadcast(*fronts: tuple[int, ...]) -> tuple[int, ...] | None:
    """The broadcast shape of the leading dimensions, or None. np.broadcast_shapes rejects the symbolic sizes of a trace."""
    longest = max(len(front) for front in fronts)
    out = []
    for sizes in zip(*((1,) * (longest - len(front)) + front for front in fronts), strict=True):
        size = 1
        for n in sizes:
            if n != 1 and size not in (1, n):
                return None
            size = size if n == 1 else n
        out.append(size)
    return tuple(out)


def _of_zeros(x: Any) -> Any:
    """(..., 0) -> (..., 1), zeros that keep the gradient of x."""
    if isinstance(x, np.ndarray):
        return np.zeros((*x.shape[:-1], 1), x.dtype)
    import torch

    return torch.nn.functional.pad(x, (0, 1))


def _spread(x: Any, shape: tuple[int, ...]) -> Any:
    return np.broadcast_to(x, shape) if isinstance(x, np.ndarray) else x.expand(shape)


def _shapes(query: Any, key: Any, value: Any) -> str:
    return f"query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}"


def _error(text: str) -> CallError:
    return CallError(f"{_NAME}: {text}")

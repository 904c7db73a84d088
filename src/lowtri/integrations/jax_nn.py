"""``jax.nn.dot_product_attention`` with jax's arguments and meanings, on lowtri's engines."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lowtri.dispatch.attend import attention
from lowtri.errors import CallError
from lowtri.integrations.dense_mask import read_dense_mask
from lowtri.integrations.jax_operation import JaxOptions, check_array, check_installed, operation
from lowtri.masks.array_masks import keys
from lowtri.masks.formulas import band, causal, full
from lowtri.masks.mask import Mask

if TYPE_CHECKING:
    import jax
    from numpy.typing import ArrayLike

__all__ = ["dot_product_attention"]

_NAME = "dot_product_attention"


def dot_product_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: str | None = None,
    return_residual: bool = False,
) -> Any:
    """``jax.nn.dot_product_attention`` on a CPU, with jax's meanings of all arguments; eager, under ``jax.jit``, with gradients.

    >>> import jax
    >>> x = jax.random.normal(jax.random.key(0), (2, 5, 4, 8))  # (B, T, N, H)
    >>> ours = dot_product_attention(x, x, x, is_causal=True, key_value_seq_lengths=jax.numpy.array([3, 5]))
    >>> theirs = jax.nn.dot_product_attention(x, x, x, is_causal=True, key_value_seq_lengths=jax.numpy.array([3, 5]))
    >>> bool(jax.numpy.allclose(ours, theirs, atol=1e-6))
    True

    Args:
        query: (B, T, N, H) or (T, N, H).  key, value: (B, S, K, H) or (S, K, H); N is a multiple of K.
        bias: floats added to the scores, with a gradient.  mask: bools, True = may see. Both broadcast to (B, N, T, S).
        scale: factor on the scores, a constant of a traced program; 1 / sqrt(H) by default.
        is_causal: query i sees keys 0 .. i, also where T and S differ.
        query_seq_lengths, key_value_seq_lengths: (B,), how many queries and keys of each row are real.
        local_window_size: how many keys a query sees before and after its own index; one number for both.
        implementation: None or "xla"; lowtri computes either way.
        return_residual: also return the log-sum-exp of each query's scores, (B, T, N) or (T, N), without gradient.

    Returns:
        the output, like query. One difference from jax: a query that sees no key gives 0 and a log-sum-exp of -inf, where jax
        gives the mean of all values.

    Raises:
        CallError: where jax raises a ValueError, which it is, too; for arrays on an accelerator, and a traced scale.
        EngineError: if jax is not installed.

    Source: the documentation of jax.nn.dot_product_attention.
    """
    check_installed(_NAME)
    import jax
    import jax.numpy as jnp

    if implementation not in (None, "xla"):
        raise CallError(f'{_NAME}: implementation is {implementation!r}. Fix: None or "xla", on a CPU.')
    if isinstance(scale, jax.core.Tracer):
        raise CallError(f"{_NAME}: scale is traced. Fix: a Python number, or static_argnames.")
    given = {"query": query, "key": key, "value": value, "bias": bias, "mask": mask}
    arrays = {name: None if x is None else _in_four(name, jnp.asarray(x)) for name, x in given.items()}
    lengths = {"query_seq_lengths": query_seq_lengths, "key_value_seq_lengths": key_value_seq_lengths}
    arrays |= {name: None if x is None else jnp.asarray(x) for name, x in lengths.items()}
    _check(arrays)
    q, k, v, added, visible, q_lengths, k_lengths = arrays.values()
    formula = _formula(local_window_size, bool(is_causal))
    options = JaxOptions(formula, None if scale is None else float(scale), None, None, None, return_residual, "auto")
    output, *residual = operation(_attend)(options, q, k, v, added, None, visible, q_lengths, k_lengths)
    shape = jnp.shape(query)
    if not return_residual:
        return output.reshape(shape)
    return output.reshape(shape), jax.lax.stop_gradient(residual[0]).astype(output.dtype).reshape(shape[:-1])


def _in_four(name: str, x: Any) -> Any:
    least = 3 if name in ("query", "key", "value") else 0
    if not least <= x.ndim <= 4:
        raise CallError(f"{_NAME}: {name} is {tuple(x.shape)}. Fix: four dimensions, or three without a batch.")
    return x.reshape((1,) * (4 - x.ndim) + x.shape)


def _check(arrays: dict[str, Any]) -> None:
    """Raise unless the arrays, in four dimensions, fit together."""
    q, k = arrays["query"], arrays["key"]
    (rows, _, kv_heads, size), whole = k.shape, (q.shape[0], q.shape[2], q.shape[1], k.shape[1])  # B, N, T, S
    for name in ("query", "key", "value", "bias"):
        if arrays[name] is not None:
            check_array(_NAME, name, arrays[name])
    if q.shape[::3] != (rows, size) or not kv_heads or q.shape[2] % kv_heads:
        raise CallError(
            f"{_NAME}: query is {q.shape} and key {k.shape}. Fix: (B, T, N, H) and (B, S, K, H), N a multiple of K."
        )
    if arrays["value"].shape != k.shape:
        raise CallError(f"{_NAME}: value is {arrays['value'].shape} and key {k.shape}. Fix: the same shape.")
    for name in ("key", "value"):
        if arrays[name].dtype != q.dtype:
            raise CallError(f"{_NAME}: query is {q.dtype} and {name} {arrays[name].dtype}. Fix: one dtype.")
    for name in ("bias", "mask"):
        x = arrays[name]
        if x is not None and any(n not in (1, most) for n, most in zip(x.shape, whole, strict=True)):
            raise CallError(f"{_NAME}: {name} is {x.shape}, which does not broadcast to (B, N, T, S) = {whole}.")
    if arrays["mask"] is not None and arrays["mask"].dtype != bool:
        raise CallError(
            f"{_NAME}: mask is {arrays['mask'].dtype}. Fix: bools, True = may see; numbers to add go to bias=."
        )
    for name in ("query_seq_lengths", "key_value_seq_lengths"):
        x = arrays[name]
        if x is not None and (x.shape != (rows,) or x.dtype.kind not in "iu"):
            raise CallError(f"{_NAME}: {name} is {x.dtype} {x.shape}. Fix: whole numbers, one for each row: ({rows},).")


def _formula(window: Any, is_causal: bool) -> Mask:
    """The mask that the numbers say, for queries and keys at positions from 0 on."""
    if window is None:
        return causal() if is_causal else full()
    try:
        before, after = (operator.index(n) for n in (window if isinstance(window, tuple | list) else (window, window)))
    except (TypeError, ValueError):
        before = after = -1
    if min(before, after) < 0:
        raise CallError(
            f"{_NAME}: local_window_size is {window!r}. Fix: one or two numbers from 0: keys before, after."
        )
    return band(before, 0 if is_causal else after)


def _attend(
    options: JaxOptions, q: Tensor, k: Tensor, v: Tensor, bias: Any, sinks: Any, visible: Any, *lengths: Any
) -> tuple[Tensor, ...]:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # (B, N, T, H)
    mask, positions = _mask(options.mask, visible, lengths, q.shape[2], k.shape[2])
    results: Any = attention(
        q, k, v, mask, bias=bias, scale=options.scale, q_positions=positions, return_lse=options.return_lse
    )
    return tuple(x.transpose(1, 2) for x in (results if options.return_lse else (results,)))


def _mask(
    mask: Mask, visible: Tensor | None, lengths: tuple[Tensor | None, ...], nq: int, nk: int
) -> tuple[Mask, NDArray[np.int64]]:
    """The mask, and the positions of the queries: -1 past the end of a row."""
    (q_lengths, k_lengths), first = lengths, 0
    if visible is not None:
        if visible.shape[1] > 1 or visible.shape[2] > 1:  # a table, whose last row is the last key's
            pairs = np.asarray(mask(np.arange(nq)[:, None], np.arange(nk)))
            visible, mask, first = visible & torch.from_numpy(pairs), full(), max(nk - nq, 0)
        shown = read_dense_mask(visible, nq, nk, torch.float32).lazy.mask
        mask = shown if mask == full() else mask & shown
    if k_lengths is not None:
        mask = mask & keys(lengths=k_lengths.clamp(0, nk).numpy())
    index = np.arange(nq)
    if q_lengths is None:
        return mask, index + first
    return mask, np.where(index < q_lengths.numpy()[:, None], index + first, -1)

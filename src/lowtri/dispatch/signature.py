"""The signature of a call: all that its checks and its prepared call depend on, as one flat key.

A signature has three parts:

    decode_key    options, settings, and of the arrays what stays from token to token
    keys          the shapes and the strides of k and v; and positions: None for the default, of a cache its checked positions, of a
                  user the content of q_positions and k_positions, () where one is not given
    is_decode     whether one prepared call may serve all calls with this decode_key: few queries without gradients

Signatures are made of arguments that are not checked yet. A call is kept under its signature only after it was checked, so what is
unusual has another signature, and is not found. :func:`lowtri.ops.tensors.signature` makes those of tensors.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lowtri.masks.tile import POSITION_MAX
from lowtri.ops.arguments import available_threads, whole_strides
from lowtri.ops.call import FEW_QUERIES, Call, Placement
from lowtri.ops.distance_bias import DistanceBias


def array_signature(q: Any, k: Any, v: Any, bias: Any, sinks: Any, options: tuple[Any, ...]) -> Any:
    """The signature of NumPy's arrays at the default positions; None if the memory of one does not hold its numbers as they are."""
    optional = []
    for x in (bias, sinks):
        kind = x.kind if isinstance(x, DistanceBias) else None
        array = x.values if isinstance(x, DistanceBias) else x
        if array is not None and not _is_plain(array):
            return None
        optional.append(None if array is None else (kind, array.shape, array.strides, array.dtype))
    if not (_is_plain(q) and _is_plain(k) and _is_plain(v)):
        return None
    decode_key = options, q.shape, q.strides, q.dtype, k.dtype, v.dtype, available_threads(), *optional
    is_decode = 2 < q.ndim < 5 and q.shape[-2] < FEW_QUERIES and bias is None
    return decode_key, (k.shape, v.shape, k.strides, v.strides, None), is_decode


def _is_plain(x: Any) -> bool:
    return type(x) is np.ndarray and whole_strides(x)


def with_positions(signature: Any, positions: Any) -> Any:
    """The signature at other positions than the default: checked ones of a cache, or (q_positions, k_positions) of a user.

    None if those of a user have no content that can be compared.
    """
    decode_key, keys, is_decode = signature
    if not isinstance(positions, Placement):
        positions = _content(positions[0]), _content(positions[1])
        if None in positions:
            return None
    return decode_key, (*keys[:-1], positions), is_decode


def _content(positions: Any) -> Hashable | None:
    """Positions by their content; () where none were given, None for unusual ones."""
    if positions is None:
        return ()
    x = positions
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(x, torch.Tensor):
        from lowtri.ops.tensors import is_dense_cpu

        if not is_dense_cpu(x) or x.is_floating_point() or x.is_complex():
            return None
        x = x.numpy()
    elif isinstance(x, (list, range)):
        try:
            x = np.asarray(x)
        except ValueError:  # rows of different lengths
            return None
    return (x.shape, x.dtype, x.tobytes()) if type(x) is np.ndarray and x.dtype.kind in "iu" else None


def positions_at(call: Call, nk: int, given: Any) -> Placement | None:
    """The positions of a signature, checked for ``nk`` keys and otherwise ``call``; None where they need a conversion or an error."""
    if isinstance(given, Placement):
        return given if given.nk else None
    rows, _, nq, _ = call.q.shape
    of_q, of_k = ((), ()) if given is None else given
    if nk == 0 or (nq > nk and call.mask.depends_on_query and of_q == ()) or call.mask.packed_totals:
        return None
    start = max(nk - nq, 0)
    if given is None:
        return Placement(nk, None, None, (start, start + nq - 1, 0, nk - 1))
    q_positions = k_positions = None
    q_low, q_high = start, start + nq - 1
    k_low, k_high = 0, nk - 1
    if of_k != ():
        known = _checked(of_k, rows, nk)
        if known is None:
            return None
        k_positions, k_low, k_high = known
        if call.mask.depends_on_query:
            q_low, q_high = k_low, k_high
    if of_q != ():
        known = _checked(of_q, rows, nq)
        if known is None:
            return None
        q_positions, q_low, q_high = known
    return Placement(nk, q_positions, k_positions, (q_low, q_high, k_low, k_high))


def _checked(given: Any, rows: int, n: int) -> tuple[NDArray[np.int64], int, int] | None:
    """Positions as a read-only array, (1, N) or (B, N), with the least and the greatest; None if they need a conversion or an error."""
    if given[1] != np.int64 or given[0] not in ((n,), (1, n), (rows, n)):
        return None
    positions = np.frombuffer(given[2], np.int64).reshape(-1, n)
    if positions.size == 1:
        low = high = positions.item()
    else:
        numbers = positions.ravel()  # argmin takes half the time of min
        low, high = numbers.item(numbers.argmin()), numbers.item(numbers.argmax())
    return (positions, low, high) if low >= -1 and high < POSITION_MAX else None

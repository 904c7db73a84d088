"""The signature of a call: everything that its checks, its backend and its preparation depend on, which is all except the data.

Calls with equal signatures pass the same checks and run on the same backend, so the cache is searched before anything is checked.
Calls with unusual arguments (tensor subclasses, options that are not plain numbers) are not cached, and are checked each time.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable
from functools import cache
from typing import Any

import numpy as np

from lowtri.masks.mask import Mask
from lowtri.ops.arguments import whole_strides
from lowtri.ops.call import CallOptions
from lowtri.ops.distance_bias import DistanceBias
from lowtri.ops.threads import thread_count

__all__ = ["may_be_cached", "signature"]

_NUMBERS = (float, int, type(None))


def signature(q: Any, k: Any, v: Any, mask: Any, options: CallOptions) -> Hashable | None:
    """A signature, or None for a call with unusual arrays or positions.

    Its hash may raise a TypeError, and it may be cached only if the other arguments are usual, too (:func:`may_be_cached`): small
    calls take microseconds, so what a call that was found in the cache needs no check of is checked for the others alone.
    """
    bias, sinks, q_positions, k_positions = options.bias, options.sinks, options.q_positions, options.k_positions
    by_distance = None
    if isinstance(bias, DistanceBias):
        bias, by_distance = bias.values, bias.kind
    of_arrays = _of_numpy if isinstance(q, np.ndarray) else _of_tensors()
    arrays = of_arrays and of_arrays(q, k, v, bias, sinks)
    if arrays is None:
        return None
    if bias is None and sinks is None and q_positions is None and k_positions is None:
        return arrays, mask, options
    positions = None
    if q_positions is not None or k_positions is not None:
        positions = _of_positions(q_positions), _of_positions(k_positions)
        if None in positions:
            return None
    others = options._replace(bias=by_distance, sinks=None, q_positions=None, k_positions=None)
    return arrays, mask, positions, others


def may_be_cached(mask: Any, options: CallOptions) -> bool:
    """Whether the mask is one, and the options are plain numbers: equal ones then mean equal calls."""
    numbers = options.scale, options.softcap, options.dropout
    flags = options.return_weights, options.return_lse
    return (
        all(type(x) in _NUMBERS for x in numbers)
        and all(type(x) is bool for x in flags)
        and type(options.engine) is str
        and (type(mask) is str or isinstance(mask, Mask))
    )


def _of_numpy(*arrays: Any) -> Hashable | None:
    if any(x is not None and (type(x) is not np.ndarray or not whole_strides(x)) for x in arrays):
        return None
    return thread_count(is_numpy=True), *(None if x is None else (x.shape, x.strides, x.dtype) for x in arrays)


def _of_tensors() -> Callable[..., Hashable | None] | None:
    return _loaded_of_tensors() if "torch" in sys.modules else None


@cache
def _loaded_of_tensors() -> Callable[..., Hashable | None]:
    from lowtri.dispatch.signature_tensors import of_tensors

    return of_tensors


def _of_positions(x: Any) -> Hashable | None:
    """Positions by their content; () where none were given."""
    if x is None:
        return ()
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(x, torch.Tensor):
        from lowtri.ops.guards import is_plain

        if not is_plain(x) or x.is_floating_point() or x.is_complex():
            return None
        x = x.numpy()
    elif isinstance(x, (list, range)):
        try:
            x = np.asarray(x)
        except ValueError:  # rows of different lengths
            return None
    return (x.shape, x.dtype, x.tobytes()) if type(x) is np.ndarray and x.dtype.kind in "iu" else None

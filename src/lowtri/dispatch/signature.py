"""The signature of a call: everything that its checks, its backend and its preparation depend on, which is all except the data.

Calls with equal signatures pass the same checks and run on the same backend, so the cache is searched before anything is checked.
Calls with unusual arguments (tensor subclasses, options that are not plain numbers) have no signature and are checked each time.
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

__all__ = ["signature"]

_NUMBERS = (float, int, type(None))


def signature(q: Any, k: Any, v: Any, mask: Any, options: CallOptions) -> Hashable | None:
    """A hashable signature, or None for a call with unusual arguments."""
    scale, softcap, bias, sinks, dropout, q_positions, k_positions, return_weights, return_lse, engine = options
    if type(scale) not in _NUMBERS or type(softcap) not in _NUMBERS or type(dropout) not in _NUMBERS:
        return None
    if type(engine) is not str or not (type(mask) is str or isinstance(mask, Mask)):
        return None
    by_distance = None
    if isinstance(bias, DistanceBias):
        bias, by_distance = bias.values, bias.kind
    of_arrays = _of_numpy if isinstance(q, np.ndarray) else _of_tensors()
    arrays = of_arrays and of_arrays(q, k, v, bias, sinks)
    if arrays is None:
        return None
    positions = None
    if q_positions is not None or k_positions is not None:
        positions = _of_positions(q_positions), _of_positions(k_positions)
        if None in positions:
            return None
    return arrays, by_distance, mask, engine, scale, softcap, dropout, positions, bool(return_weights), bool(return_lse)


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

"""The memory of a cache: for each layer a buffer of keys and one of values, in NumPy's arrays or torch's tensors; and its checks."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lowtri.dispatch.prepared import CachedCall
from lowtri.errors import CallError
from lowtri.generation.slots import Slots
from lowtri.masks import Mask
from lowtri.masks.arrays import is_tensor
from lowtri.ops.arguments import plain_array


class Layer:
    """The keys (..., capacity, D) and values (..., capacity, Dv) of one layer."""

    __slots__ = ("appends", "keys", "kind", "values")

    def __init__(self, k: Any, v: Any, capacity: int) -> None:
        self.set_buffers(_empty(k, capacity), _empty(v, capacity))
        self.appends = 0

    def set_buffers(self, keys: Any, values: Any) -> None:
        """Replace the buffers."""
        self.keys = keys
        self.values = values
        self.kind = _kind(keys, values)

    def check(self, k: Any, v: Any, layer: int) -> None:
        """Raise unless new tokens have the shapes, dtypes and device of the earlier ones."""
        if _kind(k, v) != self.kind or v.shape[-2] != k.shape[-2]:
            raise CallError(
                f"append: keys {shape_text(k)} and values {shape_text(v)} do not continue layer {layer}, "
                f"whose keys are {shape_text(self.keys)} and values {shape_text(self.values)} in (..., H, slots, D)."
            )

    def write(self, start: int, k: Any, v: Any) -> None:
        """Write new tokens to the slots from ``start`` on."""
        n = k.shape[-2]
        if isinstance(self.keys, np.ndarray):
            self.keys[..., start : start + n, :] = k
            self.values[..., start : start + n, :] = v
        else:  # half the time of an assignment
            self.keys.narrow(-2, start, n).copy_(k.detach() if k.requires_grad else k)
            self.values.narrow(-2, start, n).copy_(v.detach() if v.requires_grad else v)

    def compact(self, slots: Slots, capacity: int) -> None:
        """New buffers with the old slots at their front."""
        self.keys, self.values = (_enlarged(x[..., slots, :], capacity) for x in (self.keys, self.values))

    def choose(self, start: int, index: NDArray[np.int64]) -> None:
        """From slot ``start`` on: the slots ``start + index``, (1, m) for all rows or (B, m); any slot where the index is -1."""
        places = start + np.maximum(index, 0)
        for buffer in (self.keys, self.values):
            if len(index) == 1:
                _write(buffer, start, _copied(buffer, places[0]))
            else:
                for row, chosen in zip(buffer, places, strict=True):  # views of single rows
                    _write(row, start, _copied(row, chosen))

    def select_rows(self, rows: NDArray[np.int64]) -> None:
        """Row i becomes a copy of row ``rows[i]``."""
        self.set_buffers(_rows(self.keys, rows), _rows(self.values, rows))

    def to(self, device: Any) -> None:
        """Move the buffers, which are tensors, to a device."""
        self.set_buffers(self.keys.to(device), self.values.to(device))

    def first_slots(self, n: int) -> tuple[Any, Any]:
        """The first ``n`` slots, as views."""
        if isinstance(self.keys, np.ndarray):
            return self.keys[..., :n, :], self.values[..., :n, :]
        return self.keys.narrow(-2, 0, n), self.values.narrow(-2, 0, n)


@dataclass(slots=True)
class RepeatableCall:
    """The attention of a layer over a cache, for other layers and later tokens with an equal call."""

    appends: int  # how many appends the cache had seen
    kind: Any  # of the layer's buffers
    signature: Any  # of the layer's queries and of its new keys and values
    run: Any  # (q, keys, values) -> the output
    for_any_keys: CachedCall | None  # the call that serves later tokens, too


def check_new(k: Any, v: Any, mask: Mask) -> None:
    """Raise unless a layer can begin with these keys and values: their shapes fit together and the mask."""
    if k.ndim not in (2, 3, 4) or v.ndim != k.ndim or v.shape[:-1] != k.shape[:-1]:
        raise CallError(
            f"append: keys {shape_text(k)} and values {shape_text(v)} do not fit: "
            "expected (B, H, N, D) and (B, H, N, Dv), or both without B, or without B and H."
        )
    rows = mask.batch[0] if mask.batch else 1
    if rows > 1 and (k.ndim < 4 or k.shape[0] != rows):
        raise CallError(f"append: keys {shape_text(k)} do not fit {mask!r}, whose batch is {mask.batch}.")


def _kind(k: Any, v: Any) -> tuple[Any, ...]:
    """What must not change from append to append: all but the number of tokens."""
    of_values = (*v.shape[:-2], v.shape[-1], v.dtype, getattr(v, "device", None))
    return (*k.shape[:-2], k.shape[-1], k.dtype, getattr(k, "device", None), *of_values)


def _empty(like: Any, capacity: int) -> Any:
    shape = (*like.shape[:-2], capacity, like.shape[-1])
    try:
        if isinstance(like, np.ndarray):
            return np.zeros(shape, like.dtype)
        import torch

        with torch.inference_mode(False):  # a buffer made in inference mode could not be written outside of it
            return torch.zeros(shape, dtype=like.dtype, device=like.device)  # free slots are returned, too
    except (MemoryError, ValueError, RuntimeError) as error:  # RuntimeError is torch's
        size = math.prod(shape) * like.dtype.itemsize / 2**30
        raise CallError(
            f"KVCache: {capacity:,} slots in keys or values {shape} take {size:,.0f} GiB, which could not be allocated.\n"
            "Fix: a mask that hides old keys, a smaller capacity= or block=, or fewer rows."
        ) from error


def _rows(buffer: Any, rows: NDArray[np.int64]) -> Any:
    if isinstance(buffer, np.ndarray):
        return buffer[rows]
    import torch

    with torch.inference_mode(False):  # as in _empty
        return buffer[rows]


def _copied(buffer: Any, slots: NDArray[np.int64]) -> Any:
    """The tokens in these slots, as an array of their own."""
    if isinstance(buffer, np.ndarray):
        return buffer[..., slots, :]
    import torch

    return buffer.index_select(-2, torch.from_numpy(slots).to(buffer.device))


def _enlarged(tokens: Any, capacity: int) -> Any:
    buffer = _empty(tokens, capacity)
    _write(buffer, 0, tokens)
    return buffer


def _write(buffer: Any, start: int, new: Any) -> None:
    """Write the tokens of another buffer to the slots from ``start`` on."""
    if isinstance(buffer, np.ndarray):
        buffer[..., start : start + new.shape[-2], :] = new
    else:
        buffer.narrow(-2, start, new.shape[-2]).copy_(new)


def batch_of(x: Any) -> int:
    return int(x.shape[0]) if x.ndim == 4 else 1


def shape_text(x: Any) -> str:
    return f"{tuple(x.shape)} {str(x.dtype).removeprefix('torch.')}"


def not_an_array(method: str, name: str, x: Any) -> CallError:
    return CallError(f"{method}: {name} is {type(x).__name__}, but it takes NumPy arrays or torch tensors.")


def plain(name: str, x: Any) -> Any:
    """An array or tensor whose memory holds its numbers; most are seen to be one without the check of all others."""
    if type(x) is np.ndarray:
        return x if x.flags.c_contiguous and x.flags.aligned else plain_array(name, x, "append")
    if "torch" in sys.modules and tensor_checks().is_dense_cpu(x):
        return x
    x = plain_array(name, x, "append")
    if not isinstance(x, np.ndarray) and not is_tensor(x):
        raise not_an_array("append", name, x)
    return x


@cache
def tensor_checks() -> Any:
    """Loaded with torch; an import in each call takes longer than a check."""
    from lowtri.ops import tensors

    return tensors

"""The buffers of a cache, NumPy arrays or torch tensors: allocating them, writing into slots, moving slots, views."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lowtri.errors import CallError
from lowtri.masks import Mask
from lowtri.masks.arrays import is_tensor

if TYPE_CHECKING:
    import torch

__all__ = ["Layer", "Layers", "Slots", "as_slots", "batch_of", "check_new", "check_query", "describe"]

Slots: TypeAlias = "slice | NDArray[np.int64]"


class Layer:
    """The keys (..., capacity, D) and values (..., capacity, Dv) of one layer."""

    __slots__ = ("appends", "keys", "signature", "values")

    def __init__(self, k: Any, v: Any, capacity: int) -> None:
        self.keys, self.values = _empty(k, capacity), _empty(v, capacity)
        self.signature: Any = _signature(k, v)  # of the last append: equal ones need no further check
        self.appends = 0

    def check(self, k: Any, v: Any, layer: int) -> None:
        """Raise unless new tokens have the shapes, dtypes and device of the earlier ones."""
        signature = _signature(k, v)
        if signature == self.signature:
            return
        if _kind(k) != _kind(self.keys) or _kind(v) != _kind(self.values) or v.shape[-2] != k.shape[-2]:
            raise CallError(
                f"append: keys {describe(k)} and values {describe(v)} do not continue layer {layer}, "
                f"whose keys are {describe(self.keys)} and values {describe(self.values)} in (..., H, slots, D)."
            )
        self.signature = signature

    def write(self, slots: Slots, k: Any, v: Any) -> None:
        for buffer, new in ((self.keys, k), (self.values, v)):
            _write(buffer, slots, new.detach() if getattr(new, "requires_grad", False) else new)

    def move(self, slots: Slots, capacity: int) -> None:
        """New buffers with the old slots at their front."""
        self.keys, self.values = _moved(self.keys, slots, capacity), _moved(self.values, slots, capacity)

    def pick(self, rows: NDArray[np.int64]) -> None:
        """Row i becomes a copy of row ``rows[i]``."""
        self.keys, self.values, self.signature = self.keys[rows], self.values[rows], None

    def front(self, n: int) -> tuple[Any, Any]:
        """The first ``n`` slots, as views."""
        if isinstance(self.keys, np.ndarray):
            return self.keys[..., :n, :], self.values[..., :n, :]
        return self.keys.narrow(-2, 0, n), self.values.narrow(-2, 0, n)


class Layers(dict[int, Layer]):
    """The layers of a cache, by number."""

    @property
    def bytes(self) -> int:
        return sum(x.nbytes for layer in self.values() for x in (layer.keys, layer.values))

    @property
    def batch(self) -> int:
        return max((batch_of(layer.keys) for layer in self.values()), default=1)

    def appends(self, number: int) -> int:
        """How many appends a layer has received."""
        return self[number].appends if number in self else 0

    def late(self, appends: int) -> int | None:
        """The first layer that has received fewer appends; None if there is none."""
        return min((number for number, layer in self.items() if layer.appends < appends), default=None)


def check_new(k: Any, v: Any, mask: Mask) -> None:
    """Raise unless a layer can begin with these keys and values: arrays whose shapes fit together and the mask."""
    for name, x in (("k", k), ("v", v)):
        if not isinstance(x, np.ndarray) and not is_tensor(x):
            raise CallError(f"append: {name} is {type(x).__name__}, but it takes NumPy arrays or torch tensors.")
    if k.ndim not in (2, 3, 4) or v.ndim != k.ndim or v.shape[:-1] != k.shape[:-1]:
        raise CallError(
            f"append: keys {describe(k)} and values {describe(v)} do not fit: "
            "expected (B, H, N, D) and (B, H, N, Dv), or both without B, or without B and H."
        )
    rows = (*mask.batch, 1)[0]
    if rows > 1 and (k.ndim < 4 or k.shape[0] != rows):
        raise CallError(f"append: keys {describe(k)} do not fit {mask!r}, whose batch is {mask.batch}.")


def check_query(q: Any, k: Any) -> None:
    """Raise unless queries and keys of the same new tokens fit together."""
    if q.ndim != k.ndim or q.shape[:-3] != k.shape[:-3] or q.shape[-2:] != k.shape[-2:]:
        raise CallError(
            f"attend: queries {describe(q)} and keys {describe(k)} do not fit: each new token brings a query, a key and "
            "a value.\nFix: (..., Hq, N, D) and (..., Hkv, N, D) with the same N."
        )


def _signature(k: Any, v: Any) -> tuple[Any, ...]:
    return (k.shape, v.shape, k.dtype, v.dtype, getattr(k, "device", None), getattr(v, "device", None))


def _empty(like: Any, capacity: int) -> Any:
    shape = (*like.shape[:-2], capacity, like.shape[-1])
    if isinstance(like, np.ndarray):
        return np.zeros(shape, like.dtype)
    import torch

    with torch.inference_mode(False):  # a buffer made in inference mode could not be written outside of it
        return torch.empty(shape, dtype=like.dtype, device=like.device)


def _write(buffer: Any, slots: Slots, new: Any) -> None:
    if isinstance(buffer, np.ndarray):
        buffer[..., slots, :] = new
    elif isinstance(slots, slice):
        buffer.narrow(-2, slots.start, slots.stop - slots.start).copy_(new)
    else:
        buffer.index_copy_(-2, _index(slots, buffer), new)


def _moved(buffer: Any, slots: Slots, capacity: int) -> Any:
    """A new buffer with the old slots at its front."""
    out = _empty(buffer, capacity)
    if isinstance(buffer, np.ndarray) or isinstance(slots, slice):
        tokens = buffer[..., slots, :]
    else:
        tokens = buffer.index_select(-2, _index(slots, buffer))
    _write(out, slice(0, tokens.shape[-2]), tokens)
    return out


def _index(slots: NDArray[np.int64], like: torch.Tensor) -> torch.Tensor:
    import torch

    return torch.from_numpy(slots).to(like.device)


def _kind(x: Any) -> tuple[Any, ...]:
    """What must not change from append to append."""
    return (*x.shape[:-2], x.shape[-1], x.dtype, getattr(x, "device", None))


def batch_of(x: Any) -> int:
    return int(x.shape[0]) if x.ndim == 4 else 1


def describe(x: Any) -> str:
    return f"{tuple(x.shape)} {str(x.dtype).removeprefix('torch.')}"


def as_slots(slots: NDArray[np.int64]) -> Slots:
    """The slots as a slice where they are consecutive: slices are copied without an index."""
    n = len(slots)
    if n == 0:
        return slice(0, 0)
    start = int(slots[0])
    # Free slots ascend in at most two runs, so comparing the ends nearly suffices; moved ones may be in any order.
    if int(slots[-1]) - start == n - 1 and (n <= 2 or bool(np.all(np.diff(slots) == 1))):
        return slice(start, start + n)
    return slots

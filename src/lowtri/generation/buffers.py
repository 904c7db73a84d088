"""What a cache does with tensors, for NumPy and torch alike: room, writing into slots, moving, views; a layer has two buffers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from lowtri.generation.book import Slots

if TYPE_CHECKING:
    import torch

__all__ = ["Layer", "describe"]


@dataclass(slots=True)
class Layer:
    """The keys and values of one layer."""

    keys: Any  # (..., capacity, D)
    values: Any  # (..., capacity, Dv)
    last: Any  # shapes and kinds of the last append: what equals them needs no second look
    step: int = 0  # how many appends it has seen

    @classmethod
    def like(cls, k: Any, v: Any, capacity: int) -> Layer:
        """Room for tokens such as these."""
        return cls(_empty(k, capacity), _empty(v, capacity), _came(k, v))

    def takes(self, k: Any, v: Any) -> bool:
        """Whether new tokens are of the same shapes, dtypes and device as those before."""
        came = _came(k, v)
        if came == self.last:
            return True
        fits = _kind(k) == _kind(self.keys) and _kind(v) == _kind(self.values) and v.shape[-2] == k.shape[-2]
        if fits:
            self.last = came
        return fits

    def write(self, slots: Slots, k: Any, v: Any) -> None:
        for buffer, new in ((self.keys, k), (self.values, v)):
            _write(buffer, slots, new.detach() if getattr(new, "requires_grad", False) else new)

    def move(self, slots: Slots, capacity: int) -> None:
        """New buffers, with the old slots at their front."""
        self.keys, self.values = _moved(self.keys, slots, capacity), _moved(self.values, slots, capacity)

    def pick(self, rows: NDArray[np.int64]) -> None:
        """Row i becomes what row ``rows[i]`` is."""
        self.keys, self.values, self.last = self.keys[rows], self.values[rows], None

    def front(self, n: int) -> tuple[Any, Any]:
        """The first ``n`` slots, as views."""
        return _front(self.keys, n), _front(self.values, n)


def _came(k: Any, v: Any) -> tuple[Any, ...]:
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
        kept = buffer[..., slots, :]
    else:
        kept = buffer.index_select(-2, _index(slots, buffer))
    _write(out, slice(0, kept.shape[-2]), kept)
    return out


def _front(buffer: Any, n: int) -> Any:
    return buffer[..., :n, :] if isinstance(buffer, np.ndarray) else buffer.narrow(-2, 0, n)


def _index(slots: NDArray[np.int64], like: torch.Tensor) -> torch.Tensor:
    import torch

    return torch.from_numpy(slots).to(like.device)


def _kind(x: Any) -> tuple[Any, ...]:
    """All of a tensor that must stay the same from append to append."""
    return (*x.shape[:-2], x.shape[-1], x.dtype, getattr(x, "device", None))


def describe(x: Any) -> str:
    return f"{tuple(x.shape)} {str(x.dtype).removeprefix('torch.')}"

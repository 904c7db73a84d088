"""What a cache does with tensors, for NumPy and torch alike: room, writing into slots, moving, views."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from lowtri.decoding.book import Slots
from lowtri.errors import CallError

if TYPE_CHECKING:
    import torch

__all__ = ["describe", "empty", "front", "kind", "moved", "places", "write"]


def empty(like: Any, capacity: int) -> Any:
    shape = (*like.shape[:-2], capacity, like.shape[-1])
    if isinstance(like, np.ndarray):
        return np.zeros(shape, like.dtype)
    import torch

    with torch.inference_mode(False):  # a buffer made in inference mode could not be written outside of it
        return torch.empty(shape, dtype=like.dtype, device=like.device)


def write(buffer: Any, slots: Slots, new: Any) -> None:
    if isinstance(buffer, np.ndarray):
        buffer[..., slots, :] = new
    elif isinstance(slots, slice):
        buffer.narrow(-2, slots.start, slots.stop - slots.start).copy_(new)
    else:
        buffer.index_copy_(-2, _index(slots, buffer), new)


def moved(buffer: Any, slots: Slots, capacity: int) -> Any:
    """A new buffer with the old slots at its front."""
    out = empty(buffer, capacity)
    if isinstance(buffer, np.ndarray) or isinstance(slots, slice):
        kept = buffer[..., slots, :]
    else:
        kept = buffer.index_select(-2, _index(slots, buffer))
    write(out, slice(0, kept.shape[-2]), kept)
    return out


def front(buffer: Any, n: int) -> Any:
    return buffer[..., :n, :] if isinstance(buffer, np.ndarray) else buffer.narrow(-2, 0, n)


def _index(slots: NDArray[np.int64], like: torch.Tensor) -> torch.Tensor:
    import torch

    return torch.from_numpy(slots).to(like.device)


def kind(x: Any) -> tuple[Any, ...]:
    """All of a tensor that must stay the same from append to append."""
    return (*x.shape[:-2], x.shape[-1], x.dtype, getattr(x, "device", None))


def describe(x: Any) -> str:
    return f"{tuple(x.shape)} {str(x.dtype).removeprefix('torch.')}"


def places(positions: Any) -> NDArray[np.int64]:
    if hasattr(positions, "detach"):
        positions = positions.detach().cpu().numpy()
    array = np.asarray(positions)
    if array.size and array.dtype.kind not in "iu":
        raise CallError(f"positions are {array.dtype} {array.shape}, but places are whole numbers.")
    return array.astype(np.int64, copy=False)

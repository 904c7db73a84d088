"""Masks of transformers that have no lowtri formula: functions evaluated pair by pair, and masks at remapped positions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lowtri.compat.torch_private import mapped_indexing
from lowtri.masks.arrays import FrozenArray
from lowtri.masks.document_masks import Extremes
from lowtri.masks.formulas import Band, full
from lowtri.masks.mask import Mask
from lowtri.masks.positions import Positions, within
from lowtri.masks.tile import Answer

__all__ = ["FunctionMask", "RemappedMask", "ShiftedMask", "from_first_tokens"]

_CHUNK = 2**20  # pairs evaluated in one call: 8 MB for each of the two indices


@dataclass(frozen=True)
class FunctionMask(Mask):
    """A function ``fn(batch, head, query, key)`` that can only be evaluated.

    All its tiles are PARTIAL, so pairs are evaluated tile by tile, and not at all where another mask makes the tile EMPTY.
    """

    fn: Callable[..., Any]
    rows: int
    device: str
    use_vmap: bool  # whether the function takes single indices, and must be mapped by torch.vmap
    row: int | None = None

    @property
    def batch(self) -> tuple[int, ...]:
        return (self.rows,) if self.row is None and self.rows > 1 else ()

    def _at(self, b: int, h: int) -> Mask:
        return FunctionMask(self.fn, self.rows, self.device, self.use_vmap, b)

    def _sees(self, q: Positions, k: Positions) -> Any:
        shape = np.broadcast_shapes(np.shape(q), np.shape(k))
        # The result at position -1 is not used, but an index must lie inside.
        q, k = (np.maximum(np.broadcast_to(x, shape), 0).ravel() for x in (q, k))
        visible = np.empty(len(q), bool)
        for start in range(0, len(q), _CHUNK):
            chunk = slice(start, start + _CHUNK)
            visible[chunk] = self._evaluate(q[chunk], k[chunk])
        return visible.reshape(shape) if shape else bool(visible[0])

    def _evaluate(self, q: NDArray[np.int64], k: NDArray[np.int64]) -> NDArray[np.bool_]:
        q_index, k_index = (torch.from_numpy(np.ascontiguousarray(x)).to(self.device) for x in (q, k))
        row, head = (torch.tensor(n, device=self.device) for n in (self.row or 0, 0))
        if self.use_vmap:
            with mapped_indexing():
                visible = torch.vmap(self.fn, in_dims=(None, None, 0, 0))(row, head, q_index, k_index)
        else:
            visible = self.fn(row, head, q_index, k_index)
        return np.broadcast_to(visible.detach().to("cpu", torch.bool).numpy(), q.shape)

    def _tile(self, q0: Positions, q1: Positions, k0: Positions, k1: Positions) -> Answer:
        return 1 + 0 * (q0 + k0)

    def __repr__(self) -> str:
        return f"function(<{getattr(self.fn, '__qualname__', type(self.fn).__name__)}>)"


@dataclass(frozen=True)
class RemappedMask(Mask):
    """Another mask, evaluated at ``positions[q]`` and ``positions[k]``; the array is (N,) or (B, N)."""

    inner: Mask
    positions: FrozenArray

    @property
    def batch(self) -> tuple[int, ...]:
        rows = self.positions.array.shape[:-1]
        return max(rows, self.inner.batch[:1]) + self.inner.batch[1:]  # one row broadcasts

    @cached_property
    def _extremes(self) -> Extremes:
        return Extremes(self.positions.array)

    def _sees(self, q: Positions, k: Positions) -> Any:
        positions = self.positions.array
        return self.inner._sees(positions[within(q, len(positions))], positions[within(k, len(positions))])

    def _tile(self, q0: Positions, q1: Positions, k0: Positions, k1: Positions) -> Answer:
        (q_low, q_high), (k_low, k_high) = self._extremes(q0, q1), self._extremes(k0, k1)
        # The bounding box holds positions that do not occur; EMPTY and FULL of the whole box are still true of those that do.
        return self.inner._tile(q_low, q_high + 1, k_low, k_high + 1)

    @cached_property
    def _parts(self) -> dict[tuple[int, int], RemappedMask]:
        """The masks of single rows and heads, kept so that equal ones are planned once."""
        return {}

    def _at(self, b: int, h: int) -> Mask:
        if (b, h) not in self._parts:
            positions = np.atleast_2d(self.positions.array)
            row = FrozenArray(positions[b % len(positions)])
            self._parts[b, h] = RemappedMask(self.inner.at(b % (*self.inner.batch, 1)[0], h), row)
        return self._parts[b, h]

    def __repr__(self) -> str:
        return f"moved({self.inner!r}, {self.positions})"


@dataclass(frozen=True)
class ShiftedMask(Mask):
    """Another mask, shifted by ``by[b]`` positions in batch row b."""

    inner: Mask
    by: tuple[int, ...]

    @property
    def batch(self) -> tuple[int, ...]:
        return (len(self.by),) if len(self.by) > 1 else ()

    def _sees(self, q: Positions, k: Positions) -> Any:
        return self.inner._sees(q + self.by[0], k + self.by[0])

    def _tile(self, q0: Positions, q1: Positions, k0: Positions, k1: Positions) -> Answer:
        by = self.by[0]
        return self.inner._tile(q0 + by, q1 + by, k0 + by, k1 + by)

    def _at(self, b: int, h: int) -> Mask:
        return ShiftedMask(self.inner, (self.by[b],))

    def __repr__(self) -> str:
        return f"shifted({self.inner!r}, {list(self.by)})"


def from_first_tokens(mask: Mask, valid: Tensor | None, length: int) -> Mask:
    """A mask at positions that count from the first token of each row.

    Args:
        valid: (B, N) bools, True = a token, False = padding; None without padding.
        length: of the longest row, past tokens included.
    """
    if valid is None or isinstance(mask, Band) or mask == full():  # which compare distances only
        return mask
    pads = valid.to("cpu", torch.uint8).numpy().argmax(-1)[:, None]  # (B, 1) in front of the first token
    return RemappedMask(mask, FrozenArray(np.maximum(np.arange(length) - pads, 0))) if pads.any() else mask

"""Masks of transformers that are no formula of ours: a function asked pair by pair, and formulas at moved positions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lowtri.masks.arrays import FrozenArray
from lowtri.masks.document_masks import Extremes
from lowtri.masks.mask import Mask
from lowtri.masks.positions import Positions, within
from lowtri.masks.tile import Answer

__all__ = ["Asked", "Moved", "Shifted"]

_AT_ONCE = 2**20  # pairs asked in one call: 8 MB for each of the two indices


@dataclass(frozen=True)
class Asked(Mask):
    """A function ``fn(batch, head, query, key)`` of which nothing is known but its answers.

    Its tiles are PARTIAL, so that the pairs are read tile by tile, and those that another mask calls EMPTY never.
    """

    fn: Callable[..., Any]
    rows: int
    device: str
    by_vmap: bool  # whether the function may need to be asked one pair at a time, mapped by torch.vmap
    row: int | None = None

    @property
    def batch(self) -> tuple[int, ...]:
        return (self.rows,) if self.row is None and self.rows > 1 else ()

    def _at(self, b: int, h: int) -> Mask:
        return Asked(self.fn, self.rows, self.device, self.by_vmap, b)

    def _sees(self, q: Positions, k: Positions) -> Any:
        shape = np.broadcast_shapes(np.shape(q), np.shape(k))
        # Nobody asks for the answer where there is no token, but an index must lie inside.
        q, k = (np.maximum(np.broadcast_to(x, shape), 0).ravel() for x in (q, k))
        seen = np.empty(len(q), bool)
        for at in range(0, len(q), _AT_ONCE):
            seen[at : at + _AT_ONCE] = self._answers(q[at : at + _AT_ONCE], k[at : at + _AT_ONCE])
        return seen.reshape(shape) if shape else bool(seen[0])

    def _answers(self, q: NDArray[np.int64], k: NDArray[np.int64]) -> NDArray[np.bool_]:
        q_index, k_index = (torch.from_numpy(np.ascontiguousarray(x)).to(self.device) for x in (q, k))
        row, head = (torch.tensor(n, device=self.device) for n in (self.row or 0, 0))
        if self.by_vmap:
            from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

            with TransformGetItemToIndex():  # lets a function index its tensors by a mapped position
                found = torch.vmap(self.fn, in_dims=(None, None, 0, 0))(row, head, q_index, k_index)
        else:
            found = self.fn(row, head, q_index, k_index)
        return np.broadcast_to(found.detach().to("cpu", torch.bool).numpy(), q.shape)

    def _tile(self, q0: Positions, q1: Positions, k0: Positions, k1: Positions) -> Answer:
        return 1 + 0 * (q0 + k0)

    def __repr__(self) -> str:
        return f"asked(<{getattr(self.fn, '__qualname__', type(self.fn).__name__)}>)"


@dataclass(frozen=True)
class Moved(Mask):
    """Another mask, asked at the places that ``places`` (N,) or (B, N) gives for each position."""

    inner: Mask
    places: FrozenArray

    @property
    def batch(self) -> tuple[int, ...]:
        return self.inner.batch or self.places.array.shape[:-1]

    @cached_property
    def _extremes(self) -> Extremes:
        return Extremes(self.places.array)

    def _sees(self, q: Positions, k: Positions) -> Any:
        places = self.places.array
        return self.inner._sees(places[within(q, len(places))], places[within(k, len(places))])

    def _tile(self, q0: Positions, q1: Positions, k0: Positions, k1: Positions) -> Answer:
        (q_low, q_high), (k_low, k_high) = self._extremes(q0, q1), self._extremes(k0, k1)
        # The box of places around the rectangle holds places that nobody stands at: EMPTY and FULL of it are still true.
        return self.inner._tile(q_low, q_high + 1, k_low, k_high + 1)

    @cached_property
    def _rows(self) -> list[Moved]:
        rows = self.places.array if self.places.array.ndim == 2 else [self.places.array] * self.batch[0]
        return [Moved(self.inner.at(b), FrozenArray(row)) for b, row in enumerate(rows)]

    def _at(self, b: int, h: int) -> Mask:
        return self._rows[b]

    def __repr__(self) -> str:
        return f"moved({self.inner!r}, {self.places})"


@dataclass(frozen=True)
class Shifted(Mask):
    """Another mask, asked ``by[b]`` places further on in batch row b."""

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
        return Shifted(self.inner, (self.by[b],))

    def __repr__(self) -> str:
        return f"shifted({self.inner!r}, {list(self.by)})"

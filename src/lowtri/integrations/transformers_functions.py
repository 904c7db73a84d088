"""Masks of transformers that have no lowtri formula: functions evaluated pair by pair, and masks at remapped positions."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lowtri.compat.torch_private import mapped_indexing
from lowtri.integrations.function_mask import BatchedMask, FunctionMask, bounds_of, trace
from lowtri.masks.arrays import FrozenArray
from lowtri.masks.document_masks import Extremes
from lowtri.masks.formulas import Band, full
from lowtri.masks.mask import Mask
from lowtri.masks.positions import Positions, within
from lowtri.masks.tile import Answer

__all__ = ["RemappedMask", "ShiftedMask", "evaluated_mask", "from_first_tokens"]


def evaluated_mask(fn: Callable[..., Any], rows: int, device: str, use_vmap: bool) -> Mask:
    """A function ``fn(batch, head, query, key)`` that is not recognised; it is traced for tile answers, else evaluated.

    Args:
        rows: how many batch rows it is defined for.
        use_vmap: whether it takes single indices, and must be mapped by torch.vmap.
    """
    mapped = torch.vmap(fn, in_dims=(None, None, 0, 0)) if use_vmap else fn

    def evaluate(*indices: Tensor) -> Tensor:
        with mapped_indexing() if use_vmap else nullcontext():
            return mapped(*indices)

    bounds = cache(lambda: bounds_of(trace(fn, device, of_score=False)))
    parts: dict[tuple[int, ...], Mask] = {
        (b, 0): FunctionMask(fn, evaluate, b, 0, device, bounds) for b in range(max(rows, 1))
    }
    return BatchedMask(parts, (rows,)) if rows > 1 else parts[0, 0]


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

"""FlexAttention's mask functions and block masks as lowtri masks.

A block of a BlockMask is EMPTY if it is not listed and FULL if it is listed as full. In all other tiles, the bounds of the traced
``mask_mod`` (:mod:`~lowtri.integrations.flex_bounds`) decide where they can. What is left is evaluated pair by pair.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lowtri.compat.torch_private import mapped_indexing
from lowtri.errors import MaskError
from lowtri.integrations.flex_bounds import Bounds, Range, bounds_of
from lowtri.integrations.flex_functions import tensor_function
from lowtri.integrations.flex_trace import Trace, trace
from lowtri.masks.mask import Mask
from lowtri.masks.positions import Positions
from lowtri.masks.tile import EMPTY, FULL, PARTIAL, Answer

__all__ = ["Blocks", "function_mask"]

_PAIRS_AT_ONCE = 2**20  # evaluated in one call: 8 MB for each of the two indices

MaskMod = Callable[..., Any]


@dataclass(frozen=True, eq=False)
class Blocks:
    """The answers for the blocks of a BlockMask: (B, H, rows, columns) int8, blocks of ``queries`` x ``keys``."""

    answers: NDArray[np.int8]
    queries: int
    keys: int


def function_mask(
    fn: MaskMod,
    shape: tuple[int, int, int, int],
    device: Any,
    *,
    blocks: Blocks | None = None,
    traced: tuple[Trace | None, Any] | None = None,
) -> Mask:
    """A mask_mod as a mask whose positions are indices.

    Args:
        fn: the mask_mod; True = may see.
        shape: B, H, Nq, Nk; the mask has a batch row or head for each index that the function depends on, or the blocks differ by.
        device: where the function is evaluated.
        blocks: known answers; elsewhere the function is asked.
        traced: the trace and the node that ``fn`` computes, where it is a part of a traced function.
    """
    batch, heads, nq, nk = shape
    graph, node = traced or (trace(fn, device, of_score=False), None)
    by_row, by_head = ((graph is None or graph.depends_on(node or graph.output, name)) for name in "bh")
    known = (1, 1) if blocks is None else blocks.answers.shape[:2]
    rows, columns = batch if by_row or known[0] > 1 else 1, heads if by_head or known[1] > 1 else 1
    bounds = bounds_of(graph, node)
    parts: dict[tuple[int, ...], Mask] = {}
    for b, h in np.ndindex(rows, columns):
        answers = None if blocks is None else _Answers(blocks, b % known[0], h % known[1])
        parts[b, h] = _FunctionMask(fn, b, h, (nq, nk), torch.device(device), bounds, answers)
    return parts[0, 0] if len(parts) == 1 else _BatchedMask(parts, (rows, columns) if columns > 1 else (rows,))


@dataclass(frozen=True, eq=False, repr=False)
class _BatchedMask(Mask):
    """One mask for each batch row and head."""

    parts: dict[tuple[int, ...], Mask]
    shape: tuple[int, ...]

    @property
    def batch(self) -> tuple[int, ...]:
        return self.shape

    def _at(self, b: int, h: int) -> Mask:
        return self.parts[b, h]

    def __repr__(self) -> str:
        return repr(self.parts[0, 0])


class _Answers:
    """The answers of the blocks of one batch row and head, for rectangles of any size."""

    def __init__(self, blocks: Blocks, b: int, h: int) -> None:
        self.queries, self.keys = blocks.queries, blocks.keys
        answers = blocks.answers[b, h]
        self.rows, self.columns = answers.shape
        self.seen, self.full = (np.zeros((self.rows + 1, self.columns + 1), np.int64) for _ in range(2))
        for sums, of in ((self.seen, answers != EMPTY), (self.full, answers == FULL)):
            np.cumsum(np.cumsum(of, axis=0, dtype=np.int64), axis=1, out=sums[1:, 1:])

    def __call__(self, q0: Positions, q1: Positions, k0: Positions, k1: Positions) -> Answer:
        top, bottom = np.minimum(q0 // self.queries, self.rows), np.minimum(-(-q1 // self.queries), self.rows)
        left, right = np.minimum(k0 // self.keys, self.columns), np.minimum(-(-k1 // self.keys), self.columns)

        def count(sums: NDArray[np.int64]) -> Any:
            return sums[bottom, right] - sums[top, right] - sums[bottom, left] + sums[top, left]

        area = (bottom - top) * (right - left)
        return 1 + (count(self.full) == area).astype(np.int8) - (count(self.seen) == 0).astype(np.int8)


@dataclass(frozen=True, eq=False, repr=False)
class _FunctionMask(Mask):
    """A mask_mod in one batch row and head. Equal only to itself: captured tensors may change between two masks of one function."""

    fn: MaskMod
    b: int
    h: int
    size: tuple[int, int]  # Nq, Nk: the indices that may be used
    device: torch.device
    bounds: Bounds | None
    answers: _Answers | None

    def _tile(self, q0: Positions, q1: Positions, k0: Positions, k1: Positions) -> Answer:
        # Positions past the last index do not occur in a call.
        (q0, q1), (k0, k1) = (
            (np.minimum(x, n - 1), np.minimum(y, n)) for (x, y), n in zip(((q0, q1), (k0, k1)), self.size, strict=True)
        )
        answer: Any = PARTIAL + 0 * (q0 + k0)
        if self.bounds is not None:
            known = self.bounds(Range(q0, q1 - 1), Range(k0, k1 - 1), self.b, self.h)
            if known is not None:
                answer = answer + (known.low >= 1) - (known.high <= 0)
        if self.answers is not None:  # the kernels of FlexAttention follow the lists
            of_blocks = self.answers(q0, q1, k0, k1)
            answer = np.where(of_blocks == PARTIAL, answer, of_blocks)
        return int(answer) if np.ndim(answer) == 0 else answer

    def _sees(self, q: Positions, k: Positions) -> Any:
        shape = np.broadcast_shapes(np.shape(q), np.shape(k))
        q, k = (np.clip(np.broadcast_to(x, shape).ravel(), 0, n - 1) for x, n in zip((q, k), self.size, strict=True))
        visible = np.empty(len(q), bool)
        for start in range(0, len(q), _PAIRS_AT_ONCE):
            chunk = slice(start, start + _PAIRS_AT_ONCE)
            visible[chunk] = self._evaluated(q[chunk], k[chunk])
        if self.answers is not None:
            of_blocks = self.answers(q, q + 1, k, k + 1)
            visible = np.where(of_blocks == PARTIAL, visible, of_blocks == FULL)
        return visible.reshape(shape) if shape else bool(visible[0])

    def _evaluated(self, q: NDArray[np.int64], k: NDArray[np.int64]) -> NDArray[np.bool_]:
        b, h = (torch.tensor(x, device=self.device) for x in (self.b, self.h))
        indices = (torch.from_numpy(np.ascontiguousarray(x)).to(self.device) for x in (q, k))
        with mapped_indexing(), torch.no_grad():
            visible = torch.vmap(tensor_function("mask_mod", self.fn), in_dims=(None, None, 0, 0))(b, h, *indices)
        if visible.dtype != torch.bool:
            raise MaskError(
                f"flex_attention: mask_mod gives {visible.dtype}, but it must give bools, True = may see. Fix: != 0."
            )
        found: NDArray[np.bool_] = visible.cpu().numpy()
        return found

    @cached_property
    def _name(self) -> str:
        return getattr(self.fn, "__qualname__", type(self.fn).__name__)

    def __repr__(self) -> str:
        return f"mask_mod(<{self._name}>)"

"""The two evaluations of a mask: for a pair of positions, and for a tile, which is a rectangle of pairs.

``mask(q, k)`` is true when the query at position ``q`` may see the key at position ``k``. For a tile there are three answers: EMPTY (no
query sees any key), FULL (every query sees every key), PARTIAL (anything else). EMPTY and FULL must never be wrong; PARTIAL is
always allowed.

A mask implements two formulas, ``_sees`` and ``_tile``, for non-negative positions and non-empty tiles. :class:`TileLaw` adds
what holds for every mask: negative positions (no token), empty tiles, POSITION_MAX, and one answer for each batch row and head.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from lowtri.errors import MaskError
from lowtri.masks.positions import (
    MAX_POSITIONS,
    POSITION_MAX,
    Positions,
    check_count,
    checked_edge,
    checked_positions,
    shown,
)

__all__ = [
    "EMPTY",
    "FULL",
    "PARTIAL",
    "Answer",
    "Tile",
    "TileLaw",
    "default_positions",
    "first_position",
    "same_label",
    "tile_answer",
]

Answer: TypeAlias = Any  # 0, 1, 2 or an array of them
_Law = TypeVar("_Law", bound="TileLaw")


class Tile(IntEnum):
    """The three answers for a tile, a rectangle of queries x keys: EMPTY (no visible pair), FULL (every pair), PARTIAL (otherwise)."""

    EMPTY = 0
    PARTIAL = 1
    FULL = 2


EMPTY, PARTIAL, FULL = Tile.EMPTY, Tile.PARTIAL, Tile.FULL
_TILES = (EMPTY, PARTIAL, FULL)  # a look-up is five times faster than Tile(answer)


def tile_answer(full: Any, empty: Any) -> Answer:
    """The answer from two facts that exclude each other; ints and arrays alike."""
    return 1 + full - empty


def same_label(q_low: Any, q_high: Any, k_low: Any, k_high: Any) -> Answer:
    """The answer of ``label of q == label of k`` for a tile, from the least and greatest label of its queries and of its keys."""
    return tile_answer(
        full=(q_low == q_high) & (k_low == k_high) & (q_low == k_low), empty=(q_high < k_low) | (k_high < q_low)
    )


class TileLaw:
    """What a mask answers about pairs and tiles, for any positions."""

    @property
    def batch(self) -> tuple[int, ...]:
        """``()``, ``(B,)`` or ``(B, H)``: for which batch rows and heads the mask differs."""
        return ()

    depends_on_query: bool = True
    """Whether the answer depends on the query's position (not for ``full``, ``first`` and ``keys``)."""

    row_lengths: tuple[int, ...] = ()
    """How many tokens a row has by each ``documents(lengths=...)`` of the mask that has an end; calls compare them with their keys."""

    # What a subclass implements, for non-negative positions and non-empty rectangles.

    def _sees(self, q: Positions, k: Positions) -> Any:
        raise TypeError(f"{type(self).__name__} has no formula")

    def _tile(self, q0: Positions, q1: Positions, k0: Positions, k1: Positions) -> Answer:
        raise TypeError(f"{type(self).__name__} has no tile formula")

    def _signature(self, q0: Positions, k0: Positions, nq: int, nk: int) -> list[Positions] | None:
        """Numbers such that tiles (nq, nk) with the same numbers hold the same pairs; None where that is unknown.

        For single masks only: plans combine the patterns of joined masks themselves.
        """
        return None

    def _at(self, b: int, h: int) -> Any:
        return self

    # Answers for any positions.

    def __call__(self, q: Positions, k: Positions) -> Any:
        """True where the query at ``q`` may see the key at ``k``.

        Args:
            q, k: positions, ints or integer arrays that broadcast against each other. A negative position means no token:
                under every mask it sees no key, and no query sees it.

        Returns:
            a bool for two ints, else a bool array of shape ``m.batch + broadcast(q, k)``.

        Raises:
            MaskError: if the positions are not whole numbers.
        """
        if self.batch:
            return self._each(lambda row: row(q, k))
        q, k = checked_positions(q), checked_positions(k)
        visible = self._sees(q, k) & (q >= 0) & (k >= 0)
        return bool(visible) if type(q) is int and type(k) is int else visible

    def tile(self, q0: Positions, q1: Positions, k0: Positions, k1: Positions) -> Any:
        """EMPTY, PARTIAL or FULL for the queries ``q0 <= q < q1`` and the keys ``k0 <= k < k1``.

        >>> from lowtri import causal
        >>> causal().tile(0, 4, 4, 8), causal().tile(4, 8, 0, 5), causal().tile(0, 4, 0, 4)
        (<Tile.EMPTY: 0>, <Tile.FULL: 2>, <Tile.PARTIAL: 1>)

        Args:
            q0, q1, k0, k1: ints, or, for many tiles at once, integer arrays that broadcast. ``POSITION_MAX`` and ``inf`` mean no end.

        Returns:
            a :class:`Tile` for ints and an unbatched mask, else an int8 array of shape ``m.batch + broadcast``.
        """
        if self.batch:
            return self._each(lambda row: row.tile(q0, q1, k0, k1)).astype(np.int8)
        if type(q0) is int and type(q1) is int and type(k0) is int and type(k1) is int:
            if q0 < 0 or k0 < 0:  # the negative part holds no token, so the rest cannot be FULL
                return min(self.tile(max(q0, 0), q1, max(k0, 0), k1), PARTIAL)
            if q1 > POSITION_MAX or k1 > POSITION_MAX:  # positions end there, and larger numbers may leave int64
                return self.tile(q0, min(q1, POSITION_MAX), k0, min(k1, POSITION_MAX))
            if q1 <= q0 or k1 <= k0:
                return EMPTY
            return _TILES[self._tile(q0, q1, k0, k1)]
        edges = [checked_edge(edge) for edge in (q0, q1, k0, k1)]
        if all(edge.ndim == 0 for edge in edges):
            return self.tile(*(int(edge) for edge in edges))
        q0, q1, k0, k1 = np.broadcast_arrays(*edges)
        has_negative = (q0 < 0) | (k0 < 0)
        q0, k0 = np.maximum(q0, 0), np.maximum(k0, 0)
        no_pairs = (q1 <= q0) | (k1 <= k0)
        # Formulas may use the last position of a tile: give tiles without pairs one.
        answer = self._tile(q0, np.maximum(q1, q0 + 1), k0, np.maximum(k1, k0 + 1))
        answer = np.where(has_negative, np.minimum(answer, PARTIAL), answer)
        return np.where(no_pairs, EMPTY, answer).astype(np.int8)

    def at(self: _Law, b: int = 0, h: int = 0) -> _Law:
        """The unbatched mask of batch row ``b`` and head ``h``; a mask that does not differ there answers for all."""
        if not self.batch:
            return self
        rows, heads = (*self.batch, 1)[:2]
        if not (0 <= b < rows or rows == 1) or not (0 <= h < heads or heads == 1):
            raise MaskError(f"at: batch row {b}, head {h} of a mask with batch {self.batch}.")
        unbatched: _Law = self._at(0 if rows == 1 else b, 0 if heads == 1 else h)
        return unbatched

    def _each(self, function: Callable[[Any], Any]) -> NDArray[Any]:
        """The function's results for the unbatched masks of all batch rows and heads, ``m.batch + ...``."""
        results = np.stack([function(self.at(*index)) for index in np.ndindex(self.batch)])
        return results.reshape(*self.batch, *results.shape[1:])


def default_positions(mask: TileLaw, nq: int, nk: int | None = None) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The default positions of ``nq`` queries and ``nk`` keys: keys at 0 .. nk-1, queries at the last nq of them.

    More queries than keys have no such positions. If the mask does not depend on the query's position they count from 0; otherwise
    positions are required, because libraries differ in the default.
    """
    start, nq, nk = first_position(mask, nq, nk)
    if max(nq, nk) > MAX_POSITIONS:
        raise MaskError(
            f"{nq} queries and {nk} keys: an array of positions holds at most {MAX_POSITIONS} (2**28). "
            "Fix: tile() answers for rectangles of any size."
        )
    return np.arange(start, start + nq, dtype=np.int64), np.arange(nk, dtype=np.int64)


def first_position(mask: TileLaw, nq: int, nk: int | None = None) -> tuple[int, int, int]:
    """The default position of the first of ``nq`` queries, and the two numbers, checked; see :func:`default_positions`."""
    nq = check_count("mask", "nq, a number of queries,", nq)
    nk = nq if nk is None else check_count("mask", "nk, a number of keys,", nk)
    if nq > nk and mask.depends_on_query:
        raise MaskError(
            f"{nq} queries and {nk} keys under {shown(mask)}: the queries cannot stand at the last {nq} of {nk} keys.\n"
            "Fix: pass their positions, q_positions=range(nq) if query i has the position of key i."
        )
    return max(nk - nq, 0), nq, nk

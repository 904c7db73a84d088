"""Positions, and the three answers of a mask for a tile, which is a rectangle of queries and keys; the checks of users' positions.

The answers are EMPTY (no query sees any key), FULL (every query sees every key), PARTIAL (anything else). EMPTY and FULL must never
be wrong; PARTIAL is always allowed.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lowtri.errors import MaskError

POSITION_MAX = 2**62
"""Greater than any position, and small enough that the sum of two fits into int64. As the end of a tile it means no end."""

MAX_POSITIONS = 2**28  # positions in one array: 2 GB

Positions: TypeAlias = Any  # a Python int or a NumPy array of ints; formulas are written once for both


def check_count(function: str, name: str, value: Any, least: int = 0) -> int:
    """A number of tokens, as a Python int between ``least`` and POSITION_MAX.

    Raises:
        MaskError: if it is not a whole number of that range; the message names ``function`` and its argument ``name``.
    """
    if isinstance(value, bool | np.bool_) or not isinstance(value, int | np.integer):
        raise MaskError(
            f"{function}: {name} is {shown(value)}, but it counts tokens: a whole number, at least {least}."
        )
    if not least <= value <= POSITION_MAX:
        raise MaskError(
            f"{function}: {name} is {shown(value)}, but it must lie in {least} .. 2**62. Fix: {name}={least}."
        )
    return int(value)


def checked_edge(edge: Any) -> NDArray[np.int64]:
    """One edge of a tile as int64. Infinity is accepted, as POSITION_MAX."""
    array = np.asarray(edge)
    if array.dtype.kind == "f" and np.all(array == np.floor(array)):
        return np.clip(array, -POSITION_MAX, POSITION_MAX).astype(np.int64)
    if array.dtype.kind not in "iu":
        raise MaskError(f"tile: an edge is {shown(edge)}, but positions are whole numbers (or inf).")
    return _int64(array)


def checked_positions(positions: Positions) -> Positions:
    """Ints unchanged, arrays of any integers as int64: differences of unsigned integers would wrap."""
    if type(positions) is int:
        return min(positions, POSITION_MAX)
    if type(positions) is np.ndarray and positions.dtype == np.int64:
        return positions
    array = np.asarray(positions)
    if array.dtype.kind not in "iu":
        raise MaskError(
            f"mask: the positions are {shown(positions)}, but a position is a whole number.\n"
            "Fix: ints, or NumPy arrays of integers."
        )
    return _int64(array)


def _int64(array: NDArray[Any]) -> NDArray[np.int64]:
    """Unsigned numbers beyond int64 become POSITION_MAX instead of wrapping to negative ones."""
    if array.dtype == np.uint64:
        return np.minimum(array, np.uint64(POSITION_MAX)).astype(np.int64)
    return array.astype(np.int64)


def shown(value: Any, longest: int = 60) -> str:
    """A value as errors print it, at most ``longest`` characters."""
    if isinstance(value, int) and not -(10**30) < value < 10**30:  # Python refuses to print the largest ones
        return f"a whole number of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= longest else text[: longest - 3] + "..."


def within(positions: Positions, n: int) -> Any:
    """Positions as indices of an array of n entries; later positions get the index of its last entry."""
    if type(positions) is int:
        return min(max(positions, 0), n - 1)
    return np.clip(positions, 0, n - 1)


Answer: TypeAlias = Any  # 0, 1, 2 or an array of them


class Tile(IntEnum):
    """The three answers for a tile, a rectangle of queries x keys: EMPTY (no visible pair), FULL (every pair), PARTIAL (otherwise)."""

    EMPTY = 0
    PARTIAL = 1
    FULL = 2


EMPTY, PARTIAL, FULL = Tile.EMPTY, Tile.PARTIAL, Tile.FULL
TILES = (EMPTY, PARTIAL, FULL)
"""By number: a look-up is five times faster than ``Tile(answer)``."""


def tile_answer(full: Any, empty: Any) -> Answer:
    """The answer from two facts that exclude each other; ints and arrays alike."""
    return 1 + full - empty


def same_label(q_low: Any, q_high: Any, k_low: Any, k_high: Any) -> Answer:
    """The answer of ``label of q == label of k`` for a tile, from the least and greatest label of its queries and of its keys."""
    return tile_answer(
        full=(q_low == q_high) & (k_low == k_high) & (q_low == k_low), empty=(q_high < k_low) | (k_high < q_low)
    )

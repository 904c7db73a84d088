"""The default positions of queries and keys: keys at 0 .. nk-1, queries at the last nq of them."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from lowtri.errors import MaskError
from lowtri.masks.tile import MAX_POSITIONS, check_count, short_repr


class HasQueries(Protocol):
    """A mask, of which only this is asked."""

    depends_on_query: bool


def default_positions(mask: HasQueries, nq: int, nk: int | None = None) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
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


def first_position(mask: HasQueries, nq: int, nk: int | None = None) -> tuple[int, int, int]:
    """The default position of the first of ``nq`` queries, and the two numbers, checked; see :func:`default_positions`."""
    nq = check_count("mask", "nq, a number of queries,", nq)
    nk = nq if nk is None else check_count("mask", "nk, a number of keys,", nk)
    if nq > nk and mask.depends_on_query:
        raise MaskError(
            f"{nq} queries and {nk} keys under {short_repr(mask)}: the queries cannot stand at the last {nq} of {nk} keys.\n"
            "Fix: q_positions=range(nq) in attention, if query i has the position of key i; mask(q, k) answers for any positions."
        )
    return max(nk - nq, 0), nq, nk

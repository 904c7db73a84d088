"""Rejects appends that leave a query without a key that the mask shows it. NumPy only.

With a cache, each query is computed once. Under a causal mask, all its keys exist by then. A mask that shows later positions (a
prefix, a band, ``full``) may show it a key of a later append, which would be missing from its output. Two checks use tile answers:

    when a query is appended   ``mask.tile(q, q + 1, end, POSITION_MAX)``, ``end``: the next position of its row. EMPTY: no key can be
                               missing. FULL in any part of this range: a key is missing, and the append raises
    when a key is appended     the answer may have been PARTIAL although no pair is visible (tables, custom formulas). Such queries
                               stay pending and are compared with the keys of every later append, pair by pair if needed

A query that sees no later key needs neither check; one vectorised tile call shows this for thousands of queries.
"""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from lowtri.errors import CallError
from lowtri.masks import EMPTY, FULL, POSITION_MAX, Mask

_AHEAD, _MOST_AHEAD = 64, 4096  # number of future queries per vectorised tile call
_LAST = 128  # queries of an append checked for a certain key; the keys' own check covers the others
_FEW, _PAIRS = 4096, 2**20  # pairs read without a tile call first, and at most at a time
_EDGES = np.concatenate([np.arange(64), 2 ** np.arange(6, 62)])  # (S + 1,) single keys, then doubling ranges


class LookaheadCheck:
    """Raises where a query would lack a key that its mask shows; one for each cache."""

    def __init__(self, mask: Mask) -> None:
        self.mask = mask
        self._pending: NDArray[np.int64] | None = None  # (R,) queries from here on may lack a key; None: no query does
        # Ranges of queries, for any row and head; they depend on the mask only, not on what was appended.
        self._no_later = range(0)  # each sees no later key
        self._uncertain = range(0)  # for none of them the tiles prove a visible later key
        self._ahead = _AHEAD  # length of the next ranges

    def check(self, positions: NDArray[np.int64], coming: NDArray[np.int64]) -> None:
        """Before tokens are appended at ``positions`` (R, N) to rows whose next position is ``coming`` (R,)."""
        if positions.size == 1:  # the usual case; saves two reductions
            low = high = positions.item()
        else:
            low, high = int(positions.min(initial=POSITION_MAX)), int(positions.max(initial=-1))
        if high < 0:
            return
        low = low if low >= 0 else int(positions[positions >= 0].min())
        if self._pending is None and low in self._no_later and high in self._no_later:
            return
        coming = np.broadcast_to(coming, len(positions))
        pending = coming if self._pending is None else np.broadcast_to(self._pending, len(positions))
        if self._pending is not None:
            self._check_keys(positions, pending, coming)
        first = np.where(positions >= 0, positions, POSITION_MAX).min(1)  # (R,)
        first = np.where(pending < coming, pending, first)
        if low in self._uncertain and high in self._uncertain:
            self._pending = first
            return
        end = np.maximum(coming, positions.max(1) + 1)  # (R,)
        if np.all(seen(self.mask, first, end, end, POSITION_MAX) == EMPTY):
            self._pending = None
        else:
            first = np.where(pending < coming, pending, end)
            self._pending = np.minimum(first, self._check_queries(positions, end))
        self._look_ahead(int(end.min()), int(end.max()))

    def crop(self, n: NDArray[np.int64], coming: NDArray[np.int64]) -> None:
        """Before the tokens from ``n`` to before ``coming`` (R,) are removed: no query that stays may have seen one."""
        n = np.minimum(n, coming)
        for b in np.flatnonzero(seen(self.mask, 0 * n, n, n, coming) != EMPTY).tolist():
            for mask in row_masks(self.mask, b, len(n)):
                pair = visible_pair(mask, 0, int(n[b]), np.arange(n[b], coming[b]))
                if pair is not None:
                    raise CallError(
                        f"crop: n is {n.tolist()}, but {self.mask!r} shows the query at {pair[0]}, which stays, the key at "
                        f"{pair[1]}.\nFix: crop to {pair[0]} or earlier, and append from there again."
                    )
        if self._pending is not None:
            self._pending = np.minimum(self._pending, n)

    def reorder(self, index: NDArray[np.int64]) -> None:
        if self._pending is not None and len(self._pending) > 1:
            self._pending = self._pending[index]

    def shift(self, keep: int, back: NDArray[np.int64]) -> None:
        """After the tokens from ``keep`` on have moved by ``back`` (R,) positions."""
        if self._pending is not None:
            self._pending = np.maximum(self._pending - back, np.minimum(self._pending, keep))

    def _look_ahead(self, start: int, furthest: int) -> None:
        """Extend the ranges from ``start`` on, to cover rows whose next positions are between ``start`` and ``furthest``."""
        ahead = self._ahead + min(furthest - start, 16 * _MOST_AHEAD)
        q = start + np.arange(ahead)[None]  # (1, A)
        no_later = _first_false(seen(self.mask, q, q + 1, q + 1, POSITION_MAX)[0] == EMPTY)
        self._no_later = self._uncertain = range(start, start + no_later)
        if no_later == ahead:
            self._ahead = min(2 * self._ahead, _MOST_AHEAD)
            return
        self._ahead = _AHEAD
        certain = np.asarray(self._later_keys(q[:, :_AHEAD], q[:, :_AHEAD] + 1)[0][0].any(-1))  # (A,)
        self._uncertain = range(start, start + _first_false(~certain))

    def _later_keys(self, q: NDArray[np.int64], end: NDArray[np.int64]) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
        """The proof by tiles that queries (R, A) see a later key: for ranges from ``end`` (R, A or 1) on, whether one is FULL.

        Returns:
            (R, A, S) bool, and where the ranges begin and end, (R, A or 1, S + 1).
        """
        k = np.minimum(end[..., None] + _EDGES, POSITION_MAX)
        return seen(self.mask, q[..., None], q[..., None] + 1, k[..., :-1], k[..., 1:]) == FULL, k

    def _check_queries(self, positions: NDArray[np.int64], end: NDArray[np.int64]) -> NDArray[np.int64]:
        """Raise if a new query certainly sees a key from ``end`` (R,) on; return from where on they may see one, (R,)."""
        q = positions[:, -_LAST:]
        certain, k = self._later_keys(q, end[:, None])
        for b, i, s in np.argwhere(certain)[:1].tolist():
            masks = row_masks(self.mask, b, len(positions))
            self._raise(int(q[b, i]), int(k[b, 0, s]), masks, "is not in the cache yet")
        may = seen(self.mask, positions, positions + 1, end[:, None], POSITION_MAX) != EMPTY  # (R, N)
        return np.where(may, positions, POSITION_MAX).min(1, initial=POSITION_MAX)

    def _check_keys(self, positions: NDArray[np.int64], pending: NDArray[np.int64], coming: NDArray[np.int64]) -> None:
        """Raise if a query from ``pending`` to before ``coming`` (R,) sees one of the new keys at ``positions`` (R, N)."""
        for b in np.flatnonzero(pending < coming).tolist():
            low, high = int(pending[b]), int(coming[b])
            k = positions[b][positions[b] >= 0]
            for mask in row_masks(self.mask, b, len(positions)):
                pair = visible_pair(mask, low, high, k)
                if pair is not None:
                    self._raise(*pair, [mask], "comes only after it")

    def _raise(self, q: int, k: int, masks: list[Mask], what: str) -> NoReturn:
        last = max((_last_seen(mask, q, k) for mask in masks), default=k)
        fix = (
            "attend to the whole sequence in one call"
            if last > POSITION_MAX // 2
            else f"append all tokens up to {last} in one call"
        )
        raise CallError(
            f"append: {self.mask!r} shows the query at {q} the key at {k}, which {what}.\n"
            f"Fix: {fix}; or KVCache(..., allow_missing=True), where queries see the keys that are there."
        )


def _last_seen(mask: Mask, q: int, k: int) -> int:
    """The last key that the query may see according to the tiles, at least ``k``; POSITION_MAX if there is no last one."""
    low, high = k + 1, POSITION_MAX  # from `high` on nothing is visible; from before `low` on, something may be
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if mask.tile(q, q + 1, middle, POSITION_MAX) == EMPTY else (middle + 1, high)
    return POSITION_MAX if high == POSITION_MAX else high - 1


def visible_pair(mask: Mask, low: int, high: int, k: NDArray[np.int64]) -> tuple[int, int] | None:
    """A query from ``low`` to before ``high`` that sees one of the keys ``k`` (S,), and that key."""
    if (high - low) * len(k) > _FEW:
        k = k[np.asarray(mask.tile(low, high, k, k + 1)) != EMPTY]
    step = max(1, _PAIRS // max(1, len(k)))
    for start in range(low, high if len(k) else low, step):
        shown = mask(np.arange(start, min(start + step, high))[:, None], k)
        if shown.any():
            i, j = np.argwhere(shown)[0].tolist()
            return start + i, int(k[j])
    return None


def _first_false(facts: NDArray[np.bool_]) -> int:
    return len(facts) if facts.all() else int(facts.argmin())


def seen(mask: Mask, q0: Any, q1: Any, k0: Any, k1: Any) -> NDArray[np.int8]:
    """Tile answers for each row of a batch, edges (R, ...): the maximum over its heads.

    R = 1: the same edges for all rows of the batch, and the maximum over them too.
    """
    edges = np.broadcast_arrays(q0, q1, k0, k1)
    shape = edges[0].shape
    if not mask.batch or mask.batch[0] == 1 or shape[0] == 1:
        return np.asarray(mask.tile(*edges), np.int8).reshape(-1, *shape).max(0)
    out = np.empty(shape, np.int8)
    for b in range(shape[0]):
        masks = row_masks(mask, b, shape[0])
        out[b] = np.max([np.asarray(mask_of_head.tile(*(edge[b] for edge in edges))) for mask_of_head in masks], 0)
    return out


def row_masks(mask: Mask, b: int, rows: int) -> list[Mask]:
    """The masks of all heads in row ``b``; with ``rows`` = 1, those of all rows of the batch."""
    batch, heads = (*mask.batch, 1, 1)[:2]
    return [mask.at(i, h) for i in (range(batch) if rows == 1 else [b]) for h in range(heads)]

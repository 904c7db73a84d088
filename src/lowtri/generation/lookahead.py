"""Rejects appends that leave a query without a key that the mask shows it. NumPy only.

With a cache, each query is computed once. Under a causal mask, all its keys exist by then; a mask that shows later positions (a
prefix, a band, ``full``) may show it a key of a later append. One tile answer proves that no query before ``end`` can:
``mask.tile(0, end, end, POSITION_MAX)`` is EMPTY. One vectorised call proves it for thousands of ends.

Where it is not proven, a new query that certainly sees a later key raises (a FULL tile), and so does a new key that an earlier query
sees, pair by pair if needed: tables and custom formulas have PARTIAL tiles without a visible pair.
"""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from lowtri.errors import CallError
from lowtri.masks import EMPTY, FULL, POSITION_MAX, Mask

_AHEAD, _MOST_AHEAD = (
    256,
    2**16,
)  # number of ends in one vectorised tile call, for rows of about equal lengths and for others
_LAST = 128  # queries of an append that are checked for a certain later key; the check of new keys covers the others
_FEW, _PAIRS = 4096, 2**20  # pairs read without a tile call first, and at most at a time
_EDGES = np.concatenate([np.arange(64), 2 ** np.arange(6, 62)])  # (S + 1,) single keys, then doubling ranges


class LookaheadCheck:
    """Raises where a query would lack a key that its mask shows; one for each cache."""

    def __init__(self, mask: Mask) -> None:
        self.mask = mask
        self._proven = range(0)  # no query before one of these ends sees a key from that end on

    def check(self, positions: NDArray[np.int64], coming: NDArray[np.int64]) -> None:
        """Before tokens are appended at ``positions`` (R, N) to rows whose next position is ``coming`` (R,)."""
        if positions.size == 1:  # the usual case; saves the reductions
            low, high = coming.item(), max(coming.item(), positions.item() + 1)
        else:
            low, high = int(coming.min()), max(int(coming.max()), int(positions.max(initial=-1)) + 1)
        if low in self._proven and high in self._proven:
            return
        coming = np.broadcast_to(coming, len(positions))
        end = np.maximum(coming, positions.max(1, initial=-1) + 1)  # (R,)
        self._check_keys(positions, coming)
        if np.all(self._none_seen_after(end)):
            ends = int(end.min()) + np.arange(min(_AHEAD + high - low, _MOST_AHEAD))
            proven = self._none_seen_after(ends[None])[0]
            self._proven = range(int(ends[0]), int(ends[0]) + (len(ends) if proven.all() else int(proven.argmin())))
        else:
            self._check_queries(positions[:, -_LAST:], end)

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

    def _none_seen_after(self, end: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whether it is proven that no query before an end (R, ...) sees a key from that end on."""
        return seen(self.mask, 0 * end, end, end, POSITION_MAX) == EMPTY

    def _check_keys(self, positions: NDArray[np.int64], coming: NDArray[np.int64]) -> None:
        """Raise if a query before ``coming`` (R,) sees one of the new keys."""
        for b in np.flatnonzero(~self._none_seen_after(coming)).tolist():
            k = positions[b][positions[b] >= 0]
            for mask in row_masks(self.mask, b, len(positions)):
                pair = visible_pair(mask, 0, int(coming[b]), k)
                if pair is not None:
                    self._raise(*pair, [mask], "comes only after it")

    def _check_queries(self, q: NDArray[np.int64], end: NDArray[np.int64]) -> None:
        """Raise if the tiles prove that a new query sees a key from ``end`` (R,) on."""
        k = np.minimum(end[:, None, None] + _EDGES, POSITION_MAX)  # (R, 1, S + 1)
        certain = seen(self.mask, q[..., None], q[..., None] + 1, k[..., :-1], k[..., 1:]) == FULL
        for b, i, s in np.argwhere(certain)[:1].tolist():
            masks = row_masks(self.mask, b, len(q))
            self._raise(int(q[b, i]), int(k[b, 0, s]), masks, "is not in the cache yet")

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

"""The slot allocator of a cache: which slot holds the token at which position; whether a query would lack a key. NumPy only.

Tokens stand in the order in which they came. A token keeps its slot until it is evicted, that is until no query from position ``t``
on can see it in any row of the batch: ``mask.tile(t, POSITION_MAX, k, k + 1)`` is EMPTY. Eviction runs in blocks, with one vectorised
tile call for all keys, and the tokens that are left then move to the front, so that the cost per token is small:

    full              one FULL answer for the whole range: nothing is evicted, and the capacity doubles when it is full
    windows, chunks   the capacity grows by quarters until keys are evicted, then it stays at those that are seen and one block
    sinks, prefixes   their keys are never EMPTY, so they stay
"""

from __future__ import annotations

import math
from typing import Any, NoReturn, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lowtri.errors import CallError
from lowtri.masks import EMPTY, FULL, POSITION_MAX, Mask
from lowtri.masks.arrays import positions_in_numpy
from lowtri.ops.call import Placement

Slots: TypeAlias = "slice | NDArray[np.int64]"

_INT64 = np.dtype(np.int64)
_FUTURE_QUERIES = 64  # number of future queries for which `shift` compares the mask before and after
_PROVEN_ENDS = 256  # ends in one vectorised tile call, for rows of about equal lengths
_MOST_PROVEN_ENDS = 2**16  # and for others
# Queries of an append that are checked for a certain later key; the check of new keys covers the others.
_QUERIES_CHECKED = 128
_FEW_PAIRS = 4096  # read without a tile call first
_PAIRS_AT_A_TIME = 2**20  # read at most
_KEY_EDGES = np.concatenate([np.arange(64), 2 ** np.arange(6, 62)])  # (S + 1,) single keys, then doubling ranges


class SlotAllocator:
    """Slots and positions of a cache; all layers write their keys and values to the slots given here.

    ``positions`` (R, capacity): the position of the token in each slot, -1 in free slots. R is 1 while all rows of the batch
    have the same positions, then B.
    """

    def __init__(
        self,
        mask: Mask,
        capacity: int,
        block: int,
        rewind: int,
        lookahead: LookaheadCheck | None,
        fixed: bool = False,
    ) -> None:
        self.mask = mask
        self.least_capacity = capacity
        self.block = block
        self.rewind = rewind
        self.fixed = fixed  # whether the capacity stays
        self.positions = np.full((1, capacity), -1, np.int64)
        self.next = np.zeros(1, np.int64)  # (R,) the position of the next token
        self.used_end = 0  # all used slots are below
        self.appends = 0
        self.evicted = 0
        # (R, N) positions of the last append, -1 where removed since
        self.last_positions: NDArray[np.int64] = self.positions[:, :0]
        self.last_start = 0  # the slot of its first token
        # What its queries read, in every layer.
        self.visible_slots = Placement(0, self.last_positions, self.last_positions, (-1, -1, -1, -1))
        self.moved: Slots | None = None  # the old slots in their new order, if the last append moved the tokens
        self.lookahead = lookahead  # None if queries may come before keys that the mask shows them
        self._complete_from = np.zeros(1, np.int64)  # (R,) queries from here on can see none of the evicted keys
        self._gaps = False  # whether a slot below `used_end` may be free in some row
        self._since_sweep = 0  # tokens appended since the last sweep
        self._interval = block  # tokens between two sweeps
        self._most_live = 0  # the largest number of tokens left after a sweep

    @property
    def capacity(self) -> int:
        return self.positions.shape[1]

    @property
    def used(self) -> NDArray[np.int64]:
        """Slots that hold a token of any row, ascending."""
        return np.flatnonzero((self.positions[:, : self.used_end] >= 0).any(0))

    def upcoming(self, n: int) -> NDArray[np.int64]:
        """Default positions of the next ``n`` tokens, (R, n)."""
        return self.next[:, None] if n == 1 else self.next[:, None] + np.arange(n)

    def are_last_positions(self, positions: Any) -> bool:
        """Whether these are the positions of the last append, for all rows or for each."""
        if same(positions, self.last_positions):
            return True
        rows = np.maximum(np.atleast_2d(as_positions(positions)), -1)
        fits = rows.shape[1:] == self.last_positions.shape[1:] and (len(rows) == 1 or len(self.last_positions) == 1)
        return fits and bool(np.all(rows == self.last_positions))

    def allocate(self, n: int, rows: int, positions: Any = None) -> None:
        """Allocate slots for ``n`` new tokens, evicting keys and resizing as needed."""
        new = self.upcoming(n)
        follows = positions is None or same(positions, new)
        if not follows:
            new = following(positions, self.next, n, rows)
        if self.lookahead is not None:
            self.lookahead.check(new, self.next)
        if len(new) > len(self.positions):
            self._widen(len(new))
        self.moved = None
        if self._since_sweep >= self._interval or self.used_end + n > self.capacity:
            earliest = np.where(new >= 0, new, POSITION_MAX).min(1, initial=POSITION_MAX)
            earliest = np.where(earliest < POSITION_MAX, earliest, self.next)  # (R,) no query comes before it
            self._sweep(np.maximum(earliest - self.rewind, 0), n)
        self.positions[:, self.used_end : self.used_end + n] = new
        self.last_start = self.used_end
        self.used_end += n
        self.last_positions = new
        if n:
            self._gaps = self._gaps or not follows
            self.next = new[:, -1] + 1 if follows else np.maximum(self.next, new.max(1) + 1)
        self.visible_slots = self._find_visible_slots(n)
        self._since_sweep += n
        self.appends += 1

    def _find_visible_slots(self, n: int) -> Placement:
        """What the queries of the last ``n`` tokens read: all slots where keys are evicted, so that the number is constant."""
        used_end = self.used_end
        q = self.last_positions
        if not self._gaps and len(self.next) == 1 and self.next.item() == used_end:
            # Attention's defaults, which are cheaper.
            return Placement(used_end, None, None, (used_end - n, used_end - 1, 0, used_end - 1))
        span = self.capacity if self.evicted else used_end
        k = self.positions[:, :span]
        if q.size == 1:  # of one row: keys ascend
            at, gaps = q.item(), self._gaps or span > used_end
            return Placement(span, q, k, (at, at, -1 if gaps else k.item(0), self.next.item() - 1))
        low, high = ([int(f(x, initial=none)) for x in (q, k)] for f, none in ((np.min, POSITION_MAX), (np.max, -1)))
        return Placement(span, q, k, (low[0], high[0], low[1], high[1]))

    def check_crop(self, n: NDArray[np.int64]) -> None:
        """Raise unless the tokens at positions from ``n`` (R,) on can be removed."""
        if np.any((n < self._complete_from) & (n < self.next)):
            raise CallError(
                f"crop: n is {n.tolist()}, but keys that queries before {self._complete_from.tolist()} may see are evicted.\n"
                f"Fix: crop to {self._complete_from.tolist()} or later, or start a new cache."
            )
        if self.lookahead is not None:
            self.lookahead.crop(n, np.broadcast_to(self.next, n.shape))

    def crop(self, n: NDArray[np.int64]) -> None:
        """Remove the tokens at positions from ``n`` (R,) on, which :meth:`check_crop` allows."""
        if len(n) > len(self.positions):
            self._widen(len(n))
        self.positions[self.positions >= n[:, None]] = -1
        self.next = np.minimum(self.next, n)
        self._removed()  # rows may be cropped to other lengths

    def drop(self, chosen: NDArray[np.int64]) -> None:
        """Evict the tokens at these positions, (R, n); -1 stands for none."""
        rows = max(len(chosen), len(self.positions))
        of_rows = np.broadcast_to(chosen, (rows, chosen.shape[1]))
        before = np.broadcast_to(self.positions[:, : self.used_end], (rows, self.used_end))
        dropped = np.stack([np.isin(held, gone[gone >= 0]) for held, gone in zip(before, of_rows, strict=True)])
        for b, gone in enumerate(of_rows):
            missing = np.setdiff1d(gone[gone >= 0], before[b])
            if len(missing):
                raise CallError(
                    f"drop: row {b} holds no token at {missing[:8].tolist()}. Fix: positions among those that append and attend "
                    "return; -1 where a row has fewer."
                )
        if len(chosen) > len(self.positions):
            self._widen(len(chosen))
        many = len(self.used)
        self.positions[:, : self.used_end][dropped[: len(self.positions)]] = -1
        self.evicted += many - len(self.used)
        self._removed()

    def keep(self, index: NDArray[np.int64]) -> None:
        """Of the tokens of the last append keep these, (R, m), -1 for none, at consecutive positions; free the other slots."""
        start, n = self.last_start, index.shape[1]
        if len(index) > len(self.positions):
            self._widen(len(index))
        first = np.where(self.last_positions >= 0, self.last_positions, POSITION_MAX).min(1, initial=POSITION_MAX)
        first = np.where(first < POSITION_MAX, first, self.next)  # (R,)
        new = np.where(index >= 0, first[:, None] + np.arange(n), -1)
        self.positions[:, start : self.used_end] = -1
        self.positions[:, start : start + n] = new
        self.next = first + (index >= 0).sum(1)
        self.used_end, self.last_positions = start + n, new
        self._removed()

    def _removed(self) -> None:
        """After positions were changed in their slots: which slots are used, and what is left of the last append."""
        used = self.used
        self.used_end = int(used[-1]) + 1 if len(used) else 0
        self._gaps = bool((self.positions[:, : self.used_end] < 0).any())
        self._find_last_positions()

    def _find_last_positions(self) -> None:
        slots = slice(self.last_start, self.last_start + self.last_positions.shape[1])
        self.last_positions = self.positions[:, slots].copy()

    def reorder(self, index: NDArray[np.int64]) -> None:
        if len(self.positions) > 1:
            self.positions = self.positions[index]
            self.next = self.next[index]
            self.last_positions = self.last_positions[index]
            self._complete_from = self._complete_from[index]

    def shift(self, keep: int) -> NDArray[np.int64]:
        """Close the gap of evicted tokens after position ``keep``; return by how much each slot's token moved, (R, used_end).

        Rows move independently, each as far as it can; a key that only other rows still see is evicted from its row.
        """
        first = np.maximum(self.next - self.rewind, 0)
        used = self.used
        before = self.positions[:, used]  # (R, S)
        evicted = self._invisible(before, first) & (before >= 0)
        before = np.where(evicted, -1, before)
        oldest = np.where(before >= keep, before, POSITION_MAX).min(1, initial=POSITION_MAX)
        back = np.where(oldest < POSITION_MAX, oldest, self.next) - keep  # (R,)
        back = np.where(self.next > keep, back, 0)
        after = before - np.where(before >= keep, back[:, None], 0)
        self._check_shift(before, after, back)
        moved = np.zeros((len(before), self.used_end), np.int64)
        moved[:, used] = after - before
        self.evicted += int(np.count_nonzero((before < 0).all(0)))
        self.positions[:, used] = after
        self.next = self.next - back
        self._find_last_positions()
        self._complete_from = np.where(evicted.any(1) | (back > 0), first - back, self._complete_from)
        self._gaps = self._gaps or bool((after < 0).any())
        return moved

    def _check_shift(self, before: NDArray[np.int64], after: NDArray[np.int64], back: NDArray[np.int64]) -> None:
        """Raise if the mask would show other pairs after the shift."""
        new = np.arange(_FUTURE_QUERIES)
        for b in range(len(before)) if np.any(back) else ():
            old_q, new_q = self.next[b] + new, self.next[b] - back[b] + new  # future queries
            old_k, new_k = np.concatenate([before[b], old_q]), np.concatenate([after[b], new_q])
            for mask in row_masks(self.mask, b, len(before)):
                if np.any(mask(old_q[:, None], old_k) != mask(new_q[:, None], new_k)):
                    raise CallError(
                        f"shift: {self.mask!r} shows other pairs at positions lower by {int(back[b])}, so tokens cannot "
                        "move.\nFix: keep= the number of leading positions that the mask names; windows with sinks work."
                    )

    def _widen(self, rows: int) -> None:
        """From one row of positions for the whole batch to one for each of its rows."""
        self.positions = np.repeat(self.positions, rows, 0)
        self.last_positions = np.repeat(self.last_positions, rows, 0)
        self.next, self._complete_from = np.repeat(self.next, rows), np.repeat(self._complete_from, rows)

    def _sweep(self, first: NDArray[np.int64], n: int) -> None:
        """Evict what no query from ``first`` (R,) on can see; then make room for ``n`` tokens and the next interval."""
        used = self.used
        live = used[~self._invisible(self.positions[:, used], first).all(0)]
        evicted = len(used) - len(live)
        if self.fixed and len(live) + n > self.capacity:
            raise CallError(
                f"append: {n} new tokens and {len(live)} that later queries still see do not fit the {self.capacity} slots of a fixed "
                f"capacity.\nFix: capacity={len(live) + n} or more, fewer tokens in an append, or a mask that hides old keys."
            )
        if evicted:
            self.evicted += evicted
            self._complete_from = first.copy()
        capacity, needed = self.capacity, len(live) + n
        self._since_sweep, self._interval = 0, max(self.block, needed // 8)
        self._most_live = max(self._most_live, len(live))
        enough = max(self._round(max(self._most_live, needed) + self._interval), self.least_capacity)
        if self.fixed:
            pass
        elif self.used_end + n > capacity and capacity - needed < self._interval // 2:
            if evicted or not len(used):
                capacity = enough
            else:  # a quarter more where tokens will be evicted at some time, so that little of it stays unused
                last = np.full_like(first, POSITION_MAX - 1)
                evicts = self._invisible(self.positions[:, used], last).all(0).any()
                capacity = self._round(needed + max(self._interval, needed // 4) if evicts else 2 * needed)
        elif evicted and capacity > enough + enough // 4:
            capacity = enough  # after a long prompt, a window needs less
        if len(live) < self.used_end or capacity != self.capacity:
            self._move(live, capacity)

    def _move(self, live: NDArray[np.int64], capacity: int) -> None:
        """New buffers of this capacity, with the tokens in these slots at their front."""
        used_end = len(live)
        positions = np.full((len(self.positions), capacity), -1, np.int64)
        positions[:, :used_end] = self.positions[:, live]
        self.positions, self.used_end = positions, used_end
        self._gaps = bool((positions[:, :used_end] < 0).any())
        consecutive = used_end and live[-1] - live[0] == used_end - 1
        self.moved = slice(int(live[0]), int(live[-1]) + 1) if consecutive else live

    def _invisible(self, k: NDArray[np.int64], first: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which of the keys ``k`` (R, S) no query of their own row from ``first`` (R,) on can see, (R, S)."""
        tokens = k[k >= 0]
        if not len(tokens):
            return np.ones(k.shape, bool)
        if np.all(self.mask.tile(int(first.min()), POSITION_MAX, int(tokens.min()), int(tokens.max()) + 1) == FULL):
            return np.zeros(k.shape, bool)  # without an answer for each key
        return np.asarray(seen(self.mask, first[:, None], POSITION_MAX, k, k + 1) == EMPTY)

    def _round(self, slots: int) -> int:
        return -(-slots // self.block) * self.block


# Positions as users pass them (lists, NumPy arrays or tensors), checked and converted to int64.


def as_positions(positions: Any, name: str = "append: positions") -> NDArray[np.int64]:
    """Integers below POSITION_MAX; negative ones mean "no token here"."""
    return positions_in_numpy(name, positions, "(N,) or (B, N)")


def same(positions: Any, known: NDArray[np.int64]) -> bool:
    """Whether positions equal the known ones (R, N) in value and shape: by content, since the array may have been changed."""
    if type(positions) is np.ndarray and positions.dtype == _INT64:
        shape = positions.shape
        if shape in (known.shape, known.shape[1:]) and positions.tobytes() == known.tobytes():
            return True  # several times faster than array_equal
    rows = np.atleast_2d(as_positions(positions))
    return rows.shape == known.shape and bool(np.all(np.maximum(rows, -1) == known))


def following(positions: Any, start: NDArray[np.int64], n: int, rows: int) -> NDArray[np.int64]:
    """Positions of ``n`` new tokens, (n,) or (rows, n), as (R, n); they must increase in each row, from ``start`` (R,) on."""
    positions = as_positions(positions)
    new = np.maximum(np.atleast_2d(positions), -1)
    if new.shape not in ((1, n), (rows, n)):
        raise CallError(
            f"append: positions {positions.shape} do not fit {n} new tokens in {rows} rows: expected ({n},) or ({rows}, {n})."
        )
    if len(new) < len(start):
        new = np.broadcast_to(new, (len(start), n))
    last = np.broadcast_to(start[:, None] - 1, (len(new), 1))
    before = np.maximum.accumulate(np.concatenate([last, new], 1), 1)[:, :-1]
    if np.any((new <= before) & (new >= 0)):
        raise CallError(
            f"append: positions {positions.tolist() if positions.size <= 16 else positions.shape} go back: "
            f"the next position is {start.tolist()}, and positions must increase.\nFix: crop(n) first, to remove tokens."
        )
    return new


def rows_of(index: Any, size: int, mask: Mask) -> NDArray[np.int64]:
    """Rows of a batch of this size; each must get a row with the same mask as its own."""
    rows = as_positions(index, "reorder: index")
    if rows.ndim != 1 or np.any((rows < 0) | (rows >= size)):
        raise CallError(f"reorder: index is {rows.tolist()}, but the cache has the rows 0 .. {size - 1}.")
    masks, heads = _batch_and_heads(mask)
    if masks > 1 and (
        len(rows) != size
        or any(mask.for_row(i, h) != mask.for_row(int(row), h) for i, row in enumerate(rows) for h in range(heads))
    ):
        raise CallError(
            f"reorder: index is {rows.tolist()}, but {mask!r} differs from row to row, and masks are not reordered.\n"
            "Fix: reorder only among rows that have the same mask."
        )
    return rows


def kept_of(index: Any, last_positions: NDArray[np.int64], rows: int) -> NDArray[np.int64]:
    """Which tokens of the newest append (R, N) stay, (1, m) or (rows, m), -1 at the end where a row keeps fewer."""
    kept = as_positions(index, "keep: index")
    if kept.ndim not in (1, 2) or (kept.ndim == 2 and len(kept) != rows):
        raise CallError(f"keep: index is {kept.shape}; expected (n,) for all rows, or ({rows}, n).")
    kept, n = np.maximum(np.atleast_2d(kept), -1), last_positions.shape[1]
    if np.any(kept >= n):
        raise CallError(f"keep: index reaches {int(kept.max())}, but the newest append has the tokens 0 .. {n - 1}.")
    ordered = np.sort(kept, 1)
    if np.any((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)) or np.any(
        (kept[:, 1:] >= 0) & (kept[:, :-1] < 0)
    ):
        raise CallError(f"keep: index is {kept.tolist()}; it names each token once, and -1 stands at the end of a row.")
    places = np.take_along_axis(np.broadcast_to(last_positions, (max(len(last_positions), len(kept)), n)), kept, 1)
    if np.any((places < 0) & (kept >= 0)):
        raise CallError("keep: index names a token where its row has none (position -1).\nFix: -1 in that row.")
    if len(last_positions) > 1 and len(kept) == 1:
        kept = np.repeat(kept, len(last_positions), 0)
    return kept[:1] if len(last_positions) == 1 and bool((kept == kept[:1]).all()) else kept


def ends_of(n: Any, rows: int) -> NDArray[np.int64]:
    """The next position after a crop: one for all rows, (1,), or one for each, (rows,)."""
    ends = np.atleast_1d(as_positions(n, "crop: n"))
    if ends.ndim != 1 or len(ends) not in (1, rows) or np.any(ends < 0):
        raise CallError(
            f"crop: n is {ends.tolist()}; it is the position of the next token, at least 0, "
            f"one for all or one for each of {rows} rows."
        )
    return ends


def positions_to_drop(positions: Any, rows: int) -> NDArray[np.int64]:
    """Positions of tokens, (1, n) or (rows, n)."""
    chosen = np.atleast_2d(as_positions(positions, "drop: positions"))
    if chosen.ndim != 2 or len(chosen) not in (1, rows):
        raise CallError(f"drop: positions are {chosen.shape}; expected (n,), or ({rows}, n) for each row of the batch.")
    return chosen


# Keys that come later.


class LookaheadCheck:
    """Rejects appends that leave a query without a key that the mask shows it; one for each cache.

    With a cache, each query is computed once. Under a causal mask, all its keys exist by then; a mask that shows later positions (a
    prefix, a band, ``full``) may show it a key of a later append. One tile answer proves that no query before ``end`` can:
    ``mask.tile(0, end, end, POSITION_MAX)`` is EMPTY. One vectorised call proves it for thousands of ends.

    Where it is not proven, a new query that certainly sees a later key raises (a FULL tile), and so does a new key that an earlier
    query sees, pair by pair if needed: tables and custom formulas have PARTIAL tiles without a visible pair.
    """

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
            ends = int(end.min()) + np.arange(min(_PROVEN_ENDS + high - low, _MOST_PROVEN_ENDS))
            proven = self._none_seen_after(ends[None])[0]
            self._proven = range(int(ends[0]), int(ends[0]) + (len(ends) if proven.all() else int(proven.argmin())))
        else:
            self._check_queries(positions[:, -_QUERIES_CHECKED:], end)

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
        k = np.minimum(end[:, None, None] + _KEY_EDGES, POSITION_MAX)  # (R, 1, S + 1)
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
    if (high - low) * len(k) > _FEW_PAIRS:
        k = k[np.asarray(mask.tile(low, high, k, k + 1)) != EMPTY]
    step = max(1, _PAIRS_AT_A_TIME // max(1, len(k)))
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
        return np.asarray(mask.tile(*edges), np.int8).reshape(math.prod(mask.batch), *shape).max(0)
    out = np.empty(shape, np.int8)
    for b in range(shape[0]):
        masks = row_masks(mask, b, shape[0])
        out[b] = np.max([np.asarray(mask_of_head.tile(*(edge[b] for edge in edges))) for mask_of_head in masks], 0)
    return out


def row_masks(mask: Mask, b: int, rows: int) -> list[Mask]:
    """The masks of all heads in row ``b``; with ``rows`` = 1, those of all rows of the batch."""
    batch, heads = _batch_and_heads(mask)
    return [mask.for_row(i, h) for i in (range(batch) if rows == 1 else [b]) for h in range(heads)]


def _batch_and_heads(mask: Mask) -> tuple[int, int]:
    """How many rows of a batch and heads have masks of their own."""
    batch = mask.batch
    return (batch[0] if batch else 1, batch[1] if len(batch) > 1 else 1)

"""The slot allocator of a cache: which slot holds the token at which position, and which slots are free. NumPy only.

A token keeps its slot until it is evicted, that is until no query from position ``t`` on can see it in any row of the batch:
``mask.tile(t, POSITION_MAX, k, k + 1)`` is EMPTY. Eviction runs in blocks, with one vectorised tile call for all keys, so its cost
per token is small:

    full              one FULL answer for the whole range: nothing is evicted
    windows, chunks   slots of evicted keys are reused, oldest first: a ring buffer of constant size
    sinks, prefixes   their keys are never EMPTY, so they stay
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lowtri.errors import CallError
from lowtri.generation.lookahead import LookaheadCheck, row_masks, seen
from lowtri.masks import EMPTY, FULL, POSITION_MAX, Mask
from lowtri.masks.arrays import positions_in_numpy

Slots: TypeAlias = "slice | NDArray[np.int64]"

_INT64 = np.dtype(np.int64)
_UNKNOWN, _NEVER = -1, -2
_AHEAD = 64  # number of future queries for which `shift` compares the mask before and after


class SlotAllocator:
    """Slots and positions of a cache; all layers write their keys and values to the slots given here.

    ``positions`` (R, capacity): the position of the token in each slot, -1 in free slots. R is 1 while all rows of the batch
    have the same positions, then B.
    """

    def __init__(self, mask: Mask, capacity: int, block: int, rewind: int, lookahead: LookaheadCheck | None) -> None:
        self.mask, self.floor, self.block, self.rewind = mask, capacity, block, rewind
        self.positions = np.full((1, capacity), -1, np.int64)
        self.next = np.zeros(1, np.int64)  # (R,) the position of the next token
        self.top = 0  # all used slots are below
        self.appends = 0
        self.evicted = 0
        self.newest: NDArray[np.int64] = self.positions[:, :0]  # (R, N) positions of the last append
        self.slots: Slots = slice(0, 0)  # its slots
        self.moved: Slots | None = None  # the old slots in their new order, if the last append moved the tokens
        self._complete_from = np.zeros(1, np.int64)  # (R,) queries from here on can see none of the evicted keys
        self.lookahead = lookahead  # None if queries may come before keys that the mask shows them
        # How many slots were in use when each had the position of its own number; or that an eviction rules it out.
        self._ordered = _UNKNOWN
        self._free = np.arange(capacity)
        self._taken = 0  # how many of _free are in use
        self._since_sweep = 0  # tokens appended since the last sweep
        self._interval = block  # tokens between two sweeps
        self._most_live = 0  # the largest number of tokens left after a sweep

    @property
    def capacity(self) -> int:
        return self.positions.shape[1]

    @property
    def used(self) -> NDArray[np.int64]:
        """Slots that hold a token of any row, ascending."""
        return np.flatnonzero((self.positions[:, : self.top] >= 0).any(0))

    def contiguous(self) -> bool:
        """Whether slot i holds position i in all rows: attention's default positions."""
        slots, new = self.slots, self.newest
        if len(self.positions) > 1:
            return False
        if new.size == 1 and isinstance(slots, slice):  # the usual case: a token after those that were in order
            if new.item() != slots.start:
                return False
            if self._ordered == slots.start == self.top - 1:
                self._ordered = self.top
                return True
            if self._ordered == _NEVER:
                return False
        ordered = np.array_equal(self.positions[0, : self.top], np.arange(self.top))
        self._ordered = self.top if ordered else _NEVER
        return ordered

    def upcoming(self, n: int) -> NDArray[np.int64]:
        """Default positions of the next ``n`` tokens, (R, n)."""
        return self.next[:, None] + np.arange(n)

    def is_newest(self, positions: Any) -> bool:
        """Whether these are the positions of the last append, for all rows or for each."""
        if same(positions, self.newest):
            return True
        rows = np.maximum(np.atleast_2d(as_positions(positions)), -1)
        fits = rows.shape[1:] == self.newest.shape[1:] and (len(rows) == 1 or len(self.newest) == 1)
        return fits and bool(np.all(rows == self.newest))

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
        if self._since_sweep >= self._interval or len(self._free) - self._taken < n:
            earliest = np.where(new >= 0, new, POSITION_MAX).min(1, initial=POSITION_MAX)
            earliest = np.where(earliest < POSITION_MAX, earliest, self.next)  # (R,) no query comes before it
            self._sweep(np.maximum(earliest - self.rewind, 0), n)
        self.slots = self._take(n)
        self.positions[:, self.slots] = new
        self.newest = new
        if n:
            self.next = new[:, -1] + 1 if follows else np.maximum(self.next, new.max(1) + 1)
        self._since_sweep += n
        self.appends += 1

    def crop(self, n: NDArray[np.int64]) -> None:
        """Remove the tokens at positions from ``n`` (R,) on."""
        if np.any((n < self._complete_from) & (n < self.next)):
            raise CallError(
                f"crop: n is {n.tolist()}, but keys that queries before {self._complete_from.tolist()} may see are evicted.\n"
                f"Fix: crop to {self._complete_from.tolist()} or later, or start a new cache."
            )
        if len(n) > len(self.positions):
            self._widen(len(n))
        if self.lookahead is not None:
            self.lookahead.crop(n, self.next)
        self.positions[self.positions >= n[:, None]] = -1
        self.next = np.minimum(self.next, n)
        newest = int(self.positions.max(0, initial=-1).argmax()) if self.capacity else 0
        self.slots = slice(newest, newest + int(self.next.max() > 0))  # continue after the newest token left
        self._list_free()

    def reorder(self, index: NDArray[np.int64]) -> None:
        if len(self.positions) > 1:
            self.positions, self.next = self.positions[index], self.next[index]
            self._complete_from = self._complete_from[index]
        if self.lookahead is not None:
            self.lookahead.reorder(index)

    def shift(self, keep: int) -> NDArray[np.int64]:
        """Close the gap of evicted tokens after position ``keep``; return by how much each slot's token moved, (R, top).

        Rows move independently, each as far as it can; a key that only other rows still see is evicted from its row.
        """
        first = np.maximum(self.next - self.rewind, 0)
        used = self.used
        before = self.positions[:, used]  # (R, S)
        evicted = self._invisible_by_row(before, first) & (before >= 0)
        before = np.where(evicted, -1, before)
        oldest = np.where(before >= keep, before, POSITION_MAX).min(1, initial=POSITION_MAX)
        back = np.where(oldest < POSITION_MAX, oldest, self.next) - keep  # (R,)
        back = np.where(self.next > keep, back, 0)
        after = before - np.where(before >= keep, back[:, None], 0)
        self._check_shift(before, after, back)
        moved = np.zeros((len(before), self.top), np.int64)
        moved[:, used] = after - before
        self.evicted += int(np.count_nonzero((before < 0).all(0)))
        self.positions[:, used] = after
        self.next = self.next - back
        if self.lookahead is not None:
            self.lookahead.shift(keep, back)
        self._complete_from = np.where(evicted.any(1) | (back > 0), first - back, self._complete_from)
        self._list_free()
        return moved[:, : self.top]

    def _check_shift(self, before: NDArray[np.int64], after: NDArray[np.int64], back: NDArray[np.int64]) -> None:
        """Raise if the mask would show other pairs after the shift."""
        new = np.arange(_AHEAD)
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
        self.next, self._complete_from = np.repeat(self.next, rows), np.repeat(self._complete_from, rows)

    def _sweep(self, first: NDArray[np.int64], n: int) -> None:
        """Evict what no query from ``first`` (R,) on can see; then resize for ``n`` tokens and the next interval."""
        full = len(self._free) - self._taken < n
        used = self.used
        evicted = used[self._invisible(self.positions[:, used], first)]
        if len(evicted):
            self.positions[:, evicted] = -1
            self.evicted += len(evicted)
            self._complete_from = first.copy()
        live = len(used) - len(evicted)
        self._since_sweep, self._interval = 0, max(self.block, live // 8)
        self._most_live = max(self._most_live, live)
        needed = live + n
        if full and self.capacity - needed < self._interval // 2:
            self._resize(self._grown(first, n, needed))
        elif self.capacity > 2 * (small := max(self._round(max(self._most_live, needed) + self._interval), self.floor)):
            self._resize(small)  # after a long prompt, a window needs less
        else:
            self._list_free()

    def _invisible(self, k: NDArray[np.int64], first: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which of the keys ``k`` (R, S) no query from ``first`` (R,) on can see in any row and head, (S,)."""
        tokens = k[k >= 0]
        if not len(tokens):
            return np.ones(k.shape[1], bool)
        whole = np.asarray(self.mask.tile(int(first.min()), POSITION_MAX, int(tokens.min()), int(tokens.max()) + 1))
        if np.all(whole == FULL):
            return np.zeros(k.shape[1], bool)
        return np.asarray(self._invisible_by_row(k, first).all(0))

    def _invisible_by_row(self, k: NDArray[np.int64], first: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which of the keys ``k`` (R, S) no query of their own row can see any more, (R, S)."""
        return np.asarray(seen(self.mask, first[:, None], POSITION_MAX, k, k + 1) == EMPTY)

    def _grown(self, first: NDArray[np.int64], n: int, needed: int) -> int:
        """The new capacity when ``needed`` slots are too many for the present one.

        It doubles, unless enough of the present tokens will be evicted before a smaller one is full, as under a window.
        """
        if needed == n:  # the first tokens
            return max(self._round(needed + max(self.block, needed // 8)), self.floor)
        k = np.concatenate([self.positions[:, self.used], first[:, None] + np.arange(n)], 1)
        for part in (8, 4, 2):
            more = max(self.block, needed // part)
            if np.count_nonzero(self._invisible(k, first + n + more)) >= max(self.block, needed // 8):
                return self._round(needed + more)
        return self._round(2 * needed)

    def _round(self, slots: int) -> int:
        return -(-slots // self.block) * self.block

    def _resize(self, capacity: int) -> None:
        """New buffers, the tokens at their front in the order of their positions."""
        used = self.used
        used = used[np.argsort(self.positions[:, used].max(0), kind="stable")]
        positions = np.full((len(self.positions), capacity), -1, np.int64)
        positions[:, : len(used)] = self.positions[:, used]
        self.moved = as_slots(used)
        self.positions, self.slots = positions, slice(0, len(used))
        self._list_free()

    def _list_free(self) -> None:
        """List free slots in order of use: after the newest token, then from the front, so that runs stay long."""
        self._ordered = _UNKNOWN
        taken = (self.positions >= 0).any(0)
        used = np.flatnonzero(taken)
        self.top = int(used[-1]) + 1 if len(used) else 0
        free = np.flatnonzero(~taken)
        newest = self.slots.stop - 1 if isinstance(self.slots, slice) else self.slots[-1]
        on = int(np.searchsorted(free, newest))
        self._free, self._taken = np.concatenate([free[on:], free[:on]]), 0

    def _take(self, n: int) -> Slots:
        slots = as_slots(self._free[self._taken : self._taken + n])
        self._taken += n
        end = slots.stop if isinstance(slots, slice) else int(slots.max()) + 1
        if n and end > self.top:
            self.top = end
        return slots


def as_slots(slots: NDArray[np.int64]) -> Slots:
    """The slots as a slice where they are consecutive: slices are copied without an index."""
    n = len(slots)
    if n == 0:
        return slice(0, 0)
    start = int(slots[0])
    # Free slots ascend in at most two runs, so comparing the ends nearly suffices; moved ones may be in any order.
    if int(slots[-1]) - start == n - 1 and (n <= 2 or bool(np.all(np.diff(slots) == 1))):
        return slice(start, start + n)
    return slots


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
    masks, heads = (*mask.batch, 1, 1)[:2]
    if masks > 1 and (
        len(rows) != size
        or any(mask.at(i, h) != mask.at(int(row), h) for i, row in enumerate(rows) for h in range(heads))
    ):
        raise CallError(
            f"reorder: index is {rows.tolist()}, but {mask!r} differs from row to row, and masks are not reordered.\n"
            "Fix: reorder only among rows that have the same mask."
        )
    return rows


def ends_of(n: Any, rows: int) -> NDArray[np.int64]:
    """The next position after a crop: one for all rows, (1,), or one for each, (rows,)."""
    ends = np.atleast_1d(as_positions(n, "crop: n"))
    if ends.ndim != 1 or len(ends) not in (1, rows) or np.any(ends < 0):
        raise CallError(
            f"crop: n is {ends.tolist()}; it is the position of the next token, at least 0, "
            f"one for all or one for each of {rows} rows."
        )
    return ends

"""The book of a cache: which slot holds the token of which place, and which slots are free again. NumPy only.

A token gets a slot when it arrives and keeps it until it is dead for every row of the batch, that is until no query from
now on can see it: ``mask.tile(t, POSITION_MAX, k, k + 1)`` is EMPTY. The question is asked of all held keys at once, and only now
and then, so that its cost for one token stays small:

    full              one question for the whole range is FULL: nobody is dead, nothing else is asked
    windows, chunks   the dead slots are used again, oldest first: a ring, whose memory no longer grows
    sinks, prefixes   their keys are never EMPTY, so their slots stay
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lowtri.decoding.missing import Missing, row_masks, seen
from lowtri.decoding.positions import as_positions, following, same
from lowtri.errors import CallError
from lowtri.masks import EMPTY, FULL, POSITION_MAX, Mask

__all__ = ["Book", "Slots"]

Slots: TypeAlias = "slice | NDArray[np.int64]"
_AHEAD = 64  # so many queries to come are asked whether moving tokens changes what they see


class Book:
    """Slots and places of one cache; every layer writes its keys and values where the book says.

    ``positions`` (R, capacity): the place of the token in each slot, -1 where there is none. R is 1 while all rows of the
    batch stand at the same places, else B.
    """

    def __init__(self, mask: Mask, capacity: int, block: int, rewind: int, missing: Missing | None) -> None:
        self.mask, self.floor, self.block, self.rewind = mask, capacity, block, rewind
        self.positions = np.full((1, capacity), -1, np.int64)
        self.next = np.zeros(1, np.int64)  # (R,) the place of the next token
        self.top = 0  # every used slot lies below
        self.step = 0  # how many appends have been opened
        self.dropped = 0
        self.newest: NDArray[np.int64] = self.positions[:, :0]  # (R, N) the places of the last append
        self.slots: Slots = slice(0, 0)  # where its tokens stand
        self.moved: Slots | None = None  # set where that append moved the tokens: old slots, in their new order
        self._sure = np.zeros(
            1, np.int64
        )  # (R,) what was dropped is dead for queries from here on, and perhaps not before
        self.missing = missing  # None where queries may come before keys that the mask shows them
        self._free = np.arange(capacity)
        self._taken = 0  # how many of _free are in use
        self._since = 0  # tokens since the last look for the dead
        self._pause = block  # tokens until the next one
        self._most = 0  # the most tokens that were alive after such a look

    @property
    def capacity(self) -> int:
        return self.positions.shape[1]

    @property
    def used(self) -> NDArray[np.int64]:
        """The slots that hold a token for any row, in ascending order."""
        return np.flatnonzero((self.positions[:, : self.top] >= 0).any(0))

    def straight(self) -> bool:
        """Whether every slot holds the token of its own number, in all rows: then nobody needs to be told the places."""
        return len(self.positions) == 1 and np.array_equal(self.positions[0, : self.top], np.arange(self.top))

    def coming(self, n: int) -> NDArray[np.int64]:
        """Where the next ``n`` tokens stand if nothing else is said, (R, n)."""
        return self.next[:, None] + np.arange(n)

    def follows(self, positions: Any) -> bool:
        """Whether these are the positions of the newest append, said once for all rows or for each."""
        if same(positions, self.newest):
            return True
        given = np.maximum(np.atleast_2d(as_positions(positions)), -1)
        fits = given.shape[1:] == self.newest.shape[1:] and (len(given) == 1 or len(self.newest) == 1)
        return fits and bool(np.all(given == self.newest))

    def open(self, n: int, rows: int, positions: Any = None) -> None:
        """Begin an append of ``n`` tokens: let the dead go, make room, and note where the new tokens stand."""
        places = self.coming(n)
        if positions is not None and not same(positions, places):
            places = following(positions, self.next, n, rows)
        if self.missing is not None:
            self.missing.check(places, self.next)
        if len(places) > len(self.positions):
            self._widen(len(places))
        self.moved = None
        if self._since >= self._pause or len(self._free) - self._taken < n:
            self._sweep(np.maximum(self._earliest(places) - self.rewind, 0), n)
        self.slots = self._take(n)
        self.positions[:, self.slots] = places
        self.newest = places
        if n:
            self.next = np.maximum(self.next, places.max(1) + 1)
        self._since += n
        self.step += 1

    def crop(self, n: NDArray[np.int64]) -> None:
        """Forget the tokens at places from ``n`` (R,) on."""
        if np.any((n < self._sure) & (n < self.next)):
            raise CallError(
                f"crop: n is {n.tolist()}, but keys that a query before {self._sure.tolist()} may see are dropped already.\n"
                f"Fix: crop to {self._sure.tolist()} or later, or start a new cache."
            )
        if len(n) > len(self.positions):
            self._widen(len(n))
        if self.missing is not None:
            self.missing.crop(n, self.next)
        self.positions[self.positions >= n[:, None]] = -1
        self.next = np.minimum(self.next, n)
        newest = int(self.positions.max(0, initial=-1).argmax()) if self.capacity else 0
        self.slots = slice(newest, newest + int(self.next.max() > 0))  # go on behind the newest token that is left
        self._list_free()

    def reorder(self, index: NDArray[np.int64]) -> None:
        if len(self.positions) > 1:
            self.positions, self.next, self._sure = self.positions[index], self.next[index], self._sure[index]
        if self.missing is not None:
            self.missing.reorder(index)

    def shift(self, keep: int) -> NDArray[np.int64]:
        """Close the gap that the dead have left behind the places below ``keep``; how far each slot's token moved, (R, top).

        Each row moves on its own, as far as it can, so what a row has lost of tokens that others still see goes here.
        """
        first = np.maximum(self.next - self.rewind, 0)
        used = self.used
        places = self.positions[:, used]  # (R, S)
        dead = self._dead_by_row(places, first) & (places >= 0)
        places = np.where(dead, -1, places)
        oldest = np.where(places >= keep, places, POSITION_MAX).min(1, initial=POSITION_MAX)
        back = np.where(oldest < POSITION_MAX, oldest, self.next) - keep  # (R,)
        back = np.where(self.next > keep, back, 0)
        after = places - np.where(places >= keep, back[:, None], 0)
        self._check_shift(places, after, back)
        moved = np.zeros((len(places), self.top), np.int64)
        moved[:, used] = after - places
        self.dropped += int(np.count_nonzero((places < 0).all(0)))
        self.positions[:, used] = after
        self.next = self.next - back
        if self.missing is not None:
            self.missing.shift(keep, back)
        self._sure = np.where(dead.any(1) | (back > 0), first - back, self._sure)
        self._list_free()
        return moved[:, : self.top]

    def _check_shift(self, before: NDArray[np.int64], after: NDArray[np.int64], back: NDArray[np.int64]) -> None:
        """Refuse to move tokens under a mask that would answer differently there."""
        new = np.arange(_AHEAD)
        rows = range(len(before)) if np.any(back) else ()
        for b in rows:
            then, now = self.next[b] + new, self.next[b] - back[b] + new  # queries to come, before and after
            old, moved = np.concatenate([before[b], then]), np.concatenate([after[b], now])
            each = row_masks(self.mask, b, len(before))
            if any(np.any(one(then[:, None], old) != one(now[:, None], moved)) for one in each):
                raise CallError(
                    f"shift: {self.mask!r} does not show the same at places that are {int(back[b])} lower, "
                    "so tokens cannot move.\nFix: keep= as many as the mask treats by their place; "
                    "masks of windows and sinks can be shifted."
                )

    def _earliest(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """The earliest place in each row from which a query can still come, (R,)."""
        earliest = np.where(places >= 0, places, POSITION_MAX).min(1, initial=POSITION_MAX)
        return np.where(earliest < POSITION_MAX, earliest, self.next)

    def _widen(self, rows: int) -> None:
        """From one row of places for all to one for each row of the batch."""
        self.positions = np.repeat(self.positions, rows, 0)
        self.next, self._sure = np.repeat(self.next, rows), np.repeat(self._sure, rows)

    # The dead.

    def _sweep(self, first: NDArray[np.int64], n: int) -> None:
        """Free the slots of the dead, then grow or shrink so that ``n`` tokens and a good pause fit."""
        cramped = len(self._free) - self._taken < n
        used = self.used
        dead = used[self._dead(self.positions[:, used], first)]
        if len(dead):
            self.positions[:, dead] = -1
            self.dropped += len(dead)
            self._sure = first.copy()
        live = len(used) - len(dead)
        self._since, self._pause = 0, max(self.block, live // 8)
        self._most = max(self._most, live)
        room = live + n
        if cramped and self.capacity - room < self._pause // 2:
            self._resize(self._roomy(first, n, room))
        elif self.capacity > 2 * (small := max(self._round(max(self._most, room) + self._pause), self.floor)):
            self._resize(small)  # a long prompt has gone by, and a window needs less
        else:
            self._list_free()

    def _dead(self, k: NDArray[np.int64], first: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which of the keys ``k`` (R, S) no query from ``first`` (R,) on can see, in any row and head: (S,)."""
        real = k[k >= 0]
        if not len(real):
            return np.ones(k.shape[1], bool)
        whole = np.asarray(self.mask.tile(int(first.min()), POSITION_MAX, int(real.min()), int(real.max()) + 1))
        if np.all(whole == FULL):
            return np.zeros(k.shape[1], bool)
        return np.asarray(self._dead_by_row(k, first).all(0))

    def _dead_by_row(self, k: NDArray[np.int64], first: NDArray[np.int64]) -> NDArray[np.bool_]:
        """The same asked of each row of places alone, in any head: (R, S)."""
        return np.asarray(seen(self.mask, first[:, None], POSITION_MAX, k, k + 1) == EMPTY)

    # Room.

    def _roomy(self, first: NDArray[np.int64], n: int, room: int) -> int:
        """How many slots to have when ``room`` are needed now.

        Twice as many, unless the mask says that enough of the tokens held now will be dead by the time that less is full:
        so a window ends with little more than its keys.
        """
        if room == n:  # the first tokens
            return max(self._round(room + max(self.block, room // 8)), self.floor)
        k = np.concatenate([self.positions[:, self.used], first[:, None] + np.arange(n)], 1)
        for part in (8, 4, 2):
            more = max(self.block, room // part)
            if np.count_nonzero(self._dead(k, first + n + more)) >= max(self.block, room // 8):
                return self._round(room + more)
        return self._round(2 * room)

    def _round(self, slots: int) -> int:
        return -(-slots // self.block) * self.block

    def _resize(self, capacity: int) -> None:
        """Other buffers, with the tokens moved to the front in the order of their places."""
        used = self.used
        used = used[np.argsort(self.positions[:, used].max(0), kind="stable")]
        positions = np.full((len(self.positions), capacity), -1, np.int64)
        positions[:, : len(used)] = self.positions[:, used]
        self.moved = _run(used)
        self.positions, self.slots = positions, slice(0, len(used))
        self._list_free()

    def _list_free(self) -> None:
        """List the free slots in the order of use: on from the newest token, then from the front, so that runs stay long."""
        taken = (self.positions >= 0).any(0)
        used = np.flatnonzero(taken)
        self.top = int(used[-1]) + 1 if len(used) else 0
        free = np.flatnonzero(~taken)
        newest = self.slots.stop - 1 if isinstance(self.slots, slice) else self.slots[-1]
        on = int(np.searchsorted(free, newest))
        self._free, self._taken = np.concatenate([free[on:], free[:on]]), 0

    def _take(self, n: int) -> Slots:
        slots = _run(self._free[self._taken : self._taken + n])
        self._taken += n
        end = slots.stop if isinstance(slots, slice) else int(slots.max()) + 1
        if n and end > self.top:
            self.top = end
        return slots


def _run(slots: NDArray[np.int64]) -> Slots:
    """The slots as a slice where they follow one another, since a slice is copied without an index."""
    n = len(slots)
    if n == 0:
        return slice(0, 0)
    start = int(slots[0])
    # Free slots ascend in at most two stretches, so the ends alone tell; moved ones may be in any order.
    if int(slots[-1]) - start == n - 1 and (n <= 2 or bool(np.all(np.diff(slots) == 1))):
        return slice(start, start + n)
    return slots

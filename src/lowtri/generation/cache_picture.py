"""Pictures of a cache: which positions are held, for how long, and which are evicted."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from lowtri.generation.slots import row_masks
from lowtri.masks import EMPTY, FULL, POSITION_MAX, Mask
from lowtri.pictures.grids import MAX_CELLS, Grid, Look, Panel, picture, used
from lowtri.pictures.pages import card
from lowtri.pictures.svg import HIDDEN, fill

if TYPE_CHECKING:
    from lowtri.generation.slots import SlotAllocator

_ROWS = 8  # rows of a batch that are drawn; the rest is counted
_FREED, _HELD, _STAYS = 1, 2, 3
_LOOKS = (
    Look("·", HIDDEN, "not held: evicted, or padding"),
    Look("░", fill("visible") + ' fill-opacity="0.15"', "held, hidden from now on"),
    Look("▓", fill("partly"), "held until the mask hides it"),
    Look("█", fill("visible"), "stays: every later query sees it"),
)


class CachePicture:
    """What notebooks and terminals show of a cache."""

    if TYPE_CHECKING:
        mask: Mask
        _slots: SlotAllocator

        @property
        def held(self) -> int: ...
        @property
        def evicted(self) -> int: ...
        @property
        def capacity(self) -> int: ...
        @property
        def bytes(self) -> int: ...

    def __repr__(self) -> str:
        return f"KVCache({self.mask!r}): {self.held} held, {self.evicted} evicted, {self.bytes} bytes"

    def draw(self) -> str:
        """The positions from 0 on, a sign for each, and a line for each row of a batch with positions of its own.

        >>> import numpy as np
        >>> from lowtri import KVCache
        >>> cache = KVCache("causal & (window(4) | first(2))", block=1)
        >>> for t in range(12):
        ...     _ = cache.append(np.zeros((1, 8)), np.zeros((1, 8)))
        >>> print(cache.draw())
        KVCache(causal & (window(4) | first(2))): 6 held, 6 evicted, 768 bytes
        ██······░▓▓▓
        · not held: evicted, or padding
        ░ held, hidden from now on
        ▓ held until the mask hides it
        █ stays: every later query sees it

        Sinks and prefixes stay; a window's keys are held until no later query sees them. Beyond 64 positions a sign stands for
        several, and for the longest-lived of them.
        """
        cells, step = self._cells()
        lines = Grid(cells, _LOOKS).lines() + [f"{look.sign} {look.meaning}" for look in used(_LOOKS, cells)]
        at = len(cells)
        lines[at:at] = [f"... and {more} more rows" for more in self._left_out]
        return "\n".join([repr(self), *lines, *[f"a sign: {step:,} positions"] * (step > 1)])

    def __str__(self) -> str:
        return self.draw()

    def _repr_svg_(self) -> str:
        cells, step = self._cells()
        below = "positions →" if cells.size else "nothing appended yet"
        more = "".join(f"   ... and {more:,} more rows" for more in self._left_out)
        last = int(self._slots.next.max()) - 1
        labels = [f"row {i}" for i in range(len(cells))] if len(cells) > 1 else ()
        size = min(24.0, 480 / max(cells.shape[1], 1))
        grid = Grid(cells, _LOOKS, size, rows=labels, ends=["0", f"{last:,}"][: last + 1])
        note = [f"a cell: {step:,} positions, and the longest-lived of them"] * (step > 1)
        return picture(repr(self), [Panel([grid], repr(self), below + more, "")], used(_LOOKS, cells), note)

    def _repr_html_(self) -> str:
        held = f"{self.held:,} of {self.capacity:,} slots hold a token, {self.evicted:,} tokens evicted, {self.bytes:,} bytes"
        return card("cache", self._repr_svg_(), held, str(self))

    @property
    def _left_out(self) -> list[int]:
        """How many rows are not drawn, or nothing."""
        return [len(self._slots.positions) - _ROWS] * (len(self._slots.positions) > _ROWS)

    def _cells(self) -> tuple[NDArray[np.int8], int]:
        """How long each row's positions are held, (rows, cells), and how many positions a cell stands for."""
        slots = self._slots
        n = int(slots.next.max())
        step = max(1, -(-n // MAX_CELLS))
        states = np.zeros((min(len(slots.positions), _ROWS), -(-n // step) * step), np.int8)
        for b, row in enumerate(states):
            positions = slots.positions[b, : slots.top]
            positions = positions[positions >= 0]
            if len(positions):
                row[positions] = self._states(b, positions)
        return states.reshape(len(states), -1, step).max(2), step

    def _states(self, b: int, positions: NDArray[np.int64]) -> NDArray[np.int8]:
        """How long the held positions of a row will be seen, by the mask's answers for all later queries."""
        slots = self._slots
        answers = np.stack(
            [
                np.broadcast_to(mask.tile(int(slots.next[b]), POSITION_MAX, positions, positions + 1), positions.shape)
                for mask in row_masks(self.mask, b, len(slots.positions))
            ]
        )
        states = np.full(len(positions), _HELD, np.int8)
        states[(answers == EMPTY).all(0)] = _FREED
        states[(answers == FULL).all(0)] = _STAYS
        return states

"""Pictures of a cache: which positions are held, for how long, and which are evicted."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from lowtri.generation.lookahead import row_masks
from lowtri.masks import EMPTY, FULL, POSITION_MAX, Mask
from lowtri.pictures.pages import card
from lowtri.pictures.svg import HIDDEN, State, Strip, fill, strips_svg

if TYPE_CHECKING:
    from lowtri.generation.slots import SlotAllocator

_CELLS = 64  # of a row; beyond it a cell stands for several positions
_ROWS = 8  # rows of a batch that are drawn; the rest is counted
_NOT_HELD, _FREED, _HELD, _STAYS = range(4)


_STATES = (
    State("·", HIDDEN, "not held: evicted, or padding"),
    State("░", fill("visible") + ' fill-opacity="0.15"', "held, hidden from now on"),
    State("▓", fill("partly"), "held until the mask hides it"),
    State("█", fill("visible"), "stays: every later query sees it"),
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
        rows, step = self._cells()
        used = sorted({int(state) for row in rows for state in row})
        lines = ["".join(_STATES[state].sign for state in row) for row in rows]
        left_out = len(self._slots.positions) - len(rows)
        lines += [f"... and {left_out} more rows"] * bool(left_out)
        lines += [f"{_STATES[state].sign} {_STATES[state].meaning}" for state in used]
        return "\n".join([repr(self), *lines, *([f"a sign: {step:,} positions"] if step > 1 else [])])

    def __str__(self) -> str:
        return self.draw()

    def _repr_svg_(self) -> str:
        rows, step = self._cells()
        left_out = len(self._slots.positions) - len(rows)
        below = "positions →" if len(rows[0]) else "nothing appended yet"
        return strips_svg(
            repr(self),
            [Strip(f"row {i}" if len(rows) > 1 else "", row.tolist()) for i, row in enumerate(rows)],
            _STATES,
            below + (f"   ... and {left_out:,} more rows" if left_out else ""),
            note=f"a cell: {step:,} positions, and the longest-lived of them" if step > 1 else "",
            last=f"{int(self._slots.next.max()) - 1:,}",
        )

    def _repr_html_(self) -> str:
        held = f"{self.held:,} of {self.capacity:,} slots hold a token, {self.evicted:,} tokens evicted, {self.bytes:,} bytes"
        return card("cache", self._repr_svg_(), held, str(self))

    def _cells(self) -> tuple[list[NDArray[np.int8]], int]:
        """The states of each row's positions, (cells,), and how many positions a cell stands for."""
        slots = self._slots
        n = int(slots.next.max())
        step = max(1, -(-n // _CELLS))
        rows = []
        for b in range(min(len(slots.positions), _ROWS)):
            states = np.zeros(-(-n // step) * step, np.int8)
            positions = slots.positions[b, : slots.top]
            positions = positions[positions >= 0]
            if len(positions):
                states[positions] = self._states(b, positions)
            rows.append(states.reshape(-1, step).max(1))
        return rows, step

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

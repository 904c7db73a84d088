"""Masks of arrays: flags of keys, lengths, and tables of pairs.

Each array has a small index, computed on first use, so that the cost of a tile answer does not depend on the tile's size.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from lowtri.errors import MaskError
from lowtri.masks.arrays import ROWS, TABLES, VECTOR, FrozenArray, bool_array, in_program, integer_array, is_traced
from lowtri.masks.formulas import First
from lowtri.masks.mask import Mask, constructor
from lowtri.masks.tile import POSITION_MAX, Index, Interval, Truth, within
from lowtri.masks.traced_lengths import OfTracedLengths, lengths_text


@dataclass(frozen=True, repr=False)
class Keys(Mask):
    """Only keys whose flag is set; a key past the array is real."""

    valid: FrozenArray

    depends_on_query = False

    @cached_property
    def _flags(self) -> NDArray[np.bool_]:
        return np.append(self.valid.array, True)  # the last flag is that of all keys past the array

    @cached_property
    def _counts(self) -> NDArray[np.int64]:
        return np.concatenate([[0], np.cumsum(self._flags)])

    def _sees(self, q: Index, k: Index) -> Any:
        k = within(k, len(self._flags))
        if not isinstance(k, Interval):
            return self._flags[k] & (q >= 0)
        valid = self._counts[k.high + 1] - self._counts[k.low]
        return Truth(valid == k.high - k.low + 1, valid > 0) & (q >= 0)

    def _tile_key(self, q0: Index, k0: Index, nq: int, nk: int) -> list[Index]:
        return [k0]


@dataclass(frozen=True, repr=False)
class KeyLengths(Mask):
    """In batch row b only the first ``lengths[b]`` keys."""

    lengths: tuple[int, ...]
    _array: ClassVar[NDArray[np.int64]]

    depends_on_query = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "_batch", (len(self.lengths),))
        object.__setattr__(self, "_array", np.array(self.lengths, np.int64))  # which compiled programs read

    def _for_row(self, b: int, h: int) -> Mask:
        return First(self.lengths[b])

    def _extent(self) -> int:
        return max(self.lengths) + max(self.lengths) // 2

    def _text(self, arrays: list[Any] | None = None) -> str:
        lengths = lengths_text(self.lengths, self._array, arrays)
        return f"keys(lengths={lengths})"


@constructor()
def keys(valid: Any = None, *, lengths: Any = None) -> Mask:
    """Padding, on either side: only real keys are visible.

    >>> from lowtri import causal
    >>> print((causal() & keys([False, True, True])).draw(3))
    ···
    ·█·
    ·██
    >>> keys(lengths=[1, 2]).dense(1, 3).astype(int).tolist()
    [[[1, 0, 0]], [[1, 1, 0]]]

    Args:
        valid: True where the key is real, bool, (N,) or (B, N). Keys past the array are real, as new tokens are.
        lengths: instead of ``valid``: how many keys are real in each batch row, (B,). Every later key is hidden.

    Raises:
        MaskError: if both or neither are given, or ``valid`` holds no bools.

    The same mask elsewhere: transformers ``attention_mask`` (1 = real); torch's ``key_padding_mask`` is its negation.
    """
    if (valid is None) == (lengths is None):
        raise MaskError("keys: give valid (True = real) or lengths=, one of them.")
    valid = in_program(valid)
    lengths = in_program(lengths)
    if is_traced(lengths):
        return OfTracedLengths(FrozenArray(integer_array("keys", "lengths", lengths, VECTOR)), "keys", "lengths")
    if lengths is not None:
        sizes = integer_array("keys", "lengths", lengths, VECTOR).tolist()
        if min(sizes) < 0 or max(sizes) > POSITION_MAX:
            raise MaskError(
                f"keys: lengths are {sizes[:8]}; there is one for each batch row, none below 0 or beyond 2**62."
            )
        return KeyLengths(tuple(sizes))
    return Keys(FrozenArray(bool_array("keys", "valid", valid, ROWS)))


@dataclass(frozen=True, repr=False)
class Table(Mask):
    """All pairs written out. Its rows are the queries at the last Nq of its Nk keys, as in a call."""

    table: FrozenArray

    _rank = 2
    depends_on_query = False  # a table of more rows than columns counts its rows from 0

    @cached_property
    def _sums(self) -> _Sums:
        return _Sums(self.table.array)

    @property
    def _start(self) -> int:
        nq, nk = self.table.array.shape
        return max(nk - nq, 0)

    def _sees(self, q: Index, k: Index) -> Any:
        if isinstance(q, Interval):
            return self._of_tile(q, k)
        nq, nk = self.table.array.shape
        rows = q - self._start
        last = self._start + nq - 1
        # A negative position holds no token and needs no row; without queries or without keys there are no pairs.
        outside = np.any((q >= 0) & ((rows < 0) | (rows >= nq))) or np.any(k >= nk)
        if outside and np.size(q) and np.size(k):
            raise MaskError(
                f"{self!r} has rows for the queries {self._start} .. {last} and columns for the keys 0 .. {nk - 1}, "
                f"but the call has queries {max(np.min(q), 0)} .. {np.max(q)} and keys {max(np.min(k), 0)} .. {np.max(k)}.\n"
                "Fix: a larger table, or q_positions= and k_positions= that lie inside it."
            )
        return _pairs(self.table.array, within(rows, nq), within(k, nk))

    def _packed(self, q: NDArray[np.int64], k: NDArray[np.int64]) -> NDArray[np.uint64] | None:
        nq, nk = self.table.array.shape
        rows = q - self._start
        for positions, end in ((rows, nq), (k, nk)):
            if not len(positions) or positions[0] < 0 or positions[-1] >= end or np.any(np.diff(positions) != 1):
                return None
        return pack_queries(self.table.array[rows[0] : rows[-1] + 1, k[0] : k[-1] + 1])

    def _of_tile(self, q: Interval, k: Interval) -> Truth:
        nq, nk = self.table.array.shape
        q = q - self._start
        if type(q.low) is type(k.low) is int and (q.low, q.high, k.low, k.high) == (0, nq - 1, 0, nk - 1):
            return Truth(bool(self.table.array.all()), bool(self.table.array.any()))  # needs no sums
        rows = within(q, nq)
        columns = within(k, nk)
        inside = (rows.low == q.low) & (rows.high == q.high) & (columns.low == k.low) & (columns.high == k.high)
        top, bottom = rows.low, rows.high + 1
        left, right = columns.low, columns.high + 1
        before_right = self._sums(bottom, right) - self._sums(top, right)  # never below 0
        before_left = self._sums(bottom, left) - self._sums(top, left)
        visible = before_right - before_left
        return Truth(inside & (visible == (bottom - top) * (right - left)), (inside ^ True) | (visible > 0))


def pack_queries(visible: NDArray[np.bool_]) -> NDArray[np.uint64]:
    """Bools (Nq, Nk) as words (rows, Nk), one for each key and 64 queries: bit i is the row's query i.

    >>> pack_queries(np.array([[True, False], [True, True]])).tolist()
    [[3, 2]]
    """
    nq, nk = visible.shape
    rows = -(-nq // 64)
    queries = visible.view(np.uint8)
    if nq % 64:
        queries = np.zeros((rows * 64, nk), np.uint8)
        queries[:nq] = visible
    eights = queries.reshape(rows * 8, 8, nk)
    bytes_ = eights[:, 0].copy()
    for i in range(1, 8):  # whole rows at a time take a tenth of the time of packbits across rows
        bytes_ |= eights[:, i] << i
    return np.ascontiguousarray(bytes_.reshape(rows, 8, nk).swapaxes(1, 2)).view("<u8")[:, :, 0]


_BLOCK_ROWS = 16
_BLOCK_COLUMNS = 8  # so the pairs of a block fit into a byte, its columns into a word


class _Sums:
    """How many pairs of a table are visible above and to the left of each corner, in 2 bytes a pair instead of 4 or 8.

    >>> sums = _Sums(np.ones((20, 9), bool))
    >>> int(sums(20, 9)), int(sums(17, 1)), int(sums(0, 9))
    (180, 17, 0)

    The table is cut into blocks. A corner's sum is that of the rows of blocks above its block, of the blocks to the left of it, and
    of the part of its block.
    """

    def __init__(self, table: NDArray[np.bool_]) -> None:
        rows = -(-(table.shape[0] + 1) // _BLOCK_ROWS)
        columns = -(-(table.shape[1] + 1) // _BLOCK_COLUMNS)
        dtype = np.uint32 if table.size < 2**32 else np.int64
        near = np.zeros((rows * _BLOCK_ROWS, columns * _BLOCK_COLUMNS), np.uint8)
        near[1 : table.shape[0] + 1, 1 : table.shape[1] + 1] = table  # row 0 and column 0 have nothing before them
        words = near.view("<u8")
        words *= 0x0101010101010101  # each byte becomes the sum of the bytes up to it
        by_block = near.reshape(rows, _BLOCK_ROWS, -1)
        for row in range(1, _BLOCK_ROWS):
            by_block[:, row] += by_block[:, row - 1]
        left = np.zeros((len(near), columns), dtype)
        np.cumsum(near[:, _BLOCK_COLUMNS - 1 : -1 : _BLOCK_COLUMNS], axis=1, dtype=dtype, out=left[:, 1:])
        above = np.zeros((rows, near.shape[1]), dtype)
        for block in range(1, rows):
            last = block * _BLOCK_ROWS - 1
            above[block] = np.repeat(left[last], _BLOCK_COLUMNS)
            above[block] += near[last]
            above[block] += above[block - 1]
        self._near = near
        self._left = left
        self._above = above

    def __call__(self, row: Any, column: Any) -> Any:
        """The visible pairs in the rows before ``row`` and the columns before ``column``."""
        far = self._above[row // _BLOCK_ROWS, column] + self._left[row, column // _BLOCK_COLUMNS]
        return far + self._near[row, column]


def _pairs(table: NDArray[np.bool_], rows: Any, columns: Any) -> Any:
    """``table[rows, columns]``; rows (n, 1) and columns (1, m) that follow one another are a view, which takes no time."""
    if np.ndim(rows) == np.ndim(columns) == 2 and rows.shape[1] == columns.shape[0] == 1 and rows.size and columns.size:
        top = int(rows[0, 0])
        left = int(columns[0, 0])
        bottom = top + len(rows)
        right = left + columns.shape[1]
        follow = np.array_equal(rows[:, 0], np.arange(top, bottom))
        if follow and np.array_equal(columns[0], np.arange(left, right)):
            return table[top:bottom, left:right]
    if np.ndim(rows) == np.ndim(columns) == 3 and rows.shape[1] == columns.shape[2] == 1 and len(rows) == len(columns):
        return _pairs_of_tiles(table, rows[:, 0], columns[:, :, 0])
    return table[rows, columns]


def _pairs_of_tiles(table: NDArray[np.bool_], rows: Any, columns: Any) -> NDArray[np.bool_]:
    """(n, keys, queries): tiles of a table, one after another; of rows and of columns that follow one another as a view."""
    shape = len(rows), columns.shape[1], rows.shape[1]
    out = np.empty(shape, bool)
    if not out.size:
        return out
    ordered = np.all(np.diff(rows, axis=1) == 1, axis=1) & np.all(np.diff(columns, axis=1) == 1, axis=1)
    for i, (top, left) in enumerate(zip(rows[:, 0].tolist(), columns[:, 0].tolist(), strict=True)):
        if ordered[i]:
            out[i] = table[top : top + shape[2], left : left + shape[1]].T
        else:
            out[i] = table[rows[i], columns[i, :, None]]
    return out


@constructor(in_text=False)
def table(bools: Any) -> Mask:
    """An explicit table of pairs, True = may see.

    >>> print(table([[True, False], [True, True]]).draw(2))
    █·
    ██

    Args:
        bools: bool, (Nq, Nk), or with (B,) or (B, H) in front. Its keys are at positions 0 .. Nk-1, its queries at the
            last Nq of these (at 0 .. Nq-1 if there are more queries than keys). Other positions raise an error.

    The same mask elsewhere: SDPA's boolean ``attn_mask``. For a table with True = hidden, use :func:`hidden`.
    """
    return Table(FrozenArray(bool_array("table", "bools", in_program(bools), TABLES)))


@constructor(in_text=False)
def hidden(bools: Any) -> Mask:
    """An explicit table of pairs with True = hidden, as in many notebooks and ``nn.MultiheadAttention``.

    >>> import numpy as np
    >>> print(hidden(np.triu(np.ones((3, 3), bool), k=1)).draw(3))
    █··
    ██·
    ███

    Args:
        bools: bool, (Nq, Nk), or with (B,) or (B, H) in front; see :func:`table`.
    """
    return Table(FrozenArray(bool_array("hidden", "bools", in_program(bools), TABLES, inverted=True)))

"""Drafts that branch: positions that form a tree, each of which sees its ancestors and what another mask shows of the tokens before."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lowtri.errors import MaskError
from lowtri.masks.array_masks import Table
from lowtri.masks.arrays import ROWS, VECTOR, FrozenArray, in_program, integer_array, is_traced
from lowtri.masks.label_masks import RangeMinMax
from lowtri.masks.mask import Mask, constructor, field_text, quoted
from lowtri.masks.text import as_mask
from lowtri.masks.tile import POSITION_MAX, Index, Interval, Truth, check_count, short_repr, within

_MOST_DRAFTS = 4096  # whose pairs are a table


@dataclass(frozen=True, repr=False)
class Tree(Mask):
    """``parents`` (n,) or (B, n); ``starts``: the position of the first draft, one for all rows or one for each."""

    parents: FrozenArray
    starts: tuple[int, ...]
    inner: Mask

    def __post_init__(self) -> None:
        rows = max(len(self.starts), *self.parents.array.shape[:-1], *self.inner.batch[:1], 1)
        batch = () if self.parents.array.ndim == 1 and len(self.starts) == 1 else (rows,)
        heads = self.inner.batch[1:]
        self._combine([self.inner], (rows, *heads) if heads else batch or self.inner.batch)
        object.__setattr__(self, "depends_on_query", True)

    def _for_row(self, b: int, h: int) -> Mask:
        parents = self.parents.array
        own = self.parents if parents.ndim == 1 else FrozenArray(parents[b % len(parents)])
        inner_rows = self.inner.batch[0] if self.inner.batch else 1
        inner = self.inner.for_row(b % inner_rows, h)
        return Tree(own, (self.starts[b % len(self.starts)],), inner)

    @cached_property
    def _depths(self) -> RangeMinMax:
        return RangeMinMax(tree_depths(self.parents.array))

    @cached_property
    def _drafts(self) -> Table:
        """Which draft sees which: itself and its ancestors, as far as the inner mask shows them at their depths."""
        parents = self.parents.array.tolist()
        depths = self.starts[0] + self._depths.labels
        sees = np.eye(len(parents), dtype=bool)
        for draft, parent in enumerate(parents):
            if parent >= 0:
                sees[draft] |= sees[parent]
        return Table(FrozenArray(sees & self.inner(depths[:, None], depths[None, :])))

    def _sees(self, q: Index, k: Index) -> Any:
        if isinstance(q, Interval):
            return self._of_tile(q, k)
        start = self.starts[0]
        n = self.parents.array.shape[-1]
        for name, x in (("query", q), ("key", k)):
            if np.size(x) and int(np.max(x)) >= start + n:
                raise MaskError(
                    f"tree: {name} at position {int(np.max(x))}, but the {n} drafts stand at {start} .. {start + n - 1}.\n"
                    "Fix: start= the position of the first draft, and positions up to that of the last."
                )
        of_q = within(q - start, n)
        of_k = within(k - start, n)
        position_at_depth = np.where(q >= start, start + self._depths.labels[of_q], q)
        earlier = (k < start) & self.inner._sees(position_at_depth, np.where(k < start, k, 0))
        return earlier | ((q >= start) & (k >= start) & self._drafts.table.array[of_q, of_k])

    def _of_tile(self, q: Interval, k: Interval) -> Truth:
        """The four parts of a tile: tokens before the drafts, and drafts."""
        start = self.starts[0]
        before = Truth(True, False)  # of no pair
        none = Truth(False, False)
        q_before = q.low < start
        q_drafts = q.high >= start
        k_before = k.low < start
        k_drafts = k.high >= start
        last = max(start - 1, 0)
        q_low = Interval(np.clip(q.low, 0, last), np.clip(q.high, 0, last))
        k_low = Interval(np.minimum(k.low, last), np.minimum(k.high, last))
        q_high = Interval(np.maximum(q.low, start) - start, np.maximum(q.high, start) - start)
        k_high = Interval(np.maximum(k.low, start) - start, np.maximum(k.high, start) - start)
        position_at_depth = self._depths[q_high] + start
        parts = [
            (q_before & k_before, self.inner._sees(q_low, k_low)),
            (q_before & k_drafts, none),
            (q_drafts & k_before, self.inner._sees(position_at_depth, k_low)),
            (q_drafts & k_drafts, self._drafts._sees(q_high, k_high)),
        ]
        whole = before
        for exists, part in parts:
            absent = np.logical_not(exists)
            whole = Truth(whole.every & (part.every | absent), whole.some | (part.some & exists))
        return whole

    def _extent(self) -> int:
        n = self.parents.array.shape[-1]
        return max(self.starts) + n

    def _text(self, arrays: list[Any] | None = None) -> str | None:
        inner = quoted(self.inner, arrays)
        parents = str(self.parents.array.tolist()) if arrays is None else field_text(self.parents, arrays)
        start = field_text(self.starts[0], arrays) if len(self.starts) == 1 else list(self.starts)
        return None if inner is None else f"tree({parents}, start={start}, inner={inner})"


@constructor()
def tree(parents: Any, start: Any = 0, inner: Mask | str = "causal") -> Mask:
    """Drafts that branch: the positions from ``start`` on form a tree, and each sees itself, its ancestors, and earlier tokens.

    >>> drafts = tree([-1, 0, 0, 1], start=3)  # two continuations of the first draft, and one of the first of these
    >>> print(drafts.draw(7))
    █······
    ██·····
    ███····
    ████···
    █████··
    ████·█·
    █████·█

    Of the earlier positions a draft sees what ``inner`` shows a query at ``start`` plus its depth, and its ancestors count at
    ``start`` plus theirs: it sees what it would see if its path were the text. Its position stays its place, ``start + i``. Rotary
    embedding takes ``start + tree_depths(parents)``.

    Args:
        parents: for each draft the index of its parent, which comes before it, or -1 where it follows the text; (n,) or (B, n).
        start: the position of the first draft, or one for each row.
        inner: the mask of the text, or its text.

    Raises:
        MaskError: if a parent does not come before its child; on evaluation, for positions past the drafts.

    See :meth:`lowtri.KVCache.keep` for decoding with such drafts. Source: tree attention, Miao et al. 2023 (SpecInfer).
    """
    rows = _parents("tree", parents)
    starts = _starts(start)
    mask = as_mask(inner, "tree: inner")
    sizes = {len(starts), *rows.shape[:-1], *mask.batch[:1]} - {1}
    if len(sizes) > 1:
        raise MaskError(
            f"tree: parents {rows.shape}, {len(starts)} starts and inner with batch {mask.batch} differ in their rows.\n"
            "Fix: one row, or as many of each."
        )
    return Tree(FrozenArray(rows), starts, mask)


def tree_depths(parents: Any) -> NDArray[np.int64]:
    """How deep each draft of a tree stands: 0 for a root, one more than its parent for any other.

    >>> tree_depths([-1, 0, 0, 1]).tolist()
    [0, 1, 1, 2]

    Args:
        parents: (n,) or (B, n), as in :func:`tree`.

    Returns:
        int64, the shape of parents.

    Raises:
        MaskError: if a parent does not come before its child.
    """
    rows = _parents("tree_depths", parents)
    depths = np.zeros_like(rows)
    for row, of_row in zip(np.atleast_2d(rows).tolist(), np.atleast_2d(depths), strict=True):
        for draft, parent in enumerate(row):
            of_row[draft] = of_row[parent] + 1 if parent >= 0 else 0
    return depths


def _parents(function: str, parents: Any) -> NDArray[np.int64]:
    rows = integer_array(function, "parents", in_program(parents), ROWS)
    n = rows.shape[-1]
    if n > _MOST_DRAFTS:
        raise MaskError(f"{function}: parents has {n} drafts, but at most {_MOST_DRAFTS} are taken.")
    if is_traced(rows):  # its numbers come when the program runs, and makes this mask again
        return rows
    wrong = np.argwhere((rows < -1) | (rows >= np.arange(n)))
    if len(wrong):
        place = tuple(wrong[0].tolist())
        raise MaskError(
            f"{function}: the parent of draft {place[-1]} is {int(rows[place])}, but a parent comes before its child.\n"
            "Fix: the index of an earlier draft, or -1 for one that follows the text."
        )
    return rows


def _starts(start: Any) -> tuple[int, ...]:
    try:
        return (check_count("tree", "start", operator.index(start)),)
    except TypeError:
        starts = integer_array("tree", "start", in_program(start), VECTOR).tolist()
    if min(starts) < 0 or max(starts) > POSITION_MAX // 2:
        raise MaskError(f"tree: start is {short_repr(starts)}; it is the position of the first draft, at least 0.")
    return (starts[0],) if len(set(starts)) == 1 else tuple(starts)

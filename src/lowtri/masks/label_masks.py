"""Masks that compare labels: a query sees the keys of its own chunk, or of its own document.

Chunks follow from the position. Masks of documents given by lengths store where each document begins; masks of documents given by
ids store the array of ids. A mask within each document has positions that count from the document's start.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from lowtri.errors import MaskError
from lowtri.masks.arrays import ROWS, VECTOR, FrozenArray, in_program, integer_array, is_traced
from lowtri.masks.formulas import Band, Full
from lowtri.masks.mask import And, Mask, Not, Or, constructor, quoted
from lowtri.masks.text import as_mask
from lowtri.masks.tile import (
    EMPTY,
    POSITION_MAX,
    Index,
    Interval,
    Truth,
    ascending,
    check_count,
    short_repr,
    within,
)
from lowtri.masks.traced_lengths import OfTracedLengths, lengths_text


class Labelled(Mask):
    """A query sees the keys of its own label. Unless a kind of mask says otherwise, labels ascend with the positions."""

    def _label(self, positions: Index, of_keys: bool) -> Any:
        raise TypeError(f"{type(self).__name__} has no labels")

    _edges: Any = None  # where the keys of each label begin and end, two arrays; None where labels do not ascend

    def _sees(self, q: Index, k: Index) -> Any:
        return self._label(q, False) == self._label(k, True)

    def _tile_key(self, q0: Index, k0: Index, nq: int, nk: int) -> list[Index] | None:
        """If all queries have one label, the range of its keys within the tile; else the position itself."""
        edges = self._edges
        if edges is None:
            return None
        labels = self._label(Interval(q0, q0 + nq - 1), False)
        single = labels.low == labels.high
        keys = [np.where(single, np.clip(edge[labels.low] - k0, 0, nk), -1) for edge in edges]
        return [*keys, np.where(single, -1, q0), np.where(single, -1, k0)]


@dataclass(frozen=True, repr=False)
class Chunks(Labelled):
    n: int

    def _label(self, positions: Index, of_keys: bool) -> Any:
        return positions // self.n

    def _tile_key(self, q0: Index, k0: Index, nq: int, nk: int) -> list[Index]:
        return [q0 % self.n, k0 - q0]


@constructor()
def chunks(n: int) -> Mask:
    """Blocks of ``n`` positions; a query sees only the keys of its own block: ``q // n == k // n``.

    >>> from lowtri import causal
    >>> print((causal() & chunks(2)).draw(5))
    █····
    ██···
    ··█··
    ··██·
    ····█

    Args:
        n: the length of a chunk, in tokens, at least 1.

    The same mask elsewhere: transformers ``attention_chunk_size=n`` (with causal). Source: blockwise attention, Qiu et al. 2019.
    """
    return Chunks(check_count("chunks", "n", n, least=1))


@dataclass(frozen=True, repr=False)
class PackedDocuments(Labelled):
    """Documents one after the other, of these lengths. Positions past them belong to the last one; calls allow them if it is open."""

    lengths: tuple[int, ...]
    open_end: bool = False
    _array: ClassVar[NDArray[np.int64]]

    def __post_init__(self) -> None:
        object.__setattr__(self, "_array", np.array(self.lengths, np.int64))  # which compiled programs read

    @property
    def packed_totals(self) -> tuple[int, ...]:
        return () if self.open_end else (sum(self.lengths),)

    @cached_property
    def _cuts(self) -> NDArray[np.int64]:
        """Where each document but the first begins."""
        return np.cumsum(np.array(self.lengths[:-1], np.int64))

    @cached_property
    def _edges(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        return np.concatenate([[0], self._cuts]), np.concatenate([self._cuts, [POSITION_MAX]])

    def _label(self, positions: Index, of_keys: bool) -> Any:
        return ascending(lambda x: self._cuts.searchsorted(x, side="right"), positions)

    def _text(self, arrays: list[Any] | None = None) -> str:
        lengths = lengths_text(self.lengths, self._array, arrays)
        return f"documents(lengths={lengths}{', open_end=True' * self.open_end})"


@dataclass(frozen=True, repr=False)
class Documents(Labelled):
    """Labels for queries and keys; a query sees the keys of its own label. Positions past the array have its last label."""

    ids: FrozenArray
    key_ids: FrozenArray | None = None

    @cached_property
    def _labels(self) -> tuple[NDArray[Any], NDArray[Any]]:
        """Ids renamed in the order in which they first occur, so that packed documents count 0, 1, 2, ..."""
        keys = self.ids.array if self.key_ids is None else self.key_ids.array
        ids = keys if self.key_ids is None else np.concatenate([keys, self.ids.array])
        _, first_index, number = np.unique(ids, return_index=True, return_inverse=True)
        rank = np.empty(len(first_index), np.min_scalar_type(len(first_index)))  # the smallest dtype saves memory
        rank[np.argsort(first_index)] = np.arange(len(first_index))
        labels = rank[number]
        return (labels, labels) if self.key_ids is None else (labels[len(keys) :], labels[: len(keys)])

    @cached_property
    def _ranges(self) -> tuple[RangeMinMax, RangeMinMax]:
        queries, keys = self._labels
        of_keys = RangeMinMax(keys)
        return (of_keys if queries is keys else RangeMinMax(queries)), of_keys

    def _label(self, positions: Index, of_keys: bool) -> Any:
        return self._ranges[of_keys][positions]

    @cached_property
    def _edges(self) -> tuple[NDArray[np.int64], NDArray[np.int64]] | None:
        """A label without keys ends where it begins."""
        if not self._ranges[1].ordered:
            return None
        queries, keys = self._labels
        labels = np.arange(1 + max(int(queries.max()), int(keys.max())), dtype=keys.dtype)
        start, stop = keys.searchsorted(labels), keys.searchsorted(labels, side="right")
        stop[keys[-1]] = POSITION_MAX
        return start, stop


@dataclass(frozen=True, repr=False)
class InDocuments(Mask):
    """A mask within each document, at positions that count from the document's start."""

    documents: PackedDocuments | Documents  # each document is one stretch of the row
    inner: Mask

    @property
    def _bounds(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Where each document begins and ends."""
        edges = self.documents._edges
        assert edges is not None  # labels ascend, since no id comes again
        return edges

    def _sees(self, q: Index, k: Index) -> Any:
        if isinstance(q, Interval):
            return self._of_tile(q, k)
        of_q, of_k = self.documents._label(q, False), self.documents._label(k, True)
        starts = self._bounds[0]
        return (of_q == of_k) & self.inner._sees(q - starts[of_q], k - starts[of_k])

    def _of_tile(self, q: Interval, k: Interval) -> Truth:
        """Of the documents that queries and keys share, the first and the last may be cut; all between them are whole."""
        of_q, of_k = self.documents._label(q, False), self.documents._label(k, True)
        first, last = np.maximum(of_q.low, of_k.low), np.minimum(of_q.high, of_k.high)
        shared = first <= last
        first, last = np.minimum(first, last), np.maximum(first, last)
        whole = self._whole[np.maximum(last, first + 1)] - self._whole[first + 1]  # between the two, those with pairs
        begin, end = self._in_one(q, k, first), self._in_one(q, k, last)
        single = (of_q.low == of_q.high) & (of_k.low == of_k.high)
        return Truth(shared & single & begin.every, shared & (begin.some | end.some | (whole > 0)))

    def _in_one(self, q: Interval, k: Interval, document: Any) -> Truth:
        """The part of tiles that lies in one document each."""
        start, stop = (edge[document] for edge in self._bounds)
        parts = []
        for x in (q, k):
            low = np.maximum(x.low, start)
            parts.append(Interval(low - start, np.maximum(np.minimum(x.high, stop - 1), low) - start))
        visible: Truth = self.inner._sees(*parts)
        return visible

    @cached_property
    def _whole(self) -> NDArray[np.int64]:
        """How many of the documents before each have a visible pair, (documents + 1,)."""
        start, stop = self._bounds
        lengths, number = np.unique(stop - start, return_inverse=True)
        visible = self.inner.tile(0, lengths, 0, lengths) != EMPTY
        return np.concatenate([[0], np.cumsum(visible[number])])

    def _tile_key(self, q0: Index, k0: Index, nq: int, nk: int) -> list[Index]:
        """If all queries are in one document, its keys within the tile and the inner mask's numbers; else the position itself."""
        labels = self.documents._label(Interval(q0, q0 + nq - 1), False)
        single = labels.low == labels.high
        start = self._bounds[0][labels.low]
        edges = [np.clip(edge[labels.low] - k0, 0, nk) for edge in self._bounds]
        inner = self.inner._tile_key(q0 - start, k0 - start, nq, nk)
        if inner is None:
            inner = [q0 - start, k0 - start]
        return [
            *[np.where(single, x, -1) for x in (*edges, *inner)],
            np.where(single, -1, q0),
            np.where(single, -1, k0),
        ]

    @cached_property
    def for_plan(self) -> Mask:
        """The same pairs, with operators outside of the documents: a plan joins the bits of the parts."""
        if isinstance(self.inner, Full):
            return self.documents
        in_one = self._in_one_document(self.inner)
        return self if isinstance(in_one, InDocuments) else And(self.documents, in_one)

    def _in_one_document(self, inner: Mask) -> Mask:
        """A mask of the row that shows the same pairs within each document as ``inner``; between documents it may show any."""
        if isinstance(inner, Band | Full):  # compares distances only
            return inner
        if isinstance(inner, And | Or):
            return type(inner)(self._in_one_document(inner.left), self._in_one_document(inner.right))
        if isinstance(inner, Not):
            return Not(self._in_one_document(inner.inner))
        return InDocuments(self.documents, inner)

    def _text(self, arrays: list[Any] | None = None) -> str | None:
        of_documents, inner = self.documents._text(arrays), quoted(self.inner, arrays)
        return None if of_documents is None or inner is None else f"{of_documents[:-1]}, inner={inner})"


@constructor()
def documents(
    ids: Any = None,
    key_ids: Any = None,
    *,
    lengths: Any = None,
    cu_seqlens: Any = None,
    open_end: bool = False,
    inner: Mask | str | None = None,
) -> Mask:
    """Packed rows: each query sees the keys of its own document only, of these what ``inner`` shows.

    >>> from lowtri import causal
    >>> print((causal() & documents([0, 0, 0, 1, 1])).draw(5))
    █····
    ██···
    ███··
    ···█·
    ···██
    >>> documents(cu_seqlens=[0, 3, 5]) == documents(lengths=[3, 2])
    True
    >>> print(documents(lengths=[4, 5], inner="causal & (window(2) | first(1))").draw(9))  # each has a sink of its own
    █········
    ██·······
    ███······
    █·██·····
    ····█····
    ····██···
    ····███··
    ····█·██·
    ····█··██

    Args:
        ids: the document number of each position, integers, (N,), or (B, N) for a batch of rows.
        key_ids: the document numbers of the keys, if they differ from those of the queries (cross-attention); the same leading
            shape.
        lengths: instead of ids: the length of each document, in tokens. They add up to the tokens of a row: a call with another
            number of keys, or with a position past their end, raises.
        cu_seqlens: instead of ids: the start of each document, from 0, and the end of the last one.
        open_end: with lengths or cu_seqlens: the last document may be of any length, as in generation, which continues it. A
            :class:`lowtri.KVCache` requires this.
        inner: the mask within each document, or its text. Its positions, and the indices of its arrays, count from the start of
            the document; each document must then be one stretch of the row, and ids that come again raise.

    Positions past an array of ids belong to the last document. A left-padded row is a document of pads and one of tokens, which
    any ``inner`` then counts from its first token: ``documents(ids=valid, inner=...) & keys(valid)``, with ids of 0 and 1.

    A mask made from lengths stores one number for each document; one made from ids stores one number for each token.

    Raises:
        MaskError: unless exactly one of ids, lengths and cu_seqlens is given, or if they do not describe documents; with ``inner``
            also for key_ids, for ids that come again, and for an inner mask of documents with an end.

    The same mask elsewhere: FlashAttention ``cu_seqlens``, with ``window_size`` for an inner window; FlexAttention
    ``document_id[q] == document_id[k]``, with ``inner`` attention-gym's document mask.
    Source: packing without cross-contamination, Krell et al. 2021.
    """
    within_each = None if inner is None else _checked_inner(inner, key_ids)
    if sum(given is not None for given in (ids, lengths, cu_seqlens)) != 1 or (key_ids is not None and ids is None):
        raise MaskError("documents: give one of ids (with or without key_ids), lengths= or cu_seqlens=.")
    if not isinstance(open_end, bool) or (open_end and ids is not None):
        raise MaskError(
            f"documents: open_end is {short_repr(open_end)}; it is True or False, and goes with lengths= or cu_seqlens=."
        )
    ids = in_program(ids)
    key_ids = in_program(key_ids)
    lengths = in_program(lengths)
    cu_seqlens = in_program(cu_seqlens)
    for name, tensor in (("lengths", lengths), ("cu_seqlens", cu_seqlens)):
        if is_traced(tensor):
            array = FrozenArray(integer_array("documents", name, tensor, VECTOR))
            traced: Any = OfTracedLengths(array, "documents", name, open_end)
            return traced if within_each is None else InDocuments(traced, within_each)
    if cu_seqlens is not None:
        edges = integer_array("documents", "cu_seqlens", cu_seqlens, VECTOR).tolist()
        if len(edges) < 2 or edges[0] != 0:
            raise MaskError(f"documents: cu_seqlens is {edges[:8]}; it begins with 0 and ends with the total.")
        made: PackedDocuments | Documents = _of_lengths([after - before for before, after in pairwise(edges)], open_end)
        return made if within_each is None else InDocuments(made, within_each)
    if lengths is not None:
        made = _of_lengths(integer_array("documents", "lengths", lengths, VECTOR).tolist(), open_end)
        return made if within_each is None else InDocuments(made, within_each)
    rows = integer_array("documents", "ids", ids, ROWS)
    if within_each is not None:
        _check_stretches(rows)
        return InDocuments(Documents(FrozenArray(rows)), within_each)
    if key_ids is None:
        return Documents(FrozenArray(rows))
    columns = integer_array("documents", "key_ids", key_ids, ROWS)
    if columns.shape[:-1] != rows.shape[:-1]:
        raise MaskError(f"documents: ids {rows.shape} and key_ids {columns.shape} differ in their batch.")
    return Documents(FrozenArray(rows), FrozenArray(columns))


def _checked_inner(inner: Mask | str, key_ids: Any) -> Mask:
    """The mask within each document, from the user's argument."""
    mask = as_mask(inner, "documents: inner")
    if key_ids is not None:
        raise MaskError(
            "documents: inner counts positions from the start of each document, but key_ids give keys and queries other starts.\n"
            "Fix: ids alone; or positions that align them, in q_positions= and k_positions=."
        )
    if mask.packed_totals:
        raise MaskError(
            f"documents: the documents in inner, {short_repr(mask)}, end after {min(mask.packed_totals)} tokens, "
            "wherever the outer ones do.\n"
            "Fix: documents(lengths=[...], open_end=True) as inner."
        )
    return mask


def _check_stretches(ids: Any) -> None:
    """Raise if an id comes again after another one, in any row."""
    if is_traced(ids):  # its numbers come when the program runs, and makes this mask again
        return
    for row, numbers in enumerate(np.atleast_2d(ids)):
        begins = np.append(0, 1 + np.flatnonzero(numbers[1:] != numbers[:-1]))
        known, first = np.unique(numbers[begins], return_index=True)
        if len(known) < len(begins):
            again = int(begins[np.setdiff1d(np.arange(len(begins)), first)[0]])
            place = f"position {again}"
            if np.ndim(ids) > 1:
                place += f" of row {row}"
            raise MaskError(
                f"documents: id {int(numbers[again])} comes again at {place}, but inner counts from the start of each document.\n"
                "Fix: another id for each stretch of positions."
            )


def check_packed_totals(function: str, mask: Mask, n: int, *, complete: bool = True) -> None:
    """Compare the lengths of documents with the tokens of a row.

    Args:
        function: the public function that is called, for the message.
        n: the number of tokens.
        complete: False where the n tokens may be the beginning of the row only.

    Raises:
        MaskError: unless the lengths add up to n, or to more if the row is not complete.
    """
    for total in mask.packed_totals:
        if total < n or (complete and total > n):
            raise MaskError(
                f"{function}: the lengths of the documents in {short_repr(mask)} add up to {total}, but the row has {n} tokens.\n"
                f"Fix: lengths that add up to {n}; or open_end=True, if the last document has no fixed length."
            )


def with_open_end(function: str, mask: Mask) -> Mask:
    """The mask, for a sequence that grows; raises where the lengths of its documents have an end."""
    if mask.packed_totals:
        raise MaskError(
            f"{function}: the documents in {short_repr(mask)} end after {min(mask.packed_totals)} tokens, but the sequence grows.\n"
            "Fix: documents(lengths=[...], open_end=True), whose last document has no fixed length."
        )
    return mask


def _of_lengths(lengths: list[int], open_end: bool) -> PackedDocuments:
    if min(lengths) < 1:
        raise MaskError(f"documents: lengths are {lengths[:8]}; at least one is required, and each is at least 1.")
    if sum(lengths) > POSITION_MAX:  # Python's ints: a sum of 64 bits would wrap
        raise MaskError(f"documents: lengths add up to {sum(lengths)}, but positions end at 2**62.")
    return PackedDocuments(tuple(lengths), open_end)


class RangeMinMax:
    """Labels by position, and the least and greatest label in any range of positions. Positions past the end have the last label.

    Ranges are answered by a sparse table, in which two overlapping powers of two cover the range.

    >>> labels = RangeMinMax(np.array([3, 1, 2]))
    >>> labels[1], labels[Interval(0, 1)]
    (np.int64(1), Interval(array(1), array(3)))
    """

    def __init__(self, labels: NDArray[Any]) -> None:
        self.labels, self.n = labels, len(labels)
        self.ordered = bool(np.all(labels[1:] >= labels[:-1]))
        self.least, self.greatest = [labels], [labels]
        while not self.ordered and 2 ** len(self.least) <= self.n:
            half = 2 ** (len(self.least) - 1)
            low, high = self.least[-1], self.greatest[-1]
            self.least.append(np.minimum(low[:-half], low[half:]))
            self.greatest.append(np.maximum(high[:-half], high[half:]))

    def __getitem__(self, positions: Index) -> Any:
        positions = within(positions, self.n)
        if self.ordered or not isinstance(positions, Interval):  # ordered: the first and last label of the range
            return ascending(self.labels.__getitem__, positions)
        start, last = positions.low, positions.high
        level = np.frexp(np.asarray(last - start + 1, np.float64))[1] - 1  # floor of log2 of the length
        low, high = (np.empty(np.shape(level), self.least[0].dtype) for _ in range(2))
        for depth in np.unique(level):
            same = level == depth
            left, right = np.asarray(start)[same], np.asarray(last)[same] - 2**depth + 1
            low[same] = np.minimum(self.least[depth][left], self.least[depth][right])
            high[same] = np.maximum(self.greatest[depth][left], self.greatest[depth][right])
        return Interval(low, high)

"""The content of a picture of a mask, the same for text and SVG: cells, labels, headings. Its size is bounded.

A picture has at most 64 rows and columns. Up to that size a cell is one pair; beyond it a cell is a rectangle of positions and
shows its tile answer, so a picture of a million positions costs as much as one of a hundred.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lowtri.errors import MaskError
from lowtri.masks.array_masks import Table
from lowtri.masks.mask import Mask, first_position
from lowtri.masks.text import as_mask
from lowtri.masks.tile import POSITION_MAX, check_count
from lowtri.pictures.labels import shortened, split

__all__ = [
    "MAX_CELLS",
    "MAX_PANELS",
    "MIN_POSITIONS",
    "Panel",
    "Part",
    "Picture",
    "Tokens",
    "cell_size",
    "cells_of",
    "compose",
    "picture_size",
    "scale_note",
]

MAX_CELLS = 64  # rows, and columns, of one picture
_PAIRS_READ = 2**20  # up to so many pairs, each is read; beyond, cells show what the mask answers for a tile
MIN_POSITIONS = 12  # of a picture whose size nobody gave
MAX_PANELS = 16  # batch rows and heads that are drawn; the rest is counted

Tokens: TypeAlias = Sequence[str] | str


@dataclass(frozen=True)
class Part:
    """One mask in a panel."""

    title: str
    cells: NDArray[np.int8]  # (rows, columns): 0 hidden, 1 partly, 2 visible
    weights: NDArray[np.float64] | None = None  # (rows, columns), in 0 .. 1


@dataclass(frozen=True)
class Panel:
    """One batch row and head: a mask, or two side by side."""

    heading: str  # "" where the masks do not differ by batch or head
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Picture:
    """All panels and their labels."""

    panels: tuple[Panel, ...]
    left_out: int  # how many panels exceed MAX_PANELS
    nq: int
    nk: int
    query_labels: tuple[str, ...]  # one for each row, or empty
    key_labels: tuple[str, ...]  # one for each column, or empty

    @property
    def positions_a_cell(self) -> int:
        return cell_size(self.nq, self.nk)


def picture_size(*masks: Mask) -> tuple[int, int]:
    """How many queries and keys show these masks: the largest window, document or chunk, and half as many positions again.

    >>> from lowtri import causal, documents, window
    >>> picture_size(causal()), picture_size(causal() & window(64)), picture_size(documents(lengths=[5, 9, 4]))
    ((12, 12), (96, 96), (18, 18))

    A mask with a table has pairs for the table's positions only: its size is that of the smallest table.
    """
    tables = [table.table.array.shape[-2:] for mask in masks for table in _tables_in(mask)]
    if tables:
        nq, nk = min(tables, key=lambda shape: int(shape[1]))
        return int(nq), int(nk)
    n = min(max(MIN_POSITIONS, *[mask._extent() for mask in masks]), POSITION_MAX)
    return n, n


def _tables_in(mask: Mask) -> Iterator[Table]:
    if isinstance(mask, Table):
        yield mask
    for part in mask.operands:
        yield from _tables_in(part)


def scale_note(nq: int, nk: int) -> str:
    """What a cell of the picture stands for; empty if it is one pair."""
    size = cell_size(nq, nk)
    return f"a cell: {size:,} x {size:,} of {nq:,} x {nk:,} pairs" if size > 1 else ""


def compose(
    mask: Mask | str,
    nq: int | None = None,
    nk: int | None = None,
    *,
    beside: Mask | str | None = None,
    tokens: Tokens | None = None,
    query_tokens: Tokens | None = None,
    titles: Sequence[str] | None = None,
    weights: Sequence[Any] = (),
) -> Picture:
    """The picture of ``mask`` and ``beside``; the arguments are those of :func:`lowtri.masks.draw.draw`.

    Without ``nq`` the tokens or the weights give the number of positions, or else the masks themselves (:func:`picture_size`).

    Args:
        weights: for each mask its attention weights, ``(nq, nk)`` or with the batch in front, or None.
    """
    masks = [as_mask(mask)] if beside is None else [as_mask(mask), as_mask(beside, "beside")]
    if nq is None:
        nq, nk = _size(masks, tokens, query_tokens, weights, nk)
    nq = check_count("draw", "nq", nq)
    nk = nq if nk is None else check_count("draw", "nk", nk)
    if nq < 1 or nk < 1:
        raise MaskError(f"draw: {nq} queries and {nk} keys: there is nothing to draw. Fix: at least one of each.")
    keys, queries = _labels(nq, nk, tokens, query_tokens)
    if titles is not None and len(titles) != len(masks):
        raise MaskError(f"draw: {len(titles)} titles came for {len(masks)} masks.")
    names = [shortened(text, 60) for text in (map(repr, masks) if titles is None else titles)]
    checked_weights = [_weights(each, nq, nk) for each in (*weights, None, None)[: len(masks)]]

    batch = (masks[0] & masks[-1]).batch  # the common one; raises where the two do not fit together
    panels = []
    for index in islice(np.ndindex(batch), MAX_PANELS):
        b, h = (*index, 0, 0)[:2]
        parts = [
            Part(
                name,
                cells_of(mask.at(b, h), nq, nk, cell_size(nq, nk)),
                None if of_batch is None else _weights_at(of_batch, b, h),
            )
            for name, mask, of_batch in zip(names, masks, checked_weights, strict=True)
        ]
        panels.append(Panel(_heading(batch, b, h), tuple(parts)))
    left_out = math.prod(batch) - len(panels)
    return Picture(tuple(panels), left_out, nq, nk, queries, keys)


def _size(
    masks: Sequence[Mask], tokens: Tokens | None, query_tokens: Tokens | None, weights: Sequence[Any], nk: int | None
) -> tuple[int, int]:
    """How many queries and keys, where the user gave no number of queries."""
    if tokens is not None:
        keys = len(_token_list(tokens))
        return keys if query_tokens is None else len(_token_list(query_tokens)), keys if nk is None else nk
    shape: tuple[int, ...] = next((np.shape(each) for each in weights if each is not None), ())
    if len(shape) >= 2:
        return shape[-2], shape[-1]
    return picture_size(*masks) if nk is None else (nk, nk)


def cell_size(nq: int, nk: int) -> int:
    """Positions to a cell, the same both ways, so that the diagonal stays a diagonal."""
    return -(-max(nq, nk) // MAX_CELLS)


def cells_of(mask: Mask, nq: int, nk: int, step: int) -> NDArray[np.int8]:
    """(rows, columns): for each cell of ``step`` positions each way, 0 hidden, 1 partly, 2 visible."""
    if nq * nk <= _PAIRS_READ:  # the answer for a tile may be PARTIAL where its pairs are equal
        pairs = mask.dense(nq, nk)
        edges = np.arange(0, nq, step), np.arange(0, nk, step)
        some, every = (
            join.reduceat(join.reduceat(pairs, edges[0], axis=0), edges[1], axis=1)
            for join in (np.logical_or, np.logical_and)
        )
        return some.astype(np.int8) + every
    start, nq, nk = first_position(mask, nq, nk)
    q0 = start + step * np.arange(-(-nq // step))[:, None]
    k0 = step * np.arange(-(-nk // step))[None, :]
    cells: NDArray[np.int8] = mask.tile(q0, np.minimum(q0 + step, start + nq), k0, np.minimum(k0 + step, nk))
    return cells


def _labels(
    nq: int, nk: int, tokens: Tokens | None, query_tokens: Tokens | None
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Labels of the keys and of the queries. The queries' are the last nq of the keys', unless they are given."""
    if tokens is None:
        if query_tokens is not None:
            raise MaskError("draw: query_tokens came without tokens. Fix: tokens= names the keys.")
        return (), ()
    keys = _token_list(tokens)
    if len(keys) != nk:
        raise MaskError(f"draw: {len(keys)} tokens came for {nk} keys. Fix: one token for each key, in a list.")
    if max(nq, nk) > MAX_CELLS:
        raise MaskError(f"draw: {nk} tokens do not fit on a picture of {MAX_CELLS} cells. Fix: draw without tokens.")
    if query_tokens is None and nq > nk:
        raise MaskError(f"draw: {nq} queries and {nk} tokens. Fix: query_tokens= names the queries.")
    queries = keys[nk - nq :] if query_tokens is None else _token_list(query_tokens)
    if len(queries) != nq:
        raise MaskError(f"draw: {len(queries)} query_tokens came for {nq} queries.")
    return keys, queries


def _token_list(tokens: Tokens) -> tuple[str, ...]:
    return tuple(shortened(token) for token in (split(tokens)[0] if isinstance(tokens, str) else tokens))


def _weights(weights: Any, nq: int, nk: int) -> NDArray[np.float64] | None:
    if weights is None:
        return None
    if hasattr(weights, "detach"):  # a torch tensor, on any device, in any dtype
        weights = weights.detach().cpu().double().numpy()
    array = np.asarray(weights, np.float64)
    if array.ndim not in (2, 3, 4) or array.shape[-2:] != (nq, nk):
        raise MaskError(f"draw: weights have shape {array.shape}, but the picture has ({nq}, {nk}) pairs.")
    if max(nq, nk) > MAX_CELLS:
        raise MaskError(f"draw: weights of {nq} x {nk} pairs: a picture has at most {MAX_CELLS} cells each way.")
    if not np.all((array >= 0) & (array <= 1.0001)):
        raise MaskError(
            "draw: weights lie between 0 and 1, but some of these do not. Fix: pass them after the softmax."
        )
    return array


def _weights_at(weights: NDArray[np.float64], b: int, h: int) -> NDArray[np.float64]:
    """The weights of one batch row and head; a leading size of 1 is broadcast."""
    for index in (b, h)[: weights.ndim - 2]:
        if index >= weights.shape[0] > 1:
            raise MaskError(f"draw: weights have no batch row or head {index}: their shape ends at {weights.shape[0]}.")
        weights = weights[0 if weights.shape[0] == 1 else index]
    return weights


def _heading(batch: tuple[int, ...], b: int, h: int) -> str:
    if not batch:
        return ""
    row, head = f"batch row {b}", f"head {h}"
    if len(batch) == 1:
        return row
    return head if batch[0] == 1 else f"{row}, {head}"

"""The mask that a model is audited against: its table of pairs, the pads that it names, and the documents that it keeps apart."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from lowtri.auditing.example import Array, Bools, Inputs
from lowtri.errors import CallError
from lowtri.masks import Mask, as_mask
from lowtri.masks.array_masks import KeyLengths, Keys, Table
from lowtri.masks.label_masks import Documents, PackedDocuments, check_packed_totals
from lowtri.masks.mask import And

_OF_ARRAYS = (Keys, KeyLengths, Table, Documents, PackedDocuments)  # which speak of columns, wherever a row begins


@dataclass(frozen=True)
class DeclaredMask:
    """A mask from end to end, for a batch of rows.

    A mask that differs from head to head allows what any head allows. With `layers`, the mask is one layer's, and every layer
    passes its own position on: the pairs are those that a path of at most `layers` steps joins.
    """

    mask: Mask | npt.NDArray[np.bool_]
    layers: int | None = None

    @classmethod
    def read(cls, mask: Any, layers: int | None, n: int) -> DeclaredMask:
        """The mask of `audit`'s arguments, checked against the positions of the example."""
        if isinstance(mask, np.ndarray):
            return cls(mask.astype(bool), layers)
        formula = as_mask(mask)
        check_packed_totals("audit", formula, n)
        return cls(formula, layers)

    @property
    def text(self) -> str:
        return f"a table of {self.mask.shape}" if isinstance(self.mask, np.ndarray) else repr(self.mask)

    def pairs(self, n: int, batch: int, positions: Array | None = None) -> Bools:
        """The pairs (1 or B, N, N) that the mask allows.

        Args:
            positions: (B, N), each row's own count of its tokens, which formulas of positions then speak of. Arrays (keys,
                documents, tables) speak of columns always.

        Raises:
            MaskError: if the mask is a table of other lengths.
        """
        if positions is None or isinstance(self.mask, np.ndarray):
            table = _dense(self.mask, n)
        else:
            at = np.maximum(positions, 0)
            table = np.ones((1, n, n), bool)
            for part in _conjuncts(self.mask):
                dense = _dense(part, n)
                if not _has(part, _OF_ARRAYS):
                    dense = np.broadcast_to(dense, (batch, n, n))
                    dense = np.stack([one[np.ix_(row, row)] for one, row in zip(dense, at, strict=True)])
                table = table & dense
        if table.shape[0] not in (1, batch) or table.shape[1:] != (n, n):
            raise CallError(
                f"audit: mask gives a table of {tuple(table.shape)}, the example has {batch} row(s) of {n} positions.\n"
                "Fix: use a mask without a batch, or one whose batch is the example's."
            )
        return self._reached(table)

    def pads(self, n: int) -> Bools:
        """The positions (1 or B, N) of no token: those that `keys(...)` in the mask hides from every query, and those that
        neither see nor are seen.

        A key that is shown to no query is a pad in no other case: a forecaster's horizon sees the past, and must not see itself.
        """
        table = self.pairs(n, len(_dense(self.mask, n)))
        never_seen = ~table.any(axis=1)
        pads = never_seen & ~table.any(axis=2)
        for part in _parts(self.mask, (Keys, KeyLengths)):
            pads = pads | (never_seen & ~_dense(part, n).any(axis=1))
        return np.asarray(pads)

    @property
    def names_documents(self) -> bool:
        """Whether the mask is made with `documents(...)`."""
        return _has(self.mask, (Documents, PackedDocuments))

    def documents(self, n: int) -> npt.NDArray[np.int64] | None:
        """The number of each position's document, (1 or B, N), where the mask names documents or its table keeps blocks apart."""
        if not (isinstance(self.mask, np.ndarray) or _has(self.mask, (Table, Documents, PackedDocuments))):
            return None
        labels = np.array([blocks(row) for row in _dense(self.mask, n)])
        return labels if (labels.max(axis=1) > 0).any() else None

    @property
    def is_relative(self) -> bool:
        """Whether the mask is the same wherever a row begins: nothing but distances and arrays decide."""
        for part in () if isinstance(self.mask, np.ndarray) else _conjuncts(self.mask):
            if not _has(part, _OF_ARRAYS):
                table = _dense(part, 40)
                if any((table[:, s:, s:] != table[:, :-s, :-s]).any() for s in (1, 2, 3)):
                    return False
        return True

    def _reached(self, table: Bools) -> Bools:
        if self.layers is None:
            return table
        step = reach = table | np.eye(table.shape[-1], dtype=bool)
        for _ in range(min(self.layers, table.shape[-1]) - 1):
            wider = (reach.astype(np.float32) @ step.astype(np.float32)) > 0
            if (wider == reach).all():
                break
            reach = wider
        return reach


def _dense(mask: Mask | Bools, n: int) -> Bools:
    """The pairs (1 or B, N, N) of a mask, whatever its heads."""
    table = mask if isinstance(mask, np.ndarray) else np.array(mask.dense(n), dtype=bool)
    if table.ndim == 4:
        return np.asarray(table.any(axis=1))
    return table[None] if table.ndim == 2 else table


def _conjuncts(mask: Mask) -> Iterator[Mask]:
    if isinstance(mask, And):
        yield from _conjuncts(mask.left)
        yield from _conjuncts(mask.right)
    else:
        yield mask


def _parts(mask: Any, kinds: tuple[type, ...]) -> Iterator[Mask]:
    """The masks of some kinds inside a mask; an array has none."""
    waiting: list[Any] = [mask]
    while waiting:
        part = waiting.pop()
        if isinstance(part, Mask):
            if isinstance(part, kinds):
                yield part
            waiting += [getattr(part, field.name) for field in fields(part)]  # type: ignore[arg-type]
        elif isinstance(part, tuple):
            waiting += [value for value in part if isinstance(value, Mask)]


def _has(mask: Any, kinds: tuple[type, ...]) -> bool:
    return next(_parts(mask, kinds), None) is not None


def blocks(pairs: Bools) -> list[int]:
    """A number for each position, (N,), the same in each run of positions that no pair (N, N) crosses."""
    table = pairs | pairs.T
    furthest = np.maximum.accumulate([int(np.flatnonzero(row)[-1]) if row.any() else q for q, row in enumerate(table)])
    return np.cumsum([0, *(furthest[:-1] < np.arange(1, len(table)))]).tolist()


def own_positions(inputs: Inputs, real: Bools, name: str) -> Array | None:
    """Each row's own count of its tokens, (B, N), where it does not begin at 0; None where every row does.

    Args:
        name: the setting in which the example may say it.
    """
    given = inputs.settings.get(name)
    n = inputs.n
    if isinstance(given, np.ndarray) and given.shape in ((n,), (inputs.batch, n)):
        positions = np.broadcast_to(given, (inputs.batch, n))
    else:
        positions = np.cumsum(real, axis=1) - 1
    for row, marks in zip(positions, np.broadcast_to(real, positions.shape), strict=True):
        if (np.diff(row[marks]) <= 0).any():
            return None  # documents that are counted one by one
    same = np.where(real, positions == np.arange(n), True).all()
    return None if same else np.minimum(positions, n - 1)

"""The simplest formula that agrees with a table of measured pairs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lowtri.auditing.options import Bools
from lowtri.masks import Mask, documents, table
from lowtri.masks import mask as read_mask

__all__ = ["Fitted", "fitted"]

_PARTS = 3  # atoms of a formula, at most


class Fitted(NamedTuple):
    """The formula, or a table where none agrees; and the nearest formula, with the pairs at which it differs."""

    mask: Mask
    text: str
    nearest: str
    differs: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class _Atom:
    text: str
    pairs: Bools  # (1 or B, N, N)
    mask: Mask


def fitted(seen: Bools, care: Bools, labels: Any = None) -> Fitted:
    """The simplest formula that agrees with `seen`, (1 or B, N, N), at the pairs `care`; else a table."""
    seen, care = np.broadcast_arrays(seen, care)
    atoms = list(_atoms(seen, care, labels))
    for parts in range(1, _PARTS + 1):
        for text, formula in _solutions(seen, care, atoms, parts):
            text = f"causal & {text}" if text.startswith("window(") and parts == 1 else text
            return Fitted(formula, text, text, ())
    wrong = [((atom.pairs != seen) & care) for atom in atoms]
    best = int(np.argmin([int(table.sum()) for table in wrong]))
    pairs = tuple((int(q), int(k)) for q, k in np.argwhere(wrong[best].any(axis=0)))
    formula = table(seen[0] if len(seen) == 1 or (seen == seen[:1]).all() else seen[:, None])
    return Fitted(formula, repr(formula), atoms[best].text, pairs)


def _solutions(seen: Bools, care: Bools, atoms: Sequence[_Atom], parts: int) -> Iterator[tuple[str, Mask]]:
    """Formulas of that many atoms which agree with `seen` at the pairs `care`."""
    if parts == 1:
        yield from ((atom.text, atom.mask) for atom in atoms if not ((atom.pairs != seen) & care).any())
        return
    for atom in atoms:
        inside = np.broadcast_to(atom.pairs, care.shape)
        within, without = care & inside, care & ~inside
        # All that is seen lies in the atom; all of the atom is seen; nothing of it is.
        for sign, fits, rest in (
            ("&", not (seen & without).any(), within),
            ("|", not (~seen & within).any(), without),
            ("-", not (seen & within).any(), without),
        ):
            if not fits or (rest == care).all() or not rest.any():
                continue
            for text, formula in _solutions(seen, rest, atoms, parts - 1):
                compound = any(f" {other} " in text for other in "&|-" if other != sign or sign == "-")
                if sign == "-":
                    yield f"{f'({text})' if ' | ' in text else text} - {atom.text}", formula - atom.mask
                else:
                    joined = atom.mask & formula if sign == "&" else atom.mask | formula
                    yield f"{atom.text} {sign} {f'({text})' if compound else text}", joined


def _atoms(seen: Bools, care: Bools, labels: Any) -> Iterator[_Atom]:
    """What formulas are made of, simplest first, with the numbers at which the measured pairs have an edge."""
    n = seen.shape[-1]
    edges = np.argwhere((seen[..., 1:] != seen[..., :-1]) & care[..., 1:])[:, 1:]  # (query, the key before the edge)
    back = sorted({int(q - k) for q, k in edges if q - k >= 0} - {0})
    ahead = sorted({int(k - q) for q, k in edges if k > q})
    starts = sorted({int(k) + 1 for _, k in edges})
    texts = ["full", "causal", *(f"window({w})" for w in {1, *back})]
    texts += [f"first({k})" for k in starts]
    documented = list(_documents(seen, care, labels))
    yield from (_atom(text, n) for text in texts)
    if labels is not None:
        yield from documented
    yield from (_atom(f"chunks({c})", n) for c in range(2, n))
    yield from (_atom(f"strided({s})", n) for s in range(2, n))
    yield from (_atom(f"band({b}, {a})", n) for a in {*ahead, 0, n} for b in {*(b - 1 for b in back), *back, 0, n} if a)
    if labels is None:
        yield from documented


def _atom(text: str, n: int) -> _Atom:
    formula = read_mask(text)
    return _Atom(text, np.array(formula.dense(n), bool)[None], formula)


def _documents(seen: Bools, care: Bools, labels: Any) -> Iterator[_Atom]:
    """The documents of the labels, or those that no measured pair crosses."""
    if labels is None:
        labels = np.array([_blocks(row & wanted) for row, wanted in zip(seen, care, strict=True)])
    if (labels == labels[:1]).all():
        lengths = [len(list(group)) for _, group in groupby(labels[0].tolist())]
        if len(lengths) < 2:
            return
        formula = documents(lengths=lengths) if len(set(labels[0].tolist())) == len(lengths) else documents(labels[0])
        yield _Atom(repr(formula), np.array(formula.dense(len(labels[0])), bool)[None], formula)
    else:
        formula = documents(labels)
        pairs = np.array(formula.dense(labels.shape[1]), bool)
        yield _Atom(repr(formula), pairs.reshape(len(labels), *pairs.shape[-2:]), formula)


def _blocks(pairs: npt.NDArray[np.bool_]) -> list[int]:
    """A number for each run of positions that no pair crosses."""
    table = pairs | pairs.T
    furthest = np.maximum.accumulate([int(np.flatnonzero(row)[-1]) if row.any() else q for q, row in enumerate(table)])
    return np.cumsum([0, *(furthest[:-1] < np.arange(1, len(table)))]).tolist()

"""The masks that hold something of the user's: an array of flags or pairs, a function, or a mask for each head.

Each array has a small index, made on first use, so that a question about a rectangle costs the same whatever the rectangle's
size. Documents are in :mod:`lowtri.masks.ids`.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lowtri.errors import MaskError
from lowtri.masks.formulas import First
from lowtri.masks.mask import Answer, Mask, Positions, verdict

__all__ = ["Heads", "Held", "KeyLengths", "Keys", "Table", "Where", "is_traced", "within"]


class Held:
    """An array that a mask holds: a read-only copy, equal and hashed by content (once).

    A tensor of a program that is being traced is kept as it comes: nothing is asked of it but its shape. ``memory`` is the
    same array for those who may not be given a read-only one.
    """

    def __init__(self, array: NDArray[Any]) -> None:
        if is_traced(array):
            self.array = self.memory = array
            return
        try:
            self.memory = np.array(array, order="C")
        except MemoryError:
            raise MaskError(
                f"mask: an array of {array.shape} {array.dtype} does not fit into memory, and a mask copies its array."
            ) from None
        self.array = self.memory.view()
        self.array.setflags(write=False)

    @cached_property
    def digest(self) -> str:
        kind = f"{self.array.dtype.str}{self.array.shape}".encode()
        return hashlib.sha256(kind + self.array.tobytes()).hexdigest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Held) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __reduce__(self) -> tuple[type[Held], tuple[NDArray[Any]]]:
        return Held, (self.array,)  # the copy on the other side is read-only again

    def __repr__(self) -> str:
        return f"<{'x'.join(map(str, self.array.shape))} {self.array.dtype} {self.digest[:8]}>"


def is_traced(value: Any) -> bool:
    """Whether this is a tensor of a program that torch.compile or torch.export is tracing: a shape without numbers."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.compiler.is_compiling() and isinstance(value, torch.Tensor)


@dataclass(frozen=True)
class Keys(Mask):
    """Only the keys whose flag is set; a key beyond the array is real."""

    valid: Held

    @property
    def batch(self) -> tuple[int, ...]:
        return self.valid.array.shape[:-1]

    @property
    def asks_query(self) -> bool:
        return False

    @cached_property
    def _counts(self) -> NDArray[np.int64]:
        return np.concatenate([[0], np.cumsum(self.valid.array)])

    def _sees(self, q: Positions, k: Positions) -> Any:
        n = len(self.valid.array)
        return (self.valid.array[within(k, n)] | (k >= n)) & (q >= 0)

    def _tile(self, q0: Positions, q1: Positions, k0: Positions, k1: Positions) -> Answer:
        n = len(self.valid.array)
        start, stop = np.minimum(k0, n), np.minimum(k1, n)
        beyond = (k1 - k0) - (stop - start)
        real = self._counts[stop] - self._counts[start] + beyond
        return verdict(full=real == k1 - k0, empty=real == 0) + 0 * q0

    def _signature(self, q0: Positions, k0: Positions, nq: int, nk: int) -> list[Positions]:
        return [k0]

    @cached_property
    def _rows(self) -> list[Keys]:
        return [Keys(Held(row)) for row in self.valid.array]

    def _at(self, b: int, h: int) -> Mask:
        return self._rows[b]

    def __repr__(self) -> str:
        return f"keys({self.valid})"


@dataclass(frozen=True)
class KeyLengths(Mask):
    """In batch row b only the first ``lengths[b]`` keys."""

    lengths: tuple[int, ...]

    @property
    def batch(self) -> tuple[int, ...]:
        return (len(self.lengths),)

    @property
    def asks_query(self) -> bool:
        return False

    def _at(self, b: int, h: int) -> Mask:
        return First(self.lengths[b])

    def __repr__(self) -> str:
        return f"keys(lengths={list(self.lengths)})"


@dataclass(frozen=True)
class Table(Mask):
    """Every pair written out. Its rows are the queries at the last Nq of its Nk keys, as in a call."""

    pairs_: Held

    @property
    def batch(self) -> tuple[int, ...]:
        return self.pairs_.array.shape[:-2]

    @property
    def asks_query(self) -> bool:
        return False  # more rows than columns are fine: the rows then count from 0

    @cached_property
    def _sums(self) -> NDArray[np.int64]:
        """How many pairs are visible above and to the left of each corner."""
        table = self.pairs_.array
        sums = np.zeros((table.shape[0] + 1, table.shape[1] + 1), np.int64)
        np.cumsum(np.cumsum(table, axis=0, dtype=np.int64), axis=1, out=sums[1:, 1:])
        return sums

    @property
    def _start(self) -> int:
        nq, nk = self.pairs_.array.shape
        return max(nk - nq, 0)

    def _sees(self, q: Positions, k: Positions) -> Any:
        nq, nk = self.pairs_.array.shape
        rows, last = q - self._start, self._start + nq - 1
        # A negative position holds no token and needs no row.
        if np.any((q >= 0) & ((rows < 0) | (rows >= nq))) or np.any(k >= nk):
            raise MaskError(
                f"{self!r} has rows for the queries {self._start} .. {last} and columns for the keys 0 .. {nk - 1}, "
                f"but was asked about queries {np.min(q)} .. {np.max(q)} and keys {np.min(k)} .. {np.max(k)}.\n"
                "Fix: a larger table, or q_positions= and k_positions= that lie inside it."
            )
        return self.pairs_.array[within(rows, nq), within(k, nk)]

    def _tile(self, q0: Positions, q1: Positions, k0: Positions, k1: Positions) -> Answer:
        nq, nk = self.pairs_.array.shape
        rows0, rows1 = np.clip(q0 - self._start, 0, nq), np.clip(q1 - self._start, 0, nq)
        cols0, cols1 = np.clip(k0, 0, nk), np.clip(k1, 0, nk)
        inside = (rows1 - rows0 == q1 - q0) & (cols1 - cols0 == k1 - k0)
        sums = self._sums
        seen = sums[rows1, cols1] - sums[rows0, cols1] - sums[rows1, cols0] + sums[rows0, cols0]
        area = (rows1 - rows0) * (cols1 - cols0)
        return np.where(inside, verdict(full=seen == area, empty=seen == 0), 1)

    @cached_property
    def _sheets(self) -> dict[tuple[int, ...], Table]:
        return {at: Table(Held(self.pairs_.array[at])) for at in np.ndindex(self.batch)}

    def _at(self, b: int, h: int) -> Mask:
        return self._sheets[(b, h)[: len(self.batch)]]

    def __repr__(self) -> str:
        return f"table({self.pairs_})"


@dataclass(frozen=True)
class Where(Mask):
    """A formula of the user's own; lowtri knows nothing about it but its answers."""

    fn: Callable[[Any, Any], Any]

    def _sees(self, q: Positions, k: Positions) -> Any:
        try:
            seen = np.asarray(self.fn(q, k))
        except ValueError as error:
            if "truth value" in str(error):
                raise MaskError(
                    "where: the formula asks whether a whole array is true. "
                    "Fix: write & | ~ instead of and, or, not, and np.where instead of if."
                ) from error
            raise
        if seen.dtype != bool:
            raise MaskError(f"where: the formula gave {seen.dtype} values; who may see whom is True or False.")
        shape = np.broadcast_shapes(np.shape(q), np.shape(k))
        try:
            seen = np.broadcast_to(seen, shape)
        except ValueError:
            raise MaskError(
                f"where: the formula gave shape {seen.shape} for positions that broadcast to {shape}. "
                "Fix: compute with q and k, element by element."
            ) from None
        return seen if shape else bool(seen)

    def _tile(self, q0: Positions, q1: Positions, k0: Positions, k1: Positions) -> Answer:
        return 1 + 0 * (q0 + k0)  # always PARTIAL: whoever needs more reads the pairs

    def __repr__(self) -> str:
        name = getattr(self.fn, "__name__", type(self.fn).__name__)
        return f"where(<{'formula' if name == '<lambda>' else name}>)"


@dataclass(frozen=True)
class Heads(Mask):
    masks: tuple[Mask, ...]

    def __post_init__(self) -> None:
        # Lists: torch.compile does not follow max() of a generator.
        rows = max([1, *[one.batch[0] for one in self.masks if one.batch]])
        object.__setattr__(self, "_batch", (rows, len(self.masks)))
        object.__setattr__(self, "_depth", max([one._depth for one in self.masks]))
        object.__setattr__(self, "_joined", max([one._joined for one in self.masks]))

    @property
    def batch(self) -> tuple[int, ...]:
        return self._batch  # type: ignore[attr-defined]

    @property
    def asks_query(self) -> bool:
        return any(one.asks_query for one in self.masks)

    def _at(self, b: int, h: int) -> Mask:
        return self.masks[h].at(b)

    def __repr__(self) -> str:
        return f"heads([{', '.join(map(repr, self.masks))}])"


def within(positions: Positions, n: int) -> Any:
    """Positions inside an array of n; the last entry serves for everything beyond."""
    if type(positions) is int:
        return min(max(positions, 0), n - 1)
    return np.clip(positions, 0, n - 1)

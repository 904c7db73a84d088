"""Dense tables of pairs, as callers of other libraries pass them, read as masks: one reader for all of them.

A table holds bools, or numbers that are added to the scores. Numbers of -inf hide a pair; so does, where the caller says so, the lowest
number of a dtype. If all other numbers are 0 the table is a mask; else it is a mask and a bias. Dimensions of size 1 and of stride 0
are read once and never expanded: one row of flags for all queries is a mask of keys.

Which tables of numbers are read as masks follows from their size and content alone, so that equal calls have equal bits:

* Calls of fewer than 16 queries keep the bias. They spend their time on reading keys and values, and a decoding step has another table
  at every token.
* Tables of fewer than 2**14 pairs keep the bias, too, unless they are a formula (full, causal, a band). To prepare a new table takes
  half a millisecond, in which the bias of so few pairs is added several times over; a formula is prepared once for all its tables.
* A bias that hides nothing in its first head is read no further.

Every call reads its table. What a table is as a mask is kept for the newest ones, by content: a bit for each pair.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lowtri.compat import constant_while_traced
from lowtri.masks.array_masks import Keys, Table
from lowtri.masks.arrays import FrozenArray, in_numpy, is_tensor
from lowtri.masks.formulas import band, causal, full, window
from lowtri.masks.mask import Mask
from lowtri.ops.call import FEW_QUERIES

_FEW_PAIRS = 2**14
_NUMBERS_AT_ONCE = 2**16  # they stay in the core's own memory while they are compared twice
_MOST_KEPT = 16  # of the tables that the layers of a few models share
_MOST_KEPT_BITS = 2**28
_SMALL_BYTES = 2**16
_MOST_SMALL = 4

Shape = tuple[int, ...]
# (B|1, H|1, Nq|1, bytes): a bit for each key, the lowest of a byte for the first; 1 = hidden, 0 after the last key
Bits = NDArray[np.uint8]


class ReadTable(NamedTuple):
    """A table of numbers as a mask.

    Attributes:
        mask: the mask.
        is_bias: whether the numbers are added to the scores as well.
        has_blind_rows: whether queries see keys with the lowest number, since they have no others.
    """

    mask: Mask
    is_bias: bool
    has_blind_rows: bool = False

    def bias(self, numbers: Any) -> Any:
        """What is added to the scores: the numbers, or None."""
        if self.has_blind_rows:
            return with_half_of_the_lowest(numbers)
        return numbers if self.is_bias else None


def with_half_of_the_lowest(numbers: Any) -> Any:
    """Numbers to add to the scores, none of them below half of the lowest, but for -inf; with their gradient.

    Kernels compute with the numbers times log2(e). There the lowest number overflows, and the log-sum-exp of a query that sees no other
    loses how many keys it sees. Half of it hides as well beside all greater numbers, and gives equal weights where there are none.

    >>> with_half_of_the_lowest(np.array([0.0, -1e308, -np.inf]))
    array([ 0.00000000e+000, -8.98846567e+307,            -inf])
    """
    least = lowest_number(numbers.dtype) / 2
    if isinstance(numbers, np.ndarray):
        return np.where(numbers == -np.inf, numbers, np.maximum(numbers, numbers.dtype.type(least)))
    import torch

    plain = numbers.detach()
    halved = torch.where(plain == -math.inf, plain, plain.clamp(min=least))
    if not numbers.requires_grad:
        return halved
    return numbers + torch.where(plain < least, halved - plain, 0).nan_to_num(0)


class _Kept(NamedTuple):
    """What a table was read as.

    Attributes:
        key: its sizes and its bits.
        mask: the mask, the same object for tables of the same pairs; None where a formula was looked for and not found.
        blind: the rows of the table in which every pair is hidden, (n, 3).
    """

    key: tuple[Any, bytes]
    mask: Mask | None
    blind: NDArray[np.int64]


_kept: tuple[_Kept, ...] = ()  # the newest first; replaced as a whole, so that threads need no lock
# Small tables of numbers: their content, and what they were read as.
_small: tuple[tuple[Any, ReadTable | None], ...] = ()


def read_bools(bools: Any, nq: int, nk: int, true_hides: bool = False) -> Mask | None:
    """The mask of a table of bools, (B|1, H|1, Nq|1, Nk|1), for ``nq`` queries and ``nk`` keys; None if it cannot be read now.

    >>> read_bools(np.tri(4, dtype=bool)[None, None], 4, 4)
    causal
    """
    array = in_numpy("mask", _without_repeats(bools))
    if isinstance(array, str):
        return None
    bits = _packed(array if true_hides else ~array)
    return _mask_of(bits, array.shape, nq, nk).mask


def read_numbers(
    numbers: Any, nq: int, nk: int, greatest_hidden: float = -math.inf, always: bool = False
) -> ReadTable | None:
    """The mask of a table of numbers, (B|1, H|1, Nq|1, Nk|1), and whether it is a bias, too; None where it is a bias alone.

    >>> numbers = np.where(np.tri(3, dtype=bool), 0, -np.inf)[None, None]
    >>> read_numbers(numbers, 3, 3, always=True)
    ReadTable(mask=causal, is_bias=False, has_blind_rows=False)
    >>> read_numbers(numbers + 1, 3, 3, always=True).is_bias
    True

    Args:
        greatest_hidden: numbers up to this one hide: -inf, or the lowest number of a dtype. A query without any greater number gets
            the mean over its keys of the lowest number, since a score added to it is lost. So it sees these, and the table is a bias.
        always: whether tables of few queries or pairs are read as masks, too.
    """
    given = None if nq < FEW_QUERIES and not always else _readable(numbers, always)
    if given is None:
        return None
    sizes = nq, nk, greatest_hidden, always
    small = isinstance(given, np.ndarray) and given.nbytes <= _SMALL_BYTES
    found = _read_small(given, *sizes) if small else _read(given, *sizes)
    if found is None or found.is_bias or not getattr(numbers, "requires_grad", False):
        return found
    return found._replace(is_bias=True)


def _read_small(given: NDArray[Any], *sizes: Any) -> ReadTable | None:
    """What a small table was read as, kept by its numbers: to compare those takes a fifth of the time that reading them takes."""
    global _small
    key, known = (given.tobytes(), given.shape, given.dtype, sizes), _small
    for other, found in known:
        if other == key:
            return found
    found = _read(given, *sizes)
    _small = (key, found), *known[: _MOST_SMALL - 1]
    return found


def _read(given: Any, nq: int, nk: int, greatest_hidden: float, always: bool) -> ReadTable | None:
    of_formulas = nq * nk < _FEW_PAIRS and not always
    if of_formulas and not _may_be_formula(given, greatest_hidden):
        return None
    found = _hidden_bits(given, greatest_hidden, always)
    if found is None:
        return None
    bits, is_bias = found
    shape = tuple(given.shape)
    kept = _mask_of(bits, shape, nq, nk, of_formulas)
    if len(kept.blind) and greatest_hidden > -math.inf and _show_lowest(given, bits, kept.blind):
        kept = _mask_of(bits, shape, nq, nk, of_formulas)
        return None if kept.mask is None else ReadTable(kept.mask, True, True)
    return None if kept.mask is None else ReadTable(kept.mask, is_bias)


def _readable(numbers: Any, on_any_device: bool) -> Any:
    """An array, or a tensor of a half type, which NumPy lacks, without repeated entries; None if the numbers cannot be read now."""
    if is_tensor(numbers):
        from lowtri.ops.tensors import active_mode

        if active_mode() is not None or not (numbers.is_cpu or on_any_device):
            return None  # a trace would keep these numbers for all later calls
        if numbers.dtype.itemsize < 4:
            return _without_repeats(numbers.detach()).cpu().resolve_neg()
    array = in_numpy("mask", _without_repeats(numbers))
    return None if isinstance(array, str) else array


def _without_repeats(x: Any) -> Any:
    """A table with one entry where a dimension repeats it, as ``expand`` and ``broadcast_to`` do."""
    strides = x.strides if isinstance(x, np.ndarray) else x.stride()
    if 0 not in strides:
        return x
    return x[tuple(slice(1) if step == 0 and n > 1 else slice(None) for n, step in zip(x.shape, strides, strict=True))]


def _hidden_bits(numbers: Any, greatest_hidden: float, always: bool) -> tuple[Bits, bool] | None:
    """The bits of a table, and whether it has other numbers than 0 at visible pairs; None for one that need not be read as a mask."""
    from lowtri.backends.cpu.tables import write_hidden_bits

    rows, heads = numbers.shape[:2]
    queries, keys = numbers.shape[2:]
    bits = np.empty((rows, heads, queries, -(-keys // 8)), np.uint8)
    is_bias = False
    for head in range(heads):
        part = numbers[:, head], greatest_hidden, bits[:, head]
        has_others = write_hidden_bits(*part)
        if has_others is None:
            has_others = _write_with_numpy(*part)
        is_bias = is_bias or has_others
        if is_bias and not (always or bits[:, : head + 1].any()):
            return None
    return bits, is_bias


def _write_with_numpy(numbers: Any, greatest_hidden: float, bits: NDArray[np.uint8]) -> bool:
    """What :func:`lowtri.backends.cpu.tables.write_hidden_bits` does, for all numbers, and where there are no kernels."""
    rows, queries, keys = numbers.shape
    step = max(1, _NUMBERS_AT_ONCE // max(1, keys))
    hidden, not_zero = np.empty((2, min(step, queries), keys), bool)
    has_others = False
    for row in range(rows):
        for first in range(0, queries, step):
            part = _as_floats(numbers[row, first : first + step])
            n = len(part)
            np.less_equal(part, greatest_hidden, out=hidden[:n])  # NaN hides nothing
            if not has_others:
                np.not_equal(part, 0, out=not_zero[:n])
                has_others = not np.array_equal(hidden[:n], not_zero[:n])
            bits[row, first : first + n] = _packed(hidden[:n])
    return has_others


def _packed(hidden: NDArray[np.bool_]) -> NDArray[np.uint8]:
    return np.packbits(hidden, axis=-1, bitorder="little")


def _may_be_formula(numbers: Any, greatest_hidden: float) -> bool:
    """Whether the first and the last query see consecutive keys, which nearly no other table has."""
    edges = ~(_as_floats(numbers[0, 0, :: max(1, numbers.shape[2] - 1)]) <= greatest_hidden)
    return int(np.count_nonzero(edges[:, 1:] != edges[:, :-1])) <= 2 * len(edges)


def _as_floats(part: Any) -> NDArray[Any]:
    """Numbers that NumPy compares quickly; half types are widened."""
    if not isinstance(part, np.ndarray):
        array: NDArray[Any] = part.float().numpy()
        return array
    return part.astype(np.float32) if part.dtype.itemsize < 4 else part


def _show_lowest(numbers: Any, bits: Bits, blind: NDArray[np.int64]) -> bool:
    """Show the pairs that only the lowest number hides in rows without a visible pair; whether there are any."""
    rows = tuple(blind.T)
    shown = _as_floats(numbers[rows]) > -np.inf
    bits[rows] = _packed(~shown)
    return bool(shown.any())


def _mask_of(bits: Bits, shape: Shape, nq: int, nk: int, of_formulas: bool = False) -> _Kept:
    """The mask of a table, kept for a table with the same pairs; with ``of_formulas`` only full or a band."""
    global _kept
    sizes, known = (shape, nq, nk, of_formulas), _kept
    content = bits.tobytes()
    for kept in known:  # bytes differ early where they differ, so this takes less time than a hash
        if kept.key[0] == sizes and kept.key[1] == content:
            return kept
    hidden = np.unpackbits(bits, axis=-1, count=shape[3], bitorder="little").view(bool)
    all_hidden = _packed(np.ones(shape[3], bool))
    blind = np.argwhere((bits == all_hidden).all(axis=-1))
    mask = (formula_of if of_formulas else simplest_mask)(~hidden, nq, nk)
    found = _Kept((sizes, content), mask, blind)
    remaining, newest = _MOST_KEPT_BITS, []
    for kept in (found, *known[: _MOST_KEPT - 1]):
        remaining -= 8 * len(kept.key[1])
        if remaining >= 0:
            newest.append(kept)
    _kept = tuple(newest)
    return found


@constant_while_traced
def lowest_number(*dtypes: Any) -> float:
    """The greatest of the lowest numbers of these dtypes, NumPy's or torch's: a table may be made for another dtype than its own.

    >>> lowest_number(np.dtype("float32"), np.dtype("float16"))
    -65504.0
    """
    return max(_lowest(dtype) for dtype in dtypes)


@cache
def _lowest(dtype: Any) -> float:
    if isinstance(dtype, np.dtype):
        return float(np.finfo(dtype).min)
    import torch

    return torch.finfo(dtype).min


def simplest_mask(visible: NDArray[np.bool_], nq: int, nk: int) -> Mask:
    """The simplest mask that is this table (B|1, H|1, Nq|1, Nk|1): full, a band, keys, or a table.

    >>> simplest_mask(np.tri(4, dtype=bool)[None, None], 4, 4)
    causal
    """
    visible = _without_equal_entries(visible)
    formula = formula_of(visible, nq, nk)
    if formula is not None:
        return formula
    if visible.shape[1:3] == (1, 1):
        valid = np.broadcast_to(visible[:, 0, 0], (len(visible), nk))
        return Keys(FrozenArray(valid[0] if len(valid) == 1 else valid))
    visible = np.broadcast_to(visible, (*visible.shape[:2], nq, nk))
    if visible.shape[:2] == (1, 1):
        return Table(FrozenArray(visible[0, 0]))
    return Table(FrozenArray(visible[:, 0] if visible.shape[1] == 1 else visible))


def formula_of(visible: NDArray[np.bool_], nq: int, nk: int) -> Mask | None:
    """The formula that is this table, full or a band; None if it is none."""
    if visible.all():
        return full()
    return _band_of(visible[0, 0]) if visible.shape == (1, 1, nq, nk) else None


def _without_equal_entries(visible: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """A table with one row, head or query where all of them are equal."""
    for axis in range(3):
        if visible.shape[axis] > 1:
            first = visible.take([0], axis)
            visible = first if (visible == first).all() else visible
    return visible


def _band_of(visible: NDArray[np.bool_]) -> Mask | None:
    """The band that is this table, whose queries are the last of its keys; None if it is none."""
    nq, nk = visible.shape
    first, last = np.flatnonzero(visible[0]), np.flatnonzero(visible[-1])
    if nq > nk or any(not x.size or x[-1] - x[0] >= x.size for x in (first, last)):
        return None
    start = nk - nq
    after, before = int(first[-1]) - start, nk - 1 - int(last[0])
    if min(after, before) < 0:
        return None
    step = max(1, _NUMBERS_AT_ONCE // nk)
    for top in range(0, nq, step):
        part = visible[top : top + step]
        ahead = np.arange(nk) - np.arange(start + top, start + top + len(part))[:, None]
        if not np.array_equal(part, (ahead <= after) & (ahead >= -before)):
            return None
    if before == nk - 1:  # the last query sees the first key, and so does every other one
        return causal() if after == 0 else band(before, after)
    return window(before + 1) if after == 0 else band(before, after)

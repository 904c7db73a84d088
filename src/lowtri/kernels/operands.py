"""Rows of arrays as operands of a product, in each of the four ways in which a kernel reads rows.

Operands consist of words (see :mod:`lowtri.kernels.product`), or are those of :mod:`lowtri.kernels.tiles`. These functions convert rows
where necessary and return the operand's address; for operands that may be strided, they also return the row step and the depth step, in
words.
"""

from __future__ import annotations

from lowtri.kernels.device_function import by_spec
from lowtri.kernels.rows import (
    fill,
    interleave_input_rows,
    interleave_rows,
    round_up,
    transpose_in,
    widen_rows,
)
from lowtri.kernels.tile_operands import pack_rounded, queries_in_pairs, rows_for_a
from lowtri.kernels.tile_output import padded

__all__ = [
    "finite_rows_operand",
    "head_operand",
    "key_operand",
    "row_operand",
    "transposed_queries",
]


@by_spec
def transposed_queries(spec):
    """n rows of an array as an operand (words, 64) with queries in lanes; ``rows`` is scratch for (n, size)."""

    def direct(source, row_step, step, n, size, rows, target, spec):
        transpose_in(source, row_step, step, n, size, round_up(n, 16), target, spec)

    def pairs(source, row_step, step, n, size, rows, target, spec):
        transpose_in(source, row_step // 2, step, n, size // 2, round_up(n, 16), target, spec)

    def widened(source, row_step, step, n, size, rows, target, spec):
        widen_rows(source, row_step, step, n, size, rows, size, spec)
        transpose_in(rows, size, 1, n, size, round_up(n, 16), target, spec)

    def tiles(source, row_step, step, n, size, rows, target, spec):
        queries_in_pairs(source, row_step, step, n, size, rows, target, spec)

    return {"direct": direct, "pairs": pairs, "widened": widened, "tiles": tiles}[spec.operand]


@by_spec
def head_operand(spec):
    """Rows of keys or values as an operand with words along the head, the A of K Q^T; ``target`` is scratch for (n, size).

    On tiles the row step is in bytes.
    """

    def direct(source, row_step, step, n, size, target, spec):
        return source, row_step, step

    def pairs(source, row_step, step, n, size, target, spec):
        return source, row_step // 2, step

    def widened(source, row_step, step, n, size, target, spec):
        widen_rows(source, row_step, step, n, size, target, padded(spec, size), spec)
        return target, padded(spec, size), 1

    def tiles(source, row_step, step, n, size, target, spec):
        rows, row = rows_for_a(source, row_step, step, n, size, target, spec)
        return rows, row, 1

    return {"direct": direct, "pairs": pairs, "widened": widened, "tiles": tiles}[spec.operand]


@by_spec
def key_operand(spec):
    """Rows of keys or values as an operand with words along the keys, the B of P V: its address, and words from one row to the next.

    Rows are whole vectors, padded with 0. ``target`` and ``zeros`` are scratch.
    """

    def direct(source, row_step, step, n, size, zeros, target, spec):
        if step == 1 and size % spec.lanes == 0:
            return source, row_step
        widen_rows(source, row_step, step, n, size, target, padded(spec, size), spec)
        return target, padded(spec, size)

    def pairs(source, row_step, step, n, size, zeros, target, spec):
        interleave_input_rows(source, row_step, n, size, zeros, target, spec)
        return target, size

    def widened(source, row_step, step, n, size, zeros, target, spec):
        widen_rows(source, row_step, step, n, size, target, padded(spec, size), spec)
        return target, padded(spec, size)

    return {"direct": direct, "pairs": pairs, "widened": widened}[spec.operand]


@by_spec
def row_operand(spec):
    """Packed rows as an operand of a product that sums over rows; ``pairs`` is scratch, and may be ``rows`` itself."""

    def numbers(rows, n, size, pairs, spec):
        return rows

    def in_pairs(rows, n, size, pairs, spec):
        interleave_rows(rows, n, size, pairs, spec)
        return pairs

    def whole_depths(rows, n, size, pairs, spec):
        interleave_rows(rows, n, size, pairs, spec)
        used, depths = (n + 1) // 2, round_up(n, 32) // 2
        fill(pairs + 4 * size * used, size * (depths - used), 0.0, spec)
        return pairs

    return {"pairs": in_pairs, "tiles": whole_depths}.get(spec.operand, numbers)


@by_spec
def finite_rows_operand(spec):
    """Padded rows of keys or values, packed, as an operand: see :func:`key_operand`. ``copy`` and ``target`` are scratch."""

    def words(rows, n, size, copy, zeros, target, spec):
        return row_operand(rows, n, padded(spec, size), rows, spec), padded(spec, size)

    def tiles(rows, n, size, copy, zeros, target, spec):
        pack_rounded(rows, n, size, copy, zeros, target, spec)
        return target, 0

    return tiles if spec.on_tiles else words

"""Rows of bf16 as operands of products on tile registers: A in rows, padded to whole depths of 32; B in pairs.

Rows that are contiguous and whole are read from the array. Others are copied first, padded with zeros: padding on one side only would
not do, since 0 * NaN is NaN.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from lowtri.kernels import scratch
from lowtri.kernels.device_function import device_function
from lowtri.kernels.lanes import transpose, transposed
from lowtri.kernels.operations.baseline import constant
from lowtri.kernels.rows import fill, interleave_input_rows
from lowtri.kernels.simd import I16, I64, all_lanes_finite, load, load_input, pointer, store
from lowtri.kernels.spec import HALF, HALF_ROW, QUERIES

__all__ = [
    "copy_rows",
    "pack_transposed",
    "queries_in_pairs",
    "rows_for_a",
    "store_rounded_block",
    "whole",
    "whole_16",
    "zero_non_finite",
]


@intrinsic
def copy_number(typing, source, target):
    """Copy a number of 16 bits."""

    def emit(c, b, s, a):
        b.store(b.load(pointer(b, a[0], I16), align=2), pointer(b, a[1], I16), align=2)
        return c.get_dummy_value()

    return types.void(types.intp, types.intp), emit


whole = device_function(scratch.whole)
whole_16 = device_function(scratch.whole_16)


@device_function
def copy_rows(source, row_step, step, n, size, target, rows, spec):
    """Copy n rows of an array of bf16 to rows of ``whole(size)`` numbers; zeros fill them, and ``rows`` rows in all."""
    row = 2 * whole(size)
    fill(target, rows * row // 4, 0.0, spec)
    for i in range(n):
        from_row, to_row, d = source + 2 * i * row_step, target + i * row, 0
        if step == 1:
            while d + 32 <= size:
                store(to_row + 2 * d, load(from_row + 2 * d, spec))
                d += 32
        while d < size:
            copy_number(from_row + 2 * d * step, to_row + 2 * d)
            d += 1


@device_function
def rows_for_a(source, row_step, step, n, size, target, spec):
    """Rows of keys or values as operand A, at least 16: their address, and bytes from one to the next. ``target`` is scratch."""
    if step == 1 and size % 32 == 0 and n >= 16:
        return source, 2 * row_step
    copy_rows(source, row_step, step, n, size, target, max(n, 16), spec)
    return target, 2 * whole(size)


@device_function
def queries_in_pairs(source, row_step, step, n, size, rows, target, spec):
    """n <= 64 rows of queries as operand B, for each half (whole(size) / 2, 32), pairs along the head; ``rows`` is scratch for 64 rows.

    Lanes past n repeat the last row.
    """
    words, row = source, row_step
    if step != 1 or size % 32 or row_step % 2:
        copy_rows(source, row_step, step, n, size, rows, n, spec)
        words, row = rows, whole(size)
    size = whole(size) // 2
    for first in range(0, QUERIES, 16):
        top = min(first, n - 1)
        last, lanes = min(n - 1 - top, 15), HALF_ROW * size * (first // HALF) + 4 * (first % HALF)
        for pair in range(0, size, 16):
            block = words + 2 * top * row + 4 * pair
            transpose(block, 2 * row, last, target + HALF_ROW * pair + lanes, HALF_ROW, spec)


@device_function
def pack_transposed(source, row_step, step, n, size, copy, pairs, zeros, target, spec):
    """n rows of keys or values, transposed: for each 32 of them a block (whole_16(size), 32), zeros past n.

    ``copy`` is scratch for the rows, ``pairs`` for 16 rows of ``whole_16(size)`` pairs; ``zeros`` is a row of 0.
    """
    rows, row = source, row_step
    if step != 1 or size % 16:
        copy_rows(source, row_step, step, n, size, copy, n, spec)
        rows, row = copy, whole(size)
    columns = whole_16(size)
    for j in range(0, n, 32):
        count = min(32, n - j)
        interleave_input_rows(rows + 2 * j * row, row, count, columns, zeros, pairs, spec)
        have = (count + 1) // 2
        fill(pairs + 4 * have * columns, (16 - have) * columns, 0.0, spec)
        for d in range(0, columns, 16):
            transpose(pairs + 4 * d, 4 * columns, 15, target + 64 * (j // 32 * columns + d), 64, spec)


@device_function
def zero_non_finite(rows, n, size, spec):
    """Set to 0 those of n rows of ``whole(size)`` numbers that are not all finite."""
    row = 2 * whole(size)
    for address in range(rows, rows + n * row, row):
        finite = True
        for offset in range(0, row, 32):
            finite = finite and all_lanes_finite(load_input(address + offset, spec))
        if not finite:
            fill(address, row // 4, 0.0, spec)


@intrinsic
def store_rounded_block(typing, source, source_row, total, target, target_row, spec):
    """16 rows of 32 numbers: the columns of (32, 16), over a vector of totals, rounded to bf16. 0 where the total is."""

    def emit(c, b, s, a):
        source, source_row, total, target, target_row, _ = a
        operations, kind = spec.value.operations, spec.value.vector.ir
        positive = b.fcmp_ordered(">", total, constant(kind, 0.0))
        factor, pairs = b.fdiv(constant(kind, 1.0), total), []
        for i in range(0, 32, 2):
            both = []
            for d in (i, i + 1):
                address = b.add(source, b.mul(source_row, ir.Constant(I64, d)))
                both.append(b.select(positive, b.fmul(b.load(pointer(b, address, kind), align=4), factor), total))
            pairs.append(operations.pair(b, *both))
        for i, row in enumerate(transposed(b, pairs)):
            address = b.add(target, b.mul(target_row, ir.Constant(I64, i)))
            b.store(row, pointer(b, address, kind), align=2)
        return c.get_dummy_value()

    return types.void(types.intp, types.intp, total, types.intp, types.intp, spec), emit

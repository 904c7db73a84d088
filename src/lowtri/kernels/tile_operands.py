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
from lowtri.kernels.lanes import shuffled, transpose, transposed
from lowtri.kernels.operations.baseline import constant
from lowtri.kernels.rows import fill, round_row, round_up
from lowtri.kernels.simd import I16, I64, as_number, load, pointer, store
from lowtri.kernels.spec import QUERIES

__all__ = ["pack_rounded", "pack_transposed", "product_rows", "queries_in_pairs", "rows_for_a", "store_rounded_block"]

product_rows = device_function(scratch.product_rows)


@intrinsic
def copy_number(typing, source, target):
    """Copy a number of 16 bits."""

    def emit(c, b, s, a):
        b.store(b.load(pointer(b, a[0], I16), align=2), pointer(b, a[1], I16), align=2)
        return c.get_dummy_value()

    return types.void(types.intp, types.intp), emit


@device_function
def copy_rows(source, row_step, step, n, size, target, rows, spec):
    """Copy n rows of an array of bf16 to rows of a multiple of 32 numbers; zeros fill them, and ``rows`` rows in all."""
    row = 2 * round_up(size, 32)
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
    return target, 2 * round_up(size, 32)


@device_function
def queries_in_pairs(source, row_step, step, n, size, rows, target, spec):
    """n <= 64 rows of queries as operand B, for each 32 of them (words, 32), pairs along the head; ``rows`` is scratch for 64 rows.

    Lanes past n repeat the last row.
    """
    words, row = source, row_step
    if step != 1 or size % 32 or row_step % 2:
        copy_rows(source, row_step, step, n, size, rows, n, spec)
        words, row = rows, round_up(size, 32)
    size = round_up(size, 32) // 2
    for first in range(0, QUERIES, 16):
        top = min(first, n - 1)
        last, lanes = min(n - 1 - top, 15), spec.unit_row * size * (first // 32) + 4 * (first % 32)
        for pair in range(0, size, 16):
            block = words + 2 * top * row + 4 * pair
            transpose(block, 2 * row, last, target + spec.unit_row * pair + lanes, spec.unit_row, spec)


@intrinsic
def transpose_block(typing, source, source_row, count, zeros, target, target_row, spec):
    """Transpose 32 rows of 32 numbers of bf16. Rows from ``count`` on are read from ``zeros``; row steps in bytes.

    The numbers of two rows are interleaved in each quarter of a vector, which gives the pairs of 16 columns in two vectors; blocks of
    16 x 16 pairs are then transposed.
    """
    kind, quarters = spec.value.vector, (0, 8, 16, 24)

    def emit(c, b, s, a):
        source, source_row, count, zeros, target, target_row, _ = a
        rows = []
        for i in range(32):
            n = ir.Constant(I64, i)
            address = b.select(b.icmp_signed("<", n, count), b.add(source, b.mul(n, source_row)), zeros)
            rows.append(b.load(pointer(b, address, ir.VectorType(I16, 32)), align=2))
        for first in (0, 4):
            columns = [quarter + first + n for quarter in quarters for n in range(4)]
            order = [lane for column in columns for lane in (column, column + 32)]
            pairs = [b.bitcast(shuffled(b, *rows[i : i + 2], order), kind.ir) for i in range(0, 32, 2)]
            for column, vector in zip(columns, transposed(b, pairs), strict=True):
                address = b.add(target, b.mul(target_row, ir.Constant(I64, column)))
                b.store(vector, pointer(b, address, kind.ir), align=4)
        return c.get_dummy_value()

    return types.void(*[types.intp] * 6, spec), emit


@device_function
def pack_blocks(rows, row, n, columns, zeros, target, spec):
    """n rows of at least ``columns`` numbers, transposed: for each 32 of them a block (columns, 32), zeros past n."""
    if columns < 32:
        fill(target, round_up(n, 32) * columns // 2, 0.0, spec)
        for i in range(n):
            for d in range(columns):
                copy_number(rows + 2 * (i * row + d), target + 64 * (i // 32 * columns + d) + 2 * (i % 32))
        return
    for j in range(0, n, 32):
        for d in range(0, columns, 32):
            column = min(d, columns - 32)  # the last block overlaps the one before
            block = target + 64 * (j // 32 * columns + column)
            transpose_block(rows + 2 * (j * row + column), 2 * row, n - j, zeros, block, 64, spec)


@device_function
def pack_transposed(source, row_step, step, n, size, copy, zeros, target, spec):
    """n rows of keys or values, transposed: for each 32 of them a block (product_rows(size), 32), zeros past n.

    ``copy`` is scratch for the rows; ``zeros`` are 32 zeros.
    """
    rows, row = source, row_step
    if step != 1 or size % 16 or size < 32:
        copy_rows(source, row_step, step, n, size, copy, n, spec)
        rows, row = copy, round_up(size, 32)
    pack_blocks(rows, row, n, product_rows(size, spec), zeros, target, spec)


@device_function
def pack_rounded(source, n, size, copy, zeros, target, spec):
    """:func:`pack_transposed` for rows of float32, padded to a multiple of 32."""
    row = round_up(size, 32)
    fill(copy, n * row // 2, 0.0, spec)
    for i in range(n):
        round_row(source + 4 * i * row, size, as_number(1.0, spec), copy + 2 * i * row, spec)
    pack_blocks(copy, row, n, product_rows(size, spec), zeros, target, spec)


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

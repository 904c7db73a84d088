"""Rows of arrays as operands of a product, and results as rows of arrays: transposed, widened, interleaved, rounded.

A tile consists of rows of 64 numbers, one for each query. Operands consist of words (see :mod:`lowtri.kernels.product`). The
``*_operand`` functions, chosen by the spec, convert rows to words where necessary and return the operand's address; for operands that
may be strided, they also return the row step and the depth step, in words.
"""

from __future__ import annotations

from lowtri.kernels.bf16 import interleave, interleave_loaded
from lowtri.kernels.device_function import by_spec, device_function
from lowtri.kernels.lanes import transpose
from lowtri.kernels.simd import (
    load,
    load_input,
    mul,
    read,
    read_input,
    splat,
    store,
    store_input,
    write,
    write_input,
)
from lowtri.kernels.spec import QUERIES

__all__ = [
    "fill",
    "fill_columns",
    "head_operand",
    "word_count",
    "key_operand",
    "interleave_rows",
    "in_place_operand",
    "store_rows",
    "row_operand",
    "multiply_by",
    "multiply_columns",
    "transpose_in",
    "transpose_out",
    "transposed_queries",
    "whole_groups",
    "widen_rows",
]


@device_function
def fill(address, count, value, spec):
    """Set ``count`` numbers (whole vectors) to one value."""
    for offset in range(0, spec.number_bytes * count, 64):
        store(address + offset, splat(value, spec))


@device_function
def multiply_by(address, count, factor, spec):
    """Multiply ``count`` numbers (whole vectors) by one factor."""
    for offset in range(0, spec.number_bytes * count, 64):
        store(address + offset, mul(load(address + offset, spec), splat(factor, spec)))


@device_function
def fill_columns(tile, size, columns, value, spec):
    """Set the first ``columns`` of a tile (size, 64), whole vectors, to one value."""
    for j in range(size):
        fill(tile + spec.row_bytes * j, columns, value, spec)


@device_function
def multiply_columns(tile, size, columns, factor, spec):
    """Multiply the first ``columns`` of a tile (size, 64), whole vectors, by one factor."""
    for j in range(size):
        multiply_by(tile + spec.row_bytes * j, columns, factor, spec)


@device_function
def whole_groups(n):
    """The queries of a tile rounded up to whole groups of 16, which are computed together: the columns that are used."""
    return (n + 15) & -16


@device_function
def word_count(count, spec):
    """How many words hold this many numbers."""
    return (count + spec.per_word - 1) // spec.per_word


@device_function
def transpose_in(source, row_step, step, n, size, columns, target, spec):
    """Transpose n <= 64 rows of ``size`` words to (size, 64): queries in lanes. ``columns`` lanes are set; past n with the last row."""
    number_bytes, lanes, row = spec.number_bytes, spec.lanes, spec.row_bytes
    if step == 1 and size >= lanes:
        for lane in range(0, columns, lanes):
            top = min(lane, n - 1)
            last = min(n - 1 - top, lanes - 1)
            for d in range(0, size, lanes):
                column = min(d, size - lanes)  # the last block overlaps the one before
                block = source + number_bytes * (top * row_step + column)
                transpose(block, number_bytes * row_step, last, target + row * column + number_bytes * lane, row, spec)
    else:
        for d in range(size):
            for i in range(columns):
                x = read(source + number_bytes * (min(i, n - 1) * row_step + d * step), spec)
                write(target + row * d + number_bytes * i, x, spec)


@device_function
def transpose_out(source, n, size, target, row_step, spec):
    """Transpose (size, 64) to n <= 64 rows of ``size`` numbers."""
    number_bytes, lanes, row = spec.number_bytes, spec.lanes, spec.row_bytes
    whole = n - n % lanes if size >= lanes else 0
    for lane in range(0, whole, lanes):
        for d in range(0, size, lanes):
            column = min(d, size - lanes)
            block = target + number_bytes * (lane * row_step + column)
            transpose(source + row * column + number_bytes * lane, row, lanes - 1, block, number_bytes * row_step, spec)
    for i in range(whole, n):
        for d in range(size):
            write(target + number_bytes * (i * row_step + d), read(source + row * d + number_bytes * i, spec), spec)


@device_function
def widen_rows(source, row_step, step, n, size, target, spec):
    """n rows of an array, packed, in the compute dtype."""
    number_bytes, lanes = spec.number_bytes, spec.lanes
    for i in range(n):
        row, widened = source + spec.input_bytes * i * row_step, target + number_bytes * i * size
        whole = size - size % lanes if step == 1 else 0
        for d in range(0, whole, lanes):
            store(widened + number_bytes * d, load_input(row + spec.input_bytes * d, spec))
        for d in range(whole, size):
            write(widened + number_bytes * d, read_input(row + spec.input_bytes * d * step, spec), spec)


@device_function
def round_row(source, size, target, spec):
    """Copy a packed row of numbers to a row of an array, rounded to its dtype."""
    whole = size - size % spec.lanes
    for d in range(0, whole, spec.lanes):
        store_input(target + spec.input_bytes * d, load(source + spec.number_bytes * d, spec), spec)
    for d in range(whole, size):
        write_input(target + spec.input_bytes * d, read(source + spec.number_bytes * d, spec), spec)


@by_spec
def store_rows(spec):
    """Copy a tile (size, 64) to n rows of an array, ``row_step`` numbers apart; ``rows`` is scratch for (n, size)."""

    def direct(source, n, size, rows, target, row_step, spec):
        transpose_out(source, n, size, target, row_step, spec)

    def rounded(source, n, size, rows, target, row_step, spec):
        transpose_out(source, n, size, rows, size, spec)
        for i in range(n):
            round_row(rows + spec.number_bytes * i * size, size, target + spec.input_bytes * i * row_step, spec)

    return direct if spec.rows == "direct" else rounded


@device_function
def interleave_rows(rows, n, size, pairs, spec):
    """Packed rows (n, size) as pairs of bf16 (n / 2, size): neighbouring rows interleaved, zero-padded to an even count."""
    for j in range(0, n, 2):
        for offset in range(0, 4 * size, 64):
            row = rows + 4 * size * j + offset
            high = load(row + 4 * size, spec) if j + 1 < n else splat(0.0, spec)
            store(pairs + 2 * size * j + offset, interleave(load(row, spec), high, spec))


@device_function
def interleave_input_rows(source, row_step, n, size, zeros, pairs, spec):
    """Rows of a bf16 array (n, size) as pairs (n / 2, size); ``zeros`` is a row of 0, the neighbour of an odd last row."""
    for j in range(0, n, 2):
        low = source + 2 * j * row_step
        high = low + 2 * row_step if j + 1 < n else zeros
        for d in range(0, size, 16):
            store(pairs + 4 * (j // 2 * size + d), interleave_loaded(low + 2 * d, high + 2 * d, spec))


@by_spec
def transposed_queries(spec):
    """n rows of an array as an operand (words, 64) with queries in lanes; ``rows`` is scratch for (n, size)."""

    def direct(source, row_step, step, n, size, rows, target, spec):
        transpose_in(source, row_step, step, n, size, whole_groups(n), target, spec)

    def pairs(source, row_step, step, n, size, rows, target, spec):
        transpose_in(source, row_step // 2, step, n, size // 2, whole_groups(n), target, spec)

    def widened(source, row_step, step, n, size, rows, target, spec):
        widen_rows(source, row_step, step, n, size, rows, spec)
        transpose_in(rows, size, 1, n, size, whole_groups(n), target, spec)

    return {"direct": direct, "pairs": pairs, "widened": widened}[spec.rows]


@by_spec
def head_operand(spec):
    """Rows of keys or values as an operand with words along the head, the A of K Q^T; ``target`` is scratch for (n, size)."""

    def direct(source, row_step, step, n, size, target, spec):
        return source, row_step, step

    def pairs(source, row_step, step, n, size, target, spec):
        return source, row_step // 2, step

    def widened(source, row_step, step, n, size, target, spec):
        widen_rows(source, row_step, step, n, size, target, spec)
        return target, size, 1

    return {"direct": direct, "pairs": pairs, "widened": widened}[spec.rows]


@by_spec
def key_operand(spec):
    """Rows of keys or values as an operand with words along the keys, the A of V^T P^T; ``target`` and ``zeros`` are scratch."""

    def direct(source, row_step, step, n, size, zeros, target, spec):
        return source, row_step, step

    def pairs(source, row_step, step, n, size, zeros, target, spec):
        interleave_input_rows(source, row_step, n, size, zeros, target, spec)
        return target, size, 1

    def widened(source, row_step, step, n, size, zeros, target, spec):
        widen_rows(source, row_step, step, n, size, target, spec)
        return target, size, 1

    return {"direct": direct, "pairs": pairs, "widened": widened}[spec.rows]


@by_spec
def row_operand(spec):
    """Packed rows as an operand of a product that sums over rows; ``pairs`` is scratch, and may be ``rows`` itself."""

    def numbers(rows, n, size, pairs, spec):
        return rows

    def in_pairs(rows, n, size, pairs, spec):
        interleave_rows(rows, n, size, pairs, spec)
        return pairs

    return in_pairs if spec.rows == "pairs" else numbers


@by_spec
def in_place_operand(spec):
    """A tile of n rows as an operand with words along the queries, in place: pairs fill the first half of each row."""

    def numbers(rows, n, spec):
        pass

    def in_pairs(rows, n, spec):
        for j in range(n):
            for lane in range(0, QUERIES, 16):
                row = rows + spec.row_bytes * j
                store_input(row + 2 * lane, load(row + 4 * lane, spec), spec)

    return in_pairs if spec.rows == "pairs" else numbers

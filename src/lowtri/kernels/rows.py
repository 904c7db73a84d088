"""Rows of arrays and of tiles: filled, multiplied, transposed, widened, interleaved, rounded.

A tile consists of rows of 64 numbers, one for each query.
"""

from __future__ import annotations

from lowtri.kernels import scratch
from lowtri.kernels.device_function import device_function
from lowtri.kernels.simd import (
    interleave,
    interleave_loaded,
    load,
    load_input,
    mul,
    prefetch_line,
    read,
    read_input,
    splat,
    store,
    store_input,
    transpose,
    write,
    write_input,
)

__all__ = [
    "fill",
    "fill_columns",
    "interleave_input_rows",
    "interleave_rows",
    "multiply_by",
    "multiply_columns",
    "padded",
    "prefetch_rows",
    "product_rows",
    "round_row",
    "round_up",
    "transpose_in",
    "transpose_out",
    "widen_rows",
    "word_count",
]

round_up = device_function(scratch.round_up)
padded = device_function(scratch.padded)
product_rows = device_function(scratch.product_rows)


@device_function
def prefetch_rows(rows, row_step, first, last, size, spec):
    """Prefetch rows of an array, in memory's order."""
    for i in range(first, last):
        for offset in range(0, spec.input_bytes * size, 64):
            prefetch_line(rows + spec.input_bytes * i * row_step + offset)


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
def widen_rows(source, row_step, step, n, size, target, target_row, spec):
    """n rows of an array in the compute dtype, padded with 0 to ``target_row`` numbers each."""
    number_bytes, lanes = spec.number_bytes, spec.lanes
    for i in range(n):
        row, widened = source + spec.input_bytes * i * row_step, target + number_bytes * i * target_row
        whole = size - size % lanes if step == 1 else 0
        for d in range(0, whole, lanes):
            store(widened + number_bytes * d, load_input(row + spec.input_bytes * d, spec))
        for d in range(whole, size):
            write(widened + number_bytes * d, read_input(row + spec.input_bytes * d * step, spec), spec)
        for d in range(size, target_row):
            write(widened + number_bytes * d, 0.0, spec)


@device_function
def round_row(source, size, factor, target, spec):
    """Copy a packed row of numbers, times a factor, to a row of an array, rounded to its dtype."""
    whole = size - size % spec.lanes
    for d in range(0, whole, spec.lanes):
        x = mul(load(source + spec.number_bytes * d, spec), splat(factor, spec))
        store_input(target + spec.input_bytes * d, x, spec)
    for d in range(whole, size):
        write_input(target + spec.input_bytes * d, read(source + spec.number_bytes * d, spec) * factor, spec)


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

"""Rows of arrays and of tiles: filled, multiplied, transposed, widened, interleaved, rounded; and those with a NaN or inf.

A tile consists of rows of 64 numbers, one for each query. Its output before the division, or dQ, has on vectors a row of whole vectors
for each query: O += P V, with rows of V as vectors. So any few queries can have keys of their own, and rows are written to the array as
they are. On tile registers it is transposed, (size, 64): O^T += V^T P^T, with P as softmax leaves it.
"""

from __future__ import annotations

import numpy as np

from lowtri.kernels import abi
from lowtri.kernels.device import device_function
from lowtri.kernels.simd import (
    add,
    all_lanes_finite,
    interleave,
    interleave_loaded,
    lane,
    load,
    load_input,
    mul,
    prefetch_line,
    read,
    read_input,
    read_word,
    select_bits,
    splat,
    store,
    store_input,
    transpose,
    write,
    write_input,
)

ALL_QUERIES = np.uint64(0xFFFFFFFFFFFFFFFF)  # the mask bits of a key that every query sees

round_up, padded, product_rows = map(device_function, (abi.round_up, abi.padded, abi.product_rows))


@device_function
def word_count(count, spec):
    """How many words hold this many numbers."""
    return (count + spec.per_word - 1) // spec.per_word


@device_function
def input_row(array, strides, b, h, n, spec):
    """The address of a row of an array (B, H, N, D)."""
    return array + spec.input_bytes * (b * strides.b + h * strides.h + n * strides.n)


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
def transpose_in(source, row_step, step, n, size, columns, target, spec):
    """Transpose n <= 64 rows of ``size`` words to (size, 64): queries in lanes. ``columns`` lanes are set; past n with the last row."""
    number_bytes, lanes, row = spec.number_bytes, spec.lanes, spec.row_bytes
    if step == 1 and size >= lanes:
        for first in range(0, columns, lanes):
            top = min(first, n - 1)
            last = min(n - 1 - top, lanes - 1)
            for d in range(0, size, lanes):
                column = min(d, size - lanes)  # the last block overlaps the one before
                block = source + number_bytes * (top * row_step + column)
                transpose(block, number_bytes * row_step, last, target + row * column + number_bytes * first, row, spec)
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
    for first in range(0, whole, lanes):
        for d in range(0, size, lanes):
            column = min(d, size - lanes)
            block = target + number_bytes * (first * row_step + column)
            transpose(
                source + row * column + number_bytes * first, row, lanes - 1, block, number_bytes * row_step, spec
            )
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


# The output of a tile, or dQ.


@device_function
def zero_output(output, n, size, spec):
    """Set the sums of n queries to 0."""
    if spec.on_tiles:
        fill_columns(output, product_rows(size, spec), round_up(n, 32), 0.0, spec)
    else:
        fill(output, n * padded(spec, size), 0.0, spec)


@device_function
def rescale_output(output, vector, size, factors, spec):
    """Multiply the sums of a vector of queries by one factor each; ``vector`` is its number among those of the queries."""
    if spec.on_tiles:
        for d in range(size):
            address = output + spec.row_bytes * d + 64 * vector
            store(address, mul(load(address, spec), factors))
    else:
        columns = padded(spec, size)
        for i in range(spec.lanes):
            factor = lane(factors, i)
            if factor != 1:
                multiply_by(output + spec.number_bytes * columns * (spec.lanes * vector + i), columns, factor, spec)


@device_function
def output_finite(output, n, size, spec):
    """Whether the sums of n queries are all finite."""
    if not spec.on_tiles:
        return all_finite(output, n * padded(spec, size), spec)
    for d in range(size):
        if not all_finite(output + spec.row_bytes * d, round_up(n, 16), spec):
            return False
    return True


@device_function
def store_scaled(output, n, size, factor, target, row_step, spec):
    """Copy the sums of n queries, times a factor, to rows of the compute dtype, ``row_step`` numbers apart."""
    number_bytes = spec.number_bytes
    if spec.on_tiles:
        for d in range(size):
            multiply_by(output + spec.row_bytes * d, round_up(n, 16), factor, spec)
        transpose_out(output, n, size, target, row_step, spec)
    else:
        columns, whole = padded(spec, size), size - size % spec.lanes
        for i in range(n):
            source, row = output + number_bytes * columns * i, target + number_bytes * row_step * i
            for offset in range(0, number_bytes * whole, 64):
                store(row + offset, mul(load(source + offset, spec), splat(factor, spec)))
            for d in range(whole, size):
                write(row + number_bytes * d, read(source + number_bytes * d, spec) * factor, spec)


# NaN and inf.
#
# One in a row of Q, K, V or dO changes the results of the pairs that see it, and no others. A product would spread it to hidden pairs,
# whose weight is 0, since 0 * NaN is NaN. So non-finite rows are added pair by pair where they are visible, and the product reads a
# copy in which these rows are 0.


@device_function
def all_finite(address, count, spec):
    """Whether ``count`` numbers (whole vectors) are all finite."""
    for offset in range(0, spec.number_bytes * count, 64):
        if not all_lanes_finite(load(address + offset, spec)):
            return False
    return True


@device_function
def input_rows_finite(rows, row_step, step, n, size, spec):
    """Whether all numbers of n rows of an array are finite."""
    input_bytes, finite = spec.input_bytes, True
    for j in range(n):
        row = rows + input_bytes * j * row_step
        if step == 1 and size % spec.lanes == 0:
            for d in range(0, size, spec.lanes):
                finite = finite and all_lanes_finite(load_input(row + input_bytes * d, spec))
        else:
            for d in range(size):
                finite = finite and np.isfinite(read_input(row + input_bytes * d * step, spec))
    return finite


@device_function
def add_weighted_row(weights, word, query, queries, row, output, size, spec):
    """Output += weight * row for the queries that see a key, whose bits from ``query`` on are set in ``word``.

    ``weights`` are those of ``queries`` queries; the packed row is padded with 0; the output begins at these queries, too.
    """
    if spec.on_tiles:
        for d in range(size):
            x = splat(read(row + spec.number_bytes * d, spec), spec)
            for first in range(0, queries, spec.lanes):
                address = output + spec.row_bytes * d + spec.number_bytes * first
                before = load(address, spec)
                after = add(before, mul(load(weights + spec.number_bytes * first, spec), x))
                store(address, select_bits(word, np.uint64(query + first), after, before))
    else:
        row_bytes = spec.number_bytes * padded(spec, size)
        for i in range(queries):
            if (word >> np.uint64(query + i)) & np.uint64(1):
                weight, target = splat(read(weights + spec.number_bytes * i, spec), spec), output + row_bytes * i
                for offset in range(0, row_bytes, 64):
                    product = mul(weight, load(row + offset, spec))
                    store(target + offset, add(load(target + offset, spec), product))


@device_function
def add_non_finite_keys(rows, strides, weights, mask_bits, query, queries, keys, output, size, finite_rows, spec):
    """Output += weights^T rows for the non-finite rows of an array, at the queries that see them.

    ``weights`` (keys, queries) are those of the queries from ``query`` on; ``output`` begins at this query, too.
    ``finite_rows`` becomes a padded copy of the rows with 0 in place of the non-finite ones.
    """
    number_bytes, row = spec.number_bytes, padded(spec, size)
    widen_rows(rows, strides.n, strides.d, keys, size, finite_rows, row, spec)
    for j in range(keys):
        copy = finite_rows + number_bytes * row * j
        if not all_finite(copy, row, spec):
            word = read_word(mask_bits + 8 * j) if mask_bits else ALL_QUERIES
            add_weighted_row(weights + number_bytes * queries * j, word, query, queries, copy, output, size, spec)
            fill(copy, row, 0.0, spec)


@device_function
def zero_non_finite_rows(source, n, size, target, spec):
    """Copy packed rows, with 0 in place of the non-finite ones."""
    for i in range(n):
        row = spec.number_bytes * i * size
        finite = all_finite(source + row, size, spec)
        for offset in range(row, row + spec.number_bytes * size, 64):
            x = load(source + offset, spec)
            store(target + offset, x if finite else splat(0.0, spec))


@device_function
def add_non_finite_queries(weights, mask_bits, keys, source, n, size, target, target_row, spec):
    """target[j] += weights[j, i] * source[i] for the non-finite packed rows i and the keys j that query i sees."""
    number_bytes = spec.number_bytes
    for i in range(n):
        row = source + number_bytes * i * size
        if not all_finite(row, size, spec):
            for j in range(keys):
                if (read_word(mask_bits + 8 * j) >> np.uint64(i)) & np.uint64(1):
                    weight = read(weights + spec.row_bytes * j + number_bytes * i, spec)
                    for d in range(size):
                        address = target + number_bytes * (j * target_row + d)
                        write(address, read(address, spec) + weight * read(row + number_bytes * d, spec), spec)

"""Rows of arrays and of tiles: filled, multiplied, transposed, widened, rounded; sums of a tile; rows with NaN and inf.

A tile consists of rows of 64 numbers, one for each query. Its sums, the output before the division or dQ, have on vectors a row of
whole vectors for each query: O += P V, with rows of V as vectors. So any few queries can have keys of their own, and rows are written
to the array as they are. On tile registers they are transposed, (size, 64): O^T += V^T P^T, with P as softmax leaves it.
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
from lowtri.kernels.values import Rows, Softmax, Sums

ALL_QUERIES = np.uint64(0xFFFFFFFFFFFFFFFF)  # the mask word of a key that every query sees

round_up = device_function(abi.round_up)
padded = device_function(abi.padded)
product_rows = device_function(abi.product_rows)


@device_function
def element_count(count, spec):
    """How many elements hold this many numbers."""
    return (count + spec.per_element - 1) // spec.per_element


# Rows of an array.


@device_function
def rows_of(array, strides, tokens, size, spec):
    """The rows of an array (B, H, N, size) for these queries or keys."""
    place = tokens.batch * strides.b + tokens.head * strides.h + tokens.first * strides.n
    return Rows(array + spec.input_bytes * place, strides.n, strides.d, tokens.count, size)


@device_function
def packed_rows(address, count, size):
    """Rows that follow one another."""
    return Rows(address, size, 1, count, size)


@device_function
def prefetch_rows(rows, first, last, spec):
    """Prefetch rows of an array, in memory's order."""
    for i in range(first, last):
        for offset in range(0, spec.input_bytes * rows.size, 64):
            prefetch_line(rows.at + spec.input_bytes * i * rows.row + offset)


@device_function
def widen_rows(rows, target, target_row, spec):
    """Rows of an array in the compute dtype, padded with 0 to ``target_row`` numbers each."""
    number_bytes, lanes = spec.number_bytes, spec.lanes
    whole = rows.size - rows.size % lanes if rows.number == 1 else 0
    for i in range(rows.count):
        row, widened = rows.at + spec.input_bytes * i * rows.row, target + number_bytes * i * target_row
        for d in range(0, whole, lanes):
            store(widened + number_bytes * d, load_input(row + spec.input_bytes * d, spec))
        for d in range(whole, rows.size):
            write(widened + number_bytes * d, read_input(row + spec.input_bytes * d * rows.number, spec), spec)
        for d in range(rows.size, target_row):
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
def interleave_input_rows(rows, zeros, target, spec):
    """Rows of a bf16 array as pairs (count / 2, size); ``zeros`` is a row of 0, the neighbour of an odd last row."""
    for j in range(0, rows.count, 2):
        low = rows.at + 2 * j * rows.row
        high = low + 2 * rows.row if j + 1 < rows.count else zeros
        for d in range(0, rows.size, 16):
            store(target + 4 * (j // 2 * rows.size + d), interleave_loaded(low + 2 * d, high + 2 * d, spec))


# Rows of the compute dtype.


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
def fill_columns(tile, size, columns, spec):
    """Set the first ``columns`` of a tile (size, 64), whole vectors, to 0."""
    for j in range(size):
        fill(tile + spec.row_bytes * j, columns, 0.0, spec)


@device_function
def transpose_in(rows, columns, target, spec):
    """Transpose at most 64 rows of elements to (size, 64): queries in lanes. ``columns`` lanes are set; past the last row with it."""
    number_bytes = spec.number_bytes
    lanes = spec.lanes
    target_row = spec.row_bytes
    last_row = rows.count - 1
    if rows.number == 1 and rows.size >= lanes:
        for first in range(0, columns, lanes):
            top = min(first, last_row)
            last = min(last_row - top, lanes - 1)
            for d in range(0, rows.size, lanes):
                column = min(d, rows.size - lanes)  # the last block overlaps the one before
                block = rows.at + number_bytes * (top * rows.row + column)
                place = target + target_row * column + number_bytes * first
                transpose(block, number_bytes * rows.row, last, place, target_row, spec)
    else:
        for d in range(rows.size):
            for i in range(columns):
                x = read(rows.at + number_bytes * (min(i, last_row) * rows.row + d * rows.number), spec)
                write(target + target_row * d + number_bytes * i, x, spec)


@device_function
def transpose_out(source, target, spec):
    """Transpose (size, 64) to at most 64 rows of neighbouring numbers."""
    number_bytes = spec.number_bytes
    lanes = spec.lanes
    source_row = spec.row_bytes
    whole = target.count - target.count % lanes if target.size >= lanes else 0
    for first in range(0, whole, lanes):
        for d in range(0, target.size, lanes):
            column = min(d, target.size - lanes)
            block = target.at + number_bytes * (first * target.row + column)
            place = source + source_row * column + number_bytes * first
            transpose(place, source_row, lanes - 1, block, number_bytes * target.row, spec)
    for i in range(whole, target.count):
        for d in range(target.size):
            x = read(source + source_row * d + number_bytes * i, spec)
            write(target.at + number_bytes * (i * target.row + d), x, spec)


@device_function
def interleave_rows(rows, target, spec):
    """Packed rows as pairs of bf16 (count / 2, size): neighbouring rows interleaved, zero-padded to an even count."""
    size = rows.size
    for j in range(0, rows.count, 2):
        for offset in range(0, 4 * size, 64):
            row = rows.at + 4 * size * j + offset
            high = load(row + 4 * size, spec) if j + 1 < rows.count else splat(0.0, spec)
            store(target + 2 * size * j + offset, interleave(load(row, spec), high, spec))


# The sums of a tile: its output, or dQ.


@device_function
def zero_sums(sums, spec):
    """Set them to 0."""
    if spec.uses_amx:
        fill_columns(sums.at, product_rows(sums.size, spec), round_up(sums.count, 32), spec)
    else:
        fill(sums.at, sums.count * padded(spec, sums.size), 0.0, spec)


@device_function
def softmax_of_vector(softmax, vector, spec):
    """The state of a vector of queries, the one of this number."""
    sums = softmax.output
    if spec.uses_amx:
        place = sums.at + 64 * vector
    else:
        place = sums.at + spec.number_bytes * padded(spec, sums.size) * (spec.lanes * vector)
    return Softmax(softmax.shift + 64 * vector, softmax.total + 64 * vector, Sums(place, sums.count, sums.size))


@device_function
def rescale_sums(sums, factors, spec):
    """Multiply the sums of a vector of queries by one factor each."""
    if spec.uses_amx:
        for d in range(sums.size):
            address = sums.at + spec.row_bytes * d
            store(address, mul(load(address, spec), factors))
    else:
        columns = padded(spec, sums.size)
        for i in range(spec.lanes):
            factor = lane(factors, i)
            if factor != 1:
                multiply_by(sums.at + spec.number_bytes * columns * i, columns, factor, spec)


@device_function
def sums_finite(sums, spec):
    """Whether all of them are finite."""
    if not spec.uses_amx:
        return all_finite(sums.at, sums.count * padded(spec, sums.size), spec)
    for d in range(sums.size):
        if not all_finite(sums.at + spec.row_bytes * d, round_up(sums.count, 16), spec):
            return False
    return True


@device_function
def load_sums(sums, source, source_row, spec):
    """Set them to rows of the compute dtype, ``source_row`` numbers apart."""
    zero_sums(sums, spec)
    if spec.uses_amx:
        transpose_in(Rows(source, source_row, 1, sums.count, sums.size), round_up(sums.count, 16), sums.at, spec)
    else:
        number_bytes, whole = spec.number_bytes, sums.size - sums.size % spec.lanes
        for i in range(sums.count):
            row, target = source + number_bytes * source_row * i, sums.at + number_bytes * padded(spec, sums.size) * i
            for offset in range(0, number_bytes * whole, 64):
                store(target + offset, load(row + offset, spec))
            for d in range(whole, sums.size):
                write(target + number_bytes * d, read(row + number_bytes * d, spec), spec)


@device_function
def store_sums(sums, factor, target, target_row, spec):
    """Copy them, times a factor, to rows of the compute dtype, ``target_row`` numbers apart."""
    number_bytes, size = spec.number_bytes, sums.size
    if spec.uses_amx:
        for d in range(size):
            multiply_by(sums.at + spec.row_bytes * d, round_up(sums.count, 16), factor, spec)
        transpose_out(sums.at, Rows(target, target_row, 1, sums.count, size), spec)
    else:
        columns, whole = padded(spec, size), size - size % spec.lanes
        for i in range(sums.count):
            source, row = sums.at + number_bytes * columns * i, target + number_bytes * target_row * i
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
def input_rows_finite(rows, spec):
    """Whether all numbers of these rows of an array are finite."""
    input_bytes, finite = spec.input_bytes, True
    for j in range(rows.count):
        row = rows.at + input_bytes * j * rows.row
        if rows.number == 1 and rows.size % spec.lanes == 0:
            for d in range(0, rows.size, spec.lanes):
                finite = finite and all_lanes_finite(load_input(row + input_bytes * d, spec))
        else:
            for d in range(rows.size):
                finite = finite and np.isfinite(read_input(row + input_bytes * d * rows.number, spec))
    return finite


@device_function
def add_non_finite_keys(rows, weights, keys, first_query, sums, finite_rows, spec):
    """Sums += weights^T rows for the non-finite rows of keys or values, at the queries that see them.

    ``weights`` (keys, sums.count) and the sums are those of the queries from ``first_query`` on. ``finite_rows`` becomes a padded copy
    of the rows with 0 in place of the non-finite ones.
    """
    number_bytes, row = spec.number_bytes, padded(spec, rows.size)
    widen_rows(rows, finite_rows, row, spec)
    for j in range(rows.count):
        copy = finite_rows + number_bytes * row * j
        if not all_finite(copy, row, spec):
            word = read_word(keys.mask_words + 8 * j) if keys.mask_words else ALL_QUERIES
            seeing = word >> np.uint64(first_query)
            add_weighted_row(weights + number_bytes * sums.count * j, seeing, copy, sums, spec)
            fill(copy, row, 0.0, spec)


@device_function
def add_weighted_row(weights, seeing, row, sums, spec):
    """Sums += weight * row for the queries whose bits are set in the word ``seeing``; the packed row is padded with 0."""
    if spec.uses_amx:
        for d in range(sums.size):
            x = splat(read(row + spec.number_bytes * d, spec), spec)
            for first in range(0, sums.count, spec.lanes):
                address = sums.at + spec.row_bytes * d + spec.number_bytes * first
                before = load(address, spec)
                after = add(before, mul(load(weights + spec.number_bytes * first, spec), x))
                store(address, select_bits(seeing, np.uint64(first), after, before))
    else:
        row_bytes = spec.number_bytes * padded(spec, sums.size)
        for i in range(sums.count):
            if (seeing >> np.uint64(i)) & np.uint64(1):
                weight, target = splat(read(weights + spec.number_bytes * i, spec), spec), sums.at + row_bytes * i
                for offset in range(0, row_bytes, 64):
                    product = mul(weight, load(row + offset, spec))
                    store(target + offset, add(load(target + offset, spec), product))


@device_function
def zero_non_finite_rows(rows, target, spec):
    """Copy packed rows, with 0 in place of the non-finite ones."""
    for i in range(rows.count):
        row = spec.number_bytes * i * rows.size
        finite = all_finite(rows.at + row, rows.size, spec)
        for offset in range(row, row + spec.number_bytes * rows.size, 64):
            x = load(rows.at + offset, spec)
            store(target + offset, x if finite else splat(0.0, spec))


@device_function
def add_non_finite_queries(weights, keys, rows, target, target_row, spec):
    """target[j] += weights[j, i] * rows[i] for the non-finite packed rows i of queries and the keys j that query i sees."""
    number_bytes = spec.number_bytes
    for i in range(rows.count):
        row = rows.at + number_bytes * i * rows.size
        if not all_finite(row, rows.size, spec):
            for j in range(keys.count):
                if (read_word(keys.mask_words + 8 * j) >> np.uint64(i)) & np.uint64(1):
                    weight = read(weights + spec.row_bytes * j + number_bytes * i, spec)
                    for d in range(rows.size):
                        address = target + number_bytes * (j * target_row + d)
                        write(address, read(address, spec) + weight * read(row + number_bytes * d, spec), spec)

"""The sums of a tile of 64 queries, which are the output before its division, or dQ; and the path for NaN and inf.

On vectors it has a row for each query, of whole vectors: O += P V, with rows of V as vectors. So any few queries can have keys of their
own, and rows are written to the array as they are. On tile registers it is transposed, (size, 64): O^T += V^T P^T, with P as softmax
leaves it.

A NaN or inf in a row of Q, K, V or dO changes the results of the pairs that see it, and no others. A product would spread it to hidden
pairs, whose weight is 0, since 0 * NaN is NaN. So non-finite rows are added pair by pair where they are visible, and the product reads
a copy in which these rows are 0.
"""

from __future__ import annotations

import numpy as np

from lowtri.kernels.device_function import by_spec, device_function
from lowtri.kernels.plan_walk import ALL_QUERIES
from lowtri.kernels.rows import (
    fill,
    fill_columns,
    multiply_by,
    multiply_columns,
    padded,
    product_rows,
    round_up,
    transpose_out,
    widen_rows,
)
from lowtri.kernels.simd import (
    add,
    all_lanes_finite,
    lane,
    load,
    load_input,
    mul,
    read,
    read_input,
    read_word,
    select_bits,
    splat,
    store,
    write,
)

__all__ = [
    *("add_non_finite_keys", "add_non_finite_queries", "all_finite", "fill_output", "input_rows_finite"),
    *("output_finite", "rescale_output", "store_scaled", "zero_non_finite_rows"),
]


@device_function
def all_finite(address, count, spec):
    """Whether ``count`` numbers (whole vectors) are all finite."""
    for offset in range(0, spec.number_bytes * count, 64):
        if not all_lanes_finite(load(address + offset, spec)):
            return False
    return True


@by_spec
def fill_output(spec):
    """Set the sums of n queries to one value."""

    def rows(output, n, size, value, spec):
        fill(output, n * padded(spec, size), value, spec)

    def columns(output, n, size, value, spec):
        fill_columns(output, product_rows(size, spec), round_up(n, spec.query_group), value, spec)

    return columns if spec.on_tiles else rows


@by_spec
def rescale_output(spec):
    """Multiply the sums of a vector of queries by one factor each; ``vector`` is its number among those of the queries."""

    def rows(output, vector, size, factors, spec):
        columns = padded(spec, size)
        for i in range(spec.lanes):
            factor = lane(factors, i)
            if factor != 1:
                multiply_by(output + spec.number_bytes * columns * (spec.lanes * vector + i), columns, factor, spec)

    def columns(output, vector, size, factors, spec):
        for d in range(size):
            address = output + spec.row_bytes * d + 64 * vector
            store(address, mul(load(address, spec), factors))

    return columns if spec.on_tiles else rows


@by_spec
def output_finite(spec):
    """Whether the sums of n queries are all finite."""

    def rows(output, n, size, spec):
        return all_finite(output, n * padded(spec, size), spec)

    def columns(output, n, size, spec):
        for d in range(size):
            if not all_finite(output + spec.row_bytes * d, round_up(n, 16), spec):
                return False
        return True

    return columns if spec.on_tiles else rows


@by_spec
def add_weighted_row(spec):
    """Output += weight * row for the queries that see a key, whose bits from ``query`` on are set in ``word``.

    ``weights`` are those of ``queries`` queries; the packed row is padded with 0; the output begins at these queries, too.
    """

    def rows(weights, word, query, queries, row, output, size, spec):
        row_bytes = spec.number_bytes * padded(spec, size)
        for i in range(queries):
            if (word >> np.uint64(query + i)) & np.uint64(1):
                weight, target = splat(read(weights + spec.number_bytes * i, spec), spec), output + row_bytes * i
                for offset in range(0, row_bytes, 64):
                    product = mul(weight, load(row + offset, spec))
                    store(target + offset, add(load(target + offset, spec), product))

    def columns(weights, word, query, queries, row, output, size, spec):
        for d in range(size):
            x = splat(read(row + spec.number_bytes * d, spec), spec)
            for first in range(0, queries, spec.lanes):
                address = output + spec.row_bytes * d + spec.number_bytes * first
                before = load(address, spec)
                after = add(before, mul(load(weights + spec.number_bytes * first, spec), x))
                store(address, select_bits(word, np.uint64(query + first), after, before))

    return columns if spec.on_tiles else rows


@by_spec
def store_scaled(spec):
    """Copy the sums of n queries, times a factor, to rows of the compute dtype, ``row_step`` numbers apart."""

    def rows(output, n, size, factor, target, row_step, spec):
        columns, number_bytes, whole = padded(spec, size), spec.number_bytes, size - size % spec.lanes
        for i in range(n):
            source, row = output + number_bytes * columns * i, target + number_bytes * row_step * i
            for offset in range(0, number_bytes * whole, 64):
                store(row + offset, mul(load(source + offset, spec), splat(factor, spec)))
            for d in range(whole, size):
                write(row + number_bytes * d, read(source + number_bytes * d, spec) * factor, spec)

    def columns(output, n, size, factor, target, row_step, spec):
        multiply_columns(output, size, round_up(n, 16), factor, spec)
        transpose_out(output, n, size, target, row_step, spec)

    return columns if spec.on_tiles else rows


# The path for NaN and inf.


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
def add_non_finite_keys(
    rows, row_step, step, weights, mask_bits, query, queries, keys, output, size, finite_rows, spec
):
    """Output += weights^T rows for the non-finite rows of an array, at the queries that see them.

    ``weights`` (keys, queries) are those of the queries from ``query`` on; ``output`` begins at this query, too.
    ``finite_rows`` becomes a padded copy of the rows with 0 in place of the non-finite ones.
    """
    number_bytes, row = spec.number_bytes, padded(spec, size)
    widen_rows(rows, row_step, step, keys, size, finite_rows, row, spec)
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

"""The sums of a tile of 64 queries: the output before its division, or dQ.

On vectors it has a row for each query, of whole vectors: O += P V, with rows of V as vectors. So any few queries can have keys of their
own, and rows are written to the array as they are. On tile registers it is transposed, (size, 64): O^T += V^T P^T, with P as softmax
leaves it.
"""

from __future__ import annotations

import numpy as np

from lowtri.kernels import scratch
from lowtri.kernels.device_function import by_spec, device_function
from lowtri.kernels.rows import fill, fill_columns, multiply_by, multiply_columns, round_up, transpose_out
from lowtri.kernels.simd import add, all_lanes_finite, lane, load, mul, read, select_bits, splat, store, write
from lowtri.kernels.tile_operands import product_rows

__all__ = ["add_weighted_row", "all_finite", "fill_output", "output_finite", "padded", "rescale_output", "store_scaled"]

padded = device_function(scratch.padded)


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

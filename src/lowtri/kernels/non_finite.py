"""The non-finite path: a NaN or inf in a row of Q, K, V or dO changes the results of the pairs that see it, and no others.

A product would spread it to hidden pairs, whose weight is 0, since 0 * NaN is NaN. So non-finite rows are added pair by pair where they
are visible, and the product reads a copy in which these rows are 0.
"""

from __future__ import annotations

import numpy as np

from lowtri.kernels.device_function import device_function
from lowtri.kernels.plan_walk import ALL_QUERIES
from lowtri.kernels.simd import (
    add,
    all_lanes_finite,
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
    "add_non_finite_keys",
    "add_non_finite_queries",
    "all_finite",
    "columns_finite",
    "input_rows_finite",
    "zero_non_finite_rows",
]


@device_function
def all_finite(address, count, spec):
    """Whether ``count`` numbers (whole vectors) are all finite."""
    for offset in range(0, spec.number_bytes * count, 64):
        if not all_lanes_finite(load(address + offset, spec)):
            return False
    return True


@device_function
def columns_finite(tile, size, columns, spec):
    """Whether the first ``columns`` of a tile (size, 64), whole vectors, are all finite."""
    for j in range(size):
        if not all_finite(tile + spec.row_bytes * j, columns, spec):
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
def add_non_finite_keys(
    rows, row_step, step, weights, mask_bits, query, queries, keys, output, size, finite_rows, spec
):
    """Output (size, 64) += rows^T weights for the non-finite rows of an array, at the queries that see them.

    ``weights`` (keys, queries) are those of the queries from ``query`` on; ``output`` begins at this query, too.
    ``finite_rows`` becomes a packed copy of the rows (keys, size) with 0 in place of the non-finite ones.
    """
    number_bytes = spec.number_bytes
    for j in range(keys):
        row, finite = rows + spec.input_bytes * j * row_step, True
        for d in range(size):
            finite = finite and np.isfinite(read_input(row + spec.input_bytes * d * step, spec))
        word = read_word(mask_bits + 8 * j) if mask_bits else ALL_QUERIES
        for d in range(size):
            x = read_input(row + spec.input_bytes * d * step, spec)
            write(finite_rows + number_bytes * (j * size + d), x if finite else 0.0, spec)
            if not finite:
                for lane in range(0, queries, spec.lanes):
                    address = output + spec.row_bytes * d + number_bytes * lane
                    before = load(address, spec)
                    weight = load(weights + number_bytes * (queries * j + lane), spec)
                    after = add(before, mul(weight, splat(x, spec)))
                    store(address, select_bits(word, np.uint64(query + lane), after, before))


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

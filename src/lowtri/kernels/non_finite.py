"""The non-finite path: a NaN or inf in a row of Q, K, V or dO changes the results of the pairs that see it, and no others.

A product would spread it to hidden pairs, whose weight is 0, since 0 * NaN is NaN. So non-finite rows are added pair by pair where they
are visible, and the product reads a copy in which these rows are 0.
"""

from __future__ import annotations

import numpy as np

from lowtri.kernels.device_function import device_function
from lowtri.kernels.plan_walk import ALL_QUERIES
from lowtri.kernels.rows import fill, widen_rows
from lowtri.kernels.simd import (
    all_lanes_finite,
    load,
    load_input,
    read,
    read_input,
    read_word,
    splat,
    store,
    write,
)
from lowtri.kernels.tile_output import add_weighted_row, all_finite, padded

__all__ = [
    "add_non_finite_keys",
    "add_non_finite_queries",
    "input_rows_finite",
    "zero_non_finite_rows",
]


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

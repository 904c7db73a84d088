"""The non-finite path: a NaN or inf in a row of Q, K, V or dO reaches those who see it, and leaves no trace anywhere else.

A weight of 0 does not hide it from a product, since 0 * NaN is NaN. So rows that are not finite are added pair by pair where they are
visible, and the product gets a copy with 0 in their place.
"""

from __future__ import annotations

import numpy as np

from lowtri.kernels.device_function import device_function
from lowtri.kernels.plan_walk import ALL
from lowtri.kernels.simd import (
    add,
    load,
    load_input,
    mul,
    only,
    read,
    read_input,
    read_word,
    splat,
    store,
    where_finite,
    write,
)
from lowtri.kernels.spec import QUERIES

__all__ = ["add_key_rows", "add_query_rows", "all_finite", "clean_rows", "input_rows_finite"]


@device_function
def all_finite(address, count, spec):
    """Whether ``count`` numbers (whole vectors) are all finite."""
    for at in range(0, spec.number_bytes * count, 64):
        if not where_finite(load(address + at, spec)):
            return False
    return True


@device_function
def input_rows_finite(rows, row_step, step, n, size, spec):
    """Whether all numbers of n rows of an array are finite."""
    wide, finite = spec.input_bytes, True
    for j in range(n):
        row = rows + wide * j * row_step
        if step == 1 and size % spec.lanes == 0:
            for d in range(0, size, spec.lanes):
                finite = finite and where_finite(load_input(row + wide * d, spec))
        else:
            for d in range(size):
                finite = finite and np.isfinite(read_input(row + wide * d * step, spec))
    return finite


@device_function
def add_key_rows(rows, row_step, step, weights, words, keys, output, size, clean, spec):
    """Output (size, 64) += rows^T weights for those rows of an array that are not finite, at the queries that see them.

    ``clean`` becomes a packed copy of the rows (keys, size) with 0 in place of these.
    """
    wide = spec.number_bytes
    for j in range(keys):
        row, finite = rows + spec.input_bytes * j * row_step, True
        for d in range(size):
            finite = finite and np.isfinite(read_input(row + spec.input_bytes * d * step, spec))
        word = read_word(words + 8 * j) if words else ALL
        for d in range(size):
            x = read_input(row + spec.input_bytes * d * step, spec)
            write(clean + wide * (j * size + d), x if finite else 0.0, spec)
            if not finite:
                for lane in range(0, QUERIES, spec.lanes):
                    place = output + spec.row_bytes * d + wide * lane
                    so_far = load(place, spec)
                    more = add(so_far, mul(load(weights + spec.row_bytes * j + wide * lane, spec), splat(x, spec)))
                    store(place, only(word, np.uint64(lane), more, so_far))


@device_function
def clean_rows(source, n, size, target, spec):
    """A copy of packed rows with 0 in those that are not finite."""
    for i in range(n):
        row = spec.number_bytes * i * size
        finite = all_finite(source + row, size, spec)
        for at in range(row, row + spec.number_bytes * size, 64):
            x = load(source + at, spec)
            store(target + at, x if finite else splat(0.0, spec))


@device_function
def add_query_rows(weights, words, keys, source, n, size, target, spec):
    """target[j] += weights[j, i] * source[i] for those packed rows i that are not finite, from the keys that query i sees."""
    wide = spec.number_bytes
    for i in range(n):
        row = source + wide * i * size
        if not all_finite(row, size, spec):
            for j in range(keys):
                if (read_word(words + 8 * j) >> np.uint64(i)) & np.uint64(1):
                    weight = read(weights + spec.row_bytes * j + wide * i, spec)
                    for d in range(size):
                        to = target + wide * (j * size + d)
                        write(to, read(to, spec) + weight * read(row + wide * d, spec), spec)

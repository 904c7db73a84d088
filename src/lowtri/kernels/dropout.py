"""Which weights of a tile are dropped: the draws of :mod:`lowtri.ops.dropout`, 16 queries at a time.

A tile has two words of 32 bits for each of its 64 queries, and a word for each key comes with the call. The result is a word of 64 bits
for each key, as mask bits are: the queries that keep it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from lowtri.kernels.device import device_function, operation
from lowtri.kernels.operations import I16, I32, I64, broadcast, constant, i64, integers, pointer
from lowtri.kernels.simd import (
    as_number,
    load,
    mul,
    read_int32,
    read_int64,
    read_word,
    select_bits,
    splat,
    store,
    write_int64,
)
from lowtri.kernels.spec import QUERIES
from lowtri.ops.dropout import DRAW_SHIFTS, FIRST, LAST_SHIFT, MIXING, SECOND, STEP

_HALF = 4 * QUERIES  # bytes from the low words of the queries to the high ones


def _counted(b: Any, x: Any, count: Any) -> Any:
    """The word after so many steps from x, mixed."""
    x = b.add(x, b.mul(b.add(count, i64(1)), i64(STEP)))
    for shift, multiplier in MIXING:
        x = b.mul(b.xor(x, b.lshr(x, i64(shift))), i64(multiplier))
    return b.xor(x, b.lshr(x, i64(LAST_SHIFT)))


head_word = operation(types.int64)(lambda b, seed, row, head: _counted(b, _counted(b, seed, row), head))


@operation()
def write_query_word(b, target, of_head, position):
    """The two words of the query at this position."""
    word = _counted(b, of_head, position)
    for address, half in ((target, word), (b.add(target, i64(_HALF)), b.lshr(word, i64(32)))):
        b.store(b.trunc(half, I32), pointer(b, address, I32), align=4)


@operation(types.uint64)
def queries_that_keep(b, words, key, last_dropped):
    """The bits of 16 queries, whose words begin at this address, that keep the key of this word."""
    kind = ir.VectorType(I32, 16)
    low = b.load(pointer(b, words, kind), align=4)
    high = b.load(pointer(b, b.add(words, i64(_HALF)), kind), align=4)
    first, second = (constant(kind, shift) for shift in DRAW_SHIFTS)
    x = b.mul(b.xor(low, broadcast(b, b.trunc(key, I32), 16)), constant(kind, FIRST))
    x = b.mul(b.xor(b.xor(x, b.lshr(x, first)), high), constant(kind, SECOND))
    x = b.xor(x, b.lshr(x, second))
    is_kept = b.icmp_unsigned(">", x, broadcast(b, b.trunc(last_dropped, I32), 16))
    return b.zext(b.bitcast(is_kept, I16), I64)


@device_function
def write_query_words(call, own, b, h, r, n):
    """The words of a tile of n queries."""
    dropout = call.dropout
    of_head = head_word(call.seed, b, h)
    positions = dropout.q_positions + 8 * (b * dropout.q_positions_b + r * QUERIES)
    for i in range(n):
        write_query_word(own.query_words + 4 * i, of_head, read_int64(positions + 8 * i))


@device_function
def draw_tile(call, own, b, key0, keys, first, last):
    """For each key of a tile, a word with the bits of those of the queries ``first`` .. ``last`` that keep it; in ``own.kept``."""
    dropout = call.dropout
    words = dropout.key_words + 4 * (b * dropout.key_words_b + key0)
    for j in range(keys):
        key, word = read_int32(words + 4 * j), np.uint64(0)
        for query in range(first, last, 16):
            word |= queries_that_keep(own.query_words + 4 * query, key, dropout.last_dropped) << np.uint64(query)
        write_int64(own.kept + 8 * j, np.int64(word))


@device_function
def drop_weights(weights, kept, keys, spec):
    """Set the weights (keys, 64) that are dropped to 0."""
    zero = splat(0.0, spec)
    for j in range(keys):
        word = read_word(kept + 8 * j)
        for lane in range(0, QUERIES, spec.lanes):
            address = weights + spec.row_bytes * j + spec.number_bytes * lane
            store(address, select_bits(word, np.uint64(lane), load(address, spec), zero))


@operation("vector")
def _kept_of_pairs(b, low_word, high_word, shift, pairs):
    """16 pairs of weights with 0 in place of those that are dropped."""
    kind, flags = integers(pairs.type), ir.VectorType(ir.IntType(1), 16)
    bits = constant(kind, 0)
    for word, half in ((low_word, 0x0000FFFF), (high_word, 0xFFFF0000)):
        is_kept = b.bitcast(b.trunc(b.lshr(word, shift), I16), flags)
        bits = b.or_(bits, b.select(is_kept, constant(kind, half), constant(kind, 0)))
    return b.bitcast(b.and_(b.bitcast(pairs, kind), bits), pairs.type)


@device_function
def drop_pairs(pairs, kept, query, first, last, spec):
    """Set the weights of a unit on tiles that are dropped to 0: pairs of the keys ``first`` .. ``last``, the first one an even one."""
    for j in range(first, last, 2):
        low = read_word(kept + 8 * j)
        high = read_word(kept + 8 * j + 8) if j + 1 < last else low
        for lane in range(0, spec.unit_queries, 16):
            address = pairs + spec.unit_row * (j // 2) + 4 * lane
            store(address, _kept_of_pairs(low, high, np.uint64(query + lane), load(address, spec)))


@device_function
def drop_and_scale(numbers, kept, scale, keys, spec):
    """Multiply numbers (keys, 64) by the scale where the weight is kept, else by 0: NaN stays NaN, as in the plain formula."""
    zero, factor = splat(0.0, spec), splat(as_number(scale, spec), spec)
    for j in range(keys):
        word = read_word(kept + 8 * j)
        for lane in range(0, QUERIES, spec.lanes):
            address = numbers + spec.row_bytes * j + spec.number_bytes * lane
            store(address, mul(load(address, spec), select_bits(word, np.uint64(lane), factor, zero)))

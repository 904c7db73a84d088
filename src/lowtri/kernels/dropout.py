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
def write_query_word(b, target, head, position):
    """The two words of the query at this position."""
    word = _counted(b, head, position)
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
def write_query_words(call, own, queries):
    """The words of a tile of queries."""
    dropout = call.dropout
    head = head_word(call.seed, queries.batch, queries.head)
    positions = dropout.q_positions + 8 * (queries.batch * dropout.q_positions_b + queries.first)
    for i in range(queries.count):
        write_query_word(own.query_words + 4 * i, head, read_int64(positions + 8 * i))


@device_function
def draw_tile(call, own, keys, first, stop):
    """For each key of a tile, a word with the bits of those of the queries ``first`` .. ``stop`` that keep it; in ``own.kept``."""
    dropout = call.dropout
    words = dropout.key_words + 4 * (keys.batch * dropout.key_words_b + keys.first)
    for j in range(keys.count):
        key, word = read_int32(words + 4 * j), np.uint64(0)
        for query in range(first, stop, 16):
            word |= queries_that_keep(own.query_words + 4 * query, key, dropout.last_dropped) << np.uint64(query)
        write_int64(own.kept + 8 * j, np.int64(word))


@device_function
def drop_weights(own, keys):
    """Set the weights of a tile (keys, 64) that are dropped to 0."""
    spec = own.spec
    zero = splat(0.0, spec)
    for j in range(keys.count):
        word = read_word(own.kept + 8 * j)
        for lane in range(0, QUERIES, spec.lanes):
            address = own.scores + spec.row_bytes * j + spec.number_bytes * lane
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
def drop_pairs(own, first_query, keys):
    """Set the weights of a step on AMX that are dropped to 0: pairs of these keys, the first one an even one."""
    spec = own.spec
    for j in range(keys.first, keys.stop, 2):
        low = read_word(own.kept + 8 * j)
        high = read_word(own.kept + 8 * j + 8) if j + 1 < keys.stop else low
        for lane in range(0, spec.queries_per_step, 16):
            address = own.weights + spec.step_row_bytes * (j // 2) + 4 * lane
            store(address, _kept_of_pairs(low, high, np.uint64(first_query + lane), load(address, spec)))


@device_function
def drop_and_scale(call, own, numbers, keys):
    """Multiply numbers (keys, 64) by the scale where the weight is kept, else by 0: NaN stays NaN, as in the plain formula."""
    spec = call.spec
    zero, factor = splat(0.0, spec), splat(as_number(call.dropout.scale, spec), spec)
    for j in range(keys.count):
        word = read_word(own.kept + 8 * j)
        for lane in range(0, QUERIES, spec.lanes):
            address = numbers + spec.row_bytes * j + spec.number_bytes * lane
            store(address, mul(load(address, spec), select_bits(word, np.uint64(lane), factor, zero)))

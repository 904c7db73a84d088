"""Dot products of keys with few queries.

Each row of the cache is read once. A word is a number or a pair of bf16. Where a register holds 64 bytes, a vector holds four words of
each of four queries; it is multiplied by four words of a key, which are repeated in all four quarters of a vector, so that only four
partial sums remain to be added across lanes. With smaller registers, keys and queries are multiplied as they lie.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from lowtri.compat.numba_private import alloca_once, for_range
from lowtri.kernels.cache_rows import BLOCK, LANES, input_words, is_even_first, prefetch
from lowtri.kernels.device_function import by_spec
from lowtri.kernels.lanes import shuffled
from lowtri.kernels.product import multiply_add
from lowtri.kernels.simd import F32, I64, clamped, input_vector, pointer, read, read_input, write

__all__ = ["dot_products", "lay_out_query"]


@by_spec
def read_query_word(spec):
    """Read a word of a query's row in its array."""

    def numbers(row, word, spec):
        return read_input(row + spec.input_bytes * word, spec)

    def pairs(row, word, spec):
        return read(row + 4 * word, spec)

    return pairs if spec.rows == "pairs" else numbers


@by_spec
def lay_out_query(spec):
    """Copy row ``index``, of ``words`` words, to the layout that :func:`dot_products` reads."""

    def interleaved(row, index, words, target, spec):  # four words of each of a block's rows, side by side
        for word in range(words):
            offset = index // BLOCK * BLOCK * words + (word // 4 * BLOCK + index % BLOCK) * 4 + word % 4
            write(target + 4 * offset, read_query_word(row, word, spec), spec)

    def packed(row, index, words, target, spec):
        for word in range(words):
            write(target + 4 * (index * words + word), read_query_word(row, word, spec), spec)

    def even_first(row, index, words, target, spec):
        for word in range(words):
            lane = word % LANES
            offset = index * words + word - lane + lane % 2 * (LANES // 2) + lane // 2
            write(target + 4 * offset, read_query_word(row, word, spec), spec)

    return interleaved if spec.isa.whole_vectors else even_first if is_even_first(spec) else packed


def _quarter_sums(builder: Any, vectors: list[Any]) -> Any:
    """The sum of each quarter of four vectors: quarter q of the result holds the four sums of their quarters q."""
    quarters = range(0, LANES, 4)

    def halved(one: Any, two: Any) -> Any:
        low = shuffled(builder, one, two, [n for q in quarters for n in (q, LANES + q, q + 1, LANES + q + 1)])
        high = shuffled(builder, one, two, [n for q in quarters for n in (q + 2, LANES + q + 2, q + 3, LANES + q + 3)])
        return builder.fadd(low, high)

    one, two = halved(*vectors[:2]), halved(*vectors[2:])
    low = shuffled(builder, one, two, [n for q in quarters for n in (q, q + 1, LANES + q, LANES + q + 1)])
    high = shuffled(builder, one, two, [n for q in quarters for n in (q + 2, q + 3, LANES + q + 2, LANES + q + 3)])
    return builder.fadd(low, high)


def _repeated_words(builder: Any, address: Any, spec: Any) -> Any:
    """Four words of a key, in each of the four quarters."""
    if spec.rows == "pairs":
        words = builder.load(pointer(builder, address, ir.VectorType(F32, 4)), align=2)
    else:
        words = input_vector(builder, address, 4, spec)
    return shuffled(builder, words, words, [n % 4 for n in range(LANES)])


def _emit_interleaved(builder: Any, args: Any, spec: Any) -> None:
    """:func:`dot_products` where a register holds a vector: of four queries at once."""
    keys, key_step, last_key, queries, last_query, chunks, target, target_step = args
    kind, multiply, word_bytes, at_once = spec.vector.ir, multiply_add(spec), spec.input_bytes * spec.per_word, 8
    sums = []
    for first in range(0, LANES, at_once):
        rows = []
        for row in range(first, first + at_once):
            rows.append(builder.add(keys, builder.mul(clamped(builder, row, last_key), key_step)))
        totals = [alloca_once(builder, kind) for _ in rows]
        for total in totals:
            builder.store(ir.Constant(kind, None), total)
        with for_range(builder, chunks) as loop:
            column = builder.mul(loop.index, ir.Constant(I64, word_bytes * LANES))
            query_column = builder.mul(loop.index, ir.Constant(I64, 4 * LANES * BLOCK))
            for row in rows:
                ahead = builder.mul(ir.Constant(I64, spec.isa.prefetch_rows), key_step)
                prefetch(builder, builder.add(builder.add(row, column), ahead))
            for quarter in range(4):
                address = builder.add(queries, builder.add(query_column, ir.Constant(I64, 64 * quarter)))
                query = builder.load(pointer(builder, address, kind), align=4)
                for row, total in zip(rows, totals, strict=True):
                    address = builder.add(builder.add(row, column), ir.Constant(I64, 4 * word_bytes * quarter))
                    key = _repeated_words(builder, address, spec)
                    builder.store(multiply(builder, key, query, builder.load(total)), total)
        loaded = [builder.load(total) for total in totals]
        sums += [_quarter_sums(builder, loaded[n : n + 4]) for n in range(0, at_once, 4)]
    for j in range(BLOCK):  # the quarters j of the four sums, side by side
        lanes = [*range(4 * j, 4 * j + 4), *range(LANES + 4 * j, LANES + 4 * j + 4)]
        low, high = (shuffled(builder, *halves, lanes) for halves in (sums[:2], sums[2:]))
        address = builder.add(target, builder.mul(clamped(builder, j, last_query), target_step))
        builder.store(shuffled(builder, low, high, list(range(LANES))), pointer(builder, address, kind), align=4)


def _emit_few_registers(builder: Any, args: Any, count: int, spec: Any) -> None:
    """:func:`dot_products` of ``count`` queries in half vectors: of four queries with two keys at once, or of one with four."""
    keys, key_step, last_key, queries, last_query, chunks, target, target_step = args
    multiply, at_once = multiply_add(spec), 2 if count > 1 else 4
    chunk_bytes = LANES * spec.input_bytes * spec.per_word
    row_bytes = builder.mul(chunks, ir.Constant(I64, chunk_bytes))
    half, halves = ir.VectorType(F32, LANES // 2), (list(range(LANES // 2)), list(range(LANES // 2, LANES)))
    totals = [[alloca_once(builder, half) for _ in range(count)] for _ in range(at_once)]
    sums = alloca_once(builder, half, size=ir.Constant(I64, LANES * count))
    query_bytes = builder.mul(chunks, ir.Constant(I64, 4 * LANES))
    with for_range(builder, ir.Constant(I64, LANES // at_once)) as groups:
        first = builder.mul(groups.index, ir.Constant(I64, at_once))
        rows = []
        for r in range(at_once):
            key = builder.add(first, ir.Constant(I64, r))
            key = builder.select(builder.icmp_signed("<", key, last_key), key, last_key)
            rows.append(builder.add(keys, builder.mul(key, key_step)))
        for total in (total for row in totals for total in row):
            builder.store(ir.Constant(half, None), total)
        ahead = builder.mul(ir.Constant(I64, spec.isa.prefetch_rows), key_step)
        with for_range(builder, chunks) as loop:
            column = builder.mul(loop.index, ir.Constant(I64, chunk_bytes))
            for line in range(at_once * chunk_bytes // 64):
                prefetch(builder, builder.add(_line_in_order(builder, rows, row_bytes, loop.index, line, spec), ahead))
            words = [input_words(builder, builder.add(row, column), spec) for row in rows]
            for n, lanes in enumerate(halves):
                parts = [shuffled(builder, x, x, lanes) for x in words]
                for j in range(count):
                    address = builder.add(queries, builder.mul(query_bytes, ir.Constant(I64, j)))
                    address = builder.add(address, builder.mul(loop.index, ir.Constant(I64, 4 * LANES)))
                    address = builder.add(address, ir.Constant(I64, 2 * LANES * n))
                    query = builder.load(pointer(builder, address, half), align=4)
                    for part, row in zip(parts, totals, strict=True):
                        builder.store(multiply(builder, part, query, builder.load(row[j])), row[j])
        for r, row in enumerate(totals):
            for j, total in enumerate(row):
                index = builder.mul(builder.add(first, ir.Constant(I64, r)), ir.Constant(I64, count))
                place = builder.gep(sums, [builder.add(index, ir.Constant(I64, j))])
                builder.store(builder.load(total), place)
    for j in range(count):
        rows = [builder.load(builder.gep(sums, [ir.Constant(I64, count * key + j)])) for key in range(LANES)]
        two = [_sums_of_eight(builder, rows[first : first + 8]) for first in (0, 8)]
        address = builder.add(target, builder.mul(clamped(builder, j, last_query), target_step))
        builder.store(shuffled(builder, *two, list(range(LANES))), pointer(builder, address, spec.vector.ir), align=4)


def _line_in_order(builder: Any, rows: list[Any], row_bytes: Any, chunk: Any, line: int, spec: Any) -> Any:
    """The address of the ``line``-th cache line that a chunk prefetches, if the lines of all rows are taken one after the other."""
    lines = len(rows) * LANES * spec.input_bytes * spec.per_word // 64
    offset = builder.mul(
        builder.add(builder.mul(chunk, ir.Constant(I64, lines)), ir.Constant(I64, line)), ir.Constant(I64, 64)
    )
    start, address = ir.Constant(I64, 0), builder.add(rows[0], offset)
    for row in rows[1:]:
        start = builder.add(start, row_bytes)
        later = builder.add(row, builder.sub(offset, start))
        address = builder.select(builder.icmp_signed(">=", offset, start), later, address)
    return address


def _sums_of_eight(builder: Any, rows: list[Any]) -> Any:
    """A vector of the sums of eight vectors of eight."""

    def added(one: Any, two: Any, lanes: list[int], step: int) -> Any:
        return builder.fadd(
            shuffled(builder, one, two, lanes), shuffled(builder, one, two, [lane + step for lane in lanes])
        )

    for _ in range(2):  # neighbours, within each half
        lanes = [0, 2, 8, 10, 4, 6, 12, 14]
        rows = [added(one, two, lanes, 1) for one, two in zip(rows[::2], rows[1::2], strict=True)]
    return added(*rows, [0, 1, 2, 3, 8, 9, 10, 11], 4)


def _dot_products(count: int) -> Any:
    @intrinsic
    def dot_products(typing, keys, key_step, last_key, queries, last_query, chunks, target, target_step, spec):
        def emit(context, builder, signature, args):
            if spec.value.isa.whole_vectors:
                _emit_interleaved(builder, args[:-1], spec.value)
            else:
                _emit_few_registers(builder, args[:-1], count, spec.value)
            return context.get_dummy_value()

        return types.void(*[types.intp] * 8, spec), emit

    return dot_products


_dot_block, _dot_single = _dot_products(BLOCK), _dot_products(1)


@by_spec
def dot_products(spec):
    """Dot products of 16 key rows with a block of queries from :func:`lay_out_query`: a row of 16 for each query.

    Keys past ``last_key`` repeat it, and so do queries past ``last_query``. Rows are ``chunks`` of 16 words; steps in bytes.
    """

    def block(keys, key_step, last_key, queries, last_query, chunks, target, target_step, spec):
        _dot_block(keys, key_step, last_key, queries, last_query, chunks, target, target_step, spec)

    def by_count(keys, key_step, last_key, queries, last_query, chunks, target, target_step, spec):
        if last_query:
            _dot_block(keys, key_step, last_key, queries, last_query, chunks, target, target_step, spec)
        else:
            _dot_single(keys, key_step, last_key, queries, last_query, chunks, target, target_step, spec)

    return block if spec.isa.whole_vectors else by_count

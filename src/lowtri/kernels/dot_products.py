"""Dot products of keys with few queries.

Each row of the cache is read once for a block of queries. Keys and queries are multiplied as they lie, word by word (a word is a number
or a pair of bf16), so that each lane holds a part of a sum; the lanes of 16 keys are then added, two vectors in one.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from lowtri.compat.numba_private import alloca_once, for_range
from lowtri.kernels.cache_rows import LANES, input_words, is_even_first, prefetch
from lowtri.kernels.device_function import by_spec, device_function
from lowtri.kernels.lanes import shuffled
from lowtri.kernels.product import multiply_add
from lowtri.kernels.simd import F32, I64, clamped, pointer, read, read_input, write

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

    def packed(row, index, words, target, spec):
        for word in range(words):
            write(target + 4 * (index * words + word), read_query_word(row, word, spec), spec)

    def even_first(row, index, words, target, spec):
        for word in range(words):
            lane = word % LANES
            offset = index * words + word - lane + lane % 2 * (LANES // 2) + lane // 2
            write(target + 4 * offset, read_query_word(row, word, spec), spec)

    return even_first if is_even_first(spec) else packed


def _emit_dot_products(builder: Any, args: Any, queries_at_once: int, tile: Any, spec: Any) -> None:
    """The register tile of :func:`dot_products`: accumulators over the head dimension, for some keys and queries at once."""
    keys, key_step, last_key, queries, last_query, chunks, target, target_step = args
    multiply, chunk_bytes = multiply_add(spec), LANES * spec.input_bytes * spec.per_word
    keys_at_once, lanes = tile.keys, LANES if spec.isa.whole_vectors else LANES // 2
    kind, parts = ir.VectorType(F32, lanes), range(0, LANES, lanes)
    row_bytes, query_bytes = (builder.mul(chunks, ir.Constant(I64, size)) for size in (chunk_bytes, 4 * LANES))
    query_rows = []
    for j in range(queries_at_once):
        query_rows.append(builder.add(queries, builder.mul(clamped(builder, j, last_query), query_bytes)))
    totals = [[alloca_once(builder, kind) for _ in range(queries_at_once)] for _ in range(keys_at_once)]
    groups = LANES // keys_at_once
    sums = alloca_once(builder, kind, size=ir.Constant(I64, groups * queries_at_once))
    with for_range(builder, ir.Constant(I64, groups)) as group:
        first = builder.mul(group.index, ir.Constant(I64, keys_at_once))
        rows = []
        for r in range(keys_at_once):
            key = builder.add(first, ir.Constant(I64, r))
            key = builder.select(builder.icmp_signed("<", key, last_key), key, last_key)
            rows.append(builder.add(keys, builder.mul(key, key_step)))
        for total in (total for row in totals for total in row):
            builder.store(ir.Constant(kind, None), total)
        ahead = builder.mul(ir.Constant(I64, tile.rows_ahead), key_step)
        with for_range(builder, chunks) as chunk:
            column = builder.mul(chunk.index, ir.Constant(I64, chunk_bytes))
            for line in _lines(builder, rows, row_bytes, column, chunk.index, spec):
                prefetch(builder, builder.add(line, ahead))
            words = [input_words(builder, builder.add(row, column), spec) for row in rows]
            for part in parts:
                key_parts = [shuffled(builder, x, x, list(range(part, part + lanes))) for x in words]
                for j, query_row in enumerate(query_rows):
                    address = builder.add(query_row, builder.mul(chunk.index, ir.Constant(I64, 4 * LANES)))
                    address = builder.add(address, ir.Constant(I64, 4 * part))
                    query = builder.load(pointer(builder, address, kind), align=4)
                    for key_part, row in zip(key_parts, totals, strict=True):
                        builder.store(multiply(builder, key_part, query, builder.load(row[j])), row[j])
        for j in range(queries_at_once):
            vectors, distance = [builder.load(row[j]) for row in totals], 1
            while len(vectors) > 1:
                vectors, distance = _sums_of_pairs(builder, vectors, distance), 2 * distance
            place = builder.add(builder.mul(group.index, ir.Constant(I64, queries_at_once)), ir.Constant(I64, j))
            builder.store(vectors[0], builder.gep(sums, [place]))
    for j in range(queries_at_once):
        vectors = [builder.load(builder.gep(sums, [ir.Constant(I64, queries_at_once * n + j)])) for n in range(groups)]
        distance = keys_at_once
        while distance < lanes:
            vectors, distance = _sums_of_pairs(builder, vectors, distance), 2 * distance
        address = builder.add(target, builder.mul(clamped(builder, j, last_query), target_step))
        for part, vector in zip(parts, vectors, strict=True):
            place = builder.add(address, ir.Constant(I64, 4 * part))
            builder.store(vector, pointer(builder, place, kind), align=4)


def _sums_of_pairs(builder: Any, vectors: list[Any], distance: int) -> list[Any]:
    """Sums of lanes ``distance`` apart, of two vectors in one: lanes whose index has the bit ``distance`` hold those of the second.

    After the distances 1, 2, .. of all lanes, lane n holds the whole sum of vector n.
    """
    lanes, sums = range(vectors[0].type.count), []
    source = [len(lanes) if lane & distance else 0 for lane in lanes]
    for one, two in zip(vectors[::2], vectors[1::2], strict=True):
        here = shuffled(builder, one, two, [lane + source[lane] for lane in lanes])
        there = shuffled(builder, one, two, [(lane ^ distance) + source[lane] for lane in lanes])
        sums.append(builder.fadd(here, there))
    return sums


def _lines(builder: Any, rows: list[Any], row_bytes: Any, column: Any, chunk: Any, spec: Any) -> list[Any]:
    """The cache lines of some rows that belong to a chunk of the head dimension: those at its column, or the next in memory's order.

    Memory's order takes some ten instructions a line, which a CPU hides that needs two multiply-adds for a vector.
    """
    if spec.isa.whole_vectors:
        return [builder.add(row, column) for row in rows]
    lines, addresses = len(rows) * LANES * spec.input_bytes * spec.per_word // 64, []
    for line in range(lines):
        offset = builder.mul(
            builder.add(builder.mul(chunk, ir.Constant(I64, lines)), ir.Constant(I64, line)), ir.Constant(I64, 64)
        )
        start, address = ir.Constant(I64, 0), builder.add(rows[0], offset)
        for row in rows[1:]:
            start = builder.add(start, row_bytes)
            later = builder.add(row, builder.sub(offset, start))
            address = builder.select(builder.icmp_signed(">=", offset, start), later, address)
        addresses.append(address)
    return addresses


def _dot_products(queries_at_once: int) -> Any:
    @intrinsic
    def dot_products(typing, keys, key_step, last_key, queries, last_query, chunks, target, target_step, spec):
        tile = spec.value.isa.cache_tiles[queries_at_once]

        def emit(context, builder, signature, args):
            _emit_dot_products(builder, args[:-1], queries_at_once, tile, spec.value)
            return context.get_dummy_value()

        return types.void(*[types.intp] * 8, spec), emit

    return dot_products


_dot_eight, _dot_four, _dot_single = map(_dot_products, (8, 4, 1))


@device_function
def up_to_four(keys, key_step, last_key, queries, last_query, chunks, target, target_step, spec):
    """One block of :func:`dot_products`, of ``last_query`` + 1 queries."""
    if last_query:
        _dot_four(keys, key_step, last_key, queries, last_query, chunks, target, target_step, spec)
    else:
        _dot_single(keys, key_step, last_key, queries, last_query, chunks, target, target_step, spec)


@by_spec
def dot_products(spec):
    """Dot products of 16 key rows with ``rows`` queries from :func:`lay_out_query`: a row of 16 for each query.

    Keys past ``last_key`` repeat it. Rows are ``chunks`` of 16 words; steps in bytes.
    """

    def by_four(keys, key_step, last_key, queries, rows, chunks, target, target_step, spec):
        for row in range(0, rows, 4):
            block, scores, last = queries + 64 * row * chunks, target + row * target_step, min(4, rows - row) - 1
            up_to_four(keys, key_step, last_key, block, last, chunks, scores, target_step, spec)

    def by_eight(keys, key_step, last_key, queries, rows, chunks, target, target_step, spec):
        for row in range(0, rows, 8):
            block, scores, last = queries + 64 * row * chunks, target + row * target_step, min(8, rows - row) - 1
            if last > 3:
                _dot_eight(keys, key_step, last_key, block, last, chunks, scores, target_step, spec)
            else:
                up_to_four(keys, key_step, last_key, block, last, chunks, scores, target_step, spec)

    return by_eight if 8 in spec.isa.cache_tiles else by_four

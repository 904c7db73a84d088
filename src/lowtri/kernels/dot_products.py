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
from lowtri.kernels.cache_rows import BLOCK, LANES, input_words, is_even_first, load_and_drop
from lowtri.kernels.device_function import by_spec, device_function
from lowtri.kernels.lanes import reduced_in_pairs, shuffled
from lowtri.kernels.product import multiply_add
from lowtri.kernels.simd import F32, I64, clamped, pointer, prefetch, read, read_input, write

__all__ = ["dot_products", "lay_out_query"]

LOADED_AHEAD = 8  # keys


@by_spec
def read_query_word(spec):
    """Read a word of a query's row in its array."""

    def numbers(row, word, spec):
        return read_input(row + spec.input_bytes * word, spec)

    def pairs(row, word, spec):
        return read(row + 4 * word, spec)

    return pairs if spec.operand == "pairs" else numbers


@by_spec
def lane_of(spec):
    """The lane of a query's word among 16: that of the key's word that it is multiplied by."""

    def as_it_lies(word, spec):
        return word

    def even_first(word, spec):
        return word % 2 * (LANES // 2) + word // 2

    return even_first if is_even_first(spec) else as_it_lies


@device_function
def lay_out_query(row, index, rows, words, target, spec):
    """Copy query ``index`` of ``rows``, of ``words`` words, to the layout that :func:`dot_products` reads.

    Queries lie in blocks of four, 16 words of each after one another. Copies of the last one fill the last block, unless it is alone.
    """
    first = index - index % BLOCK
    block = 1 if rows - first == 1 else BLOCK
    for place in range(index, first + block if index == rows - 1 else index + 1):
        for word in range(words):
            lane = word % LANES
            offset = first * words + (word - lane) * block + (place - first) * LANES + lane_of(lane, spec)
            write(target + 4 * offset, read_query_word(row, word, spec), spec)


def _emit_dot_products(builder: Any, args: Any, queries_at_once: int, tile: Any, spec: Any) -> None:
    """The register tile of :func:`dot_products`: accumulators over the head dimension, for some keys and queries at once."""
    keys, key_step, last_key, last_row, queries, last_query, chunks, target, target_step = args
    multiply, chunk_bytes = multiply_add(spec), LANES * spec.input_bytes * spec.per_word
    keys_at_once, lanes = tile.keys, LANES if spec.isa.whole_vectors else LANES // 2
    kind, parts = ir.VectorType(F32, lanes), range(0, LANES, lanes)
    row_bytes = builder.mul(chunks, ir.Constant(I64, chunk_bytes))
    block_bytes = builder.mul(chunks, ir.Constant(I64, 4 * LANES * BLOCK))
    blocks = [queries, builder.add(queries, block_bytes)]
    query_words = 4 * LANES * min(queries_at_once, BLOCK)
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
        later = [builder.add(first, ir.Constant(I64, LOADED_AHEAD)), last_row]
        fetch = _prefetch if tile.keys_ahead else _load_ahead
        fetch = fetch(builder, keys, key_step, *later, rows, row_bytes, queries, tile, spec)
        with for_range(builder, chunks) as chunk:
            column = builder.mul(chunk.index, ir.Constant(I64, chunk_bytes))
            fetch(column, chunk.index)
            words_of = [builder.add(block, builder.mul(chunk.index, ir.Constant(I64, query_words))) for block in blocks]
            words = [input_words(builder, builder.add(row, column), spec) for row in rows]
            for part in parts:
                key_parts = [shuffled(builder, x, x, list(range(part, part + lanes))) for x in words]
                for j in range(queries_at_once):
                    place = ir.Constant(I64, 4 * (LANES * (j % BLOCK) + part))
                    address = builder.add(words_of[j // BLOCK], place)
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
    """See :func:`lowtri.kernels.lanes.reduced_in_pairs`."""
    return reduced_in_pairs(builder, vectors, distance, lambda b, x, y: b.fadd(x, y))


def _prefetch(
    builder: Any, keys: Any, key_step: Any, later: Any, last_row: Any, rows: list[Any], row_bytes: Any, *rest: Any
) -> Any:
    """Prefetch as many lines as a step over the head dimension reads: those of its columns, or the next in memory's order.

    Memory's order takes some ten instructions a line, which a CPU hides that needs two multiply-adds for a vector.
    """
    *_, tile, spec = rest
    ahead, lines = builder.mul(ir.Constant(I64, tile.keys_ahead), key_step), _lines(rows, spec)

    def fetch(column: Any, chunk: Any) -> None:
        if spec.isa.whole_vectors:
            for row in rows:
                prefetch(builder, builder.add(builder.add(row, column), ahead))
            return
        for line in range(lines):
            offset = builder.add(builder.mul(chunk, ir.Constant(I64, lines)), ir.Constant(I64, line))
            offset = builder.mul(offset, ir.Constant(I64, 64))
            start, address = ir.Constant(I64, 0), builder.add(rows[0], offset)
            for row in rows[1:]:
                start = builder.add(start, row_bytes)
                address = builder.select(
                    builder.icmp_signed(">=", offset, start), builder.add(row, builder.sub(offset, start)), address
                )
            prefetch(builder, builder.add(address, ahead))

    return fetch


def _lines(rows: list[Any], spec: Any) -> int:
    """Cache lines that a step over the head dimension reads."""
    return len(rows) * LANES * spec.input_bytes * spec.per_word // 64


def _load_ahead(
    builder: Any, keys: Any, key_step: Any, later: Any, last_row: Any, rows: list[Any], row_bytes: Any, *rest: Any
) -> Any:
    """Load as many lines of later rows, in memory's order, as a step over the head dimension reads; nothing uses what is loaded.

    The CPU's own prefetcher follows these loads, not those of several rows at once, whose lines are then in the first cache. Rows past
    the last one are not read, nor lines past the end of a row, since loads fault where prefetches do not.
    """
    scratch, _, spec = rest
    count, lines, zero = len(rows), _lines(rows, spec), ir.Constant(I64, 0)
    if count == 1:  # it reads in this order itself
        return lambda column, chunk: None
    exists = builder.icmp_signed("<=", builder.add(later, ir.Constant(I64, count - 1)), last_row)
    packed = builder.icmp_signed("==", key_step, row_bytes)
    whole_steps = builder.icmp_signed("==", builder.and_(row_bytes, ir.Constant(I64, 64 * lines - 1)), zero)
    loads = builder.and_(exists, builder.or_(packed, whole_steps))
    first = builder.select(loads, builder.add(keys, builder.mul(later, key_step)), scratch)
    line = builder.select(loads, ir.Constant(I64, 64), zero)
    gap = builder.select(loads, builder.sub(key_step, row_bytes), zero)
    place, end = alloca_once(builder, I64), alloca_once(builder, I64)
    builder.store(first, place)
    builder.store(builder.add(first, row_bytes), end)

    def fetch(column: Any, chunk: Any) -> None:
        address, row_end = builder.load(place), builder.load(end)
        for n in range(lines):
            load_and_drop(builder, builder.add(address, builder.mul(line, ir.Constant(I64, n))))
        address = builder.add(address, builder.mul(line, ir.Constant(I64, lines)))
        over = builder.sext(builder.icmp_signed(">=", address, row_end), I64)
        builder.store(builder.add(address, builder.and_(over, gap)), place)
        builder.store(builder.add(row_end, builder.and_(over, key_step)), end)

    return fetch


def _dot_products(queries_at_once: int) -> Any:
    @intrinsic
    def dot_products(
        typing, keys, key_step, last_key, last_row, queries, last_query, chunks, target, target_step, spec
    ):
        tile = spec.value.cache_tile(queries_at_once)

        def emit(context, builder, signature, args):
            _emit_dot_products(builder, args[:-1], queries_at_once, tile, spec.value)
            return context.get_dummy_value()

        return types.void(*[types.intp] * 9, spec), emit

    return dot_products


_dot_eight, _dot_four, _dot_single = map(_dot_products, (8, 4, 1))


@device_function
def by_four(keys, key_step, last_key, last_row, queries, rows, chunks, target, target_step, spec):
    """:func:`dot_products` in blocks of four queries."""
    for row in range(0, rows, 4):
        block, scores, last = queries + 64 * row * chunks, target + row * target_step, min(4, rows - row) - 1
        readable = last_key if row else last_row  # the first block has read ahead for the others
        if last:
            _dot_four(keys, key_step, last_key, readable, block, last, chunks, scores, target_step, spec)
        else:
            _dot_single(keys, key_step, last_key, readable, block, last, chunks, scores, target_step, spec)


@by_spec
def dot_products(spec):
    """Dot products of 16 key rows with ``rows`` queries from :func:`lay_out_query`: a row of 16 for each query.

    Keys past ``last_key`` repeat it; rows up to ``last_row`` may be read ahead. Rows are ``chunks`` of 16 words; steps in bytes.
    """

    def by_eight(keys, key_step, last_key, last_row, queries, rows, chunks, target, target_step, spec):
        for row in range(0, rows, 8):
            block, scores, count = queries + 64 * row * chunks, target + row * target_step, min(8, rows - row)
            if count > 5:
                _dot_eight(keys, key_step, last_key, last_row, block, count - 1, chunks, scores, target_step, spec)
            else:
                by_four(keys, key_step, last_key, last_row, block, count, chunks, scores, target_step, spec)

    return by_eight if spec.cache_tile(8) else by_four.py_func

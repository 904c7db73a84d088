"""Few queries against the rows of a cache: dot products with the keys, and weighted sums of the values.

Each row of the cache is read once for a block of queries, in the order of memory, and prefetched. Keys and queries are multiplied as
they lie, word by word (a word is a number or a pair of bf16), so that each lane holds a part of a sum; the lanes of 16 keys are then
added, two vectors in one. Values are multiplied 16 to 128 columns of some keys at a time.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from lowtri.compat.numba_private import alloca_once, for_range
from lowtri.kernels.device_function import by_spec, device_function
from lowtri.kernels.operations.baseline import constant
from lowtri.kernels.product import multiply_add
from lowtri.kernels.rows import prefetch_rows
from lowtri.kernels.simd import (
    F32,
    I32,
    I64,
    broadcast,
    clamped,
    input_vector,
    interleaved_rows,
    pointer,
    prefetch,
    read,
    read_input,
    reduced_in_pairs,
    shuffled,
    write,
)

__all__ = ["dot_products", "lay_out_query", "pv"]

BLOCK = 4  # queries that share each row that is read; a shorter block repeats its last query
LANES = 16


class _Volatile(ir.Type):
    """The type of a load that LLVM must keep, although nothing uses what it loads; llvmlite only prints it."""

    def __init__(self, kind: Any) -> None:
        self.kind = kind

    def _to_string(self) -> str:
        return f"volatile {self.kind}"


def load_and_drop(builder: Any, address: Any) -> None:
    """Load the 64 bytes at an address into the first cache, and use them for nothing. The address must be valid."""
    kind = ir.VectorType(F32, LANES)
    builder.load(pointer(builder, address, kind), typ=_Volatile(kind), align=2)


def is_even_first(spec: Any) -> bool:
    """Whether bf16 is read two numbers at a time: a shift and a mask make two vectors, of the even and of the odd numbers."""
    return spec.dtype == "bfloat16" and spec.operand == "widened" and not spec.isa.whole_vectors


EVEN_FIRST = [lane % 2 * (LANES // 2) + lane // 2 for lane in range(LANES)]


def input_words(builder: Any, address: Any, spec: Any) -> Any:
    """16 words of a row of the cache; of bf16 the even ones first."""
    if spec.operand == "pairs":
        return builder.load(pointer(builder, address, spec.vector.ir), align=2)
    if not is_even_first(spec):
        return input_vector(builder, address, LANES, spec)
    kind = ir.VectorType(I32, LANES // 2)
    words = builder.load(pointer(builder, address, kind), align=2)
    even, odd = builder.shl(words, constant(kind, 16)), builder.and_(words, constant(kind, 0xFFFF0000))
    half = ir.VectorType(F32, LANES // 2)
    return shuffled(builder, builder.bitcast(even, half), builder.bitcast(odd, half), list(range(LANES)))


# Dot products of keys.

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
    """See :func:`lowtri.kernels.simd.reduced_in_pairs`."""
    return reduced_in_pairs(builder, vectors, distance, lambda b, x, y: b.fadd(x, y))


def _prefetch(
    builder: Any, keys: Any, key_step: Any, later: Any, last_row: Any, rows: list[Any], row_bytes: Any, *rest: Any
) -> Any:
    """Prefetch as many lines as a step over the head dimension reads.

    Where a step reads half a line of each row, every second row is fetched line by line, and the row after it from the middle of the
    steps on. One comparison serves all rows of a step.
    """
    *_, tile, spec = rest
    ahead, gap = builder.mul(ir.Constant(I64, tile.keys_ahead), key_step), builder.sub(key_step, row_bytes)
    leading = rows if spec.isa.whole_vectors else rows[:: len(rows) // _lines(rows, spec)]

    def fetch(column: Any, chunk: Any) -> None:
        if not spec.isa.whole_vectors and len(leading) < len(rows):
            column = builder.shl(chunk, ir.Constant(I64, 6))
            in_next = builder.icmp_signed(">=", column, row_bytes)
            column = builder.add(column, builder.select(in_next, gap, ir.Constant(I64, 0)))
        for row in leading:
            prefetch(builder, builder.add(builder.add(row, column), ahead))

    return fetch


def _lines(rows: list[Any], spec: Any) -> int:
    """Cache lines that a step over the head dimension reads."""
    return len(rows) * LANES * spec.input_bytes * spec.per_word // 64


def _load_ahead(
    builder: Any, keys: Any, key_step: Any, later: Any, last_row: Any, rows: list[Any], row_bytes: Any, *rest: Any
) -> Any:
    """Load as many lines of later rows, in memory's order, as a step over the head dimension reads; nothing uses what is loaded.

    The CPU's own prefetcher follows these loads, not those of several rows at once, whose lines are then in the first cache. Rows past
    the last one are not read, nor what lies between rows, since loads fault where prefetches do not. Rows are whole lines of float32.
    """
    scratch, _, spec = rest
    count, lines, zero = len(rows), _lines(rows, spec), ir.Constant(I64, 0)
    if count == 1:  # it reads in this order itself
        return lambda column, chunk: None
    loads = builder.icmp_signed("<=", builder.add(later, ir.Constant(I64, count - 1)), last_row)
    first = builder.select(loads, builder.add(keys, builder.mul(later, key_step)), scratch)
    line = builder.select(loads, ir.Constant(I64, 64), zero)
    gap = builder.select(loads, builder.sub(key_step, row_bytes), zero)
    place, end = alloca_once(builder, I64), alloca_once(builder, I64)
    builder.store(first, place)
    builder.store(builder.add(first, row_bytes), end)

    def fetch(column: Any, chunk: Any) -> None:
        address, row_end = builder.load(place), builder.load(end)
        for _ in range(lines):
            load_and_drop(builder, address)
            address = builder.add(address, line)
            over = builder.sext(builder.icmp_signed(">=", address, row_end), I64)
            address = builder.add(address, builder.and_(over, gap))
            row_end = builder.add(row_end, builder.and_(over, key_step))
        builder.store(address, place)
        builder.store(row_end, end)

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


# Weighted sums of values.

PORTION = 2**13  # bytes of values that stay in L1 while all query heads of a group use them


def _emit_pv(builder: Any, args: Any, rows: int, vectors: int, prefetches: bool, spec: Any) -> None:
    """The register tile of :func:`pv`: ``rows`` x ``vectors`` accumulators over all keys."""
    weights, weight_step, last, values, value_step, keys, zeros, output, output_step, ahead, ahead_step = args
    pairs, kind, multiply, one = spec.operand == "pairs", spec.vector.ir, multiply_add(spec), ir.Constant(I64, 1)
    tile = [[alloca_once(builder, kind) for _ in range(vectors)] for _ in range(rows)]
    weight_rows, output_rows = [], []
    for r in range(rows):
        row = clamped(builder, r, last)
        weight_rows.append(builder.add(weights, builder.mul(row, weight_step)))
        output_rows.append(builder.add(output, builder.mul(row, output_step)))

    def plus(address: Any, size: int) -> Any:
        return builder.add(address, ir.Constant(I64, size))

    for total in (total for row in tile for total in row):
        builder.store(ir.Constant(kind, None), total)
    steps = builder.lshr(builder.add(keys, one), one) if pairs else keys
    with for_range(builder, steps) as loop:
        if pairs:
            low = builder.add(values, builder.mul(builder.shl(loop.index, one), value_step))
            second = builder.icmp_signed("<", builder.add(builder.shl(loop.index, one), one), keys)
            value_rows = [low, builder.select(second, builder.add(low, value_step), zeros)]
            columns = interleaved_rows(builder, *value_rows, vectors // 2, kind)
        else:
            value_rows = [builder.add(values, builder.mul(loop.index, value_step))]
            size = LANES * spec.input_bytes
            columns = [input_words(builder, plus(value_rows[0], size * j), spec) for j in range(vectors)]
        row_bytes = LANES * spec.input_bytes * vectors
        first_ahead = builder.mul(loop.index, ir.Constant(I64, len(value_rows)))
        for row in range(len(value_rows) if prefetches else 0):
            address = builder.add(ahead, builder.mul(plus(first_ahead, row), ahead_step))
            for line in range(0, row_bytes, 64):
                prefetch(builder, plus(address, line))
        for r in range(rows):
            address = builder.add(weight_rows[r], builder.shl(loop.index, ir.Constant(I64, 2)))
            weight = broadcast(builder, builder.load(pointer(builder, address, F32), align=4), LANES)
            for total, column in zip(tile[r], columns, strict=True):
                builder.store(multiply(builder, weight, column, builder.load(total)), total)
    for r in range(rows):  # before any store, since rows may repeat
        for j in range(vectors):
            sum_before = builder.load(pointer(builder, plus(output_rows[r], 64 * j), kind), align=4)
            total = builder.load(tile[r][j])
            total = shuffled(builder, total, total, EVEN_FIRST) if is_even_first(spec) else total
            builder.store(builder.fadd(sum_before, total), tile[r][j])
    for r in range(rows):
        for j in range(vectors):
            builder.store(builder.load(tile[r][j]), pointer(builder, plus(output_rows[r], 64 * j), kind), align=4)


class _Tile:
    """A register tile of :func:`pv`, of blocks of so many queries: rows of weights, and vectors of a value's row.

    ``vectors``: at most; two at least where pairs are interleaved.
    """

    def __init__(self, queries: int, vectors: int = 8) -> None:
        self.queries, self.vectors = queries, vectors

    def shape(self, spec: Any) -> tuple[int, int, int]:
        """Rows, vectors, and how far ahead it prefetches."""
        tile = spec.cache_tile(self.queries) or spec.cache_tile(BLOCK)
        return tile.rows, max(min(tile.vectors, self.vectors), spec.per_word), tile.values_ahead


def _pv(tile: _Tile) -> Any:
    """The device function that moves a tile over the columns, as far as it fits; it returns the first column that is left."""

    @intrinsic
    def pv_tile(typing, weights, weight_step, last, values, value_step, keys, zeros, output, output_step, ahead, spec):
        def emit(context, builder, signature, args):
            first, step = (builder.extract_value(args[-2], n) for n in (0, 1))
            rows, vectors, rows_ahead = tile.shape(spec.value)
            _emit_pv(builder, (*args[:-2], first, step), rows, vectors, rows_ahead > 0, spec.value)
            return context.get_dummy_value()

        return types.void(*[types.intp] * 9, types.UniTuple(types.intp, 2), spec), emit

    @intrinsic
    def sizes(typing, spec):
        kind = types.UniTuple(types.int64, 3)
        rows, vectors, rows_ahead = tile.shape(spec.value)
        numbers = rows, LANES * vectors, rows_ahead
        return kind(spec), lambda c, b, s, a: c.make_tuple(b, kind, [ir.Constant(I64, n) for n in numbers])

    @device_function
    def tiles(weights, weight_step, count, values, value_step, keys, zeros, output, columns, first, spec):
        rows, width, rows_ahead = sizes(spec)
        last_column = columns - (columns - first) % width
        portion = max(PORTION // (spec.input_bytes * columns) & -LANES, LANES)
        for key in range(0, keys if last_column > first else 0, portion):
            n, portion_weights = min(portion, keys - key), weights + 4 // spec.per_word * key
            portion_values = values + value_step * key
            if spec.in_order and first == 0 and value_step != spec.input_bytes * columns:
                later = 2 * portion
                prefetch_rows(portion_values, value_step // spec.input_bytes, later, later + n, columns, spec)
            for column in range(first, last_column, width):
                source = portion_values + spec.input_bytes * column
                ahead = lines_ahead(portion_values, value_step, n, column, width, columns, rows_ahead, spec)
                for row in range(0, count, rows):
                    last, block = min(rows, count - row) - 1, portion_weights + row * weight_step
                    target = output + 4 * (row * columns + column)
                    pv_tile(block, weight_step, last, source, value_step, n, zeros, target, 4 * columns, ahead, spec)
        return last_column

    return tiles


# The first of each may be too wide for the last columns.
_single_tiles, _single_rest = _pv(_Tile(1)), _pv(_Tile(1, vectors=4))
_block_tiles, _wide_tiles, _narrow_tiles = _pv(_Tile(BLOCK)), _pv(_Tile(2 * BLOCK)), _pv(_Tile(2 * BLOCK, vectors=1))


@by_spec
def lines_ahead(spec):
    """What a tile prefetches with each key: the first address, and the step to the next."""

    def same_columns(values, value_step, keys, column, tile, columns, rows_ahead, spec):
        return values + spec.input_bytes * column + rows_ahead * value_step, value_step

    def in_order(values, value_step, keys, column, tile, columns, rows_ahead, spec):
        # Tiles are narrower than rows. The CPU's own prefetcher follows the order of memory, so the next keys are prefetched in it.
        if value_step == spec.input_bytes * columns:
            return values + keys * (value_step + spec.input_bytes * column), spec.input_bytes * tile
        return values + spec.input_bytes * column + rows_ahead * value_step, value_step

    return same_columns if spec.isa.whole_vectors else in_order


@device_function
def pv(weights, weight_step, rows, values, value_step, keys, zeros, output, columns, spec):
    """Output (rows, columns) += weights x values, rows packed. Steps in bytes; in pairs, weights are of neighbouring keys.

    ``zeros``: a row of 0, the neighbour of an odd last key. Columns are a multiple of 16, in pairs of 32.
    """
    done = 0
    if rows == 1:
        done = _single_tiles(weights, weight_step, rows, values, value_step, keys, zeros, output, columns, 0, spec)
        done = _single_rest(weights, weight_step, rows, values, value_step, keys, zeros, output, columns, done, spec)
    elif rows <= BLOCK:
        done = _block_tiles(weights, weight_step, rows, values, value_step, keys, zeros, output, columns, 0, spec)
    if rows > 1:
        done = _wide_tiles(weights, weight_step, rows, values, value_step, keys, zeros, output, columns, done, spec)
    _narrow_tiles(weights, weight_step, rows, values, value_step, keys, zeros, output, columns, done, spec)

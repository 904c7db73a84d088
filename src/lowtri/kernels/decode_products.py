"""The two products of few queries with a cache, row by row of the cache as it lies in memory.

Scores are dot products along the head dimension, 16 keys at a time: keys and queries are multiplied as they lie, element by element (an
element is a number or a pair of bf16), so that each lane holds a part of a sum; the lanes of 16 keys are then added, two vectors in
one. The output is a weighted sum of value rows, 16 to 128 columns of some keys at a time.
"""

from __future__ import annotations

from typing import NamedTuple

from llvmlite import ir

from lowtri.compat.numba_private import alloca_once, for_range
from lowtri.kernels.device import constants_of_spec, device_function, operation
from lowtri.kernels.operations import F32, I32, I64, broadcast, constant, i64, parts_of, pointer, shuffled
from lowtri.kernels.product import multiply_add
from lowtri.kernels.rows import element_count, prefetch_rows, round_up
from lowtri.kernels.simd import (
    clamped,
    input_vector,
    interleaved_rows,
    prefetch,
    read,
    read_input,
    sums_of_pairs,
    write,
)
from lowtri.kernels.values import Address, Packed, Rows

BLOCK = 4  # queries that share each row that is read; a shorter block repeats its last query
LANES = 16
LOADED_AHEAD = 8  # keys
L1_VALUE_BYTES = 2**13  # of values that stay in L1 while all query heads of a group use them
EVEN_FIRST = [lane % 2 * (LANES // 2) + lane // 2 for lane in range(LANES)]

_LINE = ir.VectorType(F32, LANES)


class KeyRows(NamedTuple):
    """Key rows of the cache."""

    at: Address
    step: int  # bytes from one row to the next
    last: int  # rows past it repeat it
    last_readable: int  # rows up to it may be read ahead


class QueryBlock(NamedTuple):
    """Queries from :func:`lay_out_query`."""

    at: Address
    last: int


class ValueRows(NamedTuple):
    """Value rows of the cache."""

    at: Address
    step: int  # bytes from one row to the next
    count: int
    zeros: Address  # of bf16 pairs, a row of 0: the neighbour of an odd last row


class _Volatile(ir.VectorType):
    """The type of a load that LLVM must keep, although nothing uses what it loads; llvmlite only prints it."""

    def _to_string(self):
        return f"volatile {super()._to_string()}"


def input_elements(builder, address, spec):
    """16 elements of a row of the cache; of bf16 the even ones first."""
    if spec.packs_bf16:
        return builder.load(pointer(builder, address, spec.vector.ir), align=2)
    if not spec.loads_even_then_odd:
        return input_vector(builder, address, LANES, spec)
    kind, half = ir.VectorType(I32, LANES // 2), ir.VectorType(F32, LANES // 2)
    pairs = builder.load(pointer(builder, address, kind), align=2)
    even, odd = builder.shl(pairs, constant(kind, 16)), builder.and_(pairs, constant(kind, 0xFFFF0000))
    return shuffled(builder, builder.bitcast(even, half), builder.bitcast(odd, half), list(range(LANES)))


# Dot products of keys.


@device_function
def lay_out_query(row, index, rows, target, spec):
    """Copy query ``index`` of ``rows`` to the layout that :func:`dot_products` reads; ``row`` has the query alone.

    Queries lie in blocks of four, 16 elements of each after one another, in the order of the key's elements that they are multiplied
    by. Copies of the last one fill the last block, unless it is alone.
    """
    elements, first = element_count(row.size, spec), index - index % BLOCK
    block = 1 if rows - first == 1 else BLOCK
    for place in range(index, first + block if index == rows - 1 else index + 1):
        for element in range(elements):
            lane = element % LANES
            offset = first * elements + (element - lane) * block + (place - first) * LANES
            if spec.loads_even_then_odd:
                lane = lane % 2 * (LANES // 2) + lane // 2
            if spec.packs_bf16:
                write(target + 4 * (offset + lane), read(row.at + 4 * element, spec), spec)
            else:
                write(target + 4 * (offset + lane), read_input(row.at + spec.input_bytes * element, spec), spec)


@device_function
def dot_products(keys, queries, rows, chunks, scores, spec):
    """Dot products of 16 key rows with ``rows`` queries: a row of 16 scores for each query, ``scores.row`` bytes apart.

    Rows are ``chunks`` of 16 elements.
    """
    row = 0
    # The first block of four reads ahead for the others.
    period = 8 if spec.has_decode_blocks_of_eight else rows
    while row < rows:
        left, target = rows - row, Packed(scores.at + row * scores.row, scores.row)
        size, block = min(4, left), queries + 64 * row * chunks
        block_keys = KeyRows(keys.at, keys.step, keys.last, keys.last if row % period else keys.last_readable)
        if spec.has_decode_blocks_of_eight and row % 8 == 0 and left > 5:
            size = min(8, left)
            _dot_eight(block_keys, QueryBlock(block, size - 1), chunks, target, spec)
        elif left > 1:
            _dot_four(block_keys, QueryBlock(block, size - 1), chunks, target, spec)
        else:
            _dot_single(block_keys, QueryBlock(block, 0), chunks, target, spec)
        row += round_up(size, 4)


def _dot_products(queries_at_once):
    @operation()
    def dot_products(builder, keys, queries, chunks, scores, spec):
        """The register block of :func:`dot_products`: accumulators over the head dimension, for some keys and queries at once."""
        shape = spec.decode_shape(queries_at_once)
        multiply = multiply_add(spec)
        chunk_bytes = LANES * spec.element_bytes
        keys = KeyRows(*parts_of(builder, keys))
        queries = QueryBlock(*parts_of(builder, queries))
        scores = Packed(*parts_of(builder, scores))
        lanes = LANES if spec.isa.whole_vectors else LANES // 2
        kind, parts = ir.VectorType(F32, lanes), range(0, LANES, lanes)
        row_bytes = builder.mul(chunks, i64(chunk_bytes))
        block_bytes = builder.mul(chunks, i64(4 * LANES * BLOCK))
        blocks = [queries.at, builder.add(queries.at, block_bytes)]
        query_bytes = 4 * LANES * min(queries_at_once, BLOCK)
        totals = [[alloca_once(builder, kind) for _ in range(queries_at_once)] for _ in range(shape.keys)]
        groups = LANES // shape.keys
        sums = alloca_once(builder, kind, size=i64(groups * queries_at_once))
        with for_range(builder, i64(groups)) as group:
            first = builder.mul(group.index, i64(shape.keys))
            rows = []
            for r in range(shape.keys):
                key = builder.add(first, i64(r))
                key = builder.select(builder.icmp_signed("<", key, keys.last), key, keys.last)
                rows.append(builder.add(keys.at, builder.mul(key, keys.step)))
            for total in (total for row in totals for total in row):
                builder.store(ir.Constant(kind, None), total)
            later = builder.add(first, i64(LOADED_AHEAD))
            lines = shape.keys * chunk_bytes // 64  # of the cache, for each step
            if shape.keys_ahead:
                ahead = builder.mul(i64(shape.keys_ahead), keys.step)
                fetch = _prefetch(builder, rows, row_bytes, keys.step, ahead, lines, spec)
            elif shape.keys == 1:  # it reads in memory's order itself
                fetch = _no_fetch
            else:
                loads = builder.icmp_signed("<=", builder.add(later, i64(shape.keys - 1)), keys.last_readable)
                start = builder.select(loads, builder.add(keys.at, builder.mul(later, keys.step)), queries.at)
                fetch = _load_ahead(builder, loads, start, keys.step, row_bytes, lines)
            with for_range(builder, chunks) as chunk:
                column = builder.mul(chunk.index, i64(chunk_bytes))
                fetch(column, chunk.index)
                block_chunks = [builder.add(block, builder.mul(chunk.index, i64(query_bytes))) for block in blocks]
                elements = [input_elements(builder, builder.add(row, column), spec) for row in rows]
                for part in parts:
                    key_parts = [shuffled(builder, x, x, list(range(part, part + lanes))) for x in elements]
                    for j in range(queries_at_once):
                        address = builder.add(block_chunks[j // BLOCK], i64(4 * (LANES * (j % BLOCK) + part)))
                        query = builder.load(pointer(builder, address, kind), align=4)
                        for key_part, row in zip(key_parts, totals, strict=True):
                            builder.store(multiply(builder, key_part, query, builder.load(row[j])), row[j])
            for j in range(queries_at_once):
                vectors, distance = [builder.load(row[j]) for row in totals], 1
                while len(vectors) > 1:
                    vectors, distance = sums_of_pairs(builder, vectors, distance), 2 * distance
                place = builder.add(builder.mul(group.index, i64(queries_at_once)), i64(j))
                builder.store(vectors[0], builder.gep(sums, [place]))
        for j in range(queries_at_once):
            vectors = [builder.load(builder.gep(sums, [i64(queries_at_once * n + j)])) for n in range(groups)]
            distance = shape.keys
            while distance < lanes:
                vectors, distance = sums_of_pairs(builder, vectors, distance), 2 * distance
            address = builder.add(scores.at, builder.mul(clamped(builder, j, queries.last), scores.row))
            for part, vector in zip(parts, vectors, strict=True):
                builder.store(vector, pointer(builder, builder.add(address, i64(4 * part)), kind), align=4)

    return dot_products


def _prefetch(builder, rows, row_bytes, key_step, ahead, lines, spec):
    """Prefetch as many lines as a step over the head dimension reads, ``ahead`` bytes from the rows.

    Where a step reads half a line of each row, every second row is fetched line by line, and the row after it from the middle of the
    steps on. One comparison serves all rows of a step.
    """
    gap = builder.sub(key_step, row_bytes)
    leading = rows if spec.isa.whole_vectors else rows[:: len(rows) // lines]

    def fetch(column, chunk):
        if not spec.isa.whole_vectors and len(leading) < len(rows):
            column = builder.shl(chunk, i64(6))
            in_next = builder.icmp_signed(">=", column, row_bytes)
            column = builder.add(column, builder.select(in_next, gap, i64(0)))
        for row in leading:
            prefetch(builder, builder.add(builder.add(row, column), ahead))

    return fetch


def _load_ahead(builder, loads, start, key_step, row_bytes, lines):
    """Load as many lines of later rows, in memory's order, as a step over the head dimension reads; nothing uses what is loaded.

    The CPU's own prefetcher follows these loads, not those of several rows at once, whose lines are then in the first cache. Rows past
    the last one are not read (``loads`` is false then, and ``start`` any address), nor what lies between rows, since loads fault where
    prefetches do not. Rows are whole lines of float32.
    """
    line = builder.select(loads, i64(64), i64(0))
    gap = builder.select(loads, builder.sub(key_step, row_bytes), i64(0))
    place, end = alloca_once(builder, I64), alloca_once(builder, I64)
    builder.store(start, place)
    builder.store(builder.add(start, row_bytes), end)

    def fetch(column, chunk):
        address, row_end = builder.load(place), builder.load(end)
        for _ in range(lines):
            builder.load(pointer(builder, address, _LINE), typ=_Volatile(F32, LANES), align=2)
            address = builder.add(address, line)
            over = builder.sext(builder.icmp_signed(">=", address, row_end), I64)
            address = builder.add(address, builder.and_(over, gap))
            row_end = builder.add(row_end, builder.and_(over, key_step))
        builder.store(address, place)
        builder.store(row_end, end)

    return fetch


def _no_fetch(column, chunk):
    pass


_dot_eight, _dot_four, _dot_single = map(_dot_products, (8, 4, 1))


# Weighted sums of values.


@device_function
def add_weighted_values(weights, rows, values, output, columns, spec):
    """Output (rows, columns) += weights x values, rows packed; rows of weights in bytes, of bf16 pairs those of neighbouring keys.

    Columns are a multiple of 16, of bf16 pairs of 32.
    """
    done = 0
    if rows == 1:
        done = _single_blocks(weights, rows, values, output, columns, 0, spec)
        done = _single_rest(weights, rows, values, output, columns, done, spec)
    elif rows <= BLOCK:
        done = _four_blocks(weights, rows, values, output, columns, 0, spec)
    if rows > 1:
        done = _wide_blocks(weights, rows, values, output, columns, done, spec)
    _narrow_blocks(weights, rows, values, output, columns, done, spec)


def _value_blocks(queries, most_vectors: int = 8):
    """The register block of :func:`add_weighted_values` for so many queries: rows of weights, and vectors of a value's row.

    Returns the device function that moves it over the columns, as far as it fits; that returns the first column that is left.
    """

    def shape(spec):
        """Rows, vectors (two at least where pairs are interleaved), and how far ahead it prefetches."""
        block = spec.decode_shape(queries) or spec.decode_shape(BLOCK)
        return block.rows, max(min(block.vectors, most_vectors), spec.per_element), block.values_ahead

    @operation()
    def value_block(builder, weights, last, values, output, ahead, spec):
        rows, vectors, rows_ahead = shape(spec)
        kind = spec.vector.ir
        multiply = multiply_add(spec)
        one = i64(1)
        values = ValueRows(*parts_of(builder, values))
        weights, output, ahead = (Packed(*parts_of(builder, matrix)) for matrix in (weights, output, ahead))
        sums = [[alloca_once(builder, kind) for _ in range(vectors)] for _ in range(rows)]
        weight_rows, output_rows = [], []
        for r in range(rows):
            row = clamped(builder, r, last)
            weight_rows.append(builder.add(weights.at, builder.mul(row, weights.row)))
            output_rows.append(builder.add(output.at, builder.mul(row, output.row)))

        def plus(address, size):
            return builder.add(address, i64(size))

        for total in (total for row in sums for total in row):
            builder.store(ir.Constant(kind, None), total)
        steps = builder.lshr(builder.add(values.count, one), one) if spec.packs_bf16 else values.count
        with for_range(builder, steps) as loop:
            if spec.packs_bf16:
                low = builder.add(values.at, builder.mul(builder.shl(loop.index, one), values.step))
                second = builder.icmp_signed("<", builder.add(builder.shl(loop.index, one), one), values.count)
                value_rows = [low, builder.select(second, builder.add(low, values.step), values.zeros)]
                columns = interleaved_rows(builder, *value_rows, vectors // 2, kind)
            else:
                value_rows = [builder.add(values.at, builder.mul(loop.index, values.step))]
                size = LANES * spec.input_bytes
                columns = [input_elements(builder, plus(value_rows[0], size * j), spec) for j in range(vectors)]
            first_ahead = builder.mul(loop.index, i64(len(value_rows)))
            for row in range(len(value_rows) if rows_ahead else 0):
                address = builder.add(ahead.at, builder.mul(plus(first_ahead, row), ahead.row))
                for line in range(0, LANES * spec.input_bytes * vectors, 64):
                    prefetch(builder, plus(address, line))
            for r in range(rows):
                address = builder.add(weight_rows[r], builder.shl(loop.index, i64(2)))
                weight = broadcast(builder, builder.load(pointer(builder, address, F32), align=4), LANES)
                for total, column in zip(sums[r], columns, strict=True):
                    builder.store(multiply(builder, weight, column, builder.load(total)), total)
        places = [(sums[r][j], plus(output_rows[r], 64 * j)) for r in range(rows) for j in range(vectors)]
        for total, address in places:  # before any store, since rows may repeat
            sum_before, x = builder.load(pointer(builder, address, kind), align=4), builder.load(total)
            x = shuffled(builder, x, x, EVEN_FIRST) if spec.loads_even_then_odd else x
            builder.store(builder.fadd(sum_before, x), total)
        for total, address in places:
            builder.store(builder.load(total), pointer(builder, address, kind), align=4)

    @constants_of_spec(3)
    def sizes(spec):
        rows, vectors, rows_ahead = shape(spec)
        return rows, LANES * vectors, rows_ahead

    @device_function
    def blocks(weights, count, values, output, columns, first, spec):
        rows, width, rows_ahead = sizes(spec)
        last_column, input_bytes = columns - (columns - first) % width, spec.input_bytes
        follows = values.step == input_bytes * columns  # rows follow one another
        portion = max(L1_VALUE_BYTES // (input_bytes * columns) & -LANES, LANES)
        for key in range(0, values.count if last_column > first else 0, portion):
            n, portion_weights = min(portion, values.count - key), weights.at + 4 // spec.per_element * key
            portion_values = values.at + values.step * key
            if spec.in_order and first == 0 and not follows:
                later = Rows(portion_values, values.step // input_bytes, 1, values.count, columns)
                prefetch_rows(later, 2 * portion, 2 * portion + n, spec)
            for column in range(first, last_column, width):
                source = ValueRows(portion_values + input_bytes * column, values.step, n, values.zeros)
                # What is prefetched with each key, and the step to the next.
                ahead = Packed(source.at + rows_ahead * values.step, values.step)
                if not spec.in_order and follows:
                    # Blocks are narrower than rows. The CPU's own prefetcher follows the order of memory, so the next keys are
                    # prefetched in it.
                    next_keys = portion_values + n * (values.step + input_bytes * column)
                    ahead = Packed(next_keys, input_bytes * width)
                for row in range(0, count, rows):
                    last = min(rows, count - row) - 1
                    block = Packed(portion_weights + row * weights.row, weights.row)
                    target = Packed(output + 4 * (row * columns + column), 4 * columns)
                    value_block(block, last, source, target, ahead, spec)
        return last_column

    return blocks


# The first of each may be too wide for the last columns.
_single_blocks, _single_rest = _value_blocks(1), _value_blocks(1, 4)
_four_blocks = _value_blocks(BLOCK)
_wide_blocks, _narrow_blocks = _value_blocks(2 * BLOCK), _value_blocks(2 * BLOCK, 1)

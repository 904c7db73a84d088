"""Few queries against a long cache: each key and value is read once for all query heads of its group.

Memory bandwidth is the limit, so nothing is transposed: scores are dot products along the head dimension, 16 keys at a time, and the
output is a weighted sum of value rows, 16 to 128 columns of some keys at a time. Each row of the cache is read once for a block of
queries, in the order of memory, and prefetched. Keys and queries are multiplied as they lie, word by word (a word is a number or a pair
of bf16), so that each lane holds a part of a sum; the lanes of 16 keys are then added, two vectors in one.

The cache is split into parts, so that all threads work on one sequence; the last task of a head to finish merges the head's parts, in a
fixed order, so the result does not depend on the order in which threads finish.

Source: the split over keys of Flash-Decoding (Dao et al. 2023).
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir

from lowtri.compat.numba_private import alloca_once, for_range
from lowtri.kernels import abi
from lowtri.kernels.abi import CACHE_BLOCK, CACHE_KEYS, CACHE_SCORES
from lowtri.kernels.abi import CACHE_ROWS as ROWS
from lowtri.kernels.device import constants_of_spec, device_function, operation, scratch_at, take, tasks
from lowtri.kernels.operations import F32, I32, I64, broadcast, constant, i64, pointer, shuffled
from lowtri.kernels.product import multiply_add
from lowtri.kernels.rows import (
    ALL_QUERIES,
    all_finite,
    fill,
    input_row,
    multiply_by,
    prefetch_rows,
    round_row,
    round_up,
    word_count,
)
from lowtri.kernels.simd import (
    add,
    any_greater,
    as_number,
    clamped,
    exp2,
    fetch_add,
    fma,
    input_vector,
    interleaved_rows,
    load,
    maximum,
    mul,
    prefetch,
    read,
    read_byte,
    read_input,
    reduce_rows_max,
    reduce_rows_sum,
    select_bits,
    select_greater,
    splat,
    store,
    sub,
    sums_of_pairs,
    write,
)
from lowtri.kernels.tiles import LN2, LOG2E, apply_softcap, times_log2e, to_log2

BLOCK = 4  # queries that share each row that is read; a shorter block repeats its last query
LANES = 16
_LINE = ir.VectorType(F32, LANES)


class _Volatile(ir.VectorType):
    """The type of a load that LLVM must keep, although nothing uses what it loads; llvmlite only prints it."""

    def _to_string(self):
        return f"volatile {super()._to_string()}"


EVEN_FIRST = [lane % 2 * (LANES // 2) + lane // 2 for lane in range(LANES)]


def input_words(builder, address, spec):
    """16 words of a row of the cache; of bf16 the even ones first."""
    if spec.in_pairs:
        return builder.load(pointer(builder, address, spec.vector.ir), align=2)
    if not spec.is_even_first:
        return input_vector(builder, address, LANES, spec)
    kind, half = ir.VectorType(I32, LANES // 2), ir.VectorType(F32, LANES // 2)
    words = builder.load(pointer(builder, address, kind), align=2)
    even, odd = builder.shl(words, constant(kind, 16)), builder.and_(words, constant(kind, 0xFFFF0000))
    return shuffled(builder, builder.bitcast(even, half), builder.bitcast(odd, half), list(range(LANES)))


# Dot products of keys.

LOADED_AHEAD = 8  # keys


@device_function
def lay_out_query(row, index, rows, words, target, spec):
    """Copy query ``index`` of ``rows``, of ``words`` words, to the layout that :func:`dot_products` reads.

    Queries lie in blocks of four, 16 words of each after one another, in the order of the key's words that they are multiplied by.
    Copies of the last one fill the last block, unless it is alone.
    """
    first = index - index % BLOCK
    block = 1 if rows - first == 1 else BLOCK
    for place in range(index, first + block if index == rows - 1 else index + 1):
        for word in range(words):
            lane = word % LANES
            offset = first * words + (word - lane) * block + (place - first) * LANES
            if spec.is_even_first:
                lane = lane % 2 * (LANES // 2) + lane // 2
            if spec.in_pairs:
                write(target + 4 * (offset + lane), read(row + 4 * word, spec), spec)
            else:
                write(target + 4 * (offset + lane), read_input(row + spec.input_bytes * word, spec), spec)


def _prefetch(builder, key_step, rows, row_bytes, lines, tile, spec):
    """Prefetch as many lines as a step over the head dimension reads.

    Where a step reads half a line of each row, every second row is fetched line by line, and the row after it from the middle of the
    steps on. One comparison serves all rows of a step.
    """
    ahead, gap = builder.mul(i64(tile.keys_ahead), key_step), builder.sub(key_step, row_bytes)
    leading = rows if spec.isa.whole_vectors else rows[:: len(rows) // lines]

    def fetch(column, chunk):
        if not spec.isa.whole_vectors and len(leading) < len(rows):
            column = builder.shl(chunk, i64(6))
            in_next = builder.icmp_signed(">=", column, row_bytes)
            column = builder.add(column, builder.select(in_next, gap, i64(0)))
        for row in leading:
            prefetch(builder, builder.add(builder.add(row, column), ahead))

    return fetch


def _load_ahead(builder, keys, key_step, later, last_row, rows, row_bytes, lines, scratch):
    """Load as many lines of later rows, in memory's order, as a step over the head dimension reads; nothing uses what is loaded.

    The CPU's own prefetcher follows these loads, not those of several rows at once, whose lines are then in the first cache. Rows past
    the last one are not read, nor what lies between rows, since loads fault where prefetches do not. Rows are whole lines of float32.
    """
    count = len(rows)
    if count == 1:  # it reads in this order itself
        return lambda column, chunk: None
    loads = builder.icmp_signed("<=", builder.add(later, i64(count - 1)), last_row)
    first = builder.select(loads, builder.add(keys, builder.mul(later, key_step)), scratch)
    line = builder.select(loads, i64(64), i64(0))
    gap = builder.select(loads, builder.sub(key_step, row_bytes), i64(0))
    place, end = alloca_once(builder, I64), alloca_once(builder, I64)
    builder.store(first, place)
    builder.store(builder.add(first, row_bytes), end)

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


def _dot_products(queries_at_once):
    @operation()
    def dot_products(
        builder, keys, key_step, last_key, last_row, queries, last_query, chunks, target, target_step, spec
    ):
        """The register tile of :func:`dot_products`: accumulators over the head dimension, for some keys and queries at once."""
        tile, multiply, chunk_bytes = spec.cache_tile(queries_at_once), multiply_add(spec), LANES * spec.word_bytes
        keys_at_once, lanes = tile.keys, LANES if spec.isa.whole_vectors else LANES // 2
        kind, parts = ir.VectorType(F32, lanes), range(0, LANES, lanes)
        row_bytes = builder.mul(chunks, i64(chunk_bytes))
        block_bytes = builder.mul(chunks, i64(4 * LANES * BLOCK))
        blocks = [queries, builder.add(queries, block_bytes)]
        query_words = 4 * LANES * min(queries_at_once, BLOCK)
        totals = [[alloca_once(builder, kind) for _ in range(queries_at_once)] for _ in range(keys_at_once)]
        groups = LANES // keys_at_once
        sums = alloca_once(builder, kind, size=i64(groups * queries_at_once))
        with for_range(builder, i64(groups)) as group:
            first = builder.mul(group.index, i64(keys_at_once))
            rows = []
            for r in range(keys_at_once):
                key = builder.add(first, i64(r))
                key = builder.select(builder.icmp_signed("<", key, last_key), key, last_key)
                rows.append(builder.add(keys, builder.mul(key, key_step)))
            for total in (total for row in totals for total in row):
                builder.store(ir.Constant(kind, None), total)
            later = builder.add(first, i64(LOADED_AHEAD))
            lines = keys_at_once * chunk_bytes // 64  # of the cache, for each step
            if tile.keys_ahead:
                fetch = _prefetch(builder, key_step, rows, row_bytes, lines, tile, spec)
            else:
                fetch = _load_ahead(builder, keys, key_step, later, last_row, rows, row_bytes, lines, queries)
            with for_range(builder, chunks) as chunk:
                column = builder.mul(chunk.index, i64(chunk_bytes))
                fetch(column, chunk.index)
                words_of = [builder.add(block, builder.mul(chunk.index, i64(query_words))) for block in blocks]
                words = [input_words(builder, builder.add(row, column), spec) for row in rows]
                for part in parts:
                    key_parts = [shuffled(builder, x, x, list(range(part, part + lanes))) for x in words]
                    for j in range(queries_at_once):
                        address = builder.add(words_of[j // BLOCK], i64(4 * (LANES * (j % BLOCK) + part)))
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
            distance = keys_at_once
            while distance < lanes:
                vectors, distance = sums_of_pairs(builder, vectors, distance), 2 * distance
            address = builder.add(target, builder.mul(clamped(builder, j, last_query), target_step))
            for part, vector in zip(parts, vectors, strict=True):
                builder.store(vector, pointer(builder, builder.add(address, i64(4 * part)), kind), align=4)

    return dot_products


_dot_eight, _dot_four, _dot_single = map(_dot_products, (8, 4, 1))


@device_function
def dot_products(keys, key_step, last_key, last_row, queries, rows, chunks, target, target_step, spec):
    """Dot products of 16 key rows with ``rows`` queries from :func:`lay_out_query`: a row of 16 for each query.

    Keys past ``last_key`` repeat it; rows up to ``last_row`` may be read ahead. Rows are ``chunks`` of 16 words; steps in bytes.
    """
    row, period = 0, 8 if spec.has_blocks_of_eight else rows  # the first block of four reads ahead for the others
    while row < rows:
        block, scores, left = queries + 64 * row * chunks, target + row * target_step, rows - row
        readable, size = last_key if row % period else last_row, min(4, left)
        if spec.has_blocks_of_eight and row % 8 == 0 and left > 5:
            size = min(8, left)
            _dot_eight(keys, key_step, last_key, readable, block, size - 1, chunks, scores, target_step, spec)
        elif left > 1:
            _dot_four(keys, key_step, last_key, readable, block, size - 1, chunks, scores, target_step, spec)
        else:
            _dot_single(keys, key_step, last_key, readable, block, 0, chunks, scores, target_step, spec)
        row += round_up(size, 4)


# Weighted sums of values.

PORTION = 2**13  # bytes of values that stay in L1 while all query heads of a group use them


def _tiles(queries, most_vectors: int = 8):
    """The register tile of :func:`pv` for blocks of so many queries: rows of weights, and vectors of a value's row.

    Returns the device function that moves it over the columns, as far as it fits; that returns the first column that is left.
    """

    def shape(spec):
        """Rows, vectors (two at least where pairs are interleaved), and how far ahead it prefetches."""
        tile = spec.cache_tile(queries) or spec.cache_tile(BLOCK)
        return tile.rows, max(min(tile.vectors, most_vectors), spec.per_word), tile.values_ahead

    @operation()
    def pv_tile(builder, weights, weight_step, last, values, value_step, keys, zeros, output, output_step, ahead, spec):
        rows, vectors, rows_ahead = shape(spec)
        ahead, ahead_step = (builder.extract_value(ahead, n) for n in (0, 1))
        kind, multiply, one = spec.vector.ir, multiply_add(spec), i64(1)
        tile = [[alloca_once(builder, kind) for _ in range(vectors)] for _ in range(rows)]
        weight_rows, output_rows = [], []
        for r in range(rows):
            row = clamped(builder, r, last)
            weight_rows.append(builder.add(weights, builder.mul(row, weight_step)))
            output_rows.append(builder.add(output, builder.mul(row, output_step)))

        def plus(address, size):
            return builder.add(address, i64(size))

        for total in (total for row in tile for total in row):
            builder.store(ir.Constant(kind, None), total)
        steps = builder.lshr(builder.add(keys, one), one) if spec.in_pairs else keys
        with for_range(builder, steps) as loop:
            if spec.in_pairs:
                low = builder.add(values, builder.mul(builder.shl(loop.index, one), value_step))
                second = builder.icmp_signed("<", builder.add(builder.shl(loop.index, one), one), keys)
                value_rows = [low, builder.select(second, builder.add(low, value_step), zeros)]
                columns = interleaved_rows(builder, *value_rows, vectors // 2, kind)
            else:
                value_rows = [builder.add(values, builder.mul(loop.index, value_step))]
                size = LANES * spec.input_bytes
                columns = [input_words(builder, plus(value_rows[0], size * j), spec) for j in range(vectors)]
            first_ahead = builder.mul(loop.index, i64(len(value_rows)))
            for row in range(len(value_rows) if rows_ahead else 0):
                address = builder.add(ahead, builder.mul(plus(first_ahead, row), ahead_step))
                for line in range(0, LANES * spec.input_bytes * vectors, 64):
                    prefetch(builder, plus(address, line))
            for r in range(rows):
                address = builder.add(weight_rows[r], builder.shl(loop.index, i64(2)))
                weight = broadcast(builder, builder.load(pointer(builder, address, F32), align=4), LANES)
                for total, column in zip(tile[r], columns, strict=True):
                    builder.store(multiply(builder, weight, column, builder.load(total)), total)
        places = [(tile[r][j], plus(output_rows[r], 64 * j)) for r in range(rows) for j in range(vectors)]
        for total, address in places:  # before any store, since rows may repeat
            sum_before, x = builder.load(pointer(builder, address, kind), align=4), builder.load(total)
            x = shuffled(builder, x, x, EVEN_FIRST) if spec.is_even_first else x
            builder.store(builder.fadd(sum_before, x), total)
        for total, address in places:
            builder.store(builder.load(total), pointer(builder, address, kind), align=4)

    @constants_of_spec(3)
    def sizes(spec):
        rows, vectors, rows_ahead = shape(spec)
        return rows, LANES * vectors, rows_ahead

    @device_function
    def tiles(weights, weight_step, count, values, value_step, keys, zeros, output, columns, first, spec):
        rows, width, rows_ahead = sizes(spec)
        last_column, input_bytes = columns - (columns - first) % width, spec.input_bytes
        portion = max(PORTION // (input_bytes * columns) & -LANES, LANES)
        for key in range(0, keys if last_column > first else 0, portion):
            n, portion_weights = min(portion, keys - key), weights + 4 // spec.per_word * key
            portion_values = values + value_step * key
            if spec.in_order and first == 0 and value_step != input_bytes * columns:
                later = 2 * portion
                prefetch_rows(portion_values, value_step // input_bytes, later, later + n, columns, spec)
            for column in range(first, last_column, width):
                source = portion_values + input_bytes * column
                ahead = (
                    source + rows_ahead * value_step,
                    value_step,
                )  # what is prefetched with each key, and the step to the next
                if not spec.in_order and value_step == input_bytes * columns:
                    # Tiles are narrower than rows. The CPU's own prefetcher follows the order of memory, so the next keys are
                    # prefetched in it.
                    ahead = portion_values + n * (value_step + input_bytes * column), input_bytes * width
                for row in range(0, count, rows):
                    last, block = min(rows, count - row) - 1, portion_weights + row * weight_step
                    target = output + 4 * (row * columns + column)
                    pv_tile(block, weight_step, last, source, value_step, n, zeros, target, 4 * columns, ahead, spec)
        return last_column

    return tiles


# The first of each may be too wide for the last columns.
_single_tiles, _single_rest = _tiles(1), _tiles(1, 4)
_block_tiles, _wide_tiles, _narrow_tiles = _tiles(BLOCK), _tiles(2 * BLOCK), _tiles(2 * BLOCK, 1)


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


# Bytes of the next rows, where keys and values change places: the CPU's own prefetcher begins anew there.
PREFETCHED = 2**13

header_size, place_of_row = map(device_function, (abi.header_size, abi.place_of_row))


@device_function
def is_visible(call, b, h, i, j):
    """Whether query i of head h sees key j."""
    step = call.visible_strides
    return call.visible == 0 or read_byte(call.visible + b * step.b + h * step.h + i * call.nk + j) != 0


@device_function
def score_block(call, b, kv, key0, keys, queries, scores, spec):
    """Scores (rows, CACHE_SCORES) of one block in units of log 2. Rows are (head of the group, query).

    Scores are -inf where hidden, and past the last key up to a multiple of 16; later ones are not set.
    """
    group, nq, k_step, bias_step = call.group, call.nq, call.k_strides, call.bias_strides
    rows, d, hidden, row_bytes = group * nq, word_count(call.d, spec), splat(-np.inf, spec), spec.input_bytes * k_step.n
    scale, softcap = as_number(call.options.scale, spec) * as_number(LOG2E, spec), as_number(call.options.softcap, spec)
    k = input_row(call.k, k_step, b, kv, call.first_key + key0, spec)
    for j in range(0, keys, 16):
        keys_16, last_key = k + row_bytes * j, min(keys - j, 16) - 1
        exists = ALL_QUERIES >> np.uint64(63 - last_key)
        last_row = call.nk - key0 - j - 1
        if spec.in_order and k_step.n != call.d:  # rows lie apart, and the CPU's own prefetcher does not follow
            prefetch_rows(keys_16, k_step.n, 32, 48, call.d, spec)
        target, target_step = scores + 4 * j, 4 * CACHE_SCORES
        dot_products(keys_16, row_bytes, last_key, last_row, queries, rows, d // 16, target, target_step, spec)
        for row in range(rows):
            score = scores + 4 * (row * CACHE_SCORES + j)
            store(score, select_bits(exists, np.uint64(0), mul(load(score, spec), splat(scale, spec)), hidden))
    whole = round_up(keys, 16)
    if call.bias or call.visible or softcap > 0:
        for row in range(rows):
            h, i = kv * group + row // nq, row % nq
            if softcap > 0:
                apply_softcap(scores + 4 * row * CACHE_SCORES, whole, softcap, spec)
            for j in range(whole):
                score = scores + 4 * (row * CACHE_SCORES + j)
                if j >= keys or not is_visible(call, b, h, i, key0 + j):
                    write(score, -np.inf, spec)
                elif call.bias:
                    key = call.first_key + key0 + j
                    index = b * bias_step.b + h * bias_step.h + i * bias_step.q + key * bias_step.k
                    write(score, read(score, spec) + to_log2(read(call.bias + 4 * index, spec), spec), spec)


@device_function
def softmax_block(scores, keys, rows, m, l, output, dv, partial, spec):
    """One block of online softmax, eight rows at once: scores become weights, and the output so far is rescaled to the new shift.

    Args:
        scores: address of (rows, CACHE_SCORES), of which ``keys`` (whole vectors) are set.
        m, l: addresses of the shifts and sums, a vector for every eight rows; lanes 8 .. 15 are those of 0 .. 7.
        output: address of (rows, dv).  partial: scratch for nine vectors.
    """
    hidden, zero, one = splat(-np.inf, spec), splat(0.0, spec), splat(1.0, spec)
    for row in range(0, rows, ROWS):
        block, count = scores + 4 * CACHE_SCORES * row, min(ROWS, rows - row)
        of_rows, block_m, block_l = partial + 64, m + 64 * (row // ROWS), l + 64 * (row // ROWS)
        for i in range(count):
            greatest = hidden
            for address in range(block + 4 * CACHE_SCORES * i, block + 4 * (CACHE_SCORES * i + keys), 64):
                greatest = maximum(load(address, spec), greatest, spec)
            store(of_rows + 64 * i, greatest)
        old = load(block_m, spec)
        new = maximum(reduce_rows_max(of_rows, spec), old, spec)
        shift = sub(zero, select_greater(new, hidden, new, zero))
        if any_greater(new, old):
            rescale = exp2(add(old, shift), spec)
            store(block_m, new)
            store(block_l, mul(load(block_l, spec), rescale))
            store(partial, rescale)
            for i in range(count):
                multiply_by(output + 4 * dv * (row + i), dv, read(partial + 4 * i, spec), spec)
        store(partial, shift)
        for i in range(count):
            row_shift, total = splat(read(partial + 4 * i, spec), spec), zero
            for address in range(block + 4 * CACHE_SCORES * i, block + 4 * (CACHE_SCORES * i + keys), 64):
                weights = exp2(fma(load(address, spec), one, row_shift, spec), spec)
                store(address, weights)
                total = add(total, weights)
            store(of_rows + 64 * i, total)
        store(block_l, add(load(block_l, spec), reduce_rows_sum(of_rows, spec)))


@device_function
def add_visible_pairs(call, b, kv, key0, keys, v, weights, output, spec):
    """Output += weights x values, pair by pair: hidden values are not read, so a NaN among them has no effect."""
    nq, dv, input_bytes = call.nq, call.dv, spec.input_bytes
    for row in range(call.group * nq):
        for j in range(keys):
            if is_visible(call, b, kv * call.group + row // nq, row % nq, key0 + j):
                weight = read(weights + 4 * (row * CACHE_SCORES + j), spec)
                for d in range(dv):
                    x = read_input(v + input_bytes * (j * call.v_strides.n + d), spec)
                    address = output + 4 * (row * dv + d)
                    write(address, read(address, spec) + weight * x, spec)


@device_function
def attend_part(call, own, b, kv, part, non_finite, spec):
    """One part of the cache for all queries of a group: shifts m, sums l and outputs, in the results of this part."""
    nq, nk, dv, input_bytes, rows = call.nq, call.nk, call.dv, spec.input_bytes, call.group * call.nq
    k_step, v_step, scores, zeros = call.k_strides, call.v_strides, own.scores, own.zeros
    header, index = header_size(rows), (b * (call.heads // call.group) + kv) * call.parts + part
    m = scratch_at(call, call.scratch).results + 4 * index * (header + rows * dv)
    l, output, partial = m + 2 * header, m + 4 * header, own.partial
    fill(m, header // 2, as_number(-np.inf, spec), spec)
    fill(l, header // 2 + rows * dv, 0.0, spec)  # the output follows
    fill(partial, 16 * (ROWS + 1), 0.0, spec)
    if spec.in_pairs:
        fill(zeros, dv, 0.0, spec)
    for row in range(rows):
        q = input_row(call.q, call.q_strides, b, kv * call.group + row // nq, row % nq, spec)
        lay_out_query(q, row, rows, word_count(call.d, spec), own.queries, spec)
    blocks = -(-nk // CACHE_KEYS)
    key0, end = blocks * part // call.parts * CACHE_KEYS, min(nk, blocks * (part + 1) // call.parts * CACHE_KEYS)
    # Every change from keys to values costs the time of some reads: blocks are as long as their scores stay in the first caches.
    most = max(CACHE_BLOCK * ROWS // max(rows, ROWS) // CACHE_KEYS, 1) * CACHE_KEYS
    while key0 < end:
        keys = min(most, end - key0)
        score_block(call, b, kv, key0, keys, own.queries, scores, spec)
        v = input_row(call.v, v_step, b, kv, call.first_key + key0, spec)
        prefetch_rows(v, v_step.n, 0, PREFETCHED // (input_bytes * dv), dv, spec)
        softmax_block(scores, round_up(keys, 16), rows, m, l, output, dv, partial, spec)
        k = input_row(call.k, k_step, b, kv, call.first_key + key0 + keys, spec)
        prefetch_rows(k, k_step.n, 0, PREFETCHED // (input_bytes * call.d), call.d, spec)
        if non_finite:
            add_visible_pairs(call, b, kv, key0, keys, v, scores, output, spec)
        else:
            weights, weight_bytes = scores, 4
            if spec.in_pairs:
                weights, weight_bytes = own.weights, 2
                for first in range(0, rows * CACHE_SCORES, CACHE_SCORES):
                    round_row(scores + 4 * first, round_up(keys, 16), as_number(1.0, spec), weights + 2 * first, spec)
            pv(weights, weight_bytes * CACHE_SCORES, rows, v, input_bytes * v_step.n, keys, zeros, output, dv, spec)
        key0 += keys
    return output, rows * dv


@device_function
def merge_parts(call, b, kv, spec):
    """Merge the parts of one head, in their order, and its sink: output and log-sum-exp, written to the arrays."""
    nq, dv, rows, ninf = call.nq, call.dv, call.group * call.nq, as_number(-np.inf, spec)
    header, step = header_size(rows), 4 * (header_size(rows) + rows * dv)
    first = scratch_at(call, call.scratch).results + (b * (call.heads // call.group) + kv) * call.parts * step
    for row in range(rows):
        h, i, place = kv * call.group + row // nq, row % nq, first + 4 * place_of_row(row)
        sink = read(call.sinks + 4 * h, spec) * as_number(LOG2E, spec) if call.sinks else ninf
        greatest, total = sink, as_number(0.0, spec)
        for part in range(call.parts):
            greatest = max(greatest, read(place + part * step, spec))
        if call.sinks and greatest > -np.inf:
            total = as_number(2.0, spec) ** (sink - greatest)
        sums = first + 4 * header + 4 * row * dv  # the outputs of part 0
        for part in range(call.parts):
            shift = read(place + part * step, spec)
            factor = as_number(0.0, spec) if shift == -np.inf else as_number(2.0, spec) ** (shift - greatest)
            total += read(place + part * step + 2 * header, spec) * factor
            for d in range(0, 4 * dv, 64):
                sum_before = load(sums + d, spec) if part else splat(0.0, spec)
                store(sums + d, fma(load(sums + part * step + d, spec), splat(factor, spec), sum_before, spec))
        factor = as_number(1.0, spec) / total if total != 0 else as_number(0.0, spec)
        query = (b * call.heads + h) * nq + i
        round_row(sums, dv, factor, call.o + spec.input_bytes * query * dv, spec)
        if call.lse:
            lse = greatest * as_number(LN2, spec) + np.log(total) if total != 0 else ninf
            write(call.lse + 4 * query, lse, spec)
            if call.lse_low:
                low = greatest - times_log2e(lse, spec) + np.log2(total) if total != 0 else as_number(0.0, spec)
                write(call.lse_low + 4 * query, low, spec)


def decode(call):
    """The kernel: takes tasks until none is left. The parts of one head follow one another."""
    own, kv_heads = (
        scratch_at(call, call.scratch + call.thread_bytes * take(call.next_thread)),
        call.heads // call.group,
    )
    for task in tasks(call):
        part, head = task % call.parts, task // call.parts
        b, kv = head // kv_heads, head % kv_heads
        non_finite = False
        while True:
            output, count = attend_part(call, own, b, kv, part, non_finite, call.spec)
            if non_finite or all_finite(output, count, call.spec):
                break
            non_finite = True  # Some value is NaN or inf, and it may be hidden: compute the part again, pair by pair.
        if fetch_add(scratch_at(call, call.scratch).parts_done + 8 * head, 1) == call.parts - 1:
            merge_parts(call, b, kv, call.spec)

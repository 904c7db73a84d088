"""Rows of arrays and of tiles: filled, multiplied, transposed, widened, rounded; as operands of a product; those with a NaN or inf.

A tile consists of rows of 64 numbers, one for each query. Its output before the division, or dQ, has on vectors a row of whole vectors
for each query: O += P V, with rows of V as vectors. So any few queries can have keys of their own, and rows are written to the array as
they are. On tile registers it is transposed, (size, 64): O^T += V^T P^T, with P as softmax leaves it.

Operands consist of words, or are those of tile registers (:mod:`lowtri.kernels.product`). Their functions convert rows where necessary
and return the operand's address; for operands that may be strided, also the row step and the depth step, in words. On tile registers, A
has rows padded to whole depths of 32, and B pairs. Rows that are contiguous and whole are read from the array; others are copied first,
padded with zeros: padding on one side only would not do, since 0 * NaN is NaN.

Transposed tiles are shared by all threads: each is packed once, by the first thread that needs it. A tile has a state: 0 not packed, 1
being packed, 2 packed. A thread that needs a tile while another one packs it packs a copy of its own, so that no thread ever waits.

Each thread keeps the key tiles that it converted last, in slots, since neighbouring tiles of queries see mostly the same keys: tile n
is in slot ``n % slots``. The first words of the memory say which tile a slot has: its number among the tiles of all heads, plus 1; or
0. A tile of queries that sees more key tiles than there are slots uses one slot, which then stays in the first cache.
"""

from __future__ import annotations

import numpy as np
from numba import types

from lowtri.kernels import abi
from lowtri.kernels.abi import KEYS, MOST_SLOTS
from lowtri.kernels.device import device_function, operation, scratch_at
from lowtri.kernels.operations import I64, i64, pointer
from lowtri.kernels.product import words_to_blocks
from lowtri.kernels.simd import (
    add,
    all_lanes_finite,
    as_number,
    copy_number,
    interleave,
    interleave_loaded,
    lane,
    load,
    load_input,
    mul,
    prefetch_line,
    read,
    read_input,
    read_int64,
    read_word,
    select_bits,
    splat,
    store,
    store_input,
    transpose,
    transpose_block,
    write,
    write_input,
    write_int64,
)
from lowtri.kernels.spec import QUERIES

ALL_QUERIES = np.uint64(0xFFFFFFFFFFFFFFFF)  # the mask bits of a key that every query sees

round_up, padded, product_rows = map(device_function, (abi.round_up, abi.padded, abi.product_rows))
key_bytes, slot_count = map(device_function, (abi.key_bytes, abi.slot_count))


@device_function
def word_count(count, spec):
    """How many words hold this many numbers."""
    return (count + spec.per_word - 1) // spec.per_word


@device_function
def input_row(array, strides, b, h, n, spec):
    """The address of a row of an array (B, H, N, D)."""
    return array + spec.input_bytes * (b * strides.b + h * strides.h + n * strides.n)


@device_function
def prefetch_rows(rows, row_step, first, last, size, spec):
    """Prefetch rows of an array, in memory's order."""
    for i in range(first, last):
        for offset in range(0, spec.input_bytes * size, 64):
            prefetch_line(rows + spec.input_bytes * i * row_step + offset)


@device_function
def fill(address, count, value, spec):
    """Set ``count`` numbers (whole vectors) to one value."""
    for offset in range(0, spec.number_bytes * count, 64):
        store(address + offset, splat(value, spec))


@device_function
def multiply_by(address, count, factor, spec):
    """Multiply ``count`` numbers (whole vectors) by one factor."""
    for offset in range(0, spec.number_bytes * count, 64):
        store(address + offset, mul(load(address + offset, spec), splat(factor, spec)))


@device_function
def fill_columns(tile, size, columns, value, spec):
    """Set the first ``columns`` of a tile (size, 64), whole vectors, to one value."""
    for j in range(size):
        fill(tile + spec.row_bytes * j, columns, value, spec)


@device_function
def transpose_in(source, row_step, step, n, size, columns, target, spec):
    """Transpose n <= 64 rows of ``size`` words to (size, 64): queries in lanes. ``columns`` lanes are set; past n with the last row."""
    number_bytes, lanes, row = spec.number_bytes, spec.lanes, spec.row_bytes
    if step == 1 and size >= lanes:
        for first in range(0, columns, lanes):
            top = min(first, n - 1)
            last = min(n - 1 - top, lanes - 1)
            for d in range(0, size, lanes):
                column = min(d, size - lanes)  # the last block overlaps the one before
                block = source + number_bytes * (top * row_step + column)
                transpose(block, number_bytes * row_step, last, target + row * column + number_bytes * first, row, spec)
    else:
        for d in range(size):
            for i in range(columns):
                x = read(source + number_bytes * (min(i, n - 1) * row_step + d * step), spec)
                write(target + row * d + number_bytes * i, x, spec)


@device_function
def transpose_out(source, n, size, target, row_step, spec):
    """Transpose (size, 64) to n <= 64 rows of ``size`` numbers."""
    number_bytes, lanes, row = spec.number_bytes, spec.lanes, spec.row_bytes
    whole = n - n % lanes if size >= lanes else 0
    for first in range(0, whole, lanes):
        for d in range(0, size, lanes):
            column = min(d, size - lanes)
            block = target + number_bytes * (first * row_step + column)
            transpose(
                source + row * column + number_bytes * first, row, lanes - 1, block, number_bytes * row_step, spec
            )
    for i in range(whole, n):
        for d in range(size):
            write(target + number_bytes * (i * row_step + d), read(source + row * d + number_bytes * i, spec), spec)


@device_function
def widen_rows(source, row_step, step, n, size, target, target_row, spec):
    """n rows of an array in the compute dtype, padded with 0 to ``target_row`` numbers each."""
    number_bytes, lanes = spec.number_bytes, spec.lanes
    for i in range(n):
        row, widened = source + spec.input_bytes * i * row_step, target + number_bytes * i * target_row
        whole = size - size % lanes if step == 1 else 0
        for d in range(0, whole, lanes):
            store(widened + number_bytes * d, load_input(row + spec.input_bytes * d, spec))
        for d in range(whole, size):
            write(widened + number_bytes * d, read_input(row + spec.input_bytes * d * step, spec), spec)
        for d in range(size, target_row):
            write(widened + number_bytes * d, 0.0, spec)


@device_function
def round_row(source, size, factor, target, spec):
    """Copy a packed row of numbers, times a factor, to a row of an array, rounded to its dtype."""
    whole = size - size % spec.lanes
    for d in range(0, whole, spec.lanes):
        x = mul(load(source + spec.number_bytes * d, spec), splat(factor, spec))
        store_input(target + spec.input_bytes * d, x, spec)
    for d in range(whole, size):
        write_input(target + spec.input_bytes * d, read(source + spec.number_bytes * d, spec) * factor, spec)


@device_function
def interleave_rows(rows, n, size, pairs, spec):
    """Packed rows (n, size) as pairs of bf16 (n / 2, size): neighbouring rows interleaved, zero-padded to an even count."""
    for j in range(0, n, 2):
        for offset in range(0, 4 * size, 64):
            row = rows + 4 * size * j + offset
            high = load(row + 4 * size, spec) if j + 1 < n else splat(0.0, spec)
            store(pairs + 2 * size * j + offset, interleave(load(row, spec), high, spec))


@device_function
def interleave_input_rows(source, row_step, n, size, zeros, pairs, spec):
    """Rows of a bf16 array (n, size) as pairs (n / 2, size); ``zeros`` is a row of 0, the neighbour of an odd last row."""
    for j in range(0, n, 2):
        low = source + 2 * j * row_step
        high = low + 2 * row_step if j + 1 < n else zeros
        for d in range(0, size, 16):
            store(pairs + 4 * (j // 2 * size + d), interleave_loaded(low + 2 * d, high + 2 * d, spec))


# The output of a tile, or dQ.


@device_function
def zero_output(output, n, size, spec):
    """Set the sums of n queries to 0."""
    if spec.on_tiles:
        fill_columns(output, product_rows(size, spec), round_up(n, 32), 0.0, spec)
    else:
        fill(output, n * padded(spec, size), 0.0, spec)


@device_function
def rescale_output(output, vector, size, factors, spec):
    """Multiply the sums of a vector of queries by one factor each; ``vector`` is its number among those of the queries."""
    if spec.on_tiles:
        for d in range(size):
            address = output + spec.row_bytes * d + 64 * vector
            store(address, mul(load(address, spec), factors))
    else:
        columns = padded(spec, size)
        for i in range(spec.lanes):
            factor = lane(factors, i)
            if factor != 1:
                multiply_by(output + spec.number_bytes * columns * (spec.lanes * vector + i), columns, factor, spec)


@device_function
def output_finite(output, n, size, spec):
    """Whether the sums of n queries are all finite."""
    if not spec.on_tiles:
        return all_finite(output, n * padded(spec, size), spec)
    for d in range(size):
        if not all_finite(output + spec.row_bytes * d, round_up(n, 16), spec):
            return False
    return True


@device_function
def store_scaled(output, n, size, factor, target, row_step, spec):
    """Copy the sums of n queries, times a factor, to rows of the compute dtype, ``row_step`` numbers apart."""
    number_bytes = spec.number_bytes
    if spec.on_tiles:
        for d in range(size):
            multiply_by(output + spec.row_bytes * d, round_up(n, 16), factor, spec)
        transpose_out(output, n, size, target, row_step, spec)
    else:
        columns, whole = padded(spec, size), size - size % spec.lanes
        for i in range(n):
            source, row = output + number_bytes * columns * i, target + number_bytes * row_step * i
            for offset in range(0, number_bytes * whole, 64):
                store(row + offset, mul(load(source + offset, spec), splat(factor, spec)))
            for d in range(whole, size):
                write(row + number_bytes * d, read(source + number_bytes * d, spec) * factor, spec)


# NaN and inf.
#
# One in a row of Q, K, V or dO changes the results of the pairs that see it, and no others. A product would spread it to hidden pairs,
# whose weight is 0, since 0 * NaN is NaN. So non-finite rows are added pair by pair where they are visible, and the product reads a
# copy in which these rows are 0.


@device_function
def all_finite(address, count, spec):
    """Whether ``count`` numbers (whole vectors) are all finite."""
    for offset in range(0, spec.number_bytes * count, 64):
        if not all_lanes_finite(load(address + offset, spec)):
            return False
    return True


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
def add_weighted_row(weights, word, query, queries, row, output, size, spec):
    """Output += weight * row for the queries that see a key, whose bits from ``query`` on are set in ``word``.

    ``weights`` are those of ``queries`` queries; the packed row is padded with 0; the output begins at these queries, too.
    """
    if spec.on_tiles:
        for d in range(size):
            x = splat(read(row + spec.number_bytes * d, spec), spec)
            for first in range(0, queries, spec.lanes):
                address = output + spec.row_bytes * d + spec.number_bytes * first
                before = load(address, spec)
                after = add(before, mul(load(weights + spec.number_bytes * first, spec), x))
                store(address, select_bits(word, np.uint64(query + first), after, before))
    else:
        row_bytes = spec.number_bytes * padded(spec, size)
        for i in range(queries):
            if (word >> np.uint64(query + i)) & np.uint64(1):
                weight, target = splat(read(weights + spec.number_bytes * i, spec), spec), output + row_bytes * i
                for offset in range(0, row_bytes, 64):
                    product = mul(weight, load(row + offset, spec))
                    store(target + offset, add(load(target + offset, spec), product))


@device_function
def add_non_finite_keys(rows, strides, weights, mask_bits, query, queries, keys, output, size, finite_rows, spec):
    """Output += weights^T rows for the non-finite rows of an array, at the queries that see them.

    ``weights`` (keys, queries) are those of the queries from ``query`` on; ``output`` begins at this query, too.
    ``finite_rows`` becomes a padded copy of the rows with 0 in place of the non-finite ones.
    """
    number_bytes, row = spec.number_bytes, padded(spec, size)
    widen_rows(rows, strides.n, strides.d, keys, size, finite_rows, row, spec)
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


# Rows of bf16 as operands on tile registers.


@device_function
def copy_rows(source, row_step, step, n, size, target, rows, spec):
    """Copy n rows of an array of bf16 to rows of a multiple of 32 numbers; zeros fill them, and ``rows`` rows in all."""
    row = 2 * round_up(size, 32)
    fill(target, rows * row // 4, 0.0, spec)
    for i in range(n):
        from_row, to_row, d = source + 2 * i * row_step, target + i * row, 0
        if step == 1:
            while d + 32 <= size:
                store(to_row + 2 * d, load(from_row + 2 * d, spec))
                d += 32
        while d < size:
            copy_number(from_row + 2 * d * step, to_row + 2 * d)
            d += 1


@device_function
def queries_in_pairs(source, row_step, step, n, size, rows, target, spec):
    """n <= 64 rows of queries as operand B, for each 32 of them (words, 32), pairs along the head; ``rows`` is scratch for 64 rows.

    Lanes past n repeat the last row.
    """
    words, row = source, row_step
    if step != 1 or size % 32 or row_step % 2:
        copy_rows(source, row_step, step, n, size, rows, n, spec)
        words, row = rows, round_up(size, 32)
    size = round_up(size, 32) // 2
    for first in range(0, QUERIES, 16):
        top = min(first, n - 1)
        last, lanes = min(n - 1 - top, 15), spec.unit_row * size * (first // 32) + 4 * (first % 32)
        for pair in range(0, size, 16):
            block = words + 2 * top * row + 4 * pair
            transpose(block, 2 * row, last, target + spec.unit_row * pair + lanes, spec.unit_row, spec)


@device_function
def pack_blocks(rows, row, n, columns, zeros, target, spec):
    """n rows of at least ``columns`` numbers, transposed: for each 32 of them a block (columns, 32), zeros past n."""
    if columns < 32:
        fill(target, round_up(n, 32) * columns // 2, 0.0, spec)
        for i in range(n):
            for d in range(columns):
                copy_number(rows + 2 * (i * row + d), target + 64 * (i // 32 * columns + d) + 2 * (i % 32))
        return
    for j in range(0, n, 32):
        for d in range(0, columns, 32):
            column = min(d, columns - 32)  # the last block overlaps the one before
            block = target + 64 * (j // 32 * columns + column)
            transpose_block(rows + 2 * (j * row + column), 2 * row, n - j, zeros, block, 64, spec)


@device_function
def pack_transposed(source, row_step, step, n, size, copy, zeros, target, spec):
    """n rows of keys or values, transposed: for each 32 of them a block (product_rows(size), 32), zeros past n.

    ``copy`` is scratch for the rows; ``zeros`` are 32 zeros.
    """
    rows, row = source, row_step
    if step != 1 or size % 16 or size < 32:
        copy_rows(source, row_step, step, n, size, copy, n, spec)
        rows, row = copy, round_up(size, 32)
    pack_blocks(rows, row, n, product_rows(size, spec), zeros, target, spec)


@device_function
def transposed_queries(source, row_step, step, n, size, rows, target, spec):
    """n rows of an array as an operand (words, 64) with queries in lanes; ``rows`` is scratch for (n, size)."""
    columns = round_up(n, 16)
    if spec.on_tiles:
        queries_in_pairs(source, row_step, step, n, size, rows, target, spec)
    elif spec.is_widened:
        widen_rows(source, row_step, step, n, size, rows, size, spec)
        transpose_in(rows, size, 1, n, size, columns, target, spec)
    else:
        words = size // spec.per_word
        transpose_in(source, row_step // spec.per_word, step, n, words, columns, target, spec)
        if spec.in_blocks:
            words_to_blocks(target, words, columns)


@device_function
def head_operand(source, row_step, step, n, size, target, spec):
    """Rows of keys or values as an operand with words along the head, the A of K Q^T; ``target`` is scratch for (n, size).

    On tiles there are at least 16 rows, and the row step is in bytes.
    """
    if spec.on_tiles:
        if step == 1 and size % 32 == 0 and n >= 16:
            return source, 2 * row_step, 1
        copy_rows(source, row_step, step, n, size, target, max(n, 16), spec)
        return target, 2 * round_up(size, 32), 1
    if spec.is_widened:
        widen_rows(source, row_step, step, n, size, target, padded(spec, size), spec)
        return target, padded(spec, size), 1
    return source, row_step // spec.per_word, step


@device_function
def key_operand(source, row_step, step, n, size, zeros, target, spec):
    """Rows of keys or values as an operand with words along the keys, the B of P V: its address, and words from one row to the next.

    Rows are whole vectors, padded with 0. ``target`` and ``zeros`` are scratch.
    """
    if spec.in_pairs:
        interleave_input_rows(source, row_step, n, size, zeros, target, spec)
        return target, size
    if not spec.is_widened:
        if step == 1 and size % spec.lanes == 0:
            return source, row_step
    widen_rows(source, row_step, step, n, size, target, padded(spec, size), spec)
    return target, padded(spec, size)


@device_function
def row_operand(rows, n, size, pairs, spec):
    """Packed rows as an operand of a product that sums over rows; ``pairs`` is scratch, and may be ``rows`` itself."""
    if not spec.in_pairs:
        return rows
    interleave_rows(rows, n, size, pairs, spec)
    if spec.on_tiles:  # whole depths
        used, depths = (n + 1) // 2, round_up(n, 32) // 2
        fill(pairs + 4 * size * used, size * (depths - used), 0.0, spec)
    return pairs


@device_function
def finite_rows_operand(rows, n, size, copy, zeros, target, spec):
    """Padded rows of keys or values, packed, as an operand: see :func:`key_operand`. ``copy`` and ``target`` are scratch."""
    row = padded(spec, size)
    if not spec.on_tiles:
        return row_operand(rows, n, row, rows, spec), row
    fill(copy, n * row // 2, 0.0, spec)
    for i in range(n):
        round_row(rows + 4 * i * row, size, as_number(1.0, spec), copy + 2 * i * row, spec)
    pack_blocks(copy, row, n, product_rows(size, spec), zeros, target, spec)
    return target, 0


# Transposed tiles, shared by all threads.

_PACKING, _PACKED = i64(1), i64(2)
# Whether the tile is packed (then this thread sees its numbers); whether this thread is to pack it; mark it as packed, for all threads.
is_packed = operation(types.boolean)(
    lambda b, state: b.icmp_unsigned("==", b.load_atomic(pointer(b, state, I64), "acquire", 8), _PACKED)
)
claim = operation(types.boolean)(
    lambda b, state: b.extract_value(b.cmpxchg(pointer(b, state, I64), i64(0), _PACKING, "acq_rel", "acquire"), 1)
)
publish = operation()(lambda b, state: b.store_atomic(_PACKED, pointer(b, state, I64), "release", 8))


@device_function
def transposed_tile(call, array, strides, size, b, kv, key0, own, copy, zeros, spec):
    """The address of the transposed rows of a head from ``key0`` on, in blocks of 32 keys: (keys / 32, product_rows(size), 32).

    ``own`` and ``copy`` are this thread's memory for a tile, and for a copy of its rows; ``zeros`` are 32 zeros.
    """
    shared, columns, tile = scratch_at(call, call.scratch), product_rows(size, spec), key0 // KEYS
    number = (b * (call.heads // call.group) + kv) * ((call.nk + KEYS - 1) // KEYS) + tile
    state, packed, first = shared.packed_states + 8 * number, shared.packed + 2 * KEYS * columns * number, tile * KEYS
    if not is_packed(state):
        claimed = claim(state)
        if not claimed:
            packed = own
        source, n = input_row(array, strides, b, kv, first, spec), min(KEYS, call.nk - first)
        pack_transposed(source, strides.n, strides.d, n, size, copy, zeros, packed, spec)
        if claimed:
            publish(state)
    return packed + 2 * (key0 - first) * columns


# Tiles that a thread keeps.


@device_function
def clear_pack_cache(own, spec):
    """Mark all slots as empty: the scratch memory has the tiles of an earlier run."""
    if not spec.on_tiles:
        for slot in range(MOST_SLOTS):
            if spec.is_widened:
                write_int64(own.kept_keys + 8 * slot, 0)
            if spec.is_widened or spec.in_pairs:
                write_int64(own.kept_values + 8 * slot, 0)


@device_function
def slot_of(call, memory, b, kv, tile, size, seen, spec):
    """The slot of a head's key tile, one of ``seen``, with rows of ``size`` numbers: its address, and whether it is to be converted."""
    number, tile_bytes = (
        (b * (call.heads // call.group) + kv) * ((call.nk + KEYS - 1) // KEYS) + tile + 1,
        key_bytes(KEYS, size, spec),
    )
    slots = slot_count(tile_bytes)
    slot = tile % slots if seen <= slots else 0
    is_new = read_int64(memory + 8 * slot) != number
    if is_new:
        write_int64(memory + 8 * slot, number)
    return memory + 8 * MOST_SLOTS + tile_bytes * slot, is_new


@device_function
def packed_keys(call, own, b, kv, key0, keys, seen, spec):
    """``keys`` keys of a head from ``key0`` on as an operand with words along the head, its row step and depth step.

    ``own`` is the thread's scratch memory; ``seen``: how many key tiles the queries see.
    """
    strides, size = call.k_strides, padded(spec, call.d)
    if not spec.is_widened:
        source = input_row(call.k, strides, b, kv, key0, spec)
        return head_operand(source, strides.n, strides.d, keys, call.d, own.kept_keys, spec)
    tile = key0 // KEYS
    words, is_new = slot_of(call, own.kept_keys, b, kv, tile, size, seen, spec)
    if is_new:
        source = input_row(call.k, strides, b, kv, tile * KEYS, spec)
        head_operand(source, strides.n, strides.d, min(KEYS, call.nk - tile * KEYS), call.d, words, spec)
    return words + key_bytes(key0 - tile * KEYS, size, spec), size, 1


@device_function
def packed_values(call, own, b, kv, key0, keys, seen, spec):
    """The values from ``key0`` on as an operand with words along the keys, and the words of a row; the rest as in :func:`packed_keys`.

    In pairs, key0 is an even number of keys after its tile's first; on tiles, a multiple of 32.
    """
    strides, size, tile = call.v_strides, padded(spec, call.dv), key0 // KEYS
    if spec.on_tiles:
        copy, zeros = own.values, own.zeros
        return transposed_tile(call, call.v, strides, call.dv, b, kv, key0, own.kept_values, copy, zeros, spec), 0
    if spec.is_direct:
        source = input_row(call.v, strides, b, kv, key0, spec)
        return key_operand(source, strides.n, strides.d, keys, call.dv, own.zeros, own.values, spec)
    words, is_new = slot_of(call, own.kept_values, b, kv, tile, size, seen, spec)
    if is_new:
        source, n = input_row(call.v, strides, b, kv, tile * KEYS, spec), min(KEYS, call.nk - tile * KEYS)
        key_operand(source, strides.n, strides.d, n, call.dv, own.zeros, words, spec)
    return words + key_bytes(key0 - tile * KEYS, size, spec), size

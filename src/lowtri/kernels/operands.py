"""Rows of arrays as operands of a product, in each of the four ways in which a kernel reads rows.

Operands consist of words, or are those of tile registers (:mod:`lowtri.kernels.product`). These functions convert rows where necessary
and return the operand's address; for operands that may be strided, they also return the row step and the depth step, in words.

On tile registers, A has rows padded to whole depths of 32, and B pairs. Rows that are contiguous and whole are read from the array;
others are copied first, padded with zeros: padding on one side only would not do, since 0 * NaN is NaN.

Transposed tiles are shared by all threads, and there is one copy for all key/value heads: each is packed once, by the first thread that
needs it. A tile has a state: 0 not packed, 1 being packed, 2 packed. A thread that needs a tile while another one packs it packs a copy
of its own, so that no thread ever waits. Memory of tiles that no query sees is never touched.

Neighbouring tiles of queries see mostly the same keys, and a thread computes them one after the other. So each thread keeps the key
tiles that it converted last, in slots: tile n is in slot ``n % slots``. The first words of the memory say which tile a slot has: its
number among the tiles of all heads, plus 1; or 0. A tile of queries that sees more key tiles than there are slots would find none of
them again; it uses one slot, which then stays in the first cache.
"""

from __future__ import annotations

from numba import types

from lowtri.kernels import abi
from lowtri.kernels.abi import KEYS, MOST_SLOTS
from lowtri.kernels.device import device_function, operation, scratch_at
from lowtri.kernels.operations import I64, i64, pointer
from lowtri.kernels.product import words_to_blocks
from lowtri.kernels.rows import (
    fill,
    input_row,
    interleave_input_rows,
    interleave_rows,
    padded,
    product_rows,
    round_row,
    round_up,
    transpose_in,
    widen_rows,
)
from lowtri.kernels.simd import (
    as_number,
    copy_number,
    load,
    read_int64,
    store,
    transpose,
    transpose_block,
    write_int64,
)
from lowtri.kernels.spec import QUERIES

key_bytes, slot_count = map(device_function, (abi.key_bytes, abi.slot_count))


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

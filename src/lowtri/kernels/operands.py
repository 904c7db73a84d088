"""Rows as operands of a product, in each of the four modes (:mod:`lowtri.kernels.spec`); key tiles that a thread keeps.

Operands consist of elements, or are those of tile registers (:mod:`lowtri.kernels.amx`). Their functions convert rows where necessary.
Rows that are contiguous and whole are read from the array; others are copied first, padded with zeros: padding on one side only would
not do, since 0 * NaN is NaN.

Each thread keeps the key tiles that it converted last, in slots, since neighbouring tiles of queries see mostly the same keys: tile n
is in slot ``n % slots``. The first 64-bit integers of the memory say which tile a slot has: its number among the tiles of all heads,
plus 1; or 0. A tile of queries that sees more key tiles than there are slots uses one slot, which then stays in the first cache.
"""

from __future__ import annotations

from lowtri.kernels import abi, amx
from lowtri.kernels.abi import KEYS, MOST_SLOTS
from lowtri.kernels.bfmmla import elements_to_blocks
from lowtri.kernels.device import device_function
from lowtri.kernels.rows import (
    fill,
    interleave_input_rows,
    interleave_rows,
    padded,
    round_up,
    rows_of,
    transpose_in,
    widen_rows,
)
from lowtri.kernels.simd import read_int64, write_int64
from lowtri.kernels.values import Matrix, Packed, Packing, Rows, Tokens

key_bytes = device_function(abi.key_bytes)
slot_count = device_function(abi.slot_count)


@device_function
def transposed_queries(rows, copy, target, spec):
    """At most 64 rows of an array as an operand B (elements, 64) with queries in lanes; ``copy`` is scratch for the rows."""
    columns = round_up(rows.count, 16)
    if spec.uses_amx:
        amx.transposed_queries(rows, copy, target, spec)
    elif spec.is_widened:
        widen_rows(rows, copy, rows.size, spec)
        transpose_in(Rows(copy, rows.size, 1, rows.count, rows.size), columns, target, spec)
    else:
        size = rows.size // spec.per_element
        elements = Rows(rows.at, rows.row // spec.per_element, rows.number, rows.count, size)
        transpose_in(elements, columns, target, spec)
        if spec.uses_bfmmla:
            elements_to_blocks(target, size, columns)


@device_function
def a_operand(rows, target, spec):
    """Rows of keys or values with elements along the head, the A of K Q^T; ``target`` is scratch for the rows."""
    if spec.uses_amx:
        return amx.key_rows_operand(rows, target, spec)
    if spec.is_widened:
        widen_rows(rows, target, padded(spec, rows.size), spec)
        return Matrix(target, padded(spec, rows.size), 1)
    return Matrix(rows.at, rows.row // spec.per_element, rows.number)


@device_function
def b_operand(rows, zeros, target, spec):
    """Rows of keys or values with elements along the keys, the B of P V: whole vectors, padded with 0. Not for tile registers.

    ``target`` and ``zeros`` are scratch.
    """
    if spec.packs_bf16:
        interleave_input_rows(rows, zeros, target, spec)
        return Packed(target, rows.size)
    if not spec.is_widened:
        if rows.number == 1 and rows.size % spec.lanes == 0:
            return Packed(rows.at, rows.row)
    widen_rows(rows, target, padded(spec, rows.size), spec)
    return Packed(target, padded(spec, rows.size))


@device_function
def summed_rows_operand(rows, target, spec):
    """Packed rows of numbers as B of a product that sums over rows; ``target`` is scratch, and may be the rows' own memory."""
    if not spec.packs_bf16:
        return rows.at
    interleave_rows(rows, target, spec)
    if spec.uses_amx:  # whole depths
        used, depths = (rows.count + 1) // 2, round_up(rows.count, 32) // 2
        fill(target + 4 * rows.size * used, rows.size * (depths - used), 0.0, spec)
    return target


@device_function
def finite_rows_operand(rows, memory, spec):
    """Padded rows of numbers in place of keys or values, as :func:`value_operand` has them."""
    if spec.uses_amx:
        return amx.finite_rows_operand(rows, memory, spec)
    whole = Rows(rows.at, rows.row, 1, rows.count, rows.row)
    return Packed(summed_rows_operand(whole, rows.at, spec), rows.row)


# Of the tiles that a thread keeps.


@device_function
def key_operand(call, own, keys, seen):
    """The keys as A of K Q^T; ``seen``: how many key tiles the queries see."""
    spec = call.spec
    size, tile = padded(spec, call.head_dim), whole_tile(call, keys)
    if not spec.is_widened:
        return a_operand(rows_of(call.k, call.k_strides, keys, call.head_dim, spec), own.kept_keys, spec)
    slot, is_new = slot_of(call, own.kept_keys, keys, size, seen)
    if is_new:
        a_operand(rows_of(call.k, call.k_strides, tile, call.head_dim, spec), slot, spec)
    return Matrix(slot + key_bytes(keys.first - tile.first, size, spec), size, 1)


@device_function
def value_operand(call, own, keys, seen):
    """The values as B of P V. The first key is an even number of keys after its tile's first for bf16x2; a multiple of 32 on AMX."""
    spec = call.spec
    size, tile = padded(spec, call.value_dim), whole_tile(call, keys)
    if spec.uses_amx:
        rows = rows_of(call.v, call.v_strides, tile, call.value_dim, spec)
        return amx.transposed_tile(call, rows, keys, Packing(own.kept_values, own.values, own.zeros))
    if spec.is_direct:
        return b_operand(rows_of(call.v, call.v_strides, keys, call.value_dim, spec), own.zeros, own.values, spec)
    slot, is_new = slot_of(call, own.kept_values, keys, size, seen)
    if is_new:
        b_operand(rows_of(call.v, call.v_strides, tile, call.value_dim, spec), own.zeros, slot, spec)
    return Packed(slot + key_bytes(keys.first - tile.first, size, spec), size)


@device_function
def whole_tile(call, keys):
    """The keys of the tile of which these are some."""
    first = keys.first // KEYS * KEYS
    return Tokens(keys.batch, keys.head, first, min(KEYS, call.nk - first))


@device_function
def slot_of(call, memory, keys, size, seen):
    """The slot of a key tile, one of ``seen``, with rows of ``size`` numbers: its address, and whether it is to be converted."""
    tile, tile_bytes = keys.first // KEYS, key_bytes(KEYS, size, call.spec)
    tiles_of_head = (call.nk + KEYS - 1) // KEYS
    number = (keys.batch * (call.heads // call.group) + keys.head) * tiles_of_head + tile + 1
    slots = slot_count(tile_bytes)
    slot = tile % slots if seen <= slots else 0
    is_new = read_int64(memory + 8 * slot) != number
    if is_new:
        write_int64(memory + 8 * slot, number)
    return memory + 8 * MOST_SLOTS + tile_bytes * slot, is_new


@device_function
def clear_slots(own):
    """Mark all slots as empty: the scratch memory has the tiles of an earlier run."""
    spec = own.spec
    if not spec.uses_amx:
        for slot in range(MOST_SLOTS):
            if spec.is_widened:
                write_int64(own.kept_keys + 8 * slot, 0)
            if spec.is_widened or spec.packs_bf16:
                write_int64(own.kept_values + 8 * slot, 0)

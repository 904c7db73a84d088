"""Tiles of keys and values as operands of products, converted once for several tiles of queries.

Neighbouring tiles of queries see mostly the same keys, and a thread computes them one after the other. So each thread keeps the key
tiles that it converted last, in slots: tile n is in slot ``n % slots``. The first words of the memory say which tile a slot has: its
number among the tiles of all heads, plus 1; or 0. A tile of queries that sees more key tiles than there are slots would find none of
them again; it uses one slot, which then stays in the first cache.
"""

from __future__ import annotations

from lowtri.kernels import scratch
from lowtri.kernels.device_function import by_spec, device_function
from lowtri.kernels.operands import head_operand, key_operand
from lowtri.kernels.scratch import KEYS, MOST_SLOTS
from lowtri.kernels.shared_pack import transposed_tile
from lowtri.kernels.simd import read_int64, write_int64
from lowtri.kernels.tile_output import padded

__all__ = ["clear_pack_cache", "packed_keys", "packed_values"]

key_bytes = device_function(scratch.key_bytes)
slot_count = device_function(scratch.slot_count)


@by_spec
def clear_pack_cache(spec):
    """Mark all slots as empty: the scratch memory has the tiles of an earlier run."""

    def nothing(keys, values, spec):
        pass

    def of_values(keys, values, spec):
        for slot in range(MOST_SLOTS):
            write_int64(values + 8 * slot, 0)

    def of_both(keys, values, spec):
        for slot in range(MOST_SLOTS):
            write_int64(keys + 8 * slot, 0)
            write_int64(values + 8 * slot, 0)

    return {"pairs": of_values, "widened": of_both}.get(spec.operand, nothing)


@device_function
def slot_of(memory, head, tile, tile_bytes, tiles, seen):
    """The slot of a head's key tile, one of ``seen``: its address, and whether the tile is to be converted now."""
    slots, number = slot_count(tile_bytes), head * tiles + tile + 1
    slot = tile % slots if seen <= slots else 0
    is_new = read_int64(memory + 8 * slot) != number
    if is_new:
        write_int64(memory + 8 * slot, number)
    return memory + 8 * MOST_SLOTS + tile_bytes * slot, is_new


@by_spec
def packed_keys(spec):
    """``keys`` keys from ``key0`` on as an operand with words along the head, its row step and depth step.

    Args:
        rows: address of key 0 of this head.  step: the strides of the array.  head: the number of the key/value head.
        seen: how many key tiles the queries see.  memory: the slots; on tiles, scratch for a tile's rows.
    """

    def in_place(call, rows, step, head, key0, keys, seen, memory, spec):
        return head_operand(rows + spec.input_bytes * key0 * step.n, step.n, step.d, keys, call.d, memory, spec)

    def kept(call, rows, step, head, key0, keys, seen, memory, spec):
        tile, tiles, size = key0 // KEYS, (call.nk + KEYS - 1) // KEYS, padded(spec, call.d)
        words, is_new = slot_of(memory, head, tile, key_bytes(KEYS, size, spec), tiles, seen)
        first = tile * KEYS
        if is_new:
            source, n = rows + spec.input_bytes * first * step.n, min(KEYS, call.nk - first)
            head_operand(source, step.n, step.d, n, call.d, words, spec)
        return words + key_bytes(key0 - first, size, spec), size, 1

    return kept if spec.operand == "widened" else in_place


@by_spec
def packed_values(spec):
    """The values from ``key0`` on as an operand with words along the keys, and the words of a row; the rest as in :func:`packed_keys`.

    In pairs, key0 is an even number of keys after its tile's first; on tiles, a multiple of 32.

    Args:
        zeros: a row of 0, the neighbour of an odd last key.  copy: scratch for a tile's rows, padded.
    """

    def in_place(call, rows, step, head, key0, keys, seen, zeros, copy, memory, spec):
        return key_operand(rows + spec.input_bytes * key0 * step.n, step.n, step.d, keys, call.dv, zeros, copy, spec)

    def kept(call, rows, step, head, key0, keys, seen, zeros, copy, memory, spec):
        tile, tiles, size = key0 // KEYS, (call.nk + KEYS - 1) // KEYS, padded(spec, call.dv)
        words, is_new = slot_of(memory, head, tile, key_bytes(KEYS, size, spec), tiles, seen)
        first = tile * KEYS
        if is_new:
            source, n = rows + spec.input_bytes * first * step.n, min(KEYS, call.nk - first)
            key_operand(source, step.n, step.d, n, call.dv, zeros, words, spec)
        return words + key_bytes(key0 - first, size, spec), size

    def shared(call, rows, step, head, key0, keys, seen, zeros, copy, memory, spec):
        return transposed_tile(call, rows, step, call.dv, head, key0, memory, copy, zeros, spec), 0

    return {"direct": in_place, "tiles": shared}.get(spec.operand, kept)

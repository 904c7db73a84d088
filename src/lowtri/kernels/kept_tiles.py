"""Tiles of keys and values as operands of products, converted once for several tiles of queries.

Neighbouring tiles of queries see mostly the same keys, and a thread computes them one after the other. So each thread keeps the key
tiles that it converted last, in slots: tile n is in slot ``n % slots``. The first words of the memory say which tile a slot has: its
number among the tiles of all heads, plus 1; or 0. A tile of queries that sees more key tiles than there are slots would find none of
them again; it uses one slot, which then stays in the first cache.
"""

from __future__ import annotations

from lowtri.kernels import scratch
from lowtri.kernels.device_function import by_spec, device_function
from lowtri.kernels.rows import head_operand, key_operand
from lowtri.kernels.scratch import MOST_SLOTS
from lowtri.kernels.simd import read_int64, write_int64

__all__ = ["forget_tiles", "kept_keys", "kept_values"]

key_bytes = device_function(scratch.key_bytes)
slot_count = device_function(scratch.slot_count)


@by_spec
def forget_tiles(spec):
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

    return {"direct": nothing, "pairs": of_values, "widened": of_both}[spec.rows]


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
def kept_keys(spec):
    """The keys from ``key0`` on as an operand with words along the head, its row step and depth step, in words.

    Args:
        rows: address of key 0 of this head.  step: the strides of the array.  head: the number of the key/value head.
        tile_keys: keys in a tile.  nk, size: keys of the head, numbers in a row.  seen: how many key tiles the queries see.
        memory: the slots.
    """

    def in_place(rows, step, head, key0, tile_keys, nk, size, seen, memory, spec):
        return head_operand(rows + spec.input_bytes * key0 * step.n, step.n, step.d, tile_keys, size, memory, spec)

    def kept(rows, step, head, key0, tile_keys, nk, size, seen, memory, spec):
        tile, tiles = key0 // tile_keys, (nk + tile_keys - 1) // tile_keys
        words, is_new = slot_of(memory, head, tile, key_bytes(tile_keys, size, spec), tiles, seen)
        first = tile * tile_keys
        if is_new:
            source, keys = rows + spec.input_bytes * first * step.n, min(tile_keys, nk - first)
            head_operand(source, step.n, step.d, keys, size, words, spec)
        return words + key_bytes(key0 - first, size, spec), size, 1

    return kept if spec.rows == "widened" else in_place


@by_spec
def kept_values(spec):
    """The values from ``key0`` on as an operand with words along the keys; the rest as in :func:`kept_keys`.

    In pairs, key0 is an even number of keys after its tile's first. ``zeros``: a row of 0, the neighbour of an odd last key.
    """

    def in_place(rows, step, head, key0, tile_keys, nk, size, seen, zeros, memory, spec):
        return rows + spec.input_bytes * key0 * step.n, step.n, step.d

    def kept(rows, step, head, key0, tile_keys, nk, size, seen, zeros, memory, spec):
        tile, tiles = key0 // tile_keys, (nk + tile_keys - 1) // tile_keys
        words, is_new = slot_of(memory, head, tile, key_bytes(tile_keys, size, spec), tiles, seen)
        first = tile * tile_keys
        if is_new:
            source, keys = rows + spec.input_bytes * first * step.n, min(tile_keys, nk - first)
            key_operand(source, step.n, step.d, keys, size, zeros, words, spec)
        return words + key_bytes(key0 - first, size, spec), size, 1

    return in_place if spec.rows == "direct" else kept

"""Transposed tiles of keys or values, shared by all threads: each is packed once, by the first thread that needs it.

There is one copy for all key/value heads. A tile has a state: 0 not packed, 1 being packed, 2 packed. A thread that needs a tile while
another one packs it packs a copy of its own, so that no thread ever waits. Memory of tiles that no query sees is never touched.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from lowtri.kernels.device_function import device_function
from lowtri.kernels.scratch import KEYS
from lowtri.kernels.simd import I64, pointer
from lowtri.kernels.tile_operands import copy_rows, pack_transposed, whole, whole_16, zero_non_finite

__all__ = ["tile_places", "transposed_tile"]

_PACKING, _PACKED = ir.Constant(I64, 1), ir.Constant(I64, 2)


@intrinsic
def is_packed(typing, state):
    """Whether the tile is packed; if so, this thread sees its numbers."""

    def emit(c, b, s, a):
        return b.icmp_unsigned("==", b.load_atomic(pointer(b, a[0], I64), "acquire", 8), _PACKED)

    return types.boolean(types.intp), emit


@intrinsic
def claim(typing, state):
    """Whether this thread is the one that packs the tile."""

    def emit(c, b, s, a):
        result = b.cmpxchg(pointer(b, a[0], I64), ir.Constant(I64, 0), _PACKING, "acq_rel", "acquire")
        return b.extract_value(result, 1)

    return types.boolean(types.intp), emit


@intrinsic
def publish(typing, state):
    """Mark the tile as packed, for all threads."""

    def emit(c, b, s, a):
        b.store_atomic(_PACKED, pointer(b, a[0], I64), "release", 8)
        return c.get_dummy_value()

    return types.void(types.intp), emit


@device_function
def tile_places(call, memory, head, columns):
    """The memory that :func:`transposed_tile` works in, for one key/value head."""
    offsets, first_tile = call.offsets, head * ((call.nk + KEYS - 1) // KEYS)
    states, packed = offsets.packed_states + 8 * first_tile, offsets.packed + 2 * KEYS * columns * first_tile
    own, copy = memory + offsets.packed_tile, memory + offsets.copy
    return call.scratch + states, call.scratch + packed, own, copy, memory + offsets.row_pairs, memory + offsets.zeros


@device_function
def transposed_tile(rows, step, size, nk, key0, keys, places, non_finite, spec):
    """The transposed rows from key0 on, in blocks of 32 keys: (keys / 32, whole_16(size), 32).

    Args:
        rows: address of key 0 of this head.  step: the strides of the array.
        places: addresses of this head's states and packed tiles, and of the thread's own memory: a tile, a copy of its rows,
            16 rows of pairs, a row of zeros.
        non_finite: pack only these keys, in the thread's own memory, with 0 in place of the rows that are not finite.
    """
    states, shared, own, copy, pairs, zeros = places
    tile, columns = key0 // KEYS, whole_16(size)
    state, packed = states + 8 * tile, shared + 2 * KEYS * columns * tile
    first, n = tile * KEYS, min(KEYS, nk - tile * KEYS)
    packs, claimed = non_finite or not is_packed(state), False
    if non_finite:
        first, n = key0, keys
    source, row, number, row_size = rows + 2 * first * step.n, step.n, step.d, size
    if non_finite:
        copy_rows(source, row, number, keys, size, copy, keys, spec)
        zero_non_finite(copy, keys, size, spec)
        source, row, number, row_size = copy, whole(size), 1, columns
    elif packs:
        claimed = claim(state)
    if packs:
        packed = packed if claimed else own
        pack_transposed(source, row, number, n, row_size, copy, pairs, zeros, packed, spec)
        if claimed:
            publish(state)
    return packed + 2 * (key0 - first) * columns

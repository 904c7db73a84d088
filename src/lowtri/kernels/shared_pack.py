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
from lowtri.kernels.tile_operands import pack_transposed, product_rows

__all__ = ["transposed_tile"]

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
def transposed_tile(call, rows, step, size, head, key0, own, copy, zeros, spec):
    """The address of the transposed rows from ``key0`` on, in blocks of 32 keys: (keys / 32, product_rows(size), 32).

    Args:
        rows: address of key 0 of this head.  step: the strides of the array.  head: the number of the key/value head.
        own, copy: this thread's memory for a tile, and for a copy of its rows.  zeros: address of 32 zeros.
    """
    tile, tiles, columns = key0 // KEYS, (call.nk + KEYS - 1) // KEYS, product_rows(size, spec)
    state = call.scratch + call.offsets.packed_states + 8 * (head * tiles + tile)
    packed = call.scratch + call.offsets.packed + 2 * KEYS * columns * (head * tiles + tile)
    first = tile * KEYS
    if not is_packed(state):
        claimed = claim(state)
        if not claimed:
            packed = own
        source, n = rows + 2 * first * step.n, min(KEYS, call.nk - first)
        pack_transposed(source, step.n, step.d, n, size, copy, zeros, packed, spec)
        if claimed:
            publish(state)
    return packed + 2 * (key0 - first) * columns

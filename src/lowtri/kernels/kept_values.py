"""The values of key tiles as an operand of a product, converted once for several tiles of queries.

Neighbouring tiles of queries see mostly the same keys, and a thread computes them one after the other. So each thread keeps the key
tiles that it converted last: slot ``tile % slots`` has the number of its key tile, among those of all heads, plus 1; 0 if it is empty.
"""

from __future__ import annotations

from lowtri.kernels.device_function import by_spec, device_function
from lowtri.kernels.rows import key_operand
from lowtri.kernels.simd import read_int64, write_int64
from lowtri.kernels.spec import KernelSpec

__all__ = ["forget_values", "kept_scratch", "value_operand"]

_BYTES = 2**19  # half of a second cache: 42 tiles of 96 keys of bf16, Dv 64
_MOST_SLOTS = 64


@device_function
def slot_bytes(size, dv, spec):
    """Of a key tile of ``size`` keys."""
    return spec.number_bytes // spec.per_word * size * dv


@device_function
def slot_count(bytes_of_slot):
    return max(1, min(_MOST_SLOTS, _BYTES // bytes_of_slot))


def kept_scratch(spec: KernelSpec, size: int, dv: int) -> dict[str, int]:
    """Bytes of the parts that :func:`value_operand` works in, for key tiles of ``size`` keys."""
    if spec.rows == "direct":
        return {"kept_tiles": 0, "kept_values": 0}
    tile = slot_bytes.py_func(size, dv, spec)
    return {"kept_tiles": 8 * _MOST_SLOTS, "kept_values": slot_count.py_func(tile) * tile}


@by_spec
def forget_values(spec):
    """Mark all slots as empty: the scratch memory has the tiles of an earlier run."""

    def direct(tiles, spec):
        pass

    def kept(tiles, spec):
        for slot in range(_MOST_SLOTS):
            write_int64(tiles + 8 * slot, 0)

    return direct if spec.rows == "direct" else kept


@by_spec
def value_operand(spec):
    """The values from ``key0`` on as an operand with words along the keys: its address, row step and depth step, in words.

    Args:
        v: address of key 0 of this head.  step: the strides of the array.  head: the number of the key/value head.
        size: keys in a tile. In pairs, key0 - (key0 // size) * size is even.
        tiles, values: addresses of the thread's slots.  zeros: a row of 0, the neighbour of an odd last key.
    """

    def direct(v, step, head, key0, size, nk, dv, zeros, tiles, values, spec):
        return v + spec.input_bytes * key0 * step.n, step.n, step.d

    def kept(v, step, head, key0, size, nk, dv, zeros, tiles, values, spec):
        tile_bytes, tile = slot_bytes(size, dv, spec), key0 // size
        slot, number = tile % slot_count(tile_bytes), head * ((nk + size - 1) // size) + tile + 1
        first, words = tile * size, values + tile_bytes * slot
        if read_int64(tiles + 8 * slot) != number:
            source, keys = v + spec.input_bytes * first * step.n, min(size, nk - first)
            key_operand(source, step.n, step.d, keys, dv, zeros, words, spec)
            write_int64(tiles + 8 * slot, number)
        return words + slot_bytes(key0 - first, dv, spec), dv, 1

    return direct if spec.rows == "direct" else kept

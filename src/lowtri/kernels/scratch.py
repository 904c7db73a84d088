"""The scratch memory of each kernel, in bytes, and the sizes that a kernel and its callers must agree on. Plain integers: no compiler.

Kernels use the same functions: ``device_function(whole)`` compiles one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from lowtri.kernels.spec import HALF_ROW, QUERIES, KernelSpec

__all__ = [
    *("CACHE_KEYS", "KEYS", "MOST_SLOTS", "SCRATCH"),
    *("decode_scratch", "decode_shared_scratch", "header_size", "key_bytes", "key_rows", "padded"),
    *("packed_shared_scratch", "slot_count", "whole", "whole_16"),
]

KEYS = 96  # keys in a tile: 24 KB of scores stay in L1, and 96 is a multiple of the register tile's 6 rows
CACHE_KEYS = 128  # keys in a block of online softmax, for few queries
MOST_SLOTS = 64  # of tiles that a thread keeps, see kept_tiles
_SLOT_BYTES = 2**19  # half of a second cache: 42 tiles of 96 keys of bf16, D 64


def whole(size: int) -> int:
    """A size rounded up to whole depths of 32."""
    return (size + 31) & -32


def whole_16(size: int) -> int:
    """A size rounded up to whole tiles of 16 rows."""
    return (size + 15) & -16


def key_bytes(keys: int, size: int, spec: KernelSpec) -> int:
    """Of an operand of so many keys, rows of ``size`` numbers."""
    return spec.number_bytes // spec.per_word * keys * size


def slot_count(slot_bytes: int) -> int:
    """How many tiles of so many bytes a thread keeps."""
    return max(1, min(MOST_SLOTS, _SLOT_BYTES // slot_bytes))


def header_size(rows: int) -> int:
    """Numbers before the outputs (rows, Dv) in the results of a part: shifts and sums, (rows,) each, padded to whole vectors."""
    return -(-2 * rows // 16) * 16


def padded(spec: KernelSpec, size: int) -> int:
    """A head size rounded up to what a packed row of Q, dO, dK or dV takes: whole vectors, or whole blocks of 32 columns."""
    return whole(size) if spec.rows == "tiles" else -(-size // spec.lanes) * spec.lanes


def key_rows(spec: KernelSpec, nk: int) -> int:
    """The rows of dK and dV."""
    return whole_16(nk) if spec.rows == "tiles" else nk


def _forward(spec: KernelSpec, d: int, dv: int) -> dict[str, int]:
    row, number = spec.row_bytes, spec.number_bytes
    direct, pairs = spec.rows == "direct", spec.rows == "pairs"
    return {
        "queries": row * d,
        "scores": row * KEYS,
        "output": row * dv,
        "shift": row,
        "total": row,
        "weights": row * KEYS // 2 if pairs else 0,
        "values": number * KEYS * dv,  # also a copy with 0 in place of non-finite rows
        "zeros": number * dv if pairs else 0,
        "rows": 0 if direct else row * max(d, dv),
        "kept_keys": _slots(spec, d) if spec.rows == "widened" else 0,
        "kept_values": 0 if direct else _slots(spec, dv),
    }


def _slots(spec: KernelSpec, size: int) -> int:
    """Of the tiles that a thread keeps, and of their numbers."""
    slot_bytes = key_bytes(KEYS, size, spec)
    return 8 * MOST_SLOTS + slot_bytes * slot_count(slot_bytes)


def _forward_tiles(spec: KernelSpec, d: int, dv: int) -> dict[str, int]:
    row, d_whole, dv_whole = spec.row_bytes, padded(spec, d), padded(spec, dv)
    return {
        "queries": row * d_whole // 2,
        "scores": HALF_ROW * KEYS,
        "pairs": HALF_ROW * KEYS // 2,
        "output": row * dv_whole,
        "shift": row,
        "total": row,
        "rows": max(row * dv, 2 * QUERIES * d_whole),  # the output's rows; before that, the queries' copy
        "keys": 2 * KEYS * d_whole,
        "finite_values": 4 * KEYS * dv,
        "weights": row * KEYS,
        **_packing(dv),
        "tile_configuration": 128,
    }


def _packing(size: int) -> dict[str, int]:
    """What :func:`lowtri.kernels.shared_pack.transposed_tile` works in."""
    row = whole(size)
    return {"packed_tile": 2 * KEYS * row, "copy": 2 * KEYS * row, "row_pairs": 4 * 16 * row, "zeros": 4 * row}


def _backward(spec: KernelSpec, d: int, dv: int) -> dict[str, int]:
    row, number, pairs = spec.row_bytes, spec.number_bytes, spec.rows == "pairs"
    d_rows, dv_rows = number * QUERIES * padded(spec, d), number * QUERIES * padded(spec, dv)
    return {
        "queries": row * d,
        "d_output": row * dv,
        "dq": row * d,
        "scores": row * KEYS,
        "ds": row * KEYS,
        "d_softcap": row * KEYS,  # in pairs also dS for dQ
        "shift": row,
        "shift_low": row,
        "delta": row,
        "q_rows": d_rows,
        "d_output_rows": dv_rows,
        "finite_q": d_rows,
        "finite_d_output": dv_rows,
        "keys": number * KEYS * padded(spec, d),
        "values": number * KEYS * dv if spec.rows == "widened" else 0,
        "q_pairs": d_rows // 2 if pairs else 0,
        "d_output_pairs": dv_rows // 2 if pairs else 0,
        "zeros": number * padded(spec, d) if pairs else 0,
    }


def _backward_tiles(spec: KernelSpec, d: int, dv: int) -> dict[str, int]:
    row, d_whole, dv_whole = spec.row_bytes, padded(spec, d), padded(spec, dv)
    most = max(d_whole, dv_whole)
    return {
        "queries": row * d_whole // 2,
        "d_output": row * dv_whole // 2,
        "dq": row * d_whole,
        "scores": row * KEYS,
        "ds": row * KEYS,
        "ds_pairs": row * KEYS // 2,
        "d_softcap": row * KEYS,
        "shift": row,
        "delta": row,
        "q_rows": 2 * QUERIES * d_whole,
        "d_output_rows": 2 * QUERIES * dv_whole,
        "q_pairs": 2 * QUERIES * d_whole,
        "d_output_pairs": 2 * QUERIES * dv_whole,
        "finite_rows": 2 * QUERIES * most,
        "finite_q_pairs": 2 * QUERIES * d_whole,
        "finite_d_output_pairs": 2 * QUERIES * dv_whole,
        "wide_rows": 4 * max(KEYS, QUERIES) * most,  # rows in float32, for the non-finite path
        "keys": 2 * KEYS * d_whole,
        "values": 2 * KEYS * dv_whole,
        **_packing(max(d, dv)),
        "tile_configuration": 128,
    }


# By kernel: bytes of each part of the memory that one thread works in, from (spec, d, dv).
SCRATCH: Mapping[str, Callable[[KernelSpec, int, int], dict[str, int]]] = {
    "forward": _forward,
    "forward_tiles": _forward_tiles,
    "backward": _backward,
    "backward_tiles": _backward_tiles,
}


def packed_shared_scratch(heads: int, nk: int, size: int) -> dict[str, int]:
    """Bytes that the threads share on tiles, for all key/value heads: the transposed rows, and the states of their tiles."""
    tiles = heads * -(-nk // KEYS)
    return {"packed": 2 * tiles * KEYS * whole_16(size), "packed_states": 8 * tiles}


def decode_scratch(spec: KernelSpec, rows: int, d: int, dv: int) -> dict[str, int]:
    """Bytes of each part of the memory that one thread works in, for ``rows`` queries of a group's heads."""
    pairs = spec.rows == "pairs"
    return {
        "scores": 4 * rows * CACHE_KEYS,
        "weights": 2 * rows * CACHE_KEYS if pairs else 0,
        "zeros": 4 * dv if pairs else 0,
        "queries": 4 * rows * d // spec.per_word,
    }


def decode_shared_scratch(groups: int, parts: int, rows: int, dv: int) -> dict[str, int]:
    """Bytes that the threads share: for each group of heads a counter, which begins at 0, and the results of each part."""
    return {"joined": 8 * groups, "results": 4 * groups * parts * (header_size(rows) + rows * dv)}

"""The scratch memory of each kernel, in bytes, and the sizes that a kernel and its callers must agree on. Plain integers: no compiler.

Kernels use the same functions: ``device_function(round_up)`` compiles one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from lowtri.kernels.spec import QUERIES, KernelSpec

__all__ = [
    *("CACHE_BLOCK", "CACHE_KEYS", "CACHE_ROWS", "CACHE_SCORES", "KEYS", "MOST_SLOTS"),
    *("MULTIPLY_DEPTH", "MULTIPLY_ROWS", "SCRATCH"),
    *("decode_scratch", "decode_shared_scratch", "header_size", "key_bytes", "key_rows", "padded", "place_of_row"),
    *("packed_shared_scratch", "product_rows", "round_up", "slot_count"),
]

KEYS = 96  # keys in a tile: 24 KB of scores stay in L1, and 96 is a multiple of the register tile's 6 rows
CACHE_KEYS = 256  # the cache is split between threads in multiples of these keys
CACHE_BLOCK = 1024  # keys in a block of online softmax, for few queries: at most
CACHE_SCORES = (
    CACHE_BLOCK + 16
)  # numbers in a row of its scores: no power of two, so that rows do not evict one another
CACHE_ROWS = 8  # rows of queries whose maxima and sums are computed at once
MOST_SLOTS = 64  # of tiles that a thread keeps, see kept_tiles
# The product that measures the ceiling: with 64 columns A takes 6 KB, B 16 KB and C 6 KB, which fit into 32 KB together.
MULTIPLY_ROWS, MULTIPLY_DEPTH = 24, 64
_SLOT_BYTES = 2**19  # half of a second cache: 42 tiles of 96 keys of bf16, D 64


def round_up(x: int, n: int) -> int:
    """The least multiple of n that is at least x."""
    return (x + n - 1) // n * n


def product_rows(size: int, spec: KernelSpec) -> int:
    """The rows of the output (head size, queries), or of dQ, that a product on tiles writes: whole registers of 16."""
    return (size + 15) & -16 if spec.on_tiles else size


def key_bytes(keys: int, size: int, spec: KernelSpec) -> int:
    """Of an operand of so many keys, rows of ``size`` numbers."""
    return spec.number_bytes // spec.per_word * keys * size


def slot_count(slot_bytes: int) -> int:
    """How many tiles of so many bytes a thread keeps."""
    return max(1, min(MOST_SLOTS, _SLOT_BYTES // slot_bytes))


def header_size(rows: int) -> int:
    """Numbers before the outputs (rows, Dv) in the results of a part: shifts and sums, each a vector for every eight rows."""
    return 2 * 16 * -(-rows // CACHE_ROWS)


def place_of_row(row: int) -> int:
    """Of a row's number in these vectors."""
    return row // CACHE_ROWS * 16 + row % CACHE_ROWS


def padded(spec: KernelSpec, size: int) -> int:
    """A head size rounded up to what a packed row takes: whole vectors, or whole blocks of 32 columns. Kernels use it, too."""
    block = 32 if spec.on_tiles else spec.lanes
    return (size + block - 1) // block * block


def key_rows(spec: KernelSpec, nk: int) -> int:
    """The rows of dK and dV."""
    return round_up(nk, 16) if spec.on_tiles else nk


def _forward(spec: KernelSpec, d: int, dv: int) -> dict[str, int]:
    row, number, d_padded, dv_padded = spec.row_bytes, spec.number_bytes, padded(spec, d), padded(spec, dv)
    in_pairs, widened = spec.per_word == 2, spec.operand == "widened"
    kept_values = 0 if spec.operand == "direct" else _slots(spec, dv_padded)
    return {
        "queries": row * d_padded // spec.per_word,
        "scores": spec.unit_row * KEYS,
        "output": row * dv_padded,
        "shift": row,
        "total": row,
        "weights": spec.unit_row * KEYS // 2 if in_pairs else 0,
        "values": number * KEYS * dv_padded,  # a copy with 0 in place of non-finite rows; rows to be packed on tiles
        "zeros": number * round_up(dv, 32) if in_pairs else 0,
        "rows": 0 if spec.operand == "direct" else row * max(d_padded, dv_padded),
        "kept_keys": 2 * KEYS * d_padded if spec.on_tiles else _slots(spec, d_padded) if widened else 0,
        "kept_values": 2 * KEYS * product_rows(dv, spec) if spec.on_tiles else kept_values,
        "tile_configuration": 128 * spec.on_tiles,
    }


def _slots(spec: KernelSpec, size: int) -> int:
    """Of the tiles that a thread keeps, and of their numbers."""
    slot_bytes = key_bytes(KEYS, size, spec)
    return 8 * MOST_SLOTS + slot_bytes * slot_count(slot_bytes)


def _backward(spec: KernelSpec, d: int, dv: int) -> dict[str, int]:
    row, number, pairs = spec.row_bytes, spec.number_bytes, spec.per_word == 2
    d_rows, dv_rows = number * QUERIES * padded(spec, d), number * QUERIES * padded(spec, dv)
    values = 2 * KEYS * max(padded(spec, d), padded(spec, dv)) if spec.on_tiles else 0
    return {
        "queries": d_rows // spec.per_word,
        "d_output": dv_rows // spec.per_word,
        "dq": row * padded(spec, d),
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
        "values": number * KEYS * padded(spec, dv) if spec.operand == "widened" else values,
        "q_pairs": d_rows // 2 if pairs else 0,
        "d_output_pairs": dv_rows // 2 if pairs else 0,
        "zeros": number * round_up(d, 32) if pairs else 0,
        "packed_keys": 2 * KEYS * product_rows(d, spec) * spec.on_tiles,
        "tile_configuration": 128 * spec.on_tiles,
    }


# By kernel: bytes of each part of the memory that one thread works in, from (spec, d, dv).
SCRATCH: Mapping[str, Callable[[KernelSpec, int, int], dict[str, int]]] = {"forward": _forward, "backward": _backward}


def packed_shared_scratch(spec: KernelSpec, heads: int, nk: int, size: int) -> dict[str, int]:
    """Bytes that the threads share on tiles, for all key/value heads: the transposed rows, and the states of their tiles."""
    tiles = heads * -(-nk // KEYS) * spec.on_tiles
    return {"packed": 2 * tiles * KEYS * product_rows(size, spec), "packed_states": 8 * tiles}


def decode_scratch(spec: KernelSpec, rows: int, d: int, dv: int) -> dict[str, int]:
    """Bytes of each part of the memory that one thread works in, for ``rows`` queries of a group's heads."""
    pairs = spec.operand == "pairs"
    return {
        "scores": 4 * rows * CACHE_SCORES,
        "weights": 2 * rows * CACHE_SCORES if pairs else 0,
        "zeros": 4 * dv if pairs else 0,
        "queries": 4 * -(-rows // 4) * 4 * d // spec.per_word,  # in blocks of four
        "partial": 64 * (CACHE_ROWS + 1),
    }


def decode_shared_scratch(groups: int, parts: int, rows: int, dv: int) -> dict[str, int]:
    """Bytes that the threads share: for each group of heads a counter, which begins at 0, and the results of each part."""
    return {"parts_done": 8 * groups, "results": 4 * groups * parts * (header_size(rows) + rows * dv)}

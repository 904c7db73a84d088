"""The kernels' binary interface: the record that a launch writes and a kernel reads, and each kernel's scratch memory.

A record is a NumPy structured dtype. Its first fields change with each run: two counters, the address of the scratch memory and the
addresses of the arrays. The others are written once, when a call is prepared: sizes, strides in elements, options, the plan, and the
offsets of the parts of the scratch memory. Kernels read fields by name (:mod:`lowtri.kernels.device`). No compiler takes part here;
kernels compile the functions of sizes, too.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np

from lowtri.kernels.isa import Baseline
from lowtri.kernels.spec import QUERIES, KernelSpec

Sizes: TypeAlias = Mapping[str, Any]  # the prepared fields of a call, by name
Parts: TypeAlias = dict[str, int]  # the bytes of each part of a scratch memory

KEYS = 96  # keys in a tile: 24 KB of scores stay in L1, and 96 is a multiple of the register block's 6 rows
CACHE_KEYS = 256  # the cache is split between threads in multiples of these keys
CACHE_BLOCK = 1024  # keys in a block of online softmax, for few queries: at most
# Numbers in a row of its scores: no power of two, so that rows do not evict one another.
CACHE_SCORES = CACHE_BLOCK + 16
CACHE_ROWS = 8  # rows of queries whose maxima and sums are computed at once
MOST_SLOTS = 64  # of tiles that a thread keeps, see kernels/operands.py
# The product that measures the ceiling: with 64 columns A takes 6 KB, B 16 KB and C 6 KB, which fit into 32 KB together.
MULTIPLY_ROWS = 24
MULTIPLY_DEPTH = 64
_SLOT_BYTES = 2**19  # half of a second cache: 42 tiles of 96 keys of bf16, D 64

COUNTER = np.dtype([("count", np.int64)])  # threads of the team increment it; a run begins at 0


def _integers(*names: str) -> np.dtype[Any]:
    return np.dtype([(name, np.int64) for name in names])


STRIDES = _integers("b", "h", "n", "d")  # along (B, H, N, D), in numbers
BROADCAST = _integers("b", "h", "q", "k")  # along (B, Hq, Nq, Nk), 0 along broadcast axes
PARTIAL_SUMS = _integers("part", "b", "h", "q", "k")  # the same, and from the sums of one part to the next part's
# Of dK or dV: strides; how many rows, and numbers in a row, with padding.
KEY_SUMS = _integers("b", "h", "n", "rows", "size")
# Of a part of the queries in the backward: where its rows begin and end in ``order``; the copy of dK and dV that it adds to: its key
# tiles, its number, and where its dK and dV begin in ``copies``, in numbers. Copy 0 is dk and dv themselves, with all key tiles.
PART = _integers("first", "last", "first_tile", "last_tile", "copy", "dk", "dv")
# Of masks.plan.Plan.
PLAN = _integers("rows", "mask_index", "mask_index_b", "mask_index_h", "row_start", "runs", "tile_bits", "bits")
OPTIONS = np.dtype([("scale", np.float64), ("softcap", np.float64)])  # softcap 0: none
# The addresses of the positions of queries, int64, and of the words of keys, uint32 (:mod:`lowtri.ops.dropout`), with the steps from
# one row of the batch to the next; 0: no dropout. Then the greatest draw that drops, the share of the weights that are kept, and what
# these are multiplied by.
DROPOUT = np.dtype(
    [
        *((name, np.int64) for name in ("q_positions", "q_positions_b", "key_words", "key_words_b", "last_dropped")),
        *((name, np.float64) for name in ("share", "scale")),
    ]
)


@dataclass(frozen=True, eq=False)
class Abi:
    """A kernel's record.

    Attributes:
        addresses: the arrays of a run; the address is 0 if the call does not have the array. ``seed`` is the number itself.
        fields: the fields that are written when a call is prepared, each an int64 or a record of numbers.
        thread, shared: the parts of the scratch memory of one thread, and those that all threads share.
        zeros: the shared part that begins at 0 in each run.
    """

    name: str
    addresses: tuple[str, ...]
    fields: Mapping[str, Any]
    thread: Callable[[KernelSpec, Sizes], Parts] = lambda spec, sizes: {}
    shared: Callable[[KernelSpec, Sizes], Parts] = lambda spec, sizes: {}
    zeros: str = ""

    @cached_property
    def dtype(self) -> np.dtype[Any]:
        any_spec, group = KernelSpec("float32", "direct", Baseline()), Counter(group=1)
        parts = [*self.thread(any_spec, group), *self.shared(any_spec, group)]
        run = [(name, np.int64) for name in ("scratch", *self.addresses)]
        prepared = [("tasks", np.int64), ("thread_bytes", np.int64), *self.fields.items()]
        offsets = [("offsets", _integers(*parts))] if parts else []
        return np.dtype([("next_task", COUNTER), ("next_thread", COUNTER), *run, *prepared, *offsets])

    @cached_property
    def run_format(self) -> struct.Struct:
        """The fields that each run writes, at the record's start: two counters, the scratch memory, the addresses."""
        return struct.Struct(f"{3 + len(self.addresses)}q")

    @cached_property
    def prepared_fields(self) -> dict[str, tuple[str, ...]]:
        """The other fields: each name, with the names inside it if it is a record of numbers."""
        names = (self.dtype.names or ())[3 + len(self.addresses) :]
        return {name: self.dtype[name].names or () for name in names}

    def record_bytes(self, values: Mapping[str, Any]) -> bytes:
        """The bytes of the prepared fields, each given by its name.

        Raises:
            KeyError: if a field has no value, or if there is no field of a value's name.
        """
        record = np.zeros((), self.dtype)
        for name, parts in self.prepared_fields.items():
            value = values[name]
            record[name] = tuple(value[part] for part in parts) if parts else value
            if parts and len(value) != len(parts):
                raise KeyError(f"{self.name}: {name} has the fields {parts}, not {tuple(value)}")
        if len(values) != len(self.prepared_fields):
            raise KeyError(f"{self.name}: the record has no fields {sorted(set(values) - set(self.prepared_fields))}")
        return record.tobytes()[self.run_format.size :]

    def layout(self, spec: KernelSpec, sizes: Sizes, threads: int) -> tuple[dict[str, Any], int, tuple[int, int]]:
        """The layout of the scratch memory.

        Returns:
            The fields ``thread_bytes`` and ``offsets``; its size; and the offset and the size of the part that begins at 0.
        """
        offsets, end = {}, 0
        shared = self.shared(spec, sizes)
        for name, size in self.thread(spec, sizes).items():
            offsets[name], end = end, end + aligned(size)
        thread_bytes = end
        end *= threads
        for name, size in shared.items():
            offsets[name], end = end, end + aligned(size)
        fields: dict[str, Any] = {"thread_bytes": thread_bytes}
        if offsets:
            fields["offsets"] = offsets
        return fields, end, (offsets.get(self.zeros, 0), shared.get(self.zeros, 0))


# Sizes, on both sides.


def round_up(x: int, n: int) -> int:
    """The least multiple of n that is at least x."""
    return (x + n - 1) // n * n


def aligned(size: int) -> int:
    """Rounded up to whole cache lines."""
    return round_up(size, 64)


def padded(spec: KernelSpec, size: int) -> int:
    """A head size rounded up to what a packed row takes: whole vectors, or whole blocks of 32 columns."""
    block = 32 if spec.uses_amx else spec.lanes
    return (size + block - 1) // block * block


def product_rows(size: int, spec: KernelSpec) -> int:
    """The rows of the output (head size, queries), or of dQ, that a product on AMX writes: whole registers of 16."""
    return (size + 15) & -16 if spec.uses_amx else size


def key_rows(spec: KernelSpec, nk: int) -> int:
    """The rows of dK and dV."""
    return round_up(nk, 16) if spec.uses_amx else nk


def key_bytes(keys: int, size: int, spec: KernelSpec) -> int:
    """Of an operand of so many keys, rows of ``size`` numbers."""
    return spec.number_bytes // spec.per_element * keys * size


def slot_count(slot_bytes: int) -> int:
    """How many tiles of so many bytes a thread keeps."""
    return max(1, min(MOST_SLOTS, _SLOT_BYTES // slot_bytes))


def header_size(rows: int) -> int:
    """Numbers before the outputs (rows, Dv) in the results of a part: shifts and sums, each a vector for every eight rows."""
    return 2 * 16 * -(-rows // CACHE_ROWS)


def place_of_row(row: int) -> int:
    """Of a row's number in these vectors."""
    return row // CACHE_ROWS * 16 + row % CACHE_ROWS


_SIZES = {name: np.int64 for name in ("batch", "heads", "group", "nq", "nk", "head_dim", "value_dim")}
_INPUTS = {"k_strides": STRIDES, "v_strides": STRIDES, "q_strides": STRIDES, "bias_strides": BROADCAST}


def _dropout() -> Parts:
    return {"query_words": 8 * QUERIES, "kept": 8 * KEYS}


def _kv_heads(sizes: Sizes) -> int:
    return int(sizes["batch"] * sizes["heads"] // sizes["group"])


def _slots(spec: KernelSpec, size: int) -> int:
    """Of the tiles that a thread keeps, and of their numbers."""
    slot_bytes = key_bytes(KEYS, size, spec)
    return 8 * MOST_SLOTS + slot_bytes * slot_count(slot_bytes)


def _transposed_tiles(size: str) -> Callable[[KernelSpec, Sizes], Parts]:
    """What threads share on AMX, for all key/value heads: transposed rows of V or K, and the states of their tiles."""

    def shared(spec: KernelSpec, sizes: Sizes) -> Parts:
        tiles = _kv_heads(sizes) * -(-sizes["nk"] // KEYS) * spec.uses_amx
        return {"packed": 2 * tiles * KEYS * product_rows(sizes[size], spec), "packed_states": 8 * tiles}

    return shared


def _forward(spec: KernelSpec, sizes: Sizes) -> Parts:
    row, number = spec.row_bytes, spec.number_bytes
    d_padded, dv_padded = padded(spec, sizes["head_dim"]), padded(spec, sizes["value_dim"])
    if spec.uses_amx:
        kept_keys = 2 * KEYS * d_padded
        kept_values = 2 * KEYS * product_rows(sizes["value_dim"], spec)
    else:
        kept_keys = _slots(spec, d_padded) if spec.is_widened else 0
        kept_values = 0 if spec.is_direct else _slots(spec, dv_padded)
    return {
        "queries": row * d_padded // spec.per_element,
        "scores": spec.step_row_bytes * KEYS,
        "output": row * dv_padded,
        "shift": row,
        "total": row,
        "weights": spec.step_row_bytes * KEYS // 2 if spec.packs_bf16 else 0,
        "values": number * KEYS * dv_padded,  # a copy with 0 in place of non-finite rows; rows to be packed for AMX
        "zeros": number * round_up(sizes["value_dim"], 32) if spec.packs_bf16 else 0,
        "rows": 0 if spec.is_direct else row * max(d_padded, dv_padded),
        "kept_keys": kept_keys,
        "kept_values": kept_values,
        **_dropout(),
        "tile_configuration": 128 * spec.uses_amx,
    }


def _backward(spec: KernelSpec, sizes: Sizes) -> Parts:
    row, number = spec.row_bytes, spec.number_bytes
    d_padded, dv_padded = padded(spec, sizes["head_dim"]), padded(spec, sizes["value_dim"])
    d_rows, dv_rows = number * QUERIES * d_padded, number * QUERIES * dv_padded
    values = 2 * KEYS * max(d_padded, dv_padded) if spec.uses_amx else 0
    return {
        "queries": d_rows // spec.per_element,
        "d_output": dv_rows // spec.per_element,
        "dq": row * d_padded,
        "scores": row * KEYS,
        "ds": row * KEYS,
        "d_softcap": row * KEYS,  # of bf16 also dS for dQ
        "shift": row,
        "shift_residual": row,
        "delta": row,
        "q_rows": d_rows,
        "d_output_rows": dv_rows,
        "finite_q": d_rows,
        "finite_d_output": dv_rows,
        "keys": number * KEYS * d_padded,
        "values": number * KEYS * dv_padded if spec.is_widened else values,
        "q_pairs": d_rows // 2 if spec.packs_bf16 else 0,
        "d_output_pairs": dv_rows // 2 if spec.packs_bf16 else 0,
        "zeros": number * round_up(sizes["head_dim"], 32) if spec.packs_bf16 else 0,
        "packed_keys": 2 * KEYS * product_rows(sizes["head_dim"], spec) * spec.uses_amx,
        **_dropout(),
        "tile_configuration": 128 * spec.uses_amx,
    }


def _weights(spec: KernelSpec, sizes: Sizes) -> Parts:
    row, number = spec.row_bytes, spec.number_bytes
    d_padded = padded(spec, sizes["head_dim"])
    return {
        "queries": row * d_padded // spec.per_element,
        "scores": row * KEYS,
        "shift": row,
        "shift_residual": row,
        "rows": number * QUERIES * max(d_padded, KEYS),
        "keys": number * KEYS * d_padded,
        "tile_configuration": 128 * spec.uses_amx,
    }


def _decode(spec: KernelSpec, sizes: Sizes) -> Parts:
    rows = sizes["group"] * sizes["nq"]
    return {
        "scores": 4 * rows * CACHE_SCORES,
        "weights": 2 * rows * CACHE_SCORES if spec.packs_bf16 else 0,
        "zeros": 4 * sizes["value_dim"] if spec.packs_bf16 else 0,
        "queries": 4 * round_up(rows, 4) * sizes["head_dim"] // spec.per_element,  # in blocks of four
        "partial": 64 * (CACHE_ROWS + 1),
    }


def _decoded_parts(spec: KernelSpec, sizes: Sizes) -> Parts:
    """For each group of heads a counter of the parts that are done, and the results of each part."""
    groups, rows = _kv_heads(sizes), sizes["group"] * sizes["nq"]
    return {
        "parts_done": 8 * groups,
        "results": 4 * groups * sizes["parts"] * (header_size(rows) + rows * sizes["value_dim"]),
    }


# lse_residual, in units of log 2, is what lse loses when it is rounded. Where scores are some hundreds, a float32 log-sum-exp is known
# to 3e-5 only, and all weights of a query would be off by that much of themselves.
FORWARD = Abi(
    "forward",
    ("q", "k", "v", "o", "lse", "lse_residual", "bias", "sinks", "seed"),
    {**_SIZES, **_INPUTS, "o_strides": STRIDES, "plan": PLAN, "options": OPTIONS, "dropout": DROPOUT},
    _forward,
    _transposed_tiles("value_dim"),
    "packed_states",
)

# Gradients have the compute dtype. dk and dv are (B, Hkv, Nk, padded size) with packed rows, in any order of memory; a copy of them is
# contiguous. d_bias is (parts, ...), and starts at 0. d_lse and delta are (B, Hq, Nq); the rows of output and dq are packed. delta, the
# sums of dO * O less d_lse, is written if it has an address. ``ranges`` is the address of a PART for each part, ``order`` that of int32
# rows of query tiles of a key/value head. A backward runs ``rounds`` times, of which this is the ``round``-th.
BACKWARD = Abi(
    "backward",
    (
        *("q", "k", "v", "bias", "output", "lse", "lse_residual", "d_output"),
        *("d_lse", "delta", "dq", "dk", "dv", "copies", "d_bias", "seed"),
    ),
    {name: np.int64 for name in ("parts", "rounds", "round", "ranges", "order")}
    | {**_SIZES, **_INPUTS, "output_strides": STRIDES, "d_output_strides": STRIDES, "dq_strides": STRIDES}
    | {"dk_layout": KEY_SUMS, "dv_layout": KEY_SUMS}
    | {"d_bias_strides": PARTIAL_SUMS, "plan": PLAN, "options": OPTIONS, "dropout": DROPOUT},
    _backward,
    _transposed_tiles("head_dim"),
    "packed_states",
)

# weights, in the dtype of the arrays or, if ``wide`` is not 0, in the compute dtype, and received, in the compute dtype, are packed;
# received starts at 0. A task has one of ``parts`` of the key tiles.
WEIGHTS = Abi(
    "weights",
    ("q", "k", "lse", "lse_residual", "bias", "weights", "received"),
    {"parts": np.int64, "wide": np.int64, **_SIZES, **_INPUTS, "plan": PLAN, "options": OPTIONS, "dropout": DROPOUT},
    _weights,
)

# visible is the address of a table of bytes (B or 1, Hq or 1, Nq, Nk), 0 if all of it is visible. Keys before first_key are hidden.
DECODE = Abi(
    "decode",
    ("q", "k", "v", "o", "lse", "lse_residual", "bias", "sinks"),
    {"parts": np.int64, "first_key": np.int64, **_SIZES, **_INPUTS}
    | {"visible": np.int64, "visible_strides": _integers("b", "h"), "options": OPTIONS},
    _decode,
    _decoded_parts,
    "parts_done",
)

# A table of numbers (batch, rows, numbers in a row), with steps in bytes, and its bits. ``limit`` is the greatest number that hides, as
# an integer, and ``span`` how far that of -inf is from it. ``shown`` becomes 1 if a number that does not hide is not 0.
_TABLE = ("number_bytes", "rows", "numbers_in_row", "batch_step", "row_step", "bits_batch_step", "bits_row_step")
_HIDING = ("parts", "rows_at_once", "limit", "span")
HIDDEN = Abi("hidden", ("numbers", "bits", "shown"), dict.fromkeys((*_TABLE, *_HIDING), np.int64))

# The limits of a CPU, which measured rates are compared with.
MULTIPLY = Abi("multiply", (), {"repeats": np.int64})
READ = Abi("read", ("source", "sums"), {"block": np.int64})

"""The kernels' binary interface: the record that a launch writes and a kernel reads; both use the same field names and types.

A record is a NumPy structured dtype. Its first fields change with each run: two counters, the address of the scratch memory and the
addresses of the arrays. The others are written once, when a call is prepared: sizes, strides in elements, options, the plan, and the
offsets of the parts of the scratch memory. Kernels read fields through :mod:`lowtri.kernels.record`.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

__all__ = ["BACKWARD", "DECODE", "FORWARD", "MULTIPLY", "READ", "Abi", "COUNTER", "aligned"]

COUNTER = np.dtype([("count", np.int64)])  # threads of the team increment it; a run begins at 0


def _integers(*names: str) -> np.dtype[Any]:
    return np.dtype([(name, np.int64) for name in names])


STRIDES = _integers("b", "h", "n", "d")  # along (B, H, N, D), in numbers
BROADCAST = _integers("b", "h", "q", "k")  # along (B, Hq, Nq, Nk), 0 along broadcast axes
PARTIAL_SUMS = _integers("part", "b", "h", "q", "k")  # the same, and from the sums of one part to the next part's
KEY_SUMS = _integers(
    "part", "b", "h", "n", "rows", "size"
)  # of dK or dV: strides; how many rows, and numbers in a row, with padding
PLAN = _integers(
    "rows", "mask_index", "mask_index_b", "mask_index_h", "row_start", "runs", "tile_bits", "bits"
)  # of masks.plan.Plan
OPTIONS = np.dtype([("scale", np.float64), ("softcap", np.float64)])  # softcap 0: none


@dataclass(frozen=True, eq=False)
class Abi:
    """A kernel's record.

    Attributes:
        addresses: the arrays of a run; the address is 0 if the call does not have the array.
        fields: the fields that are written when a call is prepared, each an int64 or a record of numbers.
        scratch: the parts of the scratch memory of one thread.  shared: the parts that all threads share.
    """

    name: str
    addresses: tuple[str, ...]
    fields: Mapping[str, Any]
    scratch: tuple[str, ...] = ()
    shared: tuple[str, ...] = ()

    @cached_property
    def dtype(self) -> np.dtype[Any]:
        run = [
            ("next_task", COUNTER),
            ("next_thread", COUNTER),
            *((name, np.int64) for name in ("scratch", *self.addresses)),
        ]
        parts = [("offsets", _integers(*self.scratch, *self.shared))] if self.scratch or self.shared else []
        prepared = [("tasks", np.int64), ("thread_bytes", np.int64), *self.fields.items(), *parts]
        return np.dtype([(name, np.dtype(kind)) for name, kind in [*run, *prepared]])

    @cached_property
    def run_format(self) -> struct.Struct:
        """The fields that each run writes, at the record's start: two counters, the scratch memory, the addresses."""
        return struct.Struct(f"{3 + len(self.addresses)}q")

    @cached_property
    def prepared_fields(self) -> dict[str, tuple[str, ...]]:
        """The other fields: each name, with the names inside it if it is a record of numbers."""
        names = (self.dtype.names or ())[3 + len(self.addresses) :]
        return {name: self.dtype[name].names or () for name in names}

    @cached_property
    def prepared_format(self) -> struct.Struct:
        kinds = {np.dtype(np.int64): "q", np.dtype(np.float64): "d"}
        fields = ((self.dtype[name], parts) for name, parts in self.prepared_fields.items())
        leaves = (leaf for kind, parts in fields for leaf in ([kind[part] for part in parts] or [kind]))
        return struct.Struct("".join(kinds[leaf] for leaf in leaves))

    def pack(self, values: Mapping[str, Any]) -> bytes:
        """The bytes of the prepared fields, each given by its name.

        Raises:
            KeyError: if a field has no value, or if there is no field of a value's name.
        """
        flat: list[float] = []
        for name, parts in self.prepared_fields.items():
            value = values[name]
            if not parts:
                flat.append(value)
                continue
            flat += [value[part] for part in parts]
            if len(value) != len(parts):
                raise KeyError(f"{self.name}: {name} has the fields {parts}, not {tuple(value)}")
        if len(values) != len(self.prepared_fields):
            raise KeyError(f"{self.name}: the record has no fields {sorted(set(values) - set(self.prepared_fields))}")
        return self.prepared_format.pack(*flat)

    def layout(self, thread: Mapping[str, int], shared: Mapping[str, int], threads: int) -> dict[str, Any]:
        """The layout of the scratch memory: the fields ``thread_bytes`` and ``offsets``, and ``bytes``, its size."""
        offsets, end = {}, 0
        for name in self.scratch:
            offsets[name] = end
            end += aligned(thread[name])
        thread_bytes, end = end, end * threads
        for name in self.shared:
            offsets[name] = end
            end += aligned(shared[name])
        return {"thread_bytes": thread_bytes, "offsets": offsets, "bytes": end}


def aligned(size: int) -> int:
    """Rounded up to whole cache lines."""
    return -(-size // 64) * 64


_SIZES = {name: np.int64 for name in ("batch", "heads", "group", "nq", "nk", "d", "dv")}
_INPUTS = {"k_strides": STRIDES, "v_strides": STRIDES, "q_strides": STRIDES, "bias_strides": BROADCAST}

# lse_low, in units of log 2, is what lse loses when it is rounded. Where scores are some hundreds, a float32 log-sum-exp is known to
# 3e-5 only, and all weights of a query would be off by that much of themselves.
FORWARD = Abi(
    "forward",
    ("q", "k", "v", "o", "lse", "lse_low", "bias", "sinks"),
    {**_SIZES, **_INPUTS, "o_strides": STRIDES, "plan": PLAN, "options": OPTIONS},
    (
        "queries",
        "scores",
        "output",
        "shift",
        "total",
        "weights",
        "values",
        "zeros",
        "rows",
        "kept_keys",
        "kept_values",
        "tile_configuration",
    ),
    ("packed", "packed_states"),
)

# Gradients have the compute dtype. dk and grad_v (the gradient of V; dv is a size) are (parts, B, Hkv, Nk, padded size) with
# packed rows, in any order of memory; d_bias is (parts, ...), and starts at 0. d_lse and delta are (B, Hq, Nq); the rows of output
# and dq are packed. delta, the sums of dO * O less d_lse, is written if it has an address.
BACKWARD = Abi(
    "backward",
    (
        *("q", "k", "v", "bias", "output", "lse", "lse_low", "d_output", "d_lse"),
        *("delta", "dq", "dk", "grad_v", "d_bias"),
    ),
    {"parts": np.int64, **_SIZES, **_INPUTS}
    | {name: STRIDES for name in ("output_strides", "d_output_strides", "dq_strides")}
    | {"dk_layout": KEY_SUMS, "dv_layout": KEY_SUMS}
    | {"d_bias_strides": PARTIAL_SUMS, "plan": PLAN, "options": OPTIONS},
    (
        *(
            "queries",
            "d_output",
            "dq",
            "scores",
            "ds",
            "d_softcap",
            "shift",
            "shift_low",
            "delta",
            "q_rows",
            "d_output_rows",
        ),
        *("finite_q", "finite_d_output", "keys", "values", "q_pairs", "d_output_pairs", "zeros", "packed_keys"),
        "tile_configuration",
    ),
    ("packed", "packed_states"),
)

# visible is the address of a table of bytes (B or 1, Hq or 1, Nq, Nk), 0 if all of it is visible. Keys before first_key are hidden.
DECODE = Abi(
    "decode",
    ("q", "k", "v", "o", "lse", "bias", "sinks"),
    {"parts": np.int64, "first_key": np.int64, **_SIZES, **_INPUTS}
    | {"visible": np.int64, "visible_strides": _integers("b", "h"), "options": OPTIONS},
    ("scores", "weights", "zeros", "queries", "partial"),
    ("parts_done", "results"),
)

# The limits of a CPU, which measured rates are compared with.
MULTIPLY = Abi("multiply", (), {"repeats": np.int64})
READ = Abi("read", ("source", "sums"), {"block": np.int64})

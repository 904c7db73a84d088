"""The descriptor: what a kernel is told of a call, one table of int64.

Each kernel names its fields in ``FIELDS``, in order. Here they get their values, under the same names:

    sizes       batch, heads, nq, ...             as they are
    strides     k_b, k_h, k_n, k_d, ...           in numbers, not bytes; 0 where a bias broadcasts
    addresses   q, k, v, o, runs, bits, ...       0 where the call has no such part
    options     scale, softcap                    the bits of a float64

A field that the call does not fill is 0. The first three are the kernel's own: its address, and two counters.
"""

from __future__ import annotations

import ctypes
import struct
from functools import cache, lru_cache
from typing import Any, TypeAlias

import numpy as np

from lowtri.masks.plan import Plan
from lowtri.ops.call import Call

__all__ = ["Fields", "Table", "address", "broadcast", "of_call", "of_plan", "steps", "strided"]

Fields: TypeAlias = dict[str, int]


def of_call(call: Call, q: Any, k: Any, v: Any, bias: Any, sinks: Any = None, axes: str = "bhnd") -> Fields:
    """What every kernel reads of a call: sizes, keys and values, options. ``axes``: those whose steps the kernel asks for."""
    (batch, heads, nq, d), (_, kv_heads, nk, dv) = q.shape, v.shape
    fields = {
        **{"batch": batch, "heads": heads, "group": heads // kv_heads, "nq": nq, "nk": nk, "d": d, "dv": dv},
        **strided("k", k, axes),
        **strided("v", v, axes),
        **{"scale": bits(call.scale), "softcap": bits(call.softcap or 0.0)},
    }
    if bias is not None:
        fields |= broadcast("bias", bias)
    if sinks is not None:
        fields["sinks"] = address(sinks)
    return fields


def of_plan(found: Plan) -> Fields:
    """What the kernels that follow a plan read of it."""
    sheets_b, sheets_h = found.sheet.shape
    return {
        "rows": found.rows,
        "sheet": address(found.sheet),
        "sheet_b": sheets_h if sheets_b > 1 else 0,
        "sheet_h": 1 if sheets_h > 1 else 0,
        "row_start": address(found.row_start),
        "runs": address(found.runs),
        "tile_bits": address(found.tile_bits),
        "bits": address(found.bits),
    }


def strided(name: str, x: Any, axes: str = "bhnd") -> Fields:
    """The address of an array and its steps along (B, H, N, D), or along the first of these."""
    moves = steps(x) if isinstance(x, np.ndarray) else x.stride()
    return dict(zip(_names(name, axes), (address(x), *moves), strict=False))  # axes: the first of four, or all


def broadcast(name: str, x: Any, axes: str = "bhqk") -> Fields:
    """The address of an array and its steps, 0 along the axes where it has one entry for all."""
    moves = [step if size > 1 else 0 for size, step in zip(x.shape, steps(x), strict=True)]
    return dict(zip(_names(name, axes), (address(x), *moves), strict=True))


@cache
def _names(name: str, axes: str) -> tuple[str, ...]:
    return (name, *(f"{name}_{axis}" for axis in axes))


def address(x: Any) -> int:
    """Where an array's first number lies."""
    where: int = x.ctypes.data if isinstance(x, np.ndarray) else x.data_ptr()
    return where


def steps(x: Any) -> tuple[int, ...]:
    """Strides in numbers."""
    moves: tuple[int, ...] = tuple(n // x.itemsize for n in x.strides) if isinstance(x, np.ndarray) else x.stride()
    return moves


@lru_cache(64)
def bits(value: float) -> int:
    """A float64 as the int64 that a descriptor holds."""
    return int(struct.unpack("<q", struct.pack("<d", value))[0])


class Table:
    """The memory of a descriptor: filled for each launch anew."""

    def __init__(self) -> None:
        self._memory = ctypes.create_string_buffer(8 * 128)
        self.address = ctypes.addressof(self._memory)

    def values(self, names: tuple[str, ...], fields: Fields) -> list[int]:
        """The fields in the kernel's order."""
        found = _zeros(names) | fields
        found["self"] = self.address
        if len(found) != len(names):
            raise KeyError(f"the kernel has no fields {sorted(set(found) - set(names))}")
        return list(found.values())

    def write(self, values: list[int]) -> None:
        """Write them all: the counters begin at 0 again."""
        _layout(len(values)).pack_into(self._memory, 0, *values)


@cache
def _zeros(names: tuple[str, ...]) -> Fields:
    return dict.fromkeys(names, 0)


@cache
def _layout(n: int) -> struct.Struct:
    return struct.Struct(f"{n}q")

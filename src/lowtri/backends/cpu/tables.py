"""Which pairs a dense table of numbers hides, as bits: the launch of the kernel that reads tables."""

from __future__ import annotations

import sys
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lowtri.backends.cpu.launch import BYTE_COST, Launch, threads_for
from lowtri.kernels import library
from lowtri.kernels.abi import HIDDEN
from lowtri.kernels.spec import BYTES, KernelSpec
from lowtri.ops.arguments import thread_count

_BYTES_AT_ONCE = 2**16  # of the rows of a task
_NUMPY_DTYPES = {np.dtype(name): name for name in ("float16", "float32", "float64")}  # in this machine's byte order

Steps = tuple[int, ...]  # in bytes


def write_hidden_bits(numbers: Any, greatest_hidden: float, bits: NDArray[np.uint8]) -> bool | None:
    """Write which pairs numbers hide; returns whether one that does not hide is not 0, or None where the kernel cannot read them.

    Args:
        numbers: an array or a CPU tensor (B, Nq, Nk).
        greatest_hidden: numbers up to this one hide: -inf, or the lowest number of a dtype, no less than that of the table's own.
        bits: (B, Nq, bytes), each row packed: a bit for each key, the lowest of a byte for the first, 0 after the last key.
    """
    dtype = _dtype_of(numbers)
    if dtype is None or library.unusable():
        return None
    shape = tuple(numbers.shape)
    if 0 in shape:
        return False
    size = BYTES[dtype]
    if isinstance(numbers, np.ndarray):
        address, steps = numbers.ctypes.data, numbers.strides
    else:
        address, steps = numbers.data_ptr(), tuple(size * step for step in numbers.stride())
    if steps[2] != size and shape[2] > 1:
        return None
    launch = _launch(
        _threads(prod(shape) * size),
        dtype,
        shape,
        steps[:2],
        bits.strides[:2],
        *_range_of_hidden(greatest_hidden, dtype),
    )
    shown = np.zeros(1, np.int64)
    launch.run_at(launch.prepared, address, bits.ctypes.data, shown.ctypes.data)
    return bool(shown[0])


def _dtype_of(numbers: Any) -> str | None:
    """The dtype, if the kernel knows it."""
    if isinstance(numbers, np.ndarray):
        return _NUMPY_DTYPES.get(numbers.dtype)
    name = str(numbers.dtype).removeprefix("torch.")
    return name if name in BYTES else None


def _threads(nbytes: int) -> int:
    """As for a call of attention that reads so many bytes."""
    without_torch = "torch" not in sys.modules
    return threads_for(nbytes * BYTE_COST, thread_count(without_torch), without_torch)


@lru_cache(maxsize=64)
def _launch(threads: int, dtype: str, shape: Steps, steps: Steps, bits_steps: Steps, limit: int, span: int) -> Launch:
    from lowtri.kernels.target import ISA

    batch, rows, numbers_in_row = shape
    rows_at_once = max(1, _BYTES_AT_ONCE // (BYTES[dtype] * numbers_in_row))
    parts = -(-rows // rows_at_once)
    fields = {
        "tasks": batch * parts,
        "number_bytes": BYTES[dtype],
        "rows": rows,
        "numbers_in_row": numbers_in_row,
        "batch_step": steps[0],
        "row_step": steps[1],
        "bits_batch_step": bits_steps[0],
        "bits_row_step": bits_steps[1],
        "parts": parts,
        "rows_at_once": rows_at_once,
        "limit": limit,
        "span": span,
    }
    return Launch(HIDDEN, KernelSpec("float32", "direct", ISA), fields, threads)


@lru_cache(maxsize=64)
def _range_of_hidden(greatest_hidden: float, dtype: str) -> tuple[int, int]:
    """The integer of the greatest number of a dtype that hides, as a signed one of 64 bits, and how far that of -inf is from it."""
    wide = np.dtype("float32" if dtype == "bfloat16" else dtype)
    numbers = np.array([greatest_hidden, -np.inf], wide)
    limit, last = (int(x) for x in numbers.view(f"u{wide.itemsize}"))
    # The lowest number of float16 is none of bf16, and the next lower one is the greatest that hides.
    if dtype == "bfloat16":
        limit, last = (limit + 0xFFFF) >> 16, last >> 16
    return int(np.uint64(limit).view(np.int64)), last - limit

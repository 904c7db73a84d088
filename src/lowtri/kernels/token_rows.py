"""Passes over the rows of a few tokens, for layers beside attention: calling an operator of torch takes longer than these compute.

Arrays are packed and float32, given by their addresses. The loops are plain; LLVM vectorises them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import types

from lowtri.kernels.compilation import machine_code

__all__ = ["TokenRows"]

_ARRAY, _BITS, _SIZE, _NUMBER = types.CPointer(types.float32), types.CPointer(types.int32), types.int64, types.float32
_IN_C = {_ARRAY: ctypes.c_void_p, _BITS: ctypes.c_void_p, _SIZE: ctypes.c_int64, _NUMBER: ctypes.c_float}
_MAGNITUDE = np.int32(0x7FFFFFFF)  # all bits but the sign


def _split(x, x_bits, parts, units, units_bits, rows, columns, levels, steps, least):
    size = rows * columns
    for r in range(rows):
        first, greatest = r * columns, np.int32(0)
        # The bits of magnitudes are ordered as the magnitudes are, with NaN above all, so that the unit of a NaN is NaN.
        for c in range(first, first + columns):
            greatest = max(greatest, x_bits[c] & _MAGNITUDE)
        units_bits[r] = greatest
        unit = units[r] / levels
        unit = least if unit < least else unit
        units[r] = unit
        for c in range(first, first + columns):
            scaled = x[c] / unit
            rounded = np.rint(scaled)
            parts[c] = rounded
            parts[size + c] = (scaled - rounded) * steps


def _join(parts, units, rows, columns, step):
    size = rows * columns
    for r in range(rows):
        unit, first = units[r], r * columns
        for c in range(first, first + columns):
            parts[c] = (parts[c] + parts[size + c] * step) * unit


def _rms_norm(x, weight, y, rows, columns, epsilon):
    for r in range(rows):
        first, squares = r * columns, 0.0
        for c in range(columns):
            squares += np.float64(x[first + c]) ** 2
        # A sum beyond float32's range is infinite, as for torch: a token's norm does not depend on how many tokens come with it.
        scale = np.float32(1 / np.sqrt(np.float64(np.float32(squares)) / columns + epsilon))
        for c in range(columns):
            y[first + c] = x[first + c] * scale * weight[c]


class TokenRows:
    """The passes, compiled.

    Attributes:
        split: (x, x, parts, units, units, rows, columns, levels, steps, least): x (rows, columns) in units of each row, which are
            ``greatest magnitude / levels`` or ``least``, as two whole numbers; parts[0] is rounded, parts[1] is what is left times
            ``steps``.
        join: (parts, units, rows, columns, step): parts[0] becomes ``(parts[0] + parts[1] * step) * unit``.
        rms_norm: (x, weight, y, rows, columns, epsilon): y = ``x / sqrt(mean of squares + epsilon) * weight``, row by row.
    """

    split: Callable[..., None]
    join: Callable[..., None]
    rms_norm: Callable[..., None]

    def __init__(self) -> None:
        self.split = _compiled(_split, _ARRAY, _BITS, _ARRAY, _ARRAY, _BITS, _SIZE, _SIZE, _NUMBER, _NUMBER, _NUMBER)
        self.join = _compiled(_join, _ARRAY, _ARRAY, _SIZE, _SIZE, _NUMBER)
        self.rms_norm = _compiled(_rms_norm, _ARRAY, _ARRAY, _ARRAY, _SIZE, _SIZE, _NUMBER)


def _compiled(function: Callable[..., None], *kinds: Any) -> Callable[..., None]:
    code = machine_code(function, types.void(*kinds), "token_rows")
    call: Any = ctypes.CFUNCTYPE(None, *(_IN_C[kind] for kind in kinds))(code.address)
    call.code = code  # the reference keeps the code in memory
    return call

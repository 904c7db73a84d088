"""Passes over the rows of a few tokens, for layers beside attention: calling an operator of torch takes longer than these compute.

Arrays are packed and float32, given by their addresses. The loops are plain; LLVM vectorises them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from lowtri.kernels.isa import Baseline
from lowtri.kernels.library import Code
from lowtri.kernels.spec import symbol

_IN_C = {"floats": ctypes.c_void_p, "bits": ctypes.c_void_p, "size": ctypes.c_int64, "number": ctypes.c_float}
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


# Each function, and the kinds of its arguments.
PASSES: Mapping[str, tuple[Callable[..., None], str]] = {
    "split": (_split, "floats bits floats floats bits size size number number number"),
    "join": (_join, "floats floats size size number"),
    "rms_norm": (_rms_norm, "floats floats floats size size number"),
}


class TokenRows:
    """The passes, compiled: ``code`` gives the code of a symbol.

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

    def __init__(self, isa: Baseline, code: Callable[[str], Code]) -> None:
        for name, (_, kinds) in PASSES.items():
            function: Any = ctypes.CFUNCTYPE(None, *(_IN_C[kind] for kind in kinds.split()))
            setattr(self, name, function(code(symbol(name, isa)).address))

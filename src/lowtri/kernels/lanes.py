"""What goes across lanes: turning 16 x 16 blocks, 16 dot products at once, the sum and the greatest of a vector."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from lowtri.kernels.simd import F32, I32, I64, INTS, VECTOR, at, call, clamped, vector
from lowtri.kernels.target import LANES

__all__ = [
    "greatest_lane",
    "sum_lanes",
    "transpose",
]


def _transposed(builder: Any, rows: list[Any]) -> list[Any]:
    """16 vectors as the columns of what they were the rows of: halves, quarters, eighths change places."""
    step = LANES // 2
    while step:
        for i in range(LANES):
            if not i & step:
                one, two = rows[i], rows[i + step]
                low = [lane if not lane & step else LANES + lane - step for lane in range(LANES)]
                high = [lane + step if not lane & step else LANES + lane for lane in range(LANES)]
                rows[i] = builder.shuffle_vector(one, two, ir.Constant(INTS, low))
                rows[i + step] = builder.shuffle_vector(one, two, ir.Constant(INTS, high))
        step //= 2
    return rows


@intrinsic
def transpose(typing, source, source_row, last, target, target_row):
    """A 16 x 16 block, turned: row i of the source becomes column i. Rows past ``last`` repeat it; steps in bytes."""

    def emit(c, b, s, a):
        source, source_row, last, target, target_row = a
        rows = []
        for i in range(LANES):
            row = clamped(b, i, last)
            rows.append(b.load(at(b, b.add(source, b.mul(row, source_row)), VECTOR), align=4))
        for i, column in enumerate(_transposed(b, rows)):
            b.store(column, at(b, b.add(target, b.mul(ir.Constant(I64, i), target_row)), VECTOR), align=4)
        return c.get_dummy_value()

    return types.void(*[types.intp] * 5), emit


@intrinsic
def greatest_lane(typing, x):
    """The greatest of 16 floats; a NaN is passed over."""
    return types.float32(vector), lambda c, b, s, a: call(b, f"llvm.vector.reduce.fmax.v{LANES}f32", F32, [a[0]])


@intrinsic
def sum_lanes(typing, x):
    """The sum of 16 floats."""

    def emit(c, b, s, a):
        step, total = LANES // 2, a[0]
        while step:
            turned = ir.Constant(INTS, [(lane + step) % LANES for lane in range(LANES)])
            total = b.fadd(total, b.shuffle_vector(total, total, turned))
            step //= 2
        return b.extract_element(total, ir.Constant(I32, 0))

    return types.float32(vector), emit

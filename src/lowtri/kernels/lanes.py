"""Operations across lanes: transposing square blocks, the sum and the maximum of a vector."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from lowtri.kernels.operations.baseline import call
from lowtri.kernels.simd import I32, I64, clamped, pointer

__all__ = ["reduce_max", "shuffled", "reduce_sum", "transpose", "transposed"]


def shuffled(builder: Any, one: Any, two: Any, lanes: list[int]) -> Any:
    """A vector of lanes of two vectors; the second one's are counted from the first one's end."""
    return builder.shuffle_vector(one, two, ir.Constant(ir.VectorType(I32, len(lanes)), lanes))


def transposed(builder: Any, rows: list[Any]) -> list[Any]:
    """The transposed square block of these rows: halves, quarters, eighths change places."""
    lanes = len(rows)
    step = lanes // 2
    while step:
        for i in range(lanes):
            if not i & step:
                one, two = rows[i], rows[i + step]
                low = [lane if not lane & step else lanes + lane - step for lane in range(lanes)]
                high = [lane + step if not lane & step else lanes + lane for lane in range(lanes)]
                rows[i], rows[i + step] = shuffled(builder, one, two, low), shuffled(builder, one, two, high)
        step //= 2
    return rows


@intrinsic
def transpose(typing, source, source_row, last, target, target_row, spec):
    """Transpose a square block: row i of the source becomes column i. Rows past ``last`` repeat it; row steps in bytes."""
    kind = spec.value.vector

    def emit(c, b, s, a):
        source, source_row, last, target, target_row, _ = a
        rows = []
        for i in range(kind.lanes):
            row = clamped(b, i, last)
            rows.append(b.load(pointer(b, b.add(source, b.mul(row, source_row)), kind.ir), align=4))
        for i, column in enumerate(transposed(b, rows)):
            b.store(column, pointer(b, b.add(target, b.mul(ir.Constant(I64, i), target_row)), kind.ir), align=4)
        return c.get_dummy_value()

    return types.void(*[types.intp] * 5, spec), emit


@intrinsic
def reduce_max(typing, x):
    """The greatest number of a vector; NaNs are ignored."""
    name = f"llvm.vector.reduce.fmax.v{x.lanes}f{x.bits}"
    return x.number(x), lambda c, b, s, a: call(b, name, x.ir.element, [a[0]])


@intrinsic
def reduce_sum(typing, x):
    """The sum of a vector."""

    def emit(c, b, s, a):
        step, total = x.lanes // 2, a[0]
        while step:
            turned = [(lane + step) % x.lanes for lane in range(x.lanes)]
            total = b.fadd(total, shuffled(b, total, total, turned))
            step //= 2
        return b.extract_element(total, ir.Constant(I32, 0))

    return x.number(x), emit

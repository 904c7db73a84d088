"""What goes across lanes: turning 16 x 16 blocks, 16 dot products at once, the sum and the greatest of a vector."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from lowtri.kernels.halves import fused_pairs
from lowtri.kernels.simd import F32, I32, I64, INTS, VECTOR, at, call, fused, vector
from lowtri.kernels.target import LANES

__all__ = [
    "dots",
    "dots_pairs",
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
            number = ir.Constant(I64, i)
            clamped = b.select(b.icmp_signed("<", number, last), number, last)
            rows.append(b.load(at(b, b.add(source, b.mul(clamped, source_row)), VECTOR), align=4))
        for i, column in enumerate(_transposed(b, rows)):
            b.store(column, at(b, b.add(target, b.mul(ir.Constant(I64, i), target_row)), VECTOR), align=4)
        return c.get_dummy_value()

    return types.void(*[types.intp] * 5), emit


def _sums(builder: Any, rows: list[Any]) -> Any:
    """The sums of 16 vectors, each in the lane of its number: halves are added together, then quarters, then eighths."""
    step = LANES // 2
    while len(rows) > 1:
        half = len(rows) // 2
        low = [lane if not lane & step else LANES + lane - step for lane in range(LANES)]
        high = [lane + step if not lane & step else LANES + lane for lane in range(LANES)]
        folded = []
        for one, two in zip(rows[:half], rows[half:], strict=True):
            left = builder.shuffle_vector(one, two, ir.Constant(INTS, low))
            right = builder.shuffle_vector(one, two, ir.Constant(INTS, high))
            folded.append(builder.fadd(left, right))
        rows, step = folded, step // 2
    return rows[0]


def _dots(builder: Any, args: Any, multiply: Any) -> Any:
    """Dot products of one packed row with 16 others, ``chunks`` vectors long; rows past ``last`` repeat it; steps in bytes."""
    rows, row_step, last, one, chunks = args
    sums = []
    for i in range(LANES):  # row after row, as they lie in memory: the CPU then fetches the next ones by itself
        number = ir.Constant(I64, i)
        clamped = builder.select(builder.icmp_signed("<", number, last), number, last)
        place = builder.add(rows, builder.mul(clamped, row_step))
        total = cgutils.alloca_once(builder, VECTOR)
        builder.store(ir.Constant(VECTOR, None), total)
        with cgutils.for_range(builder, chunks) as loop:
            offset = builder.mul(loop.index, ir.Constant(I64, 4 * LANES))
            row = builder.load(at(builder, builder.add(place, offset), VECTOR), align=2)
            other = builder.load(at(builder, builder.add(one, offset), VECTOR), align=2)
            builder.store(multiply(builder, row, other, builder.load(total)), total)
        sums.append(builder.load(total))
    return _sums(builder, sums)


@intrinsic
def dots(typing, rows, row_step, last, one, chunks):
    """16 dot products of floats at once, one in each lane."""
    return vector(*[types.intp] * 5), lambda c, b, s, a: _dots(b, a, fused)


@intrinsic
def dots_pairs(typing, rows, row_step, last, one, chunks):
    """The same for rows of bf16, 32 numbers to a vector."""
    return vector(*[types.intp] * 5), lambda c, b, s, a: _dots(b, a, fused_pairs)


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

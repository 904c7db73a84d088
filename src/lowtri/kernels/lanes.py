"""What goes across lanes: turning 16 x 16 blocks, 16 dot products at once, the sum and the greatest of a vector."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from lowtri.kernels.halves import fused_pairs
from lowtri.kernels.simd import AHEAD, F32, I32, I64, INTS, VECTOR, at, call, fused, prefetch, vector
from lowtri.kernels.target import LANES

__all__ = [
    "dots",
    "dots_of_four",
    "dots_pairs",
    "dots_pairs_of_four",
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


TOGETHER = 2  # rows whose products with one vector are made while that is in a register


def _dots(builder: Any, args: Any, queries: int, multiply: Any) -> None:
    """Dot products of 16 packed rows with ``queries`` others; rows past ``last`` repeat it; steps in bytes."""
    rows, row_step, last, others, other_step, chunks, target, target_step = args
    totals = [[cgutils.alloca_once(builder, VECTOR) for _ in range(queries)] for _ in range(LANES)]
    for i in range(0, LANES, TOGETHER):  # as they lie in memory: each row is read once
        places = []
        for number in (ir.Constant(I64, n) for n in range(i, i + TOGETHER)):
            clamped = builder.select(builder.icmp_signed("<", number, last), number, last)
            places.append(builder.add(rows, builder.mul(clamped, row_step)))
        for total in (total for row in totals[i : i + TOGETHER] for total in row):
            builder.store(ir.Constant(VECTOR, None), total)
        with cgutils.for_range(builder, chunks) as loop:
            offset = builder.mul(loop.index, ir.Constant(I64, 4 * LANES))
            some = []
            for place in places:
                row_at = builder.add(place, offset)
                some.append(builder.load(at(builder, row_at, VECTOR), align=2))
                prefetch(builder, builder.add(row_at, builder.mul(ir.Constant(I64, AHEAD), row_step)))
            for j in range(queries):
                from_other = builder.add(others, builder.add(offset, builder.mul(ir.Constant(I64, j), other_step)))
                other = builder.load(at(builder, from_other, VECTOR), align=2)
                for n, row in enumerate(some):
                    total = totals[i + n][j]
                    builder.store(multiply(builder, row, other, builder.load(total)), total)
    for j in range(queries):
        sums = _sums(builder, [builder.load(totals[i][j]) for i in range(LANES)])
        to = builder.add(target, builder.mul(ir.Constant(I64, j), target_step))
        builder.store(sums, at(builder, to, VECTOR), align=4)


_DOTS = types.void(*[types.intp] * 8)


def _emitter(queries: int, multiply: Any) -> Any:
    def emit(context, builder, signature, args):
        _dots(builder, args, queries, multiply)
        return context.get_dummy_value()

    return emit


@intrinsic
def dots(typing, rows, row_step, last, one, step, chunks, target, target_step):
    """Dot products of 16 rows of floats with one other, stored one beside the other."""
    return _DOTS, _emitter(1, fused)


@intrinsic
def dots_of_four(typing, rows, row_step, last, four, step, chunks, target, target_step):
    """The same with four others at once."""
    return _DOTS, _emitter(4, fused)


@intrinsic
def dots_pairs(typing, rows, row_step, last, one, step, chunks, target, target_step):
    """As ``dots``, for rows of bf16, 32 numbers to a vector."""
    return _DOTS, _emitter(1, fused_pairs)


@intrinsic
def dots_pairs_of_four(typing, rows, row_step, last, four, step, chunks, target, target_step):
    """As ``dots_of_four``, for rows of bf16."""
    return _DOTS, _emitter(4, fused_pairs)


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

"""Operations across lanes: transposing square blocks, sums and maxima of vectors."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from lowtri.kernels.simd import I32, I64, clamped, pointer

__all__ = [
    "reduce_rows_max",
    "reduce_rows_sum",
    "reduce_sum",
    "reduced_in_pairs",
    "shuffled",
    "transpose",
    "transposed",
]


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


def reduced_in_pairs(builder: Any, vectors: list[Any], distance: int, combine: Any) -> list[Any]:
    """Lanes ``distance`` apart combined, of two vectors in one: lanes whose index has the bit ``distance`` are those of the second.

    After the distances 1, 2, .. of all lanes, lane n is the whole vector n reduced to a number.
    """
    lanes, reduced = range(vectors[0].type.count), []
    source = [lane + (len(lanes) if lane & distance else 0) for lane in lanes]
    for one, two in zip(vectors[::2], vectors[1::2], strict=True):
        here = shuffled(builder, one, two, source)
        there = shuffled(builder, one, two, [lane ^ distance for lane in source])
        reduced.append(combine(builder, here, there))
    return reduced


def _reduce_rows(combine: Any) -> Any:
    @intrinsic
    def reduce_rows(typing, address, spec):
        kind = spec.value.vector

        def emit(c, b, s, a):
            places = [b.add(a[0], ir.Constant(I64, 64 * row)) for row in range(8)]
            vectors = [b.load(pointer(b, place, kind.ir), align=4) for place in places]
            for distance in (1, 2, 4):
                vectors = reduced_in_pairs(b, vectors, distance, combine)
            turned = shuffled(b, vectors[0], vectors[0], [lane ^ 8 for lane in range(16)])
            return combine(b, vectors[0], turned)

        return kind(types.intp, spec), emit

    return reduce_rows


# Eight vectors of 16 floats, 64 bytes apart: lanes n and n + 8 are the greatest number, or the sum, of vector n.
reduce_rows_max = _reduce_rows(lambda b, x, y: b.select(b.fcmp_ordered(">", x, y), x, y))
reduce_rows_sum = _reduce_rows(lambda b, x, y: b.fadd(x, y))


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

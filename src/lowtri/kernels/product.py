"""The product that everything is made of: C (+)= A B, with a tile of C in registers.

A is read one number at a time and may lie in any direction in memory; B and C are packed rows. Mostly their 64 columns are
queries: with S^T = K Q^T, O^T = V^T P^T and so on, keys and values are the A of every product and are read where
they lie. Source of the register tile: Goto and van de Geijn 2008.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from lowtri.kernels.halves import fused_pairs
from lowtri.kernels.inner import inner
from lowtri.kernels.simd import AHEAD, DOUBLES, I64, VECTOR, broadcast, fused, prefetch
from lowtri.kernels.target import FEW_ROWS, FEW_VECTORS, LANES, ROWS, VECTORS

__all__ = [
    "product",
    "product_add",
    "product_doubles_add",
    "product_few",
    "product_few_pairs",
    "product_pairs",
    "product_pairs_add",
    "product_pairs_side",
    "product_side",
]

COLUMNS = 64  # queries in a tile
WIDTH = VECTORS * LANES  # columns in a register tile
HALF_VECTORS = max(1, VECTORS // 2)
HALF = HALF_VECTORS * LANES
FEW_WIDTH = FEW_VECTORS * LANES


def _panel(
    builder: Any, args: Any, rows: int, vectors: int, accumulate: bool, multiply: Any, ahead: int, kind: Any
) -> None:
    """One register tile, ``rows`` x ``vectors`` accumulators over all steps. Rows past the last one do its work again.

    ``ahead``: rows of B that are asked for before they are read, where B comes from memory. ``kind``: the vector.
    """
    a, row_step, depth_step, b, b_row, c, c_row, depth, last = args
    a, b, c = (builder.inttoptr(p, kind.element.as_pointer()) for p in (a, b, c))

    def vector_at(base: Any, offset: Any, j: int) -> Any:
        place = builder.add(offset, ir.Constant(I64, j * kind.count))
        return builder.bitcast(builder.gep(base, [place]), kind.as_pointer())

    tile = [[cgutils.alloca_once(builder, kind) for _ in range(vectors)] for _ in range(rows)]
    a_rows, c_rows = [], []
    for r in range(rows):
        number = ir.Constant(I64, r)
        clamped = builder.select(builder.icmp_signed("<", number, last), number, last)
        a_rows.append(builder.gep(a, [builder.mul(clamped, row_step)]))
        c_rows.append(builder.mul(clamped, c_row))
        for j in range(vectors):
            start = builder.load(vector_at(c, c_rows[r], j), align=4) if accumulate else ir.Constant(kind, None)
            builder.store(start, tile[r][j])
    with cgutils.for_range(builder, depth) as loop:
        from_b = [builder.load(vector_at(b, builder.mul(loop.index, b_row), j), align=4) for j in range(vectors)]
        if ahead:
            later = builder.mul(builder.add(loop.index, ir.Constant(I64, ahead)), b_row)
            for j in range(vectors):
                prefetch(builder, builder.ptrtoint(vector_at(b, later, j), I64))
        step = builder.mul(loop.index, depth_step)
        for r in range(rows):
            one = broadcast(builder, builder.load(builder.gep(a_rows[r], [step]), align=4))
            for j in range(vectors):
                builder.store(multiply(builder, one, from_b[j], builder.load(tile[r][j])), tile[r][j])
    for r in range(rows):
        for j in range(vectors):
            builder.store(builder.load(tile[r][j]), vector_at(c, c_rows[r], j), align=4)


_SIGNATURE = types.void(*[types.intp] * 9)


def _emitter(
    vectors: int, accumulate: bool, multiply: Any = fused, rows: int = ROWS, ahead: int = 0, kind: Any = VECTOR
) -> Any:
    def emit(context, builder, signature, args):
        _panel(builder, args, rows, vectors, accumulate, multiply, ahead, kind)
        return context.get_dummy_value()

    return emit


@intrinsic
def _wide_set(typing, a, row_step, depth_step, b, b_row, c, c_row, depth, last):
    return _SIGNATURE, _emitter(VECTORS, accumulate=False)


@intrinsic
def _wide_add(typing, a, row_step, depth_step, b, b_row, c, c_row, depth, last):
    return _SIGNATURE, _emitter(VECTORS, accumulate=True)


@intrinsic
def _half_set(typing, a, row_step, depth_step, b, b_row, c, c_row, depth, last):
    return _SIGNATURE, _emitter(HALF_VECTORS, accumulate=False)


@intrinsic
def _half_add(typing, a, row_step, depth_step, b, b_row, c, c_row, depth, last):
    return _SIGNATURE, _emitter(HALF_VECTORS, accumulate=True)


@intrinsic
def _narrow_add(typing, a, row_step, depth_step, b, b_row, c, c_row, depth, last):
    return _SIGNATURE, _emitter(1, accumulate=True)


@intrinsic
def _pairs_set(typing, a, row_step, depth_step, b, b_row, c, c_row, depth, last):
    return _SIGNATURE, _emitter(VECTORS, accumulate=False, multiply=fused_pairs)


@intrinsic
def _pairs_add(typing, a, row_step, depth_step, b, b_row, c, c_row, depth, last):
    return _SIGNATURE, _emitter(VECTORS, accumulate=True, multiply=fused_pairs)


@intrinsic
def _pairs_half_set(typing, a, row_step, depth_step, b, b_row, c, c_row, depth, last):
    return _SIGNATURE, _emitter(HALF_VECTORS, accumulate=False, multiply=fused_pairs)


@intrinsic
def _pairs_half_add(typing, a, row_step, depth_step, b, b_row, c, c_row, depth, last):
    return _SIGNATURE, _emitter(HALF_VECTORS, accumulate=True, multiply=fused_pairs)


@intrinsic
def _pairs_narrow_add(typing, a, row_step, depth_step, b, b_row, c, c_row, depth, last):
    return _SIGNATURE, _emitter(1, accumulate=True, multiply=fused_pairs)


@intrinsic
def _few_add(typing, a, row_step, depth_step, b, b_row, c, c_row, depth, last):
    return _SIGNATURE, _emitter(FEW_VECTORS, accumulate=True, rows=FEW_ROWS, ahead=AHEAD)


@intrinsic
def _few_pairs_add(typing, a, row_step, depth_step, b, b_row, c, c_row, depth, last):
    return _SIGNATURE, _emitter(FEW_VECTORS, accumulate=True, rows=FEW_ROWS, multiply=fused_pairs)


@intrinsic
def _doubles_add(typing, a, row_step, depth_step, b, b_row, c, c_row, depth, last):
    return _SIGNATURE, _emitter(VECTORS, accumulate=True, kind=DOUBLES)


@inner
def product(a, row_step, depth_step, b, c, rows, depth):
    """C = A B for 64 columns.  A (rows, depth), B (depth, 64), C (rows, 64).

    Addresses in bytes, steps in floats: A[r, d] stands at ``a + 4 * (r * row_step + d * depth_step)``.
    """
    for j in range(0, COLUMNS, WIDTH):
        for r in range(0, rows, ROWS):
            last = min(ROWS, rows - r) - 1
            at = c + 4 * (r * COLUMNS + j)
            _wide_set(a + 4 * r * row_step, row_step, depth_step, b + 4 * j, COLUMNS, at, COLUMNS, depth, last)


@inner
def product_side(a, row_step, depth_step, b, c, rows, depth):
    """C = A B for 32 of the 64 columns, as :func:`product`."""
    for j in range(0, COLUMNS // 2, HALF):
        for r in range(0, rows, ROWS):
            last = min(ROWS, rows - r) - 1
            at = c + 4 * (r * COLUMNS + j)
            _half_set(a + 4 * r * row_step, row_step, depth_step, b + 4 * j, COLUMNS, at, COLUMNS, depth, last)


@inner
def product_add(a, row_step, depth_step, b, b_row, c, c_row, rows, depth, columns):
    """C += A B for ``columns`` columns, a multiple of 16.  A (rows, depth); rows of B (depth, columns) and C as far apart as told."""
    for r in range(0, rows, ROWS):
        last = min(ROWS, rows - r) - 1
        from_a, j = a + 4 * r * row_step, 0
        while j + WIDTH <= columns:
            at = c + 4 * (r * c_row + j)
            _wide_add(from_a, row_step, depth_step, b + 4 * j, b_row, at, c_row, depth, last)
            j += WIDTH
        while j + HALF <= columns:
            at = c + 4 * (r * c_row + j)
            _half_add(from_a, row_step, depth_step, b + 4 * j, b_row, at, c_row, depth, last)
            j += HALF
        while j < columns:
            at = c + 4 * (r * c_row + j)
            _narrow_add(from_a, row_step, depth_step, b + 4 * j, b_row, at, c_row, depth, last)
            j += LANES


@inner
def product_pairs(a, row_step, depth_step, b, c, rows, depth):
    """C = A B for 64 columns, where each number of A and B is a pair of bf16: steps and depth count pairs."""
    for j in range(0, COLUMNS, WIDTH):
        for r in range(0, rows, ROWS):
            last = min(ROWS, rows - r) - 1
            at = c + 4 * (r * COLUMNS + j)
            _pairs_set(a + 4 * r * row_step, row_step, depth_step, b + 4 * j, COLUMNS, at, COLUMNS, depth, last)


@inner
def product_pairs_side(a, row_step, depth_step, b, c, rows, depth):
    """C = A B for 32 of the 64 columns, as :func:`product_pairs`."""
    for j in range(0, COLUMNS // 2, HALF):
        for r in range(0, rows, ROWS):
            last = min(ROWS, rows - r) - 1
            at = c + 4 * (r * COLUMNS + j)
            _pairs_half_set(a + 4 * r * row_step, row_step, depth_step, b + 4 * j, COLUMNS, at, COLUMNS, depth, last)


@inner
def product_pairs_add(a, row_step, depth_step, b, b_row, c, c_row, rows, depth, columns):
    """C += A B as :func:`product_add`, where each number of A and B is a pair of bf16."""
    for r in range(0, rows, ROWS):
        last = min(ROWS, rows - r) - 1
        from_a, j = a + 4 * r * row_step, 0
        while j + WIDTH <= columns:
            at = c + 4 * (r * c_row + j)
            _pairs_add(from_a, row_step, depth_step, b + 4 * j, b_row, at, c_row, depth, last)
            j += WIDTH
        while j + HALF <= columns:
            at = c + 4 * (r * c_row + j)
            _pairs_half_add(from_a, row_step, depth_step, b + 4 * j, b_row, at, c_row, depth, last)
            j += HALF
        while j < columns:
            at = c + 4 * (r * c_row + j)
            _pairs_narrow_add(from_a, row_step, depth_step, b + 4 * j, b_row, at, c_row, depth, last)
            j += LANES


@inner
def product_few(a, row_step, b, b_row, c, rows, depth, columns):
    """C += A B for few rows, with B read in the order of memory: A (rows, depth), C packed."""
    j = 0
    while j + FEW_WIDTH <= columns:
        for r in range(0, rows, FEW_ROWS):
            last = min(FEW_ROWS, rows - r) - 1
            at = c + 4 * (r * columns + j)
            _few_add(a + 4 * r * row_step, row_step, 1, b + 4 * j, b_row, at, columns, depth, last)
        j += FEW_WIDTH
    if j < columns:
        product_add(a, row_step, 1, b + 4 * j, b_row, c + 4 * j, columns, rows, depth, columns - j)


@inner
def product_few_pairs(a, row_step, b, b_row, c, rows, depth, columns):
    """The same where each number of A and B is a pair of bf16."""
    j = 0
    while j + FEW_WIDTH <= columns:
        for r in range(0, rows, FEW_ROWS):
            last = min(FEW_ROWS, rows - r) - 1
            at = c + 4 * (r * columns + j)
            _few_pairs_add(a + 4 * r * row_step, row_step, 1, b + 4 * j, b_row, at, columns, depth, last)
        j += FEW_WIDTH
    if j < columns:
        product_pairs_add(a, row_step, 1, b + 4 * j, b_row, c + 4 * j, columns, rows, depth, columns - j)


@inner
def product_doubles_add(a, row_step, depth_step, b, b_row, c, c_row, rows, depth, columns):
    """C += A B as :func:`product_add` in float64, for ``columns`` columns, a multiple of 32."""
    for r in range(0, rows, ROWS):
        last = min(ROWS, rows - r) - 1
        for j in range(0, columns, WIDTH // 2):
            at = c + 8 * (r * c_row + j)
            _doubles_add(a + 8 * r * row_step, row_step, depth_step, b + 8 * j, b_row, at, c_row, depth, last)

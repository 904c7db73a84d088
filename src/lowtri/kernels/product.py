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
from lowtri.kernels.simd import DOUBLES, I64, VECTOR, broadcast, clamped, fused
from lowtri.kernels.target import LANES, NARROW_ROWS, ROWS, VECTORS

__all__ = ["product", "product_add", "product_doubles_add"]

WIDTH = VECTORS * LANES  # columns in a register tile


def _panel(builder: Any, args: Any, rows: int, vectors: int, accumulate: bool, multiply: Any, kind: Any) -> None:
    """One register tile, ``rows`` x ``vectors`` accumulators over all steps. Rows past the last one do its work again."""
    a, row_step, depth_step, b, b_row, c, c_row, depth, last = args
    a, b, c = (builder.inttoptr(p, kind.element.as_pointer()) for p in (a, b, c))

    def vector_at(base: Any, offset: Any, j: int) -> Any:
        place = builder.add(offset, ir.Constant(I64, j * kind.count))
        return builder.bitcast(builder.gep(base, [place]), kind.as_pointer())

    tile = [[cgutils.alloca_once(builder, kind) for _ in range(vectors)] for _ in range(rows)]
    a_rows, c_rows = [], []
    for r in range(rows):
        row = clamped(builder, r, last)
        a_rows.append(builder.gep(a, [builder.mul(row, row_step)]))
        c_rows.append(builder.mul(row, c_row))
        for j in range(vectors):
            builder.store(ir.Constant(kind, None), tile[r][j])
    with cgutils.for_range(builder, depth) as loop:
        from_b = [builder.load(vector_at(b, builder.mul(loop.index, b_row), j), align=4) for j in range(vectors)]
        step = builder.mul(loop.index, depth_step)
        for r in range(rows):
            one = broadcast(builder, builder.load(builder.gep(a_rows[r], [step]), align=4))
            for j in range(vectors):
                builder.store(multiply(builder, one, from_b[j], builder.load(tile[r][j])), tile[r][j])
    if (
        accumulate
    ):  # at the end: a sum of sums loses fewer digits than one long sum; before any store, since rows may repeat
        for r in range(rows):
            for j in range(vectors):
                so_far = builder.load(vector_at(c, c_rows[r], j), align=4)
                builder.store(builder.fadd(so_far, builder.load(tile[r][j])), tile[r][j])
    for r in range(rows):
        for j in range(vectors):
            builder.store(builder.load(tile[r][j]), vector_at(c, c_rows[r], j), align=4)


def _tile(rows: int, vectors: int, accumulate: bool, kind: Any = VECTOR) -> Any:
    @intrinsic
    def tile(typing, a, row_step, depth_step, b, b_row, c, c_row, depth, last, half):
        multiply = fused if half == types.none else fused_pairs

        def emit(context, builder, signature, args):
            _panel(builder, args[:-1], rows, vectors, accumulate, multiply, kind)
            return context.get_dummy_value()

        return types.void(*[types.intp] * 9, half), emit

    return tile


_wide_set, _wide_add = _tile(ROWS, VECTORS, accumulate=False), _tile(ROWS, VECTORS, accumulate=True)
_narrow_set, _narrow_add = _tile(NARROW_ROWS, 1, accumulate=False), _tile(NARROW_ROWS, 1, accumulate=True)
_doubles_add = _tile(ROWS, VECTORS, accumulate=True, kind=DOUBLES)


def _over_tiles(wide: Any, narrow: Any) -> Any:
    @inner
    def product(a, row_step, depth_step, b, b_row, c, c_row, rows, depth, columns, half):
        whole = columns - columns % WIDTH
        for j in range(0, 4 * whole, 4 * WIDTH):
            for r in range(0, rows, ROWS):
                last, from_a, to = min(ROWS, rows - r) - 1, a + 4 * r * row_step, c + 4 * r * c_row + j
                wide(from_a, row_step, depth_step, b + j, b_row, to, c_row, depth, last, half)
        for j in range(4 * whole, 4 * columns, 4 * LANES):
            for r in range(0, rows, NARROW_ROWS):
                last, from_a, to = min(NARROW_ROWS, rows - r) - 1, a + 4 * r * row_step, c + 4 * r * c_row + j
                narrow(from_a, row_step, depth_step, b + j, b_row, to, c_row, depth, last, half)

    return product


# C = A B, and C += A B.  A (rows, depth); rows of B (depth, columns) and C (rows, columns) stand ``b_row`` and ``c_row`` words
# apart; columns are a multiple of 16. Addresses in bytes, steps in words: A[r, d] is at ``a + 4 * (r * row_step + d * depth_step)``.
# A word is a float or, where ``half`` is not None, a pair of bf16, and ``depth`` counts pairs.
product, product_add = _over_tiles(_wide_set, _narrow_set), _over_tiles(_wide_add, _narrow_add)


@inner
def product_doubles_add(a, row_step, depth_step, b, b_row, c, c_row, rows, depth, columns):
    """C += A B as :func:`product_add` in float64, for ``columns`` columns, a multiple of 32."""
    for r in range(0, rows, ROWS):
        last = min(ROWS, rows - r) - 1
        for j in range(0, columns, WIDTH // 2):
            at = c + 8 * (r * c_row + j)
            _doubles_add(a + 8 * r * row_step, row_step, depth_step, b + 8 * j, b_row, at, c_row, depth, last, None)

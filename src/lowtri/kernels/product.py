"""The product that everything is made of: C (+)= A B, with a tile of C in registers.

A is read one number at a time and may lie in any direction in memory; B and C are rows of 64 floats, or fewer. In attention the
64 columns are queries: with S^T = K Q^T, O^T = V^T P^T and so on, keys and values are the A of every product and are read where
they lie. Source of the register tile: Goto and van de Geijn 2008.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from lowtri.kernels.simd import F32, I64, VECTOR, broadcast, fused
from lowtri.kernels.target import LANES, ROWS, VECTORS

__all__ = ["product", "product_add"]

WIDTH = VECTORS * LANES  # columns in a register tile


def _panel(builder: Any, args: Any, rows: int, accumulate: bool) -> None:
    """One register tile: ``rows`` x VECTORS accumulators over all steps. Rows past the last one repeat it, into spare room."""
    a, row_step, depth_step, b, b_row, c, c_row, depth, last = args
    floats = F32.as_pointer()
    a, b, c = (builder.inttoptr(p, floats) for p in (a, b, c))

    def vector_at(base: Any, offset: Any, j: int) -> Any:
        place = builder.add(offset, ir.Constant(I64, j * LANES))
        return builder.bitcast(builder.gep(base, [place]), VECTOR.as_pointer())

    tile = [[cgutils.alloca_once(builder, VECTOR) for _ in range(VECTORS)] for _ in range(rows)]
    a_rows, c_rows = [], []
    for r in range(rows):
        number = ir.Constant(I64, r)
        clamped = builder.select(builder.icmp_signed("<", number, last), number, last)
        a_rows.append(builder.gep(a, [builder.mul(clamped, row_step)]))
        c_rows.append(builder.mul(number, c_row))
        for j in range(VECTORS):
            start = builder.load(vector_at(c, c_rows[r], j), align=4) if accumulate else ir.Constant(VECTOR, None)
            builder.store(start, tile[r][j])
    with cgutils.for_range(builder, depth) as loop:
        from_b = [builder.load(vector_at(b, builder.mul(loop.index, b_row), j), align=4) for j in range(VECTORS)]
        step = builder.mul(loop.index, depth_step)
        for r in range(rows):
            one = broadcast(builder, builder.load(builder.gep(a_rows[r], [step]), align=4))
            for j in range(VECTORS):
                builder.store(fused(builder, one, from_b[j], builder.load(tile[r][j])), tile[r][j])
    for r in range(rows):
        for j in range(VECTORS):
            builder.store(builder.load(tile[r][j]), vector_at(c, c_rows[r], j), align=4)


_SIGNATURE = types.void(*[types.intp] * 9)


@intrinsic
def _panel_set(typing, a, row_step, depth_step, b, b_row, c, c_row, depth, last):
    def emit(context, builder, signature, args):
        _panel(builder, args, ROWS, accumulate=False)
        return context.get_dummy_value()

    return _SIGNATURE, emit


@intrinsic
def _panel_add(typing, a, row_step, depth_step, b, b_row, c, c_row, depth, last):
    def emit(context, builder, signature, args):
        _panel(builder, args, ROWS, accumulate=True)
        return context.get_dummy_value()

    return _SIGNATURE, emit


@njit
def product(a, row_step, depth_step, b, b_row, c, c_row, rows, depth, columns):
    """C = A B.  A (rows, depth), B (depth, columns), C (rows, columns).

    Addresses in bytes, steps in floats: A[r, d] stands at ``a + 4 * (r * row_step + d * depth_step)``, B[d, j] at
    ``b + 4 * (d * b_row + j)``. Columns are a multiple of WIDTH; C has room for ROWS - 1 rows more than it has.
    """
    for j in range(0, columns, WIDTH):
        for r in range(0, rows, ROWS):
            last = min(ROWS, rows - r) - 1
            _panel_set(
                a + 4 * r * row_step,
                row_step,
                depth_step,
                b + 4 * j,
                b_row,
                c + 4 * (r * c_row + j),
                c_row,
                depth,
                last,
            )


@njit
def product_add(a, row_step, depth_step, b, b_row, c, c_row, rows, depth, columns):
    """C += A B, as :func:`product`; the spare rows of C hold garbage afterwards."""
    for j in range(0, columns, WIDTH):
        for r in range(0, rows, ROWS):
            last = min(ROWS, rows - r) - 1
            _panel_add(
                a + 4 * r * row_step,
                row_step,
                depth_step,
                b + 4 * j,
                b_row,
                c + 4 * (r * c_row + j),
                c_row,
                depth,
                last,
            )

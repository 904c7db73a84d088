"""The product that everything is made of: C (+)= A B, with a tile of C in registers.

A is read one word at a time and may lie in any direction in memory; B and C are packed rows. Mostly their 64 columns are
queries: with S^T = K Q^T, O^T = V^T P^T and so on, keys and values are the A of every product and are read where
they lie. A word is a number or a pair of bf16. Source of the register tile: Goto and van de Geijn 2008.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from lowtri.compat.numba_private import alloca_once, for_range
from lowtri.kernels.device_function import device_function
from lowtri.kernels.simd import I64, broadcast, clamped

__all__ = ["multiplied", "product", "product_add"]


def multiplied(spec: Any) -> Any:
    """The word x * y + z of a product: of numbers, or the dot product of pairs."""
    return spec.isa.dot_pairs if spec.rows == "pairs" else spec.isa.fma


def _panel(builder: Any, args: Any, rows: int, vectors: int, accumulate: bool, spec: Any) -> None:
    """One register tile, ``rows`` x ``vectors`` accumulators over all steps. Rows past the last one do its work again."""
    a, row_step, depth_step, b, b_row, c, c_row, depth, last = args
    kind, multiply = spec.vector.ir, multiplied(spec)
    a, b, c = (builder.inttoptr(p, kind.element.as_pointer()) for p in (a, b, c))

    def vector_at(base: Any, offset: Any, j: int) -> Any:
        place = builder.add(offset, ir.Constant(I64, j * kind.count))
        return builder.bitcast(builder.gep(base, [place]), kind.as_pointer())

    tile = [[alloca_once(builder, kind) for _ in range(vectors)] for _ in range(rows)]
    a_rows, c_rows = [], []
    for r in range(rows):
        row = clamped(builder, r, last)
        a_rows.append(builder.gep(a, [builder.mul(row, row_step)]))
        c_rows.append(builder.mul(row, c_row))
        for j in range(vectors):
            builder.store(ir.Constant(kind, None), tile[r][j])
    with for_range(builder, depth) as loop:
        from_b = [builder.load(vector_at(b, builder.mul(loop.index, b_row), j), align=4) for j in range(vectors)]
        step = builder.mul(loop.index, depth_step)
        for r in range(rows):
            one = broadcast(builder, builder.load(builder.gep(a_rows[r], [step]), align=4), kind.count)
            for j in range(vectors):
                builder.store(multiply(builder, one, from_b[j], builder.load(tile[r][j])), tile[r][j])
    # At the end: a sum of sums loses fewer digits than one long sum. Before any store, since rows may repeat.
    for r in range(rows if accumulate else 0):
        for j in range(vectors):
            so_far = builder.load(vector_at(c, c_rows[r], j), align=4)
            builder.store(builder.fadd(so_far, builder.load(tile[r][j])), tile[r][j])
    for r in range(rows):
        for j in range(vectors):
            builder.store(builder.load(tile[r][j]), vector_at(c, c_rows[r], j), align=4)


def _tile(wide: bool, accumulate: bool) -> Any:
    @intrinsic
    def tile(typing, a, row_step, depth_step, b, b_row, c, c_row, depth, last, spec):
        rows, vectors, narrow_rows = spec.value.tile

        def emit(context, builder, signature, args):
            shape = (rows, vectors) if wide else (narrow_rows, 1)
            _panel(builder, args[:-1], *shape, accumulate, spec.value)
            return context.get_dummy_value()

        return types.void(*[types.intp] * 9, spec), emit

    return tile


@intrinsic
def _tile_shape(typing, spec):
    """Rows and columns of the wide register tile, rows of the narrow one."""
    rows, vectors, narrow_rows = spec.value.tile
    kind = types.UniTuple(types.int64, 3)

    def emit(c, b, s, a):
        shape = (rows, vectors * spec.value.lanes, narrow_rows)
        return c.make_tuple(b, kind, [ir.Constant(I64, n) for n in shape])

    return kind(spec), emit


def _over_tiles(wide: Any, narrow: Any) -> Any:
    @device_function
    def product(a, row_step, depth_step, b, b_row, c, c_row, rows, depth, columns, spec):
        tile_rows, tile_columns, narrow_rows = _tile_shape(spec)
        size = spec.number_bytes
        whole = columns - columns % tile_columns
        for j in range(0, size * whole, size * tile_columns):
            for r in range(0, rows, tile_rows):
                last, from_a, to = min(tile_rows, rows - r) - 1, a + size * r * row_step, c + size * r * c_row + j
                wide(from_a, row_step, depth_step, b + j, b_row, to, c_row, depth, last, spec)
        for j in range(size * whole, size * columns, 64):
            for r in range(0, rows, narrow_rows):
                last, from_a, to = min(narrow_rows, rows - r) - 1, a + size * r * row_step, c + size * r * c_row + j
                narrow(from_a, row_step, depth_step, b + j, b_row, to, c_row, depth, last, spec)

    return product


# C = A B, and C += A B.  A (rows, depth); rows of B (depth, columns) and C (rows, columns) stand ``b_row`` and ``c_row`` words
# apart; columns are whole vectors. Addresses in bytes, steps in words: A[r, d] is at ``a + size * (r * row_step + d * depth_step)``.
product = _over_tiles(_tile(wide=True, accumulate=False), _tile(wide=False, accumulate=False))
product_add = _over_tiles(_tile(wide=True, accumulate=True), _tile(wide=False, accumulate=True))

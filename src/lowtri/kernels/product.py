"""The matrix product of all kernels: C = A B or C += A B, with a tile of C in registers.

A is read one word at a time and may have any strides; B and C are packed rows, and their 64 columns are mostly queries. In
S^T = K Q^T, O^T = V^T P^T and so on, keys and values are the operand A of every product and are read without a copy. A word is a
number or a pair of bf16. Source of the register tile: Goto and van de Geijn 2008.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from lowtri.compat.numba_private import alloca_once, for_range
from lowtri.kernels.device_function import device_function
from lowtri.kernels.simd import I64, broadcast, clamped

__all__ = ["multiply_add", "product", "product_add"]


def multiply_add(spec: Any) -> Any:
    """The operation x * y + z on vectors of words: of numbers, or with dot products of pairs."""
    return spec.operations.dot_pairs if spec.rows == "pairs" else spec.operations.fma


def _emit_tile(builder: Any, args: Any, rows: int, vectors: int, accumulate: bool, spec: Any) -> None:
    """One register tile, ``rows`` x ``vectors`` accumulators over the whole depth. Rows past the last one repeat it."""
    a, row_step, depth_step, b, b_row, c, c_row, depth, last = args
    kind, multiply = spec.vector.ir, multiply_add(spec)
    a, b, c = (builder.inttoptr(p, kind.element.as_pointer()) for p in (a, b, c))

    def vector_at(base: Any, offset: Any, j: int) -> Any:
        index = builder.add(offset, ir.Constant(I64, j * kind.count))
        return builder.bitcast(builder.gep(base, [index]), kind.as_pointer())

    tile = [[alloca_once(builder, kind) for _ in range(vectors)] for _ in range(rows)]
    a_rows, c_rows = [], []
    for r in range(rows):
        row = clamped(builder, r, last)
        a_rows.append(builder.gep(a, [builder.mul(row, row_step)]))
        c_rows.append(builder.mul(row, c_row))
        for j in range(vectors):
            builder.store(ir.Constant(kind, None), tile[r][j])
    with for_range(builder, depth) as loop:
        b_vectors = [builder.load(vector_at(b, builder.mul(loop.index, b_row), j), align=4) for j in range(vectors)]
        step = builder.mul(loop.index, depth_step)
        for r in range(rows):
            a_word = broadcast(builder, builder.load(builder.gep(a_rows[r], [step]), align=4), kind.count)
            for j in range(vectors):
                builder.store(multiply(builder, a_word, b_vectors[j], builder.load(tile[r][j])), tile[r][j])
    # C is added at the end, since a sum of sums loses fewer digits than one long sum; and before any store, since rows may repeat.
    for r in range(rows if accumulate else 0):
        for j in range(vectors):
            sum_before = builder.load(vector_at(c, c_rows[r], j), align=4)
            builder.store(builder.fadd(sum_before, builder.load(tile[r][j])), tile[r][j])
    for r in range(rows):
        for j in range(vectors):
            builder.store(builder.load(tile[r][j]), vector_at(c, c_rows[r], j), align=4)


def _tile(wide: bool, accumulate: bool) -> Any:
    @intrinsic
    def tile(typing, a, row_step, depth_step, b, b_row, c, c_row, depth, last, spec):
        rows, vectors, narrow_rows = spec.value.tile

        def emit(context, builder, signature, args):
            shape = (rows, vectors) if wide else (narrow_rows, 1)
            _emit_tile(builder, args[:-1], *shape, accumulate, spec.value)
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
                last, a_tile, c_tile = min(tile_rows, rows - r) - 1, a + size * r * row_step, c + size * r * c_row + j
                wide(a_tile, row_step, depth_step, b + j, b_row, c_tile, c_row, depth, last, spec)
        for j in range(size * whole, size * columns, 64):
            for r in range(0, rows, narrow_rows):
                last, a_tile, c_tile = min(narrow_rows, rows - r) - 1, a + size * r * row_step, c + size * r * c_row + j
                narrow(a_tile, row_step, depth_step, b + j, b_row, c_tile, c_row, depth, last, spec)

    return product


# C = A B, and C += A B, of A (rows, depth), B (depth, columns) and C (rows, columns). Columns are whole vectors; rows of B and C are
# ``b_row`` and ``c_row`` words apart. Addresses in bytes, steps in words: A[r, d] is at ``a + size * (r * row_step + d * depth_step)``.
product = _over_tiles(_tile(wide=True, accumulate=False), _tile(wide=False, accumulate=False))
product_add = _over_tiles(_tile(wide=True, accumulate=True), _tile(wide=False, accumulate=True))

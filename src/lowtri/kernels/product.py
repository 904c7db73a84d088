"""The matrix product of all kernels: C = A B or C += A B, with a tile of C in registers.

A is read one word at a time and may have any strides; rows of B and C are packed. In S^T = K Q^T keys are the operand A, with queries
in the columns; in O = P V values are the operand B, so both are read without a copy. A word is a number or a pair of bf16. Two kernels
measure the limits of a CPU: the product alone, and a loop that sums what it reads. Source of the register tile: Goto and van de Geijn
2008.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from lowtri.compat.numba_private import alloca_once, for_range
from lowtri.kernels import blocks
from lowtri.kernels.device_function import by_spec, device_function
from lowtri.kernels.record import take
from lowtri.kernels.scratch import MULTIPLY_DEPTH, MULTIPLY_ROWS
from lowtri.kernels.simd import I64, add, broadcast, clamped, load, prefetch, splat, store
from lowtri.kernels.spec import QUERIES

__all__ = ["multiply_add", "product", "product_add"]


def multiply_add(spec: Any) -> Any:
    """The operation x * y + z on vectors of words: of numbers, or with dot products of pairs."""
    return spec.operations.dot_pairs if spec.operand == "pairs" else spec.operations.fma


def _emit_tile(builder: Any, args: Any, rows: int, vectors: int, accumulate: bool, spec: Any) -> None:
    """One register tile, ``rows`` x ``vectors`` accumulators over the whole depth. Rows past the last one repeat it.

    Where one vector fills a register, loads are fewer than multiply-adds; the tile then prefetches what lies ``ahead`` bytes from the
    words that it reads of A (C = A B) or of B (C += A B). A tile one vector wide has no loads to spare.
    """
    a, row_step, depth_step, b, b_row, c, c_row, depth, ahead, last = args
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
        b_addresses = [vector_at(b, builder.mul(loop.index, b_row), j) for j in range(vectors)]
        step = builder.mul(loop.index, depth_step)
        a_addresses = [builder.gep(row, [step]) for row in a_rows]
        if spec.isa.whole_vectors and vectors > 1:
            for address in b_addresses if accumulate else a_addresses:
                prefetch(builder, builder.add(builder.ptrtoint(address, I64), ahead))
        b_vectors = [builder.load(address, align=4) for address in b_addresses]
        for r in range(rows):
            a_word = broadcast(builder, builder.load(a_addresses[r], align=4), kind.count)
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


def _shape(vectors: int, spec: Any) -> tuple[int, int]:
    """Rows and vectors of the register tile for so many vectors: 1, 2, or the widest.

    One of two vectors has as many accumulators as the narrow one, and nearly half of its loads.
    """
    rows, most, narrow_rows = spec.tile
    return {1: (narrow_rows, 1), 2: (max(narrow_rows // 2, 1), 2)}.get(vectors, (rows, most))


def _tile(vectors: int, accumulate: bool) -> Any:
    @intrinsic
    def tile(typing, a, row_step, depth_step, b, b_row, c, c_row, depth, ahead, last, spec):
        def emit(context, builder, signature, args):
            emit_tile = blocks.emit_tile if spec.value.in_blocks else _emit_tile
            emit_tile(builder, args[:-1], *_shape(vectors, spec.value), accumulate, spec.value)
            return context.get_dummy_value()

        return types.void(*[types.intp] * 10, spec), emit

    return tile


def _over_rows(vectors: int, accumulate: bool) -> Any:
    """A register tile moved down the rows and over the columns as far as it fits; returns the first column that is left."""
    tile = _tile(vectors, accumulate)

    @intrinsic
    def shape(typing, spec):
        """Rows and columns of the register tile."""
        kind = types.UniTuple(types.int64, 2)

        def emit(c, b, s, a):
            rows, width = _shape(vectors, spec.value)
            return c.make_tuple(b, kind, [ir.Constant(I64, n) for n in (rows, width * spec.value.lanes)])

        return kind(spec), emit

    @device_function
    def over_rows(a, row_step, depth_step, b, b_row, c, c_row, rows, depth, ahead, columns, spec):
        (tile_rows, tile_columns), size, column = shape(spec), spec.number_bytes, 0
        while column + tile_columns <= columns:
            for r in range(0, rows, tile_rows):
                last, a_tile = min(tile_rows, rows - r) - 1, a + size * r * row_step
                b_tile, c_tile = b + size * column, c + size * (r * c_row + column)
                tile(a_tile, row_step, depth_step, b_tile, b_row, c_tile, c_row, depth, ahead, last, spec)
            column += tile_columns
        return column

    return over_rows


def _product(accumulate: bool) -> Any:
    widest, two, narrow = (_over_rows(vectors, accumulate) for vectors in (4, 2, 1))

    @by_spec
    def product(spec):
        def of_widths(a, row_step, depth_step, b, b_row, c, c_row, rows, depth, ahead, columns, spec):
            size = spec.number_bytes
            j = widest(a, row_step, depth_step, b, b_row, c, c_row, rows, depth, ahead, columns, spec)
            b_rest, c_rest, left = b + size * j, c + size * j, columns - j
            j = two(a, row_step, depth_step, b_rest, b_row, c_rest, c_row, rows, depth, ahead, left, spec)
            b_rest, c_rest, left = b_rest + size * j, c_rest + size * j, left - j
            narrow(a, row_step, depth_step, b_rest, b_row, c_rest, c_row, rows, depth, ahead, left, spec)

        def of_vectors(a, row_step, depth_step, b, b_row, c, c_row, rows, depth, ahead, columns, spec):
            narrow(a, row_step, depth_step, b, b_row, c, c_row, rows, depth, ahead, columns, spec)

        return of_widths if spec.tile[1] > 1 else of_vectors

    return product


# C = A B, and C += A B, of A (rows, depth), B (depth, columns) and C (rows, columns). Columns are whole vectors; rows of B and C are
# ``b_row`` and ``c_row`` words apart. ``ahead`` bytes from A's rows (C = A B) or from B's (C += A B) lines are prefetched. Addresses in
# bytes, steps in words: A[r, d] is at ``a + size * (r * row_step + d * depth_step)``. Where a spec is
# in blocks, the B of C = A B is (:mod:`lowtri.kernels.blocks`).
product, product_add = _product(accumulate=False), _product(accumulate=True)


# The limits of a CPU.

_A, _B, _C = 4 * MULTIPLY_ROWS * MULTIPLY_DEPTH, 4 * MULTIPLY_DEPTH * QUERIES, 4 * MULTIPLY_ROWS * QUERIES


def multiply(call):
    """Every thread repeats one product, in its own scratch memory."""
    a, depth = call.scratch + (_A + _B + _C) * take(call.next_thread), MULTIPLY_DEPTH
    for _ in range(call.repeats):
        product(a, depth, 1, a + _A, QUERIES, a + _A + _B, QUERIES, MULTIPLY_ROWS, depth, 0, QUERIES, call.spec)


def read(call):
    """Every thread takes blocks and adds each up, in four sums of 16 floats; the total is stored, or LLVM would drop the loop."""
    spec = call.spec
    while True:
        task = take(call.next_task)
        if task >= call.tasks:
            return
        sum0 = sum1 = sum2 = sum3 = splat(0.0, spec)
        start = call.source + task * call.block
        for address in range(start, start + call.block, 256):
            sum0 = add(sum0, load(address, spec))
            sum1 = add(sum1, load(address + 64, spec))
            sum2 = add(sum2, load(address + 128, spec))
            sum3 = add(sum3, load(address + 192, spec))
        store(call.sums + 64 * task, add(add(sum0, sum1), add(sum2, sum3)))

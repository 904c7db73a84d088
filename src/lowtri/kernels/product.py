"""The matrix product on vectors: C = A B or C += A B, with a block of C in registers; and two kernels that measure a CPU's limits.

A is read one element at a time and may have any strides; rows of B and C are packed. In S^T = K Q^T keys are the operand A, with
queries in the columns; in O = P V values are the operand B, so both are read without a copy. An element is a number or a pair of bf16.
The kernels of limits are the product alone, and a loop that sums what it reads. Source of the register block: Goto and van de Geijn
2008.
"""

from __future__ import annotations

from llvmlite import ir

from lowtri.compat.numba_private import alloca_once, for_range
from lowtri.kernels.abi import MULTIPLY_DEPTH, MULTIPLY_ROWS
from lowtri.kernels.bfmmla import emit_bfmmla_block
from lowtri.kernels.device import constants_of_spec, device_function, operation, take, tasks
from lowtri.kernels.operations import I64, broadcast, i64, parts_of, pointer
from lowtri.kernels.simd import add, clamped, load, prefetch, splat, store
from lowtri.kernels.spec import BF16X2, QUERIES
from lowtri.kernels.values import Matrix, Packed, RegisterBlock


def _product(accumulate):
    widest, two, narrow = (_over_rows(vectors, accumulate) for vectors in (4, 2, 1))

    @device_function
    def product(a, b, c, rows, depth, ahead, columns, spec):
        """C = A B, or C += A B, of A (rows, depth), B (depth, columns) and C (rows, columns).

        Columns are whole vectors. ``ahead`` bytes from A's rows (C = A B) or from B's (C += A B) lines are prefetched.
        """
        size, done = spec.number_bytes, 0
        if spec.has_wide_block:
            done = widest(a, b, c, rows, depth, ahead, columns, spec)
            b, c = Packed(b.at + size * done, b.row), Packed(c.at + size * done, c.row)
            columns -= done
            done = two(a, b, c, rows, depth, ahead, columns, spec)
            b, c = Packed(b.at + size * done, b.row), Packed(c.at + size * done, c.row)
            columns -= done
        narrow(a, b, c, rows, depth, ahead, columns, spec)

    return product


def _over_rows(vectors, accumulate):
    """A register block moved down the rows and over the columns as far as it fits; returns the first column that is left."""

    @operation()
    def register_block(builder, a, b, c, depth, ahead, last, spec):
        emit = emit_bfmmla_block if spec.uses_bfmmla else emit_register_block
        block = RegisterBlock(
            Matrix(*parts_of(builder, a)),
            Packed(*parts_of(builder, b)),
            Packed(*parts_of(builder, c)),
            depth,
            ahead,
            last,
        )
        emit(builder, block, _shape(vectors, spec), accumulate, spec)

    @constants_of_spec(2)
    def shape(spec):
        rows, width = _shape(vectors, spec)
        return rows, width * spec.lanes

    @device_function
    def over_rows(a, b, c, rows, depth, ahead, columns, spec):
        (block_rows, block_columns) = shape(spec)
        size = spec.number_bytes
        column = 0
        while column + block_columns <= columns:
            for r in range(0, rows, block_rows):
                last = min(block_rows, rows - r) - 1
                a_rows = Matrix(a.at + size * r * a.row, a.row, a.element)
                b_columns = Packed(b.at + size * column, b.row)
                c_block = Packed(c.at + size * (r * c.row + column), c.row)
                register_block(a_rows, b_columns, c_block, depth, ahead, last, spec)
            column += block_columns
        return column

    return over_rows


def _shape(vectors, spec):
    """Rows and vectors of the register block for so many vectors: 1, 2, or the widest.

    One of two vectors has as many accumulators as the narrow one, and nearly half of its loads.
    """
    rows, most, narrow_rows = spec.register_block
    return {1: (narrow_rows, 1), 2: (max(narrow_rows // 2, 1), 2)}.get(vectors, (rows, most))


def emit_register_block(builder, block, shape, accumulate, spec):
    """Rows x vectors accumulators over the whole depth. Rows past the last one repeat it.

    Where one vector fills a register, loads are fewer than multiply-adds; the block then prefetches what lies ``ahead`` bytes from the
    elements that it reads of A (C = A B) or of B (C += A B). A block one vector wide has no loads to spare.
    """
    rows, vectors = shape
    kind, multiply = spec.vector.ir, multiply_add(spec)
    a, b, c = (pointer(builder, matrix.at, kind.element) for matrix in (block.a, block.b, block.c))

    def vector_at(base, offset, j):
        return builder.bitcast(builder.gep(base, [builder.add(offset, i64(j * kind.count))]), kind.as_pointer())

    sums = [[alloca_once(builder, kind) for _ in range(vectors)] for _ in range(rows)]
    a_rows, c_rows = [], []
    for r in range(rows):
        row = clamped(builder, r, block.last)
        a_rows.append(builder.gep(a, [builder.mul(row, block.a.row)]))
        c_rows.append(builder.mul(row, block.c.row))
        for total in sums[r]:
            builder.store(ir.Constant(kind, None), total)
    with for_range(builder, block.depth) as loop:
        b_addresses = [vector_at(b, builder.mul(loop.index, block.b.row), j) for j in range(vectors)]
        step = builder.mul(loop.index, block.a.element)
        a_addresses = [builder.gep(row, [step]) for row in a_rows]
        if spec.isa.whole_vectors and vectors > 1:
            for address in b_addresses if accumulate else a_addresses:
                prefetch(builder, builder.add(builder.ptrtoint(address, I64), block.ahead))
        b_vectors = [builder.load(address, align=4) for address in b_addresses]
        for r in range(rows):
            a_element = broadcast(builder, builder.load(a_addresses[r], align=4), kind.count)
            for total, b_vector in zip(sums[r], b_vectors, strict=True):
                builder.store(multiply(builder, a_element, b_vector, builder.load(total)), total)
    # C is added at the end, since a sum of sums loses fewer digits than one long sum; and before any store, since rows may repeat.
    places = [(sums[r][j], c_rows[r], j) for r in range(rows) for j in range(vectors)]
    for total, row, j in places if accumulate else ():
        builder.store(builder.fadd(builder.load(vector_at(c, row, j), align=4), builder.load(total)), total)
    for total, row, j in places:
        builder.store(builder.load(total), vector_at(c, row, j), align=4)


def multiply_add(spec):
    """The operation x * y + z on vectors of elements: of numbers, or with dot products of pairs."""
    return spec.operations.dot_bf16x2 if spec.operand == BF16X2 else spec.operations.fma


product, product_add = _product(accumulate=False), _product(accumulate=True)


# The limits of a CPU.

_A_BYTES = 4 * MULTIPLY_ROWS * MULTIPLY_DEPTH
_B_BYTES = 4 * MULTIPLY_DEPTH * QUERIES
_C_BYTES = 4 * MULTIPLY_ROWS * QUERIES


def multiply(call):
    """Every thread repeats one product, in its own scratch memory."""
    address = call.scratch + (_A_BYTES + _B_BYTES + _C_BYTES) * take(call.next_thread)
    a = Matrix(address, MULTIPLY_DEPTH, 1)
    b = Packed(address + _A_BYTES, QUERIES)
    c = Packed(address + _A_BYTES + _B_BYTES, QUERIES)
    for _ in range(call.repeats):
        product(a, b, c, MULTIPLY_ROWS, MULTIPLY_DEPTH, 0, QUERIES, call.spec)


def read(call):
    """Every thread takes blocks and adds each up, in four sums of 16 floats; the total is stored, or LLVM would drop the loop."""
    spec = call.spec
    for task in tasks(call):
        sum0 = sum1 = sum2 = sum3 = splat(0.0, spec)
        start = call.source + task * call.block
        for address in range(start, start + call.block, 256):
            sum0 = add(sum0, load(address, spec))
            sum1 = add(sum1, load(address + 64, spec))
            sum2 = add(sum2, load(address + 128, spec))
            sum3 = add(sum3, load(address + 192, spec))
        store(call.sums + 64 * task, add(add(sum0, sum1), add(sum2, sum3)))

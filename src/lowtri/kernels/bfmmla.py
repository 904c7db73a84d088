"""Products in blocks of bf16, by the instruction BFMMLA of ARM.

Accumulators are blocks of 2 x 2: two rows of C in two columns. A step is two elements deep. An instruction multiplies four numbers of
each of two rows of A with four of each of two columns of B: 16 products, where a dot product of pairs has 8. The blocks of A are made
in registers, and the blocks of C become rows at the end. The blocks of B are made in registers in C += A B. In C = A B they are in
memory (:func:`elements_to_blocks`): this B is queries, which meet many keys. Source: Arm Architecture Reference Manual.
"""

from __future__ import annotations

from llvmlite import ir

from lowtri.compat.numba_private import alloca_once, for_range
from lowtri.kernels.device import device_function, operation
from lowtri.kernels.operations import F32, I32, i64, pointer, shuffled
from lowtri.kernels.simd import clamped
from lowtri.kernels.spec import QUERIES

_TWO = ir.VectorType(F32, 2)  # elements
_FOUR = ir.VectorType(F32, 4)


def emit_bfmmla_block(builder, block, shape, accumulate, spec):
    """A register block of an even number of rows; arguments as in :func:`lowtri.kernels.product.emit_register_block`.

    In A either the elements of a row are neighbours, or its rows are. The depth of C = A B is even. Rows past the last one repeat it,
    or have any results; these are stored first, at the last row's place, and its own after them.
    """
    rows, vectors = shape
    a, b, c = (pointer(builder, matrix.at, F32) for matrix in (block.a, block.b, block.c))
    quads = range(vectors * spec.lanes // 4)  # of columns
    sums = [[alloca_once(builder, _FOUR) for _ in range(2 * len(quads))] for _ in range(rows // 2)]
    for total in (total for row in sums for total in row):
        builder.store(ir.Constant(_FOUR, None), total)

    def steps(two_elements_of_rows):
        """Sum over the depth; the argument reads two elements of A's rows r and r + 1."""

        def step(element, whole):
            blocks_of_a = [two_elements_of_rows(r, element, whole) for r in range(0, rows, 2)]
            for n in quads:
                first = builder.gep(b, [builder.add(builder.mul(element, block.b.row), i64(4 * n))])
                both = [builder.bitcast(at, _FOUR.as_pointer()) for at in (first, builder.gep(first, [block.b.row]))]
                one = builder.load(both[0], align=4)
                two = builder.load(both[1], align=4) if whole else ir.Constant(_FOUR, None)
                for m, block_of_b in enumerate(_as_blocks(builder, one, two) if accumulate else (one, two)):
                    for block_of_a, row in zip(blocks_of_a, sums, strict=True):
                        total = row[2 * n + m]
                        done = spec.operations.multiply_blocks(builder, builder.load(total), block_of_a, block_of_b)
                        builder.store(done, total)

        with for_range(builder, builder.lshr(block.depth, i64(1))) as loop:
            step(builder.shl(loop.index, i64(1)), True)
        if accumulate:
            with builder.if_then(builder.trunc(block.depth, ir.IntType(1))):
                step(builder.sub(block.depth, i64(1)), False)

    row_addresses = [builder.gep(a, [builder.mul(clamped(builder, r, block.last), block.a.row)]) for r in range(rows)]
    even = builder.and_(block.last, i64(-2))
    pair_addresses = [builder.gep(a, [clamped(builder, r, even)]) for r in range(0, rows, 2)]

    def along_rows(r, element, whole):
        both = [_elements(builder, builder.gep(row, [element]), whole) for row in row_addresses[r : r + 2]]
        return shuffled(builder, *both, [0, 1, 2, 3])

    def along_depths(r, element, whole):
        first = builder.gep(pair_addresses[r // 2], [builder.mul(element, block.a.element)])
        one = _elements(builder, first, True)
        two = _elements(builder, builder.gep(first, [block.a.element]), True) if whole else ir.Constant(_TWO, None)
        return shuffled(builder, one, two, [0, 2, 1, 3])

    with builder.if_else(builder.icmp_signed("==", block.a.element, i64(1))) as (neighbours, strided):
        with neighbours:
            steps(along_rows)
        with strided:
            steps(along_depths)

    stores = []
    for r in range(rows):
        row = builder.mul(clamped(builder, r, block.last), block.c.row)
        for n in quads:
            blocks = [builder.load(total) for total in sums[r // 2][2 * n : 2 * n + 2]]
            total = shuffled(builder, *blocks, [0, 1, 4, 5] if r % 2 == 0 else [2, 3, 6, 7])
            place = builder.bitcast(builder.gep(c, [builder.add(row, i64(4 * n))]), _FOUR.as_pointer())
            # C is added at the end, since a sum of sums loses fewer digits than one long sum; and before any store.
            stores.append((builder.fadd(builder.load(place, align=4), total) if accumulate else total, place))
    for total, place in reversed(stores):
        builder.store(total, place, align=4)


def _elements(builder, address, both):
    """Two neighbouring elements, or one; 0 instead of the second one."""
    if both:
        return builder.load(builder.bitcast(address, _TWO.as_pointer()), align=4)
    return builder.insert_element(ir.Constant(_TWO, None), builder.load(address, align=4), ir.Constant(I32, 0))


def _as_blocks(builder, one, two):
    """Two elements of each of four columns, as two blocks of two columns."""
    return [shuffled(builder, one, two, [n, n + 4, n + 1, n + 5]) for n in (0, 2)]


@operation()
def _four_columns_to_blocks(builder, elements):
    """Four columns of two rows (elements, 64), in place."""
    places = [pointer(builder, builder.add(elements, i64(4 * QUERIES * n)), _FOUR) for n in (0, 1)]
    blocks = _as_blocks(builder, *(builder.load(place, align=4) for place in places))
    for block, place in zip(blocks, places, strict=True):
        builder.store(block, place, align=4)


@device_function
def elements_to_blocks(elements, depth, columns):
    """Rows (depth, 64) as the operand B of C = A B in blocks, in place: two rows have the blocks of their two elements of each column.

    The first row has those of the columns 0 and 1, 4 and 5, ..; the second row the others. The depth is even.
    """
    for d in range(0, depth, 2):
        for column in range(0, columns, 4):
            _four_columns_to_blocks(elements + 4 * (QUERIES * d + column))

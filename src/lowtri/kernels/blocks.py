"""The register tile of a product of pairs of bf16 where one instruction multiplies blocks: BFMMLA of ARM.

Its accumulators are blocks of 2 x 2: two rows of C in two columns. A step is two words deep. An instruction multiplies four numbers
of each of two rows of A with four of each of two columns of B: 16 products, where a dot product of pairs has 8. The blocks of A are
made in registers, of words as :mod:`lowtri.kernels.product` has them, and the blocks of C become rows at the end. The blocks of B are
made in registers in C += A B. In C = A B they are in memory (:func:`words_to_blocks`): this B is queries, which meet many keys.
Source: Arm Architecture Reference Manual, BFMMLA.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from lowtri.compat.numba_private import alloca_once, for_range
from lowtri.kernels.device_function import device_function
from lowtri.kernels.simd import F32, I64, clamped, pointer, shuffled
from lowtri.kernels.spec import QUERIES

_WORD = F32  # a pair of bf16
_TWO, _FOUR = ir.VectorType(_WORD, 2), ir.VectorType(_WORD, 4)


def emit_tile(builder: Any, args: Any, rows: int, vectors: int, accumulate: bool, spec: Any) -> None:
    """A tile of an even number of rows; else as that of single words.

    In A either the words of a row are neighbours (depth step 1), or those of a depth (row step 1). The depth of C = A B is even. Rows
    past the last one repeat it, or have any results; these are stored first, at the last row's place, and its own after them.
    """
    a, row_step, depth_step, b, b_row, c, c_row, depth, _, last = args
    a, b, c = (builder.inttoptr(p, _WORD.as_pointer()) for p in (a, b, c))
    quads = range(vectors * spec.lanes // 4)  # of columns
    tile = [[alloca_once(builder, _FOUR) for _ in range(2 * len(quads))] for _ in range(rows // 2)]
    for row_of_blocks in tile:
        for block in row_of_blocks:
            builder.store(ir.Constant(_FOUR, None), block)

    def steps(two_words_of_rows: Any) -> None:
        """Sum over the depth; the argument reads two words of A's rows r and r + 1."""

        def step(word: Any, whole: bool) -> None:
            blocks_of_a = [two_words_of_rows(r, word, whole) for r in range(0, rows, 2)]
            for n in quads:
                first = builder.gep(b, [builder.add(builder.mul(word, b_row), ir.Constant(I64, 4 * n))])
                both = [builder.bitcast(at, _FOUR.as_pointer()) for at in (first, builder.gep(first, [b_row]))]
                one = builder.load(both[0], align=4)
                two = builder.load(both[1], align=4) if whole else ir.Constant(_FOUR, None)
                for m, block_of_b in enumerate(_as_blocks(builder, one, two) if accumulate else (one, two)):
                    for block_of_a, row in zip(blocks_of_a, tile, strict=True):
                        sums = row[2 * n + m]
                        done = spec.operations.multiply_blocks(builder, builder.load(sums), block_of_a, block_of_b)
                        builder.store(done, sums)

        with for_range(builder, builder.lshr(depth, ir.Constant(I64, 1))) as loop:
            step(builder.shl(loop.index, ir.Constant(I64, 1)), True)
        if accumulate:
            with builder.if_then(builder.trunc(depth, ir.IntType(1))):
                step(builder.sub(depth, ir.Constant(I64, 1)), False)

    row_addresses = [builder.gep(a, [builder.mul(clamped(builder, r, last), row_step)]) for r in range(rows)]
    even = builder.and_(last, ir.Constant(I64, -2))
    pair_addresses = [builder.gep(a, [clamped(builder, r, even)]) for r in range(0, rows, 2)]

    def along_rows(r: int, word: Any, whole: bool) -> Any:
        both = [_words(builder, builder.gep(row, [word]), 2 if whole else 1) for row in row_addresses[r : r + 2]]
        return shuffled(builder, *both, [0, 1, 2, 3])

    def along_depths(r: int, word: Any, whole: bool) -> Any:
        first = builder.gep(pair_addresses[r // 2], [builder.mul(word, depth_step)])
        one = _words(builder, first, 2)
        two = _words(builder, builder.gep(first, [depth_step]), 2) if whole else ir.Constant(_TWO, None)
        return shuffled(builder, one, two, [0, 2, 1, 3])

    with builder.if_else(builder.icmp_signed("==", depth_step, ir.Constant(I64, 1))) as (neighbours, strided):
        with neighbours:
            steps(along_rows)
        with strided:
            steps(along_depths)

    stores = []
    for r in range(rows):
        row = builder.mul(clamped(builder, r, last), c_row)
        for n in quads:
            blocks = [builder.load(block) for block in tile[r // 2][2 * n : 2 * n + 2]]
            total = shuffled(builder, *blocks, [0, 1, 4, 5] if r % 2 == 0 else [2, 3, 6, 7])
            place = builder.bitcast(builder.gep(c, [builder.add(row, ir.Constant(I64, 4 * n))]), _FOUR.as_pointer())
            # C is added at the end, since a sum of sums loses fewer digits than one long sum; and before any store.
            stores.append((builder.fadd(builder.load(place, align=4), total) if accumulate else total, place))
    for total, place in reversed(stores):
        builder.store(total, place, align=4)


def _words(builder: Any, address: Any, count: int) -> Any:
    """One or two neighbouring words; 0 instead of the second one."""
    if count == 2:
        return builder.load(builder.bitcast(address, _TWO.as_pointer()), align=4)
    return builder.insert_element(
        ir.Constant(_TWO, None), builder.load(address, align=4), ir.Constant(ir.IntType(32), 0)
    )


def _as_blocks(builder: Any, one: Any, two: Any) -> list[Any]:
    """Two words of each of four columns, as two blocks of two columns."""
    return [shuffled(builder, one, two, [n, n + 4, n + 1, n + 5]) for n in (0, 2)]


@intrinsic
def _four_columns_to_blocks(typing, words):
    """Four columns of two rows (words, 64), in place."""

    def emit(c, b, s, a):
        places = [pointer(b, b.add(a[0], ir.Constant(I64, 4 * QUERIES * n)), _FOUR) for n in (0, 1)]
        for block, place in zip(_as_blocks(b, *(b.load(place, align=4) for place in places)), places, strict=True):
            b.store(block, place, align=4)
        return c.get_dummy_value()

    return types.void(types.intp), emit


@device_function
def words_to_blocks(words, depth, columns):
    """Rows (depth, 64) as the operand B of C = A B in blocks, in place: two rows have the blocks of their two words of each column.

    The first row has those of the columns 0 and 1, 4 and 5, ..; the second row the others. The depth is even.
    """
    for d in range(0, depth, 2):
        for column in range(0, columns, 4):
            _four_columns_to_blocks(words + 4 * (QUERIES * d + column))

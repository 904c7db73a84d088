"""The matrix products of all kernels: C = A B or C += A B, with a tile of C in registers.

On vectors, A is read one word at a time and may have any strides; rows of B and C are packed. In S^T = K Q^T keys are the operand A,
with queries in the columns; in O = P V values are the operand B, so both are read without a copy. A word is a number or a pair of bf16.
On Intel's tile registers and in ARM's blocks one instruction multiplies bf16 matrices. Two kernels measure the limits of a CPU: the
product alone, and a loop that sums what it reads. Source of the register tile: Goto and van de Geijn 2008.
"""

from __future__ import annotations

from llvmlite import ir

from lowtri.compat.numba_private import alloca_once, for_range
from lowtri.kernels.abi import MULTIPLY_DEPTH, MULTIPLY_ROWS
from lowtri.kernels.device import constants_of_spec, device_function, operation, take, tasks
from lowtri.kernels.operations import F32, I32, I64, broadcast, i64, pointer, shuffled
from lowtri.kernels.simd import add, clamped, load, prefetch, splat, store
from lowtri.kernels.spec import QUERIES


def multiply_add(spec):
    """The operation x * y + z on vectors of words: of numbers, or with dot products of pairs."""
    return spec.operations.dot_pairs if spec.operand == "pairs" else spec.operations.fma


def _emit_tile(builder, args, rows, vectors, accumulate, spec):
    """One register tile, ``rows`` x ``vectors`` accumulators over the whole depth. Rows past the last one repeat it.

    Where one vector fills a register, loads are fewer than multiply-adds; the tile then prefetches what lies ``ahead`` bytes from the
    words that it reads of A (C = A B) or of B (C += A B). A tile one vector wide has no loads to spare.
    """
    a, row_step, depth_step, b, b_row, c, c_row, depth, ahead, last = args
    kind, multiply = spec.vector.ir, multiply_add(spec)
    a, b, c = (pointer(builder, p, kind.element) for p in (a, b, c))

    def vector_at(base, offset, j):
        return builder.bitcast(builder.gep(base, [builder.add(offset, i64(j * kind.count))]), kind.as_pointer())

    tile = [[alloca_once(builder, kind) for _ in range(vectors)] for _ in range(rows)]
    a_rows, c_rows = [], []
    for r in range(rows):
        row = clamped(builder, r, last)
        a_rows.append(builder.gep(a, [builder.mul(row, row_step)]))
        c_rows.append(builder.mul(row, c_row))
        for total in tile[r]:
            builder.store(ir.Constant(kind, None), total)
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
            for total, b_vector in zip(tile[r], b_vectors, strict=True):
                builder.store(multiply(builder, a_word, b_vector, builder.load(total)), total)
    # C is added at the end, since a sum of sums loses fewer digits than one long sum; and before any store, since rows may repeat.
    places = [(tile[r][j], c_rows[r], j) for r in range(rows) for j in range(vectors)]
    for total, row, j in places if accumulate else ():
        builder.store(builder.fadd(builder.load(vector_at(c, row, j), align=4), builder.load(total)), total)
    for total, row, j in places:
        builder.store(builder.load(total), vector_at(c, row, j), align=4)


def _shape(vectors, spec):
    """Rows and vectors of the register tile for so many vectors: 1, 2, or the widest.

    One of two vectors has as many accumulators as the narrow one, and nearly half of its loads.
    """
    rows, most, narrow_rows = spec.tile
    return {1: (narrow_rows, 1), 2: (max(narrow_rows // 2, 1), 2)}.get(vectors, (rows, most))


def _over_rows(vectors, accumulate):
    """A register tile moved down the rows and over the columns as far as it fits; returns the first column that is left."""

    @operation()
    def tile(builder, a, row_step, depth_step, b, b_row, c, c_row, depth, ahead, last, spec):
        emit = _emit_blocks if spec.in_blocks else _emit_tile
        args = a, row_step, depth_step, b, b_row, c, c_row, depth, ahead, last
        emit(builder, args, *_shape(vectors, spec), accumulate, spec)

    @constants_of_spec(2)
    def shape(spec):
        rows, width = _shape(vectors, spec)
        return rows, width * spec.lanes

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


def _product(accumulate):
    widest, two, narrow = (_over_rows(vectors, accumulate) for vectors in (4, 2, 1))

    @device_function
    def product(a, row_step, depth_step, b, b_row, c, c_row, rows, depth, ahead, columns, spec):
        size = spec.number_bytes
        if spec.has_wide_tile:
            j = widest(a, row_step, depth_step, b, b_row, c, c_row, rows, depth, ahead, columns, spec)
            b, c, columns = b + size * j, c + size * j, columns - j
            j = two(a, row_step, depth_step, b, b_row, c, c_row, rows, depth, ahead, columns, spec)
            b, c, columns = b + size * j, c + size * j, columns - j
        narrow(a, row_step, depth_step, b, b_row, c, c_row, rows, depth, ahead, columns, spec)

    return product


# C = A B, and C += A B, of A (rows, depth), B (depth, columns) and C (rows, columns). Columns are whole vectors; rows of B and C are
# ``b_row`` and ``c_row`` words apart. ``ahead`` bytes from A's rows (C = A B) or from B's (C += A B) lines are prefetched. Addresses in
# bytes, steps in words: A[r, d] is at ``a + size * (r * row_step + d * depth_step)``.
product, product_add = _product(accumulate=False), _product(accumulate=True)


# Blocks of bf16: BFMMLA of ARM.
#
# Accumulators are blocks of 2 x 2: two rows of C in two columns. A step is two words deep. An instruction multiplies four numbers of
# each of two rows of A with four of each of two columns of B: 16 products, where a dot product of pairs has 8. The blocks of A are made
# in registers, of words as above, and the blocks of C become rows at the end. The blocks of B are made in registers in C += A B. In
# C = A B they are in memory (`words_to_blocks`): this B is queries, which meet many keys. Source: Arm Architecture Reference Manual.

_TWO, _FOUR = ir.VectorType(F32, 2), ir.VectorType(F32, 4)  # words


def _emit_blocks(builder, args, rows, vectors, accumulate, spec):
    """A tile of an even number of rows; else as that of single words.

    In A either the words of a row are neighbours (depth step 1), or those of a depth (row step 1). The depth of C = A B is even. Rows
    past the last one repeat it, or have any results; these are stored first, at the last row's place, and its own after them.
    """
    a, row_step, depth_step, b, b_row, c, c_row, depth, _, last = args
    a, b, c = (pointer(builder, p, F32) for p in (a, b, c))
    quads = range(vectors * spec.lanes // 4)  # of columns
    tile = [[alloca_once(builder, _FOUR) for _ in range(2 * len(quads))] for _ in range(rows // 2)]
    for block in (block for row in tile for block in row):
        builder.store(ir.Constant(_FOUR, None), block)

    def steps(two_words_of_rows):
        """Sum over the depth; the argument reads two words of A's rows r and r + 1."""

        def step(word, whole):
            blocks_of_a = [two_words_of_rows(r, word, whole) for r in range(0, rows, 2)]
            for n in quads:
                first = builder.gep(b, [builder.add(builder.mul(word, b_row), i64(4 * n))])
                both = [builder.bitcast(at, _FOUR.as_pointer()) for at in (first, builder.gep(first, [b_row]))]
                one = builder.load(both[0], align=4)
                two = builder.load(both[1], align=4) if whole else ir.Constant(_FOUR, None)
                for m, block_of_b in enumerate(_as_blocks(builder, one, two) if accumulate else (one, two)):
                    for block_of_a, row in zip(blocks_of_a, tile, strict=True):
                        sums = row[2 * n + m]
                        done = spec.operations.multiply_blocks(builder, builder.load(sums), block_of_a, block_of_b)
                        builder.store(done, sums)

        with for_range(builder, builder.lshr(depth, i64(1))) as loop:
            step(builder.shl(loop.index, i64(1)), True)
        if accumulate:
            with builder.if_then(builder.trunc(depth, ir.IntType(1))):
                step(builder.sub(depth, i64(1)), False)

    row_addresses = [builder.gep(a, [builder.mul(clamped(builder, r, last), row_step)]) for r in range(rows)]
    even = builder.and_(last, i64(-2))
    pair_addresses = [builder.gep(a, [clamped(builder, r, even)]) for r in range(0, rows, 2)]

    def along_rows(r, word, whole):
        both = [_words(builder, builder.gep(row, [word]), whole) for row in row_addresses[r : r + 2]]
        return shuffled(builder, *both, [0, 1, 2, 3])

    def along_depths(r, word, whole):
        first = builder.gep(pair_addresses[r // 2], [builder.mul(word, depth_step)])
        one = _words(builder, first, True)
        two = _words(builder, builder.gep(first, [depth_step]), True) if whole else ir.Constant(_TWO, None)
        return shuffled(builder, one, two, [0, 2, 1, 3])

    with builder.if_else(builder.icmp_signed("==", depth_step, i64(1))) as (neighbours, strided):
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
            place = builder.bitcast(builder.gep(c, [builder.add(row, i64(4 * n))]), _FOUR.as_pointer())
            # C is added at the end, since a sum of sums loses fewer digits than one long sum; and before any store.
            stores.append((builder.fadd(builder.load(place, align=4), total) if accumulate else total, place))
    for total, place in reversed(stores):
        builder.store(total, place, align=4)


def _words(builder, address, both):
    """Two neighbouring words, or one; 0 instead of the second one."""
    if both:
        return builder.load(builder.bitcast(address, _TWO.as_pointer()), align=4)
    return builder.insert_element(ir.Constant(_TWO, None), builder.load(address, align=4), ir.Constant(I32, 0))


def _as_blocks(builder, one, two):
    """Two words of each of four columns, as two blocks of two columns."""
    return [shuffled(builder, one, two, [n, n + 4, n + 1, n + 5]) for n in (0, 2)]


@operation()
def _four_columns_to_blocks(builder, words):
    """Four columns of two rows (words, 64), in place."""
    places = [pointer(builder, builder.add(words, i64(4 * QUERIES * n)), _FOUR) for n in (0, 1)]
    blocks = _as_blocks(builder, *(builder.load(place, align=4) for place in places))
    for block, place in zip(blocks, places, strict=True):
        builder.store(block, place, align=4)


@device_function
def words_to_blocks(words, depth, columns):
    """Rows (depth, 64) as the operand B of C = A B in blocks, in place: two rows have the blocks of their two words of each column.

    The first row has those of the columns 0 and 1, 4 and 5, ..; the second row the others. The depth is even.
    """
    for d in range(0, depth, 2):
        for column in range(0, columns, 4):
            _four_columns_to_blocks(words + 4 * (QUERIES * d + column))


# Tile registers: blocks of 2 x 2 tiles, 32 x 32 numbers.
#
#     A   (rows, depth) bf16, rows any number of bytes apart
#     B   (depth / 2, columns) pairs: row k holds, for each column, the numbers 2k and 2k + 1 of the depth
#     C   (rows, columns) float32
#
# An instruction multiplies 16 rows by 16 columns over a depth of 32 numbers. The depth is a multiple of 32 and columns are a multiple
# of 32. For each depth of 32, a block loads four tiles and multiplies four times.


@operation()
def configure_tiles(builder, memory, spec):
    """Save this thread's tile configuration in 128 bytes of memory, and load that of the kernels; nothing without tiles."""
    if spec.on_tiles:
        spec.operations.tile_configure(builder, memory)


@operation()
def restore_tiles(builder, memory, spec):
    """Restore the configuration that :func:`configure_tiles` saved."""
    if spec.on_tiles:
        spec.operations.tile_restore(builder, memory)


def _begin_sum(builder, total, address, c_row, accumulate, operations):
    if accumulate:
        operations.tile_load(builder, total, address, c_row)
    else:
        operations.tile_zero(builder, total)


def _tile_block(rows, accumulate):
    """``rows`` x 2 tiles of C over the whole depth."""

    @operation()
    def block(builder, a, a_row, a_second, a_step, b, c, c_second, row, c_row, steps, spec):
        """Steps and row lengths in bytes; ``*_second`` leads from the first 16 rows of A and C to the second."""
        operations, next_columns = spec.operations, i64(64)  # bytes of 16 columns, of B as of C
        tiles = operations.tile_registers(builder, 3 * rows + 2)
        sums, a_tiles, b_tiles = tiles[: 2 * rows], tiles[2 * rows : -2], tiles[-2:]
        c_rows = [c, builder.add(c, c_second)][:rows]
        c_addresses = [address for first in c_rows for address in (first, builder.add(first, next_columns))]
        for total, address in zip(sums, c_addresses, strict=True):
            _begin_sum(builder, total, address, c_row, accumulate, operations)
        with for_range(builder, steps) as loop:
            a_first = builder.add(a, builder.mul(loop.index, a_step))
            b_depth = builder.add(b, builder.mul(loop.index, builder.shl(row, i64(4))))
            b_addresses = [b_depth, builder.add(b_depth, next_columns)]
            # Each tile is loaded where the first product needs it.
            for i, (a_tile, address) in enumerate(
                zip(a_tiles, [a_first, builder.add(a_first, a_second)], strict=False)
            ):
                operations.tile_load(builder, a_tile, address, a_row)
                for j, (b_tile, b_address) in enumerate(zip(b_tiles, b_addresses, strict=True)):
                    if i == 0:
                        operations.tile_load(builder, b_tile, b_address, row)
                    operations.tile_dot(builder, sums[2 * i + j], a_tile, b_tile)
        for total, address in zip(sums, c_addresses, strict=True):
            operations.tile_store(builder, total, address, c_row)

    return block


def _tile_product(accumulate):
    two, one = _tile_block(2, accumulate), _tile_block(1, accumulate)

    @device_function
    def tile_product(a, a_row, a_step, b, c, row, c_row, rows, steps, columns, spec):
        for column in range(0, 4 * columns, 128):
            r = 0
            while r + 16 < rows:
                second = 16 if accumulate else min(r + 16, rows - 16) - r
                a_rows, c_rows = a + r * a_row, c + r * c_row + column
                two(a_rows, a_row, second * a_row, a_step, b + column, c_rows, second * c_row, row, c_row, steps, spec)
                r += 32
            if r < rows:
                r = r if accumulate else min(r, rows - 16)
                one(a + r * a_row, a_row, 0, a_step, b + column, c + r * c_row + column, 0, row, c_row, steps, spec)

    return tile_product


def _held_product(accumulate):
    @operation()
    def held_product(builder, a, a_row, b, c, row, c_row, rows, spec):
        operations, next_tile, sixteen = spec.operations, i64(64), i64(16)
        tiles = operations.tile_registers(builder, 8)
        sums, a_tiles, b_tiles = tiles[:2], tiles[2:4], (tiles[4:6], tiles[6:8])
        for (left, right), address in zip(b_tiles, (b, builder.add(b, builder.mul(row, sixteen))), strict=True):
            operations.tile_load(builder, left, address, row)
            operations.tile_load(builder, right, builder.add(address, next_tile), row)
        last = builder.sub(rows, sixteen)
        with for_range(builder, builder.lshr(builder.add(rows, i64(15)), i64(4))) as loop:
            r = builder.mul(loop.index, sixteen)
            r = builder.select(builder.icmp_signed("<", r, last), r, last)  # the last 16 rows overlap those before
            a_first, c_first = builder.add(a, builder.mul(r, a_row)), builder.add(c, builder.mul(r, c_row))
            for tile, address in zip(a_tiles, (a_first, builder.add(a_first, next_tile)), strict=True):
                operations.tile_load(builder, tile, address, a_row)
            for total, column, address in zip(sums, (0, 1), (c_first, builder.add(c_first, next_tile)), strict=True):
                _begin_sum(builder, total, address, c_row, accumulate, operations)
                for a_tile, pair in zip(a_tiles, b_tiles, strict=True):
                    operations.tile_dot(builder, total, a_tile, pair[column])
                operations.tile_store(builder, total, address, c_row)

    return held_product


# C = A B for at least 16 rows, of which the last 16 overlap those before where they are no multiple of 16; and C += A B for a multiple
# of 16 rows. ``a_row`` leads from a row of A to the next, ``a_step`` from 32 numbers of the depth to the next, ``row`` from a row of B
# to the next, ``c_row`` of C, all in bytes; ``steps`` is the depth / 32.
tile_product, tile_product_add = _tile_product(False), _tile_product(True)
# 32 columns of C, for a depth of 64: B stays in four tile registers, and each tile of C is stored as soon as it is summed. In A, 32
# numbers of the depth follow 64 bytes after the first.
held_product, held_product_add = _held_product(False), _held_product(True)


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
    for task in tasks(call):
        sum0 = sum1 = sum2 = sum3 = splat(0.0, spec)
        start = call.source + task * call.block
        for address in range(start, start + call.block, 256):
            sum0 = add(sum0, load(address, spec))
            sum1 = add(sum1, load(address + 64, spec))
            sum2 = add(sum2, load(address + 128, spec))
            sum3 = add(sum3, load(address + 192, spec))
        store(call.sums + 64 * task, add(add(sum0, sum1), add(sum2, sum3)))

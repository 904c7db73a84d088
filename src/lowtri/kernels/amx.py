"""Products on Intel's tile registers (AMX), in blocks of 2 x 2 registers, 32 x 32 numbers; and rows of bf16 as their operands.

    A   (rows, depth) bf16, rows any number of bytes apart
    B   (depth / 2, columns) pairs: row k holds, for each column, the numbers 2k and 2k + 1 of the depth
    C   (rows, columns) float32

An instruction multiplies 16 rows by 16 columns over a depth of 32 numbers. The depth is a multiple of 32 and columns are a multiple of
32. For each depth of 32, a block loads four tiles and multiplies four times. Steps from row to row are in bytes, in all of this file.

Transposed tiles of keys or values are shared by all threads: each is packed once, by the first thread that needs it. A tile has a
state: 0 not packed, 1 being packed, 2 packed. A thread that needs a tile while another one packs it packs a copy of its own, so that no
thread ever waits.
"""

from __future__ import annotations

from numba import types

from lowtri.compat.numba_private import for_range
from lowtri.kernels.abi import KEYS
from lowtri.kernels.device import device_function, operation, scratch_at
from lowtri.kernels.operations import I64, i64, parts_of, pointer
from lowtri.kernels.rows import fill, product_rows, round_row, round_up
from lowtri.kernels.simd import as_number, copy_number, load, store, transpose, transpose_block
from lowtri.kernels.spec import QUERIES
from lowtri.kernels.values import Matrix, Packed, Rows


@operation()
def configure_tiles(builder, memory, spec):
    """Save this thread's tile configuration in 128 bytes of memory, and load that of the kernels; nothing without AMX."""
    if spec.uses_amx:
        spec.operations.tile_configure(builder, memory)


@operation()
def restore_tiles(builder, memory, spec):
    """Restore the configuration that :func:`configure_tiles` saved."""
    if spec.uses_amx:
        spec.operations.tile_restore(builder, memory)


# Products.


def _tile_product(accumulate):
    two, one = _tile_block(2, accumulate), _tile_block(1, accumulate)

    @device_function
    def tile_product(a, b, c, rows, steps, columns, spec):
        """C = A B for at least 16 rows, or C += A B for a multiple of 16 rows; where C is set, the last 16 may overlap those before.

        ``a.element`` leads from 32 numbers of the depth to the next, in bytes; ``steps`` is the depth / 32.
        """
        for column in range(0, 4 * columns, 128):
            b_columns = Packed(b.at + column, b.row)
            r = 0
            while r + 16 < rows:
                second = 16 if accumulate else min(r + 16, rows - 16) - r
                a_rows = Matrix(a.at + r * a.row, a.row, a.element)
                two(a_rows, b_columns, Packed(c.at + r * c.row + column, c.row), second, steps, spec)
                r += 32
            if r < rows:
                r = r if accumulate else min(r, rows - 16)
                a_rows = Matrix(a.at + r * a.row, a.row, a.element)
                one(a_rows, b_columns, Packed(c.at + r * c.row + column, c.row), 0, steps, spec)

    return tile_product


def _tile_block(rows, accumulate):
    """``rows`` x 2 tiles of C over the whole depth."""

    @operation()
    def block(builder, a, b, c, second, steps, spec):
        """``second`` rows lead from the first 16 rows of A and C to the second."""
        operations, next_columns = spec.operations, i64(64)  # bytes of 16 columns, of B as of C
        a = Matrix(*parts_of(builder, a))
        b, c = (Packed(*parts_of(builder, matrix)) for matrix in (b, c))
        tiles = operations.tile_registers(builder, 3 * rows + 2)
        sums = tiles[: 2 * rows]
        a_tiles = tiles[2 * rows : -2]
        b_tiles = tiles[-2:]
        c_rows = [c.at, builder.add(c.at, builder.mul(second, c.row))]
        c_rows = c_rows[:rows]
        c_addresses = [address for first in c_rows for address in (first, builder.add(first, next_columns))]
        for total, address in zip(sums, c_addresses, strict=True):
            _begin_sum(builder, total, address, c.row, accumulate, operations)
        a_second = builder.mul(second, a.row)
        with for_range(builder, steps) as loop:
            a_first = builder.add(a.at, builder.mul(loop.index, a.element))
            b_depth = builder.add(b.at, builder.mul(loop.index, builder.shl(b.row, i64(4))))
            b_addresses = [b_depth, builder.add(b_depth, next_columns)]
            a_addresses = [a_first, builder.add(a_first, a_second)]
            a_addresses = a_addresses[:rows]
            # Each tile is loaded where the first product needs it.
            for i, (a_tile, address) in enumerate(zip(a_tiles, a_addresses, strict=True)):
                operations.tile_load(builder, a_tile, address, a.row)
                for j, (b_tile, b_address) in enumerate(zip(b_tiles, b_addresses, strict=True)):
                    if i == 0:
                        operations.tile_load(builder, b_tile, b_address, b.row)
                    operations.tile_dot(builder, sums[2 * i + j], a_tile, b_tile)
        for total, address in zip(sums, c_addresses, strict=True):
            operations.tile_store(builder, total, address, c.row)

    return block


def _begin_sum(builder, total, address, c_row, accumulate, operations):
    if accumulate:
        operations.tile_load(builder, total, address, c_row)
    else:
        operations.tile_zero(builder, total)


def _stationary_b_product(accumulate):
    @operation()
    def stationary_b_product(builder, a, b, c, rows, spec):
        """32 columns of C, for a depth of 64: B stays in four registers, and each tile of C is stored as soon as it is summed.

        In A, 32 numbers of the depth follow 64 bytes after the first.
        """
        operations = spec.operations
        next_tile = i64(64)
        sixteen = i64(16)
        a = Matrix(*parts_of(builder, a))
        b, c = (Packed(*parts_of(builder, matrix)) for matrix in (b, c))
        tiles = operations.tile_registers(builder, 8)
        sums = tiles[:2]
        a_tiles = tiles[2:4]
        b_tiles = (tiles[4:6], tiles[6:8])
        for (left, right), address in zip(b_tiles, (b.at, builder.add(b.at, builder.mul(b.row, sixteen))), strict=True):
            operations.tile_load(builder, left, address, b.row)
            operations.tile_load(builder, right, builder.add(address, next_tile), b.row)
        last = builder.sub(rows, sixteen)
        with for_range(builder, builder.lshr(builder.add(rows, i64(15)), i64(4))) as loop:
            r = builder.mul(loop.index, sixteen)
            r = builder.select(builder.icmp_signed("<", r, last), r, last)  # the last 16 rows overlap those before
            a_first, c_first = builder.add(a.at, builder.mul(r, a.row)), builder.add(c.at, builder.mul(r, c.row))
            for tile, address in zip(a_tiles, (a_first, builder.add(a_first, next_tile)), strict=True):
                operations.tile_load(builder, tile, address, a.row)
            for total, column, address in zip(sums, (0, 1), (c_first, builder.add(c_first, next_tile)), strict=True):
                _begin_sum(builder, total, address, c.row, accumulate, operations)
                for a_tile, pair in zip(a_tiles, b_tiles, strict=True):
                    operations.tile_dot(builder, total, a_tile, pair[column])
                operations.tile_store(builder, total, address, c.row)

    return stationary_b_product


tile_product, tile_product_add = _tile_product(False), _tile_product(True)
stationary_b_product, stationary_b_product_add = _stationary_b_product(False), _stationary_b_product(True)


# Rows of bf16 as operands.


@device_function
def key_rows_operand(rows, target, spec):
    """Rows of keys or values as A of the scores: at least 16 rows of whole depths, read in place where they are."""
    if rows.number == 1 and rows.size % 32 == 0 and rows.count >= 16:
        return Matrix(rows.at, 2 * rows.row, 64)
    copy_rows(rows, max(rows.count, 16), target, spec)
    return Matrix(target, 2 * round_up(rows.size, 32), 64)


@device_function
def copy_rows(rows, count, target, spec):
    """Copy rows of bf16 to rows of a multiple of 32 numbers; zeros fill them, and ``count`` rows in all."""
    row = 2 * round_up(rows.size, 32)
    fill(target, count * row // 4, 0.0, spec)
    for i in range(rows.count):
        from_row = rows.at + 2 * i * rows.row
        to_row = target + i * row
        d = 0
        if rows.number == 1:
            while d + 32 <= rows.size:
                store(to_row + 2 * d, load(from_row + 2 * d, spec))
                d += 32
        while d < rows.size:
            copy_number(from_row + 2 * d * rows.number, to_row + 2 * d)
            d += 1


@device_function
def transposed_queries(rows, copy, target, spec):
    """At most 64 rows of queries as operand B, for each 32 of them (elements, 32), pairs along the head; ``copy`` is scratch.

    Lanes past the last row repeat it.
    """
    source, row = rows.at, rows.row
    if rows.number != 1 or rows.size % 32 or row % 2:
        copy_rows(rows, rows.count, copy, spec)
        source, row = copy, round_up(rows.size, 32)
    size = round_up(rows.size, 32) // 2
    for first in range(0, QUERIES, 16):
        top = min(first, rows.count - 1)
        last = min(rows.count - 1 - top, 15)
        lanes = spec.step_row_bytes * size * (first // 32) + 4 * (first % 32)
        for pair in range(0, size, 16):
            block = source + 2 * top * row + 4 * pair
            place = target + spec.step_row_bytes * pair + lanes
            transpose(block, 2 * row, last, place, spec.step_row_bytes, spec)


@device_function
def transposed_tile(call, tile, keys, memory):
    """The transposed rows of keys or values from the first of ``keys`` on, in blocks of 32 keys: (keys / 32, product_rows(size), 32).

    ``tile`` are the rows of the whole tile; ``memory`` is this thread's.
    """
    spec = call.spec
    shared = scratch_at(call, call.scratch)
    columns = product_rows(tile.size, spec)
    index = keys.first // KEYS
    tiles_of_head = (call.nk + KEYS - 1) // KEYS
    number = (keys.batch * (call.heads // call.group) + keys.head) * tiles_of_head + index
    state, packed = shared.packed_states + 8 * number, shared.packed + 2 * KEYS * columns * number
    if not is_packed(state):
        claimed = claim(state)
        if not claimed:
            packed = memory.target
        pack_transposed(tile, memory, packed, spec)
        if claimed:
            publish(state)
    return Packed(packed + 2 * (keys.first - index * KEYS) * columns, 64)


_PACKING, _PACKED = i64(1), i64(2)
# Whether the tile is packed (then this thread sees its numbers); whether this thread is to pack it; mark it as packed, for all threads.
is_packed = operation(types.boolean)(
    lambda b, state: b.icmp_unsigned("==", b.load_atomic(pointer(b, state, I64), "acquire", 8), _PACKED)
)
claim = operation(types.boolean)(
    lambda b, state: b.extract_value(b.cmpxchg(pointer(b, state, I64), i64(0), _PACKING, "acq_rel", "acquire"), 1)
)
publish = operation()(lambda b, state: b.store_atomic(_PACKED, pointer(b, state, I64), "release", 8))


@device_function
def pack_transposed(rows, memory, target, spec):
    """Rows of keys or values, transposed: for each 32 of them a block (product_rows(size), 32), zeros past the last row."""
    columns = product_rows(rows.size, spec)
    if rows.number != 1 or rows.size % 16 or rows.size < 32:
        copy_rows(rows, rows.count, memory.copy, spec)
        row = round_up(rows.size, 32)
        pack_blocks(Rows(memory.copy, row, 1, rows.count, columns), memory.zeros, target, spec)
    else:
        pack_blocks(Rows(rows.at, rows.row, 1, rows.count, columns), memory.zeros, target, spec)


@device_function
def finite_rows_operand(rows, memory, spec):
    """Padded rows of numbers, rounded and transposed, as :func:`transposed_tile` has them."""
    fill(memory.copy, rows.count * rows.row // 2, 0.0, spec)
    for i in range(rows.count):
        source, target = rows.at + 4 * i * rows.row, memory.copy + 2 * i * rows.row
        round_row(source, rows.size, as_number(1.0, spec), target, spec)
    columns = product_rows(rows.size, spec)
    pack_blocks(Rows(memory.copy, rows.row, 1, rows.count, columns), memory.zeros, memory.target, spec)
    return Packed(memory.target, 64)


@device_function
def pack_blocks(rows, zeros, target, spec):
    """Rows of neighbouring numbers, transposed: for each 32 of them a block (size, 32), zeros past the last row."""
    columns = rows.size
    if columns < 32:
        fill(target, round_up(rows.count, 32) * columns // 2, 0.0, spec)
        for i in range(rows.count):
            for d in range(columns):
                place = target + 64 * (i // 32 * columns + d) + 2 * (i % 32)
                copy_number(rows.at + 2 * (i * rows.row + d), place)
        return
    for j in range(0, rows.count, 32):
        for d in range(0, columns, 32):
            column = min(d, columns - 32)  # the last block overlaps the one before
            block, source = target + 64 * (j // 32 * columns + column), rows.at + 2 * (j * rows.row + column)
            transpose_block(source, 2 * rows.row, rows.count - j, zeros, block, 64, spec)

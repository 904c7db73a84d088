"""Matrix products of bf16 on tile registers: C = A B or C += A B, in blocks of 2 x 2 tiles, 32 x 32 numbers.

    A   (rows, depth) bf16, rows any number of bytes apart
    B   (depth / 2, columns) pairs: row k holds, for each column, the numbers 2k and 2k + 1 of the depth
    C   (rows, columns) float32

An instruction multiplies 16 rows by 16 columns over a depth of 32 numbers. The depth is a multiple of 32 and columns are a multiple
of 32. For each depth of 32, a block loads four tiles and multiplies four times.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from lowtri.compat.numba_private import for_range
from lowtri.kernels.device_function import device_function
from lowtri.kernels.simd import I64

__all__ = ["configure_tiles", "held_product", "held_product_add", "restore_tiles", "tile_product", "tile_product_add"]


@intrinsic
def configure_tiles(typing, memory, spec):
    """Save this thread's tile configuration in 128 bytes of memory, and load that of the kernels; nothing without tiles."""

    def emit(c, b, s, a):
        if spec.value.on_tiles:
            spec.value.operations.tile_configure(b, a[0])
        return c.get_dummy_value()

    return types.void(types.intp, spec), emit


@intrinsic
def restore_tiles(typing, memory, spec):
    """Restore the configuration that :func:`configure_tiles` saved."""

    def emit(c, b, s, a):
        if spec.value.on_tiles:
            spec.value.operations.tile_restore(b, a[0])
        return c.get_dummy_value()

    return types.void(types.intp, spec), emit


def _emit_block(b: Any, args: Any, rows: int, accumulate: bool, operations: Any) -> None:
    """``rows`` x 2 tiles of C over the whole depth."""
    a, a_row, a_second, a_step, b_first, c, c_second, row, c_row, steps = args
    tiles = operations.tile_registers(b, 3 * rows + 2)
    sums, a_tiles, b_tiles = tiles[: 2 * rows], tiles[2 * rows : -2], tiles[-2:]
    next_columns = ir.Constant(I64, 64)  # bytes of 16 columns, of B as of C
    c_rows = [c, b.add(c, c_second)][:rows]
    c_addresses = [address for first in c_rows for address in (first, b.add(first, next_columns))]
    for total, address in zip(sums, c_addresses, strict=True):
        if accumulate:
            operations.tile_load(b, total, address, c_row)
        else:
            operations.tile_zero(b, total)
    with for_range(b, steps) as loop:
        a_first = b.add(a, b.mul(loop.index, a_step))
        b_depth = b.add(b_first, b.mul(loop.index, b.shl(row, ir.Constant(I64, 4))))
        # Each tile is loaded where the first product needs it.
        for i, (a_tile, a_address) in enumerate(zip(a_tiles, [a_first, b.add(a_first, a_second)], strict=False)):
            operations.tile_load(b, a_tile, a_address, a_row)
            for j, (b_tile, b_address) in enumerate(zip(b_tiles, [b_depth, b.add(b_depth, next_columns)], strict=True)):
                if i == 0:
                    operations.tile_load(b, b_tile, b_address, row)
                operations.tile_dot(b, sums[2 * i + j], a_tile, b_tile)
    for total, address in zip(sums, c_addresses, strict=True):
        operations.tile_store(b, total, address, c_row)


def _block(rows: int, accumulate: bool) -> Any:
    @intrinsic
    def block(typing, a, a_row, a_second, a_step, b, c, c_second, row, c_row, steps, spec):
        """Steps and row lengths in bytes; ``*_second`` leads from the first 16 rows of A and C to the second."""

        def emit(context, builder, signature, args):
            _emit_block(builder, args[:-1], rows, accumulate, spec.value.operations)
            return context.get_dummy_value()

        return types.void(*[types.intp] * 10, spec), emit

    return block


_two, _one, _two_add, _one_add = _block(2, False), _block(1, False), _block(2, True), _block(1, True)


def _held_product(accumulate: bool) -> Any:
    @intrinsic
    def held_product(typing, a, a_row, b, c, row, c_row, rows, spec):
        """32 columns of C, at least 16 rows, for a depth of 64: B stays in four tile registers, and each tile of C is stored as soon as
        it is summed. Arguments as in :func:`tile_product`; 32 numbers of the depth follow 64 bytes after the first.
        """

        def emit(context, builder, signature, args):
            _emit_held_product(builder, args[:-1], accumulate, spec.value.operations)
            return context.get_dummy_value()

        return types.void(*[types.intp] * 7, spec), emit

    return held_product


def _emit_held_product(b: Any, args: Any, accumulate: bool, operations: Any) -> None:
    a, a_row, b_first, c, row, c_row, rows = args
    tiles = operations.tile_registers(b, 8)
    sums, a_tiles, b_tiles = tiles[:2], tiles[2:4], (tiles[4:6], tiles[6:8])
    next_tile, sixteen = ir.Constant(I64, 64), ir.Constant(I64, 16)
    b_second = b.add(b_first, b.mul(row, sixteen))
    for (left, right), address in zip(b_tiles, (b_first, b_second), strict=True):
        operations.tile_load(b, left, address, row)
        operations.tile_load(b, right, b.add(address, next_tile), row)
    last = b.sub(rows, sixteen)
    with for_range(b, b.lshr(b.add(rows, ir.Constant(I64, 15)), ir.Constant(I64, 4))) as loop:
        r = b.mul(loop.index, sixteen)
        r = b.select(b.icmp_signed("<", r, last), r, last)  # the last 16 rows overlap those before
        a_first, c_first = b.add(a, b.mul(r, a_row)), b.add(c, b.mul(r, c_row))
        for tile, address in zip(a_tiles, (a_first, b.add(a_first, next_tile)), strict=True):
            operations.tile_load(b, tile, address, a_row)
        for total, column, address in zip(sums, (0, 1), (c_first, b.add(c_first, next_tile)), strict=True):
            if accumulate:
                operations.tile_load(b, total, address, c_row)
            else:
                operations.tile_zero(b, total)
            for a_tile, pair in zip(a_tiles, b_tiles, strict=True):
                operations.tile_dot(b, total, a_tile, pair[column])
            operations.tile_store(b, total, address, c_row)


held_product, held_product_add = _held_product(False), _held_product(True)


@device_function
def tile_product(a, a_row, a_step, b, c, row, c_row, rows, steps, columns, spec):
    """C = A B for at least 16 rows. Where they are no multiple of 16, the last 16 overlap those before.

    Args:
        a_row: from a row of A to the next.  a_step: from 32 numbers of the depth to the next.
        row: from a row of B to the next.  c_row: of C.  All in bytes.
        steps: the depth / 32.
    """
    for column in range(0, 4 * columns, 128):
        r = 0
        while r + 16 < rows:
            second = min(r + 16, rows - 16) - r
            a_rows, c_rows = a + r * a_row, c + r * c_row + column
            _two(a_rows, a_row, second * a_row, a_step, b + column, c_rows, second * c_row, row, c_row, steps, spec)
            r += 32
        if r < rows:
            r = min(r, rows - 16)
            _one(a + r * a_row, a_row, 0, a_step, b + column, c + r * c_row + column, 0, row, c_row, steps, spec)


@device_function
def tile_product_add(a, a_row, a_step, b, c, row, c_row, rows, steps, columns, spec):
    """C += A B for a multiple of 16 rows; arguments as in :func:`tile_product`."""
    for column in range(0, 4 * columns, 128):
        r = 0
        while r + 16 < rows:
            a_rows, c_rows = a + r * a_row, c + r * c_row + column
            _two_add(a_rows, a_row, 16 * a_row, a_step, b + column, c_rows, 16 * c_row, row, c_row, steps, spec)
            r += 32
        if r < rows:
            _one_add(a + r * a_row, a_row, 0, a_step, b + column, c + r * c_row + column, 0, row, c_row, steps, spec)

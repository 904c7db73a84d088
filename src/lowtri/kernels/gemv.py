"""Weighted sums of values, for blocks of four queries: each row of the cache is read once, 16 to 128 columns of some keys at a time."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from lowtri.compat.numba_private import alloca_once, for_range
from lowtri.kernels.bf16 import interleaved_rows
from lowtri.kernels.cache_rows import BLOCK, EVEN_FIRST, LANES, input_words, is_even_first
from lowtri.kernels.device_function import by_spec, device_function
from lowtri.kernels.lanes import shuffled
from lowtri.kernels.product import multiply_add
from lowtri.kernels.simd import F32, I64, broadcast, clamped, pointer, prefetch

__all__ = ["pv"]

PORTION = 2**13  # bytes of values that stay in L1 while all query heads of a group use them


def _emit_pv(builder: Any, args: Any, rows: int, vectors: int, prefetches: bool, spec: Any) -> None:
    """The register tile of :func:`pv`: ``rows`` x ``vectors`` accumulators over all keys."""
    weights, weight_step, last, values, value_step, keys, zeros, output, output_step, ahead, ahead_step = args
    pairs, kind, multiply, one = spec.operand == "pairs", spec.vector.ir, multiply_add(spec), ir.Constant(I64, 1)
    tile = [[alloca_once(builder, kind) for _ in range(vectors)] for _ in range(rows)]
    weight_rows, output_rows = [], []
    for r in range(rows):
        row = clamped(builder, r, last)
        weight_rows.append(builder.add(weights, builder.mul(row, weight_step)))
        output_rows.append(builder.add(output, builder.mul(row, output_step)))

    def plus(address: Any, size: int) -> Any:
        return builder.add(address, ir.Constant(I64, size))

    for total in (total for row in tile for total in row):
        builder.store(ir.Constant(kind, None), total)
    steps = builder.lshr(builder.add(keys, one), one) if pairs else keys
    with for_range(builder, steps) as loop:
        if pairs:
            low = builder.add(values, builder.mul(builder.shl(loop.index, one), value_step))
            second = builder.icmp_signed("<", builder.add(builder.shl(loop.index, one), one), keys)
            value_rows = [low, builder.select(second, builder.add(low, value_step), zeros)]
            columns = interleaved_rows(builder, *value_rows, vectors // 2, kind)
        else:
            value_rows = [builder.add(values, builder.mul(loop.index, value_step))]
            size = LANES * spec.input_bytes
            columns = [input_words(builder, plus(value_rows[0], size * j), spec) for j in range(vectors)]
        row_bytes = LANES * spec.input_bytes * vectors
        first_ahead = builder.mul(loop.index, ir.Constant(I64, len(value_rows)))
        for row in range(len(value_rows) if prefetches else 0):
            address = builder.add(ahead, builder.mul(plus(first_ahead, row), ahead_step))
            for line in range(0, row_bytes, 64):
                prefetch(builder, plus(address, line))
        for r in range(rows):
            address = builder.add(weight_rows[r], builder.shl(loop.index, ir.Constant(I64, 2)))
            weight = broadcast(builder, builder.load(pointer(builder, address, F32), align=4), LANES)
            for total, column in zip(tile[r], columns, strict=True):
                builder.store(multiply(builder, weight, column, builder.load(total)), total)
    for r in range(rows):  # before any store, since rows may repeat
        for j in range(vectors):
            sum_before = builder.load(pointer(builder, plus(output_rows[r], 64 * j), kind), align=4)
            total = builder.load(tile[r][j])
            total = shuffled(builder, total, total, EVEN_FIRST) if is_even_first(spec) else total
            builder.store(builder.fadd(sum_before, total), tile[r][j])
    for r in range(rows):
        for j in range(vectors):
            builder.store(builder.load(tile[r][j]), pointer(builder, plus(output_rows[r], 64 * j), kind), align=4)


class _Tile:
    """A register tile of :func:`pv`, of blocks of so many queries: rows of weights, and vectors of a value's row.

    ``vectors``: at most; two at least where pairs are interleaved.
    """

    def __init__(self, queries: int, vectors: int = 8) -> None:
        self.queries, self.vectors = queries, vectors

    def shape(self, spec: Any) -> tuple[int, int, int]:
        """Rows, vectors, and how far ahead it prefetches."""
        tile = spec.cache_tile(self.queries) or spec.cache_tile(BLOCK)
        return tile.rows, max(min(tile.vectors, self.vectors), spec.per_word), tile.values_ahead


def _pv(tile: _Tile) -> Any:
    """The device function that moves a tile over the columns, as far as it fits; it returns the first column that is left."""

    @intrinsic
    def pv_tile(typing, weights, weight_step, last, values, value_step, keys, zeros, output, output_step, ahead, spec):
        def emit(context, builder, signature, args):
            first, step = (builder.extract_value(args[-2], n) for n in (0, 1))
            rows, vectors, rows_ahead = tile.shape(spec.value)
            _emit_pv(builder, (*args[:-2], first, step), rows, vectors, rows_ahead > 0, spec.value)
            return context.get_dummy_value()

        return types.void(*[types.intp] * 9, types.UniTuple(types.intp, 2), spec), emit

    @intrinsic
    def sizes(typing, spec):
        kind = types.UniTuple(types.int64, 3)
        rows, vectors, rows_ahead = tile.shape(spec.value)
        numbers = rows, LANES * vectors, rows_ahead
        return kind(spec), lambda c, b, s, a: c.make_tuple(b, kind, [ir.Constant(I64, n) for n in numbers])

    @device_function
    def tiles(weights, weight_step, count, values, value_step, keys, zeros, output, columns, first, spec):
        rows, width, rows_ahead = sizes(spec)
        last_column = columns - (columns - first) % width
        portion = max(PORTION // (spec.input_bytes * columns) & -LANES, LANES)
        for key in range(0, keys if last_column > first else 0, portion):
            n, portion_weights = min(portion, keys - key), weights + 4 // spec.per_word * key
            portion_values = values + value_step * key
            for column in range(first, last_column, width):
                source = portion_values + spec.input_bytes * column
                ahead = lines_ahead(portion_values, value_step, n, column, width, columns, rows_ahead, spec)
                for row in range(0, count, rows):
                    last, block = min(rows, count - row) - 1, portion_weights + row * weight_step
                    target = output + 4 * (row * columns + column)
                    pv_tile(block, weight_step, last, source, value_step, n, zeros, target, 4 * columns, ahead, spec)
        return last_column

    return tiles


# The first of each may be too wide for the last columns.
_single_tiles, _single_rest = _pv(_Tile(1)), _pv(_Tile(1, vectors=4))
_block_tiles, _wide_tiles, _narrow_tiles = _pv(_Tile(BLOCK)), _pv(_Tile(2 * BLOCK)), _pv(_Tile(2 * BLOCK, vectors=1))


@by_spec
def lines_ahead(spec):
    """What a tile prefetches with each key: the first address, and the step to the next."""

    def same_columns(values, value_step, keys, column, tile, columns, rows_ahead, spec):
        return values + spec.input_bytes * column + rows_ahead * value_step, value_step

    def in_order(values, value_step, keys, column, tile, columns, rows_ahead, spec):
        # Tiles are narrower than rows. The CPU's own prefetcher follows the order of memory, so the next keys are prefetched in it.
        if value_step == spec.input_bytes * columns:
            return values + keys * (value_step + spec.input_bytes * column), spec.input_bytes * tile
        return values + spec.input_bytes * column + rows_ahead * value_step, value_step

    return same_columns if spec.isa.whole_vectors else in_order


@device_function
def pv(weights, weight_step, rows, values, value_step, keys, zeros, output, columns, spec):
    """Output (rows, columns) += weights x values, rows packed. Steps in bytes; in pairs, weights are of neighbouring keys.

    ``zeros``: a row of 0, the neighbour of an odd last key. Columns are a multiple of 16, in pairs of 32.
    """
    done = 0
    if rows == 1:
        done = _single_tiles(weights, weight_step, rows, values, value_step, keys, zeros, output, columns, 0, spec)
        done = _single_rest(weights, weight_step, rows, values, value_step, keys, zeros, output, columns, done, spec)
    elif rows <= BLOCK:
        done = _block_tiles(weights, weight_step, rows, values, value_step, keys, zeros, output, columns, 0, spec)
    if rows > 1:
        done = _wide_tiles(weights, weight_step, rows, values, value_step, keys, zeros, output, columns, done, spec)
    _narrow_tiles(weights, weight_step, rows, values, value_step, keys, zeros, output, columns, done, spec)

"""Matrix times vector, for blocks of four queries: dot products with keys, and weighted sums of values.

Each row of the cache is read once, in memory order. A word is a number or a pair of bf16. For the dot products, a vector holds four
words of each of four queries; it is multiplied by four words of a key, which are repeated in all four quarters of a vector. Only the
four partial sums that remain at the end of a dot product are added across lanes.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from lowtri.compat.numba_private import alloca_once, for_range
from lowtri.kernels.bf16 import interleaved_rows
from lowtri.kernels.device_function import by_spec, device_function
from lowtri.kernels.lanes import shuffled
from lowtri.kernels.product import multiply_add
from lowtri.kernels.simd import F32, I32, I64, broadcast, clamped, input_vector, pointer, read, read_input, write

__all__ = ["BLOCK", "dot_products", "interleave_queries", "pv"]

BLOCK = 4  # queries that share each row that is read; a shorter block repeats its last query
LANES = 16
PREFETCH_ROWS = 32  # rows of the cache ahead; the CPU prefetches by itself, but not past the end of a 4 KB page


def prefetch(builder: Any, address: Any) -> None:
    """Load the cache line at an address into L2. The address may be invalid."""
    byte = ir.IntType(8).as_pointer()
    kind, name = ir.FunctionType(ir.VoidType(), [byte, I32, I32, I32]), "llvm.prefetch.p0"
    function = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
    to_read, second_cache, data = (ir.Constant(I32, n) for n in (0, 2, 1))
    builder.call(function, [builder.inttoptr(address, byte), to_read, second_cache, data])


@by_spec
def read_query_word(spec):
    """Read a word of a query's row in its array."""

    def numbers(row, word, spec):
        return read_input(row + spec.input_bytes * word, spec)

    def pairs(row, word, spec):
        return read(row + 4 * word, spec)

    return pairs if spec.rows == "pairs" else numbers


@device_function
def interleave_queries(row, index, words, target, spec):
    """Copy row ``index``, of ``words`` words, to the block layout: four words of each of a block's rows, side by side."""
    for word in range(words):
        offset = index // BLOCK * BLOCK * words + (word // 4 * BLOCK + index % BLOCK) * 4 + word % 4
        write(target + 4 * offset, read_query_word(row, word, spec), spec)


def _quarter_sums(builder: Any, vectors: list[Any]) -> Any:
    """The sum of each quarter of four vectors: quarter q of the result holds the four sums of their quarters q."""
    quarters = range(0, LANES, 4)

    def halved(one: Any, two: Any) -> Any:
        low = shuffled(builder, one, two, [n for q in quarters for n in (q, LANES + q, q + 1, LANES + q + 1)])
        high = shuffled(builder, one, two, [n for q in quarters for n in (q + 2, LANES + q + 2, q + 3, LANES + q + 3)])
        return builder.fadd(low, high)

    one, two = halved(*vectors[:2]), halved(*vectors[2:])
    low = shuffled(builder, one, two, [n for q in quarters for n in (q, q + 1, LANES + q, LANES + q + 1)])
    high = shuffled(builder, one, two, [n for q in quarters for n in (q + 2, q + 3, LANES + q + 2, LANES + q + 3)])
    return builder.fadd(low, high)


def _repeated_words(builder: Any, address: Any, spec: Any) -> Any:
    """Four words of a key, in each of the four quarters."""
    if spec.rows == "pairs":
        words = builder.load(pointer(builder, address, ir.VectorType(F32, 4)), align=2)
    else:
        words = input_vector(builder, address, 4, spec)
    return shuffled(builder, words, words, [n % 4 for n in range(LANES)])


@intrinsic
def dot_products(typing, keys, key_step, last_key, queries, last_query, chunks, target, target_step, spec):
    """Dot products of 16 key rows with a block of queries from :func:`interleave_queries`: a row of 16 for each query.

    Keys past ``last_key`` repeat it, and so do queries past ``last_query``. Rows are ``chunks`` of 16 words; steps in bytes.
    """
    kernel = spec.value
    kind, multiply, word_bytes = kernel.vector.ir, multiply_add(kernel), kernel.input_bytes * kernel.per_word

    def emit(context, builder, signature, args):
        keys, key_step, last_key, queries, last_query, chunks, target, target_step, _ = args
        sums = []
        for first in range(0, LANES, kernel.isa.gemv_keys):
            rows = []
            for row in range(first, first + kernel.isa.gemv_keys):
                rows.append(builder.add(keys, builder.mul(clamped(builder, row, last_key), key_step)))
            totals = [alloca_once(builder, kind) for _ in rows]
            for total in totals:
                builder.store(ir.Constant(kind, None), total)
            with for_range(builder, chunks) as loop:
                column = builder.mul(loop.index, ir.Constant(I64, word_bytes * LANES))
                query_column = builder.mul(loop.index, ir.Constant(I64, 4 * LANES * BLOCK))
                for row in rows:
                    ahead = builder.mul(ir.Constant(I64, PREFETCH_ROWS), key_step)
                    prefetch(builder, builder.add(builder.add(row, column), ahead))
                for quarter in range(4):
                    address = builder.add(queries, builder.add(query_column, ir.Constant(I64, 64 * quarter)))
                    query = builder.load(pointer(builder, address, kind), align=4)
                    for row, total in zip(rows, totals, strict=True):
                        address = builder.add(builder.add(row, column), ir.Constant(I64, 4 * word_bytes * quarter))
                        key = _repeated_words(builder, address, kernel)
                        builder.store(multiply(builder, key, query, builder.load(total)), total)
            loaded = [builder.load(total) for total in totals]
            sums += [_quarter_sums(builder, loaded[n : n + 4]) for n in range(0, kernel.isa.gemv_keys, 4)]
        for j in range(BLOCK):  # the quarters j of the four sums, side by side
            lanes = [*range(4 * j, 4 * j + 4), *range(LANES + 4 * j, LANES + 4 * j + 4)]
            low, high = (shuffled(builder, *halves, lanes) for halves in (sums[:2], sums[2:]))
            address = builder.add(target, builder.mul(clamped(builder, j, last_query), target_step))
            builder.store(shuffled(builder, low, high, list(range(LANES))), pointer(builder, address, kind), align=4)
        return context.get_dummy_value()

    return types.void(*[types.intp] * 8, spec), emit


def _emit_pv(builder: Any, args: Any, rows: int, vectors: int, spec: Any) -> None:
    """The register tile of :func:`pv`: ``rows`` x ``vectors`` accumulators over all keys."""
    weights, weight_step, last, values, value_step, keys, zeros, output, output_step = args
    pairs, kind, multiply, one = spec.rows == "pairs", spec.vector.ir, multiply_add(spec), ir.Constant(I64, 1)
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
            columns = [input_vector(builder, plus(value_rows[0], size * j), LANES, spec) for j in range(vectors)]
        ahead = builder.mul(ir.Constant(I64, PREFETCH_ROWS), value_step)
        row_bytes = LANES * spec.input_bytes * vectors
        for row in value_rows:
            for line in range(0, row_bytes, 64):
                prefetch(builder, plus(builder.add(row, ahead), line))
        for r in range(rows):
            address = builder.add(weight_rows[r], builder.shl(loop.index, ir.Constant(I64, 2)))
            weight = broadcast(builder, builder.load(pointer(builder, address, F32), align=4), LANES)
            for total, column in zip(tile[r], columns, strict=True):
                builder.store(multiply(builder, weight, column, builder.load(total)), total)
    for r in range(rows):  # before any store, since rows may repeat
        for j in range(vectors):
            sum_before = builder.load(pointer(builder, plus(output_rows[r], 64 * j), kind), align=4)
            builder.store(builder.fadd(sum_before, builder.load(tile[r][j])), tile[r][j])
    for r in range(rows):
        for j in range(vectors):
            builder.store(builder.load(tile[r][j]), pointer(builder, plus(output_rows[r], 64 * j), kind), align=4)


def _tile_vectors(spec: Any) -> tuple[int, int]:
    """The vectors of the wide and of the narrow tile; rows of pairs are interleaved 32 numbers at a time."""
    narrow = 2 if spec.rows == "pairs" else 1
    return max(spec.isa.gemv_vectors, narrow), narrow


def _pv(rows: int, wide: bool) -> Any:
    @intrinsic
    def pv(typing, weights, weight_step, last, values, value_step, keys, zeros, output, output_step, spec):
        vectors = _tile_vectors(spec.value)[0 if wide else 1]

        def emit(context, builder, signature, args):
            _emit_pv(builder, args[:-1], rows, vectors, spec.value)
            return context.get_dummy_value()

        return types.void(*[types.intp] * 9, spec), emit

    return pv


@intrinsic
def _tile_columns(typing, spec):
    """Columns of the wide and of the narrow tile."""
    kind = types.UniTuple(types.int64, 2)
    columns = [ir.Constant(I64, LANES * vectors) for vectors in _tile_vectors(spec.value)]
    return kind(spec), lambda c, b, s, a: c.make_tuple(b, kind, columns)


_pv_wide, _pv_narrow, _pv_single = _pv(BLOCK, wide=True), _pv(BLOCK, wide=False), _pv(1, wide=True)


@device_function
def pv(weights, weight_step, rows, values, value_step, keys, zeros, output, columns, spec):
    """Output (rows, columns) += weights x values, rows packed. Steps in bytes; in pairs, weights are of neighbouring keys.

    ``zeros``: a row of 0, the neighbour of an odd last key. Columns are a multiple of 16, in pairs of 32.
    """
    wide, narrow = _tile_columns(spec)
    for row in range(0, rows, BLOCK):
        last, block_weights = min(BLOCK, rows - row) - 1, weights + row * weight_step
        column = 0
        while column + wide <= columns:
            source, target = values + spec.input_bytes * column, output + 4 * (row * columns + column)
            if last:
                _pv_wide(block_weights, weight_step, last, source, value_step, keys, zeros, target, 4 * columns, spec)
            else:
                _pv_single(block_weights, weight_step, last, source, value_step, keys, zeros, target, 4 * columns, spec)
            column += wide
        while column < columns:
            source, target = values + spec.input_bytes * column, output + 4 * (row * columns + column)
            _pv_narrow(block_weights, weight_step, last, source, value_step, keys, zeros, target, 4 * columns, spec)
            column += narrow

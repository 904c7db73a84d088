"""Four queries against rows of the cache, which are read once and in the order of memory: dot products, and sums of value rows.

A word is a number or a pair of bf16. For the dot products a vector holds four words of each of four queries; four words of a key,
read into all four quarters at once, meet them, and only the last four partial sums of a product go across lanes.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from lowtri.compat.numba_private import alloca_once, for_range
from lowtri.kernels.bf16 import zipped_rows
from lowtri.kernels.device_function import by_spec, device_function
from lowtri.kernels.lanes import picked
from lowtri.kernels.product import multiplied
from lowtri.kernels.simd import F32, I32, I64, at, broadcast, clamped, input_vector, read, read_input, write

__all__ = ["FOUR", "dots", "in_fours", "pv"]

FOUR = 4  # queries that share what is read; past the last one, it stands in for the others
LANES = 16
AHEAD = 32  # rows of a cache that are prefetched; the CPU looks ahead by itself, but not past the end of a 4 KB page


def prefetch(builder: Any, address: Any) -> None:
    """Bring the line at an address into the second cache; any address will do."""
    byte = ir.IntType(8).as_pointer()
    kind, name = ir.FunctionType(ir.VoidType(), [byte, I32, I32, I32]), "llvm.prefetch.p0"
    function = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
    to_read, second_cache, data = (ir.Constant(I32, n) for n in (0, 2, 1))
    builder.call(function, [builder.inttoptr(address, byte), to_read, second_cache, data])


@by_spec
def read_query_word(spec):
    """A word of a query's row in its array."""

    def numbers(row, word, spec):
        return read_input(row + spec.input_bytes * word, spec)

    def pairs(row, word, spec):
        return read(row + 4 * word, spec)

    return pairs if spec.rows == "pairs" else numbers


@device_function
def in_fours(row, place, words, target, spec):
    """A row of ``words`` words goes to place ``place`` of the rows that are laid out in fours: four words of each, side by side."""
    for word in range(words):
        to = place // FOUR * FOUR * words + (word // 4 * FOUR + place % FOUR) * 4 + word % 4
        write(target + 4 * to, read_query_word(row, word, spec), spec)


def _quad_sums(builder: Any, four: list[Any]) -> Any:
    """Each quarter of four vectors added up: quarter q holds the sums of the first's, second's, third's and fourth's quarter q."""
    quarters = range(0, LANES, 4)

    def halved(one: Any, two: Any) -> Any:
        low = picked(builder, one, two, [n for q in quarters for n in (q, LANES + q, q + 1, LANES + q + 1)])
        high = picked(builder, one, two, [n for q in quarters for n in (q + 2, LANES + q + 2, q + 3, LANES + q + 3)])
        return builder.fadd(low, high)

    one, two = halved(*four[:2]), halved(*four[2:])
    low = picked(builder, one, two, [n for q in quarters for n in (q, q + 1, LANES + q, LANES + q + 1)])
    high = picked(builder, one, two, [n for q in quarters for n in (q + 2, q + 3, LANES + q + 2, LANES + q + 3)])
    return builder.fadd(low, high)


def _quad(builder: Any, address: Any, spec: Any) -> Any:
    """Four words of a key in all four quarters."""
    if spec.rows == "pairs":
        words = builder.load(at(builder, address, ir.VectorType(F32, 4)), align=2)
    else:
        words = input_vector(builder, address, 4, spec)
    return picked(builder, words, words, [n % 4 for n in range(LANES)])


@intrinsic
def dots(typing, keys, key_step, last, four, fours_last, chunks, target, target_step, spec):
    """Dot products of 16 key rows with four queries as :func:`in_fours` lays them out; steps in bytes.

    Keys past ``last`` repeat it, and so do queries past ``fours_last``. ``chunks``: 16 words each. Four rows of 16 come out.
    """
    of = spec.value
    kind, multiply, word_bytes = of.vector.ir, multiplied(of), of.input_bytes * of.per_word

    def emit(context, builder, signature, args):
        keys, key_step, last, four, fours_last, chunks, target, target_step, _ = args
        sums = []
        for first in range(0, LANES, of.isa.gemv_keys):
            places = []
            for number in range(first, first + of.isa.gemv_keys):
                places.append(builder.add(keys, builder.mul(clamped(builder, number, last), key_step)))
            totals = [alloca_once(builder, kind) for _ in places]
            for total in totals:
                builder.store(ir.Constant(kind, None), total)
            with for_range(builder, chunks) as loop:
                column = builder.mul(loop.index, ir.Constant(I64, word_bytes * LANES))
                from_four = builder.mul(loop.index, ir.Constant(I64, 4 * LANES * FOUR))
                for place in places:
                    ahead = builder.mul(ir.Constant(I64, AHEAD), key_step)
                    prefetch(builder, builder.add(builder.add(place, column), ahead))
                for quarter in range(4):
                    queries_at = builder.add(four, builder.add(from_four, ir.Constant(I64, 64 * quarter)))
                    queries = builder.load(at(builder, queries_at, kind), align=4)
                    for place, total in zip(places, totals, strict=True):
                        quad_at = builder.add(builder.add(place, column), ir.Constant(I64, 4 * word_bytes * quarter))
                        key = _quad(builder, quad_at, of)
                        builder.store(multiply(builder, key, queries, builder.load(total)), total)
            loaded = [builder.load(total) for total in totals]
            sums += [_quad_sums(builder, loaded[n : n + 4]) for n in range(0, of.isa.gemv_keys, 4)]
        for j in range(FOUR):  # the quarters j of the four sums, side by side
            lanes = [4 * j, 4 * j + 1, 4 * j + 2, 4 * j + 3, *(LANES + 4 * j + n for n in range(4))]
            low, high = (picked(builder, *two, lanes) for two in (sums[:2], sums[2:]))
            to = builder.add(target, builder.mul(clamped(builder, j, fours_last), target_step))
            builder.store(picked(builder, low, high, list(range(LANES))), at(builder, to, kind), align=4)
        return context.get_dummy_value()

    return types.void(*[types.intp] * 8, spec), emit


def _pv_panel(builder: Any, args: Any, count: int, vectors: int, spec: Any) -> None:
    """The tile of :func:`pv`: ``count`` rows of ``vectors`` vectors, in registers over all keys."""
    weights, weight_step, last, values, value_step, keys, zeros, output, output_step = args
    pairs, kind, multiply, one = spec.rows == "pairs", spec.vector.ir, multiplied(spec), ir.Constant(I64, 1)
    tile = [[alloca_once(builder, kind) for _ in range(vectors)] for _ in range(count)]
    from_weights, to = [], []
    for r in range(count):
        row = clamped(builder, r, last)
        from_weights.append(builder.add(weights, builder.mul(row, weight_step)))
        to.append(builder.add(output, builder.mul(row, output_step)))

    def place(address: Any, byte: int) -> Any:
        return builder.add(address, ir.Constant(I64, byte))

    for total in (total for row in tile for total in row):
        builder.store(ir.Constant(kind, None), total)
    steps = builder.lshr(builder.add(keys, one), one) if pairs else keys
    with for_range(builder, steps) as loop:
        if pairs:
            low = builder.add(values, builder.mul(builder.shl(loop.index, one), value_step))
            second = builder.icmp_signed("<", builder.add(builder.shl(loop.index, one), one), keys)
            rows = [low, builder.select(second, builder.add(low, value_step), zeros)]
            columns = zipped_rows(builder, *rows, vectors // 2, kind)
        else:
            rows = [builder.add(values, builder.mul(loop.index, value_step))]
            size = LANES * spec.input_bytes
            columns = [input_vector(builder, place(rows[0], size * j), LANES, spec) for j in range(vectors)]
        ahead = builder.mul(ir.Constant(I64, AHEAD), value_step)
        row_bytes = LANES * spec.input_bytes * vectors
        for row in rows:
            for byte in range(0, row_bytes, 64):
                prefetch(builder, place(builder.add(row, ahead), byte))
        for r in range(count):
            weight_at = builder.add(from_weights[r], builder.shl(loop.index, ir.Constant(I64, 2)))
            weight = broadcast(builder, builder.load(at(builder, weight_at, F32), align=4), LANES)
            for total, column in zip(tile[r], columns, strict=True):
                builder.store(multiply(builder, weight, column, builder.load(total)), total)
    for r in range(count):  # before any store, since rows may repeat
        for j in range(vectors):
            so_far = builder.load(at(builder, place(to[r], 64 * j), kind), align=4)
            builder.store(builder.fadd(so_far, builder.load(tile[r][j])), tile[r][j])
    for r in range(count):
        for j in range(vectors):
            builder.store(builder.load(tile[r][j]), at(builder, place(to[r], 64 * j), kind), align=4)


def _line_vectors(spec: Any) -> int:
    """The vectors of the narrowest tile: two rows of pairs are zipped 32 numbers at a time."""
    return 2 if spec.rows == "pairs" else 1


def _pv(count: int, wide: bool) -> Any:
    @intrinsic
    def pv(typing, weights, weight_step, last, values, value_step, keys, zeros, output, output_step, spec):
        vectors = max(spec.value.isa.gemv_vectors, _line_vectors(spec.value)) if wide else _line_vectors(spec.value)

        def emit(context, builder, signature, args):
            _pv_panel(builder, args[:-1], count, vectors, spec.value)
            return context.get_dummy_value()

        return types.void(*[types.intp] * 9, spec), emit

    return pv


@intrinsic
def _columns(typing, spec):
    """Columns of the wide and of the narrow tile."""
    kind, line = types.UniTuple(types.int64, 2), _line_vectors(spec.value)
    wide = max(spec.value.isa.gemv_vectors, line)
    return kind(spec), lambda c, b, s, a: c.make_tuple(b, kind, [ir.Constant(I64, LANES * n) for n in (wide, line)])


_pv_wide, _pv_line, _pv_alone = _pv(FOUR, wide=True), _pv(FOUR, wide=False), _pv(1, wide=True)


@device_function
def pv(weights, weight_step, rows, values, value_step, keys, zeros, output, columns, spec):
    """Output (rows, columns) += weights x values, rows packed. Steps in bytes; in pairs, weights are of neighbouring keys.

    ``zeros``: a row of 0, the neighbour of an odd last key. Columns are a multiple of 16, in pairs of 32.
    """
    size = spec.input_bytes
    wide, line = _columns(spec)
    for row in range(0, rows, FOUR):
        last, some = min(FOUR, rows - row) - 1, weights + row * weight_step
        column = 0
        while column + wide <= columns:
            at, to = values + size * column, output + 4 * (row * columns + column)
            if last:
                _pv_wide(some, weight_step, last, at, value_step, keys, zeros, to, 4 * columns, spec)
            else:
                _pv_alone(some, weight_step, last, at, value_step, keys, zeros, to, 4 * columns, spec)
            column += wide
        while column < columns:
            at, to = values + size * column, output + 4 * (row * columns + column)
            _pv_line(some, weight_step, last, at, value_step, keys, zeros, to, 4 * columns, spec)
            column += line

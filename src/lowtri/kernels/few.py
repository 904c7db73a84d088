"""Four queries against rows of the cache, which are read once and in the order of memory: dot products, and sums of value rows.

A word is a float, or a pair of bf16. For the dot products a vector holds four words of each of four queries; four words of a key,
read into all four quarters at once, meet them, and only the last four partial sums of a product go across lanes.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from lowtri.kernels.halves import fused_pairs, zipped_rows
from lowtri.kernels.inner import inner
from lowtri.kernels.simd import AHEAD, F32, I64, INTS, VECTOR, at, broadcast, clamped, fused, prefetch, read, write
from lowtri.kernels.target import FEW_KEYS, FEW_VECTORS, LANES

__all__ = ["FOUR", "dots", "in_fours", "mix"]

FOUR = 4  # queries that share what is read; past the last one, it stands in for the others
_QUAD = ir.VectorType(F32, FOUR)


@inner
def in_fours(rows, count, words, target):
    """Packed rows of ``words`` words, four together: four words of each, side by side. The last row stands in for those past it."""
    for row in range(0, count, FOUR):
        for word in range(words):
            for j in range(FOUR):
                to = target + 4 * (row * words + (word // 4 * FOUR + j) * 4 + word % 4)
                write(to, read(rows + 4 * (min(row + j, count - 1) * words + word)))


def _picked(builder: Any, one: Any, two: Any, lanes: list[int]) -> Any:
    return builder.shuffle_vector(one, two, ir.Constant(ir.VectorType(INTS.element, len(lanes)), lanes))


def _quad_sums(builder: Any, four: list[Any]) -> Any:
    """Each quarter of four vectors added up: quarter q holds the sums of the first's, second's, third's and fourth's quarter q."""
    quarters = range(0, LANES, 4)

    def halved(one: Any, two: Any) -> Any:
        low = _picked(builder, one, two, [n for q in quarters for n in (q, LANES + q, q + 1, LANES + q + 1)])
        high = _picked(builder, one, two, [n for q in quarters for n in (q + 2, LANES + q + 2, q + 3, LANES + q + 3)])
        return builder.fadd(low, high)

    one, two = halved(*four[:2]), halved(*four[2:])
    low = _picked(builder, one, two, [n for q in quarters for n in (q, q + 1, LANES + q, LANES + q + 1)])
    high = _picked(builder, one, two, [n for q in quarters for n in (q + 2, q + 3, LANES + q + 2, LANES + q + 3)])
    return builder.fadd(low, high)


@intrinsic
def dots(typing, keys, key_step, last, four, others_last, chunks, target, target_step, half):
    """Dot products of 16 key rows with four queries as :func:`in_fours` lays them out; steps in bytes.

    Keys past ``last`` repeat it, and so do queries past ``others_last``. ``chunks``: vectors in a key. Four rows of 16 come out.
    """
    multiply = fused if half == types.none else fused_pairs

    def emit(context, builder, signature, args):
        keys, key_step, last, four, others_last, chunks, target, target_step, _ = args
        sums = []
        for first in range(0, LANES, FEW_KEYS):
            places = []
            for number in range(first, first + FEW_KEYS):
                places.append(builder.add(keys, builder.mul(clamped(builder, number, last), key_step)))
            totals = [cgutils.alloca_once(builder, VECTOR) for _ in places]
            for total in totals:
                builder.store(ir.Constant(VECTOR, None), total)
            with cgutils.for_range(builder, chunks) as loop:
                column = builder.mul(loop.index, ir.Constant(I64, 4 * LANES))
                for place in places:
                    ahead = builder.mul(ir.Constant(I64, AHEAD), key_step)
                    prefetch(builder, builder.add(builder.add(place, column), ahead))
                for quarter in range(4):
                    from_four = builder.add(builder.mul(column, ir.Constant(I64, FOUR)), ir.Constant(I64, 64 * quarter))
                    queries = builder.load(at(builder, builder.add(four, from_four), VECTOR), align=4)
                    for place, total in zip(places, totals, strict=True):
                        words_at = builder.add(builder.add(place, column), ir.Constant(I64, 16 * quarter))
                        words = builder.load(at(builder, words_at, _QUAD), align=2)
                        key = _picked(builder, words, words, [n % 4 for n in range(LANES)])
                        builder.store(multiply(builder, key, queries, builder.load(total)), total)
            loaded = [builder.load(total) for total in totals]
            sums += [_quad_sums(builder, loaded[n : n + 4]) for n in range(0, FEW_KEYS, 4)]
        for j in range(FOUR):  # the quarters j of the four sums, side by side
            lanes = [4 * j, 4 * j + 1, 4 * j + 2, 4 * j + 3, *(LANES + 4 * j + n for n in range(4))]
            low, high = (_picked(builder, *two, lanes) for two in (sums[:2], sums[2:]))
            to = builder.add(target, builder.mul(clamped(builder, j, others_last), target_step))
            builder.store(_picked(builder, low, high, list(range(LANES))), at(builder, to, VECTOR), align=4)
        return context.get_dummy_value()

    return types.void(*[types.intp] * 8, half), emit


def _mixed(builder: Any, args: Any, count: int, vectors: int, half: Any) -> None:
    """The tile of :func:`mix`: ``count`` rows of ``vectors`` vectors, in registers over all keys."""
    weights, weight_step, last, values, value_step, keys, zeros, output, output_step = args
    pairs = half != types.none
    one = ir.Constant(I64, 1)
    tile = [[cgutils.alloca_once(builder, VECTOR) for _ in range(vectors)] for _ in range(count)]
    from_weights, to = [], []
    for r in range(count):
        row = clamped(builder, r, last)
        from_weights.append(builder.add(weights, builder.mul(row, weight_step)))
        to.append(builder.add(output, builder.mul(row, output_step)))

    def place(address: Any, vector: int) -> Any:
        return at(builder, builder.add(address, ir.Constant(I64, 64 * vector)), VECTOR)

    for total in (total for row in tile for total in row):
        builder.store(ir.Constant(VECTOR, None), total)
    steps = builder.lshr(builder.add(keys, one), one) if pairs else keys
    with cgutils.for_range(builder, steps) as loop:
        if pairs:
            low = builder.add(values, builder.mul(builder.shl(loop.index, one), value_step))
            second = builder.icmp_signed("<", builder.add(builder.shl(loop.index, one), one), keys)
            rows = [low, builder.select(second, builder.add(low, value_step), zeros)]
            columns = zipped_rows(builder, *rows, vectors // 2)
        else:
            rows = [builder.add(values, builder.mul(loop.index, value_step))]
            columns = [builder.load(place(rows[0], j), align=4) for j in range(vectors)]
        ahead = builder.mul(ir.Constant(I64, AHEAD), value_step)
        for row in rows:
            for j in range(0, vectors, len(rows)):
                prefetch(builder, builder.add(builder.add(row, ahead), ir.Constant(I64, 64 * j // len(rows))))
        for r in range(count):
            weight_at = builder.add(from_weights[r], builder.shl(loop.index, ir.Constant(I64, 2)))
            weight = broadcast(builder, builder.load(at(builder, weight_at, F32), align=4))
            for total, column in zip(tile[r], columns, strict=True):
                builder.store((fused_pairs if pairs else fused)(builder, weight, column, builder.load(total)), total)
    for r in range(count):  # before any store, since rows may repeat
        for j in range(vectors):
            so_far = builder.load(place(to[r], j), align=4)
            builder.store(builder.fadd(so_far, builder.load(tile[r][j])), tile[r][j])
    for r in range(count):
        for j in range(vectors):
            builder.store(builder.load(tile[r][j]), place(to[r], j), align=4)


def _mix(count: int, vectors: int) -> Any:
    @intrinsic
    def mix(typing, weights, weight_step, last, values, value_step, keys, zeros, output, output_step, half):
        line = 1 if half == types.none else 2  # what 64 bytes of a row are the columns of

        def emit(context, builder, signature, args):
            _mixed(builder, args[:-1], count, vectors or line, half)
            return context.get_dummy_value()

        return types.void(*[types.intp] * 9, half), emit

    return mix


_mix_wide, _mix_line, _mix_alone = _mix(FOUR, FEW_VECTORS), _mix(FOUR, 0), _mix(1, FEW_VECTORS)


@inner
def mix(weights, weight_step, rows, values, value_step, keys, zeros, output, columns, half):
    """Output (rows, columns) += weights x values, rows packed. Steps in bytes; weights of bf16 are pairs of neighbouring keys.

    ``zeros``: a row of 0, the neighbour of an odd last key. Columns are a multiple of 16, of 32 in bf16.
    """
    wide = 4 if half is None else 2
    for row in range(0, rows, FOUR):
        last, some = min(FOUR, rows - row) - 1, weights + row * weight_step
        column = 0
        while column + 16 * FEW_VECTORS <= columns:
            at, to = values + wide * column, output + 4 * (row * columns + column)
            if last:
                _mix_wide(some, weight_step, last, at, value_step, keys, zeros, to, 4 * columns, half)
            else:
                _mix_alone(some, weight_step, last, at, value_step, keys, zeros, to, 4 * columns, half)
            column += 16 * FEW_VECTORS
        while column < columns:
            at, to = values + wide * column, output + 4 * (row * columns + column)
            _mix_line(some, weight_step, last, at, value_step, keys, zeros, to, 4 * columns, half)
            column += 64 // wide

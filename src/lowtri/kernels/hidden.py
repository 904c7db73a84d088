"""Which pairs a dense table of numbers hides: numbers from -inf up to a limit become bits, in one pass over the table.

Numbers are read as unsigned integers of their width, so that float16 and bf16 need no conversion. A number that is at most a negative
limit is an integer from the limit's to that of -inf; NaN with a sign bit comes after it. A number is not 0 if a bit besides the sign is
set.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types

from lowtri.compat.numba_private import alloca_once, for_range
from lowtri.kernels.device import device_function, operation, tasks
from lowtri.kernels.operations import I8, I64, broadcast, constant, i64, pointer
from lowtri.kernels.simd import prefetch, write_int64

_VECTOR_BYTES = 64
_BYTES_AHEAD = 4096  # that are prefetched: the CPU's own prefetcher stops at the end of a page


def hidden(call):
    """The kernel: takes tasks until none is left. A task has some rows of the table."""
    for task in tasks(call):
        batch, part = task // call.parts, task % call.parts
        first = part * call.rows_at_once
        shown = 0
        for row in range(first, min(first + call.rows_at_once, call.rows)):
            source = call.numbers + batch * call.batch_step + row * call.row_step
            target = call.bits + batch * call.bits_batch_step + row * call.bits_row_step
            shown |= row_bits(source, target, call)
        if shown != 0:  # all threads write the same
            write_int64(call.shown, 1)


@device_function
def row_bits(source, target, call):
    """Write the bits of a row; returns 1 if a number that does not hide is not 0, else 0."""
    if call.number_bytes == 2:
        return _of_halves(source, target, call.numbers_in_row, call.limit, call.span)
    if call.number_bytes == 4:
        return _of_floats(source, target, call.numbers_in_row, call.limit, call.span)
    return _of_doubles(source, target, call.numbers_in_row, call.limit, call.span)


def _row_bits(number_bytes):
    number = ir.IntType(8 * number_bytes)
    kind = ir.VectorType(number, _VECTOR_BYTES // number_bytes)
    word = ir.IntType(kind.count)  # a bit for each number, the lowest for the first
    zeros = ir.Constant(kind, None)

    @operation(types.int64)
    def row_bits(builder, source, target, count, limit, span):
        limit, span = (broadcast(builder, builder.trunc(x, number), kind.count) for x in (limit, span))
        shown, rest = alloca_once(builder, kind), alloca_once(builder, kind)
        builder.store(zeros, shown)

        def bits_of(numbers):
            hides = builder.icmp_unsigned("<=", builder.sub(numbers, limit), span)
            visible = builder.select(hides, zeros, builder.shl(numbers, constant(kind, 1)))
            builder.store(builder.or_(builder.load(shown), visible), shown)
            return builder.bitcast(hides, word)

        vectors = builder.udiv(count, i64(kind.count))
        with for_range(builder, vectors) as loop:
            address = builder.add(source, builder.mul(loop.index, i64(_VECTOR_BYTES)))
            place = builder.add(target, builder.mul(loop.index, i64(kind.count // 8)))
            prefetch(builder, builder.add(address, i64(_BYTES_AHEAD)), level=1)
            bits = bits_of(builder.load(pointer(builder, address, kind), align=1))
            builder.store(bits, pointer(builder, place, word), align=1)
        left = builder.sub(count, builder.mul(vectors, i64(kind.count)))
        with builder.if_then(builder.icmp_unsigned("!=", left, i64(0))):
            # Zeros stand behind the last numbers, and hide nothing.
            builder.store(zeros, rest)
            start = builder.add(source, builder.mul(vectors, i64(_VECTOR_BYTES)))
            copy = builder.ptrtoint(rest, I64)
            with for_range(builder, left) as loop:
                offset = builder.mul(loop.index, i64(number_bytes))
                x = builder.load(pointer(builder, builder.add(start, offset), number), align=1)
                builder.store(x, pointer(builder, builder.add(copy, offset), number), align=number_bytes)
            bits = builder.zext(bits_of(builder.load(rest)), I64)
            place = builder.add(target, builder.mul(vectors, i64(kind.count // 8)))
            with for_range(builder, builder.udiv(builder.add(left, i64(7)), i64(8))) as loop:
                byte = builder.trunc(builder.lshr(bits, builder.mul(loop.index, i64(8))), I8)
                builder.store(byte, pointer(builder, builder.add(place, loop.index), I8), align=1)
        flags = builder.bitcast(builder.icmp_unsigned("!=", builder.load(shown), zeros), word)
        return builder.zext(builder.icmp_unsigned("!=", flags, ir.Constant(word, 0)), I64)

    return row_bits


_of_halves, _of_floats, _of_doubles = (_row_bits(number_bytes) for number_bytes in (2, 4, 8))

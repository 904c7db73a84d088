"""A vector of 16 floats as a Numba type, and the words that kernels are written in.

Each word is one LLVM instruction or a few. Addresses are plain integers in bytes, as NumPy and torch give them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

from lowtri.kernels.target import FMA, LANES

__all__ = [
    "above_or",
    "add",
    "any_above",
    "bits_float",
    "div",
    "dots",
    "dots_pairs",
    "exp2",
    "exp2_less_1",
    "fetch_add",
    "fma",
    "greatest_lane",
    "load",
    "maximum",
    "mul",
    "only",
    "pair",
    "pair_up",
    "prefetch",
    "read",
    "read_byte",
    "read_half",
    "read_int32",
    "read_int64",
    "read_word",
    "splat",
    "store",
    "store_halves",
    "sub",
    "sum_lanes",
    "transpose",
    "where_finite",
    "write",
]

I16, I32, I64, F32 = ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
VECTOR = ir.VectorType(F32, LANES)
INTS = ir.VectorType(I32, LANES)
FLAGS = ir.VectorType(ir.IntType(1), LANES)


class VectorType(types.Type):
    """16 floats in registers."""

    def __init__(self) -> None:
        super().__init__(name="float32x16")


vector = VectorType()


@register_model(VectorType)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, VECTOR)


def call(builder: Any, name: str, result: Any, args: list[Any]) -> Any:
    """Call an LLVM intrinsic by name, declared once in a module."""
    found = builder.module.globals.get(name)
    found = found or ir.Function(builder.module, ir.FunctionType(result, [a.type for a in args]), name)
    return builder.call(found, args)


def constant(value: float) -> Any:
    return ir.Constant(VECTOR, [float(np.float32(value))] * LANES)


def broadcast(builder: Any, scalar: Any) -> Any:
    kind = ir.VectorType(scalar.type, LANES)
    one = builder.insert_element(ir.Constant(kind, ir.Undefined), scalar, ir.Constant(I32, 0))
    return builder.shuffle_vector(one, ir.Constant(kind, ir.Undefined), ir.Constant(INTS, None))


def fused(builder: Any, x: Any, y: Any, z: Any) -> Any:
    """x * y + z, rounded once where the CPU can."""
    return call(builder, f"llvm.{'fma' if FMA else 'fmuladd'}.v{LANES}f32", VECTOR, [x, y, z])


def at(builder: Any, address: Any, kind: Any) -> Any:
    return builder.inttoptr(address, kind.as_pointer())


@intrinsic
def load(typing, address):
    """16 floats from memory."""
    return vector(types.intp), lambda c, b, s, a: b.load(at(b, a[0], VECTOR), align=4)


@intrinsic
def store(typing, address, x):
    """16 floats to memory."""

    def emit(c, b, s, a):
        b.store(a[1], at(b, a[0], VECTOR), align=4)
        return c.get_dummy_value()

    return types.void(types.intp, vector), emit


@intrinsic
def read(typing, address):
    """One float from memory."""
    return types.float32(types.intp), lambda c, b, s, a: b.load(at(b, a[0], F32), align=4)


@intrinsic
def write(typing, address, x):
    """One float to memory."""

    def emit(c, b, s, a):
        b.store(a[1], at(b, a[0], F32), align=4)
        return c.get_dummy_value()

    return types.void(types.intp, types.float32), emit


@intrinsic
def read_word(typing, address):
    """64 bits from memory: who of 64 queries sees a key."""
    return types.uint64(types.intp), lambda c, b, s, a: b.load(at(b, a[0], I64), align=8)


@intrinsic
def read_int32(typing, address):
    """One int32 from memory."""
    return types.int64(types.intp), lambda c, b, s, a: b.sext(b.load(at(b, a[0], I32), align=4), I64)


@intrinsic
def read_int64(typing, address):
    """One int64 from memory."""
    return types.int64(types.intp), lambda c, b, s, a: b.load(at(b, a[0], I64), align=8)


@intrinsic
def read_byte(typing, address):
    """One byte from memory."""
    kind = ir.IntType(8)
    return types.int64(types.intp), lambda c, b, s, a: b.zext(b.load(at(b, a[0], kind), align=1), I64)


@intrinsic
def splat(typing, x):
    """One float in all 16 lanes."""
    return vector(types.float32), lambda c, b, s, a: broadcast(b, a[0])


@intrinsic
def add(typing, x, y):
    return vector(vector, vector), lambda c, b, s, a: b.fadd(*a)


@intrinsic
def sub(typing, x, y):
    return vector(vector, vector), lambda c, b, s, a: b.fsub(*a)


@intrinsic
def mul(typing, x, y):
    return vector(vector, vector), lambda c, b, s, a: b.fmul(*a)


@intrinsic
def div(typing, x, y):
    return vector(vector, vector), lambda c, b, s, a: b.fdiv(*a)


@intrinsic
def fma(typing, x, y, z):
    """x * y + z."""
    return vector(vector, vector, vector), lambda c, b, s, a: fused(b, *a)


@intrinsic
def maximum(typing, x, y):
    """The greater; y where either is NaN, so a NaN in y stays. One instruction, unlike the maximum of IEEE 754."""
    return vector(vector, vector), lambda c, b, s, a: b.select(b.fcmp_ordered(">", *a), *a)


@intrinsic
def only(typing, word, shift, x, other):
    """x in the lanes whose bit in ``word >> shift`` is set, ``other`` in the rest."""

    def emit(c, b, s, a):
        flags = b.bitcast(b.trunc(b.lshr(a[0], a[1]), I16), FLAGS)
        return b.select(flags, a[2], a[3])

    return vector(types.uint64, types.uint64, vector, vector), emit


@intrinsic
def above_or(typing, x, limit, yes, no):
    """``yes`` in the lanes where x > limit, ``no`` in the rest (and where x is NaN)."""

    def emit(c, b, s, a):
        return b.select(b.fcmp_ordered(">", a[0], a[1]), a[2], a[3])

    return vector(vector, vector, vector, vector), emit


@intrinsic
def any_above(typing, x, y):
    """Whether x > y in any lane, or either is NaN in one."""

    def emit(c, b, s, a):
        flags = b.bitcast(b.fcmp_unordered(">", *a), I16)
        return b.icmp_unsigned("!=", flags, ir.Constant(I16, 0))

    return types.boolean(vector, vector), emit


@intrinsic
def where_finite(typing, x):
    """Whether all 16 floats are finite: their exponents are not all ones."""

    def emit(c, b, s, a):
        mask = ir.Constant(INTS, [0x7F800000] * LANES)
        broken = b.icmp_unsigned("==", b.and_(b.bitcast(a[0], INTS), mask), mask)
        return b.icmp_unsigned("==", b.bitcast(broken, I16), ir.Constant(I16, 0))

    return types.boolean(vector), emit


@intrinsic
def _two_to_the(typing, n):
    """2 ** n for whole n in -126 .. 127: the exponent's bits, written."""

    def emit(c, b, s, a):
        biased = b.add(b.fptosi(a[0], INTS), ir.Constant(INTS, [127] * LANES))
        return b.bitcast(b.shl(biased, ir.Constant(INTS, [23] * LANES)), VECTOR)

    return vector(vector), emit


@intrinsic
def _nearest(typing, x):
    return vector(vector), lambda c, b, s, a: call(b, f"llvm.roundeven.v{LANES}f32", VECTOR, [a[0]])


@intrinsic
def _below_range(typing, x, y):
    """y, but 0 where x < -126 and x where x is NaN."""

    def emit(c, b, s, a):
        out = b.select(b.fcmp_ordered("<", a[0], constant(-126.0)), constant(0.0), a[1])
        return b.select(b.fcmp_unordered("uno", a[0], a[0]), a[0], out)

    return vector(vector, vector), emit


def _transposed(builder: Any, rows: list[Any]) -> list[Any]:
    """16 vectors as the columns of what they were the rows of: halves, quarters, eighths change places."""
    step = LANES // 2
    while step:
        for i in range(LANES):
            if not i & step:
                one, two = rows[i], rows[i + step]
                low = [lane if not lane & step else LANES + lane - step for lane in range(LANES)]
                high = [lane + step if not lane & step else LANES + lane for lane in range(LANES)]
                rows[i] = builder.shuffle_vector(one, two, ir.Constant(INTS, low))
                rows[i + step] = builder.shuffle_vector(one, two, ir.Constant(INTS, high))
        step //= 2
    return rows


@intrinsic
def transpose(typing, source, source_row, last, target, target_row):
    """A 16 x 16 block, turned: row i of the source becomes column i. Rows past ``last`` repeat it; steps in bytes."""

    def emit(c, b, s, a):
        source, source_row, last, target, target_row = a
        rows = []
        for i in range(LANES):
            number = ir.Constant(I64, i)
            clamped = b.select(b.icmp_signed("<", number, last), number, last)
            rows.append(b.load(at(b, b.add(source, b.mul(clamped, source_row)), VECTOR), align=4))
        for i, column in enumerate(_transposed(b, rows)):
            b.store(column, at(b, b.add(target, b.mul(ir.Constant(I64, i), target_row)), VECTOR), align=4)
        return c.get_dummy_value()

    return types.void(*[types.intp] * 5), emit


def _sums(builder: Any, rows: list[Any]) -> Any:
    """The sums of 16 vectors, each in the lane of its number: halves are added together, then quarters, then eighths."""
    step = LANES // 2
    while len(rows) > 1:
        half = len(rows) // 2
        low = [lane if not lane & step else LANES + lane - step for lane in range(LANES)]
        high = [lane + step if not lane & step else LANES + lane for lane in range(LANES)]
        folded = []
        for one, two in zip(rows[:half], rows[half:], strict=True):
            left = builder.shuffle_vector(one, two, ir.Constant(INTS, low))
            right = builder.shuffle_vector(one, two, ir.Constant(INTS, high))
            folded.append(builder.fadd(left, right))
        rows, step = folded, step // 2
    return rows[0]


def _dots(builder: Any, args: Any, multiply: Any) -> Any:
    """Dot products of one packed row with 16 others, ``chunks`` vectors long; rows past ``last`` repeat it; steps in bytes."""
    rows, row_step, last, one, chunks = args
    sums = [cgutils.alloca_once(builder, VECTOR) for _ in range(LANES)]
    places = []
    for i in range(LANES):
        number = ir.Constant(I64, i)
        clamped = builder.select(builder.icmp_signed("<", number, last), number, last)
        places.append(builder.add(rows, builder.mul(clamped, row_step)))
        builder.store(ir.Constant(VECTOR, None), sums[i])
    with cgutils.for_range(builder, chunks) as loop:
        offset = builder.mul(loop.index, ir.Constant(I64, 4 * LANES))
        other = builder.load(at(builder, builder.add(one, offset), VECTOR), align=2)
        for i in range(LANES):
            row = builder.load(at(builder, builder.add(places[i], offset), VECTOR), align=2)
            builder.store(multiply(builder, row, other, builder.load(sums[i])), sums[i])
    return _sums(builder, [builder.load(place) for place in sums])


@intrinsic
def dots(typing, rows, row_step, last, one, chunks):
    """16 dot products of floats at once, one in each lane."""
    return vector(*[types.intp] * 5), lambda c, b, s, a: _dots(b, a, fused)


@intrinsic
def dots_pairs(typing, rows, row_step, last, one, chunks):
    """The same for rows of bf16, 32 numbers to a vector."""
    return vector(*[types.intp] * 5), lambda c, b, s, a: _dots(b, a, fused_pairs)


@intrinsic
def prefetch(typing, address):
    """Ask for a line of memory that will be read soon; any address may be asked for."""

    def emit(c, b, s, a):
        place = at(b, a[0], ir.IntType(8))
        name, flags = (
            "llvm.prefetch.p0",
            [ir.Constant(I32, flag) for flag in (0, 2, 1)],
        )  # to read, into the second cache, data
        call(b, name, ir.VoidType(), [place, *flags])
        return c.get_dummy_value()

    return types.void(types.intp), emit


@intrinsic
def greatest_lane(typing, x):
    """The greatest of 16 floats; a NaN is passed over."""
    return types.float32(vector), lambda c, b, s, a: call(b, f"llvm.vector.reduce.fmax.v{LANES}f32", F32, [a[0]])


@intrinsic
def sum_lanes(typing, x):
    """The sum of 16 floats."""

    def emit(c, b, s, a):
        step, total = LANES // 2, a[0]
        while step:
            turned = ir.Constant(INTS, [(lane + step) % LANES for lane in range(LANES)])
            total = b.fadd(total, b.shuffle_vector(total, total, turned))
            step //= 2
        return b.extract_element(total, ir.Constant(I32, 0))

    return types.float32(vector), emit


# (2^r - 1) / r on [-1/2, 1/2]: a polynomial fitted to equal relative error of 2^r, 2e-9.
_C = tuple(np.float32(c) for c in (1.5353361e-4, 1.3398875e-3, 9.6184369e-3, 5.5503324e-2, 2.4022648e-1, 6.9314718e-1))


@njit(inline="always")
def _split(x):
    """x as a whole number n and a rest: (n, 2 ** rest - 1)."""
    whole = _nearest(maximum(x, splat(np.float32(-126.0))))
    r = sub(x, whole)
    p = splat(_C[0])
    p = fma(p, r, splat(_C[1]))
    p = fma(p, r, splat(_C[2]))
    p = fma(p, r, splat(_C[3]))
    p = fma(p, r, splat(_C[4]))
    p = fma(p, r, splat(_C[5]))
    return whole, mul(p, r)


@njit(inline="always")
def exp2(x):
    """2 ** x, to 1e-7 relative; exactly 0 below 2 ** -126 (so exp2(-inf) is 0), NaN for NaN. For x <= 127."""
    whole, more = _split(x)
    scale = _two_to_the(whole)
    return _below_range(x, fma(scale, more, scale))


@njit(inline="always")
def exp2_less_1(x):
    """2 ** x - 1, to 2e-7 relative also where x is small. For -126 <= x <= 127."""
    whole, more = _split(x)
    scale = _two_to_the(whole)
    return fma(scale, more, sub(scale, splat(np.float32(1.0))))


# bf16: the upper half of a float32. Two of them in a 32-bit word are a pair, and a vector of 16 pairs travels as a vector of floats.
# llvmlite has no type bfloat; one that prints its name is all that LLVM asks for.


class _BFloat(ir.Type):
    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash("bfloat")


HALVES = ir.VectorType(I16, LANES)
PAIRS = ir.VectorType(_BFloat(), 2 * LANES)


def fused_pairs(builder: Any, x: Any, y: Any, z: Any) -> Any:
    """z plus, in each lane, the dot product of two pairs of bf16."""
    x, y = builder.bitcast(x, PAIRS), builder.bitcast(y, PAIRS)
    return call(builder, "llvm.x86.avx512bf16.dpbf16ps.512", VECTOR, [z, x, y])


def _to_halves(builder: Any, x: Any) -> Any:
    """16 floats rounded to bf16, as 16-bit ints."""
    kind = ir.VectorType(_BFloat(), LANES)
    return builder.bitcast(call(builder, "llvm.x86.avx512bf16.cvtneps2bf16.512", kind, [x]), HALVES)


def _zipped(builder: Any, low: Any, high: Any) -> Any:
    """Two vectors of 16-bit ints as one vector of pairs."""
    high = builder.shl(builder.zext(high, INTS), ir.Constant(INTS, [16] * LANES))
    return builder.bitcast(builder.or_(builder.zext(low, INTS), high), VECTOR)


@intrinsic
def pair(typing, low, high):
    """16 pairs of bf16 from two vectors of floats."""
    return vector(vector, vector), lambda c, b, s, a: _zipped(b, _to_halves(b, a[0]), _to_halves(b, a[1]))


@intrinsic
def pair_up(typing, low, high):
    """16 pairs from two rows of bf16 in memory."""

    def emit(c, b, s, a):
        return _zipped(b, *(b.load(at(b, address, HALVES), align=2) for address in a))

    return vector(types.intp, types.intp), emit


@intrinsic
def store_halves(typing, address, x):
    """16 floats to memory, rounded to bf16."""

    def emit(c, b, s, a):
        b.store(_to_halves(b, a[1]), at(b, a[0], HALVES), align=2)
        return c.get_dummy_value()

    return types.void(types.intp, vector), emit


@intrinsic
def read_half(typing, address):
    """One bf16 from memory, as a float."""

    def emit(c, b, s, a):
        word = b.shl(b.zext(b.load(at(b, a[0], I16), align=2), I32), ir.Constant(I32, 16))
        return b.bitcast(word, F32)

    return types.float32(types.intp), emit


@intrinsic
def fetch_add(typing, address, n):
    """Add n to the int at the address and give back what stood there; safe among threads."""

    def emit(c, b, s, a):
        return b.atomic_rmw("add", at(b, a[0], I64), a[1], "seq_cst")

    return types.int64(types.intp, types.int64), emit


@intrinsic
def bits_float(typing, bits):
    """A float64 that was stored as the bits of an int64."""
    return types.float64(types.int64), lambda c, b, s, a: b.bitcast(a[0], ir.DoubleType())

"""A vector of 16 floats as a Numba type, and the words that kernels are written in.

Each word is one LLVM instruction or a few. Addresses are plain integers in bytes, as NumPy and torch give them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, models, register_model

from lowtri.kernels.target import FMA, LANES

__all__ = [
    "AHEAD",
    "DOUBLES",
    "F32",
    "FLAGS",
    "I16",
    "I32",
    "I64",
    "INTS",
    "VECTOR",
    "above_or",
    "add",
    "any_above",
    "at",
    "bits_float",
    "broadcast",
    "call",
    "clamped",
    "constant",
    "div",
    "fetch_add",
    "fma",
    "fused",
    "load",
    "maximum",
    "mul",
    "only",
    "prefetch",
    "read",
    "read_byte",
    "read_int32",
    "read_int64",
    "read_word",
    "splat",
    "store",
    "sub",
    "vector",
    "where_finite",
    "write",
]

I16, I32, I64, F32 = ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
VECTOR = ir.VectorType(F32, LANES)
DOUBLES = ir.VectorType(ir.DoubleType(), LANES // 2)
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
    """A number in every lane of a vector of 64 bytes."""
    lanes = LANES // 2 if scalar.type == DOUBLES.element else LANES
    kind = ir.VectorType(scalar.type, lanes)
    one = builder.insert_element(ir.Constant(kind, ir.Undefined), scalar, ir.Constant(I32, 0))
    return builder.shuffle_vector(one, ir.Constant(kind, ir.Undefined), ir.Constant(ir.VectorType(I32, lanes), None))


def fused(builder: Any, x: Any, y: Any, z: Any) -> Any:
    """x * y + z, rounded once where the CPU can."""
    kind = f"v{x.type.count}f{64 if x.type == DOUBLES else 32}"
    return call(builder, f"llvm.{'fma' if FMA else 'fmuladd'}.{kind}", x.type, [x, y, z])


def clamped(builder: Any, number: int, last: Any) -> Any:
    """The number of a row, or of the last one where there are fewer: it stands in for those past it."""
    own = ir.Constant(I64, number)
    return builder.select(builder.icmp_signed("<", own, last), own, last)


def at(builder: Any, address: Any, kind: Any) -> Any:
    return builder.inttoptr(address, kind.as_pointer())


# Rows of a cache that are asked for before they are read. The CPU looks ahead by itself, but not past the end of a 4 KB page.
AHEAD = 32


def prefetch(builder: Any, address: Any) -> None:
    """Ask for the line at an address to be brought into the second cache; any address will do."""
    byte = ir.IntType(8).as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [byte, I32, I32, I32])
    found = builder.module.globals.get("llvm.prefetch.p0")
    found = found or ir.Function(builder.module, kind, "llvm.prefetch.p0")
    to_read, second_cache, data = (ir.Constant(I32, n) for n in (0, 2, 1))
    builder.call(found, [builder.inttoptr(address, byte), to_read, second_cache, data])


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
def fetch_add(typing, address, n):
    """Add n to the int at the address and give back what stood there; safe among threads."""

    def emit(c, b, s, a):
        return b.atomic_rmw("add", at(b, a[0], I64), a[1], "seq_cst")

    return types.int64(types.intp, types.int64), emit


@intrinsic
def bits_float(typing, bits):
    """A float64 that was stored as the bits of an int64."""
    return types.float64(types.int64), lambda c, b, s, a: b.bitcast(a[0], ir.DoubleType())

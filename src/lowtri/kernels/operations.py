"""LLVM code for the operations that differ between instruction sets, ``operations_of(isa)``, and what other LLVM code is written with.

A class inherits the operations of the instruction set that it extends; an instruction set without a class of its own has those of the
nearest one that it inherits from. Each operation takes an LLVM builder and vectors of 64 bytes, and returns a vector.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from llvmlite import ir

from lowtri.kernels import isa

I8 = ir.IntType(8)
I16 = ir.IntType(16)
I32 = ir.IntType(32)
I64 = ir.IntType(64)
F32 = ir.FloatType()
F64 = ir.DoubleType()
# Of AMX's tile registers.
TILE_ROWS = 16
TILE_ROW_BYTES = 64


class BFloat(ir.Type):
    """LLVM's type of a bf16 number, which llvmlite lacks; the textual IR needs its name only."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BFloat)

    def __hash__(self) -> int:
        return hash("bfloat")


def i64(value: int) -> Any:
    """A constant of 64 bits."""
    return ir.Constant(I64, value)


def constant(kind: Any, value: float) -> Any:
    """A vector with one number in every lane."""
    return ir.Constant(kind, [value] * kind.count)


def is_double(x: Any) -> bool:
    return bool(x.type.element == F64)


def integers(kind: Any) -> Any:
    """The vector of integers as wide as a vector of numbers."""
    return ir.VectorType(I64 if kind.element == F64 else I32, kind.count)


def pointer(b: Any, address: Any, kind: Any) -> Any:
    """A pointer to a value of this kind at an address."""
    return b.inttoptr(address, kind.as_pointer())


def parts_of(b: Any, value: Any) -> list[Any]:
    """The values that a tuple consists of."""
    return [b.extract_value(value, n) for n in range(len(value.type))]


def call(b: Any, name: str, result: Any, args: list[Any]) -> Any:
    """Call an LLVM intrinsic by name, declared once in a module."""
    function = b.module.globals.get(name)
    function = function or ir.Function(b.module, ir.FunctionType(result, [a.type for a in args]), name)
    return b.call(function, args)


def shuffled(b: Any, one: Any, two: Any, lanes: list[int]) -> Any:
    """A vector of lanes of two vectors; the second one's are counted from the first one's end."""
    return b.shuffle_vector(one, two, ir.Constant(ir.VectorType(I32, len(lanes)), lanes))


def broadcast(b: Any, scalar: Any, lanes: int) -> Any:
    """A number in every lane of a vector."""
    undefined = ir.Constant(ir.VectorType(scalar.type, lanes), ir.Undefined)
    return shuffled(b, b.insert_element(undefined, scalar, ir.Constant(I32, 0)), undefined, [0] * lanes)


def interleaved(b: Any, low: Any, high: Any, kind: Any) -> Any:
    """Two vectors of 16-bit integers as one vector of pairs."""
    words = integers(kind)
    return b.bitcast(b.or_(b.zext(low, words), b.shl(b.zext(high, words), constant(words, 16))), kind)


def halves_of_pairs(b: Any, x: Any) -> tuple[Any, Any]:
    """The lower and the upper number of each pair, as floats."""
    kind = integers(x.type)
    bits = b.bitcast(x, kind)
    low, high = b.shl(bits, constant(kind, 16)), b.and_(bits, constant(kind, 0xFFFF0000))
    return b.bitcast(low, x.type), b.bitcast(high, x.type)


def pair_weights(b: Any, low: Any, high: Any) -> Any:
    """16 pairs from two vectors of floats that are at least 0, rounded to the nearest; ties away from 0.

    These are operations of integers, which do not use the units that multiply: the instruction takes two cycles of each, and its lanes
    need a permutation.
    """
    kind, shorts = integers(low.type), ir.VectorType(I16, 32)
    half = constant(kind, 0x8000)
    lower = b.lshr(b.add(b.bitcast(low, kind), half), constant(kind, 16))
    upper = b.add(b.bitcast(high, kind), half)
    order = [32 + n if n % 2 else n for n in range(32)]
    return b.bitcast(shuffled(b, b.bitcast(lower, shorts), b.bitcast(upper, shorts), order), low.type)


class Operations:
    """Every operation, in instructions that every CPU has."""

    def __init__(self, instruction_set: isa.Baseline) -> None:
        self.isa = instruction_set

    def fma(self, b: Any, x: Any, y: Any, z: Any) -> Any:
        """x * y + z, rounded once where the CPU can."""
        return _of_vectors(b, "fma" if self.isa.has_fma else "fmuladd", x, y, z)

    def maximum(self, b: Any, x: Any, y: Any) -> Any:
        """The greater number; y where x is NaN. One instruction of x86, unlike the maximum of IEEE 754."""
        return b.select(b.fcmp_ordered(">", x, y), x, y)

    def at_least(self, b: Any, x: Any, least: Any) -> Any:
        """The greater number; NaN where x is NaN."""
        return b.select(b.fcmp_ordered(">", least, x), least, x)

    def dot_bf16x2(self, b: Any, x: Any, y: Any, z: Any) -> Any:
        """z plus, in each lane, the dot product of two pairs of bf16: each pair is widened in registers."""
        low, high = zip(halves_of_pairs(b, x), halves_of_pairs(b, y), strict=True)
        return self.fma(b, *high, self.fma(b, *low, z))

    def widen(self, b: Any, x: Any, dtype: str) -> Any:
        """bf16 or float16, in 16-bit integers, as floats."""
        floats = ir.VectorType(F32, x.type.count)
        if dtype == "float16":
            return b.fpext(b.bitcast(x, ir.VectorType(ir.HalfType(), x.type.count)), floats)
        kind = integers(floats)
        return b.bitcast(b.shl(b.zext(x, kind), constant(kind, 16)), floats)

    def narrow(self, b: Any, x: Any, dtype: str) -> Any:
        """Floats rounded to bf16 or float16, to the nearest and even, as 16-bit integers."""
        shorts = ir.VectorType(I16, x.type.count)
        if dtype == "float16":
            return b.bitcast(b.fptrunc(x, ir.VectorType(ir.HalfType(), x.type.count)), shorts)
        kind = integers(x.type)
        bits, by = b.bitcast(x, kind), constant(kind, 16)
        odd = b.and_(b.lshr(bits, by), constant(kind, 1))
        rounded = b.lshr(b.add(b.add(bits, constant(kind, 0x7FFF)), odd), by)
        quiet_nan = b.or_(b.lshr(bits, by), constant(kind, 0x40))
        return b.trunc(b.select(b.fcmp_unordered("uno", x, x), quiet_nan, rounded), shorts)

    def pair(self, b: Any, low: Any, high: Any) -> Any:
        """16 pairs of bf16 from two vectors of floats, rounded."""
        low_bits, high_bits = (self.narrow(b, x, "bfloat16") for x in (low, high))
        return interleaved(b, low_bits, high_bits, low.type)


def _of_vectors(b: Any, name: str, *vectors: Any) -> Any:
    """An operation that LLVM has for vectors of all types."""
    kind = vectors[0].type
    return call(b, f"llvm.{name}.v{kind.count}f{64 if kind.element == F64 else 32}", kind, [*vectors])


class Avx512Operations(Operations):
    def scale(self, b: Any, x: Any, n: Any) -> Any:
        """x * 2 ** n, with n rounded down: 0 where that is too small, NaN where either is."""
        return _with_mask(b, "scalef", x, n)

    def fraction(self, b: Any, x: Any, lower: bool) -> Any:
        """x minus the next lower or the nearest whole number: 0 where x is infinite."""
        quiet, down = 8, 1
        return _with_mask(b, "reduce", x, ir.Constant(I32, quiet + down * lower))


def _with_mask(b: Any, name: str, x: Any, y: Any) -> Any:
    """An operation with a mask, on all lanes, in the current rounding mode."""
    kind, bits = ("pd", 8) if is_double(x) else ("ps", 16)
    every, rounding = ir.Constant(ir.IntType(bits), -1), ir.Constant(I32, 4)
    return call(b, f"llvm.x86.avx512.mask.{name}.{kind}.512", x.type, [x, y, constant(x.type, 0.0), every, rounding])


class Avx512Bf16Operations(Avx512Operations):
    def dot_bf16x2(self, b: Any, x: Any, y: Any, z: Any) -> Any:
        kind = ir.VectorType(BFloat(), 2 * z.type.count)
        return call(b, "llvm.x86.avx512bf16.dpbf16ps.512", z.type, [z, b.bitcast(x, kind), b.bitcast(y, kind)])

    def narrow(self, b: Any, x: Any, dtype: str) -> Any:
        if dtype != "bfloat16" or x.type.count != 16:  # the instruction rounds a whole vector
            return super().narrow(b, x, dtype)
        rounded = call(b, "llvm.x86.avx512bf16.cvtneps2bf16.512", ir.VectorType(BFloat(), 16), [x])
        return b.bitcast(rounded, ir.VectorType(I16, 16))

    def pair(self, b: Any, low: Any, high: Any) -> Any:
        kind, shorts = ir.VectorType(BFloat(), 32), ir.VectorType(I16, 32)
        both = b.bitcast(call(b, "llvm.x86.avx512bf16.cvtne2ps2bf16.512", kind, [high, low]), shorts)
        return b.bitcast(shuffled(b, both, both, [lane for n in range(16) for lane in (n, n + 16)]), low.type)


class AmxOperations(Avx512Bf16Operations):
    """Intel's AMX: eight tile registers of 16 rows of 64 bytes. One instruction multiplies two into a third.

    C (16 x 16 float32) += A (16 rows of 32 bf16) B (16 rows of pairs x 16): row k of B holds, for each column, the numbers 2k and
    2k + 1 of the depth. The even and the odd numbers of the depth are summed separately, from 0, and both sums are then added to C.
    Denormal numbers count as 0. Source: Intel, Architecture Instruction Set Extensions Programming Reference (2020), chapter 3.

    Tile configuration is a state of the thread. Libraries such as oneDNN remember which configuration they loaded, so it must be
    restored. Linux grants a process the use of tile data on request; :mod:`lowtri.kernels.target` requests it.
    """

    # The 64 bytes of a configuration: palette 1; at byte 16 eight row lengths in 16 bits; at byte 48 eight row counts in 8 bits.
    row_lengths, row_counts = TILE_ROW_BYTES * 0x0001_0001_0001_0001, TILE_ROWS * 0x0101_0101_0101_0101
    configuration = (1, 0, row_lengths, row_lengths, 0, 0, row_counts, 0)

    def pair_weights(self, b: Any, low: Any, high: Any) -> Any:
        return pair_weights(b, low, high)

    def tile_registers(self, b: Any, count: int) -> list[Any]:
        """The first ``count`` tile registers."""
        return [ir.Constant(I8, n) for n in range(count)]

    def tile_zero(self, b: Any, tile: Any) -> None:
        _of_tiles(b, "tilezero", tile)

    def tile_load(self, b: Any, tile: Any, address: Any, row_step: Any) -> None:
        """Load 16 rows of 64 bytes, ``row_step`` bytes apart."""
        _of_tiles(b, "tileloadd64", tile, pointer(b, address, I8), row_step)

    def tile_store(self, b: Any, tile: Any, address: Any, row_step: Any) -> None:
        _of_tiles(b, "tilestored64", tile, pointer(b, address, I8), row_step)

    def tile_dot(self, b: Any, tile: Any, x: Any, y: Any) -> None:
        """tile += x y."""
        _of_tiles(b, "tdpbf16ps", tile, x, y)

    def tile_configure(self, b: Any, memory: Any) -> None:
        """Save the thread's configuration in 64 bytes of memory, and load that of whole tiles, kept in the next 64 bytes."""
        _of_tiles(b, "sttilecfg", pointer(b, memory, I8))
        ours = b.add(memory, i64(64))
        for n, word in enumerate(self.configuration):
            b.store(i64(word), pointer(b, b.add(ours, i64(8 * n)), I64), align=8)
        _of_tiles(b, "ldtilecfg", pointer(b, ours, I8))

    def tile_restore(self, b: Any, memory: Any) -> None:
        """Restore the saved configuration; if there was none (palette 0), release the tiles."""
        saved = pointer(b, memory, I8)
        palette = b.load(saved, align=1)
        with b.if_else(b.icmp_unsigned("==", palette, ir.Constant(I8, 0))) as (then, otherwise):
            with then:
                _of_tiles(b, "tilerelease")
            with otherwise:
                _of_tiles(b, "ldtilecfg", saved)


def _of_tiles(b: Any, name: str, *arguments: Any) -> None:
    call(b, f"llvm.x86.{name}", ir.VoidType(), [*arguments])


class NeonOperations(Operations):
    """FMAXNM returns the number where the other operand is NaN, and FMAX returns NaN.

    A comparison and a selection are two instructions. Source: Arm Architecture Reference Manual, FMAX and FMAXNM.
    """

    def maximum(self, b: Any, x: Any, y: Any) -> Any:
        return _of_vectors(b, "maxnum", x, y)

    def at_least(self, b: Any, x: Any, least: Any) -> Any:
        return _of_vectors(b, "maximum", x, least)


class NeonBf16Operations(NeonOperations):
    """NEON's bf16 instructions.

    BFDOT adds the two products of a lane without rounding between them, flushes denormal numbers and rounds to odd before it adds the
    sum; CPUs with FEAT_EBF16 may be set to round as usual. BFMMLA is two such steps. Source: Arm Architecture Reference Manual.
    """

    def dot_bf16x2(self, b: Any, x: Any, y: Any, z: Any) -> Any:
        kind, name = ir.VectorType(BFloat(), 8), "llvm.aarch64.neon.bfdot.v4f32.v8bf16"
        # Registers of 128 bits. The instruction can take one lane of its last operand for all: x, which products broadcast.
        parts = []
        for n in range(0, z.type.count, 4):
            one, two, total = (shuffled(b, each, each, [*range(n, n + 4)]) for each in (x, y, z))
            parts.append(call(b, name, total.type, [total, b.bitcast(two, kind), b.bitcast(one, kind)]))
        while len(parts) > 1:
            lanes = [*range(2 * parts[0].type.count)]
            parts = [shuffled(b, one, two, lanes) for one, two in zip(parts[::2], parts[1::2], strict=True)]
        return parts[0]

    def multiply_blocks(self, b: Any, z: Any, x: Any, y: Any) -> Any:
        """z plus the product of two rows of four bf16, x, with two columns of four, y; blocks of 2 x 2, row after row."""
        kind = ir.VectorType(BFloat(), 8)
        return call(b, "llvm.aarch64.neon.bfmmla", z.type, [z, b.bitcast(x, kind), b.bitcast(y, kind)])

    def narrow(self, b: Any, x: Any, dtype: str) -> Any:
        if dtype != "bfloat16":
            return super().narrow(b, x, dtype)
        rounded = b.fptrunc(x, ir.VectorType(BFloat(), x.type.count))
        return b.bitcast(rounded, ir.VectorType(I16, x.type.count))


OPERATIONS: dict[type[isa.Baseline], type[Operations]] = {
    isa.Baseline: Operations,
    isa.Avx512: Avx512Operations,
    isa.Avx512Bf16: Avx512Bf16Operations,
    isa.Amx: AmxOperations,
    isa.Neon: NeonOperations,
    isa.NeonBf16: NeonBf16Operations,
}


@cache
def operations_of(instruction_set: isa.Baseline) -> Operations:
    """The operations of an instruction set."""
    return next(OPERATIONS[kind](instruction_set) for kind in type(instruction_set).__mro__ if kind in OPERATIONS)

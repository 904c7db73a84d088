"""The operations that kernels are written in: each is one LLVM instruction or a few, on vectors of 64 bytes, across their lanes, and
on pairs of bf16.

Addresses are integers, in bytes. The spec sets the dtype in memory: the compute dtype, or, for the functions ``*_input``, the dtype of
the arrays. A pair of bf16 is two numbers interleaved in a 32-bit word; a vector of 16 pairs has the type of a vector of floats.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from lowtri.kernels.operations.baseline import constant, integers, interleaved

__all__ = [
    *("F32", "I16", "I32", "I64", "add", "all_lanes_finite", "any_greater", "as_number", "broadcast"),
    *("clamped", "div", "element", "fetch_add", "fma", "input_vector", "interleave"),
    *("interleave_loaded", "interleaved_rows", "lane", "load", "load_input", "maximum", "mul"),
    *("pointer", "prefetch", "prefetch_line", "read", "read_byte", "read_input", "read_int32"),
    *("read_int64", "read_word", "reduce_rows_max", "reduce_rows_sum", "reduce_sum", "reduced_in_pairs"),
    *("select_bits", "select_greater", "shuffled", "splat", "store", "store_input", "sub", "transpose"),
    *("transposed", "write", "write_input", "write_int64"),
]

I16, I32, I64, F32 = ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()


def broadcast(builder: Any, scalar: Any, lanes: int) -> Any:
    """A number in every lane of a vector."""
    undefined = ir.Constant(ir.VectorType(scalar.type, lanes), ir.Undefined)
    first_lane = ir.Constant(ir.VectorType(I32, lanes), None)
    return builder.shuffle_vector(builder.insert_element(undefined, scalar, ir.Constant(I32, 0)), undefined, first_lane)


def clamped(builder: Any, row: int, last: Any) -> Any:
    """The index of a row; of the last row if there are fewer."""
    index = ir.Constant(I64, row)
    return builder.select(builder.icmp_signed("<", index, last), index, last)


def pointer(builder: Any, address: Any, kind: Any) -> Any:
    """A pointer to a value of this kind at an address."""
    return builder.inttoptr(address, kind.as_pointer())


def prefetch(builder: Any, address: Any) -> None:
    """Load the cache line at an address into L2. The address may be invalid."""
    byte = ir.IntType(8).as_pointer()
    kind, name = ir.FunctionType(ir.VoidType(), [byte, I32, I32, I32]), "llvm.prefetch.p0"
    function = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
    to_read, second_cache, data = (ir.Constant(I32, n) for n in (0, 2, 1))
    builder.call(function, [builder.inttoptr(address, byte), to_read, second_cache, data])


def input_vector(builder: Any, address: Any, count: int, spec: Any) -> Any:
    """``count`` numbers of an array, in the compute dtype."""
    if spec.input_bytes > 2:
        return builder.load(pointer(builder, address, ir.VectorType(spec.vector.ir.element, count)), align=4)
    shorts = builder.load(pointer(builder, address, ir.VectorType(I16, count)), align=2)
    return spec.operations.widen(builder, shorts, spec.dtype)


def _output_vector(builder: Any, x: Any, address: Any, spec: Any) -> None:
    """Store numbers of the compute dtype, rounded to the arrays' dtype."""
    if spec.input_bytes == 2:
        x = spec.operations.narrow(builder, x, spec.dtype)
    builder.store(x, pointer(builder, address, x.type), align=2 if spec.input_bytes == 2 else 4)


@intrinsic
def load(typing, address, spec):
    """A vector of numbers from memory."""
    kind = spec.value.vector
    return kind(types.intp, spec), lambda c, b, s, a: b.load(pointer(b, a[0], kind.ir), align=4)


@intrinsic
def store(typing, address, x):
    """A vector to memory."""

    def emit(c, b, s, a):
        b.store(a[1], pointer(b, a[0], x.ir), align=4)
        return c.get_dummy_value()

    return types.void(types.intp, x), emit


@intrinsic
def read(typing, address, spec):
    """One number from memory."""
    kind = spec.value.vector
    return kind.number(types.intp, spec), lambda c, b, s, a: b.load(pointer(b, a[0], kind.ir.element), align=4)


@intrinsic
def write(typing, address, x, spec):
    """One number to memory."""
    kind = spec.value.vector

    def emit(c, b, s, a):
        b.store(a[1], pointer(b, a[0], kind.ir.element), align=4)
        return c.get_dummy_value()

    return types.void(types.intp, kind.number, spec), emit


@intrinsic
def load_input(typing, address, spec):
    """A vector of numbers from an array."""
    kind = spec.value.vector
    return kind(types.intp, spec), lambda c, b, s, a: input_vector(b, a[0], kind.lanes, spec.value)


@intrinsic
def store_input(typing, address, x, spec):
    """A vector of numbers to an array."""

    def emit(c, b, s, a):
        _output_vector(b, a[1], a[0], spec.value)
        return c.get_dummy_value()

    return types.void(types.intp, x, spec), emit


@intrinsic
def read_input(typing, address, spec):
    """One number from an array."""

    def emit(c, b, s, a):
        return b.extract_element(input_vector(b, a[0], 1, spec.value), ir.Constant(I32, 0))

    return spec.value.number(types.intp, spec), emit


@intrinsic
def write_input(typing, address, x, spec):
    """One number to an array."""

    def emit(c, b, s, a):
        undefined = ir.Constant(ir.VectorType(a[1].type, 1), ir.Undefined)
        _output_vector(b, b.insert_element(undefined, a[1], ir.Constant(I32, 0)), a[0], spec.value)
        return c.get_dummy_value()

    return types.void(types.intp, spec.value.number, spec), emit


def _integer_reader(kind: Any, result: Any) -> Any:
    """The operation that reads one integer from memory."""

    @intrinsic
    def read_integer(typing, address):
        def emit(c, b, s, a):
            x = b.load(pointer(b, a[0], kind), align=kind.width // 8)
            return x if kind.width == 64 else b.sext(x, I64) if kind.width == 32 else b.zext(x, I64)

        return result(types.intp), emit

    return read_integer


read_byte, read_int32, read_int64 = (_integer_reader(kind, types.int64) for kind in (ir.IntType(8), I32, I64))
read_word = _integer_reader(I64, types.uint64)  # 64 bits: which of 64 queries see a key


@intrinsic
def write_int64(typing, address, x):
    """One integer to memory."""

    def emit(c, b, s, a):
        b.store(a[1], pointer(b, a[0], I64), align=8)
        return c.get_dummy_value()

    return types.void(types.intp, types.int64), emit


@intrinsic
def element(typing, values, index):
    """``values[index]`` of a tuple of integers, unchecked: Numba's own access can raise, so that callers would return early."""

    def emit(c, b, s, a):
        result = b.extract_value(a[0], 0)
        for n in range(1, values.count):
            result = b.select(b.icmp_signed("==", a[1], ir.Constant(I64, n)), b.extract_value(a[0], n), result)
        return result

    return values.dtype(values, types.intp), emit


@intrinsic
def prefetch_line(typing, address):
    """:func:`prefetch` for kernels."""

    def emit(c, b, s, a):
        prefetch(b, a[0])
        return c.get_dummy_value()

    return types.void(types.intp), emit


@intrinsic
def lane(typing, x, index):
    """One number of a vector."""
    return x.number(x, types.intp), lambda c, b, s, a: b.extract_element(*a)


@intrinsic
def as_number(typing, x, spec):
    """A number in the compute dtype."""
    kind = spec.value.number
    return kind(kind, spec), lambda c, b, s, a: a[0]


@intrinsic
def splat(typing, x, spec):
    """One number in all lanes."""
    kind = spec.value.vector
    return kind(kind.number, spec), lambda c, b, s, a: broadcast(b, a[0], kind.lanes)


def _operator(name: str) -> Any:
    @intrinsic
    def operator(typing, x, y):
        return x(x, y), lambda c, b, s, a: getattr(b, name)(*a)

    return operator


add, sub, mul, div = map(_operator, ("fadd", "fsub", "fmul", "fdiv"))


@intrinsic
def fma(typing, x, y, z, spec):
    """x * y + z."""
    return x(x, y, z, spec), lambda c, b, s, a: spec.value.operations.fma(b, *a[:3])


@intrinsic
def maximum(typing, x, y, spec):
    """The greater number; y where x is NaN."""
    return x(x, y, spec), lambda c, b, s, a: spec.value.operations.maximum(b, *a[:2])


@intrinsic
def select_bits(typing, word, shift, x, other):
    """x in the lanes whose bit in ``word >> shift`` is set, ``other`` in the rest."""

    def emit(c, b, s, a):
        flags = b.bitcast(b.trunc(b.lshr(a[0], a[1]), ir.IntType(x.lanes)), ir.VectorType(ir.IntType(1), x.lanes))
        return b.select(flags, a[2], a[3])

    return x(types.uint64, types.uint64, x, x), emit


@intrinsic
def select_greater(typing, x, limit, yes, no):
    """``yes`` in the lanes where x > limit, ``no`` in the rest (and where x is NaN)."""
    return x(x, x, x, x), lambda c, b, s, a: b.select(b.fcmp_ordered(">", a[0], a[1]), a[2], a[3])


@intrinsic
def any_greater(typing, x, y):
    """Whether x > y in any lane, or either is NaN in one."""

    def emit(c, b, s, a):
        flags = ir.IntType(x.lanes)
        return b.icmp_unsigned("!=", b.bitcast(b.fcmp_unordered(">", *a), flags), ir.Constant(flags, 0))

    return types.boolean(x, y), emit


@intrinsic
def all_lanes_finite(typing, x):
    """Whether all numbers of a vector are finite: their exponents are not all ones."""

    def emit(c, b, s, a):
        kind, flags = integers(x.ir), ir.IntType(x.lanes)
        ones = constant(kind, 0x7FF0000000000000 if x.bits == 64 else 0x7F800000)
        non_finite = b.icmp_unsigned("==", b.and_(b.bitcast(a[0], kind), ones), ones)
        return b.icmp_unsigned("==", b.bitcast(non_finite, flags), ir.Constant(flags, 0))

    return types.boolean(x), emit


@intrinsic
def fetch_add(typing, address, n):
    """Add n to the integer at the address, atomically; returns its value before."""
    return types.int64(types.intp, types.int64), lambda c, b, s, a: b.atomic_rmw(
        "add", pointer(b, a[0], I64), a[1], "seq_cst"
    )


# Across lanes: transposing square blocks, sums and maxima of vectors.


def shuffled(builder: Any, one: Any, two: Any, lanes: list[int]) -> Any:
    """A vector of lanes of two vectors; the second one's are counted from the first one's end."""
    return builder.shuffle_vector(one, two, ir.Constant(ir.VectorType(I32, len(lanes)), lanes))


def transposed(builder: Any, rows: list[Any]) -> list[Any]:
    """The transposed square block of these rows: halves, quarters, eighths change places."""
    lanes = len(rows)
    step = lanes // 2
    while step:
        for i in range(lanes):
            if not i & step:
                one, two = rows[i], rows[i + step]
                low = [lane if not lane & step else lanes + lane - step for lane in range(lanes)]
                high = [lane + step if not lane & step else lanes + lane for lane in range(lanes)]
                rows[i], rows[i + step] = shuffled(builder, one, two, low), shuffled(builder, one, two, high)
        step //= 2
    return rows


@intrinsic
def transpose(typing, source, source_row, last, target, target_row, spec):
    """Transpose a square block: row i of the source becomes column i. Rows past ``last`` repeat it; row steps in bytes."""
    kind = spec.value.vector

    def emit(c, b, s, a):
        source, source_row, last, target, target_row, _ = a
        rows = []
        for i in range(kind.lanes):
            row = clamped(b, i, last)
            rows.append(b.load(pointer(b, b.add(source, b.mul(row, source_row)), kind.ir), align=4))
        for i, column in enumerate(transposed(b, rows)):
            b.store(column, pointer(b, b.add(target, b.mul(ir.Constant(I64, i), target_row)), kind.ir), align=4)
        return c.get_dummy_value()

    return types.void(*[types.intp] * 5, spec), emit


def reduced_in_pairs(builder: Any, vectors: list[Any], distance: int, combine: Any) -> list[Any]:
    """Lanes ``distance`` apart combined, of two vectors in one: lanes whose index has the bit ``distance`` are those of the second.

    After the distances 1, 2, .. of all lanes, lane n is the whole vector n reduced to a number.
    """
    lanes, reduced = range(vectors[0].type.count), []
    source = [lane + (len(lanes) if lane & distance else 0) for lane in lanes]
    for one, two in zip(vectors[::2], vectors[1::2], strict=True):
        here = shuffled(builder, one, two, source)
        there = shuffled(builder, one, two, [lane ^ distance for lane in source])
        reduced.append(combine(builder, here, there))
    return reduced


def _reduce_rows(combine: Any) -> Any:
    @intrinsic
    def reduce_rows(typing, address, spec):
        kind = spec.value.vector

        def emit(c, b, s, a):
            places = [b.add(a[0], ir.Constant(I64, 64 * row)) for row in range(8)]
            vectors = [b.load(pointer(b, place, kind.ir), align=4) for place in places]
            for distance in (1, 2, 4):
                vectors = reduced_in_pairs(b, vectors, distance, combine)
            turned = shuffled(b, vectors[0], vectors[0], [lane ^ 8 for lane in range(16)])
            return combine(b, vectors[0], turned)

        return kind(types.intp, spec), emit

    return reduce_rows


# Eight vectors of 16 floats, 64 bytes apart: lanes n and n + 8 are the greatest number, or the sum, of vector n.
reduce_rows_max = _reduce_rows(lambda b, x, y: b.select(b.fcmp_ordered(">", x, y), x, y))
reduce_rows_sum = _reduce_rows(lambda b, x, y: b.fadd(x, y))


@intrinsic
def reduce_sum(typing, x):
    """The sum of a vector."""

    def emit(c, b, s, a):
        step, total = x.lanes // 2, a[0]
        while step:
            turned = [(lane + step) % x.lanes for lane in range(x.lanes)]
            total = b.fadd(total, shuffled(b, total, total, turned))
            step //= 2
        return b.extract_element(total, ir.Constant(I32, 0))

    return x.number(x), emit


# Pairs of bf16.


def interleaved_rows(builder: Any, low: Any, high: Any, count: int, kind: Any) -> list[Any]:
    """Two rows of bf16 in memory, 32 numbers ``count`` times, as vectors of pairs."""
    lanes = kind.count
    row = ir.VectorType(I16, 2 * lanes)
    pairs = []
    for offset in (ir.Constant(I64, 64 * n) for n in range(count)):
        both = [builder.load(pointer(builder, builder.add(address, offset), row), align=2) for address in (low, high)]
        for first in (0, lanes):
            order = [n for lane in range(first, first + lanes) for n in (lane, lane + 2 * lanes)]
            pairs.append(builder.bitcast(shuffled(builder, *both, order), kind))
    return pairs


@intrinsic
def interleave(typing, low, high, spec):
    """16 pairs from two vectors of floats, rounded."""

    def emit(c, b, s, a):
        return spec.value.operations.pair(b, *a[:2])

    return low(low, high, spec), emit


@intrinsic
def interleave_loaded(typing, low, high, spec):
    """16 pairs from two rows of bf16 in memory."""
    kind = spec.value.vector

    def emit(c, b, s, a):
        row = ir.VectorType(I16, kind.lanes)
        return interleaved(b, *(b.load(pointer(b, address, row), align=2) for address in a[:2]), kind.ir)

    return kind(types.intp, types.intp, spec), emit

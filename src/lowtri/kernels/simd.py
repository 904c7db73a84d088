"""The operations that kernels are written in: each is one LLVM instruction or a few, on vectors of 64 bytes, across their lanes, and
on pairs of bf16; and powers of 2.

Addresses are integers, in bytes. The spec sets the dtype in memory: the compute dtype, or, for the functions ``*_input``, the dtype of
the arrays. A pair of bf16 is two numbers interleaved in a 32-bit word; a vector of 16 pairs has the type of a vector of floats.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from lowtri.kernels.device import operation
from lowtri.kernels.operations import (
    I8,
    I16,
    I32,
    I64,
    broadcast,
    constant,
    halves_of_pairs,
    i64,
    integers,
    interleaved,
    is_double,
    pointer,
    shuffled,
)

LOG2E = 1.4426950408889634


def clamped(b: Any, row: int, last: Any) -> Any:
    """The index of a row; of the last row if there are fewer."""
    return b.select(b.icmp_signed("<", i64(row), last), i64(row), last)


def prefetch(b: Any, address: Any, level: int = 2) -> None:
    """Load the cache line at an address into L2, or L1. The address may be invalid."""
    byte = I8.as_pointer()
    kind, name = ir.FunctionType(ir.VoidType(), [byte, I32, I32, I32]), "llvm.prefetch.p0"
    function = b.module.globals.get(name) or ir.Function(b.module, kind, name)
    to_read, cache, data = (ir.Constant(I32, n) for n in (0, 4 - level, 1))
    b.call(function, [b.inttoptr(address, byte), to_read, cache, data])


def input_vector(b: Any, address: Any, count: int, spec: Any) -> Any:
    """``count`` numbers of an array, in the compute dtype."""
    if spec.input_bytes > 2:
        return b.load(pointer(b, address, ir.VectorType(spec.vector.ir.element, count)), align=4)
    return spec.operations.widen(b, b.load(pointer(b, address, ir.VectorType(I16, count)), align=2), spec.dtype)


def _output_vector(b: Any, x: Any, address: Any, spec: Any) -> None:
    """Store numbers of the compute dtype, rounded to the arrays' dtype."""
    if spec.input_bytes == 2:
        x = spec.operations.narrow(b, x, spec.dtype)
    b.store(x, pointer(b, address, x.type), align=2 if spec.input_bytes == 2 else 4)


# Memory: vectors and numbers of the compute dtype, and of the arrays' dtype; integers. A word has 64 bits: which queries see a key.

load = operation("vector")(lambda b, address, spec: b.load(pointer(b, address, spec.vector.ir), align=4))
store = operation()(lambda b, address, x: b.store(x, pointer(b, address, x.type), align=4))
read = operation("number")(lambda b, address, spec: b.load(pointer(b, address, spec.vector.ir.element), align=4))
write = operation()(lambda b, address, x, spec: b.store(x, pointer(b, address, x.type), align=4))
load_input = operation("vector")(lambda b, address, spec: input_vector(b, address, spec.lanes, spec))
store_input = operation()(lambda b, address, x, spec: _output_vector(b, x, address, spec))
read_byte = operation(types.int64)(lambda b, address: b.zext(b.load(pointer(b, address, I8), align=1), I64))
read_int32 = operation(types.int64)(lambda b, address: b.sext(b.load(pointer(b, address, I32), align=4), I64))
read_int64 = operation(types.int64)(lambda b, address: b.load(pointer(b, address, I64), align=8))
read_word = operation(types.uint64)(lambda b, address: b.load(pointer(b, address, I64), align=8))
write_int64 = operation()(lambda b, address, x: b.store(x, pointer(b, address, I64), align=8))
prefetch_line = operation()(lambda b, address: prefetch(b, address))
# Add to an integer, atomically, which gives its value before.
fetch_add = operation(types.int64)(lambda b, address, n: b.atomic_rmw("add", pointer(b, address, I64), n, "seq_cst"))


@operation()
def copy_number(b, source, target):
    b.store(b.load(pointer(b, source, I16), align=2), pointer(b, target, I16), align=2)


@operation("number")
def read_input(b, address, spec):
    return b.extract_element(input_vector(b, address, 1, spec), ir.Constant(I32, 0))


@operation()
def write_input(b, address, x, spec):
    undefined = ir.Constant(ir.VectorType(x.type, 1), ir.Undefined)
    _output_vector(b, b.insert_element(undefined, x, ir.Constant(I32, 0)), address, spec)


@operation(types.int64)
def tuple_item(b, values, index):
    """``values[index]`` of a tuple of integers, unchecked: Numba's own access can raise, so that callers would return early."""
    result = b.extract_value(values, 0)
    for n in range(1, values.type.count):
        result = b.select(b.icmp_signed("==", index, i64(n)), b.extract_value(values, n), result)
    return result


# Numbers and vectors. The maximum is y where x is NaN; a selection by > is ``no`` where x is NaN.

lane = operation("number")(lambda b, x, index: b.extract_element(x, index))
as_number = operation("number")(lambda b, x, spec: x)
splat = operation("vector")(lambda b, x, spec: broadcast(b, x, spec.lanes))
add = operation("vector")(lambda b, x, y: b.fadd(x, y))
sub = operation("vector")(lambda b, x, y: b.fsub(x, y))
mul = operation("vector")(lambda b, x, y: b.fmul(x, y))
div = operation("vector")(lambda b, x, y: b.fdiv(x, y))
fma = operation("vector")(lambda b, x, y, z, spec: spec.operations.fma(b, x, y, z))  # x * y + z
maximum = operation("vector")(lambda b, x, y, spec: spec.operations.maximum(b, x, y))
select_greater = operation("vector")(lambda b, x, limit, yes, no: b.select(b.fcmp_ordered(">", x, limit), yes, no))


@operation("vector")
def select_bits(b, word, shift, x, other):
    """x in the lanes whose bit in ``word >> shift`` is set, ``other`` in the rest."""
    lanes = x.type.count
    flags = b.bitcast(b.trunc(b.lshr(word, shift), ir.IntType(lanes)), ir.VectorType(ir.IntType(1), lanes))
    return b.select(flags, x, other)


@operation(types.boolean)
def any_greater(b, x, y):
    """Whether x > y in any lane, or either is NaN in one."""
    flags = ir.IntType(x.type.count)
    return b.icmp_unsigned("!=", b.bitcast(b.fcmp_unordered(">", x, y), flags), ir.Constant(flags, 0))


@operation(types.boolean)
def all_lanes_finite(b, x):
    """Whether all numbers of a vector are finite: their exponents are not all ones."""
    kind, flags = integers(x.type), ir.IntType(x.type.count)
    ones = constant(kind, 0x7FF0000000000000 if is_double(x) else 0x7F800000)
    non_finite = b.icmp_unsigned("==", b.and_(b.bitcast(x, kind), ones), ones)
    return b.icmp_unsigned("==", b.bitcast(non_finite, flags), ir.Constant(flags, 0))


# Across lanes: transposing square blocks, sums and maxima of vectors.


def transposed(b: Any, rows: list[Any]) -> list[Any]:
    """The transposed square block of these rows: halves, quarters, eighths change places."""
    lanes = len(rows)
    step = lanes // 2
    while step:
        for i in range(lanes):
            if not i & step:
                one, two = rows[i], rows[i + step]
                low = [lane if not lane & step else lanes + lane - step for lane in range(lanes)]
                high = [lane + step if not lane & step else lanes + lane for lane in range(lanes)]
                rows[i], rows[i + step] = shuffled(b, one, two, low), shuffled(b, one, two, high)
        step //= 2
    return rows


@operation()
def transpose(b, source, source_row, last, target, target_row, spec):
    """Transpose a square block: row i of the source becomes column i. Rows past ``last`` repeat it; row steps in bytes."""
    kind, rows = spec.vector.ir, []
    for i in range(spec.lanes):
        row = clamped(b, i, last)
        rows.append(b.load(pointer(b, b.add(source, b.mul(row, source_row)), kind), align=4))
    for i, column in enumerate(transposed(b, rows)):
        b.store(column, pointer(b, b.add(target, b.mul(i64(i), target_row)), kind), align=4)


def _in_log2(b: Any, x: Any, spec: Any) -> Any:
    """x * log2(e), of a number or a vector.

    It is finite for finite x: biases often hide with ``finfo.min``, and a row of it gives the mean of all values.
    """

    def number(value: float) -> Any:
        return constant(x.type, value) if isinstance(x.type, ir.VectorType) else ir.Constant(x.type, value)

    y = b.fmul(x, number(LOG2E))
    above, below = number(spec.greatest), number(-spec.greatest)
    too_great = b.and_(b.fcmp_ordered(">", y, above), b.fcmp_ordered("<=", x, above))
    too_small = b.and_(b.fcmp_ordered("<", y, below), b.fcmp_ordered(">=", x, below))
    return b.select(too_great, above, b.select(too_small, below, y))


to_log2 = operation("number")(lambda b, x, spec: _in_log2(b, x, spec))


def _add_transposed(change):
    @operation()
    def add_transposed(b, source, source_row, target, target_row, spec):
        """Add a square block to another: row i of the source to column i of the target; row steps in bytes."""
        kind = spec.vector.ir
        rows = [b.load(pointer(b, b.add(source, b.mul(i64(i), source_row)), kind), align=4) for i in range(spec.lanes)]
        for i, column in enumerate(transposed(b, rows)):
            place = pointer(b, b.add(target, b.mul(i64(i), target_row)), kind)
            b.store(b.fadd(b.load(place, align=4), change(b, column, spec)), place, align=4)

    return add_transposed


add_transposed = _add_transposed(lambda b, x, spec: x)
add_transposed_to_log2 = _add_transposed(_in_log2)


@operation()
def transpose_block(b, source, source_row, count, zeros, target, target_row, spec):
    """Transpose 32 rows of 32 numbers of bf16. Rows from ``count`` on are read from ``zeros``; row steps in bytes.

    The numbers of two rows are interleaved in each quarter of a vector, which gives the pairs of 16 columns in two vectors; blocks of
    16 x 16 pairs are then transposed.
    """
    kind, rows = spec.vector.ir, []
    for i in range(32):
        address = b.select(b.icmp_signed("<", i64(i), count), b.add(source, b.mul(i64(i), source_row)), zeros)
        rows.append(b.load(pointer(b, address, ir.VectorType(I16, 32)), align=2))
    for first in (0, 4):
        columns = [quarter + first + n for quarter in (0, 8, 16, 24) for n in range(4)]
        order = [lane for column in columns for lane in (column, column + 32)]
        pairs = [b.bitcast(shuffled(b, *rows[i : i + 2], order), kind) for i in range(0, 32, 2)]
        for column, vector in zip(columns, transposed(b, pairs), strict=True):
            b.store(vector, pointer(b, b.add(target, b.mul(target_row, i64(column))), kind), align=4)


@operation()
def store_rounded_block(b, source, source_row, total, target, target_row, spec):
    """16 rows of 32 numbers: the columns of (32, 16), over a vector of totals, rounded to bf16. 0 where the total is."""
    kind = spec.vector.ir
    positive = b.fcmp_ordered(">", total, constant(kind, 0.0))
    factor, pairs = b.fdiv(constant(kind, 1.0), total), []
    for i in range(0, 32, 2):
        both = []
        for d in (i, i + 1):
            address = b.add(source, b.mul(source_row, i64(d)))
            both.append(b.select(positive, b.fmul(b.load(pointer(b, address, kind), align=4), factor), total))
        pairs.append(spec.operations.pair(b, *both))
    for i, row in enumerate(transposed(b, pairs)):
        b.store(row, pointer(b, b.add(target, b.mul(target_row, i64(i))), kind), align=2)


def reduced_in_pairs(b: Any, vectors: list[Any], distance: int, combine: Any) -> list[Any]:
    """Lanes ``distance`` apart combined, of two vectors in one: lanes whose index has the bit ``distance`` are those of the second.

    After the distances 1, 2, .. of all lanes, lane n is the whole vector n reduced to a number.
    """
    lanes, reduced = range(vectors[0].type.count), []
    source = [lane + (len(lanes) if lane & distance else 0) for lane in lanes]
    for one, two in zip(vectors[::2], vectors[1::2], strict=True):
        first, second = shuffled(b, one, two, source), shuffled(b, one, two, [lane ^ distance for lane in source])
        reduced.append(combine(b, first, second))
    return reduced


def sums_of_pairs(b: Any, vectors: list[Any], distance: int) -> list[Any]:
    return reduced_in_pairs(b, vectors, distance, lambda b, x, y: b.fadd(x, y))


def _reduced_rows(b: Any, address: Any, spec: Any, combine: Any) -> Any:
    vectors = [b.load(pointer(b, b.add(address, i64(64 * row)), spec.vector.ir), align=4) for row in range(8)]
    for distance in (1, 2, 4):
        vectors = reduced_in_pairs(b, vectors, distance, combine)
    return combine(b, vectors[0], shuffled(b, vectors[0], vectors[0], [lane ^ 8 for lane in range(16)]))


# Of eight vectors of 16 floats, 64 bytes apart: lanes n and n + 8 are the greatest number, or the sum, of vector n.
reduce_rows_max = operation("vector")(
    lambda b, address, spec: _reduced_rows(b, address, spec, lambda b, x, y: b.select(b.fcmp_ordered(">", x, y), x, y))
)
reduce_rows_sum = operation("vector")(
    lambda b, address, spec: _reduced_rows(b, address, spec, lambda b, x, y: b.fadd(x, y))
)


@operation("number")
def reduce_sum(b, x):
    """The sum of a vector."""
    lanes = x.type.count
    step, total = lanes // 2, x
    while step:
        total = b.fadd(total, shuffled(b, total, total, [(lane + step) % lanes for lane in range(lanes)]))
        step //= 2
    return b.extract_element(total, ir.Constant(I32, 0))


# Pairs of bf16.


def interleaved_rows(b: Any, low: Any, high: Any, count: int, kind: Any) -> list[Any]:
    """Two rows of bf16 in memory, 32 numbers ``count`` times, as vectors of pairs."""
    lanes, pairs = kind.count, []
    for n in range(count):
        rows = [pointer(b, b.add(row, i64(64 * n)), ir.VectorType(I16, 2 * lanes)) for row in (low, high)]
        both = [b.load(row, align=2) for row in rows]
        for first in (0, lanes):
            order = [n for lane in range(first, first + lanes) for n in (lane, lane + 2 * lanes)]
            pairs.append(b.bitcast(shuffled(b, *both, order), kind))
    return pairs


# Pairs from two vectors of floats, rounded, the second one for weights on tiles; and the vectors of a pair's numbers.
interleave = operation("vector")(lambda b, low, high, spec: spec.operations.pair(b, low, high))
pair_weights = operation("vector")(lambda b, low, high, spec: spec.operations.pair_weights(b, low, high))
low_numbers = operation("vector")(lambda b, pairs: halves_of_pairs(b, pairs)[0])
high_numbers = operation("vector")(lambda b, pairs: halves_of_pairs(b, pairs)[1])


@operation("vector")
def interleave_loaded(b, low, high, spec):
    """16 pairs from two rows of bf16 in memory."""
    rows = [b.load(pointer(b, row, ir.VectorType(I16, spec.lanes)), align=2) for row in (low, high)]
    return interleaved(b, *rows, spec.vector.ir)


# Powers of 2: the whole part of x sets the exponent bits, and a polynomial approximates 2 to the rest. It has as many terms as the
# numbers that become of the weights can hold. Each polynomial is 1 + r * q(r), so that 2 ** 0 is exactly 1, with q fitted to the least
# relative error of 2 ** r. Source of the reduction by adding a large number: Cody and Waite 1980.

# By the dtype of the arrays. Weights, and sums that are divided by their own sum, are rounded to it in the end, but log-sum-exps stay
# in float32: degree 3, whose error of 1e-4 is enough for the weights of bf16, is not enough for them.
DEGREES = {"bfloat16": 4, "float16": 4, "float32": 6, "float64": 13}
# The relative errors of the polynomials, with their coefficients in float32; float64 sums round to a few 1e-16.
ERRORS = {4: 3e-6, 6: 2e-8, 13: 4e-16}

# q by degree, highest power first: for the rest from the nearest whole number, and for the rest from the next lower one.
_NEAREST = {
    4: (9.58285310e-3, 5.59064246e-2, 2.40240986e-1, 6.93124193e-1),
    6: (1.5353361e-4, 1.3398875e-3, 9.6184369e-3, 5.5503324e-2, 2.4022648e-1, 6.9314718e-1),
    13: tuple(math.log(2) ** k / math.factorial(k) for k in range(13, 0, -1)),  # Taylor's
}
_LOWER = {
    4: (1.34266843e-2, 5.22424742e-2, 2.41280205e-1, 6.93044845e-1),
    6: (2.16129151e-4, 1.24678464e-3, 9.67545157e-3, 5.54852806e-2, 2.40229306e-1, 6.93147044e-1),
}


def _polynomial(b: Any, r: Any, coefficients: Any, operations: Any) -> Any:
    first, *rest = coefficients if is_double(r) else map(np.float32, coefficients)
    p = constant(r.type, float(first))
    for c in rest:
        p = operations.fma(b, p, r, constant(r.type, float(c)))
    return p


def _split(b: Any, x: Any, degree: int, operations: Any) -> tuple[Any, Any]:
    """2 ** n for the whole number n nearest to x, and 2 ** (x - n) - 1. 2 ** n is 0 from the least exponent down, so for -inf, too."""
    bits, bias = (52, 1023) if is_double(x) else (23, 127)
    kind, least = integers(x.type), constant(x.type, float(-bias))
    x = operations.at_least(b, x, least)
    # The last digit of a number this large is 1, so the sum is rounded to n + bias, which its last bits hold.
    large = constant(x.type, 1.5 * 2.0**bits + bias)
    shifted = b.fadd(x, large)
    scale = b.bitcast(b.shl(b.bitcast(shifted, kind), constant(kind, bits)), x.type)
    r = b.fsub(x, b.fsub(shifted, large))
    return scale, b.fmul(_polynomial(b, r, _NEAREST[degree], operations), r)


@operation("vector")
def exp2(b, x, spec):
    """2 ** x, to the precision that the dtype of the arrays needs; 0 for -inf and NaN for NaN. For x <= 127; on tiles for any x.

    The relative error is that of ``ERRORS``, and an ulp. Results below 2 ** -126, which are denormal, may be 0. On tiles the result
    is at least 2 ** 127 from x = 127 on.
    """
    degree, operations = DEGREES[spec.dtype], spec.operations
    if spec.isa.has_scale:  # the operation rounds its exponent down, and gives inf
        lower = degree in _LOWER
        r = operations.fraction(b, x, lower)
        p = _polynomial(b, r, (*(_LOWER if lower else _NEAREST)[degree], 1.0), operations)
        return operations.scale(b, p, x if lower else b.fsub(x, r))
    if spec.uses_amx:  # exponent bits overflow
        greatest = constant(x.type, 127.0)
        x = b.select(b.fcmp_ordered(">", x, greatest), greatest, x)  # NaN stays NaN
    scale, fraction = _split(b, x, degree, operations)
    return operations.fma(b, scale, fraction, scale)


@operation("vector")
def exp2m1(b, x, spec):
    """2 ** x - 1, to a few ulp of the compute dtype also where x is small. For -126 <= x <= 127."""
    scale, fraction = _split(b, x, 13 if is_double(x) else 6, spec.operations)
    return spec.operations.fma(b, scale, fraction, b.fsub(scale, constant(scale.type, 1.0)))

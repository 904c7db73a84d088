"""What a kernel is compiled for (a dtype, how its rows are read, an instruction set), and which kernels an instruction set has.

A kernel (forward, backward, weights, decode) is written once. Where its code depends on the spec, a branch on one of its properties
is decided when it is compiled (:mod:`lowtri.kernels.device`).

An operand has one of four modes: how the rows of Q, K and V enter a product. Its elements are numbers, or pairs of bf16.

    direct      read from the array
    widened     a tile's rows are converted to float32 in scratch memory
    bf16x2      read from the array, two neighbours in an element of 32 bits; accumulated in float32
    amx         pairs in AMX's tile registers; accumulated in float32
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from lowtri.kernels.isa import AMX, BF16X2, DIRECT, WIDENED, Baseline, DecodeShape
from lowtri.ops.call import ArrayInfo

QUERIES = 64  # queries in a tile: one machine word of bits
BYTES = {"float32": 4, "float64": 8, "bfloat16": 2, "float16": 2}  # of a number


class KernelSpec:
    """What a kernel is compiled for. Numbers, texts and flags among its attributes are constants in kernels."""

    def __init__(self, dtype: str, operand: str, isa: Baseline) -> None:
        self.dtype = dtype  # of the arrays
        self.operand = operand  # direct, widened, bf16x2, amx
        self.isa = isa
        self.name = f"{dtype}-{operand}-{isa.name}"
        self.compute_dtype = "float64" if dtype == "float64" else "float32"
        self.input_bytes = BYTES[dtype]  # of a number in the arrays
        self.number_bytes = BYTES[self.compute_dtype]  # of a number of the compute dtype, and of a pair
        self.greatest = float(np.finfo(self.compute_dtype).max)
        self.lanes = 64 // self.number_bytes  # of a vector of 64 bytes; LLVM splits it where registers are smaller
        self.row_bytes = QUERIES * self.number_bytes  # of a tile's row: a number for each query
        self.is_direct = operand == DIRECT
        self.is_widened = operand == WIDENED
        self.uses_amx = operand == AMX
        self.packs_bf16 = operand in (BF16X2, AMX)  # an element of a product is a pair of numbers
        self.per_element = 2 if self.packs_bf16 else 1  # numbers in an element
        self.element_bytes = self.input_bytes * self.per_element  # in the arrays
        self.uses_bfmmla = operand == BF16X2 and isa.has_bfmmla  # accumulators are blocks of 2 x 2
        # The register block: rows and vectors of the wide one, rows of the narrow one, which is one vector wide.
        self.register_block = isa.bf16_register_block if operand == BF16X2 else isa.register_block
        self.has_wide_block = self.register_block[1] > 1
        # A step of the forward pass has so many queries and the keys of one tile; bytes of a row of its scores.
        self.queries_per_step = QUERIES // 2 if self.uses_amx else QUERIES
        self.step_row_bytes = self.queries_per_step * self.number_bytes
        # Queries whose keys are cut separately in a product with the values, and columns of a register block with as many rows.
        vectors = min(2, self.register_block[1])
        self.cut_granularity = 16 // vectors
        self.cut_columns = self.lanes * vectors
        # Few queries read a cache in memory's order, which the CPU's own prefetcher follows; else they prefetch every line.
        self.in_order = isa.whole_vectors
        self.has_decode_blocks_of_eight = self.decode_shape(8) is not None
        # A cache of bf16 is read two numbers at a time: a shift and a mask make vectors of the even and of the odd ones.
        self.loads_even_then_odd = dtype == "bfloat16" and self.is_widened and not isa.whole_vectors

    def decode_shape(self, queries: int) -> DecodeShape | None:
        """How a block of so many queries reads a cache; None if there are no such blocks."""
        shapes = self.isa.decode_shapes
        return shapes.get((self.operand, queries), shapes.get(("any", queries)))


def is_even(strides: tuple[int, ...]) -> bool:
    """Whether rows of an array (B, H, N, D) are packed and begin at whole elements, so that two neighbours are one element."""
    *steps, number_step = strides
    return number_step == 1 and all(step % 2 == 0 for step in steps)


def _fits_bf16x2(q: ArrayInfo, k: ArrayInfo, v: ArrayInfo) -> bool:
    return _fits_columns(q, v, 16) and q.shape[3] >= 32 and all(is_even(x.strides) for x in (q, k, v))


def _fits_whole_vectors(q: ArrayInfo, k: ArrayInfo, v: ArrayInfo) -> bool:
    return _fits_columns(q, v, 16) and q.strides[3] == k.strides[3] == v.strides[3] == 1


def _fits_whole_vectors_of_pairs(q: ArrayInfo, k: ArrayInfo, v: ArrayInfo) -> bool:
    return _fits_bf16x2(q, k, v) and _fits_columns(q, v, 32)


def _fits_columns(q: ArrayInfo, v: ArrayInfo, columns: int) -> bool:
    return q.shape[3] % columns == 0 and v.shape[3] % columns == 0


class Variant(NamedTuple):
    """The kernels for one dtype and one way to read rows: those of whole tiles (forward, backward, weights), or decode."""

    family: str  # forward, or decode
    spec: KernelSpec
    accepts: Callable[[ArrayInfo, ArrayInfo, ArrayInfo], bool] | None  # None: any arrays
    enabled: bool = True  # tests use the others


def variants_of(isa: Baseline) -> list[Variant]:
    """Of an instruction set. The first that accepts the arrays is chosen; if there is none, backends do not decode, or cast."""
    rows = (
        ("forward", "float32", DIRECT, None),
        ("forward", "float64", DIRECT, None),
        ("forward", "bfloat16", AMX, None, isa.has_amx),
        ("forward", "bfloat16", BF16X2, _fits_bf16x2, isa.has_bf16_dot),
        ("forward", "bfloat16", WIDENED, None),
        ("forward", "float16", WIDENED, None, isa.has_float16),
        ("decode", "float32", DIRECT, _fits_whole_vectors),
        ("decode", "bfloat16", BF16X2, _fits_whole_vectors_of_pairs, isa.has_bf16_dot and not isa.has_amx),
        ("decode", "bfloat16", WIDENED, _fits_whole_vectors),
        ("decode", "float16", WIDENED, _fits_whole_vectors, isa.has_float16),
    )
    return [Variant(family, KernelSpec(dtype, operand, isa), *rest) for family, dtype, operand, *rest in rows]


def functions_of(isa: Baseline, with_disabled: bool = False) -> list[tuple[str, KernelSpec]]:
    """The kernels of an instruction set, by name and spec, with those that read tables and measure the ceilings of a CPU."""
    variants = [x for x in variants_of(isa) if x.enabled or (with_disabled and (isa.has_amx or not x.spec.uses_amx))]
    kernels = [(x.family, x.spec) for x in variants]
    kernels += [(name, x.spec) for name in ("backward", "weights") for x in variants if x.family == "forward"]
    any_numbers = KernelSpec("float32", DIRECT, isa)
    measured = [("read", any_numbers), ("multiply", any_numbers)]
    if isa.has_bf16_dot or with_disabled:
        measured.append(("multiply", KernelSpec("bfloat16", BF16X2, isa)))
    return [*kernels, ("hidden", any_numbers), *measured]


def symbol(name: str, of: KernelSpec | Baseline) -> str:
    """The name of a function's code in the library, which debuggers and profilers show."""
    return f"lowtri_{name}_{of.name}".replace("-", "_")

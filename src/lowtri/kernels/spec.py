"""What a kernel is compiled for (a dtype, how its rows are read, an instruction set), and which kernels an instruction set has.

A kernel (forward, backward, weights, decode) is written once. Where its code depends on the spec, a branch on one of its properties
is decided when it is compiled (:mod:`lowtri.kernels.device`).

    operand     how the rows of Q, K and V enter a product
    direct      read from the array
    pairs       read from the array, two neighbours in a 32-bit word; accumulated in float32
    widened     a tile's rows are converted to float32 in scratch memory
    tiles       pairs in tile registers; accumulated in float32
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from lowtri.kernels.isa import Baseline, CacheTile

QUERIES = 64  # queries in a tile: one machine word of bits
BYTES = {"float32": 4, "float64": 8, "bfloat16": 2, "float16": 2}  # of a number


class KernelSpec:
    """What a kernel is compiled for. Numbers, texts and flags among its attributes are constants in kernels."""

    def __init__(self, dtype: str, operand: str, isa: Baseline) -> None:
        self.dtype = dtype  # of the arrays
        self.operand = operand  # direct, pairs, widened, tiles
        self.isa = isa
        self.name = f"{dtype}-{operand}-{isa.name}"
        self.compute_dtype = "float64" if dtype == "float64" else "float32"
        self.input_bytes = BYTES[dtype]  # of a number in the arrays
        self.number_bytes = BYTES[self.compute_dtype]  # of a number of the compute dtype, and of a pair
        self.greatest = float(np.finfo(self.compute_dtype).max)
        self.lanes = 64 // self.number_bytes  # of a vector of 64 bytes; LLVM splits it where registers are smaller
        self.row_bytes = QUERIES * self.number_bytes  # of a tile's row: a number for each query
        self.is_direct, self.is_widened, self.on_tiles = (operand == x for x in ("direct", "widened", "tiles"))
        self.in_pairs = operand in ("pairs", "tiles")  # a word of a product is a pair of numbers
        self.per_word = 2 if self.in_pairs else 1  # numbers in a word
        self.word_bytes = self.input_bytes * self.per_word  # in the arrays
        self.in_blocks = operand == "pairs" and isa.has_blocks  # accumulators are blocks of 2 x 2
        # The register tile: rows and vectors of the wide one, rows of the narrow one, which is one vector wide.
        self.tile = isa.pairs_tile if operand == "pairs" else isa.tile
        self.has_wide_tile = self.tile[1] > 1
        # A unit of work of the forward pass has so many queries and the keys of one tile; bytes of a row of its scores.
        self.unit_queries = QUERIES // 2 if self.on_tiles else QUERIES
        self.unit_row = self.unit_queries * self.number_bytes
        # Queries whose keys are cut separately in a product with the values, and columns of a register tile with as many rows.
        self.edge_queries, self.edge_columns = 16 // min(2, self.tile[1]), self.lanes * min(2, self.tile[1])
        # Few queries read a cache in memory's order, which the CPU's own prefetcher follows; else they prefetch every line.
        self.in_order = isa.whole_vectors
        self.has_blocks_of_eight = self.cache_tile(8) is not None
        # A cache of bf16 is read two numbers at a time: a shift and a mask make vectors of the even and of the odd ones.
        self.is_even_first = dtype == "bfloat16" and self.is_widened and not isa.whole_vectors

    def cache_tile(self, queries: int) -> CacheTile | None:
        """How a block of so many queries reads a cache; None if there are no such blocks."""
        tiles = self.isa.cache_tiles
        return tiles.get((self.operand, queries), tiles.get(("any", queries)))


class Array(NamedTuple):
    """The properties of an array (B, H, N, D) that decide how it is read: its strides in numbers, and its last size."""

    strides: tuple[int, ...]
    size: int

    @property
    def even(self) -> bool:
        """Whether rows are packed and begin at whole words, so that two neighbours are one word."""
        b, h, n, d = self.strides
        return d == 1 and (b | h | n) % 2 == 0


def _in_pairs(q: Array, k: Array, v: Array) -> bool:
    return q.size % 16 == 0 and q.size >= 32 and v.size % 16 == 0 and q.even and k.even and v.even


def _packed_rows(q: Array, k: Array, v: Array) -> bool:
    return q.size % 16 == 0 and v.size % 16 == 0 and q.strides[3] == k.strides[3] == v.strides[3] == 1


def _packed_pairs(q: Array, k: Array, v: Array) -> bool:
    return _in_pairs(q, k, v) and q.size % 32 == 0 and v.size % 32 == 0


class Variant(NamedTuple):
    """The kernels for one dtype and one way to read rows: those of whole tiles (forward, backward, weights), or decode."""

    family: str  # forward, or decode
    spec: KernelSpec
    accepts: Callable[[Array, Array, Array], bool] | None  # None: any arrays
    enabled: bool = True  # tests use the others


def variants_of(isa: Baseline) -> list[Variant]:
    """Of an instruction set. The first that accepts the arrays is chosen; if there is none, backends do not decode, or cast."""
    rows = (
        ("forward", "float32", "direct", None),
        ("forward", "float64", "direct", None),
        ("forward", "bfloat16", "tiles", None, isa.has_tiles),
        ("forward", "bfloat16", "pairs", _in_pairs, isa.has_pairs),
        ("forward", "bfloat16", "widened", None),
        ("forward", "float16", "widened", None, isa.has_float16),
        ("decode", "float32", "direct", _packed_rows),
        ("decode", "bfloat16", "pairs", _packed_pairs, isa.has_pairs and not isa.has_tiles),
        ("decode", "bfloat16", "widened", _packed_rows),
        ("decode", "float16", "widened", _packed_rows, isa.has_float16),
    )
    return [Variant(family, KernelSpec(dtype, operand, isa), *rest) for family, dtype, operand, *rest in rows]


def functions_of(isa: Baseline, with_disabled: bool = False) -> list[tuple[str, KernelSpec]]:
    """The kernels of an instruction set, by name and spec, with those that measure the ceilings of a CPU."""
    variants = [x for x in variants_of(isa) if x.enabled or (with_disabled and (isa.has_tiles or not x.spec.on_tiles))]
    kernels = [(x.family, x.spec) for x in variants]
    kernels += [(name, x.spec) for name in ("backward", "weights") for x in variants if x.family == "forward"]
    measured = [("read", KernelSpec("float32", "direct", isa)), ("multiply", KernelSpec("float32", "direct", isa))]
    if isa.has_pairs or with_disabled:
        measured.append(("multiply", KernelSpec("bfloat16", "pairs", isa)))
    return [*kernels, *measured]


def symbol(name: str, of: KernelSpec | Baseline) -> str:
    """The name of a function's code in the library, which debuggers and profilers show."""
    return f"lowtri_{name}_{of.name}".replace("-", "_")

"""What a kernel is compiled for: a dtype, how its rows are read, and an instruction set.

A kernel family (forward, backward, decode) is written once. Where its code depends on the spec, an intrinsic or a ``@by_spec``
function chooses during type inference, so that machine code has no branch for it (:mod:`lowtri.kernels.record`).

    operand     how the rows of Q, K and V enter a product
    direct      read from the array
    pairs       read from the array, two neighbours in a 32-bit word; accumulated in float32
    widened     a tile's rows are converted to float32 in scratch memory
    tiles       pairs in tile registers; accumulated in float32
"""

from __future__ import annotations

from dataclasses import dataclass

from lowtri.kernels.isa import Baseline, CacheTile

__all__ = ["BYTES", "QUERIES", "KernelSpec"]

QUERIES = 64  # queries in a tile: one machine word of bits
BYTES = {"float32": 4, "float64": 8, "bfloat16": 2, "float16": 2}  # of a number


@dataclass(frozen=True, eq=False)
class KernelSpec:
    """What a kernel is compiled for."""

    dtype: str  # of the arrays
    operand: str  # direct, pairs, widened, tiles
    isa: Baseline

    @property
    def name(self) -> str:
        return f"{self.dtype}-{self.operand}-{self.isa.name}"

    @property
    def compute_dtype(self) -> str:
        return "float64" if self.dtype == "float64" else "float32"

    @property
    def input_bytes(self) -> int:
        """Of a number in the arrays."""
        return BYTES[self.dtype]

    @property
    def number_bytes(self) -> int:
        """Of a number of the compute dtype, and of a pair."""
        return BYTES[self.compute_dtype]

    @property
    def row_bytes(self) -> int:
        """Of a tile's row: a number for each query."""
        return QUERIES * self.number_bytes

    @property
    def lanes(self) -> int:
        """Numbers in a vector of 64 bytes; LLVM splits it where registers are smaller."""
        return 64 // self.number_bytes

    @property
    def per_word(self) -> int:
        """Numbers in a word of a product."""
        return 2 if self.operand in ("pairs", "tiles") else 1

    @property
    def on_tiles(self) -> int:
        """1 if products use tile registers, else 0."""
        return int(self.operand == "tiles")

    @property
    def in_blocks(self) -> bool:
        """Whether products have accumulators of 2 x 2 numbers (:mod:`lowtri.kernels.blocks`)."""
        return self.operand == "pairs" and self.isa.has_blocks

    @property
    def unit_queries(self) -> int:
        """Queries in a unit of work of the forward pass, which has the keys of one tile."""
        return QUERIES // 2 if self.on_tiles else QUERIES

    @property
    def unit_row(self) -> int:
        """Bytes of a row of a unit's scores: a number for each query."""
        return self.unit_queries * self.number_bytes

    @property
    def edge_queries(self) -> int:
        """Queries whose keys are cut separately in a product with the values."""
        return 16 // min(2, self.tile[1])

    @property
    def edge_columns(self) -> int:
        """Columns of these products: those of a register tile with as many rows."""
        return self.lanes * min(2, self.tile[1])

    @property
    def query_group(self) -> int:
        """Queries that are computed together: columns of a product are a multiple of these."""
        return 32 if self.on_tiles else 16

    @property
    def tile(self) -> tuple[int, int, int]:
        """The register tile: rows and vectors of the wide one, rows of the narrow one, which is one vector wide."""
        return self.isa.pairs_tile if self.operand == "pairs" else self.isa.tile

    @property
    def in_order(self) -> int:
        """1 if few queries read a cache in memory's order, which the CPU's own prefetcher follows, 0 if they prefetch every line."""
        return int(self.isa.whole_vectors)

    def cache_tile(self, queries: int) -> CacheTile | None:
        """How a block of so many queries reads a cache; None if there are no such blocks."""
        tiles = self.isa.cache_tiles
        return tiles.get((self.operand, queries), tiles.get(("any", queries)))

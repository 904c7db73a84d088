"""What a kernel is compiled for: a dtype, how its rows are read, and an instruction set.

A kernel family (forward, backward, decode) is written once. Where its code depends on the spec, an intrinsic or a ``@by_spec``
function chooses during type inference, so that machine code has no branch for it. A spec is a constant that is part of its own Numba
type, and Numba's cache on disk finds a kernel by that type.

    rows        how the rows of Q, K and V enter a product
    direct      read from the array
    pairs       read from the array, two neighbours in a 32-bit word; accumulated in float32
    widened     a tile's rows are converted to float32 in scratch memory
    tiles       pairs in tile registers, in kernel families of their own; accumulated in float32
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import models, register_model, typeof_impl

from lowtri.compat.numba_private import AttributeTemplate, infer_getattr, lower_constant, lower_getattr_generic
from lowtri.kernels.isa.baseline import Baseline

__all__ = ["HALF", "HALF_ROW", "QUERIES", "KernelSpec", "SpecType", "VectorType"]

QUERIES = 64  # queries in a tile: one machine word of bits
HALF = QUERIES // 2  # queries in a unit of work of the forward pass on tile registers
HALF_ROW = 4 * HALF  # bytes of a row of its scores, and of its pairs
_BYTES = {"float32": 4, "float64": 8, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, eq=False)
class KernelSpec:
    """What a kernel is compiled for."""

    dtype: str  # of the arrays
    rows: str  # direct, pairs, widened, tiles
    isa: Baseline

    @property
    def name(self) -> str:
        return f"{self.dtype}-{self.rows}-{self.isa.name}"

    @property
    def compute_dtype(self) -> str:
        return "float64" if self.dtype == "float64" else "float32"

    @property
    def input_bytes(self) -> int:
        """Of a number in the arrays."""
        return _BYTES[self.dtype]

    @property
    def number_bytes(self) -> int:
        """Of a number of the compute dtype, and of a pair."""
        return _BYTES[self.compute_dtype]

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
        return 2 if self.rows == "pairs" else 1

    @property
    def tile(self) -> tuple[int, int, int]:
        """The register tile: rows and vectors of the wide one, rows of the narrow one, which is one vector wide."""
        return self.isa.pairs_tile if self.rows == "pairs" else self.isa.tile

    @property
    def number(self) -> Any:
        """The Numba type of the compute dtype."""
        return getattr(types, self.compute_dtype)

    @property
    def vector(self) -> VectorType:
        return VectorType(self.compute_dtype)


# The properties of a spec that kernels read, as constants.
_CONSTANTS = ("input_bytes", "number_bytes", "row_bytes", "lanes", "per_word")


class SpecType(types.Type):
    """The type of a spec; ``value`` is the spec."""

    def __init__(self, value: KernelSpec) -> None:
        self.value = value
        super().__init__(name=f"spec({value.name})")


class VectorType(types.Type):
    """64 bytes of numbers in registers."""

    def __init__(self, number: str) -> None:
        self.number, self.bits = getattr(types, number), 8 * _BYTES[number]
        self.lanes = 512 // self.bits
        super().__init__(name=f"{number}x{self.lanes}")

    @property
    def ir(self) -> Any:
        return ir.VectorType(ir.DoubleType() if self.bits == 64 else ir.FloatType(), self.lanes)


@register_model(VectorType)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: VectorType) -> None:
        super().__init__(manager, kind, kind.ir)


typeof_impl.register(KernelSpec)(lambda value, context: SpecType(value))
register_model(SpecType)(models.OpaqueModel)
lower_constant(SpecType)(lambda context, builder, kind, value: context.get_dummy_value())


@infer_getattr
class _Constants(AttributeTemplate):
    key = SpecType

    def generic_resolve(self, spec: SpecType, name: str) -> Any:  # type: ignore[override]
        return types.int64 if name in _CONSTANTS else None


@lower_getattr_generic(SpecType)  # type: ignore[untyped-decorator]
def _constant(context: Any, builder: Any, spec: SpecType, value: Any, name: str) -> Any:
    return ir.Constant(ir.IntType(64), getattr(spec.value, name))

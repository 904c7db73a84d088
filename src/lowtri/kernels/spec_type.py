"""A spec as a Numba type: a constant that is part of its own type, by which Numba's cache on disk finds a kernel."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import models, register_model, typeof_impl

from lowtri.compat.numba_private import AttributeTemplate, infer_getattr, lower_constant, lower_getattr_generic
from lowtri.kernels.operations import operations_of
from lowtri.kernels.operations.baseline import Operations
from lowtri.kernels.spec import BYTES, KernelSpec

__all__ = ["SpecType", "TypedSpec", "VectorType"]


class TypedSpec(KernelSpec):
    """A spec with what emits code for it: its operations, and its types in Numba."""

    @property
    def operations(self) -> Operations:
        return operations_of(self.isa)

    @property
    def number(self) -> Any:
        """The Numba type of the compute dtype."""
        return getattr(types, self.compute_dtype)

    @property
    def vector(self) -> VectorType:
        return VectorType(self.compute_dtype)


# The properties of a spec that kernels read, as constants.
_CONSTANTS = (
    "input_bytes",
    "number_bytes",
    "row_bytes",
    "lanes",
    "per_word",
    "on_tiles",
    "unit_queries",
    "unit_row",
    "edge_queries",
    "edge_columns",
    "query_group",
)


class SpecType(types.Type):
    """The type of a spec; ``value`` is the spec."""

    def __init__(self, value: KernelSpec) -> None:
        self.value = TypedSpec(value.dtype, value.operand, value.isa)
        super().__init__(name=f"spec({value.name})")


class VectorType(types.Type):
    """64 bytes of numbers in registers."""

    def __init__(self, number: str) -> None:
        self.number, self.bits = getattr(types, number), 8 * BYTES[number]
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

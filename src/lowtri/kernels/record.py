"""The spec and the record of a call as Numba types.

A spec is a constant that is part of its own type. ``call.nq`` loads the field ``nq`` of a record in memory, with the offset and type
that the ABI defines; a field that is a record itself (``call.q_strides``) is a record at its own address. The type of a call's record
also carries the spec that the kernel is compiled for: ``call.spec``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, models, register_model, typeof_impl

from lowtri.compat.numba_private import (
    AttributeTemplate,
    from_dtype,
    infer_getattr,
    lower_constant,
    lower_getattr_generic,
)
from lowtri.kernels.abi import COUNTER
from lowtri.kernels.operations import operations_of
from lowtri.kernels.operations.baseline import Operations
from lowtri.kernels.spec import BYTES, KernelSpec

__all__ = ["RecordType", "take"]


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
    "in_order",
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


class RecordType(types.Type):
    """The address of a record."""

    def __init__(self, dtype: np.dtype[Any], spec: KernelSpec) -> None:
        self.dtype, self.spec = dtype, spec
        super().__init__(name=f"record({dtype.descr}, {spec.name})")


register_model(RecordType)(models.OpaqueModel)


@infer_getattr
class _Fields(AttributeTemplate):
    key = RecordType

    def generic_resolve(self, record: RecordType, name: str) -> Any:
        if name == "spec":
            return SpecType(record.spec)
        if name not in (record.dtype.names or ()):
            return None
        kind = record.dtype[name]
        return RecordType(kind, record.spec) if kind.names else from_dtype(kind)


@lower_getattr_generic(RecordType)
def _field(context: Any, builder: Any, record: RecordType, value: Any, name: str) -> Any:
    if name == "spec":
        return context.get_dummy_value()
    kind, offset = record.dtype.fields[name][:2]
    address = builder.gep(value, [ir.Constant(ir.IntType(64), offset)])
    if kind.names:
        return address
    return builder.load(builder.bitcast(address, context.get_value_type(from_dtype(kind)).as_pointer()), align=8)


@intrinsic
def take(typing, counter):
    """Increment a counter, atomically; returns its value before."""
    if not (isinstance(counter, RecordType) and counter.dtype == COUNTER):
        raise TypeError(f"take: expected a counter, got {counter}")

    def emit(c, b, s, a):
        integer = ir.IntType(64)
        count = b.bitcast(a[0], integer.as_pointer())
        return b.atomic_rmw("add", count, ir.Constant(integer, 1), "seq_cst")

    return types.int64(counter), emit

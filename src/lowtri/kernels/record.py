"""A record in memory as a Numba type: ``call.nq`` loads the field ``nq``, with the offset and type that the ABI defines.

A field that is a record itself (``call.q_strides``) is a record at its own address. The type of a call's record also carries the spec
that the kernel is compiled for: ``call.spec``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, models, register_model

from lowtri.compat.numba_private import AttributeTemplate, from_dtype, infer_getattr, lower_getattr_generic
from lowtri.kernels.abi import COUNTER
from lowtri.kernels.spec import KernelSpec
from lowtri.kernels.spec_type import SpecType

__all__ = ["RecordType", "take"]


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

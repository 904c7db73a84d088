"""What kernels are written in: the types of the spec, the record and the scratch memory in Numba, and two decorators.

    @device_function   a function that only kernels call, compiled into the kernel only
    @operation         an operation in LLVM code, from the function that emits it

A spec is part of its own type. Its properties are constants: a branch on one (``if spec.uses_amx:``) is decided before types are
inferred, so machine code has no branch for it. ``call.nq`` loads the field ``nq`` of a record in memory, with the offset and type that
the ABI defines; a field that is a record itself (``call.q_strides``) is a record at its own address. The types of a call's record and
of its scratch memory also carry the spec that the kernel is compiled for: ``call.spec``, ``own.spec``. Functions are compiled without
reference counting, since kernels do not allocate, and without checks for division by zero.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic, models, register_model, typeof_impl

from lowtri.compat.numba_private import (
    DEVICE_FUNCTION,
    NO_ALLOCATION,
    AttributeTemplate,
    infer_getattr,
    lower_constant,
    lower_getattr_generic,
)
from lowtri.kernels.isa import Baseline
from lowtri.kernels.operations import I64, i64, operations_of
from lowtri.kernels.spec import BYTES, KernelSpec

NUMBA_OPTIONS: dict[str, Any] = {"error_model": "numpy", **NO_ALLOCATION}  # no Python exceptions, no allocation

device_function = njit(**DEVICE_FUNCTION, **NUMBA_OPTIONS)


class VectorType(types.Type):
    """64 bytes of numbers in registers."""

    def __init__(self, number: str) -> None:
        self.number, self.lanes = getattr(types, number), 64 // BYTES[number]
        self.ir = ir.VectorType(ir.DoubleType() if number == "float64" else ir.FloatType(), self.lanes)
        super().__init__(name=f"{number}x{self.lanes}")

    @property
    def vector(self) -> VectorType:
        return self


@register_model(VectorType)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: VectorType) -> None:
        super().__init__(manager, kind, kind.ir)


class TypedSpec(KernelSpec):
    """A spec with what emits code for it: its operations, and the Numba types of its numbers and vectors."""

    def __init__(self, dtype: str, operand: str, isa: Baseline) -> None:
        super().__init__(dtype, operand, isa)
        self.operations, self.vector = operations_of(isa), VectorType(self.compute_dtype)
        self.number = self.vector.number


class SpecType(types.Type):
    """The type of a spec; ``value`` is the spec."""

    def __init__(self, value: KernelSpec) -> None:
        self.value = TypedSpec(value.dtype, value.operand, value.isa)
        self.constants = {name: x for name, x in vars(value).items() if isinstance(x, bool | int | float | str)}
        super().__init__(name=f"spec({value.name})")


typeof_impl.register(KernelSpec)(lambda value, context: SpecType(value))
register_model(SpecType)(models.OpaqueModel)
lower_constant(SpecType)(lambda context, builder, kind, value: context.get_dummy_value())


class RecordType(types.Type):
    """The address of a record."""

    def __init__(self, dtype: np.dtype[Any], spec: KernelSpec) -> None:
        self.dtype, self.spec = dtype, spec
        self.members = {"spec": SpecType(spec)}
        super().__init__(name=f"record({dtype.descr}, {spec.name})")

    def kind_of(self, name: str) -> Any:
        """The type of an attribute; None if there is none of this name."""
        if name in self.members:
            return self.members[name]
        if name not in (self.dtype.names or ()):
            return None
        kind = self.dtype[name]
        return RecordType(kind, self.spec) if kind.names else getattr(types, kind.name)


register_model(RecordType)(models.OpaqueModel)


@lower_getattr_generic(RecordType)
def _field(context: Any, builder: Any, record: RecordType, value: Any, name: str) -> Any:
    kind = record.kind_of(name)
    if isinstance(kind, SpecType):
        return context.get_dummy_value()
    address = builder.gep(value, [i64(record.dtype.fields[name][1])])
    if isinstance(kind, RecordType):
        return address
    return builder.load(builder.bitcast(address, context.get_value_type(kind).as_pointer()), align=8)


class ScratchType(types.Type):
    """Scratch memory: the record of its parts' offsets, and an address. Attributes are the addresses of the parts."""

    def __init__(self, offsets: RecordType) -> None:
        self.offsets = offsets
        self.kind_of = offsets.kind_of
        self.members = offsets.members
        super().__init__(name=f"scratch({offsets.name})")


@register_model(ScratchType)
class _ScratchModel(models.StructModel):
    def __init__(self, manager: Any, kind: ScratchType) -> None:
        super().__init__(manager, kind, [("offsets", kind.offsets), ("address", types.intp)])


for kind in (RecordType, ScratchType):
    resolve = {"key": kind, "generic_resolve": lambda self, owner, name: owner.kind_of(name)}
    infer_getattr(type("_Attributes", (AttributeTemplate,), resolve))


@lower_getattr_generic(ScratchType)
def _part(context: Any, builder: Any, scratch: ScratchType, value: Any, name: str) -> Any:
    if name in scratch.members:
        return context.get_dummy_value()
    record, address = builder.extract_value(value, 0), builder.extract_value(value, 1)
    return builder.add(address, _field(context, builder, scratch.offsets, record, name))


@intrinsic
def scratch_at(typing, call, address):
    """The scratch memory of a call that begins at this address: that of a thread, or that of all threads."""
    kind = ScratchType(call.kind_of("offsets"))

    def emit(context, builder, signature, values):
        parts = ir.Constant(context.get_value_type(kind), ir.Undefined)
        parts = builder.insert_value(parts, _field(context, builder, call, values[0], "offsets"), 0)
        return builder.insert_value(parts, values[1], 1)

    return kind(call, types.intp), emit


@intrinsic
def take(typing, counter):
    """Increment a counter of a record, atomically; returns its value before."""

    def emit(context, builder, signature, values):
        return builder.atomic_rmw("add", builder.bitcast(values[0], I64.as_pointer()), i64(1), "seq_cst")

    return types.int64(counter), emit


@device_function
def tasks(call):
    """The numbers of the tasks that this thread takes, until none is left."""
    while True:
        task = take(call.next_task)
        if task >= call.tasks:
            return
        yield task


def operation(result: Any = None) -> Callable[[Callable[..., Any]], Any]:
    """An operation of kernels, from the function that emits its LLVM code: (builder, arguments) -> value.

    The number x has the compute dtype of the spec among the arguments; others are words of 64 bits. The spec is the
    :class:`TypedSpec` itself.

    Args:
        result: "vector" or "number", those of the spec, or of the first vector if there is no spec; a Numba type; None: nothing.
    """

    def decorate(emit: Callable[..., Any]) -> Any:
        def typed(typing: Any, *kinds: Any) -> Any:
            spec = next((kind.value for kind in kinds if isinstance(kind, SpecType)), None)
            owner = spec or next((kind for kind in kinds if isinstance(kind, VectorType)), None)
            kind_of_result = getattr(owner, result) if isinstance(result, str) else result or types.void

            def argument(name: str, kind: Any) -> Any:
                if not isinstance(kind, types.Number):
                    return kind
                if spec and name == "x":
                    return spec.number
                return types.int64 if kind.signed else types.uint64

            def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
                values = (spec if isinstance(kind, SpecType) else x for kind, x in zip(kinds, values, strict=True))
                value = emit(builder, *values)
                return context.get_dummy_value() if kind_of_result is types.void else value

            return kind_of_result(*map(argument, names, kinds)), generate

        _, *parameters = inspect.signature(emit).parameters.values()
        names = [parameter.name for parameter in parameters]
        first = inspect.Parameter("typing", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        typed.__signature__ = inspect.Signature([first, *parameters])  # type: ignore[attr-defined]
        typed.__name__, typed.__doc__ = emit.__name__, emit.__doc__
        return intrinsic(typed)

    return decorate


def constants_of_spec(count: int) -> Callable[[Callable[[Any], Any]], Any]:
    """An operation that gives so many integers, which a function computes from the spec."""
    kind = ir.ArrayType(I64, count)
    integers = operation(types.UniTuple(types.int64, count))
    return lambda compute: integers(lambda builder, spec: ir.Constant(kind, [*compute(spec)]))

"""Undocumented parts of Numba, under plain names; the docstring of the package lists the tested versions.

Numba documents how a type is added (``numba.extending``), but not how its attributes and constants are compiled, nor how the steps of
compilation are changed. Where a name is missing, kernels cannot be compiled; a library that was built before runs without Numba.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from numba._dynfunc import make_function
from numba.core import ir
from numba.core.cgutils import alloca_once, for_range
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import CompilerBase, DefaultPassBuilder
from numba.core.compiler_machinery import FunctionPass, register_pass
from numba.core.imputils import lower_constant, lower_getattr_generic
from numba.core.ir_utils import build_definitions
from numba.core.typed_passes import NativeLowering
from numba.core.typing.templates import AttributeTemplate, infer_getattr
from numba.core.untyped_passes import DeadBranchPrune

__all__ = [
    "DEVICE_FUNCTION",
    "NO_ALLOCATION",
    "AttributeTemplate",
    "alloca_once",
    "for_range",
    "infer_getattr",
    "lower_constant",
    "lower_getattr_generic",
]

# alloca_once, for_range                a variable on the stack, and a loop, in LLVM
# AttributeTemplate, infer_getattr      the types of a type's attributes
# lower_getattr_generic                 the code that reads an attribute
# lower_constant                        the code of a global variable that is a constant

# Options of njit and cfunc: nothing is allocated, so that nothing is counted.
NO_ALLOCATION: dict[str, Any] = {"_nrt": False}


# By itself Numba optimises each function together with all that it calls, and emits machine code and wrappers for each, so that code
# is optimised once for each function between it and the kernel. Here only the kernel is, with all that is linked into it, which takes
# about half of the compile time.


class _LinkedLibrary(JITCodeLibrary):
    """LLVM code that is neither optimised nor compiled by itself."""

    def _optimize_final_module(self) -> None:
        pass

    def _finalize_final_module(self) -> None:
        self._finalized = True


@register_pass(mutates_CFG=True, analysis_only=False)
class _LinkedLowering(NativeLowering):
    _name = "linked_lowering"

    def run_pass(self, state: Any) -> bool:
        state.library = _LinkedLibrary(state.targetctx.codegen(), state.func_id.func_qualname)
        state.flags.no_compile = True
        super().run_pass(state)

        lowered = state["cr"]
        # Callers find the code of a function by an object of this type; nobody can call it, since it has no address.
        handle = make_function(lowered.fndesc.lookup_module(), lowered.fndesc.qualname, "", 0, lowered.env, ())
        state.targetctx.insert_user_function(handle, lowered.fndesc, [state.library])
        state["cr"] = lowered._replace(cfunc=handle)
        return True


@register_pass(mutates_CFG=False, analysis_only=False)
class _ConstantAttributes(FunctionPass):
    """Attributes of arguments whose types have them as ``constants`` become constants, before branches on constants are removed.

    So what such a branch excludes is not compiled, and need not have types. A type may have ``members``: the types of attributes that
    have constants themselves.
    """

    _name = "constant_attributes"

    def __init__(self) -> None:
        FunctionPass.__init__(self)

    def run_pass(self, state: Any) -> bool:
        statements = [x for block in state.func_ir.blocks.values() for x in block.body if isinstance(x, ir.Assign)]
        assignments = Counter(x.target.name for x in statements)
        kinds: dict[str, Any] = {}  # of the variables that are assigned once, from an argument or a member of one
        for x in statements:
            kind = None
            if isinstance(x.value, ir.Arg):
                kind = state.args[x.value.index]
            elif isinstance(x.value, ir.Var):
                kind = kinds.get(x.value.name)
            elif isinstance(x.value, ir.Expr) and x.value.op == "getattr":
                owner, name = kinds.get(x.value.value.name), x.value.attr
                kind = getattr(owner, "members", {}).get(name)
                constants = getattr(owner, "constants", {})
                if name in constants:
                    x.value = ir.Const(constants[name], x.loc)
            if kind is not None and assignments[x.target.name] == 1:
                kinds[x.target.name] = kind
        state.func_ir._definitions = build_definitions(state.func_ir.blocks)
        return True


class _DeviceFunction(CompilerBase):
    """Numba's steps from a function to LLVM code, with a step before branches are removed, and another last one."""

    def define_pipelines(self) -> list[Any]:
        pipeline = DefaultPassBuilder.define_nopython_pipeline(self.state)
        steps = [(_LinkedLowering if step is NativeLowering else step, text) for step, text in pipeline.passes]
        first = next(n for n, (step, _) in enumerate(steps) if step is DeadBranchPrune)
        pipeline.passes = [*steps[:first], (_ConstantAttributes, "constant attributes"), *steps[first:]]
        pipeline.finalize()
        return [pipeline]


# Options of njit for functions that only other compiled functions call: their LLVM code is linked into that of their callers, and
# nothing else; neither callers in Python nor callers in C need a wrapper.
DEVICE_FUNCTION: dict[str, Any] = {
    "pipeline_class": _DeviceFunction,
    "no_cpython_wrapper": True,
    "no_cfunc_wrapper": True,
}

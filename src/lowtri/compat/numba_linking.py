"""Numba functions that only other compiled functions call: their LLVM code is linked into that of their callers, and nothing else.

By itself Numba optimises each function together with all that it calls, and emits machine code and wrappers for each, so that code is
optimised once for each function between it and the kernel. Here only the kernel is, with all that is linked into it, which takes about
half of the compile time.
"""

from __future__ import annotations

from typing import Any

from numba._dynfunc import make_function
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import CompilerBase, DefaultPassBuilder
from numba.core.compiler_machinery import register_pass
from numba.core.typed_passes import NativeLowering


class _LinkedLibrary(JITCodeLibrary):
    """LLVM code that is neither optimised nor compiled by itself."""

    def _optimize_final_module(self) -> None:
        pass

    def _finalize_final_module(self) -> None:
        self._finalized = True


@register_pass(mutates_CFG=True, analysis_only=False)
class _Linked(NativeLowering):
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


class _LinkedFunction(CompilerBase):
    """Numba's steps from a function to LLVM code, with another last one."""

    def define_pipelines(self) -> list[Any]:
        pipeline = DefaultPassBuilder.define_nopython_pipeline(self.state)
        pipeline.passes = [(_Linked if step is NativeLowering else step, text) for step, text in pipeline.passes]
        pipeline.finalize()
        return [pipeline]


# Options of njit; neither callers in Python nor callers in C need a wrapper.
LINKED: dict[str, Any] = {"pipeline_class": _LinkedFunction, "no_cpython_wrapper": True, "no_cfunc_wrapper": True}

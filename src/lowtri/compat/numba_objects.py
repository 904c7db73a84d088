"""Object files by Numba's own pipeline: kernels are compiled when lowtri is built, for any CPU and system that LLVM knows.

Type inference, lowering and Numba's optimisation run as ever. Three things are replaced: the target machine, which is given; the
execution engine, of which there is none; and the last step, which emits an object file instead of code in memory. That holds for the
whole process, so it has to be one that does nothing else (tools/build_kernels.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba.core import ccallback, cgutils, codegen, cpu
from numba.core.compiler_lock import global_compiler_lock
from numba.core.registry import cpu_target

# What kernels may call.
C_LIBRARY = frozenset({"exp2", "exp2f", "log", "logf", "log2", "log2f", "memcpy", "memmove", "memset", "sqrt"})


class _NoEngine:
    """Code is not loaded into this process."""

    def is_symbol_defined(self, name: str) -> bool:
        return False

    def add_module(self, module: Any) -> None:
        pass

    def set_object_cache(self, *hooks: Any) -> None:
        pass

    def finalize_object(self) -> None:
        pass

    def get_global_value_address(self, name: str) -> int:
        return 0


def _machine(triple: str, name: str, features: str) -> Any:
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    llvm.initialize_native_asmparser()
    target = llvm.Target.from_triple(triple)
    return target.create_target_machine(cpu=name, features=features, opt=3, reloc="pic", codemodel="default")


def use_target(triple: str, name: str, features: str) -> None:
    """Compile for this system and CPU from now on, by LLVM's names: x86_64-unknown-linux-gnu, x86-64-v3, "+avx2,+fma"."""

    def init(self: Any, module: Any) -> None:
        self._tm = _machine(triple, name, features)
        self._engine = _NoEngine()
        self._tm_features, self._target_data = features, self._tm.target_data
        self._data_layout = str(self._target_data)
        self._loopvect, self._opt_level = False, 0  # as Numba sets them

    def empty(self: Any, name: str) -> Any:
        module = ir.Module(cgutils.normalize_ir_text(name))
        module.triple = triple
        if self._data_layout:
            module.data_layout = self._data_layout
        return module

    patched: Any = codegen
    patched.CPUCodegen._init, patched.CPUCodegen._create_empty_module = init, empty
    patched.JITCPUCodegen.set_env = lambda self, name, env: None
    patched.JITCodeLibrary.get_pointer_to_function = lambda self, name: 1
    patched.JITCodeLibrary._finalize_specific = lambda self: None
    cpu_target.target_context._internal_codegen = codegen.JITCPUCodegen("lowtri")


def _entry(self: Any, library: Any, function: Any, environment: Any, call_helper: Any) -> None:
    """The C function around a kernel, without Numba's path that reports an exception to Python: kernels raise none."""
    module = self.create_module("entry")
    kind = self.call_conv.get_function_type(function.restype, function.argtypes)
    callee = ir.Function(module, kind, function.llvm_func_name)
    kinds = [self.get_value_type(argument) for argument in function.argtypes]
    result = self.get_value_type(function.restype)
    wrapper = ir.Function(module, ir.FunctionType(result, kinds), function.llvm_cfunc_wrapper_name)
    builder = ir.IRBuilder(wrapper.append_basic_block("entry"))
    _, out = self.call_conv.call_function(
        builder, callee, function.restype, function.argtypes, wrapper.args, attrs=("noinline",)
    )
    builder.ret(out)
    library.add_ir_module(module)


@contextmanager
def plain_entry() -> Iterator[None]:
    """C functions compiled in this block are plain calls."""
    with global_compiler_lock:
        context: Any = cpu.CPUContext
        before = context.create_cfunc_wrapper
        context.create_cfunc_wrapper = _entry
        try:
            yield
        finally:
            context.create_cfunc_wrapper = before


def _readable(mangled: str) -> str:
    """The words of one of Numba's mangled names, each of which stands behind its length; without addresses of this process."""
    words: list[str] = []
    rest = mangled.removeprefix("_ZN")
    while (size := re.match(r"\d+", rest)) and len(words) < 5:
        end = size.end() + int(size[0])
        words.append(re.sub(r"_[0-9a-f]{2}", "", rest[size.end() : end]))
        rest = rest[end:]
    return ".".join(words[2:])  # without lowtri.kernels


def object_file(function: Callable[..., None], signature: Any, options: dict[str, Any], name: str) -> bytes:
    """The object file of a function with one public symbol, ``name``; it needs nothing of Python and Numba.

    Raises:
        RuntimeError: if the function can raise an exception, or calls a function that no C library has.
    """
    callback: Any = ccallback.CFunc(function, (signature.args, signature.return_type), {}, options)
    with plain_entry():
        library = callback._compile_uncached().library
        library._ensure_finalized()
    entry = next(f.name for f in library.get_defined_functions() if f.name.startswith("cfunc."))
    module, machine = library._final_module, library._codegen._tm
    for f in [f for f in module.functions if not f.is_declaration]:
        if f.name == entry:
            f.name = name
        else:  # the entry is the only caller
            f.linkage, f.name = "internal", f"{name}.{_readable(f.name)}"
    for variable in module.global_variables:
        if not variable.is_declaration and variable.linkage != llvm.Linkage.private:
            variable.linkage = "internal"
    # That device functions return 0, for no exception, can be seen only now that nobody else calls them.
    passes, builder = (
        llvm.create_new_module_pass_manager(),
        llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options()),
    )
    passes.add_ipsccp_pass()
    passes.add_simplify_cfg_pass()
    passes.add_global_dead_code_eliminate_pass()
    passes.run(module, builder)
    _check(module, name)
    return bytes(machine.emit_object(module))


def _check(module: Any, name: str) -> None:
    called = {f.name for f in module.functions if f.is_declaration and not f.name.startswith("llvm.")}
    if called - C_LIBRARY:
        raise RuntimeError(f"{name} calls {', '.join(sorted(called - C_LIBRARY))}")
    for function in module.functions:
        text = str(function)
        if re.search(r"^define .*?\bi32 @", text, re.M):
            wrong = _statuses(text) - ({"0", "-3"} if function.name.endswith(".next") else {"0"})
            if wrong:
                raise RuntimeError(f"{function.name} can raise an exception: status {', '.join(sorted(wrong))}")


def _statuses(text: str) -> set[str]:
    """The values that a function can return by itself: 0, -3 at the end of a generator, others for exceptions.

    What a call returned is returned as it is, and checked in the function that was called.
    """
    definitions: dict[str, str] = dict(re.findall(r"^  (%\S+) = (.*)$", text, re.M))
    pending, seen, constants = set(re.findall(r"^  ret i32 (\S+)$", text, re.M)), set(), set()
    while pending:
        value = pending.pop()
        seen.add(value)
        definition = definitions.get(value, "")
        if not value.startswith("%"):
            constants |= {value} - {"poison", "undef"}  # nobody reads these
        elif definition.startswith("phi i32"):
            pending |= {first for first, _ in re.findall(r"\[ (\S+), (%\S+) \]", definition)} - seen
        elif not re.match(r"(tail |musttail |notail )?call ", definition):
            constants.add(definition or value)
    return constants


def emit_module(module: ir.Module, triple: str, name: str, features: str) -> bytes:
    """The object file of a module that was written by hand."""
    module.triple = triple
    parsed = llvm.parse_assembly(str(module))
    parsed.verify()
    return bytes(_machine(triple, name, features).emit_object(parsed))

"""Compiling kernels, with Numba: into object files when lowtri is built, or, for tests of a kernel's parts, into memory."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

from llvmlite import ir
from numba import cfunc, types

from lowtri.compat.numba_objects import emit_module, object_file, plain_entry, use_target
from lowtri.kernels import abi, token_rows
from lowtri.kernels.abi import Abi
from lowtri.kernels.device_function import NUMBA_OPTIONS
from lowtri.kernels.isa import PERMISSION, Baseline
from lowtri.kernels.library import Code
from lowtri.kernels.record import RecordType
from lowtri.kernels.spec import KernelSpec
from lowtri.kernels.variants import functions_of, spec_of_variant, symbol, variants_of

__all__ = ["PROBE", "Job", "compiled", "jobs_of", "object_of"]

PROBE = "lowtri_cpu"  # the object that asks the CPU for its features
_TRIPLES = {
    "linux": "{}-unknown-linux-gnu",
    "macos": "{}-apple-macosx11.0.0",
    "windows": "{}-pc-windows-msvc",
}
_IN_C = {
    "floats": types.CPointer(types.float32),
    "bits": types.CPointer(types.int32),
    "size": types.int64,
    "number": types.float32,
}
_MODULES = {"multiply": "product", "read": "product"}  # the file of a kernel that is not in one of its own name


class Job(NamedTuple):
    """A function to compile: a kernel, a pass over rows (without a spec), or the probe of the CPU (without a function)."""

    symbol: str
    isa: Baseline
    function: str = ""
    spec: KernelSpec | None = None


def jobs_of(isa: Baseline, all_variants: bool = False) -> list[Job]:
    """All functions of an instruction set; with those that only tests call, too."""
    kernels = list(functions_of(isa))
    if all_variants:
        variants = [one for one in variants_of(isa) if isa.has_tiles or one.operand != "tiles"]
        specs = [(variant.family, spec_of_variant(variant, isa)) for variant in variants]
        kernels += [(name, spec) for family, spec in specs for name in _families(family, spec)]
    jobs = {symbol(name, spec): Job(symbol(name, spec), spec.isa, name, spec) for name, spec in kernels}
    jobs |= {token_rows.symbol(name, isa): Job(token_rows.symbol(name, isa), isa, name) for name in token_rows.PASSES}
    return list(jobs.values())


def _families(family: str, spec: KernelSpec) -> tuple[str, ...]:
    return ("decode",) if family == "decode" else ("forward", "backward") + ("multiply",) * (spec.operand != "tiles")


def object_of(job: Job, system: str, native: Baseline, cpu: str = "") -> bytes:
    """The object file of a function. The process compiles for the job's instruction set from then on.

    Args:
        native: what instruction sets are compiled for whose CPU is "native": those that tests emulate.
        cpu: LLVM's name of a CPU that has the instruction set; the code may not run on others.
    """
    isa = native if job.isa.cpu == "native" else job.isa
    triple = _TRIPLES[system].format(isa.architecture)
    features = ",".join(f"+{name}" for name in sorted(isa.features - {PERMISSION}))
    if job.symbol == PROBE:
        return _probe(triple, isa.cpu)
    use_target(triple, cpu or isa.cpu, features)
    function, signature = _function(job)
    return object_file(function, signature, NUMBA_OPTIONS, job.symbol)


def _function(job: Job) -> tuple[Callable[..., None], Any]:
    """The function of a job, and its types."""
    if job.spec is None:
        function, kinds = token_rows.PASSES[job.function]
        return function, types.void(*(_IN_C[kind] for kind in kinds.split()))
    module = import_module(f"lowtri.kernels.{_MODULES.get(job.function, job.function)}")
    record = RecordType(getattr(abi, job.function.upper()).dtype, job.spec)
    return getattr(module, job.function), types.void(record)


def _probe(triple: str, cpu: str) -> bytes:
    """lowtri_cpuid(leaf, subleaf, words) and lowtri_xgetbv(), for x86-64."""
    i32, i64 = ir.IntType(32), ir.IntType(64)
    module = ir.Module("cpu")
    ask = ir.Function(module, ir.FunctionType(ir.VoidType(), [i32, i32, i32.as_pointer()]), "lowtri_cpuid")
    b, kind = ir.IRBuilder(ask.append_basic_block()), ir.LiteralStructType([i32] * 4)
    registers = "={ax},={bx},={cx},={dx},{ax},{cx}"
    words = b.asm(ir.FunctionType(kind, [i32, i32]), "cpuid", registers, ask.args[:2], True)
    for n in range(4):
        b.store(b.extract_value(words, n), b.gep(ask.args[2], [ir.Constant(i64, n)]))
    b.ret_void()
    saved = ir.Function(module, ir.FunctionType(i32, []), "lowtri_xgetbv")
    b, pair = ir.IRBuilder(saved.append_basic_block()), ir.LiteralStructType([i32, i32])
    halves = b.asm(ir.FunctionType(pair, [i32]), "xgetbv", "={ax},={dx},{cx}", [ir.Constant(i32, 0)], True)
    b.ret(b.extract_value(halves, 0))
    return emit_module(module, triple, cpu, "")


_in_memory: list[Any] = []  # keeps code in memory


def compiled(kernel: Callable[[Any], None], abi: Abi, spec: KernelSpec) -> Code:
    """The code of ``kernel(record)``, compiled now for this CPU."""
    with plain_entry():
        code = cfunc(types.void(RecordType(abi.dtype, spec)), **NUMBA_OPTIONS)(kernel)
    _in_memory.append(code)
    return Code(int(code.address or 0))

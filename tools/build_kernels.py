#!/usr/bin/env python
"""Compiles the kernels into a shared library, src/lowtri/kernels/native: needs Numba, and a linker; what it writes needs neither.

    python tools/build_kernels.py                            the best instruction set of this machine, and the baseline
    python tools/build_kernels.py --isas all                 all of this machine's architecture
    python tools/build_kernels.py --linker zig               with the linker of the package ziglang, for glibc 2.17 and later
    python tools/build_kernels.py --platform macos-aarch64 --isas all --linker zig       for another machine, on this one

Each function is compiled by a process of its own, on all CPUs. The same sources and versions give the same bytes. A library that is up
to date is left as it is.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager, suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    # Numba reads these when it is imported. With Intel's library, log would become a function of it.
    os.environ["NUMBA_DISABLE_INTEL_SVML"] = "1"
    os.environ["LOWTRI_BUILDS"] = "1"  # and kernels that are missing are not compiled by another process of this kind
    if os.environ.get("PYTHONHASHSEED") != "0":
        os.environ["PYTHONHASHSEED"] = "0"
        sys.exit(subprocess.run([sys.executable, *sys.argv]).returncode)
    sys.path.insert(0, str(ROOT / "src"))
    if find_spec("numba") is None:
        sys.exit("build_kernels: numba is not installed. Fix: pip install numba.")

import llvmlite.binding as llvm
from llvmlite import ir
from numba import cfunc, types
from numba.core import ccallback, cgutils, codegen, cpu
from numba.core.compiler_lock import global_compiler_lock
from numba.core.registry import cpu_target

from lowtri._version import __version__
from lowtri.kernels import abi
from lowtri.kernels.device import NUMBA_OPTIONS, RecordType
from lowtri.kernels.isa import ALL, PERMISSION, Baseline, fastest_first
from lowtri.kernels.library import Code, library_name, sources_hash, this_platform
from lowtri.kernels.spec import KernelSpec, functions_of, symbol

SYSTEMS = {"linux": "linux", "darwin": "macos", "win32": "windows"}
ZIG = {"linux": "{}-linux-gnu.2.17", "macos": "{}-macos.11.0", "windows": "{}-windows-gnu"}
HARDENED = ["-Wl,-z,relro,-z,now,-z,noexecstack,--no-undefined,--build-id=none"]


PROBE = "lowtri_cpu"  # the object that asks the CPU for its features
TRIPLES = {"linux": "{}-unknown-linux-gnu", "macos": "{}-apple-macosx11.0.0", "windows": "{}-pc-windows-msvc"}
MODULES = {"multiply": "product", "read": "product"}  # the file of a kernel that is not in one of its own name
# What kernels may call.
C_LIBRARY = frozenset({"exp2", "exp2f", "log", "logf", "log2", "log2f", "memcpy", "memmove", "memset", "sqrt"})


class Job(NamedTuple):
    """A function to compile: a kernel, or the probe of the CPU (without a function and a spec)."""

    symbol: str
    isa: Baseline
    function: str = ""
    spec: KernelSpec | None = None


def jobs_of(isa: Baseline, with_disabled: bool = False) -> list[Job]:
    """All functions of an instruction set; with those that only tests call, too."""
    return [Job(symbol(name, spec), isa, name, spec) for name, spec in functions_of(isa, with_disabled)]


def function_of(job: Job):  # type: ignore[no-untyped-def]
    """The function of a job, and its types."""
    module = import_module(f"lowtri.kernels.{MODULES.get(job.function, job.function)}")
    return getattr(module, job.function), types.void(RecordType(getattr(abi, job.function.upper()).dtype, job.spec))


def object_of(job: Job, system: str, native: Baseline, cpu: str = "") -> bytes:
    """The object file of a function. The process compiles for the job's instruction set from then on.

    Args:
        native: what instruction sets are compiled for whose CPU is "native": those that tests emulate.
        cpu: LLVM's name of a CPU that has the instruction set; the code may not run on others.
    """
    isa = native if job.isa.cpu == "native" else job.isa
    triple = TRIPLES[system].format(isa.architecture)
    if job.symbol == PROBE:
        return probe(triple, isa.cpu)
    use_target(triple, cpu or isa.cpu, ",".join(f"+{name}" for name in sorted(isa.features - {PERMISSION})))
    return object_file(*function_of(job), job.symbol)


def probe(triple: str, cpu: str) -> bytes:
    """lowtri_cpuid(leaf, subleaf, words) and lowtri_xgetbv(), for x86-64."""
    i32 = ir.IntType(32)
    i64 = ir.IntType(64)
    module = ir.Module("cpu")
    module.triple = triple
    ask = ir.Function(module, ir.FunctionType(ir.VoidType(), [i32, i32, i32.as_pointer()]), "lowtri_cpuid")
    b = ir.IRBuilder(ask.append_basic_block())
    kind = ir.LiteralStructType([i32] * 4)
    registers = "={ax},={bx},={cx},={dx},{ax},{cx}"
    words = b.asm(ir.FunctionType(kind, [i32, i32]), "cpuid", registers, ask.args[:2], True)
    for n in range(4):
        b.store(b.extract_value(words, n), b.gep(ask.args[2], [ir.Constant(i64, n)]))
    b.ret_void()
    saved = ir.Function(module, ir.FunctionType(i32, []), "lowtri_xgetbv")
    b = ir.IRBuilder(saved.append_basic_block())
    pair = ir.LiteralStructType([i32, i32])
    halves = b.asm(ir.FunctionType(pair, [i32]), "xgetbv", "={ax},={dx},{cx}", [ir.Constant(i32, 0)], True)
    b.ret(b.extract_value(halves, 0))
    parsed = llvm.parse_assembly(str(module))
    parsed.verify()
    return bytes(machine_of(triple, cpu, "").emit_object(parsed))


IN_MEMORY: list[object] = []  # keeps code in memory


def compiled(function, signature) -> Code:  # type: ignore[no-untyped-def]
    """A function's code, compiled now for this CPU: for tests."""
    with plain_entry():
        code = cfunc(signature, **NUMBA_OPTIONS)(function)
    IN_MEMORY.append(code)
    return Code(int(code.address or 0))


# Object files by Numba's own pipeline. Type inference, lowering and Numba's optimisation run as ever. Three things are replaced: the
# target machine, which is given; the execution engine, of which there is none; and the last step, which emits an object file instead of
# code in memory. That holds for the whole process. Private functions of Numba 0.62 and 0.68.


class NoEngine:
    """Code is not loaded into this process."""

    def __getattr__(self, name: str):  # type: ignore[no-untyped-def]
        """is_symbol_defined, add_module, set_object_cache, finalize_object, get_global_value_address."""
        return lambda *arguments: 0


def machine_of(triple: str, name: str, features: str):  # type: ignore[no-untyped-def]
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    llvm.initialize_native_asmparser()
    target = llvm.Target.from_triple(triple)
    return target.create_target_machine(cpu=name, features=features, opt=3, reloc="pic", codemodel="default")


def use_target(triple: str, name: str, features: str) -> None:
    """Compile for this system and CPU from now on, by LLVM's names: x86_64-unknown-linux-gnu, x86-64-v3, "+avx2,+fma"."""

    def init(self, module):  # type: ignore[no-untyped-def]
        self._tm = machine_of(triple, name, features)
        self._engine = NoEngine()
        self._tm_features = features
        self._target_data = self._tm.target_data
        self._data_layout = str(self._target_data)
        self._loopvect = False  # these two as Numba sets them
        self._opt_level = 0

    def empty(self, name):  # type: ignore[no-untyped-def]
        module = ir.Module(cgutils.normalize_ir_text(name))
        module.triple = triple
        if self._data_layout:
            module.data_layout = self._data_layout
        return module

    codegen.CPUCodegen._init = init
    codegen.CPUCodegen._create_empty_module = empty
    codegen.JITCPUCodegen.set_env = lambda self, name, env: None
    codegen.JITCodeLibrary.get_pointer_to_function = lambda self, name: 1
    codegen.JITCodeLibrary._finalize_specific = lambda self: None
    cpu_target.target_context._internal_codegen = codegen.JITCPUCodegen("lowtri")


def entry(self, library, function, environment, call_helper):  # type: ignore[no-untyped-def]
    """The C function around a kernel, without Numba's path that reports an exception to Python: kernels raise none."""
    module = self.create_module("entry")
    kind = self.call_conv.get_function_type(function.restype, function.argtypes)
    callee = ir.Function(module, kind, function.llvm_func_name)
    kinds = [self.get_value_type(argument) for argument in function.argtypes]
    result = self.get_value_type(function.restype)
    wrapper = ir.Function(module, ir.FunctionType(result, kinds), function.llvm_cfunc_wrapper_name)
    builder = ir.IRBuilder(wrapper.append_basic_block("entry"))
    arguments = function.restype, function.argtypes, wrapper.args
    builder.ret(self.call_conv.call_function(builder, callee, *arguments, attrs=("noinline",))[1])
    library.add_ir_module(module)


@contextmanager
def plain_entry():  # type: ignore[no-untyped-def]
    """C functions compiled in this block are plain calls."""
    with global_compiler_lock:
        before = cpu.CPUContext.create_cfunc_wrapper
        cpu.CPUContext.create_cfunc_wrapper = entry
        try:
            yield
        finally:
            cpu.CPUContext.create_cfunc_wrapper = before


def readable(mangled: str) -> str:
    """The words of one of Numba's mangled names, each of which stands behind its length; without addresses of this process."""
    words: list[str] = []
    rest = mangled.removeprefix("_ZN")
    while (size := re.match(r"\d+", rest)) and len(words) < 5:
        end = size.end() + int(size[0])
        words.append(re.sub(r"_[0-9a-f]{2}", "", rest[size.end() : end]))
        rest = rest[end:]
    return ".".join(words[2:])  # without lowtri.kernels


def object_file(function, signature, name: str) -> bytes:  # type: ignore[no-untyped-def]
    """The object file of a function with one public symbol, ``name``; it needs nothing of Python and Numba.

    Raises:
        RuntimeError: if the function can raise an exception, or calls a function that no C library has.
    """
    callback = ccallback.CFunc(function, (signature.args, signature.return_type), {}, NUMBA_OPTIONS)
    with plain_entry():
        library = callback._compile_uncached().library
        library._ensure_finalized()
    start = next(f.name for f in library.get_defined_functions() if f.name.startswith("cfunc."))
    module = library._final_module
    machine = library._codegen._tm
    for f in [f for f in module.functions if not f.is_declaration]:
        if f.name == start:
            f.name = name
        else:  # the entry is the only caller
            f.linkage = "internal"
            f.name = f"{name}.{readable(f.name)}"
    for variable in module.global_variables:
        if not variable.is_declaration and variable.linkage != llvm.Linkage.private:
            variable.linkage = "internal"
    # That device functions return 0, for no exception, can be seen only now that nobody else calls them.
    passes = llvm.create_new_module_pass_manager()
    passes.add_ipsccp_pass()
    passes.add_simplify_cfg_pass()
    passes.add_global_dead_code_eliminate_pass()
    passes.run(module, llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options()))
    check(module, name)
    return bytes(machine.emit_object(module))


def check(module, name: str) -> None:  # type: ignore[no-untyped-def]
    called = {f.name for f in module.functions if f.is_declaration and not f.name.startswith("llvm.")}
    if called - C_LIBRARY:
        raise RuntimeError(f"{name} calls {', '.join(sorted(called - C_LIBRARY))}")
    for function in module.functions:
        text = str(function)
        if re.search(r"^define .*?\bi32 @", text, re.M):
            wrong = statuses(text) - ({"0", "-3"} if function.name.endswith(".next") else {"0"})
            if wrong:
                raise RuntimeError(f"{function.name} can raise an exception: status {', '.join(sorted(wrong))}")


def statuses(text: str) -> set[str]:
    """The values that a function can return by itself: 0, -3 at the end of a generator, others for exceptions.

    What a call returned is returned as it is, and checked in the function that was called.
    """
    definitions: dict[str, str] = dict(re.findall(r"^  (%\S+) = (.*)$", text, re.M))
    pending = set(re.findall(r"^  ret i32 (\S+)$", text, re.M))
    seen = set()
    constants = set()
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


# The library.


def linker() -> str:
    """The C compiler, or Zig's where there is none.

    Raises:
        SystemExit: if there is neither.
    """
    if any(shutil.which(name) for name in ("cc", "gcc", "clang")):
        return "cc"
    if find_spec("ziglang"):
        return "zig"
    sys.exit("build_kernels: there is no C compiler to link with. Fix: pip install ziglang.")


def link(objects: list[Path], target: Path, system: str, architecture: str, by: str) -> None:
    """One shared library of all objects."""
    hardened = HARDENED if system == "linux" else []
    if system == "windows":  # Microsoft's C library defines the mark of programs that use floats, others do not
        mark = objects[0].with_name("fltused.c")
        mark.write_text("int _fltused = 0;\n")
        objects = [*objects, mark]
    if by == "cc":
        name = next(path for path in map(shutil.which, ("cc", "gcc", "clang")) if path)
        command = [name, "-shared", "-s", "-o", target, *objects, "-lm", *hardened]
    else:
        command = [sys.executable, "-m", "ziglang", "cc", "-target", ZIG[system].format(architecture), "-shared", "-s"]
        command += ["-o", target, *objects, *(["-lm"] if system == "linux" else [])]
        command += [option for option in hardened if system == "linux"]
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"build_kernels: the linker {command[0]} failed:\n{done.stderr.strip()[-2000:]}")


def native():  # type: ignore[no-untyped-def]
    """The instruction sets that this machine needs: its best one first, and the baseline of its architecture."""
    try:
        has = frozenset(name for name, present in llvm.get_host_cpu_features().items() if present) | {PERMISSION}
    except RuntimeError:  # LLVM does not know this host
        has = frozenset()
    # Of the CPUs with bf16 instructions that LLVM knows, AMD's are called znver.
    vendor = "" if llvm.get_host_cpu_name().startswith("znver") else "GenuineIntel"
    able = [isa for isa in fastest_first(vendor) if isa.runs_on(has, platform.machine().lower())]
    able = [isa for isa in able if isa.cpu != "native"]
    able = [isa for isa in able if (isa.architecture == "aarch64") == ("neon" in (x.name for x in able))]
    best = 2 if able[0].has_amx else 1  # the system may refuse tiles
    return [*able[:best], *able[-1:]] if len(able) > best else able


def compile_one(work):  # type: ignore[no-untyped-def]
    """In a process of its own: the object file of a job, and the CPU seconds that it took."""
    job, target, file = work
    start = time.process_time()
    Path(file).write_bytes(object_of(job, *target))
    return job.symbol, time.process_time() - start


def progress(line: str) -> None:
    """Print a line; also into the file or the terminal that LOWTRI_PROGRESS names, since pip shows nothing of what is built."""
    print(line, file=sys.stderr, flush=True)
    with suppress(OSError):
        if path := os.environ.get("LOWTRI_PROGRESS"):
            with open(path, "a", encoding="utf-8") as file:
                file.write(f"{line}\n")


def compile_all(jobs, system, host, cpu, folder, workers):  # type: ignore[no-untyped-def]
    """The object files of all jobs, in their order."""
    target = (system, host, cpu)
    work = [(job, target, str(folder / f"{job.symbol}.o")) for job in jobs]
    method = "fork" if "fork" in multiprocessing.get_all_start_methods() else "spawn"
    with multiprocessing.get_context(method).Pool(workers, maxtasksperchild=1) as pool:
        for done, (symbol, seconds) in enumerate(pool.imap_unordered(compile_one, work), 1):
            progress(f"[{done:2}/{len(jobs)}] {symbol} {seconds:.1f} s")
    return [Path(file) for *_, file in work]


def build(isas: str, platform_name: str, cpu: str, workers: int, by: str, target: Path) -> None:
    """The library and its index in the folder ``target``; ``cpu`` replaces the CPU that the compiler assumes, if it is not empty."""
    host = native()
    system, architecture = platform_name.split("-")
    built = [isa for isa in ALL if isa.cpu != "native" and isa.architecture == architecture]
    if isas == "native":
        built = host
    elif isas != "all":
        built = [isa for isa in ALL if isa.name in isas.split(",")]
    if not built or built[0].architecture != architecture:
        sys.exit(f"build_kernels: --isas {isas} names no instruction set of {platform_name}. Fix: --isas all.")
    jobs = [job for isa in built for job in jobs_of(isa)] + (
        [Job(PROBE, Baseline())] if architecture == "x86_64" else []
    )
    wanted = {
        **({"cpu": cpu} if cpu else {}),
        "version": __version__,
        "platform": platform_name,
        "sources": sources_hash(),
        "isas": sorted(isa.name for isa in built),
        "library": library_name(system),
    }
    if is_current(target, wanted):
        return
    print(f"compiling {len(jobs)} functions for {', '.join(isa.name for isa in built)}", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(prefix="lowtri") as folder:
        objects = compile_all(jobs, system, host[0], cpu, Path(folder), workers)
        library = Path(folder) / library_name(system)
        link(objects, library, system, architecture, by)
        probes = ["lowtri_cpuid", "lowtri_xgetbv"] if architecture == "x86_64" else []
        symbols = [job.symbol for job in jobs if job.symbol != PROBE] + probes
        index = {**wanted, "bytes": library.stat().st_size, "symbols": sorted(symbols)}
        target.mkdir(parents=True, exist_ok=True)
        (target / "index.json").unlink(missing_ok=True)
        install(library, target / library.name)
        (target / "index.json").write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")


def is_current(target: Path, wanted: dict[str, object]) -> bool:
    """Whether the folder has a library of these sources with at least these instruction sets."""
    try:
        index = json.loads((target / "index.json").read_text(encoding="utf-8"))
        size = (target / index["library"]).stat().st_size
        same = all(index[name] == wanted[name] for name in wanted if name != "isas")
        return bool(same and size == index["bytes"] and {*index["isas"]} >= {*wanted["isas"]})  # type: ignore[misc]
    except (OSError, ValueError, KeyError, TypeError):
        return False


def install(file: Path, target: Path) -> None:
    """Copy a file into place at once: a process that has loaded the old one keeps it."""
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    shutil.copyfile(file, temporary)
    temporary.chmod(0o755)
    os.replace(temporary, target)


def build_one(symbol: str, target: Path, by: str) -> None:
    """The library of one function of this machine, for a checkout; also of instruction sets that run only in tests."""
    if symbol.endswith("amx_emulated"):
        sys.path[:0] = [str(ROOT / "tests" / "support"), str(ROOT / "tests" / "kernels")]
        import_module("amx_operations")
    host = native()
    system = SYSTEMS[sys.platform]
    every = import_module("lowtri.kernels.isa").ALL  # with those that tests add
    jobs = {job.symbol: job for isa in every for job in jobs_of(isa, with_disabled=True)}
    jobs[PROBE] = Job(PROBE, host[-1])
    with tempfile.TemporaryDirectory(prefix="lowtri") as folder:
        file = Path(folder) / "kernel.o"
        library = Path(folder) / target.name
        file.write_bytes(object_of(jobs[symbol], system, host[0]))
        link([file], library, system, host[0].architecture, by)
        target.parent.mkdir(parents=True, exist_ok=True)
        install(library, target)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--isas", default="native", help="native, all, or names with commas between them")
    machines = [f"{system}-{machine}" for system in ZIG for machine in ("x86_64", "aarch64")]
    parser.add_argument("--platform", default="", choices=["", *machines], help="default: this machine's")
    parser.add_argument(
        "--cpu", default="", help="compile for this CPU, by LLVM's name, instead of every CPU with the instruction set"
    )
    parser.add_argument("--linker", default="auto", choices=["auto", "cc", "zig"])
    parser.add_argument(
        "--jobs", type=int, default=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2
    )
    parser.add_argument("--out", type=Path, default=ROOT / "src" / "lowtri" / "kernels" / "native")
    parser.add_argument("--only", default="", help="one function; --out is then its library")
    options = parser.parse_args()
    by = linker() if options.linker == "auto" else options.linker
    try:
        if options.only:
            build_one(options.only, options.out, by)
        else:
            build(options.isas, options.platform or this_platform(), options.cpu, options.jobs, by, options.out)
    except OSError as error:
        sys.exit(f"build_kernels: {options.out} cannot be written: {error.strerror}. Fix: --out names another folder.")


if __name__ == "__main__":
    main()

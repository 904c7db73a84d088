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
import importlib
import json
import multiprocessing
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    # Numba reads these when it is imported. With Intel's library, log would become a function of it.
    os.environ["NUMBA_DISABLE_INTEL_SVML"] = "1"
    os.environ["LOWTRI_BUILDS"] = "1"  # and kernels that are missing are not compiled by another process of this kind
    if os.environ.get("PYTHONHASHSEED") != "0":
        os.environ["PYTHONHASHSEED"] = "0"
        sys.exit(subprocess.run([sys.executable, *sys.argv]).returncode)
    sys.path.insert(0, str(ROOT / "src"))

SYSTEMS = {"linux": "linux", "darwin": "macos", "win32": "windows"}
ZIG = {"linux": "{}-linux-gnu.2.17", "macos": "{}-macos.11.0", "windows": "{}-windows-gnu"}
HARDENED = ["-Wl,-z,relro,-z,now,-z,noexecstack,--no-undefined,--build-id=none"]


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
    import llvmlite.binding as llvm

    from lowtri.kernels.isa import ALL, PERMISSION, Amx

    try:
        has = frozenset(name for name, present in llvm.get_host_cpu_features().items() if present) | {PERMISSION}
    except RuntimeError:  # LLVM does not know this host
        has = frozenset()
    able = [isa for isa in ALL if isa.runs_on(has, platform.machine().lower()) and isa.cpu != "native"]
    able = [isa for isa in able if (isa.architecture == "aarch64") == ("neon" in (x.name for x in able))]
    return (
        able if able[0] == Amx() and len(able) < 3 else [able[0], *(able[1:2] if able[0] == Amx() else []), *able[-1:]]
    )


def compile_one(work):  # type: ignore[no-untyped-def]
    """In a process of its own: the object file of a job, and the CPU seconds that it took."""
    from lowtri.kernels.compilation import object_of

    job, system, host, cpu, file = work
    start = time.process_time()
    Path(file).write_bytes(object_of(job, system, host, cpu))
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
    work = [(job, system, host, cpu, str(folder / f"{job.symbol}.o")) for job in jobs]
    method = "fork" if "fork" in multiprocessing.get_all_start_methods() else "spawn"
    with multiprocessing.get_context(method).Pool(workers, maxtasksperchild=1) as pool:
        for done, (symbol, seconds) in enumerate(pool.imap_unordered(compile_one, work), 1):
            progress(f"[{done:2}/{len(jobs)}] {symbol} {seconds:.1f} s")
    return [Path(file) for *_, file in work]


def build(isas: str, platform_name: str, cpu: str, workers: int, by: str, target: Path) -> None:
    """The library and its index in the folder ``target``; ``cpu`` replaces the CPU that the compiler assumes, if it is not empty."""
    from lowtri._version import __version__
    from lowtri.kernels.compilation import PROBE, Job, jobs_of
    from lowtri.kernels.isa import ALL, Baseline
    from lowtri.kernels.library import library_name, sources_hash

    host, (system, architecture) = native(), platform_name.split("-")
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
        sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "kernels")]
        importlib.import_module("amx_operations")
    from lowtri.kernels.compilation import PROBE, Job, jobs_of, object_of
    from lowtri.kernels.isa import ALL

    host, system = native(), SYSTEMS[sys.platform]
    jobs = {job.symbol: job for isa in ALL for job in jobs_of(isa, all_variants=True)} | {PROBE: Job(PROBE, host[-1])}
    with tempfile.TemporaryDirectory(prefix="lowtri") as folder:
        file, library = Path(folder) / "kernel.o", Path(folder) / target.name
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
    if find_spec("numba") is None:
        sys.exit("build_kernels: numba is not installed. Fix: pip install 'lowtri[compile]'.")
    from lowtri.kernels.library import this_platform

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

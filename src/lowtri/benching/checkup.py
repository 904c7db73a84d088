"""The report of ``lowtri doctor``: what this machine has, what is missing, and what follows.

Modules that need Numba are imported late, so that the report can also say that Numba is missing.
"""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lowtri.benching.machine import cpu_name, cpus, last_cache_bytes, load, versions
from lowtri.errors import EngineError

__all__ = ["as_text", "checkup"]

_ROUNDS = 7
_READ_BYTES = 2**27


def checkup(measure: bool = True, say: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """The report. Its ``trouble`` lists what is missing and what follows.

    Args:
        measure: also measure for about a second; what must be compiled first takes some seconds more.
        say: takes a line about what comes next.
    """
    import torch

    report: dict[str, Any] = {
        "versions": versions(),
        "cpu": {"name": cpu_name(), "machine": platform.machine(), "cpus": cpus(), "load": load()},
        "threads": {"torch": torch.get_num_threads(), "team": _team(torch)},
        "kernels": None,
        "cache": None,
        "speed": None,
        "trouble": [],
    }
    report["cpu"]["last_cache_bytes"] = last_cache_bytes()
    trouble: list[str] = report["trouble"]
    if find_spec("numba") is None:
        trouble.append(
            "numba is not installed: there are no kernels, attention runs on torch's own or on the formula, correct and slower. "
            "Fix: pip install numba."
        )
        return report
    try:
        import lowtri.compat.numba_private  # noqa: F401 - what kernels use of Numba
        from lowtri.kernels import target
    except EngineError:  # LOWTRI_ISA names what this CPU does not have
        raise
    except Exception as error:  # a Numba that does not fit its llvmlite, NumPy or Python
        trouble.append(
            f"numba cannot be loaded ({type(error).__name__}: {error}): there are no kernels, attention runs on torch's own or on "
            "the formula. Fix: pip install --upgrade numba."
        )
        return report
    isa = target.ISA
    report["kernels"] = {
        "target": isa.name,
        "rows": isa.tile[0],
        "vectors": isa.tile[1],
        "lanes": 16,
        "fma": isa.has_fma,
        "bf16_pairs": isa.has_pairs,
        "amx": target.HAS_AMX,
        "tiles": isa.has_tiles,
        "float16": target.HAS_FLOAT16,
        "features": sorted(target.features()),
    }
    report["cache"] = _cache(trouble)
    if isa.name == "baseline":
        trouble.append(
            "this CPU has neither AVX2 with FMA nor AVX-512 nor NEON: the kernels run, at a fraction of the speed."
        )
    if measure:
        missing = "forward float32" not in report["cache"]["compiled"]
        say("measuring for a second" + (", after some seconds of compiling" if missing else ""))
        report["speed"] = _speed(torch)
        report["cache"] = _cache([])  # what was compiled for this is there now
    return report


def _cache(trouble: list[str]) -> dict[str, Any]:
    """The folder of compiled code, and which of the kernels that calls choose lie in it."""
    from lowtri.kernels.compilation import cache_folder, is_compiled
    from lowtri.kernels.select import KERNELS

    folder = cache_folder()
    if folder is None:
        trouble.append(
            "the folder for compiled code cannot be written: every new process compiles again, some seconds for each kernel. "
            "Fix: LOWTRI_CACHE=FOLDER names one that can."
        )
    compiled: list[str] = []
    not_yet: list[str] = []
    for family, spec in KERNELS:
        kernel = getattr(import_module(f"lowtri.kernels.{family}"), family)
        (compiled if is_compiled(kernel, spec) else not_yet).append(
            f"{family} {spec.dtype}" + " pairs" * (spec.rows == "pairs")  # bf16 has two kernels on some CPUs
        )
    return {"folder": None if folder is None else str(folder), "compiled": compiled, "not_yet": not_yet}


def _team(torch: Any) -> str:
    """Whose threads the kernels run on, found as kernels find them."""
    if torch.__file__ is not None:
        for path in sorted((Path(torch.__file__).parent / "lib").glob("libgomp*")):
            return f"torch's own OpenMP team ({path.name})"
    return "threads of our own: torch has no libgomp"


def _speed(torch: Any) -> dict[str, float]:
    """How fast one core multiplies, reads, and computes attention: medians of interleaved runs."""
    import numpy as np

    from lowtri.benching.ceilings import in_pairs, multiply, multiply_flops, read
    from lowtri.benching.runs import torch_threads
    from lowtri.dispatch.attend import attention
    from lowtri.masks import causal

    n, d, heads = 1024, 64, 4
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, n, d, generator=generator) for _ in range(3))
    memory = np.ones(_READ_BYTES // 4, np.float32)
    pairs = in_pairs("bf16")
    tasks: dict[str, tuple[Callable[[], object], float]] = {  # what runs, and its amount of work
        "multiply": (lambda: multiply(1, False), multiply_flops(1, False)),
        "attention": (lambda: attention(q, k, v, "causal", engine="cpu"), 4 * d * int(causal().pairs(n)) * heads),
        "read": (lambda: read(memory.ctypes.data, _READ_BYTES, 1), _READ_BYTES),
    }
    if pairs:
        tasks["multiply_bf16"] = (lambda: multiply(1, True), multiply_flops(1, True))
    with torch_threads(1):
        for task, _ in tasks.values():
            task()
        seconds: dict[str, list[float]] = {name: [] for name in tasks}
        for _ in range(_ROUNDS):
            for name, (task, _amount) in tasks.items():
                start = time.perf_counter()
                task()
                seconds[name].append(time.perf_counter() - start)
    return {name: amount / statistics.median(seconds[name]) / 1e9 for name, (_, amount) in tasks.items()}


def as_text(report: dict[str, Any]) -> str:
    """The report as lines; what is missing last."""
    kernels, cache, speed, cpu = report["kernels"], report["cache"], report["speed"], report["cpu"]
    packages = ", ".join(f"{name} {number or 'missing'}" for name, number in report["versions"].items())
    busy = "" if cpu["load"] is None else f", load {cpu['load']}"
    lines = [
        ("versions", packages),
        (
            "cpu",
            f"{cpu['name']} ({cpu['machine']}), {cpu['cpus']} CPUs{busy}, last cache {cpu['last_cache_bytes'] >> 20} MB",
        ),
        (
            "threads",
            f"torch computes with {report['threads']['torch']}; the kernels run on {report['threads']['team']}",
        ),
    ]
    if kernels is not None:
        tile = (
            f"a register tile of {kernels['rows']} x {kernels['vectors']}, rows x vectors of {kernels['lanes']} floats"
        )
        source = " (set by NUMBA_CPU_FEATURES)" if "NUMBA_CPU_FEATURES" in os.environ else ""
        lines += [
            ("target", f"{kernels['target']}{source}: {tile}"),
            ("", f"fma {_yes(kernels['fma'])}, dot products of bf16 pairs {_yes(kernels['bf16_pairs'])}"),
            ("", f"AMX (tiles of bf16) {_yes(kernels['amx'])}{_amx_use(kernels)}"),
        ]
    if cache is not None:
        lines += [
            ("cache", cache["folder"] or "none"),
            (
                "",
                f"compiled: {', '.join(cache['compiled']) or 'nothing'}; at first use: {', '.join(cache['not_yet']) or 'nothing'}",
            ),
        ]
        if cache["not_yet"]:
            lines.append(("", "small calls of these run on torch until lowtri doctor --compile compiles them"))
    if speed is not None:
        bf16 = f", bf16 {speed['multiply_bf16']:.0f}" if "multiply_bf16" in speed else ""
        share = speed["attention"] / speed["multiply"]
        lines += [
            (
                "one core",
                f"multiplies float32 at {speed['multiply']:.0f} GFLOP/s{bf16}; reads memory at {speed['read']:.0f} GB/s",
            ),
            ("", f"causal attention, 1024 tokens, float32: {speed['attention']:.0f} GFLOP/s, {share:.0%} of that"),
        ]
    lines += [("missing", words) for words in report["trouble"]] or [("missing", "nothing")]
    return "\n".join(f"{name:<10}{words}".rstrip() for name, words in lines)


def _yes(answer: bool) -> str:
    return "yes" if answer else "no"


def _amx_use(kernels: dict[str, Any]) -> str:
    """Who uses AMX's tiles, where the CPU has them."""
    if kernels["tiles"]:
        return ": the kernels use it" if kernels["amx"] else ": the kernels emulate it, slowly"
    if not kernels["amx"]:
        return ""
    reason = "LOWTRI_ISA names another instruction set" if os.environ.get("LOWTRI_ISA") else "the system refuses it"
    return f": the kernels do not use it ({reason}) and torch does, so dense bf16 runs there"

"""The report of ``lowtri doctor``: what this machine has, what is missing, and what follows."""

from __future__ import annotations

import importlib
import os
import platform
from collections.abc import Callable
from typing import Any

import numpy as np

from lowtri import benching
from lowtri.compat.tested import installed_versions, untried
from lowtri.extras import is_installed, missing
from lowtri.kernels import library
from lowtri.kernels.threads import openmp_team
from lowtri.system import cpu_name, cpus, last_cache_bytes, load

_READ_BYTES = 2**27


def examine(measure: bool = True, progress: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """The report. Its ``trouble`` lists what is missing and what follows.

    Args:
        measure: also measure for about a second.
        progress: takes a line about what comes next.
    """
    torch = importlib.import_module("torch") if is_installed("torch") else None
    team = openmp_team()
    problems: list[str] = []
    threads = f"torch's own OpenMP team ({team[0]})" if team else ""
    report: dict[str, Any] = {
        "versions": benching.versions(),
        "cpu": {"name": cpu_name(), "machine": platform.machine(), "cpus": cpus(), "load": load()},
        "threads": {
            "torch": torch and torch.get_num_threads(),
            "team": threads or "Python's threads: torch has no OpenMP library that can be used",
        },
        "kernels": None,
        "library": None,
        "speed": None,
        "trouble": problems,
        "untried": untried(installed_versions()),
    }
    report["cpu"]["last_cache_bytes"] = last_cache_bytes()
    if torch is None:
        problems.append(missing("attention of tensors, with gradients, and every model", "torch"))
    if sentence := library.without_kernels():
        problems.append(sentence)
        return report
    from lowtri.kernels import target  # raises if LOWTRI_ISA names what this CPU or the library does not have

    isa = target.ISA
    index = library.index()
    report["kernels"] = {
        "target": isa.name,
        "rows": isa.register_block[0],
        "vectors": isa.register_block[1],
        "lanes": 16,
        "fma": isa.has_fma,
        "bf16_pairs": isa.has_bf16_dot,
        "amx": target.HAS_AMX,
        "tiles": isa.has_amx,
        "float16": isa.has_float16,
        "features": sorted(target.features()),
    }
    report["library"] = {
        "sets": index.get("isas", []),
        "bytes": index.get("bytes"),
        "functions": len(index.get("symbols", [])),
        "stale": index.get("reason"),  # why a checkout compiles kernels anew
    }
    if isa.name == "baseline":
        problems.append(
            "this CPU has neither AVX2 with FMA nor AVX-512 nor NEON: the kernels run, at a fraction of the speed."
        )
    if measure and torch is not None:
        progress("measuring for a second")
        report["speed"] = _speed()
    return report


def _speed() -> dict[str, float]:
    """How fast one core multiplies and computes attention, in GFLOP/s, and reads, in GB/s: medians of interleaved runs."""
    call = benching.BenchCall("forward", "causal", 1024, 64, "float32", heads=4, kv_heads=4)
    attend = benching.ours(call)
    tensors = call.tensors()
    memory = np.ones(_READ_BYTES // 4, np.float32)
    address = memory.ctypes.data
    tasks: dict[str, tuple[Callable[[], object], float]] = {  # what runs, and its amount of work
        "multiply": (lambda: benching.multiply(1, False), benching.multiply_flops(1, False) / 1e9),
        "attention": (lambda: benching.run(attend, tensors), call.amount),
        "read": (lambda: benching.read(address, _READ_BYTES, 1), _READ_BYTES / 1e9),
    }
    if benching.packs_bf16("bf16"):
        tasks["multiply_bf16"] = (lambda: benching.multiply(1, True), benching.multiply_flops(1, True) / 1e9)
    with benching.torch_threads(1):
        seconds = benching.medians({name: task for name, (task, _) in tasks.items()})
    return {name: amount / seconds[name] for name, (_, amount) in tasks.items()}


def as_text(report: dict[str, Any]) -> str:
    """The report as lines; what is missing last."""
    kernels = report["kernels"]
    built = report["library"]
    speed = report["speed"]
    cpu = report["cpu"]
    packages = ", ".join(f"{name} {number or 'missing'}" for name, number in report["versions"].items())
    busy = "" if cpu["load"] is None else f", load {cpu['load']}"
    threads = f"the kernels run on {report['threads']['team']}"
    if report["threads"]["torch"] is not None:
        threads = f"torch computes with {report['threads']['torch']}; {threads}"
    machine = (
        f"{cpu['name']} ({cpu['machine']}), {cpu['cpus']} CPUs{busy}, last cache {cpu['last_cache_bytes'] >> 20} MB"
    )
    lines = [("versions", packages), ("cpu", machine), ("threads", threads)]
    if kernels is not None:
        source = " (set by LOWTRI_ISA)" if os.environ.get("LOWTRI_ISA") else ""
        block = f"{kernels['rows']} x {kernels['vectors']}, rows x vectors of {kernels['lanes']} floats"
        lines += [
            ("target", f"{kernels['target']}{source}: a register block of {block}"),
            ("", f"fma {_yes(kernels['fma'])}, dot products of bf16 pairs {_pairs(kernels)}"),
            ("", f"AMX (tiles of bf16) {_yes(kernels['amx'])}{_amx_use(kernels)}"),
        ]
    if built is not None and built["stale"]:
        lines += [("library", f"{built['stale']}: each is compiled when it is first called, until make builds them")]
    elif built is not None:
        size = f"{built['functions']} functions, {built['bytes'] >> 10} KB"
        lines += [("library", f"kernels for {', '.join(built['sets'])}: {size}")]
    if speed is not None:
        multiply = f"{speed['multiply']:.0f} GFLOP/s"
        share = speed["attention"] / speed["multiply"]
        bf16 = f", bf16 {speed['multiply_bf16']:.0f}" if "multiply_bf16" in speed else ""
        lines += [
            ("one core", f"multiplies float32 at {multiply}{bf16}; reads memory at {speed['read']:.0f} GB/s"),
            ("", f"causal attention, 1024 tokens, float32: {speed['attention']:.0f} GFLOP/s, {share:.0%} of that"),
        ]
    lines += [("untried", words) for words in report["untried"]]
    lines += [("missing", words) for words in report["trouble"] or ["nothing"]]
    return "\n".join(f"{name:<10}{words}".rstrip() for name, words in lines)


def _yes(answer: bool) -> str:
    return "yes" if answer else "no"


def _pairs(kernels: dict[str, Any]) -> str:
    if kernels["bf16_pairs"] or "avx512bf16" not in kernels["features"] or os.environ.get("LOWTRI_ISA"):
        return _yes(kernels["bf16_pairs"])
    return "no (this CPU has them, but computes float32 faster)"


def _amx_use(kernels: dict[str, Any]) -> str:
    if kernels["tiles"]:
        return ": the kernels use it"
    if not kernels["amx"]:
        return ""
    reason = "LOWTRI_ISA names another instruction set" if os.environ.get("LOWTRI_ISA") else "the system refuses it"
    return f": the kernels do not use it ({reason}) and torch does, so dense bf16 runs there"

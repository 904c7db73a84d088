"""Every function of the library, and the same function compiled in memory, give the same bits.

On the instruction set that LOWTRI_ISA names; ``test_same_bits.py`` runs these tests in a process for each.
"""

from __future__ import annotations

from typing import Any

import amx_operations  # noqa: F401 - of the emulation
import build_kernels
import numpy as np
import pytest
import torch
from attention_cases import draw
from build_kernels import Job

import lowtri
from lowtri import benching
from lowtri.backends.cpu import launch, tables
from lowtri.backends.cpu.tables import write_hidden_bits
from lowtri.dispatch.prepared import PREPARED
from lowtri.kernels import library, target
from lowtri.kernels.target import ISA

JOBS = {job.symbol: job for job in build_kernels.jobs_of(ISA)}
MASKS = ("causal & window(40)", "full", "causal & documents(lengths=[50, 80]) & keys(lengths=[100])")


def attended(job: Job) -> list[bytes]:
    """The results of attention with the kernel of a job: with and without options, for one query, few and many."""
    results: list[Any] = []
    for seed, mask in enumerate(MASKS):
        for nq in (1, 5) if job.function == "decode" else (130,):
            q, k, v = draw(b=1, hq=4, hkv=2, nq=nq, nk=130, d=64, dv=64, seed=seed, dtype=job.spec.dtype)
            options: dict[str, Any] = {"softcap": 3.0, "sinks": torch.linspace(-1, 1, 4)} if seed == 0 else {}
            if job.function != "decode" and seed == 1:
                options["dropout"] = 0.3
            torch.manual_seed(seed)
            if job.function == "backward":
                inputs = [x.requires_grad_() for x in (q, k, v)]
                output = lowtri.attention(*inputs, mask, engine="cpu", **options)
                results += torch.autograd.grad(output, inputs, torch.ones_like(output))
            else:
                if job.function == "weights":
                    options |= {"return_weights": True, "return_received": True}
                results += lowtri.attention(q, k, v, mask, engine="cpu", return_lse=True, **options)
    return [x.detach().view(torch.uint8).numpy().tobytes() for x in results]


def alone(job: Job) -> list[bytes]:
    """The results of the kernels that read tables and measure the CPU."""
    if job.function == "hidden":
        results = []
        for dtype in ("float16", "float32", "float64"):
            numbers = np.random.default_rng(0).choice(np.array([0, 1, -np.inf, np.nan], dtype), (2, 5, 77))
            bits = np.empty((2, 5, 10), np.uint8)
            results += [bytes([write_hidden_bits(numbers, -np.inf, bits) or 0]), bits.tobytes()]
        return results
    if job.function == "read":
        numbers = np.random.default_rng(0).standard_normal(2**15, np.float32)
        return [np.float32(benching.read(numbers.ctypes.data, numbers.nbytes, 1)).tobytes()]
    return [benching.multiply(1, job.spec.operand == "bf16x2", repeats=3).tobytes()]


def same_bits(symbol: str, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether a function of the library and the function in memory give the same bits, each called at least once."""
    job, called, results = JOBS[symbol], [], []
    only = [x for x in target.VARIANTS if job.spec and x.spec.name == job.spec.name]
    if only:
        monkeypatch.setattr(target, "VARIANTS", only)
    code_in_library = library.code
    for code in (code_in_library(symbol), build_kernels.compiled(*build_kernels.function_of(job))):

        def code_of(name: str, code: library.Code = code) -> library.Code:
            called.append(name)
            return code if name == symbol else code_in_library(name)

        for module in (launch, library):
            monkeypatch.setattr(module, "code", code_of)
        PREPARED.clear()
        tables._launch.cache_clear()
        results.append((alone if job.function in ("hidden", "read", "multiply") else attended)(job))
    PREPARED.clear()
    tables._launch.cache_clear()
    assert called.count(symbol) >= 2 and any(any(part) for part in results[0])
    return results[0] == results[1]


@pytest.mark.parametrize("symbol", JOBS)
def test_the_library_and_memory_give_the_same_bits(symbol: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert same_bits(symbol, monkeypatch)

"""Sweeps of bf16 on tile registers in processes on their emulation."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from subprocesses import printed

TESTS = Path(__file__).parents[1]
START = [str(TESTS / "kernels" / "amx_at_start"), str(TESTS / "support"), os.environ.get("PYTHONPATH", "")]
EMULATED = {"LOWTRI_ISA": "amx-emulated", "PYTHONPATH": os.pathsep.join(START)}


@pytest.mark.sweep
@pytest.mark.parametrize("file", ["test_kernels_gradients.py", "test_kernels.py", "test_kernels_robust.py"])
def test_the_other_tests_of_bf16_hold_on_the_emulation(file: str) -> None:
    here = str(Path(__file__).parent / file)
    names = "bfloat16 or threads or huge or keys_of_other" if file != "test_kernels_robust.py" else "threads or loader"
    early = ("-W", "ignore::pytest.PytestAssertRewriteWarning")  # lowtri is imported before pytest starts
    printed("-m", "pytest", "-q", *early, "-p", "no:cacheprovider", "-k", names, here, timeout=900, **EMULATED)


pytestmark = [pytest.mark.x86, pytest.mark.compiler]
GUARDED = """
    import ctypes, mmap, torch, lowtri
    libc, page = ctypes.CDLL(None), mmap.PAGESIZE
    kept = []

    def at_the_end(x):
        # A copy whose last number is the last before a page that must not be read.
        size = -(-x.nbytes // page) * page
        memory = mmap.mmap(-1, size + page)
        start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        assert libc.mprotect(ctypes.c_void_p(start + size), page, 0) == 0
        bits = torch.frombuffer(memory, dtype=torch.int16, count=x.numel(), offset=size - x.nbytes)
        kept.append(memory)
        return bits.view(torch.bfloat16).view(x.shape).copy_(x)

    torch.manual_seed(0)
    for nq, nk, d, dv in ((70, 5, 32, 32), (64, 17, 64, 64), (100, 97, 31, 33), (1, 130, 16, 48), (65, 110, 96, 80), (13, 95, 1, 1)):
        x = [torch.randn(1, 2, n, size).bfloat16() for n, size in ((nq, d), (nk, d), (nk, dv), (nq, dv))]
        results = []
        for tensors in (x, [at_the_end(y) for y in x]):
            leaves = [y.detach().requires_grad_() for y in tensors[:3]]
            output = lowtri.attention(*leaves, "full", engine="cpu")
            results.append([output, *torch.autograd.grad(output, leaves, tensors[3])])
        assert all(torch.equal(a, b) for a, b in zip(*results)), (nq, nk, d, dv)
    print("nothing was read behind an array")
"""


@pytest.mark.sweep
@pytest.mark.skipif(sys.platform == "win32", reason="mprotect")
def test_nothing_is_read_behind_an_array() -> None:
    assert "nothing was read" in printed("-c", GUARDED, timeout=900, **EMULATED)

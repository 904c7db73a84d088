"""The machine code for AMX, which is compiled on any CPU and read, not run; and the sweeps of the emulation."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
START = [str(TESTS / "kernels" / "amx_at_start"), str(TESTS / "support"), os.environ.get("PYTHONPATH", "")]
EMULATED = {"LOWTRI_ISA": "amx-emulated", "PYTHONPATH": os.pathsep.join(START)}
FLAGS = "+sse4.2,+avx,+avx2,+fma,+f16c,+avx512f,+avx512bw,+avx512dq,+avx512vl,+avx512cd,+avx512bf16,+amx-tile,+amx-bf16"
COMPILED = """
    import sys
    from importlib import import_module
    from numba import cfunc, types
    from lowtri.kernels import abi, amx
    from lowtri.kernels.device import NUMBA_OPTIONS, RecordType
    from lowtri.kernels.isa import Amx
    from lowtri.kernels.spec import KernelSpec
    from lowtri.kernels.values import Matrix, Packed

    def product(call):
        amx.configure_tiles(call.scratch, call.spec)
        a, b, c = Matrix(call.k, call.k_strides.n, 64), Packed(call.q, 256), Packed(call.o, 256)
        amx.tile_product(a, b, c, call.nk, call.head_dim, 64, call.spec)
        amx.restore_tiles(call.scratch, call.spec)

    family = sys.argv[1]
    record = getattr(abi, "FORWARD" if family == "product" else family.upper())
    kernel = product if family == "product" else getattr(import_module(f"lowtri.kernels.{family}"), family)
    kind = RecordType(record.dtype, KernelSpec("bfloat16", "amx", Amx()))
    print(cfunc(types.void(kind), **NUMBA_OPTIONS)(kernel)._library.get_asm_str())
"""
CODE = ["product", *(pytest.param(family, marks=pytest.mark.sweep) for family in ("forward", "backward"))]


def run(*arguments: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def loops(asm: str) -> list[str]:
    """The bodies of innermost loops."""
    found = re.findall(r"^(\.L\w+):[^\n]*\n((?:(?!\.L\w+:).*\n)*?\tj\w+\t\1\n)", asm, re.M)
    return [body for _, body in found]


@pytest.mark.parametrize("family", CODE)
def test_amx_code_keeps_its_tiles_in_registers(family: str) -> None:
    """A block of 2 x 2 tiles: four loads and four products for each depth of 32, and no store inside of the loop.

    Where B stays in registers, 16 rows take two loads (four if C is added to), four products and the two stores of C."""
    asm = run("-c", textwrap.dedent(COMPILED), family, NUMBA_CPU_NAME="sapphirerapids", NUMBA_CPU_FEATURES=FLAGS)
    assert len(re.findall(r"\tsttilecfg", asm)) == 1 and len(re.findall(r"\tldtilecfg", asm)) == 2
    assert len(re.findall(r"\ttilerelease", asm)) == 1
    assert not re.findall(r"\ttile\w+\t.*\(%rsp", asm), "a tile on the stack"
    products = [body for body in loops(asm) if "tdpbf16ps" in body]
    stores = [body for body in products if "tilestored" in body]
    for body in stores:
        dots, loaded, stored = (body.count(name) for name in ("tdpbf16ps", "tileloadd", "tilestored"))
        if stored == dots:  # a depth of 32 queries alone: the loop over the depth is unrolled
            assert family == "backward" and 2 * loaded <= 5 * dots
        else:
            assert dots == 2 * stored and loaded in (dots // 2, dots)
    assert family == "product" or any(body.count("tdpbf16ps") == 2 * body.count("tilestored") for body in stores)
    products = [body for body in products if body not in stores]
    blocks = [body for body in products if body.count("tdpbf16ps") == body.count("tileloadd")]
    assert blocks and all("tilestored" not in body and "zmm" not in body for body in products)
    assert all(2 * body.count("tileloadd") <= 3 * body.count("tdpbf16ps") for body in products)  # a single row of tiles
    if family != "product":
        assert "vscalefps" in asm and "vreduceps" in asm and "vcvtne2ps2bf16" in asm


@pytest.mark.sweep
@pytest.mark.parametrize("file", ["test_kernels_gradients.py", "test_kernels.py", "test_kernels_robust.py"])
def test_the_other_tests_of_bf16_hold_on_the_emulation(file: str) -> None:
    here = str(Path(__file__).parent / file)
    names = "bfloat16 or threads or huge or keys_of_other" if file != "test_kernels_robust.py" else "threads or loader"
    early = ("-W", "ignore::pytest.PytestAssertRewriteWarning")  # lowtri is imported before pytest starts
    run("-m", "pytest", "-q", *early, "-p", "no:cacheprovider", "-k", names, here, **EMULATED)


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
    assert "nothing was read" in run("-c", textwrap.dedent(GUARDED), **EMULATED)

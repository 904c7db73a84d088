"""The machine code of decode for AVX-512 and for NEON, which is compiled on any CPU and read, not run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from functools import cache

import pytest

COMPILED = """
    import re, sys
    import llvmlite.binding as llvm
    from numba import cfunc, types
    from lowtri.kernels import abi, isa
    from lowtri.kernels.decode import decode
    from lowtri.kernels.device import NUMBA_OPTIONS, RecordType
    from lowtri.kernels.spec import KernelSpec

    name, dtype, rows = sys.argv[1:]
    spec = KernelSpec(dtype, rows, next(x for x in isa.ALL if x.name == name))
    compiled = cfunc(types.void(RecordType(abi.DECODE.dtype, spec)), **NUMBA_OPTIONS)(decode)
    if name != "neon":
        print(compiled._library.get_asm_str())
    else:
        llvm.initialize_all_targets(); llvm.initialize_all_asmprinters()
        machine = llvm.Target.from_triple("aarch64-unknown-linux-gnu").create_target_machine(opt=3)
        text = re.sub(r"(?m)^target (datalayout|triple).*$", "", compiled.inspect_llvm())
        module = llvm.parse_assembly(re.sub(r'"target-(cpu|features)"="[^"]*"', "", text))
        module.triple = "aarch64-unknown-linux-gnu"
        print(machine.emit_assembly(module))
"""
FLAGS = "+sse4.2,+avx,+avx2,+fma,+f16c,+avx512f,+avx512bw,+avx512dq,+avx512vl,+avx512cd"
# Called once for a part of the cache or for an output, never for a key; the rest is Numba's, for errors that the kernel does not raise.
ALLOWED = {"exp2f", "log2f", "logf", "memset"}
LOOP = r"^(\.L\w+):[^\n]*\n((?:(?!\.L\w+:).*\n)*?\t(?:j\w+|b\.\w+|cbn?z|tbn?z)\t(?:.*, )?\1\n)"  # an innermost one


WAYS = [("float16", "widened"), pytest.param("float32", "direct", marks=pytest.mark.sweep)]
pytestmark = pytest.mark.compiler
by_way = pytest.mark.parametrize(("dtype", "rows"), WAYS)


@cache
def code(isa: str, dtype: str, rows: str) -> str:
    """The text, compiled once for all tests. The features are given, so that it is the same on every host."""
    flags = {"NUMBA_CPU_NAME": "skylake-avx512", "NUMBA_CPU_FEATURES": FLAGS, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(COMPILED), isa, dtype, rows],
        env={**os.environ, **flags},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def loops(asm: str, operation: str) -> list[str]:
    """The bodies of the innermost loops that have the operation."""
    return [body for _, body in re.findall(LOOP, asm, re.M) if re.search(operation, body)]


def count(operation: str, text: str) -> int:
    return len(re.findall(operation, text))


@pytest.mark.x86
@by_way
def test_avx512_multiplies_whole_vectors(dtype: str, rows: str) -> None:
    """16 multiply-adds on zmm registers in a loop, without spills: 2 keys x 8 queries, 4 queries x 4 vectors of values, 2 x 8."""
    asm, fused = code("avx512", dtype, rows), r"\tvfmadd\w+ps\t.*%zmm"
    bodies = loops(asm, fused)
    for body in bodies:
        assert not re.search(r"%[xy]mm|\(%rsp.*%zmm|%zmm\d+, .*\(%rsp|\tcall", body), body
    assert not re.search(r"\tvfn?m(add|sub)\w+(s[sd]\t|.*%[xy]mm)", asm)
    # Numbers of float16 are converted 16 at a time, each vector once for all multiply-adds of its loop.
    converted = [count(r"\tvcvtph2ps\t", body) for body in bodies if count(fused, body) == 16]
    assert set(converted) - {0} == ({2, 4} if dtype == "float16" else set()) and len(converted) > 2


@by_way
def test_neon_multiplies_whole_vectors(dtype: str, rows: str) -> None:
    """A vector of 64 bytes is four registers. 2 keys x 4 queries are 32 multiply-adds in a loop."""
    asm, fused = code("neon", dtype, rows), r"\tfmla\tv\d+\.4s"
    bodies = loops(asm, fused)
    for body in bodies:
        assert not re.search(r"\tf\w+\t[hsd]\d|\tblr?\t", body), body
    assert not re.search(r"\tfn?m(add|sub)\t", asm)
    # Numbers of float16 are converted four at a time: 2 keys x 16 numbers.
    converted = [count(r"\tfcvtl2?\tv\d+\.4s", body) for body in bodies if count(fused, body) >= 32]
    assert len(converted) > 1 and set(converted) - {0} == ({8} if dtype == "float16" else set())  # 0: exponentials


@pytest.mark.parametrize("isa", [pytest.param("avx512", marks=pytest.mark.x86), "neon"])
@by_way
def test_no_library_function_multiplies_or_converts(isa: str, dtype: str, rows: str) -> None:
    """Where an instruction is missing, LLVM calls a library function, which is slow and which not every system has."""
    names = re.findall(r"\t(?:movabsq\t\$|callq?\t|bl\t)([A-Za-z_]\w*)", code(isa, dtype, rows))
    assert {name for name in names if not name.startswith(("_ZN", "numba_", "Py"))} <= ALLOWED

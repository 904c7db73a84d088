"""The machine code of the kernels for AVX-512, AMX and NEON."""

from __future__ import annotations

import re

import pytest
from machine_code import code, loops

from lowtri.kernels.simd import DEGREES

pytestmark = pytest.mark.compiler
WAYS = [("float32", "direct"), ("bfloat16", "bf16x2"), ("float64", "direct")]
by_way = pytest.mark.parametrize(("dtype", "operand"), WAYS)
by_decode_way = pytest.mark.parametrize(
    ("dtype", "operand"), [("float16", "widened"), pytest.param("float32", "direct", marks=pytest.mark.sweep)]
)
# Called once for a part of the cache or for an output, never for a key; the rest is Numba's, for errors that the kernel does not raise.
ALLOWED = {"exp2f", "log2f", "logf", "memset"}


def count(operation: str, text: str) -> int:
    return len(re.findall(operation, text))


@pytest.mark.sweep
@pytest.mark.x86
@by_way
def test_avx512_keeps_the_register_tile_of_each_product(dtype: str, operand: str) -> None:
    """6 rows x 4 vectors of 512 bits: 24 multiply-adds for 6 broadcasts and 4 loads, without spills."""
    bodies = loops(code("packed_product", "avx512-bf16", dtype, operand), "zmm")
    most = max(count(r"vfmadd\w+p[sd]\t.*zmm|vdpbf16ps.*zmm", body) for body in bodies)
    assert most > 0 and most % 24 == 0
    assert not any("(%rsp)" in line and "zmm" in line for body in bodies for line in body.splitlines())


@pytest.mark.x86
@pytest.mark.sweep
@by_way
@pytest.mark.parametrize("family", ["forward", "backward"])
def test_whole_kernels_compile_for_avx512_and_bf16(family: str, dtype: str, operand: str) -> None:
    asm = code(family, "avx512-bf16", dtype, operand, cpu="znver4")
    assert (count("vdpbf16ps", asm) > 100) == (dtype == "bfloat16")
    assert count(r"vfmadd\w+p[sd]", asm) > 20 and count("vscalefp", asm) > 0


@by_way
def test_neon_code_is_generated_for_arm(dtype: str, operand: str) -> None:
    assert count(r"\tfmla\tv", code("packed_product", "neon", dtype, operand)) >= 24


@pytest.mark.x86
@pytest.mark.parametrize(("dtype", "operand"), [*WAYS, ("float16", "widened")])
def test_the_exponential_takes_two_instructions_of_avx512_and_the_polynomial(dtype: str, operand: str) -> None:
    """For each vector: a fraction, a multiply-add for each degree, a scale; with the shift, one more multiply-add."""
    asm = code("powers", "avx512-bf16", dtype, operand)
    copies = count("vreducep", asm)  # of the loop's body: LLVM unrolls it
    assert count("vscalefp", asm) == copies > 0 and count("vrndscale|vcmp|vmaxp|vcvttp|vpsll", asm) == 0
    assert count("vfmadd", asm) == copies * (DEGREES[dtype] + 1)
    assert count("vmulp|vaddp|vsubp", asm) == copies * (dtype == "float64")


# Decode.


@pytest.mark.sweep
@pytest.mark.x86
@by_decode_way
def test_avx512_multiplies_whole_vectors(dtype: str, operand: str) -> None:
    """16 multiply-adds on zmm registers in a loop, without spills: 2 keys x 8 queries, 4 queries x 4 vectors of values, 2 x 8."""
    asm, fused = code("decode", "avx512", dtype, operand), r"\tvfmadd\w+ps\t.*%zmm"
    bodies = loops(asm, fused)
    for body in bodies:
        assert not re.search(r"%[xy]mm|\(%rsp.*%zmm|%zmm\d+, .*\(%rsp|\tcall", body), body
    assert not re.search(r"\tvfn?m(add|sub)\w+(s[sd]\t|.*%[xy]mm)", asm)
    # Numbers of float16 are converted 16 at a time, each vector once for all multiply-adds of its loop.
    converted = [count(r"\tvcvtph2ps\t", body) for body in bodies if count(fused, body) == 16]
    assert set(converted) - {0} == ({2, 4} if dtype == "float16" else set()) and len(converted) > 2


@pytest.mark.sweep
@by_decode_way
def test_neon_multiplies_whole_vectors(dtype: str, operand: str) -> None:
    """A vector of 64 bytes is four registers. 2 keys x 4 queries are 32 multiply-adds in a loop."""
    asm, fused = code("decode", "neon", dtype, operand), r"\tfmla\tv\d+\.4s"
    bodies = loops(asm, fused)
    for body in bodies:
        assert not re.search(r"\tf\w+\t[hsd]\d|\tblr?\t", body), body
    assert not re.search(r"\tfn?m(add|sub)\t", asm)
    # Numbers of float16 are converted four at a time: 2 keys x 16 numbers.
    converted = [count(r"\tfcvtl2?\tv\d+\.4s", body) for body in bodies if count(fused, body) >= 32]
    assert len(converted) > 1 and set(converted) - {0} == ({8} if dtype == "float16" else set())  # 0: exponentials


@pytest.mark.parametrize("isa", [pytest.param("avx512", marks=pytest.mark.x86), "neon"])
@by_decode_way
def test_no_library_function_multiplies_or_converts(isa: str, dtype: str, operand: str) -> None:
    """Where an instruction is missing, LLVM calls a library function, which is slow and which not every system has."""
    names = re.findall(r"\t(?:movabsq\t\$|callq?\t|bl\t)([A-Za-z_]\w*)", code("decode", isa, dtype, operand))
    assert {name for name in names if not name.startswith(("_ZN", "numba_", "Py"))} <= ALLOWED


# AMX.


@pytest.mark.x86
@pytest.mark.parametrize(
    "kernel", ["product_on_tiles", *(pytest.param(name, marks=pytest.mark.sweep) for name in ("forward", "backward"))]
)
def test_amx_code_keeps_its_tiles_in_registers(kernel: str) -> None:
    """A block of 2 x 2 tiles: four loads and four products for each depth of 32, and no store inside of the loop.

    Where B stays in registers, 16 rows take two loads (four if C is added to), four products and the two stores of C."""
    asm = code(kernel, "amx", "bfloat16", "amx")
    assert count(r"\tsttilecfg", asm) == 1 and count(r"\tldtilecfg", asm) == 2 and count(r"\ttilerelease", asm) == 1
    assert not re.findall(r"\ttile\w+\t.*\(%rsp", asm), "a tile on the stack"
    products = loops(asm, "tdpbf16ps")
    stores = [body for body in products if "tilestored" in body]
    for body in stores:
        dots, loaded, stored = (body.count(name) for name in ("tdpbf16ps", "tileloadd", "tilestored"))
        if stored == dots:  # a depth of 32 queries alone: the loop over the depth is unrolled
            assert kernel == "backward" and 2 * loaded <= 5 * dots
        else:
            assert dots == 2 * stored and loaded in (dots // 2, dots)
    assert kernel == "product_on_tiles" or any(
        body.count("tdpbf16ps") == 2 * body.count("tilestored") for body in stores
    )
    products = [body for body in products if body not in stores]
    blocks = [body for body in products if body.count("tdpbf16ps") == body.count("tileloadd")]
    assert blocks and all("zmm" not in body for body in products)
    assert all(2 * body.count("tileloadd") <= 3 * body.count("tdpbf16ps") for body in products)  # a single row of tiles
    if kernel != "product_on_tiles":
        assert "vscalefps" in asm and "vreduceps" in asm and "vcvtne2ps2bf16" in asm

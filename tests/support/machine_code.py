"""The machine code of kernels for other CPUs, which is compiled on any CPU and read, not run."""

from __future__ import annotations

import re
from functools import cache

from subprocesses import printed

__all__ = ["code", "loops"]

COMPILED = """
    import re, sys
    from importlib import import_module

    import llvmlite.binding as llvm
    from numba import cfunc, types

    from lowtri.kernels import abi, amx, isa, product
    from lowtri.kernels.device import NUMBA_OPTIONS, RecordType
    from lowtri.kernels.simd import exp2, fma, load, store
    from lowtri.kernels.spec import KernelSpec
    from lowtri.kernels.values import Matrix, Packed

    def packed_product(call):
        a, b, c = Matrix(call.k, call.k_strides.n, 1), Packed(call.q, 64), Packed(call.o, 64)
        product.product(a, b, c, call.nk, call.head_dim, 0, 64, call.spec)

    def product_on_tiles(call):
        amx.configure_tiles(call.scratch, call.spec)
        a, b, c = Matrix(call.k, call.k_strides.n, 64), Packed(call.q, 256), Packed(call.o, 256)
        amx.tile_product(a, b, c, call.nk, call.head_dim, 64, call.spec)
        amx.restore_tiles(call.scratch, call.spec)

    def powers(call):
        for offset in range(0, call.nk, 64):
            score, scale, shift = load(call.q + offset, call.spec), load(call.v, call.spec), load(call.k, call.spec)
            store(call.q + offset, exp2(fma(score, scale, shift, call.spec), call.spec))

    kernel, name, *ways = sys.argv[1:]
    function = globals().get(kernel) or getattr(import_module(f"lowtri.kernels.{kernel}"), kernel)
    record = getattr(abi, kernel.upper(), abi.FORWARD)
    if name == "neon":
        llvm.initialize_all_targets(); llvm.initialize_all_asmprinters()
        machine = llvm.Target.from_triple("aarch64-unknown-linux-gnu").create_target_machine(opt=3)
    for way in ways:
        spec = KernelSpec(*way.split(), next(x for x in isa.ALL if x.name == name))
        compiled = cfunc(types.void(RecordType(record.dtype, spec)), **NUMBA_OPTIONS)(function)
        print(way)
        if name != "neon":
            print(compiled._library.get_asm_str())
            continue
        text = re.sub(r"(?m)^target (datalayout|triple).*$", "", compiled.inspect_llvm())
        module = llvm.parse_assembly(re.sub(r'"target-(cpu|features)"="[^"]*"', "", text))
        module.triple = "aarch64-unknown-linux-gnu"
        print(machine.emit_assembly(module))
"""
AVX512 = "+sse4.2,+avx,+avx2,+fma,+f16c,+avx512f,+avx512bw,+avx512dq,+avx512vl,+avx512cd"
# The features are given, so that the code is the same on every host.
CPUS = {
    "avx512": ("skylake-avx512", AVX512),
    "avx512-bf16": ("sapphirerapids", f"{AVX512},+avx512bf16"),
    "amx": ("sapphirerapids", f"{AVX512},+avx512bf16,+amx-tile,+amx-bf16"),
    "neon": ("skylake-avx512", AVX512),  # whose text is then compiled for ARM
}
LOOP = r"^(\.L\w+):[^\n]*\n((?:(?!\.L\w+:).*\n)*?\t(?:j\w+|b\.\w+|cbn?z|tbn?z)\t(?:.*, )?\1\n)"  # an innermost one


WAYS = ("float32 direct", "bfloat16 bf16x2", "float64 direct")
TOGETHER = {
    "packed_product": WAYS,
    "powers": (*WAYS, "float16 widened"),
}  # small: one process compiles them for all ways


def code(kernel: str, isa: str, dtype: str, operand: str, cpu: str = "") -> str:
    """The assembly of a kernel, or of a small function above, for an instruction set."""
    way = f"{dtype} {operand}"
    ways = TOGETHER.get(kernel, (way,))
    parts = re.split(rf"^({'|'.join(ways)})$", _compiled(kernel, isa, ways, cpu), flags=re.M)
    return parts[parts.index(way) + 1]


@cache
def _compiled(kernel: str, isa: str, ways: tuple[str, ...], cpu: str) -> str:
    """Compiled once for all tests."""
    default, features = CPUS[isa]
    variables = {"NUMBA_CPU_NAME": cpu or default, "NUMBA_CPU_FEATURES": features}
    return printed("-c", COMPILED, kernel, isa, *ways, timeout=900, **variables)


def loops(asm: str, operation: str) -> list[str]:
    """The bodies of the innermost loops that have the operation."""
    return [body for _, body in re.findall(LOOP, asm + "\n", re.M) if re.search(operation, body)]

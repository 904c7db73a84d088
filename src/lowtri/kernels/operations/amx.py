"""The operations of Intel's AMX, on eight tile registers of 16 rows of 64 bytes. One instruction multiplies two into a third.

C (16 x 16 float32) += A (16 rows of 32 bf16) B (16 rows of pairs x 16): row k of B holds, for each column, the numbers 2k and 2k + 1
of the depth. The even and the odd numbers of the depth are summed separately, from 0, and both sums are then added to C. Denormal
numbers count as 0. Source: Intel, Architecture Instruction Set Extensions Programming Reference (2020), chapter 3.

Tile configuration is a state of the thread. Libraries such as oneDNN remember which configuration they loaded, so it must be
restored. Linux grants a process the use of tile data on request; :mod:`lowtri.kernels.target` requests it.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from lowtri.kernels.operations.avx512_bf16 import Avx512Bf16Operations
from lowtri.kernels.operations.baseline import call, constant, integers

__all__ = ["TILE_ROWS", "AmxOperations", "pair_weights"]

TILE_ROWS, TILE_ROW_BYTES = 16, 64

_I8, _I16, _I32, _I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
_BYTE = _I8.as_pointer()

# The 64 bytes of a configuration: palette 1; at byte 16 eight row lengths in 16 bits; at byte 48 eight row counts in 8 bits.
_ROW_LENGTHS = TILE_ROW_BYTES * 0x0001_0001_0001_0001
_ROW_COUNTS = TILE_ROWS * 0x0101_0101_0101_0101
_CONFIGURATION = (1, 0, _ROW_LENGTHS, _ROW_LENGTHS, 0, 0, _ROW_COUNTS, 0)


class AmxOperations(Avx512Bf16Operations):
    def pair_weights(self, b: Any, low: Any, high: Any) -> Any:
        return pair_weights(b, low, high)

    def tile_registers(self, b: Any, count: int) -> list[Any]:
        """The first ``count`` tile registers."""
        return [ir.Constant(_I8, n) for n in range(count)]

    def tile_zero(self, b: Any, tile: Any) -> None:
        _void(b, "tilezero", [tile])

    def tile_load(self, b: Any, tile: Any, address: Any, row_step: Any) -> None:
        """Load 16 rows of 64 bytes, ``row_step`` bytes apart."""
        _void(b, "tileloadd64", [tile, b.inttoptr(address, _BYTE), row_step])

    def tile_store(self, b: Any, tile: Any, address: Any, row_step: Any) -> None:
        _void(b, "tilestored64", [tile, b.inttoptr(address, _BYTE), row_step])

    def tile_dot(self, b: Any, tile: Any, x: Any, y: Any) -> None:
        """tile += x y."""
        _void(b, "tdpbf16ps", [tile, x, y])

    def tile_configure(self, b: Any, memory: Any) -> None:
        """Save the thread's configuration in 64 bytes of memory, and load that of whole tiles, kept in the next 64 bytes."""
        _void(b, "sttilecfg", [b.inttoptr(memory, _BYTE)])
        ours = b.add(memory, ir.Constant(_I64, 64))
        for n, word in enumerate(_CONFIGURATION):
            address = b.inttoptr(b.add(ours, ir.Constant(_I64, 8 * n)), _I64.as_pointer())
            b.store(ir.Constant(_I64, word), address, align=8)
        _void(b, "ldtilecfg", [b.inttoptr(ours, _BYTE)])

    def tile_restore(self, b: Any, memory: Any) -> None:
        """Restore the saved configuration; if there was none (palette 0), release the tiles."""
        saved = b.inttoptr(memory, _BYTE)
        palette = b.load(saved, align=1)
        with b.if_else(b.icmp_unsigned("==", palette, ir.Constant(_I8, 0))) as (then, otherwise):
            with then:
                _void(b, "tilerelease", [])
            with otherwise:
                _void(b, "ldtilecfg", [saved])


def pair_weights(b: Any, low: Any, high: Any) -> Any:
    """16 pairs from two vectors of floats that are at least 0, rounded to the nearest; ties away from 0.

    These are operations of integers, which do not use the units that multiply: the instruction takes two cycles of each, and its lanes
    need a permutation.
    """
    kind, shorts = integers(low.type), ir.VectorType(_I16, 32)
    half = constant(kind, 0x8000)
    lower = b.lshr(b.add(b.bitcast(low, kind), half), constant(kind, 16))
    upper = b.add(b.bitcast(high, kind), half)
    order = [32 + n if n % 2 else n for n in range(32)]
    both = [b.bitcast(x, shorts) for x in (lower, upper)]
    return b.bitcast(b.shuffle_vector(*both, ir.Constant(ir.VectorType(_I32, 32), order)), low.type)


def _void(b: Any, name: str, arguments: list[Any]) -> None:
    call(b, f"llvm.x86.{name}", ir.VoidType(), arguments)

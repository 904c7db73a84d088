"""Instruction sets: which CPU features each needs, and the shapes of the blocks that fit its registers.

An instruction set is a class; it inherits the facts of the one that it extends. Its instructions are in
:mod:`lowtri.kernels.operations`. ``ALL`` lists them, the fastest first.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import NamedTuple

PERMISSION = "amx-permission"  # no feature of the CPU: the operating system grants tile data to this process


# How the rows of Q, K and V enter a product: the four modes of operands, of which lowtri.kernels.spec says more.
DIRECT = "direct"
WIDENED = "widened"
BF16X2 = "bf16x2"
AMX = "amx"


class DecodeShape(NamedTuple):
    """How a block of queries reads a cache."""

    keys: int  # multiplied at once
    keys_ahead: int  # of the row that is prefetched; 0: four keys at once load later rows in time
    rows: int  # of weights, multiplied with
    vectors: int  # of a value's row at once
    values_ahead: int  # of the row that is prefetched; 0: nothing is


_LEVEL_3 = "avx avx2 bmi bmi2 crc32 cx16 f16c fma lzcnt movbe popcnt sahf sse3 sse4.1 sse4.2 ssse3 xsave"
_LEVEL_4 = "avx512bw avx512cd avx512dq avx512f avx512vl"


class Baseline:
    """What every CPU has."""

    name = "baseline"
    architecture = "x86_64"  # of the code that is built
    cpu = "x86-64"  # LLVM's name of the CPU whose timing the compiler assumes
    features: frozenset[str] = frozenset()  # required of the CPU, by LLVM's names; code is compiled for these
    has_float16 = False  # instructions that convert float16; without them LLVM calls functions that may be missing
    has_fma = False  # without the instruction llvm.fma is a slow library call
    has_bf16_dot = False  # one instruction for a dot product of pairs of bf16
    has_bfmmla = False  # one instruction for a product of 2 x 4 and 4 x 2 bf16
    has_amx = False  # one instruction for a product of tiles of bf16
    has_scale = False  # one instruction for x * 2 ** n, and one for the fraction of x
    # A product keeps rows x vectors accumulators in registers. The block changes the speed, not the result.
    register_block = (2, 1, 2)  # rows, vectors; rows of a block one vector wide
    bf16_register_block = (2, 1, 2)  # the same for pairs of bf16
    whole_vectors = False  # 64 bytes fit into a register
    # How few queries read a cache, by the kind of operand ("any" if it has none of its own) and the number of queries in a block.
    # CPUs prefetch by themselves, but not past a 4 KB page.
    decode_shapes = MappingProxyType(
        {("any", 4): DecodeShape(2, 64, 4, 1, 64), ("any", 1): DecodeShape(4, 64, 1, 1, 64)}
    )

    def runs_on(self, features: frozenset[str], machine: str) -> bool:
        """Whether a CPU with these features supports it."""
        return self.features <= features


class Avx2(Baseline):
    """AVX2 with FMA: sixteen registers of 256 bits, two for a vector; 6 x 1 accumulators fill twelve of them."""

    name = "avx2"
    cpu = "x86-64-v3"
    features = frozenset(_LEVEL_3.split())
    has_float16 = True
    has_fma = True
    register_block = (6, 1, 6)
    bf16_register_block = (4, 1, 4)  # the two halves of B's pairs take four registers


class Avx512(Avx2):
    """AVX-512: 32 registers of 512 bits; 6 x 4 accumulators leave room for four loads and a broadcast."""

    name = "avx512"
    cpu = "x86-64-v4"
    features = Avx2.features | set(_LEVEL_4.split())
    has_scale = True
    register_block = bf16_register_block = (6, 4, 16)
    whole_vectors = True
    # Intel's cores gain by prefetches beside their own prefetcher: rows are fetched some keys ahead (Emerald Rapids, D 128, shares of
    # a loop that reads, without and with it: one query of half types 0.63 and 0.86, four of float32 0.68 and 0.92).
    decode_shapes = MappingProxyType(
        {
            ("any", 8): DecodeShape(2, 64, 4, 4, 64),
            ("any", 4): DecodeShape(2, 64, 4, 4, 64),
            ("any", 1): DecodeShape(1, 8, 1, 8, 8),
            (DIRECT, 4): DecodeShape(4, 8, 2, 8, 8),
            (WIDENED, 1): DecodeShape(1, 16, 1, 8, 16),
        }
    )


class Avx512Bf16(Avx512):
    """AVX-512 with its bf16 instructions: dot products of pairs, and rounding to bf16."""

    name = "avx512-bf16"
    features = Avx512.features | {"avx512bf16"}
    has_bf16_dot = True
    # AMD's cores: whole rows in memory's order, which the CPU's own prefetcher follows, with more lines on the way than instructions
    # can ask for. Products of four queries in half types take as long as reading, and lose more by adding up more often than they gain.
    decode_shapes = MappingProxyType(
        {
            ("any", 8): DecodeShape(2, 64, 4, 4, 64),
            ("any", 4): DecodeShape(2, 64, 4, 4, 64),
            ("any", 1): DecodeShape(1, 8, 1, 8, 8),
            (DIRECT, 4): DecodeShape(4, 0, 2, 8, 0),
            (BF16X2, 4): DecodeShape(2, 64, 2, 8, 0),
            (BF16X2, 1): DecodeShape(1, 16, 1, 8, 16),
            (WIDENED, 1): DecodeShape(1, 0, 1, 8, 0),
        }
    )


class Amx(Avx512Bf16):
    """Intel's AMX: eight tile registers, and one instruction that multiplies two of them into a third."""

    name = "amx"
    features = Avx512Bf16.features | {"amx-tile", "amx-bf16", PERMISSION}
    has_amx = True
    decode_shapes = Avx512.decode_shapes


class Neon(Baseline):
    """NEON, on every 64-bit ARM: 32 registers of 128 bits, four for a vector; 6 x 1 accumulators fill 24 of them."""

    name = "neon"
    architecture = "aarch64"
    cpu = "generic"
    has_float16 = True
    has_fma = True
    register_block = (6, 1, 6)
    bf16_register_block = (4, 1, 4)

    def runs_on(self, features: frozenset[str], machine: str) -> bool:
        return machine in ("arm64", "aarch64") and self.features <= features


class NeonBf16(Neon):
    """NEON with the bf16 instructions of ARMv8.6 (Apple M2, Neoverse V1, N2, V2): dot products of pairs, blocks, and rounding."""

    name = "neon-bf16"
    features = frozenset({"bf16"})
    has_bf16_dot = True
    has_bfmmla = True
    bf16_register_block = (4, 1, 4)  # 16 blocks; with 24, the compiler moves accumulators around


ALL: tuple[Baseline, ...] = (Amx(), Avx512Bf16(), Avx512(), Avx2(), NeonBf16(), Neon(), Baseline())


def fastest_first(vendor: str) -> list[Baseline]:
    """All instruction sets in the order of preference on the CPUs of a vendor, by CPUID's name ("" if it is not known).

    On AMD's cores a dot product of pairs of bf16 takes as long as one multiplication and addition of float32, half a cycle, and does
    twice the work. On Intel's it takes more than two cycles (measured on Sapphire Rapids and Emerald Rapids), four times as long, so
    that float32 is twice as fast.
    """
    order = list(ALL)
    if vendor == "GenuineIntel":
        pairs = next(isa for isa in order if type(isa) is Avx512Bf16)
        order.remove(pairs)
        single = next(place for place, isa in enumerate(order) if type(isa) is Avx512)
        order.insert(single + 1, pairs)
    return order

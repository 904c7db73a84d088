"""The operations that differ between instruction sets, as LLVM code: ``operations_of(isa)``.

A class inherits the operations of the instruction set that it extends; an instruction set without a class of its own has those of the
nearest one that it inherits from.
"""

from __future__ import annotations

from functools import cache

from lowtri.kernels import isa
from lowtri.kernels.operations.amx import AmxOperations
from lowtri.kernels.operations.avx512 import Avx512Operations
from lowtri.kernels.operations.avx512_bf16 import Avx512Bf16Operations
from lowtri.kernels.operations.baseline import Operations
from lowtri.kernels.operations.neon import NeonBf16Operations, NeonOperations

__all__ = ["operations_of"]

_OPERATIONS: dict[type[isa.Baseline], type[Operations]] = {
    isa.Baseline: Operations,
    isa.Avx512: Avx512Operations,
    isa.Avx512Bf16: Avx512Bf16Operations,
    isa.Amx: AmxOperations,
    isa.Neon: NeonOperations,
    isa.NeonBf16: NeonBf16Operations,
}


@cache
def operations_of(instruction_set: isa.Baseline) -> Operations:
    """The operations of an instruction set."""
    return next(_OPERATIONS[kind](instruction_set) for kind in type(instruction_set).__mro__ if kind in _OPERATIONS)

"""AMX's tile registers on vectors, for tests on CPUs without AMX; importing this file adds the instruction set to lowtri's.

It is slow, and used only by name: ``LOWTRI_ISA=amx-emulated``. Its operations are in ``kernels/amx_operations.py``, which needs Numba.
Kernels that were compiled with it are in ``build/kernels``; delete that folder after a change here or there.
"""

from __future__ import annotations

from lowtri.kernels import isa

__all__ = ["AmxEmulated", "with_tiles"]


class AmxEmulated(isa.Baseline):
    name = "amx-emulated"
    cpu = "native"  # compiled for this machine's best instruction set, so that tests take less time
    has_amx = True


isa.ALL = (*isa.ALL, AmxEmulated())


def with_tiles() -> isa.Baseline:
    """This CPU's instruction set if it has tile registers, else the emulation."""
    from lowtri.kernels.target import ISA

    return ISA if ISA.has_amx else AmxEmulated()

"""The backend ``cpu``: the kernels, on CPU tensors and NumPy arrays.

Where there is no library of kernels for this machine, ``supports`` gives the reason.
"""

from __future__ import annotations

from lowtri.backends.base import Prepared
from lowtri.backends.cpu.prepared import PreparedKernels
from lowtri.backends.cpu.specs import FEW_QUERIES, is_decoded, kernel_spec
from lowtri.kernels import library
from lowtri.kernels.variants import symbol
from lowtri.ops.call import Call
from lowtri.ops.distance_bias import first_pair

__all__ = ["name", "prepare", "supports", "why_wait"]

name = "cpu"

_MULTIPLICATIONS = 2**25  # from here on a call may wait seconds for the compiler
_NUMBERS = 2**20  # the same of keys and values, for few queries: 4 MB in float32


def supports(call: Call) -> str | None:
    """Reject what the kernels do not implement."""
    if call.device != "cpu":
        return f"the tensors are on {call.device}"
    reason = library.unusable() or call.opaque
    if reason:
        return reason
    if call.dropout:
        return "it does not drop weights"
    if call.return_weights:
        return "it does not return weights"
    if call.distance_low is not None and first_pair(call) is None:
        return "it reads a bias over distances at consecutive positions only"
    if 0 in call.q.shape or 0 in call.v.shape:
        return "there is nothing to attend to"
    return None


def why_wait(call: Call) -> str | None:
    """Why a small call would wait for a kernel to be compiled, in a checkout whose sources have changed; None if it would not."""
    batch, heads, kv_heads, nq, nk, d, dv = call.sizes
    if nq < FEW_QUERIES:
        small = not _whole_vectors(call) or batch * kv_heads * nk * (d + dv) < _NUMBERS
    else:
        small = batch * heads * nq * nk * (d + dv) < _MULTIPLICATIONS
    if not small or call.device != "cpu" or _is_ready(call):
        return None
    return "a kernel is not compiled yet, and a small call does not wait for it: make"


def _whole_vectors(call: Call) -> bool:
    """Whether the decode kernel can read the rows in whole vectors."""
    *_, d, dv = call.sizes
    return d % 32 == 0 and dv % 16 == 0


def _is_ready(call: Call) -> bool:
    """Whether the library holds every kernel that the call needs."""
    if library.unusable():
        return False
    families = ("forward", "backward") if call.needs_grad else ("decode",) if is_decoded(call) else ("forward",)
    spec = kernel_spec(families[0], call)
    return all(library.holds(symbol(family, spec)) for family in families)


def prepare(call: Call) -> Prepared:
    return PreparedKernels(call)

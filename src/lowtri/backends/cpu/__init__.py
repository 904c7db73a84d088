"""The backend ``cpu``: the kernels, on CPU tensors and NumPy arrays.

Numba is imported late; where it is missing, ``supports`` gives the reason.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

from lowtri.backends.base import Prepared
from lowtri.backends.cpu.prepared import PreparedKernels
from lowtri.backends.cpu.ready import compiled_before
from lowtri.backends.cpu.specs import FEW_QUERIES, is_decoded, kernel_spec
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
    reason = _numba_missing() or call.opaque
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
    """Why a small call would wait for Numba to compile a kernel, or to be imported for NumPy arrays; None if it would not."""
    batch, heads, kv_heads, nq, nk, d, dv = call.sizes
    if nq < FEW_QUERIES:
        small = not _whole_vectors(call) or batch * kv_heads * nk * (d + dv) < _NUMBERS
    else:
        small = batch * heads * nq * nk * (d + dv) < _MULTIPLICATIONS
    if not small or call.device != "cpu" or (not call.is_numpy and _is_ready(call)):
        return None
    if call.is_numpy:
        return "a small call of NumPy arrays does not wait for the import of the compiler"
    return "a kernel is not compiled yet, and a small call does not wait for it: lowtri doctor --compile"


def _whole_vectors(call: Call) -> bool:
    """Whether the decode kernel can read the rows in whole vectors."""
    *_, d, dv = call.sizes
    return d % 32 == 0 and dv % 16 == 0


def _is_ready(call: Call) -> bool:
    """Whether every kernel that the call needs was compiled ahead."""
    before = frozenset() if _numba_missing() else compiled_before()
    if not before:
        return False
    families = ("forward", "backward") if call.needs_grad else ("decode",) if is_decoded(call) else ("forward",)
    spec = kernel_spec(families[0], call)
    return all((family, spec.name) in before for family in families)


def prepare(call: Call) -> Prepared:
    return PreparedKernels(call)


@cache
def _numba_missing() -> str | None:
    """Why Numba is not usable, or None. New releases of Python and NumPy are supported late, so it may be missing or refuse them."""
    if find_spec("numba") is None:
        return "numba is not installed"
    try:
        import lowtri.compat.numba_linking
        import lowtri.compat.numba_private  # noqa: F401
    except Exception as error:  # whatever it raises, another backend can run
        return f"numba cannot be loaded: {error}"
    return None

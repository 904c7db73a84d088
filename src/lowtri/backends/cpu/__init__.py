"""The backend ``cpu``: the kernels, on CPU tensors and NumPy arrays.

Numba is imported late; where it is missing, ``supports`` gives the reason.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

from lowtri.backends.base import Prepared
from lowtri.backends.cpu.prepared import PreparedKernels
from lowtri.backends.cpu.ready import compiled_before
from lowtri.backends.cpu.specs import FEW_QUERIES, is_decoded, kernel_name, kernel_spec
from lowtri.masks.formulas import causal
from lowtri.ops.call import Call
from lowtri.ops.distance_bias import first_pair

__all__ = ["cost", "name", "prepare", "remark", "supports"]

name = "cpu"

_QUERIES = 16  # a tile computes groups of so many

_FIRST_COMPILE = 5e6  # a small call must not wait seconds for the compiler
_MULTIPLICATIONS = 2**25  # about a millisecond on one core: from here on a call may wait for it
_NUMBERS = 2**20  # the same of keys and values, for few queries: 4 MB in float32
_LARGE_CAST = 2**24  # of keys and values in a half type: 64 MB in float32, more than the CPU's caches hold
_SHORT = 512  # keys, of full attention on tile registers; to be measured on a CPU with AMX

# Microseconds for a call, and for a million multiplications; for few queries for a million numbers of K and V. Fitted by
# benchmarks/costs.py on one core of an AMD EPYC (Zen 3, AVX2), 22 November 2026, together with those of the backend sdpa. Kernels take
# about the same time in all dtypes of 32 and 16 bits.
_FORWARD = 20, 40
_WITH_GRADIENTS = 360, 127
_FEW_QUERIES = 18, 220
_TORCH_FASTER = 5  # a factor where torch was measured faster: its rate is then the lower one


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


def cost(call: Call) -> float:
    """The keys and values to read for few queries, else the multiplications; and the compiler where a small call would wait for it."""
    batch, heads, kv_heads, nq, nk, d, dv = call.sizes
    few, numbers = nq < FEW_QUERIES and not call.needs_grad, batch * kv_heads * nk * (d + dv)
    multiplications = batch * heads * nq * nk * (d + dv)
    whole = _whole_vectors(call)
    if few:
        fixed, rate = _FEW_QUERIES
        rated: float = numbers if whole else 4 * numbers
    else:
        fixed, rate = _WITH_GRADIENTS if call.needs_grad else _FORWARD
        rated = multiplications / max(nq, 1) * -(-nq // _QUERIES) * _QUERIES  # groups of queries are computed whole
        rated = rated / 2 if call.mask == causal() else rated
    if _torch_is_faster(call, numbers):
        rate *= _TORCH_FASTER
    return fixed + rated * rate / 1e6 + (_FIRST_COMPILE if _waits(call) else 0)


def remark(call: Call) -> str | None:
    """What the cost includes besides computing."""
    if call.is_numpy or not _waits(call):
        return None
    return "a kernel is not compiled yet, and a small call does not wait for it: lowtri doctor --compile"


def _waits(call: Call) -> bool:
    """Whether a small call would wait for Numba to compile a kernel, or to be imported for NumPy arrays."""
    batch, heads, kv_heads, nq, nk, d, dv = call.sizes
    if nq < FEW_QUERIES:
        small = not _whole_vectors(call) or batch * kv_heads * nk * (d + dv) < _NUMBERS
    else:
        small = batch * heads * nq * nk * (d + dv) < _MULTIPLICATIONS
    return small and (call.is_numpy or not _is_ready(call))


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
    return all((kernel_name(family, spec), spec.name) in before for family in families)


def _torch_is_faster(call: Call, numbers: int) -> bool:
    """Whether torch's function is faster: dense bf16 where torch uses AMX, and float16 caches that have to be cast.

    Windows, documents and other masks that hide much stay with the kernel, since torch computes hidden pairs. Kernels on tile
    registers take dense bf16 as well, except short full attention: its share of fixed costs is the largest, and no such call of
    theirs has been measured yet.
    """
    if call.is_numpy or call.dtype not in ("bfloat16", "float16") or _numba_missing():
        return False
    from lowtri.kernels import target

    if call.q.shape[2] >= FEW_QUERIES:
        dense = call.shows_all or (call.mask == causal() and not call.positions_given)
        short = call.shows_all and call.k.shape[2] <= _SHORT
        return target.HAS_AMX and call.dtype == "bfloat16" and dense and (short or not target.ISA.has_tiles)
    return call.dtype == "float16" and not target.HAS_FLOAT16 and call.group == 1 and numbers >= _LARGE_CAST


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

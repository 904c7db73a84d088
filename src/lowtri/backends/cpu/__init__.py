"""The backend ``cpu``: the kernels, on CPU tensors and NumPy arrays.

Numba is imported late; where it is missing, ``supports`` gives the reason.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

from lowtri.backends.base import Prepared
from lowtri.backends.cpu.prepared import FEW_QUERIES, PreparedKernels
from lowtri.masks.formulas import causal
from lowtri.ops.call import Call
from lowtri.ops.distance_bias import first_pair

__all__ = ["cost", "name", "prepare", "supports"]

name = "cpu"

_FIRST_COMPILE = 5e6  # a small call must not wait seconds for the compiler
_MULTIPLICATIONS = 2**25  # about a millisecond on one core
_LARGE_CAST = 2**24  # of keys and values in a half type: 64 MB in float32, more than the CPU's caches hold
_SHORT = 512  # keys, of full attention on tile registers; to be measured on a CPU with AMX
_NUMBERS = 2**20  # of keys and values, for few queries: 4 MB in float32


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
    """The keys and values to read for few queries, else the multiplications; small calls go to backends without a compiler."""
    batch, heads, kv_heads, nq, nk, d, dv = call.sizes
    if nq < FEW_QUERIES:
        numbers = batch * kv_heads * nk * (d + dv)
        whole = d % 32 == 0 and dv % 16 == 0
        small = not whole or numbers < _NUMBERS
        if small:
            return 50 + _FIRST_COMPILE
        return 50 + numbers / (500 if _torch_is_faster(call, numbers) else 3_000)
    multiplications = batch * heads * nq * nk * (d + dv)
    if multiplications < _MULTIPLICATIONS:
        return 100 + _FIRST_COMPILE
    if call.mask == causal():
        multiplications //= 2
    return 100 + multiplications / (10_000 if _torch_is_faster(call, 0) else 50_000)


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
        import lowtri.compat.numba_private  # noqa: F401
    except Exception as error:  # whatever it raises, another backend can run
        return f"numba cannot be loaded: {error}"
    return None

"""The backend ``flex``: torch's FlexAttention, compiled, on a GPU, with a BlockMask made from the mask's tiles.

It skips the blocks that the mask hides, which torch's own attention with a table does not. The first call of a shape compiles for
seconds, so short calls are left to other backends.

block_mask  torch's BlockMask from a plan, with a ``mask_mod`` that reads tensors only
compiled    a prepared call of compiled FlexAttention
"""

from __future__ import annotations

from importlib.util import find_spec

from lowtri.backends.base import Prepared
from lowtri.ops.call import Call

__all__ = ["name", "prepare", "supports"]

name = "flex"

_DEVICES = ("cuda", "xpu")
_LEAST_SIZE = 16  # of a head: the smallest product of Triton


def supports(call: Call) -> str | None:
    """Reject what FlexAttention's GPU kernels, or our use of them, do not have."""
    if call.device not in _DEVICES:
        return f"the tensors are on {call.device}"
    return why_not(call)


def why_not(call: Call) -> str | None:
    """The reasons that do not depend on the device."""
    *_, d, dv = call.sizes
    missing = {
        "the arrays are NumPy's": call.is_numpy,
        f"{call.transformation}, which it does not support": call.transformation is not None,
        "the tensors are fake": call.opaque is not None and "FakeTensor" in call.opaque,
        "there is nothing to attend to": 0 in (*call.q.shape, *call.v.shape),
        "it does not drop weights": bool(call.dropout),
        "it does not return weights": call.return_weights,
        "its kernels have no float64": call.dtype == "float64",
        f"its kernels take head sizes from {_LEAST_SIZE} on": min(d, dv) < _LEAST_SIZE,
        "triton is not installed": call.device == "cuda" and find_spec("triton") is None,
    }
    return next((reason for reason, holds in missing.items() if holds), None)


def prepare(call: Call) -> Prepared:
    from lowtri.backends.flex.compiled import Compiled

    return Compiled(call)

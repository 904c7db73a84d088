"""The backend ``varlen``: torch's flash attention for sequences of different lengths, on a GPU.

It takes masks of documents, causal ones and windows, and any combination of them that means the same: each query sees one range of
keys, and the ranges are those of documents in a row with one window for all (:mod:`~lowtri.backends.varlen.segments`). Nothing is
padded, and hidden documents are not computed.

segments  documents and a window from the plan's ranges
packed    a prepared call
"""

from __future__ import annotations

import inspect
from functools import cache

from lowtri.backends.base import Prepared
from lowtri.ops.call import Call

__all__ = ["name", "prepare", "supports"]

name = "varlen"

_MOST_SIZE = 256  # of a head
_CAPABILITY = (8, 0)  # the oldest GPUs that flash attention runs on


def supports(call: Call) -> str | None:
    """Reject what flash attention does not compute, and masks that are not documents with a window."""
    if call.device != "cuda":
        return f"the tensors are on {call.device}"
    return why_not(call) or _old_device()


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
        "it does not return log-sum-exp": call.return_lse,
        "it has no bias": call.bias is not None,
        "it has no softcap": call.softcap is not None,
        "it has no sinks": call.sinks is not None,
        f"its kernels have no {call.dtype}": call.dtype not in ("float16", "bfloat16"),
        f"its kernels take equal head sizes, multiples of 8 up to {_MOST_SIZE}": d != dv or d % 8 > 0 or d > _MOST_SIZE,
    }
    reason = next((reason for reason, holds in missing.items() if holds), None)
    return reason or _torch_lacks() or _not_documents(call)


def prepare(call: Call) -> Prepared:
    from lowtri.backends.varlen.packed import Packed

    return Packed(call)


def _not_documents(call: Call) -> str | None:
    from lowtri.backends.varlen.segments import segments_of

    found = segments_of(call)
    return found if isinstance(found, str) else None


@cache
def _torch_lacks() -> str | None:
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return "this version of torch has no torch.nn.attention.varlen"
    if not {"window_size", "enable_gqa", "scale"} <= set(inspect.signature(varlen_attn).parameters):
        return "this version of torch has no windows or groups in torch.nn.attention.varlen"
    return None


@cache
def _old_device() -> str | None:
    import torch

    if (
        not torch.cuda.is_available()
        or torch.version.hip is not None
        or torch.cuda.get_device_capability() < _CAPABILITY
    ):
        return "flash attention needs an NVIDIA GPU of compute capability 8.0 or newer"
    return None

"""A call of attention in eager mode: cast under torch.autocast, looked up in the cache or prepared, and run."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from lowtri.dispatch.prepared import prepared_call
from lowtri.masks.arrays import why_not_plain
from lowtri.ops.call import CallOptions

__all__ = ["autocast_device", "cast_for_autocast", "run_eagerly", "without_autocast"]

_UNCHANGED = nullcontext()


def run_eagerly(q: Any, k: Any, v: Any, mask: Any, options: CallOptions) -> Any:
    """:func:`lowtri.attention` outside of a trace."""
    device = autocast_device(q)
    if device is not None:
        _, q, k, v = cast_for_autocast(q, k, v)
    ready, inputs = prepared_call(q, k, v, mask, options)
    if device is None:
        result = ready.run(inputs)
    else:
        with without_autocast(device):
            result = ready.run(inputs)
    restore = ready.call.restore
    if not (options.return_weights or options.return_lse):
        return restore(result.output)
    extra = [result.weights] * options.return_weights + [result.lse] * options.return_lse
    return tuple(restore(x) for x in (result.output, *extra))


def without_autocast(device: str | None) -> AbstractContextManager[object]:
    """A context in which autocast does not cast what a backend computes in float32; ``device`` is where autocast is enabled."""
    if device is None:
        return _UNCHANGED
    import torch

    return torch.autocast(device, enabled=False)


def cast_for_autocast(q: Any, k: Any, v: Any) -> tuple[str | None, Any, Any, Any]:
    """The type of q's device if torch.autocast is enabled for it, else None; and q, k, v, cast as for torch's own attention."""
    device = autocast_device(q)
    if device is None:
        return None, q, k, v
    import torch

    dtype = torch.get_autocast_dtype(device)
    q, k, v = (x.to(dtype) if isinstance(x, torch.Tensor) and x.dtype == torch.float32 else x for x in (q, k, v))
    return device, q, k, v


def autocast_device(q: Any) -> str | None:
    """The type of q's device if torch.autocast is enabled for it."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(q, torch.Tensor):
        return None
    if type(q) is not torch.Tensor and why_not_plain("q", q):  # the check of the call raises
        return None
    if q.is_cpu:  # the fast path of decoding
        return "cpu" if torch.is_autocast_enabled("cpu") else None
    kind = q.device.type
    return kind if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind) else None

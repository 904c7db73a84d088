"""Which tensors kernels may read, and batched gradients.

Kernels read raw memory and bypass torch's dispatcher: lazily negated views, subclasses and active dispatch modes are rejected.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import get_num_threads, is_autocast_enabled, is_grad_enabled

from lowtri.compat.torch_private import (
    dispatch_key_set,
    dispatch_keys,
    dispatch_mode_count,
    forward_level,
    in_batch,
    is_batched,
    out_of_batch,
    tracing_state,
    transform_stack,
    vmap_level,
    why_unreadable,
)
from lowtri.ops.call import FEW_QUERIES
from lowtri.ops.distance_bias import DistanceBias

FORWARD_MODE = "inside forward-mode differentiation"

_TYPES: tuple[type, ...] = ()  # of dense CPU tensors; none where this torch does not expose dispatch keys
_DENSE_KEYS: tuple[int, ...] = ()  # of a dense CPU tensor, made outside and inside of inference mode
if why_unreadable is None:
    _TYPES = (torch.Tensor, torch.nn.Parameter)
    _DENSE_KEYS = dispatch_key_set("AutocastCPU", "AutogradCPU", "ADInplaceOrView"), dispatch_key_set("AutocastCPU")


def dense_keys(x: Any) -> int | None:
    """The dispatch keys of a tensor whose data lies in CPU memory as it is, else None.

    The keys stand for everything that the dispatcher would do: other devices and layouts, negated views, zero tensors without
    memory, wrappers of torch.func. A tensor with exactly the keys of an ordinary dense tensor is one.
    """
    if type(x) not in _TYPES:
        return None
    keys: int = dispatch_keys(x).raw_repr()
    return keys if keys in _DENSE_KEYS else None


def is_dense_cpu(x: Any) -> bool:
    """Whether the data of a tensor lies in CPU memory as it is."""
    return dense_keys(x) is not None


def active_mode() -> str | None:
    """The torch mode that must see every operation, which rules kernels out; None where there is none."""
    if why_unreadable is not None:
        return why_unreadable
    if dispatch_mode_count() or tracing_state() is not None:
        return transformation() or "inside a trace or under a dispatch mode of torch"
    return transformation()


def transformation() -> str | None:
    """The function transform of torch (forward mode, vmap, ...) around the call, whose tensors have no readable memory, or None."""
    if forward_level() >= 0:
        return FORWARD_MODE
    return "inside a transform of torch.func" if transform_stack() is not None else None


def signature(q: Any, k: Any, v: Any, bias: Any, sinks: Any, options: tuple[Any, ...]) -> Any:
    """The signature of a call of tensors at the default positions (:mod:`lowtri.dispatch.signature`); None if calls are not kept.

    It has all that the checks look at: dispatch keys, gradients, threads, modes and transforms of torch. Which of these are usual is
    not asked here, since only usual calls are kept.
    """
    if is_autocast_enabled("cpu") or tracing_state() is not None:
        return None
    if not (type(q) in _TYPES and type(k) in _TYPES and type(v) in _TYPES):
        return None
    shape, recorded = q.shape, is_grad_enabled()
    optional: Any = None
    grads: Any = recorded and (q.requires_grad or k.requires_grad or v.requires_grad)
    if grads:
        grads = q.requires_grad, k.requires_grad, v.requires_grad
    is_decode = 2 < len(shape) < 5 and shape[-2] < FEW_QUERIES and not grads and bias is None
    if bias is not None or sinks is not None:
        optional = _optional_key(bias, recorded), _optional_key(sinks, recorded)
        if () in optional:
            return None
        is_decode = is_decode and not optional[1][-1]
    decode_key = (
        options, shape, q.stride(), q.dtype, k.dtype, v.dtype, grads, optional,
        dispatch_keys(q).raw_repr(), dispatch_keys(k).raw_repr(), dispatch_keys(v).raw_repr(),
        get_num_threads(), dispatch_mode_count(), transform_stack(), forward_level(),
    )  # fmt: skip
    return decode_key, (k.shape, v.shape, k.stride(), v.stride(), None), is_decode


def token_signature(q: Any, k: Any, v: Any, options: Any) -> Any:
    """What the layers of a token have in common if they make equal calls over a cache; None if calls are not kept.

    As :func:`signature`; of the new keys and values only that on which their copies in the cache depend.
    """
    if is_autocast_enabled("cpu") or tracing_state() is not None or type(q) not in _TYPES:
        return None
    if type(k) not in _TYPES or type(v) not in _TYPES:
        return None
    return (
        options, q.shape, q.stride(), q.dtype, dispatch_keys(q).raw_repr(), is_grad_enabled() and q.requires_grad,
        k.shape, v.shape, k.dtype, v.dtype, k.device, v.device,
        get_num_threads(), dispatch_mode_count(), transform_stack(), forward_level(),
    )  # fmt: skip


def _optional_key(x: Any, recorded: bool) -> tuple[Any, ...] | None:
    """The part of a bias or of sinks in a signature; () if such calls are not kept. The last is whether a gradient is recorded."""
    if x is None:
        return None
    kind = x.kind if isinstance(x, DistanceBias) else None
    values = x.values if isinstance(x, DistanceBias) else x
    if type(values) not in _TYPES:
        return ()
    keys = dispatch_keys(values).raw_repr()
    return kind, values.shape, values.stride(), values.dtype, keys, recorded and values.requires_grad


def loop_over_vmapped_grads(backward: Callable[..., Any]) -> Callable[..., Any]:
    """The backward of an autograd.Function, run for each gradient of a batch.

    Under ``is_grads_batched=True`` (also ``torch.autograd.functional.jacobian(vectorize=True)``) torch passes batched tensors, each
    of which holds many gradients, and few operations accept them.
    """

    @wraps(backward)
    def run(ctx: Any, *grads: torch.Tensor) -> Any:
        for x in grads:  # a loop, since small calls take microseconds
            if x is not None and is_batched(x):
                break
        else:
            return backward(ctx, *grads)
        level = vmap_level()
        unbatched = [x is not None and is_batched(x) and out_of_batch(x, level, 0, 0) for x in grads]  # (count, ...)
        count = next(len(x) for x in unbatched if x is not False)
        once = UnpackedOnce(ctx)
        each = [
            backward(once, *(grad if x is False else x[i] for grad, x in zip(grads, unbatched, strict=True)))
            for i in range(count)
        ]
        columns = zip(*each, strict=True)
        return tuple(None if x[0] is None else in_batch(torch.stack(x), 0, level) for x in columns)

    return run


class UnpackedOnce:
    """The context of a backward that runs several times: saved tensors can be unpacked only once under checkpointing."""

    def __init__(self, ctx: Any) -> None:
        self._ctx, self.saved_tensors = ctx, ctx.saved_tensors

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)

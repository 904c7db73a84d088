"""Kernels read raw memory and bypass torch's dispatcher: lazily negated views, subclasses and active dispatch modes are rejected."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch

from lowtri.compat.torch_private import (
    dispatch_key_set,
    dispatch_keys,
    dispatch_mode_count,
    forward_level,
    tracing_state,
    transform_stack,
    why_unreadable,
)
from lowtri.ops.call import FEW_QUERIES

FORWARD_MODE = "inside forward-mode differentiation"

_TYPES: tuple[type, ...] = ()  # of plain tensors; none where this torch does not expose dispatch keys
_PLAIN_KEYS: tuple[int, ...] = ()  # of a plain tensor, made outside and inside of inference mode
if why_unreadable is None:
    _TYPES = (torch.Tensor, torch.nn.Parameter)
    _PLAIN_KEYS = dispatch_key_set("AutocastCPU", "AutogradCPU", "ADInplaceOrView"), dispatch_key_set("AutocastCPU")


def plain_keys(x: Any) -> int | None:
    """The dispatch keys of a tensor whose data lies in CPU memory as it is, else None.

    The keys stand for everything that the dispatcher would do: other devices and layouts, negated views, zero tensors without
    memory, wrappers of torch.func. A tensor with exactly the keys of an ordinary dense tensor is one.
    """
    if type(x) not in _TYPES:
        return None
    keys: int = dispatch_keys(x).raw_repr()
    return keys if keys in _PLAIN_KEYS else None


def is_plain(x: Any) -> bool:
    """Whether the data of a tensor lies in CPU memory as it is."""
    return plain_keys(x) is not None


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


def tensors_key(q: Any, k: Any, v: Any, bias: Any, sinks: Any) -> Hashable | None:
    """Shapes, strides, dtypes and torch's settings; None for tensors whose data does not lie in CPU memory as it is.

    Written without a loop over q, k and v, since every call runs it.
    """
    if active_mode() is not None:
        return None
    q_keys, k_keys, v_keys = plain_keys(q), plain_keys(k), plain_keys(v)
    if q_keys is None or k_keys is None or v_keys is None:
        return None
    settings = torch.get_num_threads(), torch.is_grad_enabled()
    of_q = q_keys, q.shape, q.stride(), q.dtype, q.requires_grad
    of_k = k_keys, k.shape, k.stride(), k.dtype, k.requires_grad
    of_v = v_keys, v.shape, v.stride(), v.dtype, v.requires_grad
    if bias is None and sinks is None:
        return settings, of_q, of_k, of_v
    others: list[Hashable] = []
    for x in (bias, sinks):
        keys = 0 if x is None else plain_keys(x)
        if keys is None:
            return None
        others.append(None if x is None else (keys, x.shape, x.stride(), x.dtype, x.requires_grad))
    return settings, of_q, of_k, of_v, *others


def tensors_key_of_few_queries(q: Any, k: Any, v: Any, sinks: Any) -> Hashable | None:
    """The key of :func:`tensors_key` without the number of keys and their strides; None also for many queries and with gradients."""
    q_keys = plain_keys(q)
    if q_keys is None or not 3 <= q.ndim <= 4 or q.shape[-2] >= FEW_QUERIES or active_mode() is not None:
        return None
    keys = q_keys, plain_keys(k), plain_keys(v), 0 if sinks is None else plain_keys(sinks)
    if None in keys or k.ndim != q.ndim or v.ndim != q.ndim:
        return None
    if torch.is_grad_enabled() and (
        q.requires_grad or k.requires_grad or v.requires_grad or (sinks is not None and sinks.requires_grad)
    ):
        return None
    of_k, of_v = k.shape, v.shape
    if of_k[-2] != of_v[-2] or (sinks is not None and sinks.stride() != (1,)):
        return None
    of_sinks = None if sinks is None else (sinks.shape, sinks.dtype)
    shapes = q.shape, of_k[:-2], of_k[-1], of_v[:-2], of_v[-1]
    return torch.get_num_threads(), keys, shapes, q.stride(), q.dtype, k.dtype, v.dtype, of_sinks

"""Kernels read raw memory and bypass torch's dispatcher: lazily negated views, subclasses and active dispatch modes are rejected."""

from __future__ import annotations

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

__all__ = ["FORWARD_MODE", "active_mode", "is_plain", "plain_keys", "transformation"]

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

"""Whether a kernel may read a tensor's memory: kernels bypass torch's dispatcher, so it must have nothing to do on the way."""

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

__all__ = ["FORWARD_MODE", "active_mode", "is_plain", "transformation"]

FORWARD_MODE = "inside forward-mode differentiation"


_TYPES: tuple[type, ...] = ()  # of plain tensors; none where this torch does not tell
_ORDINARY: tuple[int, ...] = ()  # dispatch keys of a plain tensor, made outside and inside of inference mode
if why_unreadable is None:
    _TYPES = (torch.Tensor, torch.nn.Parameter)
    _ORDINARY = dispatch_key_set("AutocastCPU", "AutogradCPU", "ADInplaceOrView"), dispatch_key_set("AutocastCPU")


def is_plain(x: Any) -> bool:
    """Whether the numbers of a tensor lie in the CPU's memory as they are.

    The dispatcher's keys of a tensor name all that would happen on the way: another device or layout, negated views, zeros that
    lie nowhere, wrappers of torch.func. So a tensor whose keys are those of an ordinary one is an ordinary one.
    """
    return type(x) in _TYPES and dispatch_keys(x).raw_repr() in _ORDINARY


def active_mode() -> str | None:
    """A mode of torch that must see every operation, and so rules kernels out; None where there is none."""
    if why_unreadable is not None:
        return why_unreadable
    if dispatch_mode_count() or tracing_state() is not None:
        return transformation() or "a program is being recorded, or what it does is being watched"
    return transformation()


def transformation() -> str | None:
    """Whether torch differentiates or maps the call from outside, on tensors that do not show their numbers."""
    if forward_level() >= 0:
        return FORWARD_MODE
    return "inside a transform of torch.func" if transform_stack() is not None else None

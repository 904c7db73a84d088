"""Kernels read raw memory and bypass torch's dispatcher: lazily negated views, subclasses and active dispatch modes are rejected."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import forward_ad

__all__ = ["FORWARD_MODE", "active_mode", "dispatch_keys", "is_plain", "transformation"]

FORWARD_MODE = "inside forward-mode differentiation"


def _keys(*names: str) -> int:
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
    for name in names:
        keys = keys | torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, name))
    return keys.raw_repr()


_IN_INFERENCE_MODE = _keys("AutocastCPU")
_ORDINARY = (_keys("AutocastCPU", "AutogradCPU", "ADInplaceOrView"), _IN_INFERENCE_MODE)


def dispatch_keys(x: Any) -> int | None:
    """The dispatcher's keys of a tensor whose numbers lie in the CPU's memory as they are, else None.

    The keys stand for everything that the dispatcher would do: other devices and layouts, negated views, zero tensors without
    memory, wrappers of torch.func. A tensor with exactly the keys of an ordinary dense tensor is one.
    """
    kind = type(x)
    if kind is not torch.Tensor and kind is not torch.nn.Parameter:
        return None
    keys: int = torch._C._dispatch_keys(x).raw_repr()
    return keys if keys in _ORDINARY else None


def is_plain(x: Any) -> bool:
    """Whether the numbers of a tensor lie in the CPU's memory as they are."""
    return dispatch_keys(x) is not None


def active_mode() -> str | None:
    """The torch mode that must see every operation, which rules kernels out; None where there is none."""
    if torch._C._len_torch_dispatch_stack() or torch._C._get_tracing_state() is not None:
        return transformation() or "inside a trace or under a dispatch mode of torch"
    return transformation()


def transformation() -> str | None:
    """The function transform of torch (forward mode, vmap, ...) around the call, whose tensors have no readable memory, or None."""
    if forward_ad._current_level >= 0:
        return FORWARD_MODE
    return "inside a transform of torch.func" if torch._C._functorch.peek_interpreter_stack() is not None else None

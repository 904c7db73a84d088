"""Whether a kernel may read a tensor's memory by itself. It goes round torch, so what torch would do on the way must be nothing."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import forward_ad

__all__ = ["is_plain", "transformed", "why_not_now"]


def is_plain(x: Any) -> bool:
    """Whether the numbers of a tensor lie in the CPU's memory as they are: not negated as they are read, nor zeros that lie nowhere."""
    return bool(
        (type(x) is torch.Tensor or type(x) is torch.nn.Parameter)
        and x.is_cpu
        and x.layout is torch.strided
        and not x.is_nested
        and not x.is_neg()
        and not x._is_zerotensor()
    )


def why_not_now() -> str | None:
    """What torch is doing around the call that it could not do inside a kernel."""
    if torch._C._len_torch_dispatch_stack() or torch._C._get_tracing_state() is not None:
        return transformed() or "a program is being recorded, or what it does is being watched"
    return transformed()


def transformed() -> str | None:
    """Whether torch differentiates or maps the call from outside, on tensors whose numbers it does not show."""
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return "inside a transform of torch.func"
    if forward_ad._current_level >= 0:
        return "inside forward-mode differentiation"
    return None

"""Whether a kernel may read a tensor's memory. Kernels bypass torch's dispatcher: lazily negated views, tensor subclasses and
active dispatch modes are left to backends that go through it."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import forward_ad

__all__ = ["active_mode", "is_plain"]


def is_plain(x: Any) -> bool:
    """Whether the numbers of a tensor lie in the CPU's memory as they are: not negated on reading, nor zeros without memory."""
    return bool(
        (type(x) is torch.Tensor or type(x) is torch.nn.Parameter)
        and x.is_cpu
        and x.layout is torch.strided
        and not x.is_nested
        and not x.is_neg()
        and not x._is_zerotensor()
    )


def active_mode() -> str | None:
    """A mode of torch that must see every operation, and so rules kernels out; None where there is none."""
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return "inside a transform of torch.func"
    if forward_ad._current_level >= 0:
        return "inside forward-mode differentiation"
    if torch._C._len_torch_dispatch_stack() or torch._C._get_tracing_state() is not None:
        return "a program is being recorded, or what it does is being watched"
    return None

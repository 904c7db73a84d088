"""The part of a signature that tensors make. A file of its own, since it is loaded with torch; and short, since every call runs it."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch

from lowtri.ops.guards import active_mode, is_plain

__all__ = ["of_tensors"]


def of_tensors(*tensors: Any) -> Hashable | None:
    """Shapes, strides, dtypes and what torch is set to; None where the numbers do not lie in the CPU's memory as they are."""
    if active_mode() is not None:
        return None
    parts: list[Hashable] = [torch.get_num_threads(), torch.is_grad_enabled()]
    for x in tensors:
        if x is None:
            parts.append(None)
            continue
        if not is_plain(x):
            return None
        parts += (x.shape, x.stride(), x.dtype, x.requires_grad, x.is_inference())
    return tuple(parts)

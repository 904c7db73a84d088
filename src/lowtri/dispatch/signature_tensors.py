"""The tensors' part of a signature: a separate file because it imports torch, and written without a loop over q, k and v because
every call runs it."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch

from lowtri.ops.guards import active_mode, plain_keys

__all__ = ["of_tensors"]


def of_tensors(q: Any, k: Any, v: Any, bias: Any, sinks: Any) -> Hashable | None:
    """Shapes, strides, dtypes and torch's settings; None for tensors whose data does not lie in CPU memory as it is."""
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

"""Two products that keep to the mask, each the other's gradient: what is hidden leaves no trace, forward and backward.

VisibleScores(q, k)  q k^T at visible pairs, 0 at hidden ones
VisibleSum(w, x)     w x summed over visible pairs only: a row of x that holds NaN reaches the queries that see it and no others
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["VisibleScores", "VisibleSum"]


class VisibleScores(torch.autograd.Function):
    """q k^T at visible pairs, 0 at hidden ones.  q (B, H, M, D), k (B, H, N, D), visible broadcasts to (B, H, M, N)."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, visible: Tensor) -> Tensor:
        ctx.save_for_backward(q, k, visible)
        return _product(q, k.transpose(2, 3)).masked_fill(~visible, 0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        q, k, visible = ctx.saved_tensors
        grad = grad.masked_fill(~visible, 0)
        return (
            VisibleSum.apply(grad, k, visible),
            VisibleSum.apply(grad.transpose(2, 3), q, visible.transpose(2, 3)),
            None,
        )


class VisibleSum(torch.autograd.Function):
    """w x over visible pairs only.  w (B, H, M, N), 0 where hidden; x (B, H, N, D)."""

    @staticmethod
    def forward(ctx: Any, w: Tensor, x: Tensor, visible: Tensor) -> Tensor:
        ctx.save_for_backward(w, x, visible)
        broken = ~x.isfinite().all(dim=3)  # (B, H, N)
        if not broken.any():
            return _product(w, x)
        out = _product(w, x.masked_fill(broken[..., None], 0))
        for j in broken.any(dim=0).any(dim=0).nonzero()[:, 0].tolist():
            here = visible[..., j, None] & broken[:, :, j, None, None]  # (B, H, M, 1)
            out = out + (w[..., j, None] * x[:, :, None, j]).masked_fill(~here, 0)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        w, x, visible = ctx.saved_tensors
        return (
            VisibleScores.apply(grad, x, visible),
            VisibleSum.apply(w.transpose(2, 3), grad, visible.transpose(2, 3)),
            None,
        )


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b in their own dtype: autocast would round both to half, forward and backward."""
    if not torch.is_autocast_enabled(a.device.type):
        return a @ b
    with torch.autocast(a.device.type, enabled=False):
        return a @ b

"""Two products over visible pairs, each the gradient of the other: hidden values reach no result, forward and backward.

VisibleScores(q, k)  q k^T at visible pairs, 0 at hidden ones
VisibleSum(w, x)     w x over visible pairs only: a NaN in a row of x reaches exactly the queries that see this row

Both are linear in each argument, so their derivatives, forward and backward and to any order, are the two products again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lowtri.ops.gradient_batches import one_by_one
from lowtri.ops.guards import transformation

__all__ = ["VisibleScores", "VisibleSum"]


class VisibleScores(torch.autograd.Function):
    """q k^T at visible pairs, 0 at hidden ones.  q (B, H, M, D), k (B, H, N, D), visible broadcasts to (B, H, M, N)."""

    @staticmethod
    def forward(q: Tensor, k: Tensor, visible: Tensor) -> Tensor:
        return _product(q, k.transpose(2, 3)).masked_fill(~visible, 0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        q, k, visible = inputs
        if transformation() is None and not q.isfinite().all():  # torch.func has no data-dependent branches
            # An infinite query whose visible scores are all -inf sees nothing: it adds 0 to the gradients of keys, not 0 * inf.
            visible = visible & (output.masked_fill(~visible, -torch.inf) != -torch.inf).any(dim=3, keepdim=True)
        _save(ctx, (q, k, visible))

    @staticmethod
    @one_by_one
    def backward(ctx: Any, grad: Tensor) -> Any:
        q, k, visible = ctx.saved_tensors
        grad = grad.masked_fill(~visible, 0)
        return (
            VisibleSum.apply(grad, k, visible),
            VisibleSum.apply(grad.transpose(2, 3), q, visible.transpose(2, 3)),
            None,
        )

    @staticmethod
    def jvp(ctx: Any, q_tangent: Tensor | None, k_tangent: Tensor | None, _: None) -> Any:
        return _product_rule(VisibleScores, ctx.saved_tensors, q_tangent, k_tangent)

    @staticmethod
    def vmap(info: Any, dims: tuple[int | None, ...], *inputs: Tensor) -> Any:
        return _in_one_batch(VisibleScores, info.batch_size, dims, inputs), 0


class VisibleSum(torch.autograd.Function):
    """w x over visible pairs only.  w (B, H, M, N), 0 where hidden; x (B, H, N, D)."""

    @staticmethod
    def forward(w: Tensor, x: Tensor, visible: Tensor) -> Tensor:
        non_finite = ~x.isfinite().all(dim=3)  # (B, H, N)
        if not non_finite.any():
            return _product(w, x)
        out = _product(w, x.masked_fill(non_finite[..., None], 0))
        for j in non_finite.any(dim=0).any(dim=0).nonzero()[:, 0].tolist():
            affected = visible[..., j, None] & non_finite[:, :, j, None, None]  # (B, H, M, 1)
            out = out + (w[..., j, None] * x[:, :, None, j]).masked_fill(~affected, 0)
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        _save(ctx, inputs)

    @staticmethod
    @one_by_one
    def backward(ctx: Any, grad: Tensor) -> Any:
        w, x, visible = ctx.saved_tensors
        return (
            VisibleScores.apply(grad, x, visible),
            VisibleSum.apply(w.transpose(2, 3), grad, visible.transpose(2, 3)),
            None,
        )

    @staticmethod
    def jvp(ctx: Any, w_tangent: Tensor | None, x_tangent: Tensor | None, _: None) -> Any:
        return _product_rule(VisibleSum, ctx.saved_tensors, w_tangent, x_tangent)

    @staticmethod
    def vmap(info: Any, dims: tuple[int | None, ...], *inputs: Tensor) -> Any:
        return _in_one_batch(VisibleSum, info.batch_size, dims, inputs), 0


def _save(ctx: Any, inputs: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs)
    ctx.save_for_forward(*inputs)


def _product_rule(function: Any, saved: tuple[Tensor, ...], da: Tensor | None, db: Tensor | None) -> Any:
    """The tangent of a function that is linear in a and in b: f(da, b) + f(a, db)."""
    a, b, visible = saved
    parts = [] if da is None else [function.apply(da, b, visible)]
    parts += [] if db is None else [function.apply(a, db, visible)]
    return sum(parts[1:], parts[0]) if parts else None


def _in_one_batch(function: Any, size: int, dims: tuple[int | None, ...], inputs: tuple[Tensor, ...]) -> Tensor:
    """Apply the function once, with the dimension that torch.vmap maps over joined to the batch; returns (size, B, ...)."""
    first = [x if dim is None else x.movedim(dim, 0) for x, dim in zip(inputs, dims, strict=True)]
    rows = max(x.shape[0 if dim is None else 1] for x, dim in zip(first, dims, strict=True))
    joined = []
    for x, dim in zip(first, dims, strict=True):
        each = x[None] if dim is None else x  # (size | 1, B | 1, ...)
        joined.append(each.expand(size, rows, *each.shape[2:]).flatten(0, 1))
    product: Tensor = function.apply(*joined)
    return product.unflatten(0, (size, rows))


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b in their own dtype: autocast would round both to a half type."""
    if not torch.is_autocast_enabled(a.device.type):
        return a @ b
    with torch.autocast(a.device.type, enabled=False):
        return a @ b

"""The backend ``formula``: the formula of attention in torch, one block of queries after another, each with the keys that it may see.

It supports every option, any device, and gradients to any order. Each block is recomputed for its gradient, so memory grows with
the block and not with Nq x Nk. It is the plain formula of the precision contract: float16 and bf16 round inputs, weights and output.

Two products over visible pairs, each the gradient of the other, keep hidden values out of every result, forward and backward:

VisibleScores(q, k)  q k^T at visible pairs, 0 at hidden ones
VisibleSum(w, x)     w x over visible pairs only: a NaN in a row of x reaches exactly the queries that see this row

Both are linear in each argument, so their derivatives, forward and backward and to any order, are the two products again.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lowtri.backends import GradientSource, Prepared
from lowtri.errors import CallError
from lowtri.masks.plan import TILE_Q, Plan
from lowtri.ops.call import Call, Inputs, Result
from lowtri.ops.dropout import kept_scale, kept_tensor, new_seed
from lowtri.ops.tensors import loop_over_vmapped_grads, transformation

__all__ = ["Block", "FormulaCall", "name", "no_gradient_of_received", "prepare", "supports"]

name = "formula"


class Block(NamedTuple):
    """Some queries, and the keys that any of them may see: the first, and one past the last."""

    q0: int
    q1: int
    k0: int
    k1: int


_TABLE_BYTES = 2**20  # the largest table that is kept
_SCORES_IN_TILE = 2**23  # over all heads: 32 MB in float32


def supports(call: Call) -> str | None:
    """Every call is supported."""
    return None


def prepare(call: Call) -> Prepared:
    return FormulaCall(call)


class FormulaCall(Prepared):
    """The blocks of queries, each with the range of keys that any of its queries sees.

    Args:
        call: the call.
        score_mod: applied to the scaled scores of a block (B, Hq, n, Nk) and the block (first query, one past the last, and the same
            of its keys), before the mask; torch differentiates it, with all tensors that it reads. At hidden pairs it is applied to
            0, and its result is not used.
    """

    def __init__(self, call: Call, score_mod: Callable[[Tensor, Block], Tensor] | None = None) -> None:
        self.call = call
        self.score_mod = score_mod
        self._table = None
        sizes = call.sizes
        nq, nk = sizes.nq, sizes.nk
        size = max(TILE_Q, _SCORES_IN_TILE // max(1, sizes.batch * sizes.heads * nk) // TILE_Q * TILE_Q)
        starts = range(0, nq, size) if nq else [0]
        if len(starts) > 1:
            plan = call.plan()
            self.blocks = [Block(q0, min(q0 + size, nq), *_key_range(plan, q0, min(q0 + size, nq))) for q0 in starts]
        else:
            self.blocks = [Block(0, nq, 0, nk)]
            written = max(len(call.q_positions), len(call.k_positions), math.prod(call.mask.batch)) * nq * nk
            if written <= _TABLE_BYTES:
                self._table = torch.from_numpy(call.visible()).to(call.device)
        self.nbytes = 4096 + (0 if self._table is None else self._table.nbytes)

    def gradient_source(self) -> GradientSource:
        return GradientSource.GRAPH

    def checks_values(self) -> bool:
        return False

    def visible(self, block: Block, device: torch.device) -> Tensor:
        """The table of a block, (B|1, Hq|1, n, Nk)."""
        if self._table is not None:
            return self._table.to(device)
        return torch.from_numpy(self.call.visible(*block)).to(device)

    def run(self, inputs: Inputs, seed: Any = None) -> Result:
        if not self.call.is_numpy:
            return self._run(inputs, seed)
        with torch.no_grad():
            result = self._run(Inputs(*(None if x is None else _as_tensor(x) for x in inputs)), seed)
        return Result(*(None if x is None else x.numpy() for x in result))

    def _run(self, inputs: Inputs, seed: Any) -> Result:
        # Blocks are recomputed for their gradients; torch.func does not support that.
        recompute = len(self.blocks) > 1 and torch.is_grad_enabled() and transformation() is None
        if self.call.dropout and seed is None:
            seed = new_seed(self.call.is_numpy)
        seed = None if seed is None else torch.as_tensor(seed)
        parts = []
        # Last block first: under a causal mask it has the most keys, and the others fit into the memory that it frees.
        for block in reversed(self.blocks):
            arguments: Any = (self, block, seed, *_slices(inputs, self.call.distance_low is None, block))
            parts.append(checkpoint(_attend, *arguments, use_reentrant=False) if recompute else _attend(*arguments))
        parts.reverse()
        weights = _joined([part.weights for part in parts]) if self.call.return_weights else None
        lse = _joined([part.lse for part in parts]) if self.call.return_lse else None
        received = None
        if self.call.return_received:
            sums: list[Any] = [part.received for part in parts]
            received = WithoutGradient.apply(torch.stack(sums).sum(0))
        return Result(_joined([part.output for part in parts]), weights, lse, received=received)


def _joined(parts: Any) -> Tensor:
    """The results of all blocks, along the queries."""
    whole: Tensor = parts[0] if len(parts) == 1 else torch.cat(parts, 2)
    return whole


def _key_range(plan: Plan, start: int, stop: int) -> tuple[int, int]:
    """Indices of the first key and one past the last that any query in ``start .. stop`` may see, to the block."""
    first, last = plan.nk, 0
    for mask in range(plan.masks):
        top, bottom = mask * plan.rows + start // TILE_Q, mask * plan.rows + -(-stop // TILE_Q)
        runs = plan.runs[plan.row_start[top] : plan.row_start[bottom]]
        if len(runs):
            first = min(first, int(runs[:, 0].min()) * plan.tile_k)
            last = max(last, int(runs[:, 1].max()) * plan.tile_k)
    return (first, min(last, plan.nk)) if last else (0, 0)


def _slices(inputs: Inputs, by_pairs: bool, block: Block) -> Inputs:
    queries = slice(block.q0, block.q1)
    keys = slice(block.k0, block.k1)
    bias = inputs.bias
    if bias is not None and by_pairs:
        bias = bias[:, :, queries] if bias.shape[2] > 1 else bias
        bias = bias[..., keys] if bias.shape[3] > 1 else bias
    return Inputs(inputs.q[:, :, queries], inputs.k[:, :, keys], inputs.v[:, :, keys], bias, inputs.sinks)


class _BlockResult(NamedTuple):
    """What one block computes; None for what is not returned."""

    output: Tensor  # (B, Hq, n, Dv)
    weights: Tensor | None  # (B, Hq, n, Nk), with all keys
    lse: Tensor | None  # (B, Hq, n)
    received: Tensor | None  # (B, Hq, Nk): the sums of the weights over the queries


def _attend(
    prepared: FormulaCall,
    block: Block,
    seed: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    sinks: Tensor | None,
) -> _BlockResult:
    """One block of queries and the keys that they may see; the query heads of a group are stacked as rows."""
    call = prepared.call
    dtype, wide = q.dtype, torch.promote_types(q.dtype, torch.float32)
    kv_heads = k.shape[1]
    group = call.group
    n = q.shape[2]
    # Made here, so that a block that will be recomputed does not hold its table meanwhile. None: every query sees every key.
    visible = None if call.shows_all else prepared.visible(block, q.device)  # (B|1, Hq|1, n, Nk)

    def rows(x: Tensor) -> Tensor:  # (B, Hq, n, ...) -> (B, Hkv, group * n, ...)
        return x if group == 1 else x.unflatten(1, (kv_heads, group)).flatten(2, 3)

    def heads(x: Tensor) -> Tensor:  # (B, Hkv, group * n, ...) -> (B, Hq, n, ...)
        return x if group == 1 else x.unflatten(2, (group, n)).flatten(1, 2)

    shown = visible  # (B|1, Hkv|1, group * n, Nk)
    if group > 1 and visible is not None:
        shown = visible.repeat(1, 1, group, 1) if visible.shape[1] == 1 else rows(visible)
    s = heads(_applied(VisibleScores, rows(q.to(wide)), k.to(wide), shown))  # (B, Hq, n, Nk)
    s = s * call.scale if s.requires_grad or transformation() is not None else s.mul_(call.scale)
    if call.softcap is not None:
        s = call.softcap * torch.tanh(s / call.softcap)
    if bias is not None:
        s = s + (bias if call.distance_low is None else call.bias_of_pairs(bias, *block)).to(wide)
    if prepared.score_mod is not None:
        s = prepared.score_mod(s, block).to(wide)
    if visible is not None:
        s = s.masked_fill(~visible, -torch.inf)
    if sinks is not None:
        s = torch.cat([s, sinks.to(wide)[None, :, None, None].expand(*s.shape[:3], 1)], dim=3)
    exact, lse, nothing = _softmax(s, visible, k.shape[2], call.return_lse)
    used = weights = exact.to(dtype)
    if call.dropout:
        assert seed is not None, "a run with dropout draws one"
        positions = call.q_positions[:, block.q0 : block.q1], call.k_positions[:, block.k0 : block.k1]
        kept = kept_tensor(seed.to(q.device), call.dropout, (weights.shape[0], weights.shape[1]), *positions)
        used = (weights * kept_scale(call.dropout)) * kept
    if bias is not None or prepared.score_mod is not None:  # a row whose scores are -inf everywhere sees nothing
        some = ~((s[..., : k.shape[2]] == -torch.inf).all(dim=3, keepdim=True) | nothing)
        some = some if visible is None else visible & some
        shown = rows(some.expand(q.shape[0], kv_heads * group, -1, k.shape[2]))
    output = heads(_applied(VisibleSum, rows(used.to(wide)), v.to(wide), shown)).to(dtype)
    others = block.k0, call.k.shape[2] - block.k1
    all_weights = _with_others(weights, others) if call.return_weights else None
    received = _with_others(exact.sum(2), others) if call.return_received else None
    return _BlockResult(output, all_weights, lse, received)


def _with_others(weights: Tensor, others: tuple[int, int]) -> Tensor:
    """Weights of a block with the zeros of so many keys before and behind it."""
    return torch.nn.functional.pad(weights, others) if any(others) else weights


def _softmax(s: Tensor, visible: Tensor | None, nk: int, return_lse: bool) -> tuple[Tensor, Tensor | None, Tensor]:
    """The weights of the ``nk`` keys, the log-sum-exp if it is returned, and which queries see nothing (..., 1).

    A query that sees nothing gets scores of 0 before the softmax and weights of 0 after it: no NaN, no gradient.
    """
    if not s.shape[3]:
        lse = s.new_full(s.shape[:3], -torch.inf) if return_lse else None
        return s, lse, s.new_ones((*s.shape[:3], 1), dtype=torch.bool)
    nothing = s.detach().amax(dim=3, keepdim=True) == -torch.inf
    some = transformation() is not None or bool(nothing.any())  # torch.func has no data-dependent branches
    if some:
        s = s.masked_fill(nothing, 0)
    lse = torch.logsumexp(s, dim=3) if return_lse else None
    if some and lse is not None:
        lse = lse.masked_fill(nothing[..., 0], -torch.inf)
    weights = torch.softmax(s, dim=3)[..., :nk]
    if some:
        weights = weights.masked_fill(nothing, 0)
    # Hidden scores have the weight 0 already, but for those of a query that sees a NaN.
    return weights if visible is None else weights.masked_fill(~visible, 0), lse, nothing


def _as_tensor(array: Any) -> Tensor:
    if not array.flags.writeable or min(array.strides, default=0) < 0:
        array = array.copy()  # torch warns about read-only arrays and rejects negative strides
    return torch.from_numpy(array)


def no_gradient_of_received() -> CallError:
    """What a backward through received weights raises."""
    return CallError(
        "attention: the result of return_received=True has no gradient, and a gradient of it is asked for.\n"
        "Fix: .detach() it; or return_weights=True, and the sum of the weights over the queries."
    )


class WithoutGradient(torch.autograd.Function):
    """A result that is not differentiated: a gradient that reaches it raises, instead of being lost in silence."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        raise no_gradient_of_received()

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Any:
        raise no_gradient_of_received()


class VisibleScores(torch.autograd.Function):
    """q k^T at visible pairs, 0 at hidden ones.

    q (B, H, M, D), k (B, H, N, D); visible broadcasts to (B, H, M, N), or None: every pair.
    """

    @staticmethod
    def forward(q: Tensor, k: Tensor, visible: Tensor | None) -> Tensor:
        scores = _product(q, k.transpose(2, 3))
        return scores if visible is None else scores.masked_fill(~visible, 0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        q, k, visible = inputs
        is_plain = transformation() is None  # torch.func has no data-dependent branches
        if is_plain and not (math.isfinite(q.sum().item()) or q.isfinite().all()):
            # An infinite query whose visible scores are all -inf sees nothing: it adds 0 to the gradients of keys, not 0 * inf.
            scores = output if visible is None else output.masked_fill(~visible, -torch.inf)
            some = (scores != -torch.inf).any(dim=3, keepdim=True)
            visible = some.expand(output.shape) if visible is None else visible & some
        _save(ctx, (q, k, visible))

    @staticmethod
    @loop_over_vmapped_grads
    def backward(ctx: Any, grad: Tensor) -> Any:
        q, k, visible = ctx.saved_tensors
        if visible is not None:
            grad = grad.masked_fill(~visible, 0)
        return (
            VisibleSum.apply(grad, k, visible),
            VisibleSum.apply(grad.transpose(2, 3), q, _transposed(visible)),
            None,
        )

    @staticmethod
    def jvp(ctx: Any, q_tangent: Tensor | None, k_tangent: Tensor | None, _: None) -> Any:
        return _product_rule(VisibleScores, ctx.saved_tensors, q_tangent, k_tangent)

    @staticmethod
    def vmap(info: Any, dims: tuple[int | None, ...], *inputs: Tensor) -> Any:
        return _in_one_batch(VisibleScores, info.batch_size, dims, inputs), 0


class VisibleSum(torch.autograd.Function):
    """w x over visible pairs only.  w (B, H, M, N), 0 where hidden; x (B, H, N, D); visible as of :class:`VisibleScores`."""

    @staticmethod
    def forward(w: Tensor, x: Tensor, visible: Tensor | None) -> Tensor:
        if math.isfinite(x.sum().item()):  # one pass; of huge numbers it overflows, and all are looked at
            return _product(w, x)
        non_finite = ~x.isfinite().all(dim=3)  # (B, H, N)
        if not non_finite.any():
            return _product(w, x)
        out = _product(w, x.masked_fill(non_finite[..., None], 0))
        for j in non_finite.any(dim=0).any(dim=0).nonzero()[:, 0].tolist():
            affected = non_finite[:, :, j, None, None]
            if visible is not None:
                affected = affected & visible[..., j, None]  # (B, H, M, 1)
            out = out + (w[..., j, None] * x[:, :, None, j]).masked_fill(~affected, 0)
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        _save(ctx, inputs)

    @staticmethod
    @loop_over_vmapped_grads
    def backward(ctx: Any, grad: Tensor) -> Any:
        w, x, visible = ctx.saved_tensors
        return (
            VisibleScores.apply(grad, x, visible),
            VisibleSum.apply(w.transpose(2, 3), grad, _transposed(visible)),
            None,
        )

    @staticmethod
    def jvp(ctx: Any, w_tangent: Tensor | None, x_tangent: Tensor | None, _: None) -> Any:
        return _product_rule(VisibleSum, ctx.saved_tensors, w_tangent, x_tangent)

    @staticmethod
    def vmap(info: Any, dims: tuple[int | None, ...], *inputs: Tensor) -> Any:
        return _in_one_batch(VisibleSum, info.batch_size, dims, inputs), 0


def _transposed(visible: Tensor | None) -> Tensor | None:
    return None if visible is None else visible.transpose(2, 3)


def _applied(function: Any, a: Tensor, b: Tensor, visible: Tensor | None) -> Tensor:
    """``function.apply``; without a gradient the product alone: torch binds the arguments by name, which takes 100 microseconds."""
    records = torch.is_grad_enabled() and (a.requires_grad or b.requires_grad)
    apply = function.apply if records or transformation() is not None else function.forward
    product: Tensor = apply(a, b, visible)
    return product


def _save(ctx: Any, inputs: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs)
    ctx.save_for_forward(*inputs)


def _product_rule(function: Any, saved: tuple[Tensor, ...], da: Tensor | None, db: Tensor | None) -> Any:
    """The tangent of a function that is linear in a and in b: f(da, b) + f(a, db)."""
    a, b, visible = saved
    parts = [] if da is None else [function.apply(da, b, visible)]
    parts += [] if db is None else [function.apply(a, db, visible)]
    return sum(parts[1:], parts[0]) if parts else None


def _in_one_batch(function: Any, size: int, dims: tuple[int | None, ...], inputs: tuple[Tensor | None, ...]) -> Tensor:
    """Apply the function once, with the dimension that torch.vmap maps over joined to the batch; returns (size, B, ...)."""
    first = [x if x is None or dim is None else x.movedim(dim, 0) for x, dim in zip(inputs, dims, strict=True)]
    rows = max(x.shape[0 if dim is None else 1] for x, dim in zip(first, dims, strict=True) if x is not None)
    joined: list[Tensor | None] = []
    for x, dim in zip(first, dims, strict=True):
        if x is None:
            joined.append(None)
            continue
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

"""Two ways to attend over a sequence that is spread over processes, which know nothing of the mask: all-gather, and ring attention.

Both are exact under any mask, have gradients, and take the tokens as a plan deals them; attention itself is lowtri's.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import lowtri
from lowtri.parallel import ShardPlan, collectives

__all__ = ["all_gather_attention", "ring_attention"]


class _AllGather(torch.autograd.Function):
    """Rows (tokens, ...) of all ranks; the gradients of each rank's rows are summed over the ranks."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        out = rows.new_empty((dist.get_world_size() * len(rows), *rows.shape[1:]))
        collectives.all_gather(out, rows.contiguous(), None)
        return out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> Tensor:  # type: ignore[override]
        d_out = d_out.contiguous()
        back = torch.empty_like(d_out)
        dist.all_to_all_single(back, d_out)
        return back.unflatten(0, (dist.get_world_size(), -1)).sum(0)


def all_gather_attention(plan: ShardPlan, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """All keys come to all ranks, and are kept for the backward. All ranks hold equally many tokens."""
    positions = torch.cat([torch.from_numpy(plan.positions(rank)) for rank in range(plan.ranks)])
    rows = _AllGather.apply(torch.cat([k, v], -1).permute(2, 0, 1, 3)).permute(1, 2, 0, 3)  # (B, Hkv, N, D + Dv)
    mine = plan.positions(dist.get_rank())
    keys = rows[..., : k.shape[3]]
    values = rows[..., k.shape[3] :]
    return lowtri.attention(q, keys, values, plan.masks[0], q_positions=mine, k_positions=positions)


class _Ring(torch.autograd.Function):
    """Keys and values go round the ranks, each set attended while the next one arrives; so do their gradients."""

    @staticmethod
    def forward(ctx: Any, plan: ShardPlan, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rank = dist.get_rank()
        results = []
        rows = torch.cat([k, v], -1).contiguous()
        for step in range(plan.ranks):
            owner = (rank - step) % plan.ranks
            coming, works = _shift([rows]) if step + 1 < plan.ranks else ([rows], [])
            options = {"q_positions": plan.positions(rank), "k_positions": plan.positions(owner)}
            keys = rows[..., : k.shape[3]]
            values = rows[..., k.shape[3] :]
            results.append(lowtri.attention(q, keys, values, plan.masks[0], return_lse=True, **options))
            _wait(works)
            rows = coming[0]
        output, lse = lowtri.merge(*zip(*results, strict=True))
        ctx.plan = plan
        ctx.save_for_backward(q, k, v, output, lse)
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_output: Tensor) -> Any:
        plan = ctx.plan
        *inputs, output, lse = ctx.saved_tensors
        q, k, v = inputs
        rank = dist.get_rank()
        d_q = torch.zeros_like(q)
        rows = torch.cat([k, v], -1).contiguous()
        d_rows = torch.zeros_like(rows)
        for step in range(plan.ranks):
            owner = (rank - step) % plan.ranks
            coming, works = _shift([rows]) if step + 1 < plan.ranks else ([rows], [])
            options = {"q_positions": plan.positions(rank), "k_positions": plan.positions(owner)}
            keys = rows[..., : k.shape[3]]
            values = rows[..., k.shape[3] :]
            part = lowtri.attention_backward(d_output, None, output, lse, q, keys, values, plan.masks[0], **options)
            d_q += part.q
            _wait(works)
            # The gradients follow their keys, one step behind; after the last step they are home.
            moved, works = _shift([d_rows + torch.cat([part.k, part.v], -1).contiguous()])
            _wait(works)
            rows = coming[0]
            d_rows = moved[0]
        return None, d_q, d_rows[..., : k.shape[3]], d_rows[..., k.shape[3] :]


def ring_attention(plan: ShardPlan, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Ring attention (Liu et al. 2023). All ranks hold equally many tokens."""
    return _Ring.apply(plan, q, k, v)


def _shift(tensors: list[Tensor]) -> tuple[list[Tensor], list[Any]]:
    """Send to the next rank, receive from the one before."""
    rank = dist.get_rank()
    size = dist.get_world_size()
    received = [torch.empty_like(x) for x in tensors]
    works = [dist.isend(x, (rank + 1) % size) for x in tensors]
    works += [dist.irecv(x, (rank - 1) % size) for x in received]
    return received, works


def _wait(works: list[Any]) -> None:
    for work in works:
        work.wait()

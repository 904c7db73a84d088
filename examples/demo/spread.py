"""One row of 65,536 tokens over four processes: each receives only the keys that its queries see."""

from __future__ import annotations

import multiprocessing
import time
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

import lowtri
from demo.context import Context, Result
from lowtri.parallel import ContextParallel, ShardPlan, plan_shards

__all__ = ["SENTENCE", "TITLE", "run"]

TITLE = "One row over four processes"
SENTENCE = "A row of 65,536 tokens under a window of 1,024: who holds what, what travels, and the same answer."

_MASK, _N, _RANKS, _HEADS, _SIZE = "causal & window(1024)", 65_536, 4, 2, 32


def run(context: Context) -> Result:
    """Attention with gradients on four processes, by what the mask shows and by an all-gather, beside one process."""
    plan = plan_shards(_MASK, _N, _RANKS)
    context.note("spread: four processes")
    ranks = _on_ranks(plan)
    q, k, v = (x.requires_grad_() for x in _row())
    begun = time.perf_counter()
    output = lowtri.attention(q, k, v, _MASK)
    output.sum().backward()
    alone = time.perf_counter() - begun
    error = max(
        float(np.abs(part[name] - whole[:, :, plan.positions(rank)].numpy()).max())
        for rank, part in enumerate(ranks)
        for name, whole in (("output", output.detach()), ("d_k", k.grad))
    )
    result = Result(plan.draw())
    seen, gathered = int(plan.received.max()), _N - _N // _RANKS
    bytes_of_token = _HEADS * 2 * _SIZE * 4
    result.text += (
        f"\n\n{'':<24}{'received by a rank':>20}{'forward and backward':>24}"
        f"\n{'what the mask shows':<24}{seen * bytes_of_token / 1e6:>17.1f} MB{ranks[0]['seen']:>22.2f} s"
        f"\n{'all-gather':<24}{gathered * bytes_of_token / 1e6:>17.1f} MB{ranks[0]['gathered']:>22.2f} s"
        f"\n{'one process':<24}{'':>20}{alone:>22.2f} s"
    )
    result.check(f"outputs and gradients are those of one process to {error:.0e}", error < 2e-4)
    result.check(f"a rank receives {seen / gathered:.0%} of what an all-gather brings", seen < 0.1 * gathered)
    result.check(f"the busiest rank has {plan.imbalance:.3f} times the mean of visible pairs", plan.imbalance < 1.06)
    return result


def _row() -> torch.Tensor:
    return torch.randn(3, 1, _HEADS, _N, _SIZE, generator=torch.Generator().manual_seed(0))


def _on_ranks(plan: ShardPlan) -> list[dict[str, Any]]:
    processes = multiprocessing.get_context("spawn")
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipes, workers = [], []
    for rank in range(plan.ranks):
        mine, theirs = processes.Pipe()
        workers.append(processes.Process(target=_rank, args=(rank, store.port, plan, theirs), daemon=True))
        workers[-1].start()
        theirs.close()
        pipes.append(mine)
    results = [pipe.recv() for pipe in pipes]
    for worker in workers:
        worker.join()
    return results


def _rank(rank: int, port: int, plan: ShardPlan, pipe: Connection) -> None:
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=plan.ranks)
    found: dict[str, Any] = {}
    for name, one in (("seen", plan), ("gathered", replace(plan, gathers=(True,)))):
        context = ContextParallel(one)
        q, k, v = (context.shard(x, 2).requires_grad_() for x in _row())
        context.attention(q, k, v).sum().backward()  # loads kernels
        k.grad = None
        dist.barrier()
        begun = time.perf_counter()
        output = context.attention(q, k, v)
        output.sum().backward()
        dist.barrier()
        found[name] = time.perf_counter() - begun
        assert k.grad is not None
        found |= {"output": output.detach().numpy(), "d_k": k.grad.numpy()}
    pipe.send(found)
    dist.barrier()
    dist.destroy_process_group()

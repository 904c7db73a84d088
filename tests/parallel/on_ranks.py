"""Functions that the tests run on each rank."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from lowtri.masks import Mask
from lowtri.parallel import ContextParallel, ShardPlan, plan_shards


@dataclass(frozen=True)
class Case:
    """One call of attention on a whole sequence; every process draws the same tensors."""

    mask: Mask | str
    n: int
    owner: Any = None
    block: int = 64
    b: int = 1
    hq: int = 2
    hkv: int = 1
    d: int = 8
    dv: int = 8
    dtype: str = "float64"
    seed: int = 0
    garbage: float = 0.0  # where nobody sees anything
    sinks: bool = False
    bias: str = ""
    options: dict[str, Any] = field(default_factory=dict)  # of attention
    context: dict[str, Any] = field(default_factory=dict)  # of ContextParallel

    def plan(self, ranks: int) -> ShardPlan:
        return plan_shards(self.mask, self.n, ranks, block=self.block, owner=self.owner)

    def tensors(self) -> dict[str, torch.Tensor]:
        """q, k, v, d_output, d_lse and sinks of the whole sequence."""
        source = torch.Generator().manual_seed(self.seed)
        sizes = {
            "q": (self.hq, self.d),
            "k": (self.hkv, self.d),
            "v": (self.hkv, self.dv),
            "d_output": (self.hq, self.dv),
        }
        found = {
            name: torch.randn(self.b, heads, self.n, size, generator=source, dtype=torch.float64).to(
                getattr(torch, self.dtype)
            )
            for name, (heads, size) in sizes.items()
        }
        found["d_lse"] = torch.randn(self.b, self.hq, self.n, generator=source, dtype=torch.float64)
        found["sinks"] = torch.randn(self.hq, generator=source, dtype=torch.float64).to(getattr(torch, self.dtype))
        found["table"] = torch.randn(self.hq, 64, generator=source, dtype=torch.float64).to(getattr(torch, self.dtype))
        return found


def bias_function(kind: str, table: torch.Tensor) -> Any:
    """A bias by formula: "" for none, "slope" without parameters, "learned" from a table of distances."""
    if not kind:
        return None
    if kind == "slope":
        return lambda q, k: (-0.01 * (q - k).abs()).to(table.dtype)
    return lambda q, k: table[:, (q - k).abs().clamp(max=63)]


def attention_case(group: Any, case: Case) -> dict[str, Any]:
    """Output, log-sum-exp and gradients of this rank's tokens, what was received, and what the layer keeps."""
    plan = case.plan(dist.get_world_size(group))
    context = ContextParallel(plan, group, **case.context)
    whole = case.tensors()
    q, k, v = (context.shard(whole[name], 2).requires_grad_() for name in "qkv")
    sinks = whole["sinks"].requires_grad_() if case.sinks else None
    table = whole["table"].requires_grad_()
    bias = bias_function(case.bias, table)
    options = {**case.options, "bias": bias, "sinks": sinks, "return_lse": True}
    kept = []
    with (
        torch.autograd.graph.saved_tensors_hooks(lambda x: (kept.append(x.nbytes), x)[1], lambda x: x),
        Counted() as wire,
    ):
        output, lse = context.attention(q, k, v, **options)
        forward = wire.rows
        d_lse = context.shard(whole["d_lse"], 2).to(lse.dtype)
        torch.autograd.backward([output, lse], [context.shard(whole["d_output"], 2), d_lse])
    again = torch.autograd.grad(context.attention(q, k, v, **options)[0], k, context.shard(whole["d_output"], 2))[0]
    third = torch.autograd.grad(context.attention(q, k, v, **options)[0], k, context.shard(whole["d_output"], 2))[0]
    assert torch.equal(again, third), "bit-equal from run to run"
    np.testing.assert_array_equal(
        context.unshard(output.detach(), 2)[:, :, context.positions].numpy(), output.detach().numpy()
    ) if (case.dtype != "bfloat16") else None
    grads = {"dq": q.grad, "dk": k.grad, "dv": v.grad}
    if case.sinks:
        grads["dsinks"] = sinks.grad
    if case.bias == "learned":
        grads["dbias"] = table.grad
    results = {"output": output, "lse": lse, **grads}
    return {
        **{name: x.detach().double().numpy() for name, x in results.items()},
        "received": forward,
        "messages": wire.messages,
        "kept": sum(kept),
    }


class Counted:
    """Counts the rows that arrive from other ranks, by replacing the collectives of torch.distributed."""

    def __enter__(self) -> Counted:
        self.rows, self.messages = 0, 0
        self._all_to_all, self._all_gather = dist.all_to_all_single, dist.all_gather_into_tensor

        def all_to_all(out: Any, x: Any, received: Any = None, sent: Any = None, group: Any = None, **rest: Any) -> Any:
            me, size = dist.get_rank(group), dist.get_world_size(group)
            parts = [len(out) // size] * size if received is None else received
            self.rows += sum(parts) - parts[me]
            self.messages += 1
            return self._all_to_all(out, x, received, sent, group=group, **rest)

        def all_gather(out: Any, x: Any, group: Any = None, **rest: Any) -> Any:
            if x.ndim > 1:
                self.rows += len(out) - len(x)
                self.messages += 1
            return self._all_gather(out, x, group=group, **rest)

        dist.all_to_all_single, dist.all_gather_into_tensor = all_to_all, all_gather  # type: ignore[assignment]
        return self

    def __exit__(self, *_: Any) -> None:
        dist.all_to_all_single, dist.all_gather_into_tensor = self._all_to_all, self._all_gather

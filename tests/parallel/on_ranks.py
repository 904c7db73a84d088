"""Functions that the tests run on each rank."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import lowtri
from lowtri import masks as lt
from lowtri.masks import Mask
from lowtri.parallel import ContextParallel, ShardPlan, collectives, plan_shards


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
        shapes = {name: (self.b, heads, self.n, size) for name, (heads, size) in sizes.items()}
        shapes |= {"d_lse": (self.b, self.hq, self.n), "sinks": (self.hq,), "table": (self.hq, 64)}
        found = {name: torch.randn(shape, generator=source, dtype=torch.float64) for name, shape in shapes.items()}
        kind = getattr(torch, self.dtype)
        return {name: x if name == "d_lse" else x.to(kind) for name, x in found.items()}


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
    with Counted() as wire:
        with torch.autograd.graph.saved_tensors_hooks(lambda x: (kept.append(x.nbytes), x)[1], lambda x: x):
            output, lse = context.attention(q, k, v, **options)
        forward = wire.rows
        d_lse = context.shard(whole["d_lse"], 2).to(lse.dtype)
        torch.autograd.backward([output, lse], [context.shard(whole["d_output"], 2), d_lse])
    again = torch.autograd.grad(context.attention(q, k, v, **options)[0], k, context.shard(whole["d_output"], 2))[0]
    third = torch.autograd.grad(context.attention(q, k, v, **options)[0], k, context.shard(whole["d_output"], 2))[0]
    assert torch.equal(again, third), "bit-equal from run to run"
    assert torch.equal(context.unshard(output.detach(), 2)[:, :, context.positions], output.detach())
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


def bias_under_autocast(group: Any) -> torch.dtype:
    """The type in which a learned bias is computed where half types are asked for."""
    context = ContextParallel(plan_shards("causal", 64, dist.get_world_size(group), block=64), group)
    x, weight, types = torch.randn(1, 1, 64, 8), torch.ones(1, 1, requires_grad=True), []

    def bias(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        types.append((torch.ones(1, 1) @ weight).dtype)
        return weight * (k - q)

    with torch.autocast("cpu", torch.bfloat16):
        context.attention(x, x, x, bias=bias)
    return types[0]


def differences(context: ContextParallel, whole: torch.Tensor, mask: Mask) -> list[float]:
    """How far the output and the gradients of this rank's tokens are from the definition on the whole sequence."""
    shards = [context.shard(x, 2).requires_grad_() for x in whole]
    output = context.attention(*shards)
    output.square().sum().backward()
    leaves = [x.clone().requires_grad_() for x in whole]
    expected = lowtri.attention(*leaves, mask, engine="reference")
    expected.square().sum().backward()
    mine = torch.from_numpy(context.positions)
    grads = [(a.grad, b.grad[:, :, mine]) for a, b in zip(shards, leaves, strict=True)]
    return [float((a - b).abs().max()) if len(mine) else 0.0 for a, b in ((output, expected[:, :, mine]), *grads)]


def hidden_garbage(group: Any) -> list[float]:
    """Documents on different ranks; NaN in keys that nobody sees and in blocks that only their owner sees."""
    n = 512
    mask = lt.causal() & lt.documents(lengths=[200, 312]) & lt.keys(np.arange(n) >= 64)
    whole = torch.randn(3, 1, 2, n, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    whole[1, :, :, :64], whole[2, :, :, :64] = torch.nan, torch.inf
    plan = plan_shards(mask, n, dist.get_world_size(group), block=64)
    return differences(ContextParallel(plan, group), whole, mask)


def wrong_arguments(group: Any) -> list[str]:
    """The errors of calls in which one rank differs from the others; every rank must raise each of them."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    last = rank == size - 1
    ids = np.repeat([0, 1], [100, 156 + last])[:256]
    ids[200] = int(last)
    n = 256
    good = ContextParallel(plan_shards("causal", n, size, block=64), group)
    layers = ContextParallel(plan_shards(["causal", "full"], n, size, block=64), group)
    q = torch.randn(1, 2, len(good.positions), 8)
    grown = torch.cat([q, q[:, :, :1]], 2) if last else q
    wide = q.double() if last else q
    recorded = q.clone().requires_grad_(last)
    calls = {
        "another plan": lambda: ContextParallel(plan_shards("causal", n + 64 * last, size, block=64), group),
        "other arrays": lambda: ContextParallel(plan_shards(lt.documents(ids), n, size, block=64), group),
        "another length": lambda: good.attention(grown, grown, grown),
        "another dtype": lambda: good.attention(wide, wide, wide),
        "gradients on one": lambda: good.attention(recorded, q, q),
        "another option": lambda: good.attention(q, q, q, softcap=2.0 if last else None),
        "another mask": lambda: good.attention(q, q, q, "full" if last else "causal"),
        "no mask of two": lambda: layers.attention(q, q, q, None if last else "full"),
        "another layer's mask": lambda: layers.attention(q, q, q, "causal" if last else "full"),
        "a tensor as bias": lambda: good.attention(q, q, q, bias=torch.zeros(1) if last else None),
        "unshard": lambda: good.unshard(grown, 2),
        "unshard with a gradient": lambda: good.unshard(recorded, 2),
        # Errors that follow from the same arguments everywhere need no message.
        "shard": lambda: good.shard(torch.zeros(2, n - 1)),
        "another number of ranks": lambda: ContextParallel(plan_shards("causal", n, size + 1), group),
        "positions": lambda: good.attend(q, q, q, "causal", q_positions=good.positions, k_positions=None),
        "weights": lambda: good.attend(
            q, q, q, "causal", q_positions=good.positions, k_positions=good.positions, return_weights=True
        ),
    }
    messages = {}
    for name, call in calls.items():
        try:
            call()
            messages[name] = "no error"
        except lowtri.LowtriError as error:
            messages[name] = f"{type(error).__name__}: {error}"
    output = good.attention(q, q, q)  # afterwards the group still works
    assert output.shape == q.shape
    return messages


def absent(group: Any, missing: int) -> str:
    """One rank does not come; the others say so. In a group of its own, since a time-out closes connections."""
    rank = dist.get_rank(group)
    group = dist.new_group()
    if rank == missing:
        return ""
    try:
        ContextParallel(plan_shards("causal", 512, dist.get_world_size(group)), group, timeout=0.5)
    except lowtri.RankError as error:
        return str(error)
    return "no error"


def killed(group: Any, victim: int) -> str:
    """One rank is killed between two calls; the others notice."""
    rank = dist.get_rank(group)
    context = ContextParallel(plan_shards("causal & window(100)", 512, dist.get_world_size(group)), group, timeout=3)
    q = torch.randn(1, 1, len(context.positions), 8)
    context.attention(q, q, q)
    if rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        for _ in range(3):
            context.attention(q, q, q)
    except lowtri.RankError as error:
        return str(error)
    return "no error"


def functions_as_masks(group: Any) -> list[float]:
    """Masks of where(): each process makes its own function."""
    mask = lt.causal() & lt.where(lambda q, k: (q // 50 + k // 50) % 3 > 0)
    whole = torch.randn(3, 1, 2, 400, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    plan = plan_shards(mask, 400, dist.get_world_size(group), block=64)
    return differences(ContextParallel(plan, group), whole, mask)


def round_trip(group: Any) -> bool:
    """unshard(shard(x)) is x, along any dimension and for any dtype."""
    context = ContextParallel(plan_shards("causal", 333, dist.get_world_size(group)), group)
    torch.manual_seed(0)  # ranks that ran other tests before drew other numbers
    equal = True
    for dim, x in ((1, torch.arange(666).reshape(2, 333)), (2, torch.randn(2, 3, 333, 4)), (-2, torch.randn(333, 2))):
        for dtype in (torch.int64, torch.float32, torch.bfloat16, torch.bool):
            equal &= torch.equal(context.unshard(context.shard(x.to(dtype), dim), dim), x.to(dtype))
    return equal


class Counted:
    """Counts the rows that arrive from other ranks."""

    def __enter__(self) -> Counted:
        self.rows, self.messages = 0, 0
        self._all_to_all, self._all_gather = collectives.all_to_all, collectives.all_gather

        def all_to_all(out: Any, x: Any, received: list[int], sent: list[int], group: Any) -> Any:
            self.rows += sum(received) - received[dist.get_rank(group)]
            self.messages += 1
            return self._all_to_all(out, x, received, sent, group)

        def all_gather(out: Any, x: Any, group: Any, *, async_op: bool = False) -> Any:
            if x.ndim > 1:
                self.rows += len(out) - len(x)
                self.messages += 1
            return self._all_gather(out, x, group, async_op=async_op)

        collectives.all_to_all, collectives.all_gather = all_to_all, all_gather  # type: ignore[assignment]
        return self

    def __exit__(self, *_: Any) -> None:
        collectives.all_to_all, collectives.all_gather = self._all_to_all, self._all_gather

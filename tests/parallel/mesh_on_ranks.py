"""Functions of test_meshes that run on each rank: two groups share rows, two processes of a group share the tokens of a row."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import lowtri
from lowtri.nn import Decoder, DecoderConfig
from lowtri.parallel import ContextParallel, plan_shards

N, ROWS, MASK = 256, 4, "causal & window(100)"


def model() -> Decoder:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return Decoder(DecoderConfig(vocab_size=50, max_position_embeddings=N, mask=MASK, **sizes))


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and targets (B, N); rows have very different numbers of targets."""
    ids = torch.randint(50, (ROWS, N), generator=torch.Generator().manual_seed(1))
    targets = ids.roll(-1, 1)
    for row in range(ROWS):
        targets[row, 20 + 70 * row :] = -100
    return ids, targets


def loss_sum(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum")


def gradients_of_one() -> dict[str, torch.Tensor]:
    one, (ids, targets) = model(), batch()
    (loss_sum(one(ids), targets) / (targets != -100).sum()).backward()
    return {name: weight.grad for name, weight in one.named_parameters()}


def gradients(group: Any, kind: str) -> float:
    """The greatest difference of a gradient from that of one process, relative to the greatest gradient of the weight."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "sp"))
    context = ContextParallel(plan_shards(MASK, N, 2, block=64), mesh["sp"])
    ids, targets = batch()
    mine, row = model(), slice(mesh.get_local_rank("dp"), None, 2)
    called: Any = mine
    if kind == "ddp":
        called = torch.nn.parallel.DistributedDataParallel(mine)
    elif kind == "compiled":
        called = torch.nn.parallel.DistributedDataParallel(mine)
        called.compile(backend="aot_eager")
    else:  # hsdp: weights are sharded within a group, and replicated between groups
        for layer in mine.model.layers:
            fully_shard(layer, mesh=mesh)
        called = fully_shard(mine, mesh=mesh)
    logits = called(context.shard(ids[row]), positions=context.positions, attend=context.attend)
    loss = loss_sum(logits, context.shard(targets[row])) / (targets != -100).sum()
    (loss * dist.get_world_size()).backward()  # DDP and FSDP average over the processes
    return _difference(mine)


def _difference(mine: Any) -> float:
    """The greatest difference of a gradient from that of one process, relative to the greatest gradient of the weight."""
    differences = []
    for name, expected in gradients_of_one().items():
        gradient: Any = dict(mine.named_parameters())[name].grad
        whole = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
        differences.append(float((whole - expected).abs().max() / expected.abs().max()))
    return max(differences)


def meshes(group: Any) -> list[str]:
    """What ContextParallel makes of meshes of several shapes."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "sp"))
    messages = []
    for one in (mesh["sp"], mesh["sp"].get_group(), mesh, init_device_mesh("cpu", (4,))):
        try:
            messages.append(repr(ContextParallel(plan_shards("causal", 256, 2, block=64), one)))
        except lowtri.CallError as error:
            messages.append(str(error))
    return messages

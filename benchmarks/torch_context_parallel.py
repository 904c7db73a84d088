"""torch's own context parallelism (experimental) on gloo and CPU: does it run, and is it right?

    python benchmarks/torch_context_parallel.py

Two processes; causal attention of float32 tensors through F.scaled_dot_product_attention, forward and backward, inside of
torch.distributed.tensor.experimental.context_parallel, with the kernels that torch would choose, and with each of its kernels
alone. Prints the error of the output and of dq, or what torch raised.
"""

from __future__ import annotations

import tempfile
import warnings

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F

import lowtri
from lowtri.parallel import ContextParallel, plan_shards

N = 1024
RANKS = 2


def with_torch(mesh: object, backend: object) -> str:
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import context_parallel_unshard
    from torch.nn.attention import sdpa_kernel

    torch.manual_seed(0)
    *inputs, d = torch.randn(4, 1, 4, N, 32)
    exact = [x.clone().requires_grad_() for x in inputs]
    expected = F.scaled_dot_product_attention(*exact, is_causal=True)
    expected.backward(d)
    leaves = [x.clone() for x in inputs]
    d = d.clone()
    with (
        sdpa_kernel(backend),
        context_parallel(mesh, buffers=[*leaves, d], buffer_seq_dims=[2] * 4),
    ):
        leaves = [x.detach().requires_grad_() for x in leaves]  # the shards
        output = F.scaled_dot_product_attention(*leaves, is_causal=True)
        output.backward(d)
        whole = context_parallel_unshard(mesh, [output.detach(), leaves[0].grad], [2, 2])
    errors = [float((a - b).abs().max()) for a, b in zip(whole, (expected, exact[0].grad), strict=True)]
    return f"ran; error of the output {errors[0]:.1e}, of dq {errors[1]:.1e}"


def with_lowtri() -> str:
    torch.manual_seed(0)
    *inputs, d = torch.randn(4, 1, 4, N, 32)
    exact = [x.clone().requires_grad_() for x in inputs]
    expected = lowtri.attention(*exact, "causal")
    expected.backward(d)
    context = ContextParallel(plan_shards("causal", N, RANKS))
    leaves = [context.shard(x, 2).requires_grad_() for x in inputs]
    output = context.attention(*leaves)
    output.backward(context.shard(d, 2))
    pairs = (output.detach(), expected), (leaves[0].grad, exact[0].grad)
    errors = [float((a - context.shard(b.detach(), 2)).abs().max()) for a, b in pairs]
    return f"ran; error of the output {errors[0]:.1e}, of dq {errors[1]:.1e}"


def run(rank: int, path: str) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=RANKS)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.nn.attention import SDPBackend

    mesh = init_device_mesh("cpu", (RANKS,))
    every = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    trials = {
        "lowtri": with_lowtri,
        "torch, any": lambda: with_torch(mesh, every),
        "torch, flash": lambda: with_torch(mesh, every[0]),
        "torch, efficient": lambda: with_torch(mesh, every[1]),
        "torch, math": lambda: with_torch(mesh, every[2]),
    }
    for name, trial in trials.items():
        try:
            result = trial()
        except Exception as error:
            result = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        if rank == 0:
            print(f"{name:17} {result}", flush=True)
        dist.barrier()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run, (f"{folder}/store",), RANKS)

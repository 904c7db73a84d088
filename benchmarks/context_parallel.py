"""One attention over several processes and a network of known bandwidth: ContextParallel beside all-gather and ring attention.

    python benchmarks/context_parallel.py                      # as root: namespaces, 2 and 4 ranks, two networks
    python benchmarks/context_parallel.py --ranks 2 --gbit 0   # loopback, by anybody

Forward and backward in float32, interleaved; gloo; a thread for each rank. Before timing, every way's output and gradients are compared
with those of the first. The time of a repetition is that of the slowest rank; printed are medians over the repetitions, with the
tokens whose keys a rank receives forward, and the CPU time of the slowest rank, which other programs of the machine do not change much.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from context_parallel_peers import all_gather_attention, ring_attention
from emulated_network import Network
from lowtri.masks import Mask, as_mask, causal, documents
from lowtri.parallel import ContextParallel, ShardPlan, plan_shards


def mask_of(name: str, n: int) -> Mask:
    if name == "documents":
        return causal() & documents(lengths=document_lengths(n))
    return as_mask({"causal": "causal", "window": f"causal & window({n // 16})"}[name])


def document_lengths(n: int) -> list[int]:
    """Lognormal: about twenty documents, whatever their size."""
    random = np.random.default_rng(0)
    lengths = []
    while sum(lengths) < n:
        lengths.append(int(min(max(16, random.lognormal(np.log(n / 30), 1.0)), n - sum(lengths))))
    return lengths


def ways_of(plan: ShardPlan) -> dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]]:
    contexts = {name: ContextParallel(plan, overlap=name == "overlap") for name in ("overlap", "no overlap")}
    ways: dict[str, Any] = {name: context.attention for name, context in contexts.items()}
    ways["all-gather"] = lambda q, k, v: all_gather_attention(plan, q, k, v)
    ways["ring"] = lambda q, k, v: ring_attention(plan, q, k, v)
    return ways


def worker(args: argparse.Namespace) -> None:
    """One rank: prints, as JSON, the seconds of each repetition of each way under each mask."""
    torch.set_num_threads(1)
    address = f"tcp://{args.address}:29577"
    dist.init_process_group("gloo", init_method=address, rank=args.worker, world_size=args.ranks)
    rank = args.worker
    results = []
    for name in args.masks:
        n = args.n if name == "causal" else 2 * args.n
        plan = plan_shards(mask_of(name, n), n, args.ranks)
        source = torch.Generator().manual_seed(0)
        shapes = {"q": (args.heads, 64), "k": (args.heads // 2, 64), "v": (args.heads // 2, 64), "d": (args.heads, 64)}
        mine = torch.from_numpy(plan.positions(rank))
        whole = {which: torch.randn(1, heads, n, size, generator=source) for which, (heads, size) in shapes.items()}
        *leaves, d_output = (x[:, :, mine].contiguous() for x in whole.values())
        leaves = [x.requires_grad_() for x in leaves]
        ways = ways_of(plan)
        reference: list[Tensor] = []
        times: dict[str, list[list[float]]] = {way: [] for way in ways}
        for repetition in range(args.repetitions + 1):
            for way, attend in ways.items():
                dist.barrier()
                begin = time.perf_counter()
                cpu = time.process_time()
                output = attend(*leaves)
                grads = torch.autograd.grad(output, leaves, d_output)
                taken = [time.perf_counter() - begin, time.process_time() - cpu]
                if repetition:
                    times[way].append(taken)
                    continue
                reference = reference or [output.detach(), *grads]
                for one, other in zip(reference, (output, *grads), strict=True):
                    torch.testing.assert_close(one, other.detach(), rtol=1e-4, atol=1e-4)
        received = {"overlap": int(plan.received[rank]), "all-gather": n - len(mine)}
        pairs = int(plan.pairs[rank])
        results.append({"mask": name, "n": n, "way": plan.way, "pairs": pairs, "received": received, "times": times})
    print(json.dumps(results), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def measure(args: argparse.Namespace, ranks: int, gbit: float) -> list[list[dict[str, Any]]]:
    """The results of each rank."""
    if not gbit:
        return _run(args, ranks, ["127.0.0.1"] * ranks, [[]] * ranks, ["lo"] * ranks)
    with Network(ranks, gbit=gbit, delay=args.delay) as network:
        numbers = range(ranks)
        devices = [network.device(number) for number in numbers]
        return _run(args, ranks, [network.address(0)] * ranks, [network.prefix(number) for number in numbers], devices)


def _run(
    args: argparse.Namespace, ranks: int, addresses: list[str], prefixes: list[list[str]], devices: list[str]
) -> list[list[dict[str, Any]]]:
    running = []
    for rank in range(ranks):
        own = ["--worker", str(rank), "--address", addresses[rank], "--ranks", str(ranks), "--n", str(args.n)]
        own += ["--heads", str(args.heads), "--repetitions", str(args.repetitions), "--masks", *args.masks]
        command = [*prefixes[rank], sys.executable, __file__, *own]
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": devices[rank], "OMP_NUM_THREADS": "1"}
        running.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment))
    outputs = [process.communicate()[0] for process in running]
    return [json.loads(output) for output in outputs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--gbit", type=float, nargs="+", default=[1.0, 0.1], help="0 for loopback")
    parser.add_argument("--delay", type=float, default=0.2e-3, help="seconds, one way")
    parser.add_argument("--n", type=int, default=8192, help="tokens under causal; twice as many under the other masks")
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--masks", nargs="+", default=["causal", "window", "documents"])
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker is not None:
        args.ranks = args.ranks[0]
        worker(args)
        return
    print(f"{args.heads} heads of 64, half as many of keys, float32; delay {args.delay * 1e3:g} ms")
    print("ranks  network      mask       tokens   way          time      CPU time  received (most)")
    for ranks in args.ranks:
        for gbit in args.gbit:
            parts = measure(args, ranks, gbit)
            for mask in range(len(args.masks)):
                one = [part[mask] for part in parts]
                for way in one[0]["times"]:
                    wall, cpu = (
                        statistics.median(max(times) for times in zip(*column, strict=True))
                        for column in ([[t[i] for t in part["times"][way]] for part in one] for i in (0, 1))
                    )
                    kind = "overlap" if "overlap" in way else "all-gather"
                    received = max(part["received"][kind] for part in one)
                    network = f"{gbit:g} Gbit/s" if gbit else "loopback"
                    print(
                        f"{ranks:5}  {network:11}  {one[0]['mask']:9}  {one[0]['n']:6,}   {way:10}  {wall * 1e3:6,.0f} ms"
                        f"  {cpu * 1e3:8,.0f} ms  {received:8,}",
                        flush=True,
                    )


if __name__ == "__main__":
    main()

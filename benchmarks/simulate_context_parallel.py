"""Context parallelism on 8 to 1,024 ranks, simulated: attention's measured time on one core, and a network as stated.

    python benchmarks/simulate_context_parallel.py                  # 1,048,576 tokens, 10 Gbit/s
    python benchmarks/simulate_context_parallel.py --check 2 --n 2048   # the parts, against two real ranks on loopback

The time of one layer's attention, forward and backward, is simulated for ContextParallel, an all-gather, and ring attention.

Compute: seconds = pairs x heads x a + keys x b + queries x c, fitted to the CPU times of calls on this machine.
Network: a rank receives its bytes at the bandwidth, and each of its messages takes the delay once more; all ranks at the same time.

ContextParallel  forward and backward: the greater of fetching and attending the own keys, then the other keys; then gradients return
all-gather       gathering, then all keys; gradients return
ring             in every step the slowest of all ranks: attending one rank's keys, or passing them on; gradients follow their keys
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

import lowtri
from context_parallel import document_lengths, mask_of
from lowtri.parallel import ShardPlan, plan_shards

Floats = NDArray[np.float64]
SHAPES = [  # queries, keys, mask
    (1024, 1024, "causal"),
    (512, 4096, "full"),
    (1024, 4096, "full"),
    (256, 4096, "window(64)"),
    (2048, 2048, "window(64)"),
]
FORWARD = 0.3  # of the time of a forward and a backward; the backward has five products, the forward two


@dataclass(frozen=True)
class Machine:
    pair: float  # seconds for a visible pair of one query head, forward and backward
    key: float  # seconds for a key
    query: float
    heads: int
    gbit: float
    delay: float

    def compute(self, pairs: Floats, keys: Floats, queries: Floats) -> Floats:
        return pairs * self.heads * self.pair + keys * self.key + queries * self.query

    def network(self, tokens: Floats, messages: Floats | int) -> Floats:
        """Keys and values, or their gradients: half as many heads as queries, 64 numbers of 4 bytes each."""
        return tokens * (self.heads // 2 * 2 * 64 * 4 * 8e-9 / self.gbit) + messages * self.delay


class Work(NamedTuple):
    """What the ranks of a plan have to do."""

    pairs: Floats  # (ranks, ranks): of the queries of a rank and the keys of another
    senders: Floats  # (ranks,): how many ranks a rank receives from


def measured(heads: int, gbit: float, delay: float) -> Machine:
    """The three times of this machine's core, fitted to the CPU times of calls of several shapes."""
    rows = []
    seconds = []
    for queries, keys, mask in SHAPES:
        q = torch.randn(1, heads, queries, 64, requires_grad=True)
        k, v = torch.randn(2, 1, heads // 2, keys, 64).unbind()
        k = k.requires_grad_()
        v = v.requires_grad_()
        times = []
        for _ in range(6):
            begin = time.process_time()
            torch.autograd.grad(lowtri.attention(q, k, v, mask).sum(), (q, k, v))
            times.append(time.process_time() - begin)
        rows.append([int(lowtri.mask(mask).pairs(queries, keys)) * heads, keys, queries])
        seconds.append(min(times[1:]))
    weights = 1 / np.array(seconds)  # relative errors
    pair, key, query = np.linalg.lstsq(np.array(rows) * weights[:, None], np.ones(len(rows)), rcond=None)[0]
    return Machine(float(pair), max(0.0, float(key)), max(0.0, float(query)), heads, gbit, delay)


def first_keys(name: str, n: int, edges: NDArray[np.int64]) -> NDArray[np.int64]:
    """The first key that the middle query of each block sees; the masks here show stretches that end at the query."""
    middle = (edges[:-1] + edges[1:]) // 2
    if name == "causal":
        return np.zeros_like(middle)
    if name == "window":
        return np.maximum(0, middle - n // 16 + 1)
    starts = np.concatenate([[0], np.cumsum(document_lengths(n))])
    return starts[np.searchsorted(starts, middle, side="right") - 1]


def work_of(plan: ShardPlan, name: str) -> Work:
    """Pairs of each two ranks, from the stretch of keys that the middle query of each block sees."""
    edges = np.minimum(np.arange(len(plan.owner) + 1) * plan.block, plan.n)
    sizes = np.diff(edges)
    first = first_keys(name, plan.n, edges)
    held = np.zeros((len(sizes) + 1, plan.ranks))  # tokens of each rank before a block
    np.add.at(held, (np.arange(len(sizes)) + 1, plan.owner), sizes)
    held = np.cumsum(held, axis=0)

    def before(position: NDArray[np.int64]) -> Floats:
        block = np.minimum(position // plan.block, len(sizes) - 1)
        part = np.zeros((len(position), plan.ranks))
        part[np.arange(len(position)), plan.owner[block]] = position - edges[block]
        return held[block] + part

    pairs = np.zeros((plan.ranks, plan.ranks))
    for rank in range(plan.ranks):
        own = np.flatnonzero(plan.owner == rank)
        middle = (edges[own] + edges[own + 1]) // 2
        pairs[rank] = (sizes[own][:, None] * (before(middle) - before(first[own]))).sum(axis=0)
    pairs *= (plan.pairs / np.maximum(pairs.sum(axis=1), 1))[:, None]  # the plan's own numbers are exact
    return Work(pairs, (pairs > 0).sum(axis=1) - 1.0)


def times_of(plan: ShardPlan, work: Work, machine: Machine) -> dict[str, float]:
    """Seconds of the slowest rank."""
    tokens = plan.tokens.astype(float)
    ranks = plan.ranks
    received = plan.received.astype(float)
    own = np.diag(work.pairs)
    others = work.pairs.sum(axis=1) - own
    whole = machine.compute(work.pairs.sum(axis=1), np.full(ranks, float(plan.n)), tokens)
    gather = machine.network(plan.n - tokens, ranks - 1)
    result = {}
    fetch = back = machine.network(received, ranks - 1 if plan.gathers[0] else work.senders)
    near = machine.compute(own, tokens, tokens)
    far = machine.compute(others, received, tokens)
    forward = np.maximum(fetch, FORWARD * near) + FORWARD * far
    backward = np.maximum(fetch, (1 - FORWARD) * near) + (1 - FORWARD) * far + back
    result["ContextParallel"] = float((forward + backward).max())
    one = machine.compute(own + others, tokens + received, tokens)
    result["without overlap"] = float((one + 2 * fetch + back).max())
    result["all-gather"] = float((whole + 2 * gather).max())
    rank = np.arange(ranks)
    ring = 0.0
    passing = machine.network(tokens, 1)
    for step in range(ranks):
        pairs = work.pairs[rank, (rank - step) % ranks]
        part = np.where(pairs > 0, machine.compute(pairs, tokens, tokens), 0.0)
        moved = passing if step + 1 < ranks else 0.0 * passing
        ring += float(np.maximum(FORWARD * part, moved).max())
        ring += float((np.maximum((1 - FORWARD) * part, moved) + passing).max())
    result["ring"] = ring
    return result


def check(args: argparse.Namespace) -> None:
    """Predicted compute beside the CPU time of real ranks, and predicted beside counted rows."""
    machine = measured(args.heads, 1.0, 0.0)
    for name in args.masks:
        n = args.n if name == "causal" else 2 * args.n
        plan = plan_shards(mask_of(name, n), n, args.check)
        work = work_of(plan, name)
        keys = np.full(plan.ranks, float(n)) if plan.gathers[0] else (plan.tokens + plan.received).astype(float)
        slowest = machine.compute(work.pairs.sum(axis=1), keys, plan.tokens.astype(float)).max()
        print(
            f"{args.check} ranks  {name:9}  {n:6,} tokens  predicted compute of the slowest rank {slowest * 1e3:,.0f} ms"
        )
    script = Path(__file__).with_name("context_parallel.py")
    command = [sys.executable, str(script), "--ranks", str(args.check), "--gbit", "0", "--n", str(args.n)]
    subprocess.run([*command, "--heads", str(args.heads), "--masks", *args.masks], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=2**20)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 32, 128, 256, 1024])
    parser.add_argument("--gbit", type=float, default=10.0)
    parser.add_argument("--delay", type=float, default=50e-6, help="seconds for each message")
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--faster", type=float, default=1.0, help="compute this many times faster than measured")
    parser.add_argument("--masks", nargs="+", default=["causal", "window", "documents"])
    parser.add_argument("--check", type=int, help="the number of real ranks to compare with")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.check:
        check(args)
        return
    machine = measured(args.heads, args.gbit, args.delay)
    print(
        f"measured: {machine.pair * 1e9:.2f} ns for a pair of a head, {machine.key * 1e9:.0f} ns for a key, "
        f"{machine.query * 1e9:.0f} ns for a query"
    )
    faster = args.faster
    parts = machine.pair / faster, machine.key / faster, machine.query / faster
    machine = Machine(*parts, args.heads, args.gbit, args.delay)
    for name in args.masks:
        mask = mask_of(name, args.n)
        for ranks in args.ranks:
            plan = plan_shards(mask, args.n, ranks)
            alone = float(plan.pairs.sum()) * args.heads * machine.pair + args.n * (machine.key + machine.query)
            times = times_of(plan, work_of(plan, name), machine)
            cells = "  ".join(f"{way} {seconds:9.3f} s ({alone / seconds:6.0f}x)" for way, seconds in times.items())
            most = int(plan.received.max())
            print(f"{name:9} {ranks:5} ranks  imbalance {plan.imbalance:.2f}  received {most:9,}  {cells}", flush=True)


if __name__ == "__main__":
    main()

"""The tensors of a case, one timed run of an implementation, and the number of threads."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from lowtri.benching.cases import Case
from lowtri.benching.machine import last_cache_bytes
from lowtri.benching.peers import Attend

__all__ = ["Tensors", "run", "timed", "torch_threads"]

_MOST_CACHES = 2**31  # bytes of rotating caches, at most


class Tensors:
    """q, k, v and the gradient of the output. Decoding rotates KV caches of together four times the CPU's last-level cache,
    so that each is read from memory.
    """

    def __init__(self, case: Case, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        kind = torch.bfloat16 if case.dtype == "bf16" else getattr(torch, case.dtype)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(kind)

        count = 1
        if case.work == "decode":
            count = max(1, min(math.ceil(4 * last_cache_bytes() / case.cache_bytes), _MOST_CACHES // case.cache_bytes))
        training = case.work == "training"
        self.q = normal(1, case.heads, case.queries, case.d).requires_grad_(training)  # (1, Hq, Nq, D)
        caches = normal(2, 1, case.kv_heads, case.n, case.d)
        self.caches = [caches] + [caches.clone() for _ in range(count - 1)]  # (2, 1, Hkv, Nk, D) each
        self.kv = [tuple(x.requires_grad_(training) for x in cache) for cache in self.caches]
        self.d_output = normal(1, case.heads, case.queries, case.d) if training else None
        self._turn = 0

    def next(self) -> tuple[torch.Tensor, tuple[Any, ...]]:
        """The next cache, (2, 1, Hkv, Nk, D), and its keys and values."""
        turn = self._turn % len(self.caches)
        self._turn += 1
        return self.caches[turn], self.kv[turn]


def run(attend: Attend, tensors: Tensors) -> torch.Tensor:
    """The output (1, Hq, Nq, D); in training the gradients are computed, too."""
    _, (k, v) = tensors.next()
    if tensors.d_output is None:
        with torch.no_grad():
            return attend(tensors.q, k, v)
    output = attend(tensors.q, k, v)
    torch.autograd.grad(output, (tensors.q, k, v), tensors.d_output)
    return output.detach()


def timed(attend: Attend, tensors: Tensors) -> float:
    """Seconds of one run."""
    start = time.perf_counter()
    run(attend, tensors)
    return time.perf_counter() - start


@contextmanager
def torch_threads(threads: int) -> Iterator[None]:
    """Inside, torch and lowtri compute with so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)

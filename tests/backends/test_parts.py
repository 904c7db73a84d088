"""The backward on many threads: parts of the keys, their memory, and gradients that threads do not change."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from attention_cases import EPS, draw, on_threads

import lowtri
from lowtri.backends.cpu import launch, parts
from lowtri.backends.cpu.parts import choose_parts, cut, share_busy
from lowtri.dispatch.prepared import PREPARED
from lowtri.kernels.abi import KEYS
from lowtri.masks.plan import Plan, plan

MASKS = (
    "full",
    "causal",
    "causal & window(100)",
    "causal & (window(64) | first(10))",
    "causal & documents(lengths=[300, 700])",
)


def plan_of(mask: Any, nq: int, nk: int) -> Plan:
    q, k = np.arange(nk - nq, nk)[None], np.arange(nk)[None]
    return plan(lowtri.mask(mask), q, k, tile_k=KEYS)


def test_parts_have_about_equal_pairs() -> None:
    for mask in MASKS:
        of = plan_of(mask, 4096, 4096) if "documents" not in mask else plan_of(mask, 1000, 1000)
        found = cut(of, 4)
        first, last = of.runs[:, 0], of.runs[:, 1]
        pairs = [
            int(np.maximum(np.minimum(last, part.last_tile) - np.maximum(first, part.first_tile), 0).sum())
            for part in found
        ]
        columns = max(int(((first <= tile) & (last > tile)).sum()) for tile in range(-(-of.nk // KEYS)))
        assert max(pairs) - min(pairs) <= 2 * columns, mask


@pytest.mark.parametrize("heads", [1, 2, 3, 8, 12, 40])
@pytest.mark.parametrize("threads", [1, 2, 7, 8, 32, 64, 128])
def test_no_more_parts_than_balance_needs_nor_memory_allows(threads: int, heads: int) -> None:
    of, size = plan_of("causal", 4096, 4096), 64 * 4
    whole, of_query, of_thread = heads * 4096 * 3 * size, heads * size, 300_000
    found = choose_parts(of, heads, threads, whole, of_query, of_thread)
    if heads % threads == 0:
        assert len(found) == 1
    own = sum(stop - start for start, stop in (part.queries(4096) for part in found[1:])) * of_query
    assert whole + own + min(threads, heads * len(found)) * of_thread <= 3 * (whole + of_thread) or len(found) == 1
    fewer = [share_busy(heads * n, threads) for n in range(1, len(found))]
    assert all(share < parts.BUSY for share in fewer)
    assert share_busy(heads * len(found), threads) >= max(fewer, default=0)


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("mask", MASKS)
def test_gradients_on_many_threads(mask: str, dtype: str) -> None:
    """dK and dV are those of one thread, bit for bit; dQ is summed in parts, in the same way each time."""
    q, k, v = (x.requires_grad_() for x in draw(b=1, hq=4, hkv=2, nq=1000, nk=1000, d=40, dv=24, dtype=dtype))
    bias = torch.randn(1, 1, 1, 1000, requires_grad=True, dtype=torch.promote_types(q.dtype, torch.float32))
    sinks = torch.zeros(4, requires_grad=True, dtype=bias.dtype)
    leaves, d_output = (q, k, v, bias, sinks), draw(b=1, hq=4, nq=1000, d=24, seed=1, dtype=dtype)[0]

    def gradients() -> tuple[torch.Tensor, ...]:
        out = lowtri.attention(q, k, v, mask, bias=bias, sinks=sinks, engine="cpu")
        return torch.autograd.grad(out, leaves, d_output)

    results = on_threads((1, 3, 16, 64, 64), gradients)
    for other in results[1:]:
        assert torch.equal(other[1], results[0][1]) and torch.equal(other[2], results[0][2])
        for one, two in zip(results[0], other, strict=True):
            assert (one - two).abs().max() <= 32 * EPS[dtype] * one.abs().max()
    assert all(torch.equal(one, two) for one, two in zip(results[3], results[4], strict=True))


def test_the_memory_of_64_threads_is_at_most_three_times_that_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the arrays and the scratch memory that the backward asks for: 8 heads of 4,096 tokens."""
    asked: list[int] = []
    new, memory = launch.KernelArrays.new, launch._Memory

    def counted(self: Any, shape: Any, *rest: Any) -> Any:
        make = new(self, shape, *rest)

        def made(like: Any) -> Any:
            x = make(like)
            asked.append(x.nbytes)
            return x

        return made

    def counted_memory(size: int) -> Any:
        asked.append(size)
        return memory(size)

    monkeypatch.setattr(launch.KernelArrays, "new", counted)
    monkeypatch.setattr(launch, "_Memory", counted_memory)
    PREPARED.clear()
    q, k, v = (torch.randn(1, 8, 4096, 64, requires_grad=True) for _ in range(3))

    def bytes_asked(mask: str) -> int:
        out = lowtri.attention(q, k, v, mask, engine="cpu")
        launch._pool.clear()
        asked.clear()
        torch.autograd.grad(out, (q, k, v), q.detach())
        return sum(asked)

    for mask in ("causal & window(256)", "causal & documents(lengths=[512, 512, 1024, 2048])"):
        sizes = on_threads((1, 64), partial(bytes_asked, mask))
        assert sizes[0] > 24 * 2**20 and sizes[1] <= 3 * sizes[0], (mask, sizes)

"""Weights received in a cache, and tokens that the user evicts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import lowtri
from lowtri import CallError, KVCache


def tokens(n: int, *, batch: tuple[int, ...] = (2,), hq: int = 4, hkv: int = 2, seed: int = 0) -> list[torch.Tensor]:
    source = torch.Generator().manual_seed(seed)
    return [torch.randn(*batch, h, n, 16, generator=source) for h in (hq, hkv, hkv)]


def part(x: Any, start: int, stop: int) -> list[Any]:
    return [each[..., start:stop, :] for each in x]


@pytest.mark.parametrize("mask", ["causal", "causal & window(9)", "causal & (window(6) | first(3))"])
@pytest.mark.parametrize("numpy", [False, True])
def test_attend_gives_what_each_slot_received(numpy: bool, mask: str) -> None:
    x: Any = [each.numpy() for each in tokens(60)] if numpy else tokens(60)
    cache, total, start = KVCache(mask, block=4), np.zeros((2, 4, 60)), 0
    for stop in (20, 21, 22, 30, *range(31, 61)):
        output, received, held = cache.attend(*part(x, start, stop), return_received=True)
        assert received.shape == (2, 4, len(held)) and str(received.dtype).endswith("float32")
        assert not np.asarray(received)[..., held < 0].any()
        total[..., held[held >= 0]] += np.asarray(received)[..., held >= 0]
        whole = lowtri.attention(*part(x, 0, stop), mask)[..., start:stop, :]
        assert np.allclose(np.asarray(output), np.asarray(whole), atol=1e-5)
        start = stop
    assert np.allclose(total, np.asarray(lowtri.attention(*x, mask, return_received=True)[1]), atol=1e-4)
    assert np.allclose(total.sum(2), 60, atol=1e-3)


def test_later_queries_see_what_was_not_dropped() -> None:
    x, gone = tokens(40), [3, 4, 11, 19]
    cache = KVCache("causal", block=4)
    cache.attend(*part(x, 0, 20))
    cache.drop(gone)
    assert (cache.held, cache.evicted, cache.length) == (16, 4, 20)
    kept = [t for t in range(40) if t not in gone]
    positions = {"k_positions": kept, "q_positions": range(20, 40)}
    expected = lowtri.attention(x[0][..., 20:, :], x[1][..., kept, :], x[2][..., kept, :], "causal", **positions)
    steps = [cache.attend(*part(x, t, t + 1)) for t in range(20, 40)]
    assert torch.allclose(torch.cat(steps, 2), expected, atol=1e-5)
    assert (cache.held, cache.evicted) == (36, 4)
    assert "·" in cache.draw().splitlines()[1][:5]


def test_dropping_bounds_the_memory() -> None:
    cache, sizes = KVCache("causal", block=8), []
    for t in range(200):
        _, _, held = cache.attend(*tokens(1, batch=(), seed=t), return_received=True)
        old = held[held >= 0]
        if len(old) > 16:
            cache.drop(old[: len(old) - 16])
        sizes.append(cache.bytes)
    assert cache.held == 16 and cache.evicted == 184 and len(set(sizes[40:])) == 1
    assert sorted(held[held >= 0].tolist())[-16:] == list(range(184, 200))


def test_each_row_drops_its_own_and_other_methods_go_on() -> None:
    x = tokens(12)
    cache = KVCache("causal", block=4)
    cache.attend(*part(x, 0, 8))
    cache.drop([[0, 1], [5, -1]])
    assert (cache.held, cache.evicted) == (8, 0)  # another row still has each
    output = cache.attend(*part(x, 8, 9))
    for row, gone in enumerate(([0, 1], [5])):
        kept = [t for t in range(9) if t not in gone]
        q, k, v = (each[row] for each in x)
        alone = lowtri.attention(q[:, 8:9], k[:, kept], v[:, kept], "full")
        assert torch.allclose(output[row], alone, atol=1e-5)
    cache.drop([[5, -1], [0, 1]])
    assert (cache.held, cache.evicted) == (6, 3)
    cache.crop(8)
    cache.reorder([1, 1])
    assert cache.length == 8
    cache.shift(2)
    again = cache.attend(*part(x, 9, 10))
    assert again.isfinite().all()
    cache.drop([])
    cache.drop(cache.append(*part(x, 10, 11)[1:])[2][:, :0])


def test_every_layer_drops() -> None:
    x = tokens(10)
    cache = KVCache("causal", block=4)
    for layer in (0, 1):
        cache.attend(*part(x, 0, 6), layer=layer)
    cache.drop([2])
    outputs = [cache.attend(*part(x, 6, 7), layer=layer) for layer in (0, 1)]
    assert torch.equal(*outputs)
    cache.append(*part(x, 7, 8)[1:])
    with pytest.raises(CallError, match="drop: some layers have not seen the newest tokens yet"):
        cache.drop([3])


def test_what_cannot_be_dropped() -> None:
    cache = KVCache("causal & window(4)", block=1)
    x = tokens(12, batch=())
    for t in range(12):
        cache.attend(*part(x, t, t + 1))
    before = cache.draw()
    wrong: dict[str, Any] = {
        r"drop: row 0 holds no token at \[2\]\. Fix: positions among those that append and attend": [10, 2],
        r"drop: row 0 holds no token at \[12\]": [12],
        r"drop: positions are \(2, 1\); expected \(n,\), or \(1, n\)": [[10], [11]],
        r"drop: positions": [0.5],
    }
    for words, positions in wrong.items():
        with pytest.raises(CallError, match=words):
            cache.drop(positions)
    assert cache.draw() == before

"""The rows of docs/conventions.md about FlashAttention, whose package cannot be installed without a GPU.

Its side is tests/support/flash_reference.py, flash-attn's documented formulas in float64. Each test compares it with
lowtri.attention, and with the function of lowtri.integrations.flash_attn that has the same name.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from flash_reference import attend, batch, visible
from torch import Tensor

import lowtri
from lowtri.errors import CallError
from lowtri.integrations.flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from lowtri.integrations.flash_attn.bert_padding import unpad_input
from lowtri.masks import documents, keys, window

N = 6


def qkv(nq: int = N, nk: int = N, heads: int = 2, kv_heads: int = 2) -> list[Tensor]:
    """Random float64 inputs in flash-attn's layout, (2, N, H, 8)."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, nq, heads, 8), (2, nk, kv_heads, 8), (2, nk, kv_heads, 8)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def same(left: Tensor, right: Tensor) -> None:
    torch.testing.assert_close(left, right, rtol=0, atol=1e-12)


def lowtris(q: Tensor, k: Tensor, v: Tensor, mask: Any, **options: Any) -> Tensor:
    """lowtri.attention of arrays in flash-attn's layout, and its output in that layout."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return lowtri.attention(q, k, v, mask, **options).transpose(1, 2)


def equal(arrays: list[Tensor], mask: Any, theirs: dict[str, Any], ours: dict[str, Any] | None = None) -> None:
    """flash-attn's formula, flash_attn_func and lowtri.attention give the same output."""
    expected, _ = batch(*arrays, **theirs)
    same(flash_attn_func(*arrays, **theirs), expected)
    same(lowtris(*arrays, mask, **(ours or {})), expected)


def test_true_in_flash_attn() -> None:
    """attention_mask of unpad_input: 1 = a real token; the packed tokens attend as under keys(attention_mask == 1)."""
    q, k, v = qkv()
    real = torch.tensor([[1, 1, 1, 1, 0, 0], [1] * N])
    (of_q, _, edges, longest, _), (of_k, *_), (of_v, *_) = (unpad_input(x, real) for x in (q, k, v))
    found = flash_attn_varlen_func(of_q, of_k, of_v, edges, edges, longest, longest)
    expected = torch.cat([attend(*(x[b, : real[b].sum()] for x in (q, k, v)))[0] for b in range(2)])
    same(found, expected)
    same(lowtris(q, k, v, keys(real == 1))[real.bool()], expected)
    with pytest.raises(CallError, match="causal is a torch tensor"):
        flash_attn_func(q, k, v, causal=torch.ones(N, N, dtype=torch.bool).tril())


def test_window_in_flash_attn() -> None:
    """
    visible(6, 6, False, (2, 1)):

        ██····
        ███···
        ████··
        ·████·
        ··████
        ···███
    """
    picture = (line for line in str(test_window_in_flash_attn.__doc__).splitlines() if set(line.strip()) == {"█", "·"})
    drawn = torch.tensor([[square == "█" for square in line.strip()] for line in picture])
    assert torch.equal(visible(N, N, False, (2, 1)), drawn)
    equal(qkv(), "band(2, 1)", {"window_size": (2, 1)})
    equal(qkv(), "causal & window(3)", {"window_size": (2, 0)})
    equal(qkv(), window(3), {"window_size": (2, 4), "causal": True})  # causal sets the second number to 0
    equal(qkv(), "full", {"window_size": (-1, -1)})
    equal(qkv(), window(1), {"window_size": (0, 0)})


def test_alignment_in_flash_attn() -> None:
    """The last query stands at the last key, also where there are more queries than keys."""
    equal(qkv(2), "causal", {"causal": True})
    equal(qkv(2), "window(3)", {"window_size": (2, 0)})
    equal(qkv(N, 4), "causal", {"causal": True}, {"q_positions": range(N), "k_positions": range(2, N)})
    q, k, v = qkv(2)
    expected, _ = batch(q, k[:, :5], v[:, :5], causal=True)
    found = flash_attn_with_kvcache(q, k, v, cache_seqlens=torch.tensor([5, 5]), causal=True)
    same(found, expected)  # at the last key of the cache, not at its last slot


def test_empty_rows_in_flash_attn() -> None:
    """Of six queries and four keys under causal, the first two see no key."""
    q, k, v = (x.requires_grad_() for x in qkv(N, 4))
    expected, lse = batch(*(x.detach() for x in (q, k, v)), causal=True)
    output, found, _ = flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    same(output, expected)
    torch.testing.assert_close(found, lse.float())
    for out, of_row in ((expected, lse), (output, found)):
        assert not out[:, :2].any() and (of_row[:, :, :2] == math.inf).all()
    assert not torch.autograd.grad(output.sum(), q)[0][:, :2].any()
    ours = lowtri.attention(
        *(x.transpose(1, 2) for x in (q, k, v)),
        "causal",
        q_positions=range(N),
        k_positions=range(2, N),
        return_lse=True,
    )
    same(ours[0].transpose(1, 2), expected)
    assert (ours[1][:, :, :2] == -math.inf).all()


SLOPES = torch.tensor([0.5, 0.125], dtype=torch.float64)


def test_alibi_in_flash_attn() -> None:
    """-slope * distance, in both directions, from the position at which the query is aligned."""
    for nq in (2, N):
        position = torch.arange(N - nq, N)[:, None]
        bias = -SLOPES[:, None, None] * (position - torch.arange(N)).abs()
        equal(qkv(nq), "full", {"alibi_slopes": SLOPES}, {"bias": bias})
        equal(qkv(nq), "causal", {"alibi_slopes": SLOPES, "causal": True}, {"bias": lowtri.alibi(SLOPES)})
    per_row = torch.stack([SLOPES, 2 * SLOPES])
    equal(qkv(), "full", {"alibi_slopes": per_row}, {"bias": lowtri.alibi(per_row)})


def test_scale_in_flash_attn() -> None:
    equal(qkv(), "full", {}, {"scale": 8**-0.5})
    equal(qkv(), "full", {"softmax_scale": 0.3}, {"scale": 0.3})


def test_softcap_in_flash_attn() -> None:
    """0.0 caps nothing; the scale comes before the cap, ALiBi after it."""
    equal(qkv(), "causal", {"causal": True, "softcap": 0.0})
    theirs = {"causal": True, "softcap": 1.5, "softmax_scale": 0.7, "alibi_slopes": SLOPES}
    equal(qkv(), "causal", theirs, {"softcap": 1.5, "scale": 0.7, "bias": lowtri.alibi(SLOPES)})


def test_positions_in_flash_attn() -> None:
    """B + 1 edges: sequences of 1, 0 and 5 tokens, each with positions of its own. Positions in a cache are its slots."""
    q, k, v = (x[0] for x in qkv())
    edges = torch.tensor([0, 1, 1, N])
    parts = [attend(q[a:b], k[a:b], v[a:b], causal=True)[0] for a, b in itertools.pairwise(edges)]
    found = flash_attn_varlen_func(q, k, v, edges, edges, 5, 5, causal=True)
    same(found, torch.cat(parts))
    same(lowtris(q[None], k[None], v[None], lowtri.causal() & documents(lengths=[1, 5]))[0], found)
    with pytest.raises(CallError, match=r"cu_seqlens_q is .*ascending from 0"):
        flash_attn_varlen_func(q, k, v, edges.diff(), edges.diff(), 5, 5)  # lengths are no edges


def test_cache_in_flash_attn() -> None:
    """cache_seqlens counts the keys before the new ones, which are written behind them."""
    q, k, v = qkv(1)
    lengths, caches = torch.tensor([2, 4]), [k.clone(), v.clone()]
    fresh = [x[:, -1:] + 1 for x in (k, v)]
    found = flash_attn_with_kvcache(q, *caches, *fresh, cache_seqlens=lengths, causal=True)
    for b, n in enumerate(lengths.tolist()):
        own = [torch.cat([x[b, :n], new[b]]) for x, new in zip((k, v), fresh, strict=True)]
        same(found[b], attend(q[b], *own, causal=True)[0])
        assert torch.equal(caches[0][b, n], fresh[0][b, 0]) and torch.equal(caches[0][b, n + 1 :], k[b, n + 1 :])
    same(lowtris(q, *caches, "causal", q_positions=lengths[:, None]), found)


def test_grouped_heads_in_flash_attn() -> None:
    equal(qkv(heads=6, kv_heads=2), "full", {})


def test_layout_of_flash_attn() -> None:
    q, k, v = qkv(heads=N, kv_heads=N)  # (2, N, N, 8) fits either way
    equal([q, k, v], "full", {})
    assert not torch.allclose(flash_attn_func(q, k, v), lowtri.attention(q, k, v, "full"))

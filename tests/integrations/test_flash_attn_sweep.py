"""The options of flash-attn's own tests in combination: dtypes, head sizes, groups, odd lengths, windows, ALiBi, caps, packing, caches.

Each test takes the n-th combination of a list that contains every value of every option about equally often. As in flash-attn's tests,
the error against float64 may be twice that of the plain formula in the same dtype; the oracle is ``flash_reference``.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from flash_reference import attend, batch, rotated
from torch import Tensor

from lowtri.integrations import flash_attn as ours

pytestmark = pytest.mark.sweep

DENSE: dict[str, list[Any]] = {
    "dtype": [torch.float16, torch.bfloat16],
    "heads": [(6, 6), (6, 1), (6, 2)],
    "causal": [False, True],
    "local": [False, True],
    "alibi": [False, True],
    "softcap": [0.0, 50.0],
    "deterministic": [False, True],
    "size": [32, 40, 59, 64, 96, 111, 128, 160, 192, 224, 256],
    "lengths": [(113, 203), (128, 217), (113, 211), (108, 256), (256, 512), (512, 256), (1023, 1024), (1024, 1023)],
}
CACHE: dict[str, list[Any]] = {
    "dtype": [torch.float16, torch.bfloat16],
    "heads": [(6, 6), (6, 1), (6, 2)],
    "causal": [False, True],
    "local": [False, True],
    "alibi": [False, True],
    "new": ["none", "as many as queries", "another number"],
    "rotary": [0.0, 0.5, 1.0],
    "interleaved": [False, True],
    "place": ["rows", "chosen rows", "pages of 256"],
    "leftpad": [False, True],
    "num_splits": [1, 0],
    "size": [59, 64, 128, 256],
    "lengths": [(1, 128), (1, 339), (3, 1024), (64, 800), (64, 256), (3, 799), (16, 2500), (128, 128)],
}


def combinations(options: dict[str, list[Any]], count: int) -> list[dict[str, Any]]:
    """Every value of an option in a random order, and again until there are ``count``."""
    source = random.Random(0)
    columns: dict[str, list[Any]] = {}
    for name, values in options.items():
        columns[name] = []
        while len(columns[name]) < count:
            columns[name] += source.sample(values, len(values))
    return [{name: column[i] for name, column in columns.items()} for i in range(count)]


def draw(*shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def options_of(case: dict[str, Any], rows: int) -> dict[str, Any]:
    nq, nk = case["lengths"]
    source = random.Random(nq * nk + case["size"])
    options: dict[str, Any] = {"causal": case["causal"], "softcap": case.get("softcap", 0.0)}
    if case["local"]:
        options["window_size"] = (source.randrange(nk), source.randrange(nk))
    if case["alibi"]:
        options["alibi_slopes"] = 0.3 * torch.rand(rows, case["heads"][0], generator=torch.Generator().manual_seed(9))
    return options


def check(actual: Tensor, exact: Tensor, dtype: torch.dtype) -> None:
    """Within a few roundings of the largest number, as the plain formula in the dtype is."""
    assert actual.isfinite().all()
    actual, exact = actual.detach(), exact.detach()
    worst = (actual.double() - exact).abs().max()
    assert worst <= 3 * torch.finfo(dtype).eps * max(1.0, float(exact.abs().max())), (float(worst), exact.abs().max())


def leaves_of(arrays: list[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    return [x.detach().to(dtype, copy=True).requires_grad_() for x in arrays]


def check_both_ways(
    leaves: list[torch.Tensor],
    output: torch.Tensor,
    exact: list[torch.Tensor],
    reference: torch.Tensor,
    dtype: torch.dtype,
) -> None:
    """The output and the gradients of all leaves, by the same gradient of the output."""
    check(output, reference, dtype)
    cotangent = draw(*output.shape, seed=3, dtype=dtype)
    output.backward(cotangent)
    reference.backward(cotangent.double())
    for x, y in zip(leaves, exact, strict=True):
        check(x.grad, y.grad, dtype)


@pytest.mark.parametrize("case", combinations(DENSE, 44), ids=str)
def test_dense(case: dict[str, Any]) -> None:
    dtype, (nq, nk), (heads, kv_heads), size = (case[name] for name in ("dtype", "lengths", "heads", "size"))
    arrays = [draw(2, nq, heads, size, seed=0, dtype=dtype)]
    arrays += [draw(2, nk, kv_heads, size, seed=s, dtype=dtype) for s in (1, 2)]
    options = options_of(case, 2)
    leaves, exact = leaves_of(arrays, dtype), leaves_of(arrays, torch.float64)
    output = ours.flash_attn_func(*leaves, **options, deterministic=case["deterministic"])
    reference, _ = batch(*exact, **options)
    check_both_ways(leaves, output, exact, reference, dtype)


@pytest.mark.parametrize("case", combinations(DENSE, 44), ids=str)
def test_packed(case: dict[str, Any]) -> None:
    """Three sequences of random lengths, one of them without queries."""
    dtype, (nq, nk), (heads, kv_heads), size = (case[name] for name in ("dtype", "lengths", "heads", "size"))
    source = random.Random(nq + size)
    of_q, of_k = [source.randint(1, nq), 0, nq], [source.randint(1, nk), source.randint(1, nk), nk]
    cu_q, cu_k = (torch.tensor([0, *x]).cumsum(0).to(torch.int32) for x in (of_q, of_k))
    arrays = [draw(int(cu_q[-1]), heads, size, seed=0, dtype=dtype)]
    arrays += [draw(int(cu_k[-1]), kv_heads, size, seed=s, dtype=dtype) for s in (1, 2)]
    options = options_of(case, 3)
    slopes = options.pop("alibi_slopes", None)
    leaves, exact = leaves_of(arrays, dtype), leaves_of(arrays, torch.float64)
    output = ours.flash_attn_varlen_func(*leaves, cu_q, cu_k, max(of_q), max(of_k), **options, alibi_slopes=slopes)
    rows = []
    for b in range(3):
        own = (x[cu[b] : cu[b + 1]] for x, cu in zip(exact, (cu_q, cu_k, cu_k), strict=True))
        rows.append(attend(*own, **options, alibi_slopes=None if slopes is None else slopes[b])[0])
    reference = torch.cat(rows)
    check_both_ways(leaves, output, exact, reference, dtype)


@pytest.mark.parametrize("case", combinations(CACHE, 48), ids=str)
def test_cache(case: dict[str, Any]) -> None:
    dtype, (nq, nk), (heads, kv_heads), size = (case[name] for name in ("dtype", "lengths", "heads", "size"))
    source = random.Random(nq + nk + size)
    new = {"none": 0, "as many as queries": min(nq, nk - 9), "another number": min(nq, nk - 9) // 2 + 1}[case["new"]]
    lengths = torch.tensor([source.randint(8, nk - new) for _ in range(2)])
    caches, index = [draw(4, nk, kv_heads, size, seed=s, dtype=dtype) for s in (1, 2)], torch.tensor([3, 1])
    own = index if case["place"] == "chosen rows" else torch.arange(2)
    stored = [cache[own].clone() for cache in caches]  # (B, Nk, Hkv, D)
    more: dict[str, Any] = {"cache_batch_idx": index.int()} if case["place"] == "chosen rows" else {}
    if case["place"] == "rows":
        caches = [cache[:2].clone() for cache in caches]
    elif case["place"] == "pages of 256":
        count = -(-nk // 256)
        table = torch.randperm(2 * count + 2, generator=torch.Generator().manual_seed(5))[: 2 * count].view(2, count)
        more["block_table"] = table.int()
        caches = []
        for rows in stored:
            padded = torch.nn.functional.pad(rows, (0, 0, 0, 0, 0, count * 256 - nk))
            pages = torch.full((2 * count + 2, 256, kv_heads, size), torch.nan, dtype=dtype)
            pages[table] = padded.unflatten(1, (count, 256))
            caches.append(pages)
    q = draw(2, nq, heads, size, seed=4, dtype=dtype)
    fresh = [draw(2, new, kv_heads, size, seed=s, dtype=dtype) for s in (5, 6)] if new else [None, None]
    half = int(case["rotary"] * size) // 16 * 8 if new else 0
    if half:
        angles = torch.rand(nk + nq, half, generator=torch.Generator().manual_seed(7)) * 6.28
        turn = tuple(x.to(dtype) for x in (angles.cos(), angles.sin()))
        more |= {"rotary_cos": turn[0], "rotary_sin": turn[1], "rotary_interleaved": case["interleaved"]}
    starts = torch.tensor([source.randint(0, 7) for _ in range(2)]) if case["leftpad"] else None
    options = options_of(case, 2)
    output = ours.flash_attn_with_kvcache(
        q,
        *caches,
        *fresh,
        **more,
        **options,
        cache_seqlens=lengths.int(),
        cache_leftpad=None if starts is None else starts.int(),
        num_splits=case["num_splits"],
    )
    for b in range(2):
        query, n, first = q[b].double(), int(lengths[b]), 0 if starts is None else int(starts[b])
        keys, values = (cache[b, :n].double() for cache in stored)
        if new:
            k_new, v_new = (x[b].double() for x in fresh)
            if half:
                steps = torch.arange(nq) if case["causal"] or case["local"] else torch.zeros(nq, dtype=torch.int64)
                query = rotated(query, *turn, n + steps, case["interleaved"]).to(dtype)
                k_new = rotated(k_new, *turn, n + torch.arange(new), case["interleaved"]).to(dtype)
            keys, values = torch.cat([keys, k_new.double()]), torch.cat([values, v_new])
        slopes = options.get("alibi_slopes")
        chosen = {**options, "alibi_slopes": None if slopes is None else slopes[b]}
        check(output[b], attend(query, keys[first:], values[first:], **chosen)[0], dtype)

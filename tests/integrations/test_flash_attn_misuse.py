"""flash-attn's functions called wrongly: errors name function and argument in flash-attn's own layout, and nothing has changed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from flash_reference import batch
from torch import Tensor

from lowtri.errors import CallError
from lowtri.integrations import flash_attn as ours
from lowtri.integrations.flash_attn.bert_padding import index_first_axis, pad_input, unpad_input


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


Q, K = draw(2, 3, 4, 8), draw(2, 5, 2, 8, seed=1)
EDGES = torch.tensor([0, 1, 3]), torch.tensor([0, 2, 5])
TABLE = torch.tensor([[1, 0], [2, 3]])
PAGES = draw(4, 3, 2, 8, seed=2)

DENSE: dict[str, tuple[dict[str, Any], str]] = {
    "rank": ({"q": Q[0]}, r"q is \(3, 4, 8\)\. Fix: a torch tensor \(B, N, H, D\)"),
    "kind": ({"k": K.tolist()}, r"k is list\. Fix: a torch tensor"),
    "three numbers": ({"window_size": (1, 2, 3)}, r"window_size is \(1, 2, 3\)\. Fix: \(left, right\)"),
    "slopes": ({"alibi_slopes": torch.ones(3)}, r"alibi_slopes is \(3,\)\. Fix:"),
    "window_size=1": ({"window_size": 1}, r"window_size is 1\. Fix: \(left, right\)"),
    "window_size=None": ({"window_size": (None, 0)}, r"window_size is \(None, 0\)\. Fix: \(left, right\)"),
    "window_size of floats": ({"window_size": (1.5, 0)}, r"window_size is \(1.5, 0\)\. Fix: \(left, right\)"),
    "window_size as text": ({"window_size": "ab"}, r"window_size is 'ab'\. Fix: \(left, right\)"),
    "dropout_p": ({"dropout_p": 1.5}, "dropout_p is 1.5. Fix: a probability"),
    "softmax_scale": ({"softmax_scale": float("nan")}, "softmax_scale is nan. Fix: a finite number"),
    "softmax_scale as a tensor": ({"softmax_scale": torch.tensor(1.0)}, "softmax_scale is a torch tensor. Fix:"),
    "softcap": ({"softcap": -1}, "softcap is -1. Fix: a positive number, or 0.0"),
    "causal as a table": ({"causal": torch.ones(3, 5)}, "causal is a torch tensor. Fix: True or False"),
    "causal as text": ({"causal": "causal"}, "causal is 'causal'. Fix: True or False"),
    "alibi_slopes of NumPy": ({"alibi_slopes": np.ones(4)}, r"alibi_slopes is ndarray\. Fix: a torch tensor \(4,\)"),
    "heads": ({"q": Q[:, :, :3]}, r"q is \(2, 3, 3, 8\), k \(2, 5, 2, 8\).*Fix: the heads of q.*multiple"),
    "batch": ({"k": K[:1], "v": K[:1]}, r"k \(1, 5, 2, 8\).*Fix: q, k and v have the same batch size"),
    "lengths": ({"v": K[:, :4]}, "Fix: k and v have the same shape"),
    "head size": ({"q": Q[..., :0], "k": K[..., :0]}, "Fix: q and k have the same head size D, at least 1"),
}


@pytest.mark.parametrize("name", DENSE)
def test_one_length(name):
    arguments, words = DENSE[name]
    with pytest.raises(CallError, match=f"flash_attn_func: .*{words}"):
        ours.flash_attn_func(**{"q": Q, "k": K, "v": K, **arguments})


PACKED: dict[str, tuple[Any, str]] = {
    "qkv": (lambda: ours.flash_attn_qkvpacked_func(draw(2, 3, 2, 2, 8)), r"qkv is .*Fix: .*\(B, N, 3, H, D\)"),
    "kv": (lambda: ours.flash_attn_kvpacked_func(Q, draw(2, 5, 3, 2, 8)), r"kv is .*Fix: .*\(B, N, 2, H, D\)"),
    "varlen qkv": (
        lambda: ours.flash_attn_varlen_qkvpacked_func(draw(3, 2, 2, 8), EDGES[0], 2),
        r"qkv is .*Fix: .*\(total, 3, H, D\)",
    ),
    "varlen kv": (
        lambda: ours.flash_attn_varlen_kvpacked_func(Q[0], draw(5, 3, 2, 8), *EDGES, 2, 3),
        r"kv is .*Fix: .*\(total, 2, H, D\)",
    ),
    "no tokens": (
        lambda: pad_input(draw(4, 2), torch.tensor([0, 1, 9, 3]), 2, 3),
        r"indices is .*Fix: each of 0 \.\. 5",
    ),
    "counts": (lambda: pad_input(draw(3, 2), torch.arange(4), 2, 3), r"indices is .*Fix: whole numbers \(3,\)"),
    "rows": (lambda: index_first_axis(draw(3, 2), torch.tensor([-1])), r"indices is \[-1\]\. Fix: each of 0 \.\. 2"),
    "additive mask": (
        lambda: unpad_input(draw(1, 3, 2), torch.tensor([[0.0, 0.0, -1e9]])),
        "attention_mask holds other numbers than 0 and 1. Fix:",
    ),
    "lengths as a mask": (lambda: unpad_input(draw(1, 3, 2), torch.tensor([[1, 2, 0]])), "attention_mask holds other"),
    "mask of another shape": (
        lambda: unpad_input(draw(2, 3, 2), torch.ones(2, 2)),
        r"attention_mask is \(2, 2\)\. Fix: a torch tensor \(2, 3\)",
    ),
    "unused": (
        lambda: unpad_input(draw(1, 3, 2), torch.tensor([[1, 1, 0]]), torch.tensor([[0, 1, 1]])),
        "unused_mask is 1 at tokens that attention_mask uses",
    ),
}


@pytest.mark.parametrize("name", PACKED)
def test_packed_forms_and_padding(name):
    call, words = PACKED[name]
    with pytest.raises(CallError, match=words):
        call()


VARLEN: dict[str, tuple[dict[str, Any], str]] = {
    "no start": ({"cu_seqlens_q": torch.tensor([1, 1, 3])}, "cu_seqlens_q is .*ascending from 0"),
    "past the end": (
        {"cu_seqlens_k": [0, 2, 6]},
        "cu_seqlens_k ends at 6, but there are 5 tokens. Fix: an end of at most 5",
    ),
    "another number": ({"cu_seqlens_k": [0, 5]}, "cu_seqlens_q has 3 edges and cu_seqlens_k 2. Fix: B . 1 in both"),
    "floats": ({"cu_seqlens_q": torch.tensor([0.0, 3.0])}, r"cu_seqlens_q is .*Fix: whole numbers \(B \+ 1,\)"),
    "ragged": ({"cu_seqlens_q": [[0], [1, 3]]}, r"cu_seqlens_q is .*Fix: whole numbers \(B \+ 1,\)"),
    "None": ({"cu_seqlens_k": None}, r"cu_seqlens_k is None\. Fix: whole numbers \(B \+ 1,\)"),
    "negative lengths": ({"cu_seqlens_k": [0, 4, 3]}, "cu_seqlens_k is .*ascending from 0"),
    "slopes of another batch": ({"alibi_slopes": torch.ones(3, 4)}, r"alibi_slopes is .*\(4,\) or \(2, 4\)"),
    "slopes as a list": ({"alibi_slopes": [0.5] * 4}, r"alibi_slopes is list\. Fix:"),
    "pages of one row": ({"block_table": TABLE[0]}, r"block_table is \(2,\).*Fix: whole numbers \(2, pages\)"),
    "no such page": ({"block_table": TABLE + 3}, r"block_table is .*Fix: each of 0 \.\. 3"),
}


@pytest.mark.parametrize("name", VARLEN)
def test_packed_sequences(name):
    arguments, words = VARLEN[name]
    keys = PAGES if "block_table" in arguments else K[0]
    given = {"q": Q[0], "k": keys, "v": keys, "cu_seqlens_q": EDGES[0], "cu_seqlens_k": EDGES[1], **arguments}
    with pytest.raises(CallError, match=f"flash_attn_varlen_func: {words}"):
        ours.flash_attn_varlen_func(**given, max_seqlen_q=3, max_seqlen_k=3)


CACHE: dict[str, tuple[dict[str, Any], str]] = {
    "heads": ({"q": Q[:, :, :3]}, r".*k_cache \(2, 5, 2, 8\).*Fix: the heads of q"),
    "slopes": ({"alibi_slopes": torch.ones(3)}, r"alibi_slopes is \(3,\)"),
    "softcap": ({"softcap": -1.0}, "softcap is -1.0"),
    "scale": ({"softmax_scale": "1"}, "softmax_scale is '1'"),
    "dtype": ({"q": Q.half()}, r"q is torch.float16, k_cache torch.float32.*Fix: one dtype"),
    "integers": ({"k": torch.ones(2, 3, 2, 8, dtype=torch.int64)}, r"k is .*int64\. Fix: \(2, 3, 2, 8\) floats"),
    "lists": ({"v": [1.0]}, "v is list. Fix:"),
    "negative": ({"cache_seqlens": torch.tensor([-1, 2])}, r"cache_seqlens is \[-1, 2\]\. Fix: at least 0"),
    "half a token": ({"cache_seqlens": torch.tensor([0.5, 2])}, r"cache_seqlens is .*Fix: whole numbers \(2,\)"),
    "left padding": ({"cache_leftpad": torch.tensor([-1, 0])}, r"cache_leftpad is \[-1, 0\]\. Fix: at least 0"),
    "no such row": (
        {"cache_batch_idx": torch.tensor([0, -1])},
        r"cache_batch_idx is \[0, -1\]\. Fix: each of 0 \.\. 1",
    ),
    "full": ({"cache_seqlens": 3}, r"cache_seqlens is .*a row has 5 slots\.\nFix: a larger cache"),
    "no length": ({"cache_seqlens": None}, "got k without v or cache_seqlens.*Fix: all three, or none"),
    "rows": ({"q": Q[:1]}, "q has 1 rows, but the cache 2. Fix: cache_batch_idx="),
    "one table of rotary": ({"rotary_cos": draw(9, 4)}, "rotary tables need each other and new keys. Fix: rotary_cos="),
    "rotary": ({"rotary_cos": draw(4), "rotary_sin": draw(4)}, r"rotary_cos is \(4,\)\. Fix: .*\(positions, R\)"),
}


@pytest.mark.parametrize("name", CACHE)
def test_a_cache_is_unchanged_by_a_call_that_fails(name):
    arguments, words = CACHE[name]
    caches, new = [K.clone(), K.clone()], draw(2, 3, 2, 8, seed=3)
    given = {"q": Q, "k_cache": caches[0], "v_cache": caches[1], "k": new, "v": new, "cache_seqlens": 1, **arguments}
    with pytest.raises(CallError, match=f"flash_attn_with_kvcache: {words}"):
        ours.flash_attn_with_kvcache(**given)
    assert all(torch.equal(cache, K) for cache in caches)


def test_a_cache_whose_rows_share_memory_takes_no_new_tokens():
    shared, new = K[:1].expand(2, -1, -1, -1), draw(2, 1, 2, 8)
    with pytest.raises(CallError, match="k_cache is expanded"):
        ours.flash_attn_with_kvcache(Q, shared, K.clone(), new, new, cache_seqlens=1)


def test_pages_past_the_end_of_a_sequence_may_be_anything():
    """Schedulers fill the unused entries of a block table with -1 or leave them as they are."""
    lengths, table = torch.tensor([2, 5]), torch.tensor([[1, 9, -1], [2, 3, 99]])
    found = ours.flash_attn_with_kvcache(Q, PAGES, PAGES, cache_seqlens=lengths, block_table=table)
    rows = [PAGES[table[b, : -(-n // 3)]].flatten(0, 1)[:n] for b, n in enumerate(lengths.tolist())]
    for b, row in enumerate(rows):
        torch.testing.assert_close(
            found[b].double(), batch(Q[b : b + 1], row[None], row[None])[0][0], rtol=0, atol=1e-5
        )
    of_k = torch.tensor([0, 2, 7])
    packed = ours.flash_attn_varlen_func(
        Q.flatten(0, 1), PAGES, PAGES, torch.tensor([0, 3, 6]), of_k, 3, 5, block_table=table
    )
    torch.testing.assert_close(packed, found.flatten(0, 1), rtol=0, atol=1e-5)


def test_an_empty_batch():
    assert ours.flash_attn_with_kvcache(Q[:0], K[:0], K[:0], cache_seqlens=2, causal=True).shape == (0, 3, 4, 8)
    assert ours.flash_attn_func(Q[:0], K[:0], K[:0], causal=True).shape == (0, 3, 4, 8)


def test_weights_of_sequences_with_slopes_of_their_own():
    """With dropout the weights before dropout are returned, 0 between sequences, whether slopes differ by sequence or not."""
    edges, slopes = EDGES, torch.tensor([0.5, 0.25, 0.125, 0.0])
    options = {"dropout_p": 0.5, "return_attn_probs": True}
    whole, apart = (
        ours.flash_attn_varlen_func(Q[0], K[0], K[0], *edges, 3, 3, alibi_slopes=each, **options)[2]
        for each in (slopes, slopes.expand(2, 4))
    )
    torch.testing.assert_close(whole, apart, rtol=0, atol=1e-6)


@pytest.mark.sweep
def test_compiled_calls_equal_eager_ones():
    """Sequence lengths, a cache and slopes are read outside of the graph."""
    slopes, lengths = torch.tensor([0.5, 0.25, 0.125, 0.0]), torch.tensor([1, 2])

    def run(q, k, edges, cache):
        one = ours.flash_attn_func(q, k, k, causal=True, alibi_slopes=slopes)
        two = ours.flash_attn_varlen_func(q[0], q[0], q[0], edges, edges, 3, 3, causal=True)
        three = ours.flash_attn_with_kvcache(
            q, cache, cache.clone(), k[:, :3], k[:, :3], cache_seqlens=lengths, causal=True
        )
        return 2 * one, 2 * two, 2 * three

    compiled = torch.compile(run, backend="eager")
    given = Q, K, torch.tensor([0, 1, 3])
    for found, expected in zip(compiled(*given, K.clone()), run(*given, K.clone()), strict=True):
        torch.testing.assert_close(found, expected)

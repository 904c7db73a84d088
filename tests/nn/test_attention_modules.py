"""The attention modules: the figures that notebooks show, every grouping of heads, rotary embedding, cross-attention."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rounding import with_rounding

import lowtri
from lowtri.errors import CallError, MaskError
from lowtri.nn import MaskedSelfAttention, MultiHeadAttention, sinusoidal
from lowtri.nn.positions import apply_rotary, rotary_tables

WRITE_A_POEM = torch.tensor([[1.16, 0.23], [0.57, 1.36], [4.41, -2.16]])
close = {"atol": 6e-5, "rtol": 0.0}


def plain_module(mask="causal"):
    torch.manual_seed(42)
    return MaskedSelfAttention(2, mask)


# MaskedSelfAttention


def test_the_mask_of_a_call_overrides_the_mask_of_the_module():
    seen = torch.tensor([[0.3573, 0.4011, 0.2416], [0.3410, 0.6047, 0.0542], [0.0722, 0.0320, 0.8959]])
    output, weights = plain_module()(WRITE_A_POEM, "full", return_weights=True)
    assert torch.allclose(weights, seen, **close)
    assert torch.allclose(output, torch.tensor([[1.0100, 1.0641], [0.2040, 0.7057], [3.4989, 2.2427]]), **close)
    same = {"atol": 1e-5, "rtol": 0.0}  # 16 roundings of numbers up to 5
    assert torch.allclose(plain_module(lowtri.full())(WRITE_A_POEM), output, **same), (
        "its own mask, said when it is made"
    )
    masked = plain_module()(WRITE_A_POEM)
    assert torch.allclose(plain_module()(WRITE_A_POEM, mask=None), masked, **same), "None: its own"
    table = lowtri.hidden(torch.tensor([[False, True, True], [False, False, True], [False, False, False]]))
    assert torch.allclose(plain_module("full")(WRITE_A_POEM, table), masked, **same)


def test_a_batch_gives_what_its_rows_give_alone():
    module = MaskedSelfAttention(4)
    x = torch.randn(3, 5, 4)
    output, weights = module(x, return_weights=True)
    limit = with_rounding(lambda: module(x), [x, *module.parameters()], terms=5)[1]
    assert output.shape == (3, 5, 4) and weights.shape == (3, 5, 5)
    for row in range(3):
        assert (module(x[row]) - output[row]).abs().max() <= limit
    valid = np.array([[True] * 5, [False, True, True, True, True], [True] * 5])
    batched = module(x, lowtri.causal() & lowtri.keys(valid))
    assert (batched[0] - output[0]).abs().max() <= limit and (batched[1, 0] == 0).all()


# MultiHeadAttention


def by_hand(module, x, context, visible):
    """The formula with every head written out, float64; visible (Nq, Nk)."""
    source = x if context is None else context
    q, k, v = module.q_proj(x), module.k_proj(source), module.v_proj(source)
    size, group, out = module.head_dim, module.num_heads // module.num_kv_heads, []
    for head in range(module.num_heads):
        at, kv = slice(head * size, (head + 1) * size), head // group
        its = slice(kv * size, (kv + 1) * size)
        scores = q[..., at] @ k[..., its].transpose(-2, -1) / math.sqrt(size)
        weights = scores.masked_fill(~torch.from_numpy(visible), -torch.inf).softmax(-1)
        out.append(weights @ v[..., its])
    return module.o_proj(torch.cat(out, -1))


@pytest.mark.parametrize("kv_heads", [None, 4, 2, 1])
@pytest.mark.parametrize("bias", [False, True])
def test_multi_head_grouped_query_and_multi_query_attention(kv_heads, bias):
    module = MultiHeadAttention(12, 4, kv_heads, head_dim=5, bias=bias, mask="causal & window(3)").double()
    x = torch.randn(2, 7, 12, dtype=torch.float64)
    expected = by_hand(module, x, None, lowtri.mask("causal & window(3)").dense(7))
    assert torch.allclose(module(x), expected, atol=1e-12)
    assert torch.allclose(module(x[0]), expected[0], atol=1e-12), "without a batch"
    assert (module.q_proj.bias is not None) == bias


@pytest.mark.parametrize(("nq", "nk"), [(3, 7), (7, 3), (1, 4)])
def test_cross_attention_with_other_numbers_of_queries_and_keys(nq, nk):
    module = MultiHeadAttention(12, 4, 2, mask="full", context_size=6).double()
    x, context = torch.randn(2, nq, 12, dtype=torch.float64), torch.randn(2, nk, 6, dtype=torch.float64)
    output, weights = module(x, context, return_weights=True)
    assert torch.allclose(output, by_hand(module, x, context, np.ones((nq, nk), bool)), atol=1e-12)
    assert weights.shape == (2, 4, nq, nk)
    only = module(x, context, mask=lowtri.keys([True] * (nk - 1) + [False]))
    assert torch.allclose(only, by_hand(module, x, context[:, :-1], np.ones((nq, nk - 1), bool)), atol=1e-12)
    one, its = module(x[0], context[0], return_weights=True)
    assert torch.allclose(one, output[0], atol=1e-12) and its.shape == (4, nq, nk)
    # Under a mask that compares places, query i stands beside key i, whichever of the two is longer.
    if nq >= 3:
        diagonal = module(x, context, mask="causal", return_weights=True)[1]
        assert (diagonal[0, 0, 0] > 0).tolist() == [True] + [False] * (nk - 1)


def test_padding_does_not_change_other_outputs():
    module = MultiHeadAttention(8, 2, rope_theta=10000.0)
    x = torch.randn(2, 5, 8)
    padded = torch.cat([torch.full((2, 3, 8), float("nan")), x], 1)
    found = module(padded, positions=[-1, -1, -1, 0, 1, 2, 3, 4])
    expected, limit = with_rounding(lambda: module(x), [x, *module.parameters()], terms=8)
    assert (found[:, 3:] - expected).abs().max() <= limit
    ragged = np.array([[-1, -1, -1, 0, 1, 2, 3, 4], [-1, -1, -1, -1, 0, 1, 2, 3]])
    found = module(padded, positions=ragged)
    assert (found[0, 3:] - module(x[0])).abs().max() <= limit
    assert (found[1, 4:] - module(x[1, 1:])).abs().max() <= limit


@pytest.mark.parametrize("mask", ["causal", "causal & (window(4) | first(1))"])
@pytest.mark.parametrize("theta", [None, 10000.0])
def test_a_cache_does_not_change_the_outputs(mask, theta):
    first, second = (MultiHeadAttention(8, 4, 2, mask=mask, rope_theta=theta).double() for _ in range(2))
    x, cache = torch.randn(2, 11, 8, dtype=torch.float64), lowtri.KVCache(mask, block=2)
    expected, parts, start = second(first(x)), [], 0
    for size in (3, 1, 1, 5, 1):
        part = x[:, start : start + size]
        parts.append(second(first(part, cache=cache, layer=0), cache=cache, layer=1))
        start += size
    assert torch.allclose(torch.cat(parts, 1), expected, atol=1e-12)


X, CONTEXT = torch.randn(2, 3, 8), torch.randn(2, 4, 6)
CROSS = {"context_size": 6, "mask": "full"}


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda: MultiHeadAttention(8, 3),
            "d_model 8 is not a multiple of num_heads 3. Fix: change one of them, or pass head_",
        ),
        (lambda: MultiHeadAttention(8, 4, 3), "each key/value head serves an equal number of query heads"),
        (
            lambda: MultiHeadAttention(8, 8, rope_theta=1e4),
            "head_dim is 1, but rotary embedding rotates entries in pairs",
        ),
        (lambda: MultiHeadAttention(8, 0), "num_heads 0, num_kv_heads 0: each key/value head"),
        (lambda: MultiHeadAttention(8, 2)(CONTEXT), r"x is \(2, 4, 6\), expected \(B, N, 8\) or \(N, 8\)"),
        (lambda: MultiHeadAttention(8, 2, **CROSS)(X), "there is no context, but context_size is 6"),
        (lambda: MultiHeadAttention(8, 2, **CROSS)(X, CONTEXT[:1]), r"context is \(1, 4, 6\), expected \(2, M, 6\)"),
        (
            lambda: MultiHeadAttention(8, 2, **CROSS)(X, CONTEXT, cache=lowtri.KVCache("full")),
            "got a context with a cache, but a context does not grow",
        ),
        (
            lambda: MultiHeadAttention(8, 2, rope_theta=1e4)(X, X),
            "got a context with rope_theta, but the positions of x and of a context",
        ),
        (lambda: plain_module()(torch.randn(3, 5)), r"x is \(3, 5\), expected \(N, 2\) or \(B, N, 2\)"),
        (lambda: MaskedSelfAttention(0), "d_model is 0"),
        (lambda: rotary_tables([0], 0), "the head size is 0, but entries are rotated in pairs"),
        (lambda: rotary_tables([0], 3), "the head size is 3, but entries are rotated in pairs"),
        (lambda: rotary_tables([0.5, 1.0], 4), r"positions are \(2,\) torch.float64; expected integers"),
        (lambda: sinusoidal(3, 0), "n is 3 and d is 0"),
    ],
)
def test_what_does_not_fit_is_refused(call, words):
    with pytest.raises(CallError, match=words):
        call()


def test_a_table_of_bools_is_no_mask():
    with pytest.raises(MaskError, match=r"lowtri\.hidden"):
        plain_module()(WRITE_A_POEM, torch.ones(3, 3, dtype=torch.bool))


# Rotary embedding and sinusoids


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 5000), st.integers(-200, 200), st.sampled_from([2, 6, 16]))
def test_rotary_scores_depend_on_the_distance_alone(place, distance, size):
    torch.manual_seed(place)
    q, k = torch.randn(2, 1, size, dtype=torch.float64)

    def score(at):
        turned_q = apply_rotary(q, *rotary_tables([at + distance + 200], size))
        return (turned_q * apply_rotary(k, *rotary_tables([at + 200], size))).sum()

    # The tables are float32: an angle near 5000 is known to about 2e-4.
    assert torch.allclose(score(place), score(0), atol=5e-3)
    turned = apply_rotary(q, *rotary_tables([place], size))
    assert torch.allclose(turned.norm(), q.norm(), atol=1e-5), "turning keeps lengths"


def test_rotary_pairs_are_half_a_head_apart():
    cos, sin = rotary_tables([1], 4, theta=100.0)
    turned = apply_rotary(torch.tensor([[1.0, 0.0, 0.0, 1.0]]), cos, sin)
    slow = 1 / 10
    expected = [math.cos(1), -math.sin(slow), math.sin(1), math.cos(slow)]
    assert torch.allclose(turned, torch.tensor([expected]))


def test_rotary_with_positions_for_each_row():
    cos, sin = rotary_tables(torch.tensor([[0, 1, 2], [-1, 0, 1]]), 6)
    assert cos.shape == (2, 1, 3, 6)
    x = torch.randn(1, 4, 3, 6).expand(2, -1, -1, -1)
    turned = apply_rotary(x, cos, sin)
    assert turned.isfinite().all(), "a pad's -1 is harmless"
    assert torch.allclose(turned[1, :, 1], x[1, :, 1]), "place 0 does not turn"
    half = apply_rotary(x.half(), cos, sin)
    assert half.dtype == torch.float16
    assert torch.allclose(half, apply_rotary(x.half().float(), cos, sin).half(), atol=0), "one rounding, at the end"


@pytest.mark.parametrize("d", [1, 2, 5, 8])
def test_sinusoidal_is_the_formula(d):
    table = sinusoidal(7, d)
    assert table.shape == (7, d) and table.dtype == torch.float32
    for place in range(7):
        for i in range(d):
            angle = place / 10000 ** (2 * (i // 2) / d)
            assert table[place, i].item() == pytest.approx(math.sin(angle) if i % 2 == 0 else math.cos(angle), abs=1e-6)


@pytest.mark.parametrize("bias", [False, True])
def test_fused_projections_give_the_same_output(bias: bool) -> None:
    torch.manual_seed(0)
    attend, x = MultiHeadAttention(16, 4, num_kv_heads=2, bias=bias), torch.randn(2, 5, 16)
    with torch.no_grad():
        expected = attend(x)
        attend.fuse_projections()
        attend.fuse_projections()  # once is enough
        assert attend.qkv_proj is not None and attend.qkv_proj.out_features == 32
        torch.testing.assert_close(attend(x), expected, rtol=0, atol=16 * 1.2e-7 * float(expected.abs().max()))
    with pytest.raises(CallError, match=r"got a context, but its projections are joined.*\nFix: leave out fuse_proj"):
        attend(torch.randn(2, 16), torch.randn(3, 16))

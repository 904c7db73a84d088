"""merge: attention over disjoint keys, joined, is attention over all of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from attention_cases import able, draw, near
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import gradcheck

import lowtri
from lowtri import CallError, attention, merge

MASK = lowtri.mask("causal & (window(4) | first(1))")


def parts(q, k, v, which, engine="auto", mask=MASK):
    """Attention over the keys of each number in ``which``, a list of one number for each key."""
    n = k.shape[-2]
    found = []
    for part in range(max(which) + 1):
        places = np.flatnonzero(np.array(which) == part)
        at = {"q_positions": np.arange(n - q.shape[-2], n), "k_positions": places}
        found.append(attention(q, k[..., places, :], v[..., places, :], mask, return_lse=True, engine=engine, **at))
    return [out for out, _ in found], [lse for _, lse in found]


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(0, 3), min_size=9, max_size=9), st.booleans())
def test_any_split_joins_to_the_whole(which, as_numpy):
    """Parts may be empty for some queries, or have no keys at all."""
    inputs = draw(dtype="float64")
    if as_numpy:
        inputs = tuple(x.numpy() for x in inputs)
    whole = attention(*inputs, MASK, return_lse=True, engine="reference")
    joined = merge(*parts(*inputs, which))
    assert near(joined[0], whole[0], "float64") and near(joined[1], whole[1], "float64")
    assert type(joined[0]) is type(inputs[0]) is type(joined[1])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_parts_from_every_engine(dtype):
    q, k, v = draw(dtype=dtype)
    which = [0, 0, 1, 1, 1, 2, 0, 2, 1]
    whole = attention(q, k, v, MASK, engine="formula", return_lse=True)
    for engine in able(q, k, v, MASK, return_lse=True):
        outputs, lses = parts(q, k, v, which, engine)
        out, lse = merge(outputs, lses)
        assert out.dtype == q.dtype and lse.dtype == lses[0].dtype
        assert near(out, whole[0], dtype, times=16) and near(lse, whole[1], "float32"), engine


def test_joins_join_again_in_any_order():
    q, k, v = draw(dtype="float64")
    outputs, lses = parts(q, k, v, [0, 1, 2, 0, 1, 2, 0, 1, 2])
    whole = merge(outputs, lses)
    nested = merge(*zip(merge(outputs[:2], lses[:2]), (outputs[2], lses[2]), strict=True))
    turned = merge(outputs[::-1], lses[::-1])
    alone = merge(outputs[:1], lses[:1])
    for found in (nested, turned):
        assert near(found[0], whole[0], "float64") and near(found[1], whole[1], "float64")
    assert near(alone[0], outputs[0], "float64") and near(alone[1], lses[0], "float64")


@pytest.mark.parametrize("as_numpy", [True, False])
@pytest.mark.parametrize("sign", [-np.inf, np.inf])
@pytest.mark.parametrize("n", [2, 3])
def test_an_empty_part_is_neutral_by_either_sign(as_numpy, sign, n):
    """flash-attn's log-sum-exp of a row without keys is +inf. Also between other parts, and where all are empty."""
    make = np.asarray if as_numpy else torch.from_numpy
    rng = np.random.default_rng(0)
    parts = [(rng.standard_normal((2, 5, 8)), rng.standard_normal((2, 5))) for _ in range(n)]
    for out, lse in parts:  # row 0 is empty in all, row 1 in the first alone
        out[:, 0], lse[:, 0] = 0, sign
    parts[0][0][:, 1], parts[0][1][:, 1] = 0, sign
    with np.errstate(all="raise"):
        out, lse = (np.asarray(x) for x in merge([make(o) for o, _ in parts], [make(x) for _, x in parts]))
    assert not out[:, 0].any() and np.isneginf(lse[:, 0]).all()
    full = [np.exp(x[:, 1:]) for _, x in parts]
    full[0][:, 0] = 0
    total = np.sum(full, axis=0)
    right = np.sum([o[:, 1:] * e[..., None] for (o, _), e in zip(parts, full, strict=True)], axis=0) / total[..., None]
    np.testing.assert_allclose(out[:, 1:], right, rtol=1e-12)
    np.testing.assert_allclose(lse[:, 1:], np.log(total), rtol=1e-12)


@pytest.mark.parametrize("as_numpy", [True, False])
def test_an_infinite_score_is_not_an_empty_part(as_numpy):
    """Its output is not 0 (it is NaN, or chosen by whoever made it): what is not known comes out as NaN."""
    make = np.asarray if as_numpy else torch.tensor
    out, lse = merge([make([[1.0, 0.0]]), make([[2.0, 3.0]])], [make([np.inf]), make([1.0])])
    assert np.isnan(np.asarray(out)).all() and lse.tolist() == [np.inf]
    out, lse = merge([make([[1.0]]), make([[2.0]])], [make([np.nan]), make([1.0])])
    assert np.isnan(np.asarray(out)).all() and np.isnan(np.asarray(lse)).all()


@pytest.mark.parametrize("as_numpy", [True, False])
def test_garbage_in_the_output_of_an_empty_part(as_numpy):
    make = np.asarray if as_numpy else torch.tensor
    out, lse = merge([make([[np.nan]]), make([[2.0]])], [make([-np.inf]), make([1.0])])
    assert out.tolist() == [[2.0]] and lse.tolist() == [1.0]


@pytest.mark.parametrize("sign", [-np.inf, np.inf])
def test_gradients_do_not_see_an_empty_part(sign):
    out, lse = torch.randn(2, 3, 2, dtype=torch.float64), torch.randn(2, 3, dtype=torch.float64)
    out[0, 0], lse[0, 0] = 0, sign  # one part of row 0
    out[:, 1], lse[:, 1] = 0, sign  # both parts of row 1
    leaves = [x.clone().requires_grad_() for x in (*out, *lse)]
    joined, total = merge(leaves[:2], leaves[2:])
    d_out = torch.arange(6.0, dtype=torch.float64).reshape(3, 2) + 1
    grads = torch.autograd.grad((joined * d_out).sum() + total[[0, 2]].sum(), leaves)
    assert not grads[0][:2].any() and not grads[1][1].any() and not grads[2][:2].any() and grads[3].tolist()[1] == 0
    assert grads[1][0].tolist() == d_out[0].tolist() and grads[3][0] == 1
    assert all(x.isfinite().all() for x in grads)


@pytest.mark.parametrize("engine", ["cpu", "formula"])
@pytest.mark.parametrize("sign", [-np.inf, np.inf])
def test_backward_of_rows_that_see_nothing_by_either_sign(engine, sign):
    q, k, v = draw(nq=9, nk=5)
    output, lse = attention(q, k, v, "causal", return_lse=True, q_positions=range(9), k_positions=range(2, 7))
    d_output = torch.randn(output.shape, generator=torch.Generator().manual_seed(0))
    options = {"q_positions": range(9), "k_positions": range(2, 7), "engine": engine}
    right = lowtri.attention_backward(d_output, None, output, lse, q, k, v, "causal", **options)
    signed = lse.masked_fill(lse == -torch.inf, sign)
    found = lowtri.attention_backward(d_output, None, output, signed, q, k, v, "causal", **options)
    assert (lse == -torch.inf).sum() == 2 * 4 * 2 and not right.q[:, :, :2].any()
    for a, b in zip(found[:3], right[:3], strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("as_numpy", [True, False])
def test_far_apart_log_sum_exps(as_numpy):
    make = np.asarray if as_numpy else torch.tensor
    out, lse = merge([make([[1.0]]), make([[2.0]])], [make([10_000.0]), make([-10_000.0])])
    assert out.tolist() == [[1.0]] and lse.tolist() == [10_000.0]


def test_gradients_through_a_join():
    """Of outputs and of log-sum-exps, finite also where a part saw nothing."""
    outputs = [torch.randn(3, 2, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    lses = [torch.randn(3, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    assert gradcheck(lambda *x: merge(x[:3], x[3:]), (*outputs, *lses))
    q, k, v = (x.requires_grad_() for x in draw(dtype="float64"))
    split = torch.autograd.grad(merge(*parts(q, k, v, [0, 0, 0, 0, 1, 1, 1, 2, 2]))[0].square().sum(), (q, k, v))
    whole = torch.autograd.grad(attention(q, k, v, MASK).square().sum(), (q, k, v))
    assert all(near(s, w, "float64", times=32) for s, w in zip(split, whole, strict=True))


OUT, LSE = np.zeros((4, 2)), np.zeros(4)


@pytest.mark.parametrize(
    ("outputs", "lses", "words"),
    [
        ([], [], "0 outputs and 0 lses; there is one of each for every set of keys"),
        ([OUT, OUT], [LSE], "2 outputs and 1 lses"),
        ([OUT], [LSE[:3]], r"an output is \(4, 2\) and its lse \(3,\)"),
        ([OUT, OUT[:, :1]], [LSE, LSE], r"an output is \(4, 1\) and its lse \(4,\)"),
        (
            [OUT, torch.zeros(4, 2)],
            [LSE, torch.zeros(4)],
            "got Tensor and ndarray, but it takes NumPy arrays or torch tens",
        ),
        ([[1.0]], [[1.0]], "got list, but it takes NumPy arrays or torch tensors"),
    ],
)
def test_errors(outputs, lses, words):
    with pytest.raises(CallError, match=f"merge: {words}"):
        merge(outputs, lses)

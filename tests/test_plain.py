"""The formulas as they are taught: each states what True means, keeps to it, and rejects ambiguous arguments."""

from __future__ import annotations

import inspect
import re
from typing import Any

import numpy as np
import pytest
import torch

import lowtri
from lowtri import plain
from lowtri.errors import CallError

SIGNATURES = {
    "make_causal_mask": ["T", "neg_large"],
    "softmax": ["x", "axis"],
    "create_causal_mask": ["size", "device"],
    "create_causal_mask_bool": ["size", "device"],
    "masked_attention_bool": ["scores", "mask"],
    "masked_self_attention": ["Q", "K", "V", "mask"],
    "self_attention": ["x"],
    "MaskedSelfAttention": ["d_model", "row_dim", "col_dim", "embed_dim"],
    "AutoRegressiveModel": ["embed_dim", "vocab_size"],
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_names_signatures_and_what_true_means(name: str) -> None:
    what = getattr(plain, name)
    assert list(inspect.signature(what).parameters) == SIGNATURES[name]
    first = inspect.getdoc(what).splitlines()[0]
    assert re.match(r"(True = (hidden|attend)|A number to add|Numbers are added|No mask)", first), first


def test_the_list_is_complete() -> None:
    assert plain.__all__ == list(SIGNATURES)


def test_both_polarities_agree_with_their_first_line() -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 4)
    attend = plain.create_causal_mask_bool(5)
    expected = lowtri.attention(x, x, x, "causal", return_weights=True)
    torch.testing.assert_close(plain.masked_self_attention(x, x, x, attend), expected)
    torch.testing.assert_close(plain.masked_attention_bool(x @ x.T / 2, attend), expected[1])
    module = plain.MaskedSelfAttention(4)
    with torch.no_grad():
        for weight in module.parameters():
            weight.copy_(torch.eye(4))
    torch.testing.assert_close(module(x, mask=~attend), expected[0])


def test_the_batched_class_returns_a_pair_under_its_own_causal_mask() -> None:
    module, x = plain.MaskedSelfAttention(embed_dim=4), torch.randn(1, 5, 4)
    out, weights = module(x)
    assert out.shape == (1, 5, 4) and weights.shape == (1, 5, 5)
    assert (weights.triu(1) == 0).all()
    q, k, v = module.W_q(x), module.W_k(x), module.W_v(x)
    torch.testing.assert_close((out, weights), lowtri.attention(q, k, v, "causal", return_weights=True))
    hidden = torch.eye(5).bool().roll(1, 0)
    for mask, same_mask in ((None, "full"), (hidden, lowtri.hidden(hidden))):
        torch.testing.assert_close(module(x, mask), lowtri.attention(q, k, v, same_mask, return_weights=True))
    one = module(x[0])  # without a batch, and with dimensions given, the output alone; and no mask is none
    torch.testing.assert_close(one, module(x, None)[0][0])
    with_dims = plain.MaskedSelfAttention(4, row_dim=1, col_dim=2)
    with_dims.load_state_dict(module.state_dict())
    torch.testing.assert_close(with_dims(x), one[None])
    assert (with_dims.row_dim, with_dims.col_dim, module.row_dim, module.col_dim) == (1, 2, 0, 1)
    assert plain.MaskedSelfAttention(4, row_dim=1).col_dim == 2


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_numpy_and_torch_agree(dtype: Any) -> None:
    q, k, v = np.random.default_rng(0).normal(size=(3, 2, 3, 5, 4)).astype(dtype)
    for mask in (None, np.tri(5, dtype=bool), plain.make_causal_mask(5).astype(dtype)):
        ours = plain.masked_self_attention(q, k, v, mask)
        theirs = plain.masked_self_attention(
            *(torch.from_numpy(x) for x in (q, k, v)), None if mask is None else torch.from_numpy(mask)
        )
        for one, other in zip(ours, theirs, strict=True):
            assert one.dtype == dtype
            np.testing.assert_allclose(one, other.numpy(), atol=1e-6)


def test_a_query_that_sees_no_key() -> None:
    q = k = v = np.ones((2, 2))
    with np.errstate(invalid="ignore"):
        assert np.isnan(plain.masked_self_attention(q, k, v, np.full((2, 2), -np.inf))[0]).all()
    assert (plain.masked_self_attention(q, k, v, np.full((2, 2), -1e9))[0] == 1).all()
    assert (lowtri.attention(q, k, v, ~lowtri.full()) == 0).all()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: plain.MaskedSelfAttention(), "d_model=None, embed_dim=None: they are two names for one size."),
        (
            lambda: plain.MaskedSelfAttention(2, embed_dim=2),
            "Fix: give exactly one, as in MaskedSelfAttention(d_model=2).",
        ),
        (
            lambda: plain.MaskedSelfAttention(2)(torch.eye(2), torch.eye(2)),
            "mask is torch.float32; expected torch.bool with True = hidden.\nFix: mask == 0 of a lower triangle of ones",
        ),
    ],
)
def test_errors(call: Any, words: str) -> None:
    with pytest.raises(CallError, match=re.escape(words)):
        call()

"""Arguments of a wrong kind: public functions name the argument and show what came, and never raise an error of Python or torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import lowtri
from lowtri.errors import LowtriError
from lowtri.integrations.flash_attn import flash_attn_func
from lowtri.integrations.flex import flex_attention
from lowtri.integrations.torch import switch

X, T = np.eye(3), torch.eye(4)
SELF, MULTI = lowtri.nn.MaskedSelfAttention(4), lowtri.nn.MultiHeadAttention(4, 2)


TWO, META, F = np.array([1, 0]), torch.zeros(3, dtype=torch.int64, device="meta"), torch.zeros(1, 2, 4, 8)
IDS, MODEL = torch.arange(6)[None], nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 11))
TORCHS = switch(nn.MultiheadAttention(8, 2))


def _logits(ids: Any) -> Any:
    return torch.zeros(*ids.shape, 11)


CALLS: list[tuple[Callable[..., Any], str]] = [
    (lambda: lowtri.show(X, 2), "show: tokens is .*expected labels"),
    (lambda: lowtri.show(np.ones((2, 3, 3)), head=None), "show: there is no head None among 2"),
    (lambda: lowtri.show(np.float32), "show: weights are"),
    (lambda: lowtri.show(T.to_sparse()), "show: weights is a torch.sparse"),
    (lambda: lowtri.causal().draw(3, tokens=3), "tokens is .*expected labels"),
    (lambda: lowtri.causal().save(3), "save: the path is 3; expected the name of a file"),
    (lambda: lowtri.causal().additive(2, like=3), "additive: like is .*expected a torch tensor"),
    (lambda: lowtri.causal().additive(2, dtype=T), "(?s)additive: dtype is .*NumPy dtypes"),
    (lambda: lowtri.attention(X, X, X, "causal", return_weights=2.5), "return_weights is 2.5"),
    (lambda: lowtri.attention(X, X, X, "causal", return_lse="yes"), "return_lse is 'yes'; expected"),
    (lambda: lowtri.attention(X, X, X, "causal", return_weights=3), "return_weights is 3; expected"),
    (lambda: lowtri.attention(X, X, X, "causal", engine=TWO), r"engine is array\(\[.*expected a name"),
    (lambda: lowtri.attention(X, X, X, "causal", engine=np.array("cpu")), "engine is array"),
    (lambda: lowtri.which_engine(X, X, X, "causal", engine=TWO), r"engine is array\(\["),
    (lambda: lowtri.KVCache("causal").attend(T, T, T, engine=TWO), r"engine is array\(\["),
    (lambda: lowtri.KVCache("causal", allow_missing=TWO), r"KVCache: allow_missing is array\(\[.*expected"),
    (lambda: lowtri.KVCache("causal").append(np.array(1.0), np.array(1.0)), r"append: keys \(\) float64"),
    (lambda: lowtri.KVCache("causal").append(T[0, 0], T[0, 0]), r"append: keys \(\) float32"),
    (lambda: lowtri.KVCache("causal").attend(T, T[0, 0], T), r"attend: queries \(4, 4\).*keys \(\)"),
    (lambda: lowtri.KVCache("causal").append(np.float32(1), X), "append: k is float32, but it takes"),
    (lambda: switch(nn.MultiheadAttention(4, 2), engine=TWO), r"no engine array\(\["),
    (
        lambda: lowtri.scaled_dot_product_attention(T, T, T, is_causal=TWO),
        r"scaled_dot_product_attention: is_causal is array\(\[.*expected True or False",
    ),
    (
        lambda: lowtri.scaled_dot_product_attention(T, T, T, enable_gqa=torch.tensor([1, 0])),
        r"enable_gqa is tensor\(\[1, 0\]\); expected True or False",
    ),
    (lambda: flex_attention(F, F, F, enable_gqa=TWO), r"flex_attention: enable_gqa is array\(\["),
    (lambda: flex_attention(F, F, F, return_lse="x"), "flex_attention: return_lse is 'x'; expected"),
    (lambda: flash_attn_func(F, F, F, causal=TWO), r"causal is .*array"),
    (
        lambda: TORCHS(F[0], F[0], F[0], attn_mask=T > 0, is_causal=TWO),
        r"nn.MultiheadAttention: is_causal is array\(\[",
    ),
    (lambda: TORCHS(F[0], F[0], F[0], need_weights=TWO), r"need_weights is array\(\["),
    (lambda: TORCHS(F[0], F[0], F[0], average_attn_weights=2), "average_attn_weights is 2; expected"),
    (lambda: lowtri.merge([np.float64(3)], [np.float64(3)]), "merge: got float64"),
    (lambda: lowtri.merge([np.array(["x"])], [np.array("x")]), "merge: got <U1"),
    (lambda: lowtri.scaled_dot_product_attention(np.float32, T, T), "query is"),
    (lambda: lowtri.scaled_dot_product_attention(T, T, T, np.float32), "attn_mask is type"),
    (lambda: lowtri.KVCache("causal").shift(None), "shift: keep is None; it counts"),
    (lambda: lowtri.KVCache("causal").next_positions(None), "n is None; it counts tokens"),
    (lambda: lowtri.generate(3, [1], 1), r"generate: model is 3. Fix: a model, or a function"),
    (lambda: lowtri.generate(None, [1], 1), "generate: model is None. Fix"),
    (lambda: lowtri.generate(T, [1], 1), r"(?s)generate: model is tensor.*Fix"),
    (lambda: lowtri.generate(_logits, [1], 1, cached=TWO), r"generate: cached is array\(\["),
    (lambda: list(lowtri.generate(_logits, [1], max_new_tokens="x")), "max_new_tokens is 'x'"),
    (lambda: list(lowtri.generate(_logits, [1], max_new_tokens=1, stop=2.5)), "stop is 2.5; expected"),
    (lambda: lowtri.explain(SELF, T, hidden=None), "explain: hidden is None; expected a number. Fix"),
    (lambda: lowtri.explain(SELF, T, hidden=[-1e9]), r"hidden is \[-1000000000.0\]; expected"),
    (
        lambda: lowtri.explain((T, T, T), mask="causal", hidden=torch.zeros((), device="meta")),
        "explain: hidden is tensor.*expected a number",
    ),
    (lambda: lowtri.explain(SELF, T, hidden=math.nan), "hidden is nan; expected a number"),
    (lambda: lowtri.explain(SELF, T, tokens=3), "explain: tokens is 3; expected one label"),
    (lambda: lowtri.explain(SELF, T, heads="x"), "explain: heads is 'x'; expected a whole"),
    (lambda: lowtri.explain(SELF, T, head="x"), "explain: there is no head 'x'"),
    (lambda: lowtri.explain(SELF, T, batch="x"), "explain: there is no batch row 'x'"),
    (lambda: lowtri.explain(SELF, "x"), "explain: "),
    (lambda: SELF([[1.0] * 4]), "MaskedSelfAttention: x is list; expected a torch tensor"),
    (lambda: MULTI(T.tolist()), "MultiHeadAttention: x is list; expected a torch tensor"),
    (lambda: MULTI(T, T.tolist()), "MultiHeadAttention: context is list"),
    (lambda: MULTI(T, cache=3), "MultiHeadAttention: cache is int. Fix: lowtri.KVCache"),
    (lambda: lowtri.nn.MultiHeadAttention(None, 2), "d_model is None; expected a whole number"),
    (lambda: lowtri.nn.MultiHeadAttention(8, "2"), "num_heads is '2'; expected a whole number"),
    (lambda: lowtri.nn.MultiHeadAttention(8, 2, head_dim=2.5), "head_dim is 2.5; expected"),
    (lambda: MULTI(T, attend=3), "MultiHeadAttention: attend is 3; expected a function. Fix"),
    (lambda: lowtri.nn.MultiHeadAttention(4, 2, bias="yes"), "bias is 'yes'; expected True or False"),
    (lambda: lowtri.nn.MultiHeadAttention(4, 2, bias=TWO), r"bias is array\(\[.*expected True"),
    (lambda: lowtri.nn.MultiHeadAttention(4, 2, out_bias=2.5), "out_bias is 2.5; expected"),
    (lambda: MULTI(T, return_weights=3), "MultiHeadAttention: return_weights is 3; expected"),
    (lambda: SELF(T, return_weights=TWO), r"MaskedSelfAttention: return_weights is array"),
    (lambda: lowtri.causal()(META, META), r"mask: a position is tensor.*cannot be read(.|\n)*Fix: ints"),
    (lambda: lowtri.causal()(T.to_sparse(), 0), r"mask: a position is tensor(.|\n)*cannot be read"),
    (lambda: lowtri.causal()([[1], [1, 2]], 0), r"mask: a position is \[\[1\], \[1, 2\]\], whose numbers"),
    (lambda: lowtri.causal().tile(META, META, 0, 3), r"tile: an edge is tensor.*cannot be read"),
    (lambda: lowtri.causal().tile(META[0], 3, 0, 3), r"tile: an edge is tensor"),
    (
        lambda: lowtri.where(lambda q, k: k <= torch.tensor([0, 1])).dense(2),
        r"where: the formula mixes NumPy's arrays.*torch tensor(.|\n)*Fix: tensor.numpy\(\)",
    ),
    (
        lambda: lowtri.attention(X, X, X, lowtri.where(lambda q, k: np.arange(9)[q] >= torch.arange(9)[k])),
        "where: the formula mixes NumPy's arrays",
    ),
    *(
        (partial(function, MODEL, example), words)
        for name, function in (("audit", lowtri.audit), ("infer_mask", lowtri.infer_mask))
        for what, example, words in (
            ("sparse", T.to_sparse(), r"audit: example is a tensor of the layout torch.sparse_coo(.|\n)*Fix: give ids"),
            ("dates", np.array(["2020-01-01", "2020-01-02"], "M8[D]"), r"audit: example is of datetime64\[D\] \(2,\)"),
            ("texts", np.array(["a", "b"]), "audit: example is of <U1"),
        )
    ),
    *(
        (partial(lowtri.Model, MODEL, **options), words)
        for what, options, words in (
            ("vocab_size", {"vocab_size": 2**62}, "vocab_size=4611686018427387904, expected a whole number from 2"),
            ("vocab_sizes", {"vocab_size": TWO}, r"vocab_size=array\(\[.*expected a whole number"),
            ("no input", {"inputs": []}, r"Model: inputs=\[\], expected a key of the example(.|\n)*Fix"),
            ("empty input", {"inputs": ()}, r"Model: inputs=\(\), expected a key"),
            ("input", {"inputs": TWO}, r"Model: inputs=array\(\[.*expected a key"),
            ("axes", {"axes": TWO}, "Model: axes=array"),
        )
    ),
    (lambda: lowtri.nn.sinusoidal(3, 2.5), "sinusoidal: n is 3 and d is 2.5; expected whole numbers"),
    (lambda: lowtri.verify(min, signature=[1]), r"verify: signature=\[1\]; expected"),
    (lambda: lowtri.verify(min, dtypes=3), "verify: dtypes=3; expected"),
    (lambda: lowtri.verify(min, cases=3), "verify: cases=3; expected"),
    (lambda: lowtri.verify(min, differences=[1]), "verify: differences is list; expected a dict"),
    (lambda: lowtri.verify(min, limit="x"), "verify: limit='x'; expected seconds"),
]


@pytest.mark.parametrize(("call", "words"), CALLS, ids=[words[:40] for _, words in CALLS])
def test_an_argument_of_a_wrong_kind(call: Callable[..., Any], words: str) -> None:
    with pytest.raises(LowtriError, match=words):
        call()


def test_numbers_of_numpy_are_taken() -> None:
    assert lowtri.nn.sinusoidal(np.int64(3), np.int64(2)).shape == (3, 2)
    assert lowtri.nn.MultiHeadAttention(np.int64(8), np.int64(2)).head_dim == 4
    assert list(lowtri.generate(_logits, [1], max_new_tokens=np.int64(2), stop=np.int64(0))) in ([], [0])


def test_numpys_own_switches_are_taken() -> None:
    yes, no = np.True_, np.False_
    assert len(lowtri.attention(X, X, X, "causal", return_weights=yes, return_lse=1)) == 3
    assert torch.equal(
        lowtri.scaled_dot_product_attention(T, T, T, is_causal=yes, enable_gqa=no),
        lowtri.scaled_dot_product_attention(T, T, T, is_causal=True),
    )
    assert lowtri.nn.MultiHeadAttention(4, 2, bias=no, out_bias=yes).o_proj.bias is not None
    assert TORCHS(F[0], F[0], F[0], need_weights=no)[1] is None
    assert lowtri.attention(X, X, X, "causal", return_lse=None).shape == (3, 3)

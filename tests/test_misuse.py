"""Arguments of a wrong kind: public functions name the argument and show what came, and never raise an error of Python or torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import lowtri
from lowtri.errors import LowtriError

X, T = np.eye(3), torch.eye(4)
SELF, MULTI = lowtri.nn.MaskedSelfAttention(4), lowtri.nn.MultiHeadAttention(4, 2)


def _logits(ids: Any) -> Any:
    return torch.zeros(*ids.shape, 11)


CALLS: dict[str, tuple[Callable[..., Any], str]] = {
    "show: labels": (lambda: lowtri.show(X, 2), "show: tokens is .*expected labels"),
    "show: head": (lambda: lowtri.show(np.ones((2, 3, 3)), head=None), "show: there is no head None among 2"),
    "show: a dtype": (lambda: lowtri.show(np.float32), "show: weights are"),
    "show: sparse": (lambda: lowtri.show(T.to_sparse()), "show: weights is a torch.sparse"),
    "draw: labels": (lambda: lowtri.causal().draw(3, tokens=3), "tokens is .*expected labels"),
    "save": (lambda: lowtri.causal().save(3), "save: the path is 3; expected the name of a file"),
    "additive: like": (lambda: lowtri.causal().additive(2, like=3), "additive: like is .*expected a torch tensor"),
    "additive: dtype": (lambda: lowtri.causal().additive(2, dtype=T), "(?s)additive: dtype is .*NumPy dtypes"),
    "attention: weights": (lambda: lowtri.attention(X, X, X, "causal", return_weights=2.5), "return_weights is 2.5"),
    "attention: lse": (lambda: lowtri.attention(X, X, X, "causal", return_lse="yes"), "return_lse is 'yes'; expected"),
    "merge: scalars": (lambda: lowtri.merge([np.float64(3)], [np.float64(3)]), "merge: got float64"),
    "merge: texts": (lambda: lowtri.merge([np.array(["x"])], [np.array("x")]), "merge: got <U1"),
    "sdpa": (lambda: lowtri.scaled_dot_product_attention(np.float32, T, T), "query is"),
    "sdpa: mask": (lambda: lowtri.scaled_dot_product_attention(T, T, T, np.float32), "attn_mask is type"),
    "shift": (lambda: lowtri.KVCache("causal").shift(None), "shift: keep is None; it counts"),
    "next_positions": (lambda: lowtri.KVCache("causal").next_positions(None), "n is None; it counts tokens"),
    "generate: tokens": (lambda: list(lowtri.generate(_logits, [1], max_new_tokens="x")), "max_new_tokens is 'x'"),
    "generate: stop": (
        lambda: list(lowtri.generate(_logits, [1], max_new_tokens=1, stop=2.5)),
        "stop is 2.5; expected",
    ),
    "explain: labels": (lambda: lowtri.explain(SELF, T, tokens=3), "explain: tokens is 3; expected one label"),
    "explain: heads": (lambda: lowtri.explain(SELF, T, heads=None), "explain: heads is None; expected a whole"),
    "explain: head": (lambda: lowtri.explain(SELF, T, head="x"), "explain: there is no head 'x'"),
    "explain: batch": (lambda: lowtri.explain(SELF, T, batch="x"), "explain: there is no batch row 'x'"),
    "explain: texts": (lambda: lowtri.explain(SELF, "x"), "explain: "),
    "self-attention": (lambda: SELF([[1.0] * 4]), "MaskedSelfAttention: x is list; expected a torch tensor"),
    "multi-head": (lambda: MULTI(T.tolist()), "MultiHeadAttention: x is list; expected a torch tensor"),
    "multi-head: context": (lambda: MULTI(T, T.tolist()), "MultiHeadAttention: context is list"),
    "multi-head: cache": (lambda: MULTI(T, cache=3), "MultiHeadAttention: cache is int. Fix: lowtri.KVCache"),
    "multi-head: size": (lambda: lowtri.nn.MultiHeadAttention(None, 2), "d_model is None; expected a whole number"),
    "multi-head: heads": (lambda: lowtri.nn.MultiHeadAttention(8, "2"), "num_heads is '2'; expected a whole number"),
    "multi-head: head_dim": (lambda: lowtri.nn.MultiHeadAttention(8, 2, head_dim=2.5), "head_dim is 2.5; expected"),
    "sinusoidal": (lambda: lowtri.nn.sinusoidal(3, 2.5), "sinusoidal: n is 3 and d is 2.5; expected whole numbers"),
    "verify: signature": (lambda: lowtri.verify(min, signature=[1]), r"verify: signature=\[1\]; expected"),
    "verify: dtypes": (lambda: lowtri.verify(min, dtypes=3), "verify: dtypes=3; expected"),
    "verify: cases": (lambda: lowtri.verify(min, cases=3), "verify: cases=3; expected"),
    "verify: differences": (
        lambda: lowtri.verify(min, differences=[1]),
        "verify: differences is list; expected a dict",
    ),
    "verify: limit": (lambda: lowtri.verify(min, limit="x"), "verify: limit='x'; expected seconds"),
}


@pytest.mark.parametrize("name", CALLS)
def test_an_argument_of_a_wrong_kind(name: str) -> None:
    call, words = CALLS[name]
    with pytest.raises(LowtriError, match=words):
        call()


def test_numbers_of_numpy_are_taken() -> None:
    assert lowtri.nn.sinusoidal(np.int64(3), np.int64(2)).shape == (3, 2)
    assert lowtri.nn.MultiHeadAttention(np.int64(8), np.int64(2)).head_dim == 4
    assert list(lowtri.generate(_logits, [1], max_new_tokens=np.int64(2), stop=np.int64(0))) in ([], [0])

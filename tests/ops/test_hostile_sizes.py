"""Sizes, counts and positions of any magnitude, and lists in place of arrays: they work, or end in one error of lowtri's."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import lowtri
from lowtri import CallError, KVCache, LowtriError
from lowtri.masks import POSITION_MAX

NUMBERS: list[Any] = [-1, 2**62 - 1, 2**62, 2**63 - 1, 2**63, 2**64, 10**30, 1.5, float("nan"), float("inf"), "3", None]
NUMBERS += [np.uint64(2**64 - 1), np.array(3), [3], [2**63]]
X = torch.randn(1, 2, 6, 8, generator=torch.Generator().manual_seed(0))


def tokens(cache: KVCache, n: int = 3) -> None:
    for _ in range(n):
        cache.attend(*[X[:, :, :1]] * 3)
    str(cache)


def generated(name: str, x: Any) -> Any:
    options: dict[str, Any] = {"max_new_tokens": 2, "temperature": 0.5, name: x}
    return list(lowtri.generate(lambda ids: torch.zeros(*ids.shape, 9), [1, 2], **options))


CALLS: dict[str, Callable[[Any], Any]] = {
    "capacity": lambda x: tokens(KVCache("window(2)", capacity=x)),
    "block": lambda x: tokens(KVCache("window(2)", block=x)),
    "rewind": lambda x: tokens(KVCache("window(2)", rewind=x)),
    "crop": lambda x: KVCache("causal").crop(x),
    "temperature": lambda x: generated("temperature", x),
    "top_k": lambda x: generated("top_k", x),
    "top_p": lambda x: generated("top_p", x),
    "seed": lambda x: generated("seed", x),
    "q_positions": lambda x: lowtri.attention(X, X, X, "causal", q_positions=[x] * 6),
    "k_positions": lambda x: lowtri.attention(X, X, X, "window(3)", k_positions=[x] * 6),
    "scale": lambda x: lowtri.attention(X, X, X, "causal", scale=x),
    "softcap": lambda x: lowtri.attention(X, X, X, "causal", softcap=x),
    "dropout": lambda x: lowtri.attention(X, X, X, "causal", dropout=x),
    "first": lambda x: lowtri.attention(X, X, X, "causal", bias=lowtri.distance_bias(torch.zeros(4), first=x)),
    "merge": lambda x: lowtri.merge(x, x),
}


def positions_of_a_cache(x: Any) -> None:
    cache = KVCache("causal & window(2)")
    cache.append(X[:, :, :1], X[:, :, :1], positions=[x])
    str(cache), cache._repr_html_()
    tokens(cache)


CALLS["positions of a cache"] = positions_of_a_cache


@pytest.mark.parametrize("name", CALLS)
def test_any_number(name: str) -> None:
    for x in NUMBERS:
        with contextlib.suppress(LowtriError):
            CALLS[name](x)


MODULES: dict[str, Callable[[Any], Any]] = {
    "d_model": lambda x: lowtri.nn.MaskedSelfAttention(x),
    "sinusoidal: n": lambda x: lowtri.nn.sinusoidal(x, 8),
    "sinusoidal": lambda x: lowtri.nn.sinusoidal(8, x),
    "MultiHeadAttention": lambda x: lowtri.nn.MultiHeadAttention(x, 2),
    "num_hidden_layers": lambda x: lowtri.nn.DecoderConfig(vocab_size=9, num_hidden_layers=x),
    "vocab_size": lambda x: lowtri.nn.DecoderConfig(vocab_size=x),
}


@pytest.mark.parametrize("x", [-1, 2**62, 2**63, 10**30])
@pytest.mark.parametrize("name", MODULES)
def test_sizes_of_modules(name: str, x: int) -> None:
    with pytest.raises(CallError, match=name):
        MODULES[name](x)


WIDE = X[:, :1, :1].expand(1, 2**20, 1, 8)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda: KVCache(capacity=2**62),
            rf"capacity is {2**62}; it counts tokens, from 0 to 2\*\*28\.\nFix: capacity=0",
        ),
        (lambda: KVCache(block=2**63), rf"block is {2**63}; it counts tokens, from 1 to 2\*\*28\.\nFix: block=64"),
        (lambda: KVCache(rewind="a"), r"rewind is 'a'; it counts tokens, from 0 to 2\*\*62\.\nFix: rewind=the length"),
        (
            lambda: KVCache(capacity=2**28).append(WIDE, WIDE),
            r"slots in keys or values .* take .* GiB, which could not be allocated\.\nFix: a",
        ),
    ],
)
def test_the_words_about_a_cache(call: Callable[[], Any], words: str) -> None:
    with pytest.raises(CallError, match=words):
        call()


def test_the_last_positions() -> None:
    """Attention at the end of all positions is that at their beginning."""
    last = np.arange(POSITION_MAX - 6, POSITION_MAX)
    for mask in ("causal", "window(3)", lowtri.where(lambda q, k: q - k < 2)):
        found = lowtri.attention(X, X, X, mask, q_positions=last, k_positions=last)
        assert torch.equal(found, lowtri.attention(X, X, X, mask))


@pytest.mark.parametrize("given", [X.tolist(), [X], (X, X), None, 3, "x"])
def test_no_array(given: Any) -> None:
    """In the place of each argument that takes an array."""
    cache = KVCache("causal")
    lse = X[..., 0]
    calls = [
        lambda: lowtri.attention(given, X, X, "causal"),
        lambda: lowtri.attention(X, given, X, "causal"),
        lambda: lowtri.attention(X, X, given, "causal"),
        lambda: lowtri.attention_backward(given, None, X, lse, X, X, X, "causal"),
        lambda: lowtri.attention_backward(X, None, X, given, X, X, X, "causal"),
        lambda: lowtri.attention_backward(X, None, X, lse, given, X, X, "causal"),
        lambda: lowtri.scaled_dot_product_attention(given, X, X),
        lambda: lowtri.scaled_dot_product_attention(X, X, given),
        lambda: lowtri.merge([given], [lse]),
        lambda: lowtri.merge([X], [given]),
        lambda: lowtri.which_engine(X, given, X, "causal"),
        lambda: cache.append(given, X),
        lambda: cache.append(X, given),
        lambda: cache.attend(given, X, X),
        lambda: cache.attend(X, X, given),
    ]
    for call in calls:
        with pytest.raises(LowtriError):
            call()
    assert cache.held == 0

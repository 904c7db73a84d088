"""NumPy raises at underflow and overflow where a program asks for it: lowtri's own steps are not what it watches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from attention_cases import able

import lowtri


@pytest.fixture(autouse=True)
def raising() -> Any:
    with np.errstate(all="raise"):
        yield


def drawn(scale: float, dtype: Any) -> Any:
    with np.errstate(all="ignore"):
        return (np.random.default_rng(0).standard_normal((3, 2, 40, 16)) * scale).astype(dtype)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "weights": {"return_weights": True, "return_lse": True},
    "softcap": {"softcap": 5.0},
    "distances": {"bias": lowtri.alibi(np.array([0.5, 0.25]))},
    "a bias that hides": {"bias": np.full((40, 40), -np.inf, np.float32)},
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("scale", [1e-30, 1.0, 20.0, 1e4])
def test_every_engine_gives_the_same_result(scale: float, dtype: Any, name: str) -> None:
    """Small weights become 0, hidden numbers are NaN and infinite: neither raises."""
    q, k, v = drawn(scale, dtype)
    k[:, -1], v[:, -1] = np.inf, np.nan  # hidden
    options = {"q_positions": range(40), "k_positions": [*range(39), -1], **OPTIONS[name]}
    for engine in able(q, k, v, "causal", **options):
        found = lowtri.attention(q, k, v, "causal", engine=engine, **options)
        with np.errstate(all="ignore"):
            right = lowtri.attention(q, k, v, "causal", engine=engine, **options)
        for a, b in zip(*(x if isinstance(x, tuple) else (x,) for x in (found, right)), strict=True):
            assert np.array_equal(a, b), engine


FUNCTIONS: dict[str, Callable[[np.ndarray], Any]] = {
    "plain.softmax": lowtri.plain.softmax,
    "plain.self_attention": lowtri.plain.self_attention,
    "merge": lambda x: lowtri.merge([x, x], [x[:, 0], -x[:, 0]]),
    "additive": lambda x: lowtri.causal().additive(4, dtype=np.float16),
    "explain": lambda x: str(lowtri.explain((x, x, x), mask="causal")),
    "cache": lambda x: lowtri.KVCache("causal").attend(x, x, x),
    "nucleus sampling": lambda x: list(
        lowtri.generate(lambda ids: np.resize(x, (*np.shape(ids), 48)), [1, 2], max_new_tokens=2, temperature=0.1, top_p=0.9)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_of_numpy_arrays(name: str) -> None:
    FUNCTIONS[name](np.random.default_rng(0).standard_normal((6, 8)) * 1000)

"""The precision contract of the kernels, each case in every dtype, on the instruction set that LOWTRI_ISA names.

``test_contract_by_isa.py`` runs these tests in a process for each instruction set, since the choice is made when a process starts.
"""

from __future__ import annotations

from typing import Any

import double_double
import numpy as np
import pytest
import torch
from attention_cases import DTYPES, EPS, draw, with_gradients

import lowtri

MASKS = ("full", "causal & window(40)", "causal & documents(lengths=[50, 90])")
POISONS = (float("nan"), float("inf"), -float("inf"))


def wide(x: Any) -> Any:
    return np.asarray(x.detach().double().numpy() if isinstance(x, torch.Tensor) else x, np.float64)


def errors(actual: torch.Tensor, exact: Any) -> tuple[float, float]:
    """The greatest, and the root of the mean square."""
    off = np.abs(wide(actual) - wide(exact))
    return float(off.max()), float(np.sqrt(np.square(off).mean()))


def attention(q: Any, k: Any, v: Any, mask: Any, **options: Any) -> Any:
    return lowtri.attention(q, k, v, mask, engine="cpu", **options)


def check(actual: torch.Tensor, plain: torch.Tensor, exact: Any, dtype: str, size: float) -> None:
    """The contract's factors, with two units in the last place where the plain formula happens to be exact.

    In float64 a reference of float64 is no more exact than the plain formula: as much is added again.
    """
    (most, mean), (plain_most, plain_mean) = errors(actual, exact), errors(plain, exact)
    own = 1 if dtype == "float64" else 0
    assert most <= (2 + own) * plain_most + 2 * EPS[dtype] * size, (most, plain_most)
    assert mean <= (1.5 + own) * plain_mean + EPS[dtype] * float(np.abs(wide(exact)).mean()), (mean, plain_mean)


@pytest.mark.parametrize("nq", [1, 5, 140], ids=["one query", "few", "tiles"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_outputs(dtype: str, nq: int) -> None:
    for seed, text in enumerate(MASKS):
        q, k, v = draw(b=2, hq=4, hkv=2, nq=nq, nk=140, d=64, dv=64, seed=seed, dtype=dtype)
        exact = lowtri.attention(q.double(), k.double(), v.double(), text, engine="reference")
        plain = lowtri.attention(q, k, v, text, engine="formula")
        check(attention(q, k, v, text), plain, exact, dtype, float(v.abs().max()))


def exact_gradients(q: Any, k: Any, v: Any, text: str, d_output: Any) -> list[torch.Tensor]:
    """Those of q, k and v in twice float64's precision, rounded; each head of keys serves two of queries."""
    q, k, v, d_output = (wide(x) for x in (q, k, v, d_output))
    k, v = (np.repeat(x, 2, axis=1) for x in (k, v))

    def transposed(x: Any) -> Any:
        return double_double.Two(*(part.swapaxes(2, 3) for part in x))

    scale, ones = double_double.Two(q.shape[3] ** -0.5, 0.0), np.ones((k.shape[2], 1))
    s = double_double.times(double_double.matmul(q, k.swapaxes(2, 3)), scale)  # (B, H, Nq, Nk)
    visible = lowtri.mask(text).dense(q.shape[2], k.shape[2])
    weights = double_double.exp(double_double.Two(np.where(visible, s.high, -np.inf), s.low))
    p = double_double.over(weights, double_double.matmul(weights, ones))
    dp = double_double.matmul(d_output, v.swapaxes(2, 3))
    delta = double_double.matmul(double_double.times(p, dp), ones)  # (B, H, Nq, 1)
    ds = double_double.times(
        double_double.times(p, double_double.plus(dp, double_double.Two(-delta.high, -delta.low))), scale
    )
    gradients = [double_double.matmul(ds, k)]
    for x in (double_double.matmul(transposed(ds), q), double_double.matmul(transposed(p), d_output)):
        gradients.append(double_double.plus(*(double_double.Two(*(part[:, i::2] for part in x)) for i in range(2))))
    return [torch.from_numpy(gradient.high) for gradient in gradients]


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients(dtype: str) -> None:
    for seed, text in enumerate(MASKS):
        inputs = draw(b=1, hq=4, hkv=2, nq=140, nk=140, d=64, dv=64, seed=seed, dtype=dtype)
        d_output = torch.randn(1, 4, 140, 64, generator=torch.Generator().manual_seed(seed)).to(inputs[0].dtype)
        exact = exact_gradients(*inputs, text, d_output)
        plain, actual = (with_gradients(engine, inputs, text, d_output)[1] for engine in ("formula", "cpu"))
        for one, two, three in zip(actual, plain, exact, strict=True):
            check(one, two, three, dtype, float(three.abs().max()))


@pytest.mark.parametrize("value", POISONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_hidden_leaves_no_trace(dtype: str, value: float) -> None:
    """Keys and values that nobody sees, and the queries and their gradients that see nobody."""
    mask = lowtri.causal() & lowtri.keys((np.arange(130) >= 20) & (np.arange(130) != 70))
    clean = draw(b=1, nq=130, nk=130, d=64, dv=64, dtype=dtype)
    d_output = torch.ones(1, 4, 130, 64, dtype=clean[0].dtype)
    broken, d_broken = tuple(x.clone() for x in clean), d_output.clone()
    for x in (*broken[1:], d_broken):
        x[:, :, 3, 5] = value
    broken[0][:, :, :20] = value
    for x in broken[1:]:
        x[:, :, 70, 11] = value
    before, after = (with_gradients("cpu", x, mask, d) for x, d in ((clean, d_output), (broken, d_broken)))
    for one, two in zip((before[0], *before[1]), (after[0], *after[1]), strict=True):
        size = max(1.0, float(one.abs().max()))
        assert (one.double() - two.double()).abs().max() <= 8 * EPS[dtype] * size
    assert (after[0][:, :, :20] == 0).all() and (after[1][0][:, :, :20] == 0).all()
    for nq in (1, 5):
        q = clean[0][:, :, -nq:]
        one, two = (attention(q, *x[1:], mask) for x in (clean, broken))
        assert (one.double() - two.double()).abs().max() <= 8 * EPS[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_visible_comes_out(dtype: str) -> None:
    for nq in (1, 130):
        q, k, v = draw(b=1, nq=nq, nk=130, d=64, dv=64, dtype=dtype)
        v[:, :, -1, 7] = float("nan")
        output = attention(q, k, v, "causal")
        assert output[:, :, -1, 7].isnan().all() and output[:, :, :-1].isfinite().all()


@pytest.mark.parametrize("nq", [1, 5, 70], ids=["one query", "few", "tiles"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_query_that_sees_nothing(dtype: str, nq: int) -> None:
    q, k, v = draw(b=1, nq=nq, nk=130, d=64, dv=64, dtype=dtype)
    k.fill_(float("nan"))
    v.fill_(float("inf"))
    output, lse = attention(q, k, v, lowtri.keys(np.zeros(130, bool)), return_lse=True)
    assert (output == 0).all() and (lse == -float("inf")).all()


@pytest.mark.parametrize("nq", [1, 5, 70], ids=["one query", "few", "tiles"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_greatest_scores_select_a_key(dtype: str, nq: int) -> None:
    """Up to 2e38, which in units of log 2 is the greatest float32; as far as the dtype goes in float16."""
    q, k, v = draw(b=1, nq=nq, nk=100, d=64, dv=64, dtype=dtype)
    k.zero_()
    q.zero_()
    k[..., 0] = torch.linspace(-1, 1, 100)
    q[..., 0] = 6e4 if dtype == "float16" else 2e38
    for sign, best in ((1, 99), (-1, 0)):
        output = attention(sign * q, k, v, "full", scale=1.0)
        expected = v[:, :, best].repeat_interleave(2, 1)[:, :, None]
        assert (output.double() - expected.double()).abs().max() <= 2 * EPS[dtype] * float(v.abs().max())


@pytest.mark.parametrize("size", [3e38, -3e38])
def test_equal_scores_of_3e38_give_the_mean(size: float) -> None:
    """Beyond the range of float32 in units of log 2, where its scores overflow; float64 has room."""
    for nq in (5, 70):
        q, k, v = draw(b=1, nq=nq, nk=100, d=64, dv=64, dtype="float64")
        q.zero_()
        k.zero_()
        q[..., 0], k[..., 0] = size, 1.0
        output = attention(q, k, v, "full", scale=1.0)
        mean = v.mean(dim=2, keepdim=True).repeat_interleave(2, 1)
        assert (output - mean).abs().max() <= 1e-12


@pytest.mark.parametrize("nq", [1, 7, 40], ids=["one query", "few", "a tile"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_of_32768_keys(dtype: str, nq: int) -> None:
    source = torch.Generator().manual_seed(0)
    kind = getattr(torch, dtype)
    q, k, v = (torch.randn(1, 1, n, 64, generator=source).to(kind) for n in (nq, 32_768, 32_768))
    v += 10
    scores = wide(q) @ wide(k).swapaxes(2, 3) / 8
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights = (weights / weights.sum(-1, keepdims=True)).reshape(1, 1, nq, 64, 512).swapaxes(2, 3)
    exact = (weights @ wide(v).reshape(1, 1, 64, 512, 64)).sum(2)  # sums of 512 numbers lose little, even in float64
    plain = lowtri.attention(q, k, v, "full", engine="formula")
    check(attention(q, k, v, "full"), plain, exact, dtype, float(v.abs().max()))

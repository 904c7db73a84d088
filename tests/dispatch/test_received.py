"""What the kernels compute again: the weights, and what each key received from all queries."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from attention_cases import DTYPES, EPS, draw, on_threads
from hypothesis import given, settings
from hypothesis import strategies as st
from subprocesses import printed

import lowtri
from lowtri import CallError

ENGINES = ("cpu", "formula", "reference")
BOTH: dict[str, Any] = {"return_weights": True, "return_received": True}
MASKS: tuple[Any, ...] = (
    "full",
    "causal",
    "causal & window(40)",
    "causal & documents(lengths=[50, 90])",
    "causal & (window(20) | first(4))",
    lowtri.causal() & lowtri.keys(lengths=[140, 77]),
)


def exact(q: Any, k: Any, v: Any, mask: Any, **options: Any) -> Any:
    """Weights and received weights in float64."""
    wide = {name: x.double() if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    return lowtri.attention(q.double(), k.double(), v.double(), mask, engine="reference", **BOTH, **wide)[1:]


def check(found: Any, expected: Any, dtype: str) -> None:
    weights, received = found
    assert weights.dtype == getattr(torch, dtype)
    assert received.dtype == torch.promote_types(weights.dtype, torch.float32)
    assert (weights.double() - expected[0]).abs().max() <= 8 * EPS[dtype]
    # The kernels sum what they have not rounded to a half type; their exponential has four good digits there.
    digits = EPS[dtype] if dtype in ("float32", "float64") else 4e-6
    assert (received.double() - expected[1]).abs().max() <= 16 * digits * expected[1].abs().max().clamp(min=1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("engine", ["cpu", "formula"])
def test_weights_and_their_sums_are_those_of_the_definition(engine: str, dtype: str) -> None:
    for seed, mask in enumerate(MASKS):
        for nq, d in ((1, 64), (5, 32), (70, 40), (140, 64)):
            q, k, v = draw(nq=nq, nk=140, d=d, dv=24, seed=seed, dtype=dtype)
            output, *found = lowtri.attention(q, k, v, mask, engine=engine, **BOTH)
            check(found, exact(q, k, v, mask), dtype)
            assert torch.allclose(output, lowtri.attention(q, k, v, mask, engine=engine), atol=1e-2, rtol=0)
            (alone,) = lowtri.attention(q, k, v, mask, engine=engine, return_received=True)[1:]
            assert torch.equal(alone, found[1])
            (alone,) = lowtri.attention(q, k, v, mask, engine=engine, return_weights=True)[1:]
            assert torch.equal(alone, found[0])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_with_softcap_sinks_and_bias(dtype: str) -> None:
    generator = torch.Generator().manual_seed(2)
    for options in (
        {"softcap": 2.0},
        {"sinks": torch.linspace(-1, 4, 4)},
        {"bias": torch.randn(1, 4, 70, 140, generator=generator)},
        {"bias": lowtri.alibi(torch.tensor([0.5, 0.25, 0.1, 0.01]))},
        {"scale": -0.7},
        {"scale": 300.0},  # a log-sum-exp of hundreds
    ):
        q, k, v = draw(nq=70, nk=140, d=32, dv=24, dtype=dtype)
        found = lowtri.attention(q, k, v, "causal", engine="cpu", **BOTH, **options)[1:]
        if "scale" in options:  # scores are sums of numbers rounded once each
            assert (found[0].double() - exact(q, k, v, "causal", **options)[0]).abs().max() < 1e-3 + 8 * EPS[dtype]
        else:
            check(found, exact(q, k, v, "causal", **options), dtype)
        sums = found[0].double().sum(3)
        assert (sums <= 1 + 140 * EPS[dtype]).all()  # a sink has the rest


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_mask_and_any_positions(data: Any) -> None:
    n = data.draw(st.integers(1, 200))
    nq = data.draw(st.integers(1, n))
    size, other = data.draw(st.integers(1, 130)), data.draw(st.integers(1, 130))
    texts = [
        "causal & window({0})",
        "band({0}, {1})",
        "chunks({0})",
        "strided({0})",
        "causal & (window({0}) | first({1}))",
    ]
    mask = data.draw(st.sampled_from(texts)).format(size, other)
    q, k, v = draw(b=1, nq=nq, nk=n, d=16, dv=16, seed=n)
    options: dict[str, Any] = {}
    if data.draw(st.booleans()):
        order = np.random.default_rng(n).permutation(n)
        options["k_positions"] = np.where(np.arange(n) % 5 == 0, -1, order)
        options["q_positions"] = np.arange(n - nq, n)
    weights, received = lowtri.attention(q, k, v, mask, engine="cpu", **BOTH, **options)[1:]
    expected = exact(q, k, v, mask, **options)
    check((weights, received), expected, "float32")
    assert (weights[expected[0] == 0] == 0).all() and (received[expected[1] == 0] == 0).all()


def test_the_order_of_the_keys_padding_and_hidden_garbage() -> None:
    q, k, v = draw(nq=100, nk=100, d=32, dv=32)
    positions = torch.cat([torch.full((20,), -1), torch.arange(80)]).flip(0)
    given_positions = {"q_positions": positions, "k_positions": positions}
    received = lowtri.attention(q, k, v, "causal", return_received=True, **given_positions)[1]
    assert not received[..., 80:].any() and (received[..., :80] > 0).all()
    k[:, :, 80:], v[:, :, 80:] = torch.nan, torch.inf
    for engine in ENGINES:
        again = lowtri.attention(q, k, v, "causal", return_received=True, engine=engine, **given_positions)[1]
        assert torch.allclose(received, again, atol=1e-5), engine
    ordered = lowtri.attention(q[:, :, :80].flip(2), k[:, :, :80].flip(2), v[:, :, :80].flip(2), "causal", **BOTH)
    assert torch.allclose(received[..., :80], ordered[2].flip(2), atol=1e-5)


def test_queries_that_see_nothing_give_nothing() -> None:
    q, k, v = draw(nq=100, nk=100, d=32, dv=32)
    mask = lowtri.window(10) & lowtri.causal() & lowtri.keys(lengths=[100, 50])
    weights, received = lowtri.attention(q, k, v, mask, **BOTH)[1:]
    assert not weights[1, :, 60:].any() and weights.isfinite().all()
    assert torch.allclose(received.sum(2), (weights.sum(3) > 0).sum(2).float())
    bias = torch.zeros(100, 100).masked_fill(torch.arange(100)[:, None] % 3 == 0, -torch.inf)
    for engine in ENGINES:
        weights, received = lowtri.attention(q, k, v, "full", bias=bias, engine=engine, **BOTH)[1:]
        assert not weights[:, :, ::3].any() and torch.allclose(weights.sum(2).to(received), received, atol=1e-5)


def test_a_visible_nan_comes_out_and_a_hidden_one_does_not() -> None:
    q, k, v = draw(nq=100, nk=100, d=32, dv=32)
    k[0, 0, 70] = torch.nan
    for engine in ENGINES:
        weights, received = lowtri.attention(q, k, v, "causal", engine=engine, **BOTH)[1:]
        assert weights[0, 0, 70:].isnan().any(1).all() and weights[0, 0, :70].isfinite().all(), engine
        assert weights[0, 2:].isfinite().all() and weights[1].isfinite().all(), engine
        assert (weights[0, 0, 70:].triu(71) == 0).all(), engine
        assert received[0, 0, 70].isnan() and received[1].isfinite().all(), engine


def test_threads_change_no_bit() -> None:
    mask = "causal & window(700)"
    for heads in (1, 2, 8):
        q, k, v = draw(b=1, hq=heads, hkv=1, nq=500, nk=1100, d=32, dv=32)
        results = on_threads((1, 2, 3, 16), partial(lowtri.attention, q, k, v, mask, engine="cpu", **BOTH))
        for other in results[1:]:
            assert all(torch.equal(one, two) for one, two in zip(results[0][1:], other[1:], strict=True)), heads


def test_numpy_and_ranks() -> None:
    q, k, v = (x.numpy() for x in draw(nq=70, nk=70))
    for engine in ENGINES:
        output, weights, received, lse = lowtri.attention(
            q, k, v, "causal", engine=engine, return_lse=True, **BOTH
        )  # in this order
        assert (output.shape, weights.shape) == ((2, 4, 70, 5), (2, 4, 70, 70))
        assert (lse.shape, received.shape) == ((2, 4, 70), (2, 4, 70)) and received.dtype == np.float32
        assert np.allclose(weights.sum(2), received, atol=1e-5), engine
        assert np.allclose(weights.sum(3), 1, atol=1e-5)
    assert lowtri.attention(q[0], k[0], v[0], "causal", return_received=True)[1].shape == (4, 70)
    one = lowtri.attention(q[0, 0], k[0, 0], v[0, 0], "causal", return_received=True)[1]
    assert np.allclose(one, received[0, 0], atol=1e-5)
    five = lowtri.attention(*(x[:, None].repeat(2, 1) for x in (q, k, v)), "causal", return_received=True)[1]
    assert five.shape == (2, 2, 4, 70)


# Gradients.


@pytest.mark.parametrize("engine", ENGINES)
def test_gradients_beside_weights_and_through_them(engine: str) -> None:
    x = [t.requires_grad_() for t in draw(nq=70, nk=70, dtype="float64")]
    output, weights, received = lowtri.attention(*x, "causal", engine=engine, **BOTH)
    plain = torch.autograd.grad(lowtri.attention(*x, "causal", engine="reference").sum(), x)
    for one, two in zip(torch.autograd.grad(output.sum(), x, retain_graph=True), plain, strict=True):
        assert torch.allclose(one, two, atol=1e-10), engine
    factors = torch.linspace(0, 1, weights.numel(), dtype=weights.dtype).view_as(weights)
    through = torch.autograd.grad((weights * factors).sum() + output.sum(), x[:2])
    output, weights = lowtri.attention(*x, "causal", engine="formula", return_weights=True)
    expected = torch.autograd.grad((weights * factors).sum() + output.sum(), x[:2])
    assert all(torch.allclose(one, two, atol=1e-10) for one, two in zip(through, expected, strict=True)), engine
    assert received.shape == (2, 4, 70)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_gradient_of_received_weights_raises(engine: str) -> None:
    x = [t.requires_grad_() for t in draw(nq=70, nk=70)]
    received = lowtri.attention(*x, "causal", engine=engine, return_received=True)[1]
    words = r"return_received=True has no gradient.*\n.*Fix: \.detach\(\).*return_weights=True"
    with pytest.raises(CallError, match=words):
        received.sum().backward()
    with torch.no_grad():
        assert not lowtri.attention(*x, "causal", engine=engine, return_received=True)[1].requires_grad


# Which engine, and memory.


def test_the_kernels_return_weights() -> None:
    q, k, v = draw()
    for options in ({"return_weights": True}, {"return_received": True}, BOTH):
        choice = lowtri.which_engine(q, k, v, "causal", **options)
        assert choice.engine == "cpu" and choice.answers["sdpa"].startswith("no: it does not return w")
    assert "what keys received" in lowtri.which_engine(q, k, v, "causal", return_received=True).answers["sdpa"]
    with pytest.raises(CallError, match="return_received is 'yes'; expected True or False"):
        lowtri.attention(q, k, v, "causal", return_received="yes")


MEMORY = """
    import torch, lowtri
    from memory import peak_of_process
    torch.set_num_threads(1)
    x = torch.randn(3, 1, 1, 20_000, 16)
    lowtri.attention(*x[..., :200, :], "causal", return_received=True)
    before = peak_of_process()
    received = lowtri.attention(*x, "causal & window(512)", return_received=True)[1]
    assert abs(received.sum() - 20_000) < 1
    print(peak_of_process() - before)
"""


def test_received_weights_take_memory_for_the_keys_alone() -> None:
    """20,000 tokens, whose weights would take 1.6 GB."""
    assert int(printed("-c", MEMORY)) < 16 * 2**20


ON_ANOTHER = """
    import torch, lowtri
    from lowtri.kernels import target
    assert target.ISA.name == "baseline"
    both = {"return_weights": True, "return_received": True}
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        for nq in (1, 130):
            q, k, v = (torch.randn(1, 2, n, 40, dtype=torch.float64).to(dtype) for n in (nq, 130, 130))
            found = lowtri.attention(q, k, v, "causal & window(40)", engine="cpu", **both)
            exact = lowtri.attention(q, k, v, "causal & window(40)", engine="reference", **both)
            for one, two in zip(found, exact):
                assert (one - two).abs().max() < 16 * torch.finfo(dtype).eps * two.abs().max().clamp(min=1)
    print("the same")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="names an instruction set of x86-64")
def test_another_instruction_set_computes_the_same() -> None:
    assert printed("-c", ON_ANOTHER, LOWTRI_ISA="baseline") == "the same"

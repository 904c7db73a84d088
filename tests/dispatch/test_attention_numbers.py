"""Rounding, repetition and shapes: the precision rule, one answer over tiles and engines, bit-equal repeats, odd inputs."""

from __future__ import annotations

import itertools
from typing import Any

import double_double as two
import numpy as np
import pytest
import torch
from attention_cases import DTYPES, ENGINES, EPS, able, draw, near, pair_by_pair, wide, with_gradients

import lowtri
from lowtri import attention, causal, documents, first, full, heads, window
from lowtri.backends import formula as tiles
from lowtri.dispatch.prepared import PREPARED

SEEDS = (0, 1, 2)


# The precision rule. The plain formula is the engine of that name: for half types it rounds inputs, weights and output.


def errors(found: torch.Tensor, exact: torch.Tensor) -> tuple[float, float]:
    off = (found.double() - exact).abs()
    return float(off.max()), float(off.square().mean().sqrt())


def definition(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: lowtri.Mask, **options: Any) -> torch.Tensor:
    return attention(q.double(), k.double(), v.double(), mask, engine="reference", **options)


def extended(q: Any, k: Any, v: Any, mask: lowtri.Mask, **options: Any) -> torch.Tensor:
    """Plain attention in twice float64's precision: what float64 itself is measured against."""
    q, k, v = (x.numpy() for x in (q, k.repeat(1, 2, 1, 1), v.repeat(1, 2, 1, 1)))
    s = two.times(two.matmul(q, k.swapaxes(2, 3)), two.Two(options.get("scale", 0.125), 0.0))
    if "softcap" in options:  # c * tanh(s / c) = c * (1 - e) / (1 + e), e = exp(-2 s / c)
        e, one = two.exp(two.times(s, two.Two(-2 / options["softcap"], 0.0))), two.Two(1.0, 0.0)
        s = two.over(two.plus(one, two.Two(-e.high, -e.low)), two.plus(one, e))
        s = two.times(s, two.Two(options["softcap"], 0.0))
    s = two.plus(s, two.Two(options.get("bias", torch.zeros(1)).double().numpy(), 0.0))
    weights = two.exp(two.Two(np.where(mask.dense(140), s.high, -np.inf), s.low))
    sinks = options.get("sinks", torch.full((2,), -np.inf)).double().numpy()[None, :, None, None]
    total = two.plus(two.matmul(weights, np.ones((140, 1))), two.exp(two.Two(sinks, np.zeros_like(sinks))))
    return torch.from_numpy(two.over(two.matmul(weights, v), total).high)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", [{}, {"scale": 1.0}, {"softcap": 5.0}, {"sinks": True}, {"bias": True}], ids=str)
@pytest.mark.parametrize(
    "mask", [full(), causal(), causal() & window(40), causal() & documents(lengths=[50, 90])], ids=repr
)
def test_precision(mask, options, dtype):
    """Greatest error <= 2 x the plain formula's + 2 ulp x max abs v, root-mean-square <= 1.5 x, over 35,840 outputs."""
    options = dict(options)
    if "sinks" in options:
        options["sinks"] = torch.tensor([0.0, 3.0])
    if "bias" in options:
        options["bias"] = torch.linspace(-4, 0, 140)
    found: dict[str, list[tuple[float, float]]] = {}
    most_v = 0.0
    for seed in SEEDS:
        q, k, v = draw(b=1, hq=2, hkv=1, nq=140, nk=140, d=64, dv=64, seed=seed, dtype=dtype)
        exact = extended(q, k, v, mask, **options) if dtype == "float64" else definition(q, k, v, mask, **options)
        most_v = max(most_v, float(v.abs().max()))
        for engine in able(q, k, v, mask, **options):
            out = attention(q, k, v, mask, engine=engine, **options)
            found.setdefault(engine, []).append(errors(out, exact))
    greatest = {engine: max(most for most, _ in each) for engine, each in found.items()}
    square = {engine: np.sqrt(np.mean([mean**2 for _, mean in each])) for engine, each in found.items()}
    for engine in found:
        assert greatest[engine] <= 2 * greatest["formula"] + 2 * EPS[dtype] * most_v, (engine, greatest)
        if engine != "sdpa" or dtype != "float64":  # torch's own float64 is 1.7 x the formula's, and not ours to change
            assert square[engine] <= 1.5 * square["formula"], (engine, square)


@pytest.mark.parametrize("dtype", DTYPES)
def test_precision_of_one_new_token(dtype):
    q, k, v = draw(b=4, hq=8, hkv=2, nq=1, nk=300, d=64, dv=64, dtype=dtype)
    exact = attention(q.double(), k.double(), v.double(), "causal", engine="reference")
    most, mean = errors(attention(q, k, v, "causal", engine="formula"), exact)
    for engine in able(q, k, v, "causal"):
        at_most, at_mean = errors(attention(q, k, v, "causal", engine=engine), exact)
        assert at_most <= 2 * most + 2 * EPS[dtype] * float(v.abs().max()) and at_mean <= 1.5 * mean, engine


@pytest.mark.parametrize("dtype", DTYPES[:3])
def test_precision_of_gradients(dtype):
    """The same rule for what an input moves: no engine loses more than twice what the formula's gradient loses."""
    mask = causal() & window(40)
    for seed in SEEDS:
        inputs = draw(b=1, hq=2, hkv=1, nq=100, nk=100, d=32, dv=32, seed=seed, dtype=dtype)
        d_out = torch.randn(1, 2, 100, 32, generator=torch.Generator().manual_seed(seed + 10)).to(inputs[0].dtype)
        wider = tuple(x.double() for x in inputs)
        exact = with_gradients("reference", wider, mask, d_out)[1]
        plain = with_gradients("formula", inputs, mask, d_out)[1]
        leaves = [x.clone().requires_grad_() for x in inputs]
        for engine in able(*leaves, mask):
            for e, p, found in zip(exact, plain, with_gradients(engine, inputs, mask, d_out)[1], strict=True):
                (most, mean), (at_most, at_mean) = errors(p, e), errors(found, e)
                assert at_most <= 2 * most + 2 * EPS[dtype] * float(e.abs().max()), engine
                assert at_mean <= 1.5 * mean + EPS[dtype] * float(e.abs().mean()), engine


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1e4, -1e4])
def test_scores_of_ten_thousand(size, dtype):
    """Far beyond what exp can hold: weights, log-sum-exp and gradients stay finite and right."""
    q, k, v = draw(nq=20, nk=20, d=4, dtype=dtype)
    q, k = torch.full_like(q, 100.0), torch.full_like(k, size / 200)
    k[..., 0] += torch.linspace(-0.5, 0.5, 20).to(k.dtype)[:, None].T * 2  # keys differ by a few hundred in score
    assert 0.9e4 < float((q[0, 0, 0].double() @ k[0, 0, 0].double()).abs()) / 2 < 1.1e4
    exact = pair_by_pair(wide(q), wide(k), wide(v), "causal")
    for engine in able(q, k, v, "causal"):
        assert near(attention(q, k, v, "causal", engine=engine), exact[0], dtype, times=1e4), engine
    for engine in able(q, k, v, "causal", return_lse=True):
        lse = attention(q, k, v, "causal", engine=engine, return_lse=True)[1]
        # A score is a sum of four products, rounded and scaled; log(20) or less is added to it.
        assert np.allclose(wide(lse), exact[2], rtol=(4 + 3) * EPS["float32"]), engine
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    for engine in able(*leaves, "causal"):
        assert all(g.isfinite().all() for g in with_gradients(engine, (q, k, v), "causal")[1]), engine


# One answer.


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("at_once", [1, pytest.param(2**12, marks=pytest.mark.sweep), 2**14])
def test_tiles_of_the_formula_change_rounding_only(at_once, dtype, monkeypatch):
    """Tiles of 64 queries instead of all at once: the same output, extras and gradients, of every option."""
    masks = [causal(), causal() & (window(30) | first(3)), heads([causal(), window(5), full(), ~causal()])]
    options = {"softcap": 10.0, "sinks": torch.tensor([0.0, 1.0, 2.0, -30.0]), "bias": torch.linspace(-1, 1, 200)}
    inputs = draw(nq=150, nk=200, dtype=dtype)
    if dtype == "float64":
        options = {name: x.double() if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    for mask, chosen in itertools.product(masks, ({}, options)):
        whole = attention(*inputs, mask, engine="formula", return_weights=True, return_lse=True, **chosen)
        moved = with_gradients("formula", inputs, mask, **dict(chosen))[1]
        with monkeypatch.context() as patched:
            patched.setattr(tiles, "_SCORES_IN_TILE", at_once)
            PREPARED.clear()
            tiled = attention(*inputs, mask, engine="formula", return_weights=True, return_lse=True, **chosen)
            # Without weights each tile takes only the keys that it may see.
            out = attention(*inputs, mask, engine="formula", **chosen)
            moved_tiled = with_gradients("formula", inputs, mask, **dict(chosen))[1]
        for a, b in zip((*whole, whole[0], *moved), (*tiled, out, *moved_tiled), strict=True):
            assert near(b, a, dtype, times=32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_same_call_gives_the_same_bits(dtype):
    inputs = draw(nq=200, nk=200, d=32, dv=32, dtype=dtype)
    mask = causal() & window(70)
    leaves = [x.clone().requires_grad_() for x in inputs]
    for engine in able(*inputs, mask):
        assert torch.equal(*(attention(*inputs, mask, engine=engine) for _ in range(2))), engine
    for engine in able(*leaves, mask):
        one, two = (with_gradients(engine, inputs, mask)[1] for _ in range(2))
        assert all(map(torch.equal, one, two)), engine


def sweep_lengths(sizes: list[tuple[int, int]], dtype: str) -> int:
    count = 0
    for nq, nk in sizes:
        for d, dv, mask in ((4, 4, causal()), (3, 7, causal() & window(17)), (16, 1, full())):
            q, k, v = draw(b=1, hq=2, hkv=1, nq=nq, nk=nk, d=d, dv=dv, seed=nq, dtype=dtype)
            places = np.arange(nq) + max(nk - nq, 0)
            exact = attention(q, k, v, mask, q_positions=places, engine="reference")
            for engine in able(q, k, v, mask, q_positions=places):
                out = attention(q, k, v, mask, q_positions=places, engine=engine)
                assert near(out, exact, dtype), (engine, nq, nk, d, dv, mask)
                count += 1
    return count


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sample_of_lengths(dtype):
    edges = (1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 130)
    pairs = [pair for n in edges for pair in ((n, n), (1, n), (n, 130))] + [(130, 5), (64, 128), (65, 129)]
    assert sweep_lengths(pairs, dtype) >= 3 * 3 * len(pairs)


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_length(dtype):
    assert sweep_lengths([(n, n) for n in range(1, 131)] + [(1, n) for n in range(1, 131)], dtype) >= 3 * 3 * 260
    assert sweep_lengths([(nq, nk) for nq in range(1, 131, 7) for nk in range(1, 131, 5)], dtype) > 0


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_head_size(dtype):
    sizes = [(n, n) for n in range(1, 130)] + [(8, n) for n in range(1, 70)] + [(n, 8) for n in (160, 192, 256, 320)]
    for d, dv in sizes:
        q, k, v = draw(b=1, hq=1, hkv=1, nq=70, nk=70, d=d, dv=dv, seed=d, dtype=dtype)
        exact = attention(q, k, v, "causal", engine="reference")
        for engine in able(q, k, v, "causal"):
            assert near(attention(q, k, v, "causal", engine=engine), exact, dtype), (engine, d, dv)


# Inputs of every layout.


@pytest.mark.parametrize("dtype", DTYPES)
def test_strided_and_expanded_inputs(dtype):
    q, k, v = draw(nq=20, nk=20, d=8, dv=8, dtype=dtype)
    layouts = {
        "heads in the middle": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
        "last dimension strided": lambda x: x.repeat_interleave(2, dim=3)[..., ::2],
        "every second token": lambda x: x.repeat_interleave(2, dim=2)[:, :, 1::2],
        "columns": lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
        "one of three in one tensor": lambda x: torch.stack([x, x, x], dim=3)[:, :, :, 1],
        "one batch row for all": lambda x: x[:1].expand(2, -1, -1, -1),
        "one head for all": lambda x: x[:, :1].expand(-1, x.shape[1], -1, -1),
        "one token for all": lambda x: x[:, :, :1].expand(-1, -1, 20, -1),
        "one number for all": lambda x: x[..., :1].expand(-1, -1, -1, 8),
    }
    for name, lay in layouts.items():
        laid = tuple(lay(x) for x in (q, k, v))
        assert name == "one of three in one tensor" or not all(x.is_contiguous() for x in laid)
        leaves = [x.detach().requires_grad_() for x in laid]
        for engine in able(*laid, "causal"):
            straight = attention(*(x.contiguous() for x in laid), "causal", engine=engine)
            assert near(attention(*laid, "causal", engine=engine), straight, dtype), (engine, name)
        for engine in able(*leaves, "causal"):
            expected = with_gradients(engine, tuple(x.contiguous() for x in laid), "causal")[1]
            found = with_gradients(engine, laid, "causal")[1]
            assert all(near(f, e, dtype, times=32) for f, e in zip(found, expected, strict=True)), (engine, name)


def test_a_bias_that_is_expanded_or_strided():
    q, k, v = draw()
    base = torch.randn(9, 18, generator=torch.Generator().manual_seed(1))
    for bias in (base[:, ::2], base[:, :1].expand(9, 9), base[:, :9].T, base[:1, :9].expand(2, 4, 9, 9)):
        exact = pair_by_pair(wide(q), wide(k), wide(v), "causal", bias=bias.numpy())[0]
        for engine in able(q, k, v, "causal", bias=bias):
            assert near(attention(q, k, v, "causal", bias=bias, engine=engine), exact, "float32"), engine


def test_numpy_arrays_as_they_come():
    """Backwards, read-only, Fortran-ordered, misaligned in memory: a NumPy array is an array."""
    x = np.random.default_rng(0).normal(size=(2, 3, 12, 8)).astype(np.float32)
    frozen = x.copy()
    frozen.setflags(write=False)
    odd = np.frombuffer(b"\0" + x.tobytes(), np.uint8)[1:].view(np.float32).reshape(x.shape)
    exact = pair_by_pair(x, x, x, "causal")[0]
    for engine in able(x, x, x, "causal"):
        backwards = attention(x[:, :, ::-1], x, x, "causal", q_positions=np.arange(12)[::-1], engine=engine)
        assert near(backwards[:, :, ::-1], exact, "float32"), engine
        for form in (frozen, np.asfortranarray(x), odd, np.broadcast_to(x[:1], x.shape)):
            expected = exact if form.strides[0] else np.broadcast_to(exact[:1], exact.shape)
            assert near(attention(form, form, form, "causal", engine=engine), expected, "float32"), engine


def test_ranks():
    q, k, v = draw(b=6, hq=4, hkv=4, d=8, dv=3)
    bias = torch.randn(6, 4, 9, 9, generator=torch.Generator().manual_seed(1))
    five = [x.reshape(2, 3, *x.shape[1:]) for x in (q, k, v)]
    for engine in able(q, k, v, "causal", bias=bias):
        whole = attention(q, k, v, "causal", bias=bias, engine=engine)
        one = attention(q[0], k[0], v[0], "causal", bias=bias[0], engine=engine)
        flat = attention(q[0, 0], k[0, 0], v[0, 0], "causal", bias=bias[0, 0], engine=engine)
        deep = attention(*five, "causal", bias=bias.reshape(2, 3, 4, 9, 9), engine=engine)
        assert one.shape == (4, 9, 3) and flat.shape == (9, 3) and deep.shape == (2, 3, 4, 9, 3)
        assert near(one, whole[0], "float32") and near(flat, whole[0, 0], "float32"), engine
        assert near(deep.reshape(whole.shape), whole, "float32"), engine
        for shape in ((2, 1, 4, 9, 9), (1, 3, 1, 9, 9), (1, 1, 4, 1, 9), (2, 3, 1, 1, 1)):
            part = torch.randn(shape, generator=torch.Generator().manual_seed(2))
            spread = part.expand(2, 3, 4, 9, 9).reshape(6, 4, 9, 9)
            expected = attention(q, k, v, "causal", bias=spread, engine=engine)
            found = attention(*five, "causal", bias=part, engine=engine)
            assert near(found.reshape(whole.shape), expected, "float32"), engine
    for engine in able(*five, "causal", return_weights=True, return_lse=True):
        out, weights, lse = attention(*five, "causal", return_weights=True, return_lse=True, engine=engine)
        assert (out.shape, weights.shape, lse.shape) == ((2, 3, 4, 9, 3), (2, 3, 4, 9, 9), (2, 3, 4, 9))
    by_row = lowtri.keys(lengths=[1, 2, 3, 4, 5, 6])
    deep = attention(*five, by_row)
    assert near(deep.reshape(6, 4, 9, 3), attention(q, k, v, by_row), "float32")


@pytest.mark.parametrize("shape", [(0, 2, 5, 4), (2, 2, 0, 4), (2, 0, 4), (0, 4), (3, 0, 2, 5, 4), (0, 3, 2, 0, 4)])
def test_nothing_in_nothing_out(shape):
    for x in (np.zeros(shape, np.float32), torch.zeros(shape)):
        for engine in able(x, x, x, "causal", return_weights=True, return_lse=True):
            out, weights, lse = attention(x, x, x, "causal", return_weights=True, return_lse=True, engine=engine)
            assert tuple(out.shape) == shape and tuple(weights.shape) == (*shape[:-1], shape[-2])
            assert tuple(lse.shape) == shape[:-1]
    q, wide_v = np.ones((2, 3, 5, 4)), np.ones((2, 3, 5, 0))
    for engine in able(q, q, wide_v, "causal"):
        assert attention(q, q, wide_v, "causal", engine=engine).shape == (2, 3, 5, 0)


def test_every_engine_takes_part_in_the_precision_rule():
    ran = {name for dtype in DTYPES for name in able(*draw(dtype=dtype), causal())}
    assert ran == set(ENGINES)


@pytest.mark.parametrize("nq", [20, 3])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["float32", "float64"])
def test_the_greatest_softcaps_change_nothing(name: str, dtype: str, nq: int) -> None:
    """A cap near or beyond the end of the numbers' range, forward and backward; also with great gradients."""
    q, k, v = draw(nq=nq, nk=20, d=16, dv=16, dtype=dtype)
    d_out = torch.full((2, 4, nq, 16), 100.0)
    for cap in (torch.finfo(getattr(torch, name)).max, 2.0**95, 2.0**97):
        for engine in able(q, k, v, "causal", softcap=1.0):
            out, grads = with_gradients(engine, (q, k, v), "causal", d_out, softcap=cap)
            right, right_grads = with_gradients(engine, (q, k, v), "causal", d_out)

            assert near(out, right, dtype, times=16)
            for found, exact in zip(grads, right_grads, strict=True):
                assert (found - exact).abs().max() <= 64 * EPS[dtype] * exact.abs().max()


@pytest.mark.parametrize("cap", [5e-324, 1e-60, 1e-45, 1e-30])
def test_the_least_softcaps_make_all_weights_equal(cap: float) -> None:
    q, k, v = draw(nq=9, nk=9, d=16, dv=16)
    q[:, :, 3] = 0  # scores of 0
    for engine in able(q, k, v, "causal", softcap=1.0):
        out, grads = with_gradients(engine, (q, k, v), "causal", softcap=cap)
        right = v.repeat_interleave(2, 1).cumsum(2) / torch.arange(1, 10)[:, None]
        assert near(out, right, "float32", times=16), engine
        assert all(x.isfinite().all() for x in grads)

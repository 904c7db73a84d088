"""Attention inside a program: memory, threads, autocast, compiled models, no gradient, and what is loaded when."""

from __future__ import annotations

import tracemalloc

import pytest
import torch
from attention_cases import EPS, able, draw, near, with_gradients
from subprocesses import printed

import lowtri
from lowtri import attention, causal, keys, window
from lowtri.backends import BACKENDS
from lowtri.backends import formula as tiles

# What is loaded when.


def test_small_numpy_calls_load_neither_torch_nor_numba():
    program = """
import sys, numpy as np, lowtri
x = np.random.default_rng(0).normal(size=(2, 4, 32, 8))
out, weights, lse = lowtri.attention(x, x, x, "causal & window(8)", return_weights=True, return_lse=True, softcap=3.0)
lowtri.attention(x, x, x, "causal", bias=np.zeros(32), sinks=np.zeros(4))
lowtri.merge([out, out], [lse, lse])
lowtri.scaled_dot_product_attention(x, x, x, is_causal=True)
lowtri.scaled_dot_product_attention(x, x, x, attn_mask=np.ones((32, 32), bool))
try:
    lowtri.attention(x, x.tolist(), x, "causal")
except lowtri.CallError as error:
    assert "k is list" in str(error)
print(sorted({"torch", "numba"} & set(sys.modules)))
"""
    assert printed("-W", "error", "-c", program) == "[]"


@pytest.mark.sweep
def test_attention_runs_where_torch_comes_first_or_last():
    for order in ("import torch, lowtri", "import lowtri, torch"):
        program = f"{order}\nq = torch.ones(1, 1, 3, 2)\nprint(lowtri.attention(q, q, q, 'causal').sum().item())"
        assert printed("-W", "error", "-c", program) == "6.0"


# Memory.


@pytest.mark.sweep
def test_the_formula_takes_memory_by_the_tile():
    """4,096 queries and keys, 4 heads: one table of scores is 268 MB. Forward and backward together stay far below."""
    program = """
import resource, torch, lowtri
from lowtri.backends import formula as tiles
torch.set_num_threads(1)
tiles._SCORES_IN_TILE = 2**19
def peak(n):
    q, k, v = (torch.randn(1, 4, n, 16, requires_grad=True) for _ in range(3))
    lowtri.attention(q, k, v, "causal", engine="formula").sum().backward()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1024 if __import__("sys").platform == "linux" else 1024**2)
first = peak(1024)  # two tiles already, so that all is loaded
print(peak(4096) - first)
"""
    assert float(printed("-W", "error", "-c", program)) < 100  # MB


def test_the_formula_keeps_no_tables_for_its_gradient(monkeypatch):
    monkeypatch.setattr(tiles, "_SCORES_IN_TILE", 2**17)
    q, k, v = (x.requires_grad_() for x in draw(b=1, hq=1, hkv=1, nq=2048, nk=2048))
    saved: dict[int, int] = {}  # bytes of each storage, however many views of it are kept

    def count(x: torch.Tensor) -> torch.Tensor:
        saved[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    attention(q[:, :, :128], k, v, "causal", engine="formula")  # two tiles: what torch loads for them is loaded now
    tracemalloc.start()
    with torch.autograd.graph.saved_tensors_hooks(count, lambda x: x):
        out = attention(q, k, v, "causal", engine="formula")
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    table = 2048 * 2048  # bytes of one table of bools
    assert out.requires_grad and held < table / 4 and sum(saved.values()) < table / 4, (held, saved)


def test_a_long_window_is_read_tile_by_tile():
    """Each tile of queries takes only the keys that it may see: 16,384 tokens under a window cost what a window costs."""
    q, k, v = draw(b=1, hq=1, hkv=1, nq=16_384, nk=16_384, d=4, dv=4)
    assert lowtri.which_engine(q, k, v, "window(100)").engine != "sdpa"  # a table of all pairs would be 268 million
    out = attention(q, k, v, "window(100)", engine="formula")
    for start in (0, 5000, 16_384 - 200):
        part = slice(max(start - 99, 0), start + 200)
        exact = attention(q[:, :, start : start + 200], k[:, :, part], v[:, :, part], "window(100)", engine="reference")
        assert near(out[:, :, start : start + 200], exact, "float32")


# Autocast, no gradient, compiled models.


@pytest.mark.parametrize("kind", ["bfloat16", "float16"])
def test_autocast_casts_at_the_door_and_nowhere_else(kind):
    """As torch's own attention: float32 becomes half, what is inside stays float32, float64 is left alone."""
    half = getattr(torch, kind)
    inputs = draw(nq=70, nk=70, d=64)
    cast = tuple(x.to(half) for x in inputs)
    d_out = torch.randn(2, 4, 70, 5, generator=torch.Generator().manual_seed(1))
    bias = torch.linspace(-1000, 0, 70)
    for options in ({}, {"bias": bias}):
        for engine in able(*inputs, "causal", **options):
            outside = attention(*cast, "causal", engine=engine, **options)
            with torch.autocast("cpu", half):
                inside = attention(*inputs, "causal", engine=engine, **options)
                wide = attention(*(x.double() for x in inputs), "causal", engine="formula")
                already = attention(*cast, "causal", engine=engine, **options)
            assert inside.dtype == half and wide.dtype == torch.float64
            assert torch.equal(inside, outside) and torch.equal(already, outside), engine
    leaves = [x.clone().requires_grad_() for x in inputs]
    for engine in able(*leaves, "causal"):
        expected = with_gradients(engine, cast, "causal", d_out)[1]
        with torch.autocast("cpu", half):  # torch advises against backward in here; it must be right all the same
            _, found = with_gradients(engine, inputs, "causal", d_out)
        assert all(f.dtype == torch.float32 and near(f, e, kind) for e, f in zip(expected, found, strict=True)), engine
    with torch.autocast("cpu", half):
        lse = attention(*inputs, "causal", return_lse=True)[1]
        assert lse.dtype == torch.float32
        assert lowtri.which_engine(*inputs, "causal").answers.keys() == set(BACKENDS)
    with torch.autocast("cpu", enabled=False):
        assert attention(*inputs, "causal").dtype == torch.float32


def test_without_gradients():
    """no_grad and inference_mode: the same bits, and no graph."""
    q, k, v = (x.requires_grad_() for x in draw(nq=100, nk=100))
    for mask in (causal(), causal() & window(9), keys(lengths=[100, 5])):
        for engine in able(q, k, v, mask):
            out = attention(q, k, v, mask, engine=engine)
            for context in (torch.no_grad, torch.inference_mode):
                with context():
                    quiet = attention(q, k, v, mask, engine=engine)
                assert not quiet.requires_grad and near(quiet, out, "float32"), engine


@pytest.mark.parametrize("name", ["q", "k", "v", "bias", "sinks"])
@pytest.mark.parametrize("engine", ["auto", "cpu", "sdpa", "formula"])
def test_a_tensor_of_inference_mode_where_gradients_are_recorded(name, engine):
    """torch cannot save it for the backward; the same shapes ran before, so the prepared call is not taken either."""
    inputs = dict(zip("qkv", draw(nq=8, nk=8), strict=True), bias=torch.zeros(8, 8), sinks=torch.zeros(4))
    inputs = {x: inputs[x] for x in ("q", "k", "v", name)}
    engine = "auto" if name in ("bias", "sinks") else engine
    other = inputs["k" if name == "q" else "q"].requires_grad_()
    attention(**inputs, mask="causal", engine=engine).sum().backward()
    with torch.inference_mode():
        inputs[name] = inputs[name].clone()
    with pytest.raises(lowtri.CallError, match=rf"{name} was made under torch.inference_mode[\s\S]*{name}.clone"):
        attention(**inputs, mask="causal", engine=engine)
    with torch.no_grad():
        attention(**inputs, mask="causal", engine=engine)
    attention(**(inputs | {name: inputs[name].clone()}), mask="causal", engine=engine).sum().backward()
    assert other.grad is not None


def test_default_dtype_and_deterministic_mode_change_nothing():
    inputs = draw(nq=70, nk=70)
    mask = causal() & window(9)
    expected = {engine: attention(*inputs, mask, engine=engine) for engine in able(*inputs, mask)}
    torch.set_default_dtype(torch.float64)
    torch.use_deterministic_algorithms(True)
    try:
        for engine, out in expected.items():
            found = attention(*inputs, mask, engine=engine)
            assert found.dtype == torch.float32 and near(found, out, "float32", times=2), engine
            with_gradients("auto", inputs, mask)
    finally:
        torch.set_default_dtype(torch.float32)
        torch.use_deterministic_algorithms(False)
    assert EPS["float32"] == torch.finfo(torch.get_default_dtype()).eps

"""Biases over distances: the same numbers and gradients as a dense bias in every engine, without a table of all pairs."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
import pytest
import torch
from attention_cases import near
from torch import Tensor

import lowtri
from lowtri.dispatch.prepared import PREPARED, prepared_call
from lowtri.errors import CallError, EngineError
from lowtri.ops.call import CallOptions

MASKS = [
    "causal",
    "full",
    "causal & window(7)",
    "band(3, 5)",
    "causal & documents(lengths=[20, 9, 71], open_end=True)",
    "causal | first(4)",
]
ENGINES = ["reference", "formula", "cpu"]


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def dense(kind: str, values: Tensor, q: Any, k: Any) -> Tensor:
    """The bias of all pairs of positions, (B|1, H|1, Nq, Nk), by the definition."""
    distance = torch.as_tensor(q)[..., :, None] - torch.as_tensor(k)[..., None, :]
    distance = distance if distance.ndim == 3 else distance[None]
    rows = []
    for b in range(max(len(distance), len(values) if values.ndim > {"alibi": 1, "table": 2}[kind] else 1)):
        own = values[b] if values.ndim > {"alibi": 1, "table": 2}[kind] else values
        d = distance[b % len(distance)]
        if kind == "alibi":
            rows.append(-own[:, None, None] * d.abs())
        else:
            half = own.shape[-1] // 2
            rows.append((own if own.ndim == 2 else own[None])[:, (d + half).clamp(0, own.shape[-1] - 1)])
    return torch.stack(rows)


MAKE = {"alibi": lowtri.alibi, "table": lowtri.distance_bias}
VALUES = {"alibi": (4,), "alibi by row": (2, 4), "table": (4, 31), "table for all": (9,), "table by row": (2, 4, 8)}


CASES = [("cpu", mask, "table by row") for mask in MASKS] + [(e, "causal", name) for e in ENGINES for name in VALUES]


@pytest.mark.parametrize(("engine", "mask", "name"), CASES)
@pytest.mark.parametrize(("nq", "nk"), [(100, 100), (3, 100), (70, 90)])
def test_it_is_the_dense_bias_forward_and_backward(engine, mask, name, nq, nk):
    kind, dtype = name.split()[0], torch.float32
    exact = [draw(2, 4, nq, 32), draw(2, 2, nk, 32, seed=1), draw(2, 2, nk, 32, seed=2)]
    # Scores up to about 30, whose float32 is near the precision of the others.
    exact.append(0.1 * draw(*VALUES[name], seed=3))
    exact = [x.to(dtype).double().requires_grad_() for x in exact]
    found = [x.detach().to(dtype).requires_grad_() for x in exact]
    cotangent = draw(2, 4, nq, 32, seed=4)
    *qkv, values = exact
    bias = dense(kind, values, np.arange(nk - nq, nk), np.arange(nk))
    expected, expected_lse = lowtri.attention(*qkv, mask, bias=bias, softcap=3.0, return_lse=True, engine="reference")
    output, lse = lowtri.attention(
        *found[:3], mask, bias=MAKE[kind](found[3]), softcap=3.0, return_lse=True, engine=engine
    )
    expected.backward(cotangent)
    output.backward(cotangent.to(dtype))
    scale = 64 * torch.finfo(dtype).eps
    assert (output - expected).abs().max() <= scale * expected.abs().max()
    assert (lse - expected_lse).abs().max() <= scale * expected_lse.abs().max()
    for x, y in zip(found, exact, strict=True):
        # alibi's gradient sums distances times dS, which cancel: its rounding is that of the terms.
        size = y.grad.abs().max() if x is not found[3] or kind == "table" else y.grad.abs().max() + nk * nq
        assert (x.grad - y.grad).abs().max() <= scale * size
    with torch.no_grad():
        again = lowtri.attention(*found[:3], mask, bias=MAKE[kind](found[3]), softcap=3.0, engine=engine)
        assert (again - expected).abs().max() <= scale * expected.abs().max()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_every_dtype_in_the_kernel(dtype):
    q, k, v = (draw(1, 2, 60, 32, seed=s, dtype=dtype) for s in range(3))
    slopes = torch.tensor([0.5, 0.01], dtype=torch.promote_types(dtype, torch.float32))
    exact = (x.double() for x in (q, k, v))
    expected = lowtri.attention(*exact, "causal", bias=lowtri.alibi(slopes.double()), engine="reference")
    output = lowtri.attention(q, k, v, "causal", bias=lowtri.alibi(slopes), engine="cpu")
    assert output.dtype == dtype
    assert (output.double() - expected).abs().max() <= 4 * torch.finfo(dtype).eps * expected.abs().max()


@pytest.mark.parametrize("name", ["alibi", "table"])
def test_positions_in_any_order_and_padding(name):
    """As in a ring buffer and in a padded batch: the kernels decline, and auto gives the same numbers."""
    generator = np.random.default_rng(0)
    k_positions = np.stack([generator.permutation(20), np.concatenate([np.full(5, -1), np.arange(15)])])
    q_positions = np.array([[18, 19, 7], [-1, 13, 14]])
    q, values = draw(2, 4, 3, 8), draw(*VALUES[name], seed=3)
    k, v = (draw(2, 2, 20, 8, seed=seed) for seed in (1, 2))
    k[1, :, :5] = torch.nan  # padding leaves no trace
    at = {"q_positions": q_positions, "k_positions": k_positions}
    expected = lowtri.attention(q, k, v, "causal", bias=dense(name, values, q_positions, k_positions), **at)
    for engine in ("auto", "formula", "reference"):
        output = lowtri.attention(q, k, v, "causal", bias=MAKE[name](values), **at, engine=engine)
        assert torch.allclose(output, expected, rtol=1e-12, atol=1e-12)
        arrays = (x.numpy() for x in (q, k, v))
        found = lowtri.attention(*arrays, "causal", bias=MAKE[name](values.numpy()), **at, engine=engine)
        assert near(found, expected.numpy(), "float64", times=64)
    with pytest.raises(EngineError, match="consecutive positions only"):
        lowtri.attention(q, k, v, "causal", bias=MAKE[name](values), **at, engine="cpu")


def test_step_by_step_is_the_whole():
    q, k, v = (draw(2, 40, 16, seed=s, dtype=torch.float32) for s in range(3))
    bias = lowtri.alibi(torch.tensor([0.3, 0.7]))
    whole = lowtri.attention(q, k, v, "causal & window(9)", bias=bias)
    for t in range(40):
        step = lowtri.attention(q[:, t : t + 1], k[:, : t + 1], v[:, : t + 1], "causal & window(9)", bias=bias)
        assert torch.allclose(step, whole[:, t : t + 1], atol=1e-5)


def test_one_number_is_stored_for_each_distance_and_prepared_calls_take_new_values():
    q = k = v = torch.zeros(1, 1, 4096, 8)
    options = CallOptions(bias=lowtri.alibi(torch.ones(1)))
    PREPARED.clear()
    ready, inputs = prepared_call(q, k, v, "causal & window(64)", options)
    assert tuple(inputs.bias.shape) == (1, 1, 1, 2 * 4096 - 1)
    again, inputs = prepared_call(q, k, v, "causal & window(64)", CallOptions(bias=lowtri.alibi(torch.full((1,), 2.0))))
    assert again is ready
    assert inputs.bias[0, 0, 0, 0] == -2 * 4095
    other, _ = prepared_call(q, k, v, "causal & window(64)", CallOptions(bias=lowtri.distance_bias(torch.ones(1), 3)))
    third, _ = prepared_call(q, k, v, "causal & window(64)", CallOptions(bias=lowtri.distance_bias(torch.ones(1), 4)))
    assert len({id(x) for x in (ready, other, third)}) == 3


@pytest.mark.parametrize("engine", ["cpu", "formula"])
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("name", ["alibi", "table"])
def test_gradients_from_a_known_output(engine, wide, name):
    """And added up over two parts of the keys."""
    q, k, v, d_output = (draw(1, 4, 40, 32, seed=s, dtype=torch.float32) for s in range(4))
    values = draw(*VALUES[name], seed=4, dtype=torch.float32).requires_grad_()
    options: dict[str, Any] = {"bias": MAKE[name](values), "engine": engine}
    output, lse = lowtri.attention(q, k, v, "causal", return_lse=True, **options)
    expected = torch.autograd.grad(output, values, d_output)[0]
    known = (d_output, None, output.detach(), lse.detach(), q)
    whole = lowtri.attention_backward(*known, k, v, "causal", wide=wide, **options).bias
    positions = {"q_positions": range(40)}
    parts = [
        lowtri.attention_backward(
            *known, k[:, :, part], v[:, :, part], "causal", k_positions=range(40)[part], **positions, **options
        )
        for part in (slice(0, 25), slice(25, 40))
    ]
    for found in (whole, parts[0].bias + parts[1].bias):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)


def test_gradients_of_gradients():
    q, table = draw(1, 5, 4).requires_grad_(), draw(1, 5, seed=1).requires_grad_()

    def f(q: Tensor, table: Tensor) -> Tensor:
        return lowtri.attention(q, q, q, "causal", bias=lowtri.distance_bias(table))

    assert torch.autograd.gradcheck(f, (q, table))
    assert torch.autograd.gradgradcheck(f, (q, table))


Z = torch.zeros(1, 2, 3, 4)
FLOATS = r"Fix: a NumPy array or torch tensor of floats"
ERRORS = [
    (lambda: lowtri.alibi([1.0]), f"alibi: slopes: got list. {FLOATS}"),
    (lambda: lowtri.alibi(array("f", [1.0])), r"alibi: slopes: got array\.array\. Fix: a NumPy array"),
    (lambda: lowtri.distance_bias(torch.ones(2, 0)), r"distance_bias: table: got torch.float32 \(2, 0\)\. Fix:"),
    (lambda: lowtri.distance_bias(torch.ones(3), 1.9), "distance_bias: first is 1.9, but a"),
    (lambda: lowtri.distance_bias(torch.ones(3), "3"), "distance_bias: first is '3', but a"),
    (lambda: lowtri.distance_bias(torch.ones(3), float("nan")), "distance_bias: first is nan, but a"),
    (lambda: lowtri.attention(Z, Z, Z, "causal", bias=lowtri.alibi(torch.ones(3))), "bias is .* does not broadcast"),
    (lambda: lowtri.attention(Z, Z, Z, "causal", bias=lowtri.alibi(np.ones(2))), "Fix: pass all of one kind"),
    (
        lambda: lowtri.attention(Z, Z, Z, "full", bias=lowtri.alibi(torch.ones(2)), q_positions=[0, 1, 2**40]),
        r"bias has 1,099,511,627,779 distances.*\nFix: positions",
    ),
]


@pytest.mark.parametrize(("call", "words"), ERRORS, ids=[words[:40] for _, words in ERRORS])
def test_what_cannot_be(call, words):
    with pytest.raises(CallError, match=words):
        call()


def test_torch_declines():
    choice = lowtri.which_engine(Z, Z, Z, "causal", bias=lowtri.alibi(torch.ones(2)))
    assert "bias of all pairs" in choice.answers["sdpa"]

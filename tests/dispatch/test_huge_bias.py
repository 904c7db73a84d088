"""Weights and gradients where all that a query sees has a bias near the lowest or the greatest number.

There the kernels' log-sum-exp, which weights and gradients are computed from, has lost how many keys a query sees.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import lowtri
from lowtri import EngineError

N = 20  # keys
DTYPES = {torch.float32: 1e-4, torch.float64: 1e-10, torch.bfloat16: 0.1, torch.float16: 0.02}


def inputs(dtype: torch.dtype, nq: int, part: float) -> tuple[list[Tensor], Tensor]:
    """q, k, v and the gradient of the output; and a bias whose first row is ``part`` of the greatest number."""
    source = torch.Generator().manual_seed(0)
    arrays = [torch.randn(1, 2, n, 8, generator=source).to(dtype) for n in (nq, N, N, nq)]
    bias = torch.randn(nq, N, generator=source).to(dtype)
    bias[0] = part * torch.finfo(dtype).max
    return arrays, bias


def expected(arrays: list[Tensor], bias: Tensor) -> tuple[Tensor, list[Tensor]]:
    """The weights in float64, equal in the first row, where a score added to the bias is lost; and the gradients of q, k and v."""
    q, k, v, d_output = (x.double() for x in arrays)
    scores = q @ k.mT / 8**0.5 + bias.double()
    scores[:, :, 0] = 0
    weights = scores.softmax(-1)
    d_weights = d_output @ v.mT
    d_scores = weights * (d_weights - (d_weights * weights).sum(-1, keepdim=True)) / 8**0.5
    return weights, [d_scores @ k, d_scores.mT @ q, weights.mT @ d_output]


@pytest.mark.parametrize("part", [-1.0, -0.9, -0.7, -0.68, -0.5, 0.7, 1.0])
@pytest.mark.parametrize("nq", [1, 3, 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_weights_and_gradients_are_those_of_the_definition(dtype: torch.dtype, nq: int, part: float) -> None:
    arrays, bias = inputs(dtype, nq, part)
    weights, gradients = expected(arrays, bias)
    near = {"atol": 3 * DTYPES[dtype], "rtol": 3 * DTYPES[dtype]}
    _, found, received = lowtri.attention(*arrays[:3], "full", bias=bias, return_weights=True, return_received=True)
    torch.testing.assert_close(found.double(), weights, **near)
    torch.testing.assert_close(received.double(), weights.sum(2), **near)
    for engine in ("auto", "cpu"):
        leaves = [x.clone().requires_grad_() for x in arrays[:3]]
        output = lowtri.attention(*leaves, "full", bias=bias, engine=engine)
        for d, right in zip(torch.autograd.grad(output, leaves, arrays[3]), gradients, strict=True):
            torch.testing.assert_close(d.double(), right, **near)


@pytest.mark.parametrize("size", [1e29, 1e33, 3e100, 7e200, 1e300])
def test_large_numbers_of_float64(size: float) -> None:
    """In float64 the two factors log(2) and log2(e) do not always give the same number again."""
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 64, 8))
    bias = np.repeat(-size * rng.uniform(1, 9, (64, 1)), 64, 1)
    _, weights = lowtri.attention(q, k, v, "full", bias=bias, return_weights=True)
    np.testing.assert_allclose(weights, 1 / 64, rtol=1e-9)


def test_the_engine_by_name_refuses_weights() -> None:
    (q, k, v, _), bias = inputs(torch.float32, 20, -1.0)
    with pytest.raises(
        EngineError, match=r'engine "cpu" cannot return weights under this bias.*\nFix: drop engine="cpu"'
    ):
        lowtri.attention(q, k, v, "full", bias=bias, return_weights=True, engine="cpu")


def test_usual_numbers_that_hide_stay_with_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lowest number beside others, and -1e30 in whole rows of float32."""

    def refuse(*_: Any) -> None:
        raise AssertionError("by the formula")

    monkeypatch.setattr("lowtri.dispatch.autograd._by_formula", refuse)
    arrays, bias = inputs(torch.float32, 20, 0.0)
    bias[:, 5:9] = torch.finfo(torch.float32).min
    bias[3] = -1e30
    leaves = [x.requires_grad_() for x in arrays[:3]]
    output, weights = lowtri.attention(*leaves, "full", bias=bias, return_weights=True, engine="cpu")
    torch.testing.assert_close(weights.sum(-1), torch.ones(1, 2, 20))
    output.sum().backward()


def test_dropout_drops_the_same_weights_in_the_backward() -> None:
    (q, k, v, _), bias = inputs(torch.float64, 20, -1.0)
    value = v.clone().requires_grad_()
    output = lowtri.attention(q, k, value, "full", bias=bias, dropout=0.4)
    (d_value,) = torch.autograd.grad(output, value, torch.ones_like(output))
    torch.testing.assert_close((d_value * v).sum(), output.detach().sum())  # the output is linear in the values


@pytest.mark.parametrize("number", [-1e9, -1e30, torch.finfo(torch.float32).min])
@pytest.mark.parametrize("nq", [3, 20])
def test_gradients_of_a_program_and_of_known_results(nq: int, number: float) -> None:
    """Their log-sum-exp is one number for each query, in which -1e9 of float32 leaves no digit for how many keys it sees."""
    arrays, bias = inputs(torch.float32, nq, 0.0)
    bias[0] = number
    _, gradients = expected(arrays, bias)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return lowtri.attention(q, k, v, "full", bias=bias)

    leaves = [x.clone().requires_grad_() for x in arrays[:3]]
    output = torch.compile(call, backend="aot_eager", fullgraph=True)(*leaves)
    of_program = torch.autograd.grad(output, leaves, arrays[3])
    output, lse = lowtri.attention(*leaves, "full", bias=bias, return_lse=True)
    of_results = lowtri.attention_backward(
        arrays[3], None, output.detach(), lse.detach(), *arrays[:3], "full", bias=bias
    )
    for found in (of_program, of_results[:3]):
        for d, right in zip(found, gradients, strict=True):
            torch.testing.assert_close(d.double(), right, atol=1e-4, rtol=1e-4)

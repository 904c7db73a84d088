"""The backend ``formula``: it computes what is asked for, and numbers at the edges of their dtype are what they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attention_cases import near

import lowtri
from lowtri.backends import formula
from lowtri.backends.formula import VisibleScores, VisibleSum
from lowtri.ops.arguments import describe
from lowtri.ops.call import CallOptions


def draw(*shape: int, seed: int = 0) -> Any:
    return torch.randn(3, *shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("mask", ["full", "causal"])
def test_only_what_is_asked_for_is_computed(mask: str) -> None:
    q, k, v = draw(1, 2, 5, 4)
    for weights in (False, True):
        for lse in (False, True):
            options = CallOptions(return_weights=weights, return_lse=lse)
            call, inputs = describe(q, k, v, mask, options)
            result = formula.prepare(call).run(inputs)
            assert (result.weights is not None, result.lse is not None) == (weights, lse)


@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize("huge", [3e38, float("inf"), float("nan")])
def test_numbers_at_the_edge_of_their_dtype(mask: str, huge: float) -> None:
    """Finite numbers whose sum is not; and numbers that are not finite reach the queries that see them, and no other."""
    q, k, v = draw(1, 1, 6, 4)
    v[..., 4, :] = huge
    v[..., 5, 0] = huge
    found = lowtri.attention(q, k, v, mask, engine="formula")
    assert near(found, lowtri.attention(q, k, v, mask, engine="reference"), "float32")
    if mask == "causal":
        assert found[..., :4, :].isfinite().all() and found[..., :4, :].abs().max() < 10


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own, at the first forward mode
@pytest.mark.parametrize("function", [VisibleScores, VisibleSum])
def test_the_products_without_a_table_are_those_with_one(function: Any) -> None:
    """None stands for a table of all pairs: products, gradients to second order, forward mode and vmap."""
    q, k, w = (x.double() for x in draw(2, 3, 4, 5))
    a, b = (q if function is VisibleScores else w[..., :4]).clone().requires_grad_(), k.requires_grad_()
    table = torch.ones(2, 3, 4, 4, dtype=torch.bool)

    def product(a: Any, b: Any) -> Any:
        return function.apply(a, b, None)

    torch.testing.assert_close(product(a, b), function.apply(a, b, table))
    assert torch.autograd.gradcheck(product, (a, b), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(product, (a, b))
    mapped = torch.vmap(lambda a, b: product(a[None], b[None]))(a, b)
    torch.testing.assert_close(mapped[:, 0], product(a, b))

"""The gradients of the kernels against the formula in float64, on head sizes that bf16 multiplies in pairs.

The bound is the plain formula's own error in the same dtype: twice that, and a few units of rounding.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gradient_cases import compare, results

import lowtri
from lowtri.kernels import target

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
NAN, INF = float("nan"), float("inf")

MASKS = {
    "causal": "causal",
    "window": "causal & window(17)",
    "sinks and window": "causal & (window(9) | first(3))",
    "documents": lowtri.causal() & lowtri.documents(lengths=[40, 1, 99, 60]),
    "rows that see nothing": lowtri.causal() & lowtri.keys(lengths=[0]) | lowtri.window(3) & lowtri.chunks(50),
    "by head": lowtri.heads([lowtri.causal(), lowtri.full(), lowtri.window(5), lowtri.mask("~causal")]),
    "full": "full",
}


def drawn(**shapes: tuple[int, ...]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(9)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


OPTIONS = {
    "plain": {},
    "softcap": {"softcap": 3.0},
    "scale below 0": {"scale": -0.2},
    "bias": drawn(bias=(1, 1, 200, 200)),
    "bias of heads, softcap, sinks": {"softcap": 5.0, **drawn(bias=(1, 4, 200, 200), sinks=(4,))},
}


def inputs(n: int, d: int, dv: int, seed: int = 0, rows: int = 1) -> list[torch.Tensor]:
    """q (B, 4, N, D), k and v (B, 2, N, D), and the gradient of the output, in bf16's numbers, so that no cast rounds."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((4, d), (2, d), (2, dv), (4, dv))
    return [torch.randn(rows, heads, n, size, generator=generator).bfloat16() for heads, size in shapes]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("mask", MASKS)
def test_gradients_of_every_mask_with_every_option(mask, options, dtype) -> None:
    compare(inputs(200, 32, 48), MASKS[mask], DTYPES[dtype], **OPTIONS[options])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [(32, 32), (64, 64), (80, 32), (96, 112), (128, 128), (192, 16), (100, 36), (1, 5)])
def test_gradients_of_every_head_size(sizes, dtype) -> None:
    compare(inputs(131, *sizes), "causal & window(90)", DTYPES[dtype])


def three_gradients(tensors: list[torch.Tensor], mask: str) -> list[list[torch.Tensor]]:
    """Of the formula in float64, of the formula and of the kernels in float32."""
    ways = (("formula", torch.float64), ("formula", torch.float32), ("cpu", torch.float32))
    return [results(tensors, mask, *way)[1:] for way in ways]


@pytest.mark.parametrize("sharpness", [1, 6, 40])
@pytest.mark.parametrize(
    ("nq", "nk", "mask"), [(339, 1, "full"), (339, 2, "full"), (339, 339, "window(1)"), (200, 200, "causal")]
)
def test_gradients_where_few_keys_have_the_weight(nq, nk, mask, sharpness) -> None:
    """In float32: twice the plain formula's error, and as a floor four roundings of the terms that dP and delta are sums of.

    The plain formula's dP - delta is exactly 0 where one key has all the weight; the kernel's is what two sums round to.
    """
    generator = torch.Generator().manual_seed(0)
    q, k, v, d_out = (torch.randn(1, 4, n, 64, generator=generator) for n in (nq, nk, nk, nq))
    q = q * sharpness

    exact, plain, ours = three_gradients([q, k, v, d_out], mask)
    weights = lowtri.attention(*(x.double() for x in (q, k, v)), mask, return_weights=True)[1]
    # A score's own rounding moves its weight by that much of itself, so it is in the terms, too.
    scores = q.double().abs() @ k.double().abs().transpose(2, 3) / 8
    terms = weights * (d_out.double().abs() @ v.double().abs().transpose(2, 3)) * (1 + scores * (1 - weights))
    floors = [terms @ k.double().abs() / 8, terms.transpose(2, 3) @ q.double().abs() / 8]
    floors.append((weights * (1 + scores)).transpose(2, 3) @ d_out.double().abs())
    for expected, usual, actual, floor in zip(exact, plain, ours, floors, strict=True):
        allowed = 2 * (usual - expected).abs().amax() + 4 * torch.finfo(torch.float32).eps * floor
        assert ((actual - expected).abs() <= allowed).all()


@pytest.mark.parametrize("sharpness", [1, 40, 100])
@pytest.mark.parametrize("mask", ["causal", "causal & window(60)"])
def test_gradients_at_scores_of_some_hundreds_err_as_the_plain_formula(mask: str, sharpness: int) -> None:
    """A float32 log-sum-exp of 500 is known to 3e-5 only; all weights of a query would be off by that much of themselves."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, d_out = (torch.randn(1, 4, 200, 64, generator=generator) for _ in range(4))
    q = q * sharpness

    exact, plain, ours = three_gradients([q, k, v, d_out], mask)
    repeated = results([q, k, v, d_out], mask, "cpu", torch.float32)[1:]
    assert all(torch.equal(one, two) for one, two in zip(ours, repeated, strict=True))
    for expected, usual, actual in zip(exact, plain, ours, strict=True):
        error, allowed = ((x - expected).pow(2).mean().sqrt() for x in (actual, usual))
        assert error <= 2 * allowed


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mask", ["causal", "causal & window(7)", "full"])
def test_gradients_of_every_length(mask, dtype) -> None:
    for n in range(1, 131):
        compare(inputs(n, 32, 32, seed=n), mask, DTYPES[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("where", ["k", "v", "q", "d_output"])
def test_what_is_hidden_leaves_no_trace_in_gradients(where, value, dtype) -> None:
    """Two documents; one number of the second is broken: the first document's gradients are bit for bit those without it."""
    mask = lowtri.causal() & lowtri.documents(lengths=[70, 60])
    good = inputs(130, 32, 32)
    bad = [x.clone() for x in good]
    bad["qkv".find(where) if where != "d_output" else 3][0, 0, 100, 5] = value
    before, after = (results(x, mask, "cpu", DTYPES[dtype]) for x in (good, bad))
    for expected, actual in zip(before, after, strict=True):
        assert torch.equal(expected[:, :, :70], actual[:, :, :70])
        others = slice(2 if expected.shape[1] == 4 else 1, None)  # heads that do not read the broken one
        assert torch.equal(expected[:, others], actual[:, others])
    assert not all(torch.isfinite(x).all() for x in after), "what is visible must come out"


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_query_that_sees_nothing_takes_no_part_even_when_it_is_broken(dtype) -> None:
    mask = lowtri.causal() & lowtri.keys(np.arange(130) >= 66)
    good = inputs(130, 32, 32)
    bad = [x.clone() for x in good]
    bad[0][:, :, 3], bad[3][:, :, 64] = NAN, INF
    before, after = (results(x, mask, "cpu", DTYPES[dtype]) for x in (good, bad))
    assert all(torch.equal(expected, actual) for expected, actual in zip(before, after, strict=True))


@pytest.mark.parametrize("n", [1, 15, 16, 17, 33, 48, 49, 63, 65])
@pytest.mark.parametrize("mask", ["causal", "full"])
def test_gradients_of_tiles_that_are_not_full_of_queries(mask: str, n: int) -> None:
    """Only the groups of 16 queries that a tile has are computed, and what lies in memory behind them takes no part."""
    compare(inputs(n, 32, 48, seed=n), mask, torch.float32)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_outputs_and_gradients_lie_in_memory_as_their_inputs(dtype: str) -> None:
    for by_token in (False, True):
        tensors = [x.to(DTYPES[dtype]) for x in inputs(33, 32, 32, rows=2)]
        if by_token:
            tensors = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors]
        *leaves, d_output = (x.requires_grad_() for x in tensors)
        output = lowtri.attention(*leaves, "causal", engine="cpu")
        grads = torch.autograd.grad(output, leaves, d_output.detach())
        # Products on tile registers write the gradients of keys and values as packed rows.
        packed = dtype == "bfloat16" and target.ISA.has_amx
        pairs = list(zip((output, *grads), (leaves[0], *leaves), strict=True))[: 2 if packed else 4]
        assert [x.stride() for x, _ in pairs] == [like.stride() for _, like in pairs]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_query_whose_scores_are_all_minus_infinity_has_no_gradients(dtype: str) -> None:
    """By its bias: it counts as one that sees nothing, whatever the gradient of its output is."""
    source = torch.Generator().manual_seed(0)
    q, k, v, d_output = (torch.randn(1, 2, 70, 64, generator=source).to(DTYPES[dtype]) for _ in range(4))
    bias = torch.zeros(1, 2, 70, 70, dtype=torch.promote_types(DTYPES[dtype], torch.float32))
    bias[:, :, 5], q[:, :, 5, 2] = -INF, 1.0
    gradients = []
    for value in (0.0, NAN, INF):
        d_output[:, :, 5, 3] = value
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        output = lowtri.attention(*leaves, "causal", bias=bias, engine="cpu")
        gradients.append(torch.autograd.grad(output, leaves, d_output))
    assert (gradients[0][0][:, :, 5] == 0).all()
    for others in gradients[1:]:
        assert all(torch.equal(one, two) for one, two in zip(gradients[0], others, strict=True))

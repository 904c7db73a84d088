"""The edges of windows and documents: a few queries with keys of their own, whatever their number, the head size and the strides."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from attention_cases import draw, with_gradients
from contract_cases import attention, check

import lowtri
from lowtri.backends.cpu import launch

# Vectors of 16 numbers in a row: 4; 4 and 1; 2 and 1; 1; and rows that are padded.
HEAD_SIZES = [(64, 64), (32, 80), (80, 48), (64, 16), (20, 35)]


def edge(residue: int) -> tuple[int, Any]:
    """How many tokens, and a mask, of a residue mod 16: windows and documents begin and end at any key."""
    n = 112 + residue
    if residue % 2:
        return n, lowtri.causal() & lowtri.window(17 + 3 * residue)
    return n, lowtri.causal() & lowtri.documents(lengths=[30 + residue, n - 49 - residue, 19])


def residues(*few: int) -> list[Any]:
    return [n if n in few else pytest.param(n, marks=pytest.mark.sweep) for n in range(16)]


@pytest.mark.parametrize("residue", range(16))
def test_outputs_of_any_length(residue: int) -> None:
    n, mask = edge(residue)
    d, dv = HEAD_SIZES[residue % len(HEAD_SIZES)]
    for dtype in ("float32", "bfloat16"):
        q, k, v = draw(b=1, hq=2, hkv=1, nq=n, nk=n, d=d, dv=dv, seed=residue, dtype=dtype)
        exact = lowtri.attention(q.double(), k.double(), v.double(), mask, engine="reference")
        plain = lowtri.attention(q, k, v, mask, engine="formula")
        check(attention(q, k, v, mask), plain, exact, dtype, float(v.abs().max()))


@pytest.mark.parametrize("residue", residues(1, 4, 8))
def test_gradients_of_any_length(residue: int) -> None:
    n, mask = edge(residue)
    d, dv = HEAD_SIZES[residue % len(HEAD_SIZES)]
    inputs = draw(b=1, hq=2, hkv=1, nq=n, nk=n, d=d, dv=dv, seed=residue)
    d_output = torch.randn(1, 2, n, dv, generator=torch.Generator().manual_seed(residue))
    # The backward subtracts two numbers of this size that are rounded separately, see lowtri.kernels.backward.
    terms = float(d_output.norm(dim=-1).max() * inputs[2].norm(dim=-1).max())
    exact = with_gradients("reference", tuple(x.double() for x in inputs), mask, d_output.double())[1]
    plain, actual = (with_gradients(engine, inputs, mask, d_output)[1] for engine in ("formula", "cpu"))
    for one, two, three in zip(actual, plain, exact, strict=True):
        check(one, two, three, "float32", float(three.abs().max()) + terms)


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
@pytest.mark.parametrize(("d", "dv"), [(64, 64), (20, 35)])
def test_strides_change_no_bit(dtype: str, d: int, dv: int) -> None:
    """Values whose numbers are not neighbours are copied; keys too, for dQ."""
    n, mask = edge(5)
    packed = draw(b=1, hq=2, hkv=1, nq=n, nk=n, d=d, dv=dv, dtype=dtype)
    turned = tuple(x.transpose(2, 3).contiguous().transpose(2, 3) for x in packed)
    apart = tuple(torch.cat([x, x.new_full(x.shape, torch.nan)], -1)[..., : x.shape[-1]] for x in packed)
    output, gradients = with_gradients("cpu", packed, mask)
    for other in (turned, apart):
        assert [x.stride() for x in other] != [x.stride() for x in packed]
        same_output, same_gradients = with_gradients("cpu", other, mask)
        assert torch.equal(same_output, output)
        assert all(torch.equal(one, two) for one, two in zip(same_gradients, gradients, strict=True))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize(("d", "dv"), [(64, 64), (20, 35)])
def test_a_key_that_is_not_finite_changes_those_that_see_it(d: int, dv: int, value: float) -> None:
    n, mask, bad = 120, lowtri.causal() & lowtri.window(21), 61
    clean = draw(b=1, hq=2, hkv=1, nq=n, nk=n, d=d, dv=dv)
    expected = attention(*clean, mask)
    sees = torch.from_numpy(mask.dense(n).copy())[:, bad]
    for place in (1, 2) if value != value else (2,):  # an infinite key may give a weight of 0
        broken = [x.clone() for x in clean]
        broken[place][0, 0, bad, -1] = value
        output = attention(*broken, mask)
        assert torch.equal(output[:, :, ~sees], expected[:, :, ~sees])
        assert not output[:, :, sees].isfinite().all(-1).any()


@pytest.mark.parametrize("fill", [0xFF, 0x3F])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_scratch_memory_is_written_before_it_is_read(dtype: str, fill: int) -> None:
    """Its bytes, those of a NaN or of a number, change no bit: scores that no product set are not read."""
    for residue in (3, 6):
        n, mask = edge(residue)
        x = draw(b=1, hq=2, hkv=1, nq=n, nk=n, d=64, dv=80, dtype=dtype)
        output, gradients = with_gradients("cpu", x, mask)
        for memory in launch._pool:
            np.asarray(memory.bytes)[:] = fill
        same_output, same_gradients = with_gradients("cpu", x, mask)
        assert torch.equal(same_output, output)
        assert all(torch.equal(one, two) for one, two in zip(same_gradients, gradients, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("nq", "nk"), [(70, 201), (64, 96), (130, 17), (16, 15)])
def test_a_bias_in_blocks_has_the_bits_of_one_read_pair_by_pair(nq: int, nk: int, dtype: torch.dtype) -> None:
    """Blocks of keys that are neighbours in memory are read in whole vectors, others one by one; so are their gradients."""
    source = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 2, n, 32, generator=source).to(dtype) for n in (nq, nk, nk))
    bias = torch.randn(2, 2, nq, nk, generator=source, dtype=torch.promote_types(dtype, torch.float32))
    bias[torch.rand(bias.shape, generator=source) < 0.1] = -torch.inf
    bias[torch.rand(bias.shape, generator=source) < 0.1] = torch.finfo(bias.dtype).min
    apart = bias.transpose(2, 3).contiguous().transpose(2, 3)
    outputs = [lowtri.attention(q, k, v, "full", bias=x, engine="cpu") for x in (bias, apart)]
    assert torch.equal(*outputs) and outputs[0].isfinite().all()
    leaf = bias.clamp(min=-9).requires_grad_()
    inputs = [x.double() for x in (q, k, v)]
    (gradient,) = torch.autograd.grad(lowtri.attention(q, k, v, "full", bias=leaf, engine="cpu").sum(), leaf)
    exact = torch.softmax(inputs[0] @ inputs[1].mT / 32**0.5 + leaf.detach().double(), -1)
    at_output = inputs[2].sum(-1)[:, :, None]
    expected = exact * (at_output - (exact * at_output).sum(-1, keepdim=True))
    tolerance = 0.05 if dtype == torch.bfloat16 else 1e-4
    torch.testing.assert_close(gradient.double(), expected, atol=tolerance, rtol=tolerance)

"""Gradients of calls with one result have the bits of those with more; and hooks of saved tensors are checked."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import lowtri
from lowtri.errors import CallError

D_OUTPUTS = {
    "as the output": lambda x: torch.linspace(-1, 1, x.numel()).reshape(x.shape).to(x.dtype),
    "of one number": lambda x: torch.ones((), dtype=x.dtype).expand(x.shape),
    "tokens before heads": lambda x: torch.ones_like(x).transpose(1, 2).contiguous().transpose(1, 2),
    "numbers apart": lambda x: torch.ones(*x.shape, 2, dtype=x.dtype)[..., 0],
}


def leaves(dtype: torch.dtype, sizes: tuple[int, int], nk: int = 40) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = (1, 4, 24, sizes[0]), (1, 2, nk, sizes[0]), (1, 2, nk, sizes[1])
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def gradients(inputs: list[Tensor], d_output: Any, **options: Any) -> tuple[Tensor, ...]:
    found = lowtri.attention(*inputs, "causal & window(9)", engine="cpu", **options)
    output = found[0] if options else found
    return output, *torch.autograd.grad(output, inputs, d_output(output))


@pytest.mark.parametrize("d_output", D_OUTPUTS)
@pytest.mark.parametrize("sizes", [(32, 32), (24, 40), (33, 7)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_calls_with_one_result_and_with_more_give_the_same_bits(
    dtype: torch.dtype, sizes: tuple[int, int], d_output: str
) -> None:
    inputs = leaves(dtype, sizes)
    short = gradients(inputs, D_OUTPUTS[d_output])
    general = gradients(inputs, D_OUTPUTS[d_output], return_lse=True)
    for one, other in zip(short, general, strict=True):
        assert one.dtype is other.dtype and one.shape == other.shape
        assert torch.equal(one, other)


@pytest.mark.parametrize("nq", [1, 24])
@pytest.mark.parametrize("rank", [2, 3, 4])
@pytest.mark.parametrize("kind", ["contiguous", "tokens before heads"])
def test_calls_of_fewer_dimensions_have_the_bits_and_the_layout_of_four(rank: int, nq: int, kind: str) -> None:
    """With other keys each time, as in decoding, and with a gradient, which takes a longer way."""
    first = (0, 0)
    for nk in (40, 40, 41):
        arrays = [x.detach()[:, :2] for x in leaves(torch.float32, (32, 16), nk)]
        if kind != "contiguous":
            arrays = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in arrays]
        arrays[0] = arrays[0][:, :, -nq:]
        whole = lowtri.attention(*arrays, "causal & window(9)", engine="cpu")[first[: 4 - rank]]
        given = [x[first[: 4 - rank]] for x in arrays]
        expected = whole if rank > 2 else lowtri.attention(*[x[:, :1] for x in arrays], "causal & window(9)")[0, 0]
        for recorded in (False, False, True):
            found = lowtri.attention(*(x.requires_grad_(recorded) for x in given), "causal & window(9)", engine="cpu")
            assert found.requires_grad is recorded and found.shape == expected.shape
            torch.testing.assert_close(found.detach(), expected, rtol=0, atol=0 if nq > 1 else 1e-6)
            assert rank < 3 or recorded or found.stride() == expected.stride()


def test_a_graph_of_the_gradients_is_recorded() -> None:
    inputs = leaves(torch.float64, (4, 4))
    output = lowtri.attention(*inputs, "causal & window(9)", engine="cpu")
    assert output.grad_fn is not None and "Differentiable" in output.grad_fn.name()
    (d_q,) = torch.autograd.grad(output.square().sum(), inputs[:1], create_graph=True)
    (second,) = torch.autograd.grad(d_q.square().sum(), inputs[2:])
    formula = lowtri.attention(*inputs, "causal & window(9)", engine="formula")
    (d_q,) = torch.autograd.grad(formula.square().sum(), inputs[:1], create_graph=True)
    (expected,) = torch.autograd.grad(d_q.square().sum(), inputs[2:])
    torch.testing.assert_close(second, expected)


UNPACKED = {
    "another dtype": (lambda x: x.half(), r"unpacked torch\.float16 \(1, 4, 24, 32\) where torch\.float32"),
    "another shape": (lambda x: x[..., :3], r"unpacked torch\.float32 \(1, 4, 24, 3\) where"),
    "no memory": (lambda x: x.to("meta"), "unpacked a tensor on meta whose data does not lie"),
    "a negated view": (torch._neg_view, "unpacked a tensor on cpu whose data does not lie"),
}


@pytest.mark.parametrize("options", [{}, {"return_lse": True}], ids=str)
@pytest.mark.parametrize("hook", UNPACKED)
def test_a_hook_that_unpacks_other_tensors_raises(hook: str, options: dict[str, bool]) -> None:
    """Kernels would read memory that is not there."""
    unpack, words = UNPACKED[hook]
    inputs = leaves(torch.float32, (32, 32))
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, unpack):
        found = lowtri.attention(*inputs, "causal & window(9)", engine="cpu", **options)
    with pytest.raises(CallError, match=words):
        (found[0] if options else found).sum().backward()

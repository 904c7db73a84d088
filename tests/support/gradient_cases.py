"""Inputs and comparisons of the tests of gradients in bf16 and other dtypes."""

from __future__ import annotations

from typing import Any

import torch

import lowtri


def bf16(shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def inputs(shape: tuple[int, int, int, int], seed: int = 0) -> list[torch.Tensor]:
    """q (2, 4, Nq, D), k and v (2, 2, Nk, D and Dv), and the gradient of the output."""
    nq, nk = shape[:2]
    d, dv = shape[2:]
    shapes = ((2, 4, nq, d), (2, 2, nk, d), (2, 2, nk, dv), (2, 4, nq, dv))
    return [bf16(x, seed + i) for i, x in enumerate(shapes)]


def results(
    tensors: list[torch.Tensor], mask: Any, engine: str, dtype: Any = torch.bfloat16, **options: Any
) -> list[torch.Tensor]:
    """The output and the gradients of all tensors, in float64. Bias and sinks are at least float32."""
    *leaves, d_output = (x.detach().to(dtype) for x in tensors)
    leaves = [x.requires_grad_() for x in leaves]
    wide = torch.promote_types(dtype, torch.float32)
    given = {name: x.to(wide).requires_grad_() for name, x in options.items() if isinstance(x, torch.Tensor)}
    output = lowtri.attention(*leaves, mask, engine=engine, **{**options, **given})
    return [x.detach().double() for x in (output, *torch.autograd.grad(output, [*leaves, *given.values()], d_output))]


def compare(tensors: list[torch.Tensor], mask: Any, dtype: torch.dtype = torch.bfloat16, **options: Any) -> None:
    """Twice the plain formula's error in this dtype, and a few units of rounding."""
    exact = results(tensors, mask, "formula", torch.float64, **options)
    plain, actual = (results(tensors, mask, engine, dtype, **options) for engine in ("formula", "cpu"))
    unit = 2.0**-48 if dtype == torch.float64 else torch.finfo(dtype).eps  # a reference of float64 is itself rounded
    for number, (expected, usual, ours) in enumerate(zip(exact, plain, actual, strict=True)):
        allowed = 2 * (usual - expected).abs().max() + 4 * unit * max(1.0, float(expected.abs().max()))
        assert (ours - expected).abs().max() <= allowed, number

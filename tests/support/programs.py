"""Programs of torch.compile beside the functions that they are made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from attention_cases import draw

import lowtri

__all__ = ["Attend", "compiled", "leaves", "outcome", "same", "same_to_rounding"]


class Attend(torch.nn.Module):
    """A module that calls attention with this mask and these options."""

    def __init__(self, mask: Any, **options: Any) -> None:
        super().__init__()
        self.mask = mask
        self.options = options

    def forward(self, q: Any, k: Any, v: Any) -> Any:
        return lowtri.attention(q, k, v, self.mask, **self.options)


def leaves(nq: int = 20, nk: int = 20, seed: int = 0, dtype: str = "float32") -> list[torch.Tensor]:
    """q (2, 4, Nq, 16), k and v (2, 2, Nk, 16), which have gradients."""
    return [x.requires_grad_() for x in draw(nq=nq, nk=nk, d=16, dv=16, seed=seed, dtype=dtype)]


def compiled(fn: Callable[..., Any], backend: Any = "aot_eager") -> Any:
    """A program without a graph break, compiled anew."""
    torch._dynamo.reset()
    return torch.compile(fn, backend=backend, fullgraph=True)


Outcome = tuple[list[torch.Tensor], tuple[torch.Tensor, ...]]


def outcome(fn: Callable[..., Any], inputs: Sequence[Any], seed: int = 3, but: int | None = None) -> Outcome:
    """All results, and the gradients of the leaves among the inputs, of what may be differentiated: all but one result."""
    torch.manual_seed(seed)
    results = fn(*inputs)
    results = list(results) if isinstance(results, tuple) else [results]
    loss = torch.stack([x.sin().sum() for i, x in enumerate(results) if i != but]).sum()
    return results, torch.autograd.grad(loss, [x for x in inputs if isinstance(x, torch.Tensor) and x.requires_grad])


def same_to_rounding(found: Sequence[Any], right: Sequence[Any], times: int = 16) -> bool:
    """Each tensor to ``times`` its dtype's epsilon of its greatest number."""
    pairs = zip(found, right, strict=True)
    return all(bool((a - b).abs().max() <= times * torch.finfo(b.dtype).eps * b.abs().max()) for a, b in pairs)


def same(found: Outcome, right: Outcome) -> bool:
    """The same bits; gradients to rounding: the operator does not return what the log-sum-exp loses to rounding."""
    pairs = zip(found[0], right[0], strict=True)
    return all(torch.equal(a, b) for a, b in pairs) and same_to_rounding(found[1], right[1])

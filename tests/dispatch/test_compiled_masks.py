"""Programs of torch.compile serve masks of other numbers: a batch of other documents is no reason to compile again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter

import lowtri

GENERATOR = torch.Generator().manual_seed(0)
BATCHES = [
    torch.randint(3, 30, (int(torch.randint(2, 12, (), generator=GENERATOR)),), generator=GENERATOR) for _ in range(8)
]  # the lengths of documents


def edges(lengths: Tensor) -> Tensor:
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0))


def labels(lengths: Tensor) -> Tensor:
    return torch.arange(len(lengths)).repeat_interleave(lengths)


def first(lengths: Tensor) -> int:
    return int(lengths[0])


def all_but_first(lengths: Tensor) -> Tensor:
    return (lengths.sum() - lengths[0])[None]


# How a mask is made from an argument, and the argument of a batch.
MASKS: dict[str, tuple[Callable[[Any], lowtri.Mask], Callable[[Tensor], Any]]] = {
    "lengths": (lambda x: lowtri.causal() & lowtri.documents(lengths=x), lambda n: n),
    "lengths with an open end": (lambda x: lowtri.documents(lengths=x, open_end=True) & lowtri.causal(), lambda n: n),
    "edges": (lambda x: lowtri.causal() & lowtri.documents(cu_seqlens=x), edges),
    "labels": (lambda x: lowtri.causal() & lowtri.documents(x), labels),
    "lengths of keys": (lambda x: lowtri.causal() & lowtri.keys(lengths=x), all_but_first),
    "window": (lambda x: lowtri.window(x), first),
    "band and chunks": (lambda x: lowtri.band(x, 3) & lowtri.chunks(x + 1), first),
    "stride and prefix": (lambda x: (lowtri.strided(x) & lowtri.causal()) - lowtri.first(x), first),
}


def attend(x: Tensor, mask: lowtri.Mask) -> Tensor:
    q, k, v = (part.unflatten(-1, (2, 8)).transpose(-3, -2) for part in x.chunk(3, -1))
    return lowtri.attention(q, k, v, mask).square().sum()


@pytest.mark.parametrize("inside", [False, True], ids=["as an argument", "made inside"])
@pytest.mark.parametrize("name", MASKS)
def test_masks_of_other_numbers_compile_at_most_twice(name: str, inside: bool) -> None:
    make, argument_of = MASKS[name]
    torch._dynamo.reset()
    counter = CompileCounter()
    program = torch.compile(
        lambda x, given: attend(x, make(given) if inside else given), backend=counter, fullgraph=True
    )
    for lengths in BATCHES:
        x, argument = torch.randn(1, int(lengths.sum()), 48), argument_of(lengths)
        eager, compiled = x.clone().requires_grad_(), x.clone().requires_grad_()
        expected = attend(eager, make(argument))
        output = program(compiled, argument if inside else make(argument))
        torch.testing.assert_close(output, expected)
        expected.backward()
        output.backward()
        torch.testing.assert_close(compiled.grad, eager.grad)
    assert counter.frame_count <= 2


@pytest.mark.parametrize("n", [24, 12_000])  # of the second, the mask is made again for each call
def test_numbers_of_a_mask_that_change_in_place_are_read_again(n: int) -> None:
    def function(ids: Tensor) -> Any:
        return lowtri.attention(q, k, v, lowtri.documents(ids) & lowtri.window(5))

    torch._dynamo.reset()
    ids = torch.zeros(n, dtype=torch.int64)
    q, k, v = torch.randn(3, 1, 2, n, 8)
    program = torch.compile(function, backend="eager", fullgraph=True)
    for begin in (n, 10, 7, 10):
        ids.fill_(0)
        ids[begin:] = 1
        assert torch.equal(program(ids), function(ids))

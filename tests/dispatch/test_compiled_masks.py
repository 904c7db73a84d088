"""Programs of torch.compile serve masks of other numbers: a batch of other documents is no reason to compile again."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
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


def two_lengths(lengths: Tensor) -> list[int]:
    return [first(lengths), int(lengths.sum()) - first(lengths)]


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
# Only inside of a program: what is no tensor there.
MADE_INSIDE: dict[str, tuple[Callable[[Any], lowtri.Mask], Callable[[Tensor], Any]]] = {
    "a list": (lambda x: lowtri.causal() & lowtri.documents(lengths=x), two_lengths),
    "a list with an inner mask": (lambda x: lowtri.documents(lengths=x, inner="window(3)"), two_lengths),
    "edges in a tuple": (lambda x: lowtri.documents(cu_seqlens=(0, x[0], x[0] + x[1])), two_lengths),
    "a list of keys": (lambda x: lowtri.keys(lengths=[x[0]]), two_lengths),
    "NumPy's array": (lambda x: lowtri.documents(lengths=x), lambda n: np.array(two_lengths(n))),
    "labels of NumPy": (lambda x: lowtri.documents(x), lambda n: labels(n).numpy()),
    "flags of NumPy": (lambda x: lowtri.keys(x), lambda n: labels(n).numpy() < 2),
    "NumPy's integer": (lambda x: lowtri.window(x), lambda n: np.int64(n[0])),
    "NumPy's integer, computed": (lambda x: lowtri.band(x.max(), x.min()) - lowtri.chunks(2), lambda n: n.numpy()),
    "a number of a tensor": (lambda x: lowtri.causal() & lowtri.chunks(x.max().item()), lambda n: n),
    "an int of a tensor": (lambda x: lowtri.band(int(x[0]), 0) | lowtri.first(int(x[1])), lambda n: n),
    "all but a mask": (lambda x: lowtri.full() - lowtri.window(x), first),
}


def attend(x: Tensor, mask: lowtri.Mask) -> Tensor:
    q, k, v = (part.unflatten(-1, (2, 8)).transpose(-3, -2) for part in x.chunk(3, -1))
    return lowtri.attention(q, k, v, mask).square().sum()


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("name", "inside"), [*itertools.product(MASKS, (False, True)), *((name, True) for name in MADE_INSIDE)]
)
def test_masks_of_other_numbers_compile_at_most_twice(name: str, inside: bool) -> None:
    make, argument_of = {**MASKS, **MADE_INSIDE}[name]
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


def test_drafts_in_a_list_are_part_of_the_program() -> None:
    def function(parents: list[int], start: int) -> Any:
        return lowtri.attention(q, q, q, lowtri.tree(parents, start=start))

    torch._dynamo.reset()
    q = torch.randn(1, 2, 12, 8)
    program = torch.compile(function, backend="eager", fullgraph=True)
    for parents, start in (([-1, 0, 0, 1], 8), ([-1, 0, 1, 2], 9), ([-1, -1, 1, 0], 8)):
        assert torch.equal(program(parents, start), function(parents, start))


def labels_of_two(lengths: list[int]) -> list[int]:
    return [0 for _ in range(lengths[0])] + [1 for _ in range(lengths[1])]


# What no graph has, and masks whose numbers a program made.
BREAKS: dict[str, Callable[[Any], Any]] = {
    "a list": lambda x: ~lowtri.documents(lengths=x),
    "a list in a joined mask": lambda x: lowtri.causal() & ~lowtri.documents(lengths=x),
    "a tensor": lambda x: ~lowtri.documents(lengths=torch.tensor(x)),
    "labels": lambda x: lowtri.causal() - ~lowtri.documents(labels_of_two(x)),
    "keys": lambda x: ~~lowtri.keys(lengths=x[:1]),
    "a formula": lambda x: lowtri.where(lambda q, k: k <= q + 1) & lowtri.documents(lengths=x, open_end=True),
    "a formula and an inner mask": lambda x: (
        lowtri.where(lambda q, k: k <= q + 1) & lowtri.documents(lengths=x, inner="window(2) | first(1)")
    ),
    "NumPy's integer": lambda x: ~lowtri.window(np.int64(x[0])),
}


@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore:.*Dynamo does not know how to trace the builtin.*")
@pytest.mark.parametrize("name", BREAKS)
def test_a_mask_that_leaves_its_program_is_the_mask_outside(name: str) -> None:
    def function(lengths: list[int]) -> Any:
        return lowtri.attention(q, q, q, BREAKS[name](lengths))

    torch._dynamo.reset()
    q = torch.randn(1, 2, 12, 8)
    program = torch.compile(function, backend="eager")
    for lengths in ([5, 7], [4, 8], [9, 3]):
        assert torch.equal(program(lengths), function(lengths))


def test_what_a_mask_made_in_a_program_says_outside() -> None:
    torch._dynamo.reset()
    made = torch.compile(lambda x: lowtri.documents(lengths=x), backend="eager")([5, 7])
    right = lowtri.documents(lengths=[5, 7])
    assert repr(made) == repr(right) and made.packed_totals == (12,) and np.array_equal(made.dense(12), right.dense(12))
    flags = torch.compile(lambda x: lowtri.causal() & lowtri.keys(lengths=x), backend="eager")([2, 3])
    assert flags.batch == (2,) and np.array_equal(
        flags.dense(4), (lowtri.causal() & lowtri.keys(lengths=[2, 3])).dense(4)
    )
    q = torch.zeros(1, 2, 13, 8)
    with pytest.raises(
        lowtri.MaskError, match=r"documents\(lengths=\[5, 7\]\) add up to 12, but the row has 13 tokens"
    ):
        lowtri.attention(q, q, q, made)


REFUSED: dict[str, tuple[Callable[[], lowtri.Mask], str]] = {
    "a tensor": (
        lambda: lowtri.window(torch.tensor(3)),
        r"window: n is Tensor of a program that is traced, but it counts tokens: a whole number, at least 1\.",
    ),
    "a fraction": (lambda: lowtri.window(3.5), r"window: n is 3\.5, but it counts tokens"),
    "zeros and ones": (
        lambda: lowtri.hidden([[0, 1], [0, 0]]),
        r"hidden: bools is torch\.int64, but it takes bools .* Fix: x != 0, after checking whether it marks visible or",
    ),
    "starts": (
        lambda: lowtri.tree([-1, 0], start=[10, 9]),
        r"tree: start belongs to a program that is being traced, so its numbers cannot be read\. Fix: documents, keys, table",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_mask_made_inside_refuses(name: str) -> None:
    make, words = REFUSED[name]
    torch._dynamo.reset()
    q = torch.randn(1, 2, 12, 8)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=words):
        torch.compile(lambda x: lowtri.attention(x, x, x, make()), backend="eager", fullgraph=True)(q)


def test_lengths_with_fractions_are_refused_when_the_program_runs() -> None:
    torch._dynamo.reset()
    q = torch.randn(1, 2, 12, 8)
    program = torch.compile(
        lambda x: lowtri.attention(x, x, x, lowtri.documents(lengths=[1.5, 2.5])), backend="eager", fullgraph=True
    )
    with pytest.raises(lowtri.MaskError, match=r"documents: lengths is float32 \(2,\), but it takes integers of shape"):
        program(q)


def test_a_number_that_comes_with_a_tensor_is_checked_when_the_program_runs() -> None:
    torch._dynamo.reset()
    q = torch.randn(1, 2, 12, 8)
    program = torch.compile(
        lambda x, n: lowtri.attention(x, x, x, lowtri.band(n[0].item(), 2)), backend="eager", fullgraph=True
    )
    assert torch.equal(program(q, torch.tensor([3])), lowtri.attention(q, q, q, lowtri.band(3, 2)))
    for wrong in (-1, 2**62 + 1, -(2**62)):
        with pytest.raises(lowtri.MaskError, match=rf"band: before is {wrong}, but it must lie in 0 \.\. 2\*\*62"):
            program(q, torch.tensor([wrong]))

"""How far rounding may move a result: root of terms x unit in the last place x condition, computed where the test runs.

Two right programs sum in another order, fuse other multiplications with additions, and so differ by rounding. How much depends
on the inputs (their condition) and on the length of the sums; a limit read off one machine's difference fails on the next.

A sum of n terms is rounded n times by half a unit of a partial sum, which is about root n terms: n / 2 units of a term in all.
Moving each term by one unit moves the sum by root n. So other orders of summation differ by root n / 2 movements, if roundings
are independent (Higham and Mary 2019, "A new approach to probabilistic rounding error analysis"); twice that is allowed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result", Tensor, list[Tensor])


def movements(compute: Callable[[], Result], inputs: Iterable[Tensor], draws: int = 3) -> tuple[Result, list[float]]:
    """``compute()``, and how far each of its tensors moves when each number of ``inputs`` becomes the next one up or down.

    At least one unit of its own greatest number, which is itself rounded.
    """
    inputs = list(inputs)
    before = compute()
    kept = [x.detach().clone() for x in inputs]
    exact = [x.detach() for x in _tensors(before)]
    moved = [torch.finfo(x.dtype).eps * float(x.abs().max()) for x in exact]
    for seed in range(draws):
        source = torch.Generator().manual_seed(seed)
        for x, old in zip(inputs, kept, strict=True):
            up = torch.rand(x.shape, generator=source) < 0.5
            x.data = torch.nextafter(old, torch.where(up, torch.inf, -torch.inf).to(old.dtype))
        for i, (one, other) in enumerate(zip(_tensors(compute()), exact, strict=True)):
            moved[i] = max(moved[i], float((one.detach() - other).abs().max()))
    for x, old in zip(inputs, kept, strict=True):
        x.data = old
    return before, moved


def with_rounding(compute: Callable[[], Tensor], inputs: Iterable[Tensor], terms: int) -> tuple[Tensor, float]:
    """``compute()``, and how far from it another right program may be whose longest sum has ``terms`` numbers."""
    result, moved = movements(compute, inputs)
    return result, terms**0.5 * moved[0]


def assert_same(
    actual: list[Tensor], compute: Callable[[], list[Tensor]], inputs: Iterable[Tensor], terms: int
) -> None:
    """Each tensor of ``actual`` differs from ``compute()``'s by rounding alone; sums have at most ``terms`` numbers."""
    for i, (one, (other, moved)) in enumerate(zip(actual, zip(*movements(compute, inputs), strict=True), strict=True)):
        torch.testing.assert_close(
            one, other, rtol=0, atol=terms**0.5 * moved, msg=lambda text, i=i: f"tensor {i}: {text}"
        )


def _tensors(result: Tensor | list[Tensor]) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else result

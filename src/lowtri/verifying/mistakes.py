"""Well-known mistakes of attention kernels. Each is one function: the right formula in, the wrong ones out.

A mistake that can be made in several ways returns several formulas; one that a case cannot show returns none. To add one, write
the function here; its name is what :func:`lowtri.verify` prints.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from lowtri.verifying.cases import Case
from lowtri.verifying.formula import Formula

__all__ = ["MISTAKES", "ROUNDINGS", "Mistake"]

Mistake = Callable[[Case, Formula], Iterator[Formula]]
MISTAKES: dict[str, Mistake] = {}
ROUNDINGS = ("probabilities in half precision", "sums in half precision")  # judged by the size of errors


def mistake(name: str) -> Callable[[Mistake], Mistake]:
    """List a mistake under its name."""

    def add(function: Mistake) -> Mistake:
        MISTAKES[name] = function
        return function

    return add


@mistake("top-left alignment")
def _top_left(case: Case, right: Formula) -> Iterator[Formula]:
    """The first query stands at the first key, where it should be the last at the last."""
    if case.nq != case.nk and 0 not in (case.nq, case.nk):
        square = replace(case, nq=max(case.nq, case.nk), nk=max(case.nq, case.nk))
        yield replace(right, visible=square.visible[:, :, : case.nq, : case.nk])


def _shifted(visible: Tensor, by: int) -> Tensor:
    """Each row moved by one key."""
    moved = torch.roll(visible, by, -1)
    moved[..., 0 if by > 0 else -1] = False
    return moved


@mistake("window one too wide")
def _wide(case: Case, right: Formula) -> Iterator[Formula]:
    if case.nk:
        for by in (-1, 1):
            yield replace(right, visible=right.visible | _shifted(right.visible, by))
        yield replace(right, visible=right.visible | _shifted(right.visible, -1) | _shifted(right.visible, 1))


@mistake("window one too narrow")
def _narrow(case: Case, right: Formula) -> Iterator[Formula]:
    if case.nk and case.text not in ("causal", "full"):
        count = right.visible.sum(-1, keepdim=True)
        inside = count == count.max()  # rows whose window does not reach beyond the text
        oldest = inside & (right.visible.cumsum(-1) == 1)
        newest = inside & (right.visible.flip(-1).cumsum(-1) == 1).flip(-1)
        yield replace(right, visible=right.visible & ~oldest)
        yield replace(right, visible=right.visible & ~newest)
        yield replace(right, visible=right.visible & _shifted(right.visible, -1))
        yield replace(right, visible=right.visible & _shifted(right.visible, 1))


@mistake("mask inverted")
def _inverted(case: Case, right: Formula) -> Iterator[Formula]:
    """True means hidden in torch.nn.MultiheadAttention, and visible in scaled_dot_product_attention."""
    yield replace(right, visible=~right.visible)


@mistake("mask ignored")
def _ignored(case: Case, right: Formula) -> Iterator[Formula]:
    yield replace(right, visible=torch.ones_like(right.visible))


def _under_another_mask(name: str) -> None:
    """A mistake that forgets a part of the mask: the case says which mask is left."""

    @mistake(name)
    def _forgets(case: Case, right: Formula) -> Iterator[Formula]:
        if name in case.other:
            yield replace(right, visible=case.visible_under(case.other[name]))


for _name in ("window missing", "documents leak", "padding seen"):
    _under_another_mask(_name)


@mistake("scale missing")
def _no_scale(case: Case, right: Formula) -> Iterator[Formula]:
    yield replace(right, scale=1.0)
    if case.scale is not None:  # the argument is ignored
        yield replace(right, scale=1 / math.sqrt(case.d))


@mistake("scale applied twice")
def _scale_twice(case: Case, right: Formula) -> Iterator[Formula]:
    yield replace(right, scale=right.scale**2)
    if case.scale is not None:
        yield replace(right, scale=right.scale / math.sqrt(case.d))


@mistake("grouped heads interleaved")
def _interleaved(case: Case, right: Formula) -> Iterator[Formula]:
    """Query head h reads key/value head h % Hkv, where it should read h // group."""
    if 1 < case.hkv < case.hq:
        yield replace(right, kv_heads=torch.arange(case.hq) % case.hkv)


@mistake("softcap missing")
def _no_cap(case: Case, right: Formula) -> Iterator[Formula]:
    if right.softcap:
        yield replace(right, softcap=None)


@mistake("softcap after the mask's bias")
def _cap_after(case: Case, right: Formula) -> Iterator[Formula]:
    if right.softcap and right.bias is not None:
        yield replace(right, cap_after_bias=True)


@mistake("bias ignored")
def _no_bias(case: Case, right: Formula) -> Iterator[Formula]:
    if right.bias is not None:
        yield replace(right, bias=torch.zeros_like(right.bias))
        yield replace(right, bias=torch.where(right.bias == -math.inf, right.bias, 0.0))


@mistake("bias scaled")
def _scaled_bias(case: Case, right: Formula) -> Iterator[Formula]:
    """Added before the scale, which then multiplies it."""
    if right.bias is not None:
        yield replace(right, bias=right.bias * right.scale)


@mistake("NaN from hidden keys")
def _not_contained(case: Case, right: Formula) -> Iterator[Formula]:
    """A weight of 0 times NaN is NaN."""
    yield replace(right, contained=False)


@mistake("hidden as -1e9")
def _finite(case: Case, right: Formula) -> Iterator[Formula]:
    """A query that sees nothing then sees everything, and scores below -1e9 lose against hidden keys."""
    yield replace(right, hidden="replaced")
    yield replace(right, hidden="added")


@mistake("empty rows not zero")
def _empty(case: Case, right: Formula) -> Iterator[Formula]:
    yield replace(right, empty=math.nan)


@mistake("probabilities in half precision")
def _half_weights(case: Case, right: Formula) -> Iterator[Formula]:
    for dtype in (torch.bfloat16, torch.float16):
        for normalised in (True, False):
            yield replace(right, weights_in=dtype, normalised=normalised)


@mistake("sums in half precision")
def _half_sums(case: Case, right: Formula) -> Iterator[Formula]:
    """The sum over keys is rounded after each key; its error depends on the order, so its size is compared."""
    for dtype in (torch.bfloat16, torch.float16):
        yield replace(right, sums_in=dtype)


@mistake("lse in base 2")
def _base_two(case: Case, right: Formula) -> Iterator[Formula]:
    yield replace(right, lse_base=2.0)


@mistake("lse of unscaled scores")
def _unscaled(case: Case, right: Formula) -> Iterator[Formula]:
    yield replace(right, lse_scaled=False)


@mistake("gradients not summed over groups")
def _one_of_group(case: Case, right: Formula) -> Iterator[Formula]:
    if case.hkv < case.hq:
        for group in ("first", "last", "mean"):
            yield replace(right, group=group)

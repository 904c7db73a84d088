"""The tolerance of a case, which well-known mistake explains a difference, and where an unexplained one lies."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lowtri.verifying.cases import Case, Numbers
from lowtri.verifying.formula import Formula, Results
from lowtri.verifying.mistakes import MISTAKES, ROUNDINGS

__all__ = ["Difference", "Trial", "differences_of", "explain", "limits", "position", "where"]

_UNIT = torch.finfo(torch.float32).eps  # scores are float32's or better


@dataclass(frozen=True)
class Limit:
    """The greatest error and the root of the mean square that a result may have."""

    most: float
    rms: float


@dataclass(frozen=True)
class Trial:
    """One call that was made: its inputs, the right formula for it, and what came out."""

    case: Case
    numbers: Numbers
    cleaned: Numbers  # garbage that nobody sees is 0
    dtype: torch.dtype
    how: str
    formula: Formula
    exact: Results
    actual: Results
    allowed: Mapping[str, Limit]

    @property
    def size(self) -> int:
        """How many weights the call has."""
        return self.formula.visible.numel()

    @property
    def clean(self) -> bool:
        """Whether the inputs hold no NaN and no infinity."""
        return all(bool(x.isfinite().all()) for x in (self.numbers.q, self.numbers.k, self.numbers.v))


@dataclass(frozen=True)
class Difference:
    """A result that is further from the definition than its tolerance."""

    what: str  # "output", "lse", "gradient of k"
    size: float
    tolerance: float
    wrong: Tensor  # where, bool of the result's shape
    position: tuple[int, ...]


def limits(case: Case, numbers: Numbers, formula: Formula, exact: Results, dtype: torch.dtype) -> dict[str, Limit]:
    """For each result twice the plain formula's own greatest error in this dtype and two units of the greatest number.

    The plain formula is computed with its keys and features in several orders, and with scores moved by two units: how far
    one order errs is chance, and whoever folds the scale into a power of two rounds each score up to three times more.
    """
    from lowtri.dispatch.attend import attention
    from lowtri.masks import full, table

    eps = torch.finfo(dtype).eps
    greatest: dict[str, float] = defaultdict(float)
    rms: dict[str, float] = defaultdict(float)
    wants = "gradient of q" in exact
    source = torch.Generator().manual_seed(0)
    for units in (0, 0, 0) if case.numbers in ("equal", "low") else (0, 2, 2):  # equal scores are rounded equally
        order = torch.randperm(case.nk, generator=source)
        back = torch.argsort(order)
        rounding = 1 + units * _UNIT * torch.randn(case.nk, 1, generator=source, dtype=torch.float64)[order].sign()
        features = torch.randperm(case.d, generator=source)
        q, k, v = numbers.q[..., features], (numbers.k * rounding)[:, :, order][..., features], numbers.v[:, :, order]
        leaves = [x.to(dtype).detach().requires_grad_(wants) for x in (q, k, v)]
        bias = None if numbers.bias is None else numbers.bias.expand(formula.visible.shape)[..., order].to(dtype)
        mask = table(formula.visible[..., order].numpy()) if formula.visible.numel() else full()
        sinks = None if numbers.sinks is None else numbers.sinks.to(dtype)
        options: Any = {"scale": formula.scale, "softcap": case.softcap, "bias": bias, "sinks": sinks}
        q, k, v = leaves
        output, lse = attention(q, k, v, mask, return_lse=True, engine="formula", **options)
        plain = {"output": output.detach(), "lse": lse.detach()}
        if wants:
            dq, dk, dv = torch.autograd.grad(output, leaves, numbers.d_output.to(dtype))
            dq, dk = dq[..., torch.argsort(features)], dk[:, :, back][..., torch.argsort(features)]
            plain |= {"gradient of q": dq, "gradient of k": dk, "gradient of v": dv[:, :, back]}
        for name, x in plain.items():
            off = _off(x.double(), exact[name])
            greatest[name] = max(greatest[name], float(off.max()) if off.numel() else 0.0)
            rms[name] = max(rms[name], _rms(off))
    found = {}
    gradients = torch.cat([torch.zeros(1), *(x.flatten() for name, x in exact.items() if name.startswith("gradient"))])
    for name in greatest:  # the terms that are added have the size of v, or of all gradients
        terms = gradients if name.startswith("gradient") else numbers.v if name == "output" else exact[name]
        unit = _UNIT if name == "lse" and dtype != torch.float64 else eps
        half = dtype in (torch.bfloat16, torch.float16)  # dot products of bf16 take denormal numbers as 0
        smallest = torch.finfo(dtype).tiny * (1 if half else 4 * eps)
        if half and name == "lse":  # the weights that are summed may be rounded to the dtype
            smallest = eps / 2
        most = 2 * greatest[name] + 2 * unit * _most(terms) + smallest
        mean = 1.5 * rms[name] + unit * _rms(terms[terms.isfinite()]) + smallest
        if int((exact[name] != 0).sum()) < 1000:  # the mean square of few numbers is chance
            mean = math.inf
        found[name] = Limit(most, mean)
    return found


def differences_of(trial: Trial) -> Iterator[Difference]:
    """The results that differ from the definition."""
    for name, limit in trial.allowed.items():
        if name not in trial.actual:
            continue
        off = _off(trial.actual[name], trial.exact[name])
        wrong = off > limit.most
        if not wrong.any() and _rms(off) > limit.rms:
            wrong = off > limit.rms
        if wrong.any():
            place = position(torch.where(wrong, off, -1.0))
            yield Difference(name, float(off.max()), limit.most, wrong, place)


def explain(trial: Trial, pairs_with: Iterable[str] = (), results: Iterable[str] | None = None) -> dict[str, float]:
    """The mistakes that reproduce all of a call's results, each with the part of the difference that remains (0: rounding).

    With ``pairs_with``, two mistakes together, of which one is among these; joined by " and ". ``results`` names those that
    are compared; by default all, but no gradients where inputs are NaN, since the formula's own gradients are NaN then.
    """
    named: Iterable[tuple[str, Iterator[Formula]]]
    if pairs_with:
        exact = [name for name in MISTAKES if name not in ROUNDINGS]
        first = [name for name in exact if name in set(pairs_with)]
        pairs = {tuple(sorted(pair)) for pair in itertools.product(first, exact) if pair[0] != pair[1]}
        named = ((" and ".join(pair), _both(trial, *pair)) for pair in sorted(pairs))
    else:
        named = ((name, make(trial.case, trial.formula)) for name, make in MISTAKES.items())
    compared = [name for name in results or trial.actual if name in trial.allowed]
    if not trial.clean:
        compared = [name for name in compared if not name.startswith("gradient")]
    wants = any(name.startswith("gradient") for name in compared)
    matches: dict[str, float] = {}
    for name, formulas in named:
        for formula in formulas:
            for numbers in [trial.numbers] if trial.clean else [trial.numbers, trial.cleaned]:
                predicted = formula(numbers.q, numbers.k, numbers.v, numbers.d_output if wants else None)
                left = _left(trial, formula, predicted, compared)
                if left is not None and left < 0.5:
                    matches[name] = min(matches.get(name, 1.0), left)
    return matches


def _both(trial: Trial, one: str, other: str) -> Iterator[Formula]:
    for formula in MISTAKES[one](trial.case, trial.formula):
        yield from MISTAKES[other](trial.case, formula)


def _left(trial: Trial, formula: Formula, predicted: Results, compared: list[str]) -> float | None:
    """The part of the differences that a wrong formula leaves: 0 for rounding alone, None if it does not explain them."""
    if formula.weights_in is not None or formula.sums_in is not None:
        error = _off(trial.actual["output"], trial.exact["output"])
        moved = _off(predicted["output"], trial.exact["output"])
        if not (moved > trial.allowed["output"].most).any() or not 0 < _rms(moved) < math.inf:
            return None
        if not _looks_like_rounding(trial.actual["output"], trial.exact["output"], trial.allowed["output"].most):
            return None
        if formula.sums_in is None:
            return _rms(_off(trial.actual["output"], predicted["output"])) / _rms(error)
        return 0.4 if 1 / 3 < _rms(error) / _rms(moved) < 3 else None  # another order errs elsewhere by as much
    shows = False
    for name in compared:
        moved, limit = _off(predicted[name], trial.exact[name]), trial.allowed[name].most
        shows |= bool((moved > limit).any())
        finite = moved[moved.isfinite()]
        room = 4 * limit + 1e-3 * _most(finite)  # larger scores err more
        if (_off(trial.actual[name], predicted[name]) > room).any():
            return None
    return 0.0 if shows else None


def _looks_like_rounding(actual: Tensor, exact: Tensor, limit: float) -> bool:
    """Small, in most of the numbers, and with no regard to their sign."""
    error = (actual - exact).flatten()
    if not error.isfinite().all() or not 0 < _rms(error) < 0.05 * _rms(exact):
        return False
    alike = float(torch.nn.functional.cosine_similarity(error, exact.flatten(), dim=0))
    return float((error.abs() > limit).double().mean()) > 0.3 and abs(alike) < 0.5


def where(trial: Trial, difference: Difference) -> str:
    """Where the wrong numbers lie, in words: heads, queries or keys, features."""
    wrong = difference.wrong
    axes = ("row", "head", "key" if difference.what[-1] in "kv" else "query", "feature")[: wrong.ndim]
    said = []
    for axis, name in enumerate(axes):
        each = wrong.any(dim=tuple(i for i in range(wrong.ndim) if i != axis)).nonzero().flatten().tolist()
        if len(each) < wrong.shape[axis]:
            said.append(_indexes(name, each, wrong.shape[axis]))
    share = float(wrong.double().mean())
    return (", ".join(said) or "everywhere") + f" ({share:.0%} of the numbers)"


def _indexes(name: str, each: list[int], size: int) -> str:
    if len(each) == 1:
        only = {0: "first ", size - 1: "last "}.get(each[0], "")
        return f"the {only}{name} alone ({each[0]})"
    steps = {b - a for a, b in itertools.pairwise(each)}
    if steps == {1}:
        end = "the end" if each[-1] == size - 1 else each[-1]
        return f"{name} {each[0]} to {end}"
    if len(steps) == 1:
        return f"every {steps.pop()}th {name} from {each[0]} on"
    return f"{name} {', '.join(map(str, each[:4]))}{' ...' if len(each) > 4 else ''}"


def position(x: Tensor) -> tuple[int, ...]:
    """The index of the greatest number."""
    return tuple(int(i) for i in torch.unravel_index(x.flatten().argmax(), x.shape))


def _off(actual: Tensor, exact: Tensor) -> Tensor:
    """The absolute differences; 0 where both are NaN or the same infinity, infinite where one alone is."""
    same = (actual == exact) | (actual.isnan() & exact.isnan())
    return torch.where(same, 0.0, (actual - exact).abs().nan_to_num(math.inf, math.inf, math.inf))


def _most(x: Tensor) -> float:
    return float(x.nan_to_num(0, 0, 0).abs().max()) if x.numel() else 0.0


def _rms(x: Tensor) -> float:
    return float(x.square().mean().sqrt()) if x.numel() else 0.0

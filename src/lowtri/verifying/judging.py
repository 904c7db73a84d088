"""The tolerance of a call, which well-known mistakes explain a difference, and where an unexplained one lies."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from lowtri.verifying.cases import Case
from lowtri.verifying.definition import Problem, Results
from lowtri.verifying.mistakes import MISTAKES, ROUNDINGS, wrong_problems
from lowtri.verifying.report import Difference

_EPS32 = torch.finfo(torch.float32).eps  # scores are float32 or wider
drawn = lru_cache(maxsize=256)(Case.draw)  # of all cases in four dtypes, for the next function that is verified


class Expected(NamedTuple):
    """A problem, what the definition gives for it, and how far a result may be from that."""

    problem: Problem
    clean: Problem  # with 0 for NaN and inf that no query sees
    exact: Results
    tolerances: dict[str, tuple[float, float]]  # by result, of the greatest error and the root of the mean square


@lru_cache(maxsize=256)
def expected(case: Case, dtype: torch.dtype, top_left: bool, gradients: bool) -> Expected:
    """``top_left``: of the call whose causal mask is aligned with the first key."""
    problem = drawn(case, dtype)
    if top_left:
        problem = replace(
            problem, visible=torch.ones(case.nq, case.nk, dtype=torch.bool).tril().expand(case.visible.shape)
        )
    clean = replace(problem, q=torch.where(problem.visible.any(-1)[..., None], problem.q, 0.0))
    if case.numbers != "NaN seen late":
        seen = problem.visible.any(2).any(1)[:, None, :, None]
        clean = replace(clean, k=torch.where(seen, problem.k, 0.0), v=torch.where(seen, problem.v, 0.0))
    exact = clean.results(gradients)
    return Expected(problem, clean, exact, _tolerances(clean, exact, dtype))


@dataclass(frozen=True)
class Comparison:
    """One call that was made; ``name`` is that of its case, and of the way to pass the mask where a case has several."""

    expected: Expected
    dtype: str
    name: str
    actual: Results  # what the callable returned

    @property
    def case(self) -> Case:
        return self.expected.problem.case

    @cached_property
    def differences(self) -> list[Difference]:
        """The results that differ from the definition by more than rounding."""
        differences = []
        for what, (most, rms) in self.expected.tolerances.items():
            if what not in self.actual:
                continue
            error = _error(self.actual[what], self.expected.exact[what])
            wrong = error > most
            if not wrong.any() and _rms(error) > rms:
                wrong = error > rms
            if wrong.any():
                position = tuple(int(i) for i in torch.unravel_index(error.where(wrong, -1.0).argmax(), error.shape))
                values = (float(x[position]) for x in (self.expected.exact[what], self.actual[what]))
                differences.append(
                    Difference(
                        self.name,
                        self.dtype,
                        _where(what, wrong),
                        difference=float(error.max()),
                        tolerance=most,
                        position=position,
                        what=what,
                        values=_in_words(*values),
                    )
                )
        return differences

    def explain(self, with_one_of: Iterable[str] = (), results: Iterable[str] = ()) -> dict[str, float]:
        """The mistakes that reproduce all results, each with the part of the difference that remains (0: rounding alone).

        Args:
            with_one_of: tries two mistakes together, of which one is among these; their names are joined by " and ".
            results: which are compared; by default all but the gradients of bias and sinks, and none of the gradients where
                inputs are NaN, since those of the wrong formula are NaN then, too.
        """
        problem, tolerances = self.expected.problem, self.expected.tolerances
        compared = [
            what for what in (results or self.actual) if what in tolerances and what[-4:] not in ("bias", "inks")
        ]
        if not problem.finite:
            compared = [what for what in compared if not what.startswith("gradient")]
        gradients = any(what.startswith("gradient") for what in compared)
        remaining: dict[str, float] = {}
        for right in [problem] if problem.finite else [problem, self.expected.clean]:
            for name, wrong in _wrong_problems(right, set(with_one_of)):
                rest = self._remaining(wrong, wrong.results(gradients), compared)
                if rest < 0.5:
                    remaining[name] = min(remaining.get(name, 1.0), rest)
        return remaining

    def _remaining(self, wrong: Problem, predicted: Results, compared: list[str]) -> float:
        """The part of the differences that a wrong formula does not explain: 0 for rounding alone, 1 for all."""
        exact, tolerances = self.expected.exact, self.expected.tolerances
        if wrong.weights_in is not None or wrong.sums_in is not None:
            return self._remaining_of_rounding(wrong, predicted["output"], exact["output"], tolerances["output"][0])
        shows = explains = False
        for what in compared:
            moved, most = _error(predicted[what], exact[what]), tolerances[what][0]
            shows |= bool((moved > most).any())
            allowed = 4 * most + 1e-3 * _max(moved[moved.isfinite()])  # larger scores err more
            if (_error(self.actual[what], predicted[what]) > allowed).any():
                return 1.0
            explains |= bool((_error(self.actual[what], exact[what]) > allowed).any())
        return 0.0 if shows and explains else 1.0

    def _remaining_of_rounding(self, wrong: Problem, predicted: Tensor, exact: Tensor, most: float) -> float:
        """For mistakes of precision: errors that are small, in most of the numbers, and independent of their sign."""
        error, moved = self.actual["output"] - exact, _error(predicted, exact)
        if not (moved > most).any() or not 0 < _rms(moved) < math.inf:
            return 1.0
        if not error.isfinite().all() or not 0 < _rms(error) < 0.05 * _rms(exact):
            return 1.0
        alike = float(torch.nn.functional.cosine_similarity(error.flatten(), exact.flatten(), dim=0))
        if float((error.abs() > most).double().mean()) < 0.3 or abs(alike) > 0.5:
            return 1.0
        rows, predicted_rows = (x.square().mean(-1).sqrt() for x in (error, moved))
        if (rows < predicted_rows / 10).any():  # a row with one key has no error of the scores, but one of rounding
            return 1.0
        if wrong.sums_in is None:
            return _rms(_error(self.actual["output"], predicted)) / _rms(error)
        return 0.4 if 1 / 3 < _rms(error) / _rms(moved) < 3 else 1.0  # another order of keys errs elsewhere by as much


def _wrong_problems(problem: Problem, with_one_of: set[str]) -> Iterator[tuple[str, Problem]]:
    """The calls with one mistake, or with two of which one is among the given; and their names."""
    if not with_one_of:
        yield from ((name, wrong) for name in MISTAKES for wrong in wrong_problems(name, problem))
        return
    for one, other in itertools.combinations([name for name in MISTAKES if name not in ROUNDINGS], 2):
        if {one, other} & with_one_of:
            for wrong in wrong_problems(one, problem):
                yield from ((f"{one} and {other}", both) for both in wrong_problems(other, wrong))


def _tolerances(problem: Problem, exact: Results, dtype: torch.dtype) -> dict[str, tuple[float, float]]:
    """For each result twice the plain formula's own greatest error in this dtype, plus two units of the greatest number; and
    1.5 times its root of the mean square, plus one unit.

    The plain formula is the definition in float32 (float64 for float64), with inputs, weights and results rounded to the dtype. It
    is computed three times, with keys and features in other orders, and with scores moved by two units: the error of one order is
    chance, and a kernel that folds the scale into a power of two rounds each score up to three times more.
    """
    case, eps = problem.case, torch.finfo(dtype).eps
    wide, half = torch.promote_types(dtype, torch.float32), dtype in (torch.bfloat16, torch.float16)
    greatest: dict[str, float] = defaultdict(float)
    rms: dict[str, float] = defaultdict(float)
    source = torch.Generator().manual_seed(0)
    for units in (0, 0, 0) if case.numbers in ("equal", "low") else (0, 2, 2):  # equal scores are rounded equally
        keys, features = (torch.randperm(n, generator=source) for n in (case.nk, case.d))
        rounding = 1 + units * _EPS32 * torch.randn(case.nk, 1, generator=source, dtype=torch.float64).sign()
        plain = replace(
            problem,
            q=problem.q[..., features].to(dtype),
            k=(problem.k * rounding)[:, :, keys][..., features].to(dtype),
            v=problem.v[:, :, keys].to(dtype),
            visible=problem.visible[..., keys],
            bias=None if problem.bias is None else problem.bias[..., keys].to(dtype),
            weights_in=dtype if half else None,
        ).results("gradient of q" in exact, wide)
        for what, x in plain.items():
            y = exact[what]
            if what in ("gradient of k", "gradient of v"):
                y = y[:, :, keys]
            if what in ("gradient of q", "gradient of k"):
                y = y[..., features]
            if what == "gradient of bias":
                y = y[..., keys]
            error = _error(x.to(torch.float32 if what == "lse" and half else dtype).double(), y)
            greatest[what] = max(greatest[what], float(error.max()) if error.numel() else 0.0)
            rms[what] = max(rms[what], _rms(error))
    allowed = {}
    gradients = torch.cat([torch.zeros(1), *(x.flatten() for what, x in exact.items() if what.startswith("gradient"))])
    for what in greatest:  # the terms of a sum have the size of v, or of all gradients
        terms = problem.v if what == "output" else exact[what]
        if what.startswith("gradient"):
            terms = gradients
        unit = _EPS32 if what == "lse" and dtype != torch.float64 else eps
        smallest = torch.finfo(dtype).tiny * (1 if half else 4 * eps)  # dot products of bf16 take denormal numbers as 0
        if half and what == "lse":  # the weights that are summed may be rounded to the dtype
            smallest = eps / 2
        most = 2 * greatest[what] + 2 * unit * _max(terms) + smallest
        mean = 1.5 * rms[what] + unit * _rms(terms[terms.isfinite()]) + smallest
        # The mean square of few numbers is chance, and so is that of errors which are equal.
        few = int((exact[what] != 0).sum()) < 1000 or case.numbers in ("equal", "low")
        allowed[what] = (most, math.inf if few else mean)
    return allowed


def _where(what: str, wrong: Tensor) -> str:
    """Where the wrong numbers lie, in words."""
    axes: tuple[str, ...] = ("row", "head", "key" if what.endswith((" k", " v")) else "query", "feature")
    axes = {"gradient of bias": ("row", "head", "query", "key"), "gradient of sinks": ("head",)}.get(what, axes)
    parts = []
    for axis, (size, name) in enumerate(zip(wrong.shape, axes, strict=False)):
        indexes = wrong.movedim(axis, 0).reshape(size, -1).any(1).nonzero().flatten().tolist()
        if len(indexes) < size:
            parts.append(_indexes(name, indexes, size))
    return (", ".join(parts) or "everywhere") + f" ({float(wrong.double().mean()):.0%} of the numbers)"


def _in_words(exact: float, actual: float) -> str:
    """What was expected and what came, where their difference is no number."""
    if math.isfinite(exact) and math.isfinite(actual):
        return ""
    return f"expected {_number(exact)}, got {_number(actual)}"


def _number(x: float) -> str:
    if math.isnan(x):
        return "NaN"
    return repr(x) if x == 0 else f"{x:.4g}"


def _indexes(name: str, indexes: list[int], size: int) -> str:
    if len(indexes) == 1:
        only = {0: "first ", size - 1: "last "}.get(indexes[0], "")
        return f"only the {only}{name} ({indexes[0]})"
    steps = {b - a for a, b in itertools.pairwise(indexes)}
    if steps == {1}:
        return f"{name} {indexes[0]} to {'the end' if indexes[-1] == size - 1 else indexes[-1]}"
    if len(steps) == 1:
        return f"every {steps.pop()}th {name} from {indexes[0]} on"
    return f"{name} {', '.join(map(str, indexes[:4]))}{' ...' if len(indexes) > 4 else ''}"


def _error(actual: Tensor, exact: Tensor) -> Tensor:
    """The absolute differences; 0 where both are NaN or the same infinity, infinite where one alone is."""
    same = (actual == exact) | (actual.isnan() & exact.isnan())
    return torch.where(same, 0.0, (actual - exact).abs().nan_to_num(math.inf, math.inf, math.inf))


def _max(x: Tensor) -> float:
    return float(x.where(x.isfinite(), 0.0).abs().max()) if x.numel() else 0.0


def _rms(x: Tensor) -> float:
    return float(x.square().mean().sqrt()) if x.numel() else 0.0

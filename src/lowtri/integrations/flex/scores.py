"""FlexAttention's ``score_mod``: what of it the kernels compute, read off its graph; the rest is applied to the scores tile by tile.

The graph is followed from its result to the score. On the way it may hold

    where(condition, x, -inf)      a condition of the indices: a mask
    x * 2, x / 2                   a factor: the scale
    30 * tanh(x / 30)              a soft cap, at most one
    x + bias, x - bias             outside of the cap: a bias

If nothing else lies on the way, the kernels compute it. If anything else does (a product with a parameter, a bias that is neither a
formula of the distance nor a table), the whole function is applied in torch to one tile of scores after another, so that memory grows
with the tile; torch differentiates it with every tensor that it captures. The conditions are recognised in both cases.

A bias is a sum of terms that do not depend on the score. The kernels take it if it is

    a function of q - k, b and h      relative positions, ALiBi, a table of distances: one number for each distance
    a function of q or of k, b and h  one number for each query or each key
    a captured table at [q, k], [h, q, k] or [b, h, q, k]   read where it lies, without a copy

Whether a term depends on the distance only is decided from its graph: how its value changes if q and k both grow by one.

What is recognised is compared with the function on sample scores at each call.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import reduce
from operator import and_
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from lowtri.compat.torch_private import mapped_indexing
from lowtri.integrations.flex.masks import function_mask, tensor_function
from lowtri.integrations.function_mask import INDICES, Trace, operation, trace
from lowtri.masks.mask import Mask
from lowtri.ops.distance_bias import DistanceBias, distance_bias

_SAMPLES = (-30.0, -2.0, -0.1, 0.0, 0.3, 1.0, 50.0)
_EXACT = 2**24  # integers that float32 holds exactly

Shape = tuple[int, int, int, int]  # B, Hq, Nq, Nk
Term = tuple[float, Node]  # of a bias: its factor, 1 or another number


@dataclass(frozen=True, eq=False)
class Bias:
    """A bias for :func:`lowtri.attention`, and its value at one pair of indices, to compare it with the function.

    Attributes:
        argument: (B|1, H|1, Nq|1, Nk|1), or a bias over distances whose first number is of the distance ``low``.
    """

    argument: Tensor | DistanceBias
    low: int = 0

    def at(self, b: int, h: int, q: int, k: int) -> Tensor:
        if isinstance(self.argument, DistanceBias):
            table: Tensor = self.argument.values.detach()
            return table[b % len(table), h % table.shape[1], q - k - self.low]
        return self.argument.detach()[tuple(i % n for i, n in zip((b, h, q, k), self.argument.shape, strict=True))]


@dataclass(frozen=True, eq=False)
class Scores:
    """A score_mod, as far as it was recognised.

    Attributes:
        mask: the pairs whose score it does not set to -inf, or None for all.
        factor, softcap, bias: of the scores at these pairs, if ``in_kernel``; the bias is added last.
        in_kernel: whether mask, factor, softcap and bias are all that it does.
    """

    mask: Mask | None = None
    factor: float = 1.0
    softcap: float | None = None
    bias: Bias | None = None
    in_kernel: bool = True


_UNKNOWN = Scores(in_kernel=False)


def read_score_mod(
    score_mod: Callable[..., Any] | None, shape: Shape, device: Any, dtype: torch.dtype = torch.float32
) -> Scores:
    """What a score_mod does to the scores of a call; ``dtype`` is that of the scores."""
    if score_mod is None:
        return Scores()
    traced = trace(score_mod, device, of_score=True)
    if traced is None:
        return _UNKNOWN
    steps = _follow(traced)
    mask = _mask(traced, steps.conditions, shape, device) if steps.conditions else None
    bias = bias_of(traced, steps.terms, shape, device, dtype) if steps.known and steps.terms else None
    if not steps.known or (steps.terms and bias is None):
        return Scores(mask, in_kernel=False)
    factor = steps.outer * steps.inner if steps.capped else steps.inner
    softcap = steps.outer if steps.capped else None
    if not math.isfinite(factor) or (softcap is not None and not 0 < softcap < math.inf):
        return Scores(mask, in_kernel=False)
    recognised = Scores(mask, factor, softcap, bias)
    return recognised if _agrees(recognised, score_mod, shape, device) else _UNKNOWN


def tile_function(score_mod: Callable[..., Any]) -> Callable[[Tensor, tuple[int, int, int, int]], Tensor]:
    """A score_mod as a function of a tile of scores (B, H, n, Nk) and the tile."""
    mapped: Callable[..., Any] = tensor_function("score_mod", score_mod)
    for axis in (4, 3, 2, 1):  # k, q, h, b: the scores are mapped with each of them
        mapped = torch.vmap(mapped, in_dims=(0, *(0 if i == axis else None for i in range(1, 5))))

    def apply(scores: Tensor, tile: tuple[int, int, int, int]) -> Tensor:
        q0, q1, k0, k1 = tile
        if scores.numel() == 0:
            return scores
        ranges = ((0, scores.shape[0]), (0, scores.shape[1]), (q0, q1), (k0, k1))
        with mapped_indexing():
            return mapped(scores, *(torch.arange(*each, device=scores.device) for each in ranges))

    return apply


@dataclass
class _Steps:
    """The way from the result to the score: outer * tanh(inner * score) + terms, or inner * score + terms."""

    outer: float = 1.0
    inner: float = 1.0
    capped: bool = False
    known: bool = False  # whether the way ends at the score
    terms: list[Term] = field(default_factory=list)
    conditions: list[tuple[Node, bool]] = field(default_factory=list)  # with whether it hides where it is true


def _follow(traced: Trace) -> _Steps:
    """Follow the graph from its result until the score, or until an operation that the kernels do not have."""
    steps, node = _Steps(), traced.output
    while node is not traced.inputs["score"]:
        x = _next(traced, node, steps)
        if x is None:
            return steps
        node = x
    steps.known = True
    return steps


def _next(traced: Trace, node: Node, steps: _Steps) -> Node | None:
    """Add an operation to the steps; its operand that holds the score, or None for an operation that is not recognised."""
    name, arguments = operation(node), node.args
    on_score = [isinstance(x, Node) and traced.depends_on(x, "score") for x in arguments]
    if name == "where":
        return _condition(traced, node, steps)
    if node.kwargs or on_score.count(True) != 1:
        return None
    at = on_score.index(True)
    others: Any = [x for i, x in enumerate(arguments) if i != at]
    if name == "tanh" and not steps.capped:
        steps.outer, steps.inner, steps.capped = steps.inner, 1.0, True
    elif name in ("mul", "div") and len(others) == 1 and type(others[0]) in (int, float):
        number = float(others[0])
        if name == "div" and (at == 1 or not number):
            return None
        steps.inner *= number if name == "mul" else 1 / number
    elif name in ("add", "sub") and not steps.capped and isinstance(others[0], Node):
        factor = -steps.inner if name == "sub" and at == 0 else steps.inner
        steps.terms += [(factor, x) for x in _added(traced, others[0], factor, steps)]
        if name == "sub" and at == 1:
            steps.inner = -steps.inner
    elif name not in ("alias", "clone"):
        return None
    return arguments[at]  # type: ignore[return-value]


def _condition(traced: Trace, node: Node, steps: _Steps) -> Node | None:
    """Add ``where(condition, x, -inf)`` to the steps, and return x; -inf stays -inf under what is done to it afterwards."""
    if steps.capped or not steps.inner > 0 or (parts := _parts(traced, node)) is None:
        return None
    condition, hides, x = parts
    if not traced.depends_on(x, "score"):
        return None
    steps.conditions.append((condition, hides))
    return x


def _added(traced: Trace, term: Node, factor: float, steps: _Steps) -> list[Node]:
    """What a term adds where it is not -inf; ``where(condition, x, -inf)`` adds its condition to the steps."""
    if factor > 0 and operation(term) == "where" and (parts := _parts(traced, term)) is not None:
        condition, hides, term = parts
        steps.conditions.append((condition, hides))
        if operation(term) == "scalar_tensor" and term.args[0] == 0:
            return []
    return [term]


def _parts(traced: Trace, where: Node) -> tuple[Node, bool, Node] | None:
    """Condition, whether it hides where it is true, and x of ``where(condition, x, -inf)``; None for other functions."""
    if len(where.args) != 3:
        return None
    condition, x, y = where.args
    hides = _is_minus_infinity(x)
    if hides:
        x, y = y, x
    if not (isinstance(condition, Node) and isinstance(x, Node) and _is_minus_infinity(y)):
        return None
    return None if traced.depends_on(condition, "score") else (condition, hides, x)


def _is_minus_infinity(x: Any) -> bool:
    if isinstance(x, Node) and operation(x) in ("scalar_tensor", "full", "full_like", "new_full"):
        x = x.args[0] if operation(x) == "scalar_tensor" else x.args[1 if operation(x) != "new_full" else 2]
    return isinstance(x, float) and x == -math.inf


def _mask(traced: Trace, conditions: list[tuple[Node, bool]], shape: Shape, device: Any) -> Mask:
    """The mask of all conditions, kept while the trace lives and its captured tensors do not change."""
    key = shape, traced.versions()
    kept: tuple[Any, Mask] | None = traced.kept.get("mask")
    if kept is None or kept[0] != key:
        parts = []
        for node, hides in conditions:
            mask = function_mask(traced.function_of(node), shape, device, traced=(traced, node))
            parts.append(~mask if hides else mask)
        kept = traced.kept["mask"] = key, reduce(and_, parts)
    return kept[1]


def _agrees(recognised: Scores, score_mod: Callable[..., Any], shape: Shape, device: Any) -> bool:
    """Whether the score_mod, evaluated at the first and at the last pair of indices, gives what was recognised."""
    last = tuple(max(n - 1, 0) for n in shape)
    return all(_agrees_at(recognised, score_mod, at, device) for at in ((0, 0, 0, 0), last))  # type: ignore[arg-type]


def _agrees_at(recognised: Scores, score_mod: Callable[..., Any], at: Shape, device: Any) -> bool:
    b, h, q, k = at
    size = 0.0  # of the numbers that cancel where a bias is added
    scores = torch.tensor(_SAMPLES, dtype=torch.float64, device=device)
    expected = recognised.factor * scores
    if recognised.softcap is not None:
        expected = recognised.softcap * torch.tanh(expected / recognised.softcap)
    with torch.no_grad(), mapped_indexing():
        if recognised.bias is not None:
            added = recognised.bias.at(b, h, q, k).double()
            expected, size = expected + added, float(added.abs().nan_to_num(0, 0, 0))
        if recognised.mask is not None and not recognised.mask.at(b, h)(q, k):
            expected = torch.full_like(scores, -math.inf)
        indices = (torch.tensor(i, dtype=torch.int64, device=device) for i in at)
        mapped = torch.vmap(tensor_function("score_mod", score_mod), in_dims=(0, None, None, None, None))
        actual = mapped(scores, *indices)
    return torch.allclose(actual.double(), expected, rtol=1e-6, atol=1e-6 * size, equal_nan=True)


# Biases.


def bias_of(traced: Trace, terms: list[Term], shape: tuple[int, int, int, int], device: Any, dtype: Any) -> Bias | None:
    """The sum of the terms as a bias; None if it depends on pairs in another way.

    Args:
        shape: B, Hq, Nq, Nk.  dtype: of the bias, that of the scores.
    """
    rows, heads, nq, nk = shape
    if 0 in shape or max(nq, nk) > _EXACT:
        return None
    by = {name: any(traced.depends_on(node, name) for _, node in terms) for name in INDICES}
    front: list[Any] = [range(rows if by["b"] else 1), range(heads if by["h"] else 1)]
    if not (by["q"] and by["k"]):
        indices = [*front, range(nq if by["q"] else 1), range(nk if by["k"] else 1)]
        return Bias(_evaluated(traced, terms, indices, device).to(dtype))
    growth = _Growth(traced)
    if all(growth(node) == 0 for _, node in terms):
        low = 1 - nk
        table = _evaluated(traced, terms, [*front, range(low, nq), range(1)], device)[..., 0].to(dtype)
        return Bias(distance_bias(table, low), low)
    if len(terms) == 1 and terms[0][0] == 1:
        table_of_pairs = _captured_table(traced, terms[0][1], shape)
        return None if table_of_pairs is None else Bias(table_of_pairs.to(dtype))
    return None


def _value(traced: Trace, terms: list[Term]) -> Callable[..., Tensor]:
    """The sum of the terms as a function of b, h, q and k."""
    functions = [(factor, traced.function_of(node)) for factor, node in terms]

    def value(*indices: Tensor) -> Tensor:
        values = [f(*indices) if factor == 1 else factor * f(*indices) for factor, f in functions]
        return sum(values[1:], values[0])

    return value


def _evaluated(traced: Trace, terms: list[Term], indices: list[range], device: Any) -> Tensor:
    """The sum of the terms at these b, h, q and k, (len(b), len(h), len(q), len(k)), with gradients of captured tensors."""
    mapped: Callable[..., Tensor] = _value(traced, terms)
    for axis in (3, 2, 1, 0):
        mapped = torch.vmap(mapped, in_dims=tuple(0 if i == axis else None for i in range(4)))
    with mapped_indexing():
        return mapped(*(torch.tensor(list(each), device=device) for each in indices))


class _Growth:
    """By how much the value of a node grows if q and k both grow by one; None if that is not known or not a constant."""

    def __init__(self, traced: Trace) -> None:
        self.steps: dict[Node, int | None] = {
            node: int(name in ("q", "k")) if name != "score" else None for name, node in traced.inputs.items()
        }

    def __call__(self, x: Any) -> int | None:
        if not isinstance(x, Node):
            return 0
        if x not in self.steps:
            self.steps[x] = self._of(x)
        return self.steps[x]

    def _of(self, node: Node) -> int | None:
        steps = [self(x) for x in node.all_input_nodes]
        if not any(steps):
            return None if None in steps else 0  # a function of what does not change
        if None in steps:
            return None
        name, of = operation(node), [self(x) for x in node.args]
        if name == "_to_copy":  # exact for indices
            kept = node.kwargs.get("dtype") in (torch.int64, torch.float32, torch.float64)
            return steps[0] if kept else None
        if node.kwargs:
            return None
        if name in _COMPARISONS and of[0] == of[1]:
            return 0
        step = _step_of_sum(name, of, node.args)
        # Floats that grow with the indices round differently at every index.
        return step if step == 0 or _gives_integers(node) else None


_COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")


def _step_of_sum(name: str, of: list[int | None], arguments: tuple[Any, ...]) -> int | None:
    first, second = of[0] or 0, (of[1] or 0) if len(of) > 1 else 0
    if name in ("minimum", "maximum") and first == second:
        return first
    if name == "mul" and any(type(x) is int for x in arguments):
        return next(first * x if i else second * x for i, x in enumerate(arguments) if type(x) is int)
    sums = {"add": first + second, "sub": first - second, "rsub": second - first, "neg": -first, "alias": first}
    return sums.get(name)


def _gives_integers(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.dtype == torch.int64


def _captured_table(traced: Trace, node: Node, shape: tuple[int, int, int, int]) -> Tensor | None:
    """A captured tensor at the indices themselves, as a view (B|1, H|1, Nq, Nk); None for anything else."""
    names: list[str] = []
    of_node = {node: name for name, node in traced.inputs.items()}
    while operation(node) == "index":
        indices: Any = node.args[1]
        if not all(isinstance(x, Node) and of_node.get(x) in INDICES for x in indices):
            return None
        names = [*(of_node[x] for x in indices), *names]
        node = node.args[0]  # type: ignore[assignment]
    table = traced.constant(node)
    if not isinstance(table, Tensor) or not table.is_floating_point() or table.ndim != len(names):
        return None
    if len(set(names)) != len(names):
        return None
    lengths = dict(zip(INDICES, shape, strict=True))
    if any(n < lengths[name] for n, name in zip(table.shape, names, strict=True)):
        return None
    used = table[tuple(slice(lengths[name]) for name in names)]
    in_order = used.permute([names.index(name) for name in INDICES if name in names])
    return in_order[tuple(slice(None) if name in names else None for name in INDICES)]

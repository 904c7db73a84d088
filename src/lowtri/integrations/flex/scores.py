"""FlexAttention's ``score_mod``: what of it the kernels compute, read off its operations; the rest is applied tile by tile.

Its operations are followed from the result to the score. On the way it may hold

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

Whether a term depends on the distance only is decided from its operations: how its value changes if q and k both grow by one.

What is recognised is compared with the function on sample scores at each call.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from operator import and_
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lowtri.compat.torch_private import mapped_indexing
from lowtri.integrations.flex.masks import function_mask, tensor_function
from lowtri.integrations.function_mask import INDICES, Node, nodes_in, trace
from lowtri.masks.mask import Mask
from lowtri.ops.distance_bias import DistanceBias, distance_bias

_SAMPLES = (-30.0, -2.0, -0.1, 0.0, 0.3, 1.0, 50.0)
_EXACT = 2**24  # integers that float32 holds exactly

Shape = tuple[int, int, int, int]  # B, Hq, Nq, Nk


@dataclass(eq=False)
class Scores:
    """A score_mod, as far as it was recognised.

    Attributes:
        mask: the pairs whose score it does not set to -inf, or None for all.
        factor, softcap, bias: of the scores at these pairs, if ``in_kernel``: softcap * tanh(factor * score / softcap) + bias. The bias
            is (B|1, H|1, Nq|1, Nk|1), or over distances.
        in_kernel: whether mask, factor, softcap and bias are all that it does.
    """

    mask: Mask | None = None
    factor: float = 1.0
    softcap: float | None = None
    bias: Tensor | DistanceBias | None = None
    in_kernel: bool = True


def read_score_mod(
    score_mod: Callable[..., Any] | None, shape: Shape, device: Any, dtype: torch.dtype = torch.float32
) -> Scores:
    """What a score_mod does to the scores of a call; ``dtype`` is that of the scores."""
    if score_mod is None:
        return Scores()
    result = trace(score_mod, device, of_score=True)
    if result is None:
        return Scores(in_kernel=False)
    if "steps" not in result.memo:
        result.memo["steps"] = _Steps(result)
    steps: _Steps = result.memo["steps"]
    scores = Scores(_mask_of(result, steps, shape, device), steps.outer * steps.inner)
    scores.softcap = steps.outer if steps.capped else None
    if not (steps.known and math.isfinite(scores.factor) and 0 < (scores.softcap or 1) < math.inf):
        return Scores(scores.mask, in_kernel=False)
    if steps.terms and (found := _bias_of(steps.terms, shape, device, dtype)) is None:
        return Scores(scores.mask, in_kernel=False)
    scores.bias = found if steps.terms else None
    return scores if _agrees(scores, score_mod, shape, device) else Scores(in_kernel=False)


def _mask_of(result: Node, steps: _Steps, shape: Shape, device: Any) -> Mask | None:
    """The pairs that no condition hides; kept as long as what the conditions capture holds what it held."""
    if not steps.conditions:
        return None
    captured = [node.content() for node, _ in steps.conditions]
    known = result.memo.get("mask")
    if known is not None and known[0] == (shape, captured) and None not in captured:
        kept: Mask = known[1]
        return kept
    masks = [function_mask(node.of_indices, shape, device, node) for node, _ in steps.conditions]
    visible = [~mask if hides else mask for mask, (_, hides) in zip(masks, steps.conditions, strict=True)]
    mask = reduce(and_, visible)
    result.memo["mask"] = (shape, captured), mask
    return mask


def tile_function(score_mod: Callable[..., Any]) -> Callable[[Tensor, tuple[int, int, int, int]], Tensor]:
    """A score_mod as a function of a tile of scores (B, H, n, Nk) and the tile."""
    mapped: Callable[..., Any] = tensor_function("score_mod", score_mod)
    for axis in (4, 3, 2, 1):  # k, q, h, b: the scores are mapped with each of them
        mapped = torch.vmap(mapped, in_dims=(0, *(0 if i == axis else None for i in range(1, 5))))

    def apply(scores: Tensor, tile: tuple[int, int, int, int]) -> Tensor:
        if scores.numel() == 0:
            return scores
        ranges = ((0, scores.shape[0]), (0, scores.shape[1]), tile[:2], tile[2:])
        with mapped_indexing():
            return mapped(scores, *(torch.arange(*each, device=scores.device) for each in ranges))

    return apply


class _Steps:
    """The way from the result to the score: outer * tanh(inner * score) + terms, or inner * score + terms.

    Attributes:
        known: whether the way ends at the score; if not, at an operation that the kernels do not have.
        terms: factors and nodes.  conditions: nodes, and whether they hide where they are true.
    """

    def __init__(self, result: Node) -> None:
        self.outer = self.inner = 1.0
        self.capped = False
        self.terms: list[tuple[float, Node]] = []
        self.conditions: list[tuple[Node, bool]] = []
        node: Node | None = result
        while node is not None and node.name != "score":
            node = self._next(node)
        self.known = node is not None

    def _next(self, node: Node) -> Node | None:
        """Add an operation; its operand that holds the score, or None for an operation that is not recognised."""
        name, args = node.name, node.args
        if name == "where":
            return None if self.capped or self.inner <= 0 else self._shown(node, of_score=True)
        scored = [i for i, x in enumerate(args) if isinstance(x, Node) and "score" in x.reads]
        if node.kwargs or len(scored) != 1:
            return None
        at: int = scored[0]
        other: Any = args[1 - at] if len(args) == 2 else None
        if name == "tanh" and not self.capped:
            self.outer, self.inner = self.inner, 1.0
            self.capped = True
        elif name in ("mul", "div") and type(other) in (int, float):
            if name == "div" and (at == 1 or not other):
                return None
            self.inner *= other if name == "mul" else 1 / other
        elif name in ("add", "sub") and not self.capped and isinstance(other, Node):
            factor = -self.inner if name == "sub" and at == 0 else self.inner
            term = self._shown(other) if factor > 0 and other.name == "where" else None
            if term is None or term.name != "scalar_tensor" or term.args[0] != 0:
                self.terms.append((factor, term or other))
            if name == "sub" and at == 1:
                self.inner = -self.inner
        elif name not in ("alias", "clone"):
            return None
        return args[at]

    def _shown(self, where: Node, of_score: bool = False) -> Node | None:
        """Add the condition of ``where(condition, x, -inf)``, and return x; -inf stays -inf under what is done to it afterwards."""
        condition, *values = where.args
        hidden = [_is_minus_infinity(x) for x in values]
        if len(values) != 2 or hidden.count(True) == 0 or "score" in condition.reads:
            return None
        x = values[1 if hidden[0] else 0]
        if not isinstance(x, Node) or ("score" in x.reads) != of_score:
            return None
        self.conditions.append((condition, hidden[0]))
        return x


def _is_minus_infinity(x: Any) -> bool:
    while getattr(x, "name", "") == "detach":  # as full_like's result is
        x = x.args[0]
    at = {"scalar_tensor": 0, "full": 1, "full_like": 1, "new_full": 2}.get(getattr(x, "name", ""))
    x = x if at is None else x.args[at]
    return isinstance(x, float) and x == -math.inf


def _agrees(recognised: Scores, score_mod: Callable[..., Any], shape: Shape, device: Any) -> bool:
    """Whether what was recognised is the function, on sample scores at the first and at the last pair of indices."""
    ends = [(0, 0, 0, 0), tuple(max(n - 1, 0) for n in shape)]
    expected, sizes = _expected(recognised, ends)
    scores = torch.from_numpy(np.array([_SAMPLES, _SAMPLES])).to(device)
    indices = torch.from_numpy(np.array(ends)).to(device)  # torch.tensor takes four times as long
    function = tensor_function("score_mod", score_mod)
    with torch.no_grad():
        try:  # nearly every function takes many scores and indices; torch.vmap takes ten times as long
            if _are_near(function(scores.clone(), *indices.T[..., None]), expected, sizes):
                return True
        except Exception:  # whatever it is, torch.vmap raises it again unless it gives what single numbers do
            pass
        over_scores = torch.vmap(function, in_dims=(0, None, None, None, None))
        with mapped_indexing():
            return _are_near(torch.vmap(over_scores)(scores, *indices.T), expected, sizes)


Floats = NDArray[np.float64]


def _expected(recognised: Scores, pairs: list[tuple[int, ...]]) -> tuple[Floats, Floats]:
    """What the samples become at each pair (n, samples), and the size of the numbers that cancel where a bias is added (n, 1)."""
    scaled = recognised.factor * np.array(_SAMPLES)
    if recognised.softcap is not None:
        scaled = recognised.softcap * np.tanh(scaled / recognised.softcap)
    expected, sizes = np.empty((len(pairs), len(scaled))), np.zeros((len(pairs), 1))
    expected[:] = scaled
    for i, (b, h, q, k) in enumerate(pairs):
        if recognised.bias is not None:
            added = _bias_at(recognised.bias, b, h, q, k)
            expected[i] += added
            sizes[i] = abs(added) if math.isfinite(added) else 0.0
        if recognised.mask is not None and not recognised.mask.for_row(b, h)(q, k):
            expected[i] = -math.inf
    return expected, sizes


def _bias_at(bias: Tensor | DistanceBias, b: int, h: int, q: int, k: int) -> float:
    numbers: Tensor = bias.along(q - k, 1) if isinstance(bias, DistanceBias) else bias
    place = tuple(index % size for index, size in zip((b, h, q, k), numbers.shape, strict=True))
    return float(numbers.detach()[place])


def _are_near(actual: Tensor, expected: Floats, size: Floats) -> bool:
    if actual.shape != expected.shape:
        return False
    x = actual.double().numpy(force=True)
    with np.errstate(invalid="ignore"):  # of infinite numbers
        near = (x == expected) | (np.abs(x - expected) <= 1e-6 * (size + np.abs(expected)))
    return bool((near | (np.isnan(x) & np.isnan(expected))).all())


# Biases.


def _bias_of(terms: list[tuple[float, Node]], shape: Shape, device: Any, dtype: Any) -> Any:
    """The sum of the terms as a bias; None if it depends on pairs in another way.

    Args:
        shape: B, Hq, Nq, Nk.  dtype: of the bias, that of the scores.
    """
    nq, nk = shape[2:]
    if 0 in shape or max(nq, nk) > _EXACT:
        return None
    reads = frozenset().union(*(node.reads for _, node in terms))
    indices = [range(n if name in reads else 1) for n, name in zip(shape, INDICES, strict=True)]
    if {"q", "k"} <= reads:
        if any(_growth(node) != 0 for _, node in terms):
            single = terms[0][1] if len(terms) == 1 and terms[0][0] == 1 else None
            table = None if single is None else _captured_table(single, shape)
            return None if table is None else table.to(dtype)
        indices[2:] = [range(1 - nk, nq), range(1)]  # of the distances

    ranges = [torch.arange(each.start, each.stop, device=device) for each in indices]
    values = [_at_all(node, ranges) for _, node in terms]  # with gradients of captured tensors
    values = [x if factor == 1 else x * factor for x, (factor, _) in zip(values, terms, strict=True)]
    numbers = sum(values[1:], values[0]).expand([len(each) for each in indices]).to(dtype)
    return distance_bias(numbers[..., 0], 1 - nk) if {"q", "k"} <= reads else numbers


def _at_all(node: Node, ranges: list[Tensor]) -> Tensor:
    """The values of a node at all indices of the ranges, (B|1, H|1, Nq|1, Nk|1)."""
    if (found := node.of_ranges(*ranges)) is not None:
        return found
    mapped: Callable[..., Tensor] = node.of_indices
    for axis in (3, 2, 1, 0):
        mapped = torch.vmap(mapped, in_dims=tuple(0 if i == axis else None for i in range(4)))
    with mapped_indexing():
        return mapped(*ranges)


def _growth(result: Node) -> int | None:
    """By how much the value of a node grows if q and k both grow by one; None if that is not known or not a constant."""
    if "growth" not in result.memo:
        result.memo["growth"] = _found_growth(result)
    known: int | None = result.memo["growth"]
    return known


def _found_growth(result: Node) -> int | None:
    steps: dict[Any, int | None] = {}
    for node in result.needed():
        inputs = [steps[x] for x in nodes_in(node.args)]
        if node.call is None:
            steps[node] = None if node.name == "score" else int(node.name in ("q", "k"))
        elif None in inputs:
            steps[node] = None
        elif not any(inputs):
            steps[node] = 0  # a function of what does not change
        else:
            steps[node] = _grown(node, [steps[x] if isinstance(x, Node) else 0 for x in node.args])
    return steps[result]


def _grown(node: Node, of: list[Any]) -> int | None:
    name = node.name
    if name == "_to_copy":  # exact for indices
        return of[0] if node.kwargs.get("dtype") in (torch.int64, torch.float32, torch.float64) else None
    if node.kwargs:
        return None
    first, second = of[0], of[1] if len(of) > 1 else 0
    if name in ("minimum", "maximum"):
        step = first if first == second else None
    elif name in ("lt", "le", "gt", "ge", "eq", "ne"):
        step = 0 if first == second else None
    elif name == "mul":
        step = next((of[1 - i] * x for i, x in enumerate(node.args) if type(x) is int), None)
    else:
        sums = {"add": first + second, "sub": first - second, "rsub": second - first, "neg": -first, "alias": first}
        step = sums.get(name)
    # Floats that grow with the indices round differently at every index.
    return step if step == 0 or node.dtype == torch.int64 else None


def _captured_table(node: Node, shape: Shape) -> Tensor | None:
    """A captured tensor at the indices themselves, as a view (B|1, H|1, Nq, Nk); None for anything else."""
    names: list[str] = []
    while node.name == "index":
        if not all(isinstance(x, Node) and x.name in INDICES for x in node.args[1]):
            return None
        names = [*(x.name for x in node.args[1]), *names]
        node = node.args[0]
    table, lengths = node.value, dict(zip(INDICES, shape, strict=True))
    if table is None or not table.is_floating_point() or table.ndim != len(names) or len(set(names)) != len(names):
        return None
    if any(n < lengths[name] for n, name in zip(table.shape, names, strict=True)):
        return None
    used: Tensor = table[tuple(slice(lengths[name]) for name in names)]
    in_order = used.permute([names.index(name) for name in INDICES if name in names])
    return in_order[tuple(slice(None) if name in names else None for name in INDICES)]

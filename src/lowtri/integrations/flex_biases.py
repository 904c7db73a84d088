"""Biases in a score_mod: what it adds to the scores, in the form that the kernels read.

A bias is a sum of terms that do not depend on the score. The kernels take it if it is

    a function of q - k, b and h      relative positions, ALiBi, a table of distances: one number for each distance
    a function of q or of k, b and h  one number for each query or each key
    a captured table at [q, k], [h, q, k] or [b, h, q, k]   read where it lies, without a copy

Whether a term depends on the distance only is decided from its graph: how its value changes if q and k both grow by one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from lowtri.compat.torch_private import mapped_indexing
from lowtri.integrations.flex_trace import INDICES, Trace, operation
from lowtri.ops.distance_bias import DistanceBias, distance_bias

__all__ = ["Bias", "Term", "bias_of"]

_EXACT = 2**24  # integers that float32 holds exactly

Term = tuple[float, Node]  # its factor, 1 or another number


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

"""Tile answers of a traced mask_mod: the graph is evaluated on ranges of indices instead of single ones (interval arithmetic).

Each node has a least and a greatest value over a tile; for bools these are 0 and 1. A result that is at least 1 means that every
pair is visible, one that is at most 0 that none is. The bounds may be wider than the values that occur, so the answer may be
PARTIAL without need; EMPTY and FULL are never wrong. Graphs with other operations, or with floats, have no bounds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.fx import Node

from lowtri.integrations.flex_trace import Trace
from lowtri.masks.document_masks import Extremes

__all__ = ["Bounds", "bounds_of"]

_LARGEST = 2**31 - 1  # beyond, integers of 32 bits wrap


class Range(NamedTuple):
    """The least and the greatest value of a node: ints or int64 arrays."""

    low: Any
    high: Any


class _UnknownError(Exception):
    """An operation whose bounds are not known."""


Bounds = Callable[[Range, Range, int, int], "Range | None"]


def bounds_of(trace: Trace | None, node: Node | None = None) -> Bounds | None:
    """The bounds of a node (by default the output) from the ranges of q and k, and from b and h; None if there are none.

    The bounds of a tile are None where an index lies outside of its tensor, or a number is too large.
    """
    if trace is None:
        return None
    program = _Program(trace, trace.output if node is None else node)
    return None if program(Range(0, 0), Range(0, 0), 0, 0) is None else program


class _Program:
    """The nodes that a result depends on, in order; the positions of captured tensors are indexed once."""

    def __init__(self, trace: Trace, output: Node) -> None:
        self.trace, self.output = trace, output
        needed, todo = {output}, [output]
        while todo:
            new = set(todo.pop().all_input_nodes) - needed
            needed |= new
            todo += new
        self.nodes = [node for node in trace.module.graph.nodes if node in needed]
        self.names = {node: name for name, node in trace.inputs.items()}
        self.labels: dict[tuple[Any, ...], Extremes] = {}

    def __call__(self, q: Range, k: Range, b: int, h: int) -> Range | None:
        try:
            return self._result(q, k, b, h)
        except _UnknownError:
            return None

    def _result(self, q: Range, k: Range, b: int, h: int) -> Range:
        inputs = {"q": q, "k": k, "b": Range(b, b), "h": Range(h, h)}
        values: dict[Node, Any] = {}
        for node in self.nodes:
            if node.op == "placeholder":
                if self.names[node] not in inputs:
                    raise _UnknownError
                values[node] = inputs[self.names[node]]
            elif node.op == "get_attr":
                values[node] = self._captured(node)
            else:
                values[node] = _checked(self._operation(node, values))
        result = values[self.output]
        if not isinstance(result, Range):
            raise _UnknownError
        return result

    def _captured(self, node: Node) -> Any:
        tensor = self.trace.constant(node)
        if not isinstance(tensor, torch.Tensor) or tensor.dtype not in (torch.bool, torch.int32, torch.int64):
            raise _UnknownError  # floats round, and smaller integers wrap
        if tensor.ndim:
            return tensor
        return Range(int(tensor), int(tensor))

    def _operation(self, node: Node, values: dict[Node, Any]) -> Range:
        name = str(node.target).removeprefix("aten.").split(".")[0]
        arguments = [_value(x, values) for x in node.args]
        if name == "index":
            return self._index(node, arguments)
        if name in ("new_zeros", "new_ones", "zeros", "ones"):
            number = int(name.endswith("ones"))
            return Range(number, number)
        if name in ("scalar_tensor", "_to_copy", "alias", "clone", "detach", "lift_fresh_copy"):
            if node.kwargs.get("dtype") not in (None, torch.int32, torch.int64) or not isinstance(arguments[0], Range):
                raise _UnknownError
            return arguments[0]
        if name == "div" and node.kwargs.get("rounding_mode") == "floor":
            name = "floor_divide"
        elif node.kwargs:
            raise _UnknownError
        if name == "bitwise_not" and not _gives_bools(node.all_input_nodes[0]):
            raise _UnknownError
        if name in ("add", "sub", "neg") and _gives_bools(node):  # True + True is True
            raise _UnknownError
        if name not in _OPERATIONS or not all(isinstance(x, Range) for x in arguments):
            raise _UnknownError
        return _OPERATIONS[name](*arguments)

    def _index(self, node: Node, arguments: list[Any]) -> Range:
        """A captured tensor at indices of which at most one varies."""
        tensor, indices = arguments
        if not isinstance(tensor, torch.Tensor) or tensor.ndim != len(indices):
            raise _UnknownError
        varying = [i for i, x in enumerate(indices) if not (isinstance(x, Range) and x.low is x.high)]
        fixed: list[Any] = []
        for i, x in enumerate(indices):
            if (
                not isinstance(x, Range)
                or np.any(np.asarray(x.low) < 0)
                or np.any(np.asarray(x.high) >= tensor.shape[i])
            ):
                raise _UnknownError
            fixed.append(slice(None) if i in varying else int(x.low) if np.ndim(x.low) == 0 else None)
        if len(varying) > 1 or None in fixed:
            raise _UnknownError
        if not varying:
            value = int(tensor[tuple(fixed)])
            return Range(value, value)
        key = (node, *(None if isinstance(x, slice) else x for x in fixed))
        if key not in self.labels:
            self.labels[key] = Extremes(tensor[tuple(fixed)].detach().cpu().numpy().astype(np.int64))
        place = indices[varying[0]]
        return Range(*self.labels[key](place.low, place.high + 1))


def _gives_bools(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dtype == torch.bool


def _value(x: Any, values: dict[Node, Any]) -> Any:
    if isinstance(x, Node):
        return values[x]
    if isinstance(x, (list, tuple)):
        return [_value(one, values) for one in x]
    if isinstance(x, int):  # bools too
        return Range(int(x), int(x))
    return x


def _checked(value: Range) -> Range:
    if np.any(np.abs(value.low) > _LARGEST) or np.any(np.abs(value.high) > _LARGEST):
        raise _UnknownError
    return value


def _multiply(x: Range, y: Range) -> Range:
    corners = [x.low * y.low, x.low * y.high, x.high * y.low, x.high * y.high]
    return Range(np.minimum.reduce(np.broadcast_arrays(*corners)), np.maximum.reduce(np.broadcast_arrays(*corners)))


def _divisor(y: Range) -> int:
    if np.ndim(y.low) or np.ndim(y.high) or y.low != y.high or y.low <= 0:
        raise _UnknownError
    return int(y.low)


def _floor_divide(x: Range, y: Range) -> Range:
    n = _divisor(y)
    return Range(x.low // n, x.high // n)


def _remainder(x: Range, y: Range) -> Range:
    n = _divisor(y)
    same = x.low // n == x.high // n
    return Range(np.where(same, x.low % n, 0), np.where(same, x.high % n, n - 1))


def _absolute(x: Range) -> Range:
    least = np.where((x.low <= 0) & (x.high >= 0), 0, np.minimum(np.abs(x.low), np.abs(x.high)))
    return Range(least, np.maximum(np.abs(x.low), np.abs(x.high)))


def _truth(always: Any, never: Any) -> Range:
    return Range(np.asarray(always).astype(np.int64), 1 - np.asarray(never).astype(np.int64))


def _less(x: Range, y: Range) -> Range:
    return _truth(x.high < y.low, x.low >= y.high)


def _less_equal(x: Range, y: Range) -> Range:
    return _truth(x.high <= y.low, x.low > y.high)


def _equal(x: Range, y: Range) -> Range:
    same = (x.low == x.high) & (y.low == y.high) & (x.low == y.low)
    return _truth(same, (x.high < y.low) | (y.high < x.low))


def _not(x: Range) -> Range:
    return Range(1 - x.high, 1 - x.low)


def _smaller(x: Range, y: Range) -> Range:
    return Range(np.minimum(x.low, y.low), np.minimum(x.high, y.high))


def _greater(x: Range, y: Range) -> Range:
    return Range(np.maximum(x.low, y.low), np.maximum(x.high, y.high))


def _is_bool(x: Range) -> Range:
    if np.any(x.low < 0) or np.any(x.high > 1):
        raise _UnknownError
    return x


def _where(condition: Range, x: Range, y: Range) -> Range:
    low = np.where(condition.low >= 1, x.low, np.where(condition.high <= 0, y.low, np.minimum(x.low, y.low)))
    high = np.where(condition.low >= 1, x.high, np.where(condition.high <= 0, y.high, np.maximum(x.high, y.high)))
    return Range(low, high)


_OPERATIONS: dict[str, Callable[..., Range]] = {
    "add": lambda x, y: Range(x.low + y.low, x.high + y.high),
    "sub": lambda x, y: Range(x.low - y.high, x.high - y.low),
    "rsub": lambda x, y: Range(y.low - x.high, y.high - x.low),
    "neg": lambda x: Range(-x.high, -x.low),
    "mul": _multiply,
    "abs": _absolute,
    "floor_divide": _floor_divide,
    "remainder": _remainder,
    "minimum": _smaller,
    "maximum": _greater,
    "lt": _less,
    "le": _less_equal,
    "gt": lambda x, y: _less(y, x),
    "ge": lambda x, y: _less_equal(y, x),
    "eq": _equal,
    "ne": lambda x, y: _not(_equal(x, y)),
    "where": _where,
    # Of bools only: on other integers these work on bits.
    "bitwise_and": lambda x, y: _smaller(_is_bool(x), _is_bool(y)),
    "bitwise_or": lambda x, y: _greater(_is_bool(x), _is_bool(y)),
    "bitwise_not": lambda x: _not(_is_bool(x)),
    "logical_and": lambda x, y: _smaller(_is_bool(x), _is_bool(y)),
    "logical_or": lambda x, y: _greater(_is_bool(x), _is_bool(y)),
    "logical_not": lambda x: _not(_is_bool(x)),
}

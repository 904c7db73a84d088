"""Mask functions of other libraries, ``fn(b, h, q, k)`` with True = may see, as masks with tile answers.

A function is traced to a graph of torch operations; nothing is inferred from names or source code. Evaluated on ranges of indices
instead of single ones (interval arithmetic), the graph gives each node a least and a greatest value over a tile; for bools these are
0 and 1. A result that is at least 1 means that every pair is visible, one that is at most 0 that none is. The bounds may be wider than
the values that occur, so the answer may be PARTIAL without need; EMPTY and FULL are never wrong. Functions that cannot be traced, and
graphs with other operations or with floats, have no bounds: they are evaluated pair by pair, in the tiles that no other mask decides.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch.fx import GraphModule, Node

from lowtri.compat.torch_private import mapped_indexing, version_of
from lowtri.masks.label_masks import RangeMinMax
from lowtri.masks.mask import Mask
from lowtri.masks.tile import EMPTY, FULL, PARTIAL, Answer, Interval, Positions, Truth, ascending

INDICES = ("b", "h", "q", "k")

_PAIRS_AT_ONCE = 2**20  # evaluated in one call: 8 MB for each of the two indices
_LARGEST = 2**31 - 1  # beyond, integers of 32 bits wrap


@dataclass(frozen=True, eq=False, repr=False)
class FunctionMask(Mask):
    """A function as a mask. Equal only to itself: tensors that it captures may change between two masks.

    Attributes:
        fn: what is named in texts.
        evaluate: ``(b, h, q, k)``, tensors, to the visible pairs; q and k are vectors, b and h numbers.
        device: where it is evaluated.
        bounds: gives the bounds when they are first needed.
        batch: the batch rows and heads that it is defined for; ``()`` where it is the same in all of them.
        size: Nq and Nk, the indices that may be used, None for all.
        known: ``(b, h, q0, q1, k0, k1)`` to answers of tiles that come before those of the function; None for none.
        b, h: the batch row and the head of an unbatched mask.
    """

    fn: Callable[..., Any]
    evaluate: Callable[..., torch.Tensor]
    device: Any
    bounds: Callable[[], Bounds | None]
    batch: tuple[int, ...] = ()
    size: tuple[int, int] | None = None
    known: Callable[..., Answer] | None = None
    b: int = 0
    h: int = 0

    def _at(self, b: int, h: int) -> Mask:
        return replace(self, batch=(), b=b, h=h)

    def _of_tile(self, q: Interval, k: Interval) -> Truth:
        if self.size is not None:  # positions past the last index do not occur in a call
            q, k = (ascending(partial(np.minimum, n - 1), x) for x, n in zip((q, k), self.size, strict=True))
        every: Any = False
        some: Any = True
        # Without sizes, the function is traced only where evaluating the pairs takes longer than that.
        pairs = np.sum(np.multiply(q.high - q.low + 1, k.high - k.low + 1, dtype=float))
        if (self.size is not None or pairs >= _PAIRS_AT_ONCE) and (bounds := self.bounds()) is not None:
            result = bounds(q, k, self.b, self.h)
            if result is not None:
                every, some = result.low >= 1, result.high >= 1
        if self.known is not None:
            known = self.known(self.b, self.h, q.low, q.high + 1, k.low, k.high + 1)
            every, some = (known == FULL) | ((known == PARTIAL) & every), (known != EMPTY) & some | (known == FULL)
        return Truth(every, some)

    def _sees(self, q: Positions, k: Positions) -> Any:
        if isinstance(q, Interval):
            return self._of_tile(q, k)
        shape = np.broadcast_shapes(np.shape(q), np.shape(k))
        limits = (None, None) if self.size is None else (self.size[0] - 1, self.size[1] - 1)
        # The result at position -1 is not used, but an index must lie inside.
        q, k = (np.clip(np.broadcast_to(x, shape).ravel(), 0, n) for x, n in zip((q, k), limits, strict=True))
        b, h = (torch.tensor(i, device=self.device) for i in (self.b, self.h))
        visible = np.empty(len(q), bool)
        for start in range(0, len(q), _PAIRS_AT_ONCE):
            chunk = slice(start, start + _PAIRS_AT_ONCE)
            indices = (torch.from_numpy(np.ascontiguousarray(x[chunk])).to(self.device) for x in (q, k))
            visible[chunk] = self.evaluate(b, h, *indices).detach().to("cpu", torch.bool).numpy()
        if self.known is not None:
            known = self.known(self.b, self.h, q, q + 1, k, k + 1)
            visible = np.where(known == PARTIAL, visible, known == FULL)
        return visible.reshape(shape) if shape else bool(visible[0])

    def __repr__(self) -> str:
        return f"function(<{getattr(self.fn, '__qualname__', type(self.fn).__name__)}>)"


# Graphs of functions.


@dataclass(frozen=True, eq=False)
class Trace:
    """A traced function.

    Attributes:
        module: the graph; captured tensors are its attributes, the same objects as the function's.
        inputs: the node of each input, by name: ``score`` (of a score_mod), ``b``, ``h``, ``q``, ``k``.
        output: the node of the result.
        kept: whatever is worked out from the trace, and should live as long.
    """

    module: GraphModule
    inputs: dict[str, Node]
    output: Node
    kept: dict[Any, Any] = field(default_factory=dict)

    def depends_on(self, node: Node, name: str) -> bool:
        """Whether the value of a node depends on an input."""
        return self.inputs[name] in _sources(node, lambda one: operation(one) not in _LIKE)

    def versions(self) -> tuple[int | None, ...]:
        """Numbers that change when a captured tensor is changed in place."""
        captured = (self.constant(node) for node in self.module.graph.nodes)
        return tuple(version_of(x) for x in captured if isinstance(x, torch.Tensor))

    def constant(self, node: Any) -> Any:
        """The captured tensor of a node, or None."""
        is_captured = isinstance(node, Node) and node.op == "get_attr"
        return getattr(self.module, str(node.target)) if is_captured else None

    def function_of(self, node: Node) -> Callable[..., Any]:
        """The value of a node that does not depend on the score, as a function of b, h, q and k."""
        if node not in self.kept:
            module = GraphModule(self.module, deepcopy(self.module.graph))  # the same tensors
            nodes = {one.name: one for one in module.graph.nodes}
            next(one for one in module.graph.nodes if one.op == "output").args = (nodes[node.name],)
            module.graph.eliminate_dead_code()
            module.recompile()
            self.kept[node] = lambda b, h, q, k: module(q.new_zeros((), dtype=torch.float32), b, h, q, k)
        function: Callable[..., Any] = self.kept[node]
        return function


_LIKE = {
    "new_zeros",
    "new_ones",
    "new_full",
    "zeros_like",
    "ones_like",
}  # take the dtype and device of their input alone


def _sources(node: Node, enter: Callable[[Node], bool] = lambda node: True) -> set[Node]:
    """A node and all nodes that its value comes from, through those that ``enter`` accepts."""
    nodes, todo = {node}, [node]
    while todo:
        current = todo.pop()
        new = set(current.all_input_nodes) - nodes if enter(current) else set()
        nodes |= new
        todo += new
    return nodes


def operation(node: Any) -> str:
    """The name of a node's operation without its overload, as ``add``; empty for numbers."""
    return str(node.target).removeprefix("aten.").split(".")[0] if isinstance(node, Node) else ""


# function -> (what it read when it was traced, its trace)
_TRACES: weakref.WeakKeyDictionary[Any, tuple[list[Any], Trace | None]] = weakref.WeakKeyDictionary()


def trace(function: Callable[..., Any], device: Any, *, of_score: bool) -> Trace | None:
    """The trace of a mask function or, with ``of_score``, of a score_mod; None where it cannot be traced.

    It is kept while the function lives and every variable that it reads is bound to the same object.
    """
    environment: list[Any] = [str(device), of_score]
    for value in _variables(function):
        if value is function:
            continue  # what is kept must not keep the function alive
        if not isinstance(value, _VALUES) or (isinstance(value, ModuleType) and value.__name__ not in _MODULES):
            return _traced(function, device, of_score)  # whether it has changed since would not show
        environment.append(value)
    kept = _TRACES.get(function)
    if kept is None or not _same_objects(kept[0], environment):
        kept = _TRACES[function] = environment, _traced(function, device, of_score)
    return kept[1]


_VALUES = (int, float, str, torch.Tensor, FunctionType, BuiltinFunctionType, ModuleType, type(None))
_MODULES = ("torch", "torch.nn.functional", "math", "numpy", "operator")  # other modules may hold settings that change


def _same_objects(old: list[Any], new: list[Any]) -> bool:
    return len(old) == len(new) and all(
        x is y or (isinstance(x, (int, float, str)) and type(x) is type(y) and x == y)
        for x, y in zip(old, new, strict=True)
    )


def _variables(function: Any, seen: frozenset[int] = frozenset()) -> Iterator[Any]:
    """What a function reads from outside: its closure, its defaults, its globals, and the same of the functions among these."""
    if not isinstance(function, FunctionType) or len(seen) > 8:
        yield function if id(function) not in seen else None
        return
    cells = [cell.cell_contents for cell in function.__closure__ or () if cell != CellType()]
    names = [name for name in _names(function.__code__) if name in function.__globals__]
    for value in (*cells, *(function.__defaults__ or ()), *(function.__globals__[name] for name in names)):
        yield value
        if isinstance(value, FunctionType) and id(value) not in seen:
            yield from _variables(value, seen | {id(function)})


def _names(code: CodeType) -> Iterator[str]:
    """The names that code reads, also in the functions that it defines."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _traced(function: Callable[..., Any], device: Any, of_score: bool) -> Trace | None:
    from torch.fx.experimental.proxy_tensor import make_fx

    names = ("score", *INDICES) if of_score else INDICES
    # A score without gradient: one with it would add detach operations to the graph.
    kinds = [torch.float32 if name == "score" else torch.int64 for name in names]
    examples = [torch.zeros((), dtype=kind, device=device) for kind in kinds]
    try:
        with mapped_indexing():
            module = make_fx(function)(*examples)
    except Exception:  # whatever the function does that a trace cannot follow: it is evaluated instead
        return None
    nodes = list(module.graph.nodes)
    inputs = [node for node in nodes if node.op == "placeholder"]
    output = nodes[-1].args[0]
    if len(inputs) != len(names) or not isinstance(output, Node):
        return None
    return Trace(module, dict(zip(names, inputs, strict=True)), output)


# Interval arithmetic.


class _UnknownError(Exception):
    """An operation whose bounds are not known."""


Bounds = Callable[[Interval, Interval, int, int], "Interval | None"]


def bounds_of(traced: Trace | None, node: Node | None = None) -> Bounds | None:
    """The bounds of a node (by default the output) from the ranges of q and k, and from b and h; None if there are none.

    The bounds of a tile are None where an index lies outside of its tensor, or a number is too large.
    """
    if traced is None:
        return None
    program = _Program(traced, traced.output if node is None else node)
    return None if program(Interval(0, 0), Interval(0, 0), 0, 0) is None else program


class _Program:
    """The nodes that a result depends on, in order; ranges of captured tensors are prepared once."""

    def __init__(self, traced: Trace, output: Node) -> None:
        needed = _sources(output)
        self.trace, self.output = traced, output
        self.nodes = [node for node in traced.module.graph.nodes if node in needed]
        self.names = {node: name for name, node in traced.inputs.items()}
        self.extremes: dict[tuple[Any, ...], RangeMinMax] = {}

    def __call__(self, q: Interval, k: Interval, b: int, h: int) -> Interval | None:
        if np.any(q.high > _LARGEST) or np.any(k.high > _LARGEST):
            return None
        values: dict[Any, Any] = {"q": q, "k": k, "b": Interval(b, b), "h": Interval(h, h)}
        try:
            for node in self.nodes:
                if node.op == "placeholder":
                    values[node] = _known(values.get(self.names[node]))
                elif node.op == "get_attr":
                    values[node] = self._captured(node)
                else:
                    values[node] = result = self._operation(node, values)
                    if np.any(np.abs(result.low) > _LARGEST) or np.any(np.abs(result.high) > _LARGEST):
                        return None
            return _known(values[self.output])
        except _UnknownError:
            return None

    def _captured(self, node: Node) -> Any:
        tensor = self.trace.constant(node)
        if not isinstance(tensor, torch.Tensor) or tensor.dtype not in (torch.bool, torch.int32, torch.int64):
            raise _UnknownError  # floats round, and smaller integers wrap
        return tensor if tensor.ndim else Interval(int(tensor), int(tensor))

    def _operation(self, node: Node, values: dict[Any, Any]) -> Interval:
        name, arguments = operation(node), [_value(x, values) for x in node.args]
        if name == "index":
            return self._index(node, *arguments)
        if name in ("new_zeros", "new_ones", "zeros", "ones"):
            number = int(name.endswith("ones"))
            return Interval(number, number)
        if name in ("scalar_tensor", "_to_copy", "alias", "clone", "detach", "lift_fresh_copy"):
            if node.kwargs.get("dtype") not in (None, torch.int32, torch.int64):
                raise _UnknownError
            return _known(arguments[0])
        if name == "div" and node.kwargs.get("rounding_mode") == "floor":
            name = "floor_divide"
        elif node.kwargs:
            raise _UnknownError
        if name == "bitwise_not" and not _gives_bools(node.all_input_nodes[0]):
            raise _UnknownError
        if name in ("add", "sub", "neg") and _gives_bools(node):  # True + True is True
            raise _UnknownError
        if name not in _OPERATIONS:
            raise _UnknownError
        return _OPERATIONS[name](*map(_known, arguments))

    def _index(self, node: Node, tensor: Any, indices: list[Any]) -> Interval:
        """A captured tensor at indices of which at most one varies."""
        if not isinstance(tensor, torch.Tensor) or tensor.ndim != len(indices):
            raise _UnknownError
        fixed: list[Any] = []
        for i, x in enumerate(map(_known, indices)):
            if np.any(np.asarray(x.low) < 0) or np.any(np.asarray(x.high) >= tensor.shape[i]):
                raise _UnknownError
            if x.low is x.high and np.ndim(x.low):
                raise _UnknownError
            fixed.append(int(x.low) if x.low is x.high else slice(None))
        if fixed.count(slice(None)) > 1:
            raise _UnknownError
        if slice(None) not in fixed:
            value = int(tensor[tuple(fixed)])
            return Interval(value, value)
        at = fixed.index(slice(None))
        key = (node, *fixed[:at], None, *fixed[at + 1 :])
        if key not in self.extremes:
            self.extremes[key] = RangeMinMax(tensor[tuple(fixed)].detach().cpu().numpy().astype(np.int64))
        extremes: Interval = self.extremes[key][indices[at]]
        return extremes


def _gives_bools(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dtype == torch.bool


def _value(x: Any, values: dict[Any, Any]) -> Any:
    if isinstance(x, Node):
        return values[x]
    if isinstance(x, (list, tuple)):
        return [_value(one, values) for one in x]
    return Interval(int(x), int(x)) if isinstance(x, int) else x  # bools too


def _known(x: Any) -> Interval:
    if not isinstance(x, Interval):
        raise _UnknownError
    return x


def _from_corners(operate: Any, x: Interval, y: Interval) -> Interval:
    """The range of a function of two numbers that is monotonic in each of them."""
    corners = np.broadcast_arrays(*(operate(a, b) for a in (x.low, x.high) for b in (y.low, y.high)))
    return Interval(np.minimum.reduce(corners), np.maximum.reduce(corners))


def _divisor(y: Interval) -> int:
    if np.ndim(y.low) or np.ndim(y.high) or y.low != y.high or y.low <= 0:
        raise _UnknownError
    return int(y.low)


def _absolute(x: Interval) -> Interval:
    least = np.where((x.low <= 0) & (x.high >= 0), 0, np.minimum(np.abs(x.low), np.abs(x.high)))
    return Interval(least, np.maximum(np.abs(x.low), np.abs(x.high)))


def _minimum(x: Interval, y: Interval) -> Interval:
    return Interval(np.minimum(x.low, y.low), np.minimum(x.high, y.high))


def _maximum(x: Interval, y: Interval) -> Interval:
    return Interval(np.maximum(x.low, y.low), np.maximum(x.high, y.high))


def _bools(x: Interval) -> Interval:
    if np.any(x.low < 0) or np.any(x.high > 1):
        raise _UnknownError
    return x


def _where(condition: Interval, x: Interval, y: Interval) -> Interval:
    low = np.where(condition.low >= 1, x.low, np.where(condition.high <= 0, y.low, np.minimum(x.low, y.low)))
    high = np.where(condition.low >= 1, x.high, np.where(condition.high <= 0, y.high, np.maximum(x.high, y.high)))
    return Interval(low, high)


def _number(compare: Callable[[Interval, Interval], Any]) -> Callable[[Interval, Interval], Interval]:
    """A comparison whose results are numbers, 0 and 1: torch computes with bools as with numbers."""

    def compared(x: Interval, y: Interval) -> Interval:
        truth = compare(x, y)
        return Interval(truth.every + 0, truth.some + 0)

    return compared


_OPERATIONS: dict[str, Callable[..., Interval]] = {
    "add": operator.add,
    "sub": operator.sub,
    "rsub": lambda x, y: y - x,
    "neg": lambda x: 0 - x,
    "mul": lambda x, y: _from_corners(np.multiply, x, y),
    "abs": _absolute,
    "floor_divide": lambda x, y: x // _divisor(y),
    "remainder": lambda x, y: x % _divisor(y),
    "minimum": _minimum,
    "maximum": _maximum,
    **{name: _number(getattr(operator, name)) for name in ("lt", "le", "gt", "ge", "eq", "ne")},
    "where": _where,
    # Of bools only: on other integers these work on bits.
    **dict.fromkeys(("bitwise_and", "logical_and"), lambda x, y: _minimum(_bools(x), _bools(y))),
    **dict.fromkeys(("bitwise_or", "logical_or"), lambda x, y: _maximum(_bools(x), _bools(y))),
    **dict.fromkeys(("bitwise_not", "logical_not"), lambda x: 1 - _bools(x)),
}

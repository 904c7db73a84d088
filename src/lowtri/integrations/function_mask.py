"""Mask functions of other libraries, ``fn(b, h, q, k)`` with True = may see, as masks with tile answers.

A function is traced to the operations of torch that it runs; nothing is inferred from names or source code. Evaluated on ranges of
indices (:class:`~lowtri.masks.tile.Interval`), they decide tiles. Functions that cannot be traced, and other operations or floats,
leave a tile PARTIAL: the function is evaluated pair by pair there. Masks whose functions run the same operations on the same numbers
are equal; those that read arrays are equal to themselves only, since arrays that share memory may change unnoticed.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lowtri.compat.torch_private import TorchDispatchMode, operation_name, outside_graph
from lowtri.integrations.content import content_of
from lowtri.masks.label_masks import RangeMinMax
from lowtri.masks.mask import Mask
from lowtri.masks.tile import POSITION_MAX, Index, Interval, Truth, within

INDICES = ("b", "h", "q", "k")

_PAIRS_AT_ONCE = 2**20  # evaluated in one call: 8 MB for each of the two indices
_LARGEST = 2**31 - 1  # beyond, integers of 32 bits wrap


@dataclass(frozen=True, repr=False)
class FunctionMask(Mask):
    """A function as a mask.

    Attributes:
        key: equal for masks that see the same pairs.
        fn: what is named in texts.
        evaluate: ``(b, h, q, k)``, tensors, to the visible pairs; q and k are vectors, b and h numbers.
        device: where it is evaluated.
        traced: the trace and the node that decides tiles; None for none.
        batch: the batch rows and heads that it is defined for; ``()`` where it is the same in all of them.
        size: Nq and Nk, the indices that may be used.
        b, h: the batch row and the head of an unbatched mask.
        memo: what was worked out for tiles.
    """

    key: Any
    fn: Callable[..., Any] = field(compare=False)
    evaluate: Callable[..., Tensor] = field(compare=False)
    device: Any
    traced: Node | None = field(compare=False)
    batch: tuple[int, ...] = ()
    size: tuple[int, int] = (POSITION_MAX, POSITION_MAX)
    b: int = 0
    h: int = 0
    memo: dict[Any, Any] = field(default_factory=dict, compare=False)

    def _for_row(self, b: int, h: int) -> Mask:
        return replace(self, batch=(), b=b, h=h)

    def _sees(self, q: Index, k: Index) -> Any:
        shape = () if isinstance(q, Interval) else np.broadcast_shapes(np.shape(q), np.shape(k))
        # The result at position -1 is not used, and positions past the last index do not occur; but an index must lie inside.
        q = within(q, self.size[0])
        k = within(k, self.size[1])
        if isinstance(q, Interval):
            return bounds_of(self.traced, q, k, self.b, self.h, self.memo) if self.traced else Truth(False, True)
        q = torch.from_numpy(np.broadcast_to(q, shape).flatten())
        k = torch.from_numpy(np.broadcast_to(k, shape).flatten())
        b = torch.tensor(self.b, device=self.device)
        h = torch.tensor(self.h, device=self.device)
        visible = np.empty(len(q), bool)
        for start in range(0, len(q), _PAIRS_AT_ONCE):
            chunk = slice(start, start + _PAIRS_AT_ONCE)
            result = self.evaluate(b, h, q[chunk].to(self.device), k[chunk].to(self.device))
            visible[chunk] = result.detach().to("cpu", torch.bool).numpy()
        return visible.reshape(shape) if shape else bool(visible[0])

    def __repr__(self) -> str:
        return f"function(<{getattr(self.fn, '__qualname__', type(self.fn).__name__)}>)"


# Traces.


@dataclass(eq=False)
class Node:
    """A value in a traced function: an input, a captured tensor, or the result of an operation.

    Attributes:
        name: of the input or of the operation without its overload, as ``add``; empty for a captured tensor.
        dtype: of the value.  device: where it is.
        reads: the inputs on which the value depends.
        key: of an input or a captured number: equal for equal values; None for a captured array.
        call, args, kwargs: the operation.
        value: the captured tensor.
        before: all nodes up to this one, in order.
        memo: what was worked out from it.
    """

    name: str
    dtype: torch.dtype
    device: torch.device
    before: list[Node]
    reads: frozenset[str] = frozenset()
    key: Any = None
    call: Any = None
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    value: Any = None
    memo: dict[Any, Any] = field(default_factory=dict)

    def needed(self) -> list[Node]:
        """This node and all that its value comes from, in order; a trace that is complete does not change."""
        if "needed" not in self.memo:
            nodes = {self}
            for node in reversed(self.before):
                if node in nodes:
                    nodes.update(nodes_in((*node.args, *node.kwargs.values())))
            self.memo["needed"] = [node for node in self.before if node in nodes]
        needed: list[Node] = self.memo["needed"]
        return needed

    def content(self) -> tuple[Hashable | None, ...] | None:
        """What is in the arrays that the value comes from, as they are now; None if one cannot be read."""
        contents = tuple(content_of(node.value) for node in self.needed() if node.value is not None)
        return None if None in contents else contents

    def program(self, by_identity: bool = False) -> tuple[Any, ...]:
        """Equal for nodes with equal values, whatever the indices.

        An array equals nothing else or, by identity, itself, whatever it holds (:meth:`content`).
        """
        number = {node: i for i, node in enumerate(self.needed())}

        def key(node: Node) -> Any:
            if node.call is None:
                return node.key or (id(node.value) if by_identity else object())
            arguments = _mapped((node.args, *node.kwargs.items()), Node, lambda x: (None, number[x]))
            return node.call, node.dtype, arguments

        return tuple(map(key, number))

    def at(self, **inputs: Tensor) -> Tensor:
        """The value, from the values of the inputs that it reads."""
        values: dict[Node, Any] = {}
        for node in self.needed():
            if node.call is None:
                like = torch.zeros((), dtype=node.dtype, device=node.device)  # of inputs that are not read
                values[node] = inputs.get(node.name, like) if node.value is None else node.value
            else:
                args, kwargs = _mapped((node.args, node.kwargs), Node, values.__getitem__)
                values[node] = node.call(*args, **kwargs)
        result: Tensor = values[self]
        return result

    def of_indices(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return self.at(b=b, h=h, q=q, k=k)

    def of_ranges(self, *ranges: Tensor) -> Tensor | None:
        """The values at all of these b, h, q and k, (B|1, H|1, Nq|1, Nk|1), by broadcasting; torch.vmap takes ten times as long.

        None where an operation does more than to compute one number from single numbers.
        """
        values: dict[Node, Any] = {}
        for node in self.needed():
            if node.call is None and node.value is None:
                axis = INDICES.index(node.name)
                values[node] = ranges[axis].reshape([-1 if i == axis else 1 for i in range(4)])
            elif node.call is None:
                values[node] = node.value if node.value.ndim else node.value.reshape(1, 1, 1, 1)
            elif not node.is_of_numbers():
                return None
            else:
                args, kwargs = _mapped((node.args, node.kwargs), Node, values.__getitem__)
                result = node.call(*args, **kwargs)
                values[node] = result if result.ndim else result.reshape(1, 1, 1, 1)  # else its dtype would not count
        result = values[self]
        return result if result.ndim == 4 else None

    def is_of_numbers(self) -> bool:
        """Whether the operation computes one number from single numbers: a captured array is indexed in all of its dimensions."""
        if "is_of_numbers" not in self.memo:
            self.memo["is_of_numbers"] = self._is_of_numbers()
        known: bool = self.memo["is_of_numbers"]
        return known

    def _is_of_numbers(self) -> bool:
        inputs = nodes_in((*self.args, *self.kwargs.values()))
        if self.name == "index":
            table, *indices = inputs
            return (
                table.value is not None
                and table.value.ndim == len(self.args[1]) == len(indices)
                and _are_single(indices)
            )
        return (torch.Tag.pointwise in self.call.tags or self.name in _AS_THEY_ARE) and _are_single(inputs)


_AS_THEY_ARE = ("_to_copy", "alias", "clone", "detach", "scalar_tensor")  # which torch does not tag as pointwise


def _are_single(nodes: list[Node]) -> bool:
    return all(node.value is None or node.value.ndim == 0 for node in nodes)


def nodes_in(x: tuple[Any, ...]) -> list[Node]:
    """The nodes in nested arguments."""
    return [
        node for one in x for node in (nodes_in(one) if isinstance(one, tuple) else (one,)) if isinstance(node, Node)
    ]


def _mapped(x: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """Nested arguments with those of a kind changed."""
    if isinstance(x, dict):
        return {name: _mapped(one, kind, change) for name, one in x.items()}
    if isinstance(x, (list, tuple)):
        return tuple(_mapped(one, kind, change) for one in x)
    return change(x) if isinstance(x, kind) else x


@outside_graph
def trace(function: Callable[..., Any], device: Any, *, of_score: bool = False) -> Node | None:
    """The result of a mask function or, with ``of_score``, of a score_mod; None where it cannot be traced.

    It is kept while the function lives and reads the same tensors and equal numbers: that is seen without calling the function, or from
    its trace. The trace holds larger tensors themselves, so what they hold may change.
    """
    settings = (str(device), of_score, torch.get_default_dtype())
    reads = _environment(function, ())
    reads = None if reads is None else [*reads, *settings]
    keeps = isinstance(function, Hashable)
    known = _TRACES.get(function) if keeps else None
    if known is not None and reads is not None and _same(known[0], reads):
        return known[1]
    traced = _traced(function, device, of_score)
    program = None if traced is None else (settings, traced.program(by_identity=True))
    if known is not None and traced is not None and known[2] == program:
        traced = known[1]
    if keeps:
        _TRACES[function] = reads, traced, program
    return traced


def _traced(function: Callable[..., Any], device: Any, of_score: bool) -> Node | None:
    recorder = _Recorder()
    inputs = {name: torch.zeros((), dtype=torch.int64, device=device) for name in INDICES}
    if of_score:
        inputs = {"score": torch.zeros((), device=device), **inputs}
    for name, x in inputs.items():
        recorder.add(x, name, reads=frozenset([name]), key=name)
    try:
        with torch.no_grad(), recorder, _Indexing():
            result = function(*inputs.values())
    except Exception:  # whatever the function does that a trace cannot follow: it is evaluated instead
        return None
    return recorder.nodes.get(id(result))


# function -> (what it read when it was traced, if that can be seen; its trace; the program of that)
_TRACES: weakref.WeakKeyDictionary[Any, tuple[list[Any] | None, Node | None, Any]] = weakref.WeakKeyDictionary()
_SMALL = 64  # numbers: a trace may hold those of such a tensor, and not the tensor
_MODULES = ("torch", "torch.nn.functional", "math", "numpy", "operator")  # other modules may hold settings that change


def _environment(function: Any, inside: tuple[Any, ...]) -> list[Any] | None:
    """What a function and those it calls read from outside; None where a change of that would not show, as in a list."""
    if len(inside) > 8 or not isinstance(function, (FunctionType, partial)):
        return None
    if isinstance(function, partial):
        return _seen((function.func, *function.args, *function.keywords.values()), function, inside)
    cells = [cell.cell_contents for cell in function.__closure__ or () if cell != CellType()]
    defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    names = [name for name in _names(function.__code__) if name in function.__globals__]
    return _seen((*cells, *defaults, *(function.__globals__[name] for name in names)), function, inside)


def _seen(values: tuple[Any, ...], function: Any, inside: tuple[Any, ...]) -> list[Any] | None:
    environment: list[Any] = []
    for value in values:
        if value is function or any(value is one for one in inside[:1]):
            continue  # what is kept must not keep the function alive
        more: list[Any] | None = []
        if isinstance(value, Tensor):
            more = [tuple(value.shape), *([content_of(value)] if value.numel() <= _SMALL else [])]
        elif isinstance(value, (FunctionType, partial)):
            more = [] if value in inside else _environment(value, (*inside, function))  # functions that call each other
        elif type(value) is tuple:  # as and_masks and or_masks have
            more = _seen(value, function, inside)
            value = len(value)
        elif isinstance(value, ModuleType):
            more = [] if value.__name__ in _MODULES else None
        elif not isinstance(value, (int, float, str, BuiltinFunctionType, type(None))):
            more = None
        if more is None:
            return None
        environment += [value, *more]
    return environment


def _names(code: CodeType) -> Iterator[str]:
    """The names that code reads, also in the functions that it defines."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _same(old: list[Any] | None, new: list[Any]) -> bool:
    return (
        old is not None
        and len(old) == len(new)
        and all(
            x is y or (isinstance(x, (int, float, str, tuple)) and type(x) is type(y) and x == y)
            for x, y in zip(old, new, strict=True)
        )
    )


class _UnknownError(Exception):
    """What a trace cannot follow, or an operation whose bounds are not known."""


# These take the dtype and the device of their input alone.
_LIKE = (
    "new_zeros",
    "new_ones",
    "new_full",
    "zeros_like",
    "ones_like",
)


class _Recorder(TorchDispatchMode):
    """Records the operations that a function runs."""

    def __init__(self) -> None:
        super().__init__()
        self.before: list[Node] = []
        self.nodes: dict[int, Node] = {}
        self.tensors: list[Tensor] = []  # alive, so that no two have one id

    def add(self, x: Tensor, name: str = "", **attributes: Any) -> Node:
        node = self.nodes[id(x)] = Node(name, x.dtype, x.device, self.before, **attributes)
        self.before.append(node)
        self.tensors.append(x)
        return node

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = operation_name(func)
        if name is None:
            raise _UnknownError
        result = func(*args, **(kwargs or {}))
        args = _mapped(args, Tensor, self._node)
        kwargs = _mapped(kwargs or {}, Tensor, self._node)
        reads = frozenset().union(*(x.reads for x in nodes_in((*args, *kwargs.values())) if name not in _LIKE))
        if isinstance(result, Tensor):
            self.add(result, name, reads=reads, call=func, args=args, kwargs=kwargs)
        elif reads or any(x.call is not None or x.value.numel() > _SMALL for x in nodes_in(args) if x.key is None):
            raise _UnknownError  # the number of an index, or one that may be another at the next call
        return result

    def _node(self, x: Tensor) -> Node:
        if id(x) in self.nodes:
            return self.nodes[id(x)]
        return self.add(x, key=None if x.ndim else (x.dtype, x.item()), value=x)


# These read numbers, which no operation shows.
_LEAVES_TORCH = (
    Tensor.numpy,
    Tensor.tolist,
    Tensor.__array__,
    Tensor.__dlpack__,
)
# These read the numbers of tensors in lists.
_COPIES_TO_TENSOR = (
    torch.tensor,
    torch.as_tensor,
    torch.asarray,
    Tensor.new_tensor,
)


class _Indexing(TorchFunctionMode):
    """Indices that are tensors become an operation; reading their numbers would be none."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__getitem__:
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            if any(isinstance(x, Tensor) for x in index) and all(
                isinstance(x, Tensor) or type(x) is int for x in index
            ):
                return torch.ops.aten.index.Tensor(args[0], [torch.as_tensor(x, device=args[0].device) for x in index])
        if func in _LEAVES_TORCH:
            raise _UnknownError
        if func in _COPIES_TO_TENSOR:
            _mapped([x for x in (*args, *(kwargs or {}).values()) if isinstance(x, (list, tuple))], Tensor, _refuse)
        return func(*args, **(kwargs or {}))


def _refuse(x: Tensor) -> None:
    raise _UnknownError


# Interval arithmetic.


def bounds_of(
    node: Node, q: Interval, k: Interval, b: int = 0, h: int = 0, memo: dict[Any, Any] | None = None
) -> Truth:
    """Whether a node is true for every, and whether for some of these q and k.

    The answer is (False, True) where an operation is not known, an index lies outside of its tensor, or a number is large.
    """
    if np.any(q.high > _LARGEST) or np.any(k.high > _LARGEST):
        return Truth(False, True)
    values: dict[Node, Any] = {}
    memo = {} if memo is None else memo
    try:
        for one in node.needed():
            values[one] = result = _bounds(one, values, q, k, b, h, memo)
            if isinstance(result, Interval):
                ends = [result.low, result.high]
            else:
                ends = [result] if type(result) is int else []
            if any(np.any((end > _LARGEST) | (end < -_LARGEST)) for end in ends):
                raise _UnknownError
    except (_UnknownError, TypeError):  # intervals have no rule for it
        return Truth(False, True)
    result = values[node]
    return result if isinstance(result, Truth) else Truth(result is True, result is not False)


def _bounds(node: Node, values: dict[Node, Any], q: Interval, k: Interval, b: int, h: int, memo: dict[Any, Any]) -> Any:
    """The range of a node, from those of its arguments; a number or a tensor where it does not depend on q and k."""
    if not node.reads & {"q", "k"}:
        if (node, b, h) not in memo:
            with torch.no_grad():
                fixed = node.at(b=torch.tensor(b, device=node.device), h=torch.tensor(h, device=node.device))
            memo[node, b, h] = fixed.item() if fixed.ndim == 0 and fixed.dtype in _WHOLE else fixed
        return memo[node, b, h]
    if node.call is None:
        return q if node.name == "q" else k
    name = node.name
    kwargs = dict(node.kwargs)
    args = _mapped(node.args, Node, values.__getitem__)
    if name == "index":
        return _indexed(args[0], args[1], (node, b, h), memo)
    if name in ("_to_copy", "alias", "clone", "detach"):
        if node.dtype not in _WHOLE[1:] or kwargs.keys() - {"dtype", "memory_format"}:
            raise _UnknownError  # floats round, and smaller integers wrap
        return _number(args[0])
    if name == "div" and kwargs.pop("rounding_mode", None) == "floor":
        name = "floor_divide"
    if kwargs or name not in _OPERATIONS or node.dtype not in _WHOLE:
        raise _UnknownError
    if any(isinstance(x, Tensor) or (isinstance(x, float) and name not in _COMPARISONS) for x in args):
        raise _UnknownError
    if any(isinstance(x, int) and abs(x) > _LARGEST for x in args):
        raise _UnknownError  # numbers between the ends may wrap, and so may this one, beside integers of 32 bits
    args = [Truth(x, x) if isinstance(x, bool) else x for x in args]
    result = _OPERATIONS[name](*(args if name in _OF_BOOLS else map(_number, args)))
    if node.dtype == torch.bool and isinstance(result, Interval):
        return result >= 1  # True + True is True
    if isinstance(result, Truth) and node.dtype != torch.bool:
        raise _UnknownError
    return result


_WHOLE = (torch.bool, torch.int32, torch.int64)


def _number(x: Any) -> Any:
    return Interval(x.every + 0, x.some + 0) if isinstance(x, Truth) else x


def _indexed(tensor: Any, indices: tuple[Any, ...], key: tuple[Node, int, int], memo: dict[Any, Any]) -> Any:
    """A tensor at indices of which one varies."""
    varying = [i for i, x in enumerate(indices) if isinstance(x, Interval)]
    fits = isinstance(tensor, Tensor) and tensor.dtype in _WHOLE and tensor.ndim == len(indices) and len(varying) == 1
    if not fits or not all(isinstance(x, (int, Interval)) for x in indices):
        raise _UnknownError
    for n, x in zip(tensor.shape, indices, strict=True):
        low, high = (x.low, x.high) if isinstance(x, Interval) else (x, x)
        if np.any(np.asarray(low) < 0) or np.any(np.asarray(high) >= n):
            raise _UnknownError
    if key not in memo:
        along = tensor[tuple(slice(None) if isinstance(x, Interval) else x for x in indices)]
        memo[key] = RangeMinMax(along.detach().cpu().numpy().astype(np.int64))
    values: Interval = memo[key][indices[varying[0]]]
    return values if tensor.dtype != torch.bool else values >= 1


def _product(x: Any, y: Any) -> Interval:
    """From the corners, since a product is monotonic in each factor."""
    ends = [(z.low, z.high) if isinstance(z, Interval) else (z, z) for z in (x, y)]
    corners = np.broadcast_arrays(*(np.multiply(a, b) for a in ends[0] for b in ends[1]))
    return Interval(np.minimum.reduce(corners), np.maximum.reduce(corners))


def _absolute(x: Interval) -> Interval:
    least = np.where((x.low <= 0) & (x.high >= 0), 0, np.minimum(np.abs(x.low), np.abs(x.high)))
    return Interval(least, np.maximum(np.abs(x.low), np.abs(x.high)))


def _each_end(choose: Any) -> Callable[[Any, Any], Interval]:
    def of_two(x: Any, y: Any) -> Interval:
        x, y = (z if isinstance(z, Interval) else Interval(z, z) for z in (x, y))
        return Interval(choose(x.low, y.low), choose(x.high, y.high))

    return of_two


def _where(condition: Any, x: Any, y: Any) -> Any:
    if isinstance(x, Truth):
        return (condition & x) | (~condition & y) | (x & y)  # the last, where the condition is not decided
    x, y = (z if isinstance(z, Interval) else Interval(z, z) for z in (x, y))
    low = np.where(condition.every, x.low, np.where(condition.some, np.minimum(x.low, y.low), y.low))
    return Interval(
        low, np.where(condition.every, x.high, np.where(condition.some, np.maximum(x.high, y.high), y.high))
    )


_OF_BOOLS: dict[str, Callable[..., Any]] = {  # on other integers these work on bits, for which there is no rule
    **dict.fromkeys(("bitwise_and", "logical_and"), operator.and_),
    **dict.fromkeys(("bitwise_or", "logical_or"), operator.or_),
    **dict.fromkeys(("bitwise_not", "logical_not"), operator.invert),
    "where": _where,
}
_COMPARISONS = {name: getattr(operator, name) for name in ("lt", "le", "gt", "ge", "eq", "ne")}
_OPERATIONS: dict[str, Callable[..., Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "rsub": lambda x, y: y - x,
    "neg": lambda x: 0 - x,
    "mul": _product,
    "abs": _absolute,
    "floor_divide": operator.floordiv,
    "remainder": operator.mod,
    "minimum": _each_end(np.minimum),
    "maximum": _each_end(np.maximum),
    **_COMPARISONS,
    **_OF_BOOLS,
}

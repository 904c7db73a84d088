"""The functions of FlexAttention, ``mask_mod(b, h, q, k)`` and ``score_mod(score, b, h, q, k)``, as graphs of torch operations.

A graph shows what a function computes and on which of its inputs it depends; nothing is inferred from names or source code. A
function that cannot be traced has no graph, and is then evaluated only.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from lowtri.compat.torch_private import mapped_indexing, version_of

__all__ = ["INDICES", "Trace", "operation", "trace"]

INDICES = ("b", "h", "q", "k")


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
        source, seen, todo = self.inputs[name], {node}, [node]
        while todo:
            current = todo.pop()
            if current is source:
                return True
            new = set() if _is_constant(current) else set(current.all_input_nodes) - seen
            seen |= new
            todo += new
        return False

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
            self.kept[node] = self._function_of(node)
        function: Callable[..., Any] = self.kept[node]
        return function

    def _function_of(self, node: Node) -> Callable[..., Any]:
        module = GraphModule(self.module, deepcopy(self.module.graph))  # the same tensors
        nodes = {one.name: one for one in module.graph.nodes}
        next(one for one in module.graph.nodes if one.op == "output").args = (nodes[node.name],)
        module.graph.eliminate_dead_code()
        module.recompile()
        return lambda b, h, q, k: module(q.new_zeros((), dtype=torch.float32), b, h, q, k)


def operation(node: Any) -> str:
    """The name of a node's operation without its overload, as ``add``; empty for numbers."""
    return str(node.target).removeprefix("aten.").split(".")[0] if isinstance(node, Node) else ""


def _is_constant(node: Node) -> bool:
    """Whether an operation takes only the dtype and the device of its input: new_ones, zeros_like."""
    return operation(node) in ("new_zeros", "new_ones", "new_full", "zeros_like", "ones_like")


class _Kept(NamedTuple):
    environment: list[Any]
    trace: Trace | None


_KEPT: weakref.WeakKeyDictionary[Any, _Kept] = weakref.WeakKeyDictionary()


def trace(function: Callable[..., Any], device: Any, *, of_score: bool) -> Trace | None:
    """The trace of a mask_mod or, with ``of_score``, of a score_mod; None where it cannot be traced.

    It is kept while the function lives and every variable that it reads is bound to the same object.
    """
    environment: list[Any] = [str(device), of_score]
    for value in _variables(function):
        if value is function:
            continue  # what is kept must not keep the function alive
        if not isinstance(value, _VALUES) or (isinstance(value, ModuleType) and value.__name__ not in _MODULES):
            return _traced(function, device, of_score)  # whether it has changed since would not show
        environment.append(value)
    kept = _KEPT.get(function)
    if kept is None or not _same_objects(kept.environment, environment):
        kept = _KEPT[function] = _Kept(environment, _traced(function, device, of_score))
    return kept.trace


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
    names = ("score", *INDICES) if of_score else INDICES
    # A score without gradient: one with it would add detach operations to the graph.
    examples = [
        torch.zeros((), dtype=torch.float32 if name == "score" else torch.int64, device=device) for name in names
    ]
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

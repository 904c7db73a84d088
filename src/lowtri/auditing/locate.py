"""Where a leak enters: the first module whose output moved at a position where none of its inputs moved.

Hooks record every module during one run before the change and one after it. If the movement begins between modules, in plain
code, the report names their parent.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from lowtri.auditing.adapter import ModelAdapter
from lowtri.auditing.inputs import Inputs

__all__ = ["locate"]


class _Event(NamedTuple):
    """One call of a module: its inputs and outputs at the position."""

    name: str
    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor]


def locate(adapter: ModelAdapter, before: Inputs, after: Inputs, row: int, query: int) -> str | None:
    """The dotted name of the module where the leak enters; None when no module's output moved."""
    module = adapter.module
    if module is None:
        return None
    first, second = (_watch(adapter, module, inputs, row, query) for inputs in (before, after))
    outputs = (tensor for event in first for tensor in event.outputs if tensor.numel())
    greatest = max((float(t.nan_to_num(0.0, 0.0, 0.0).abs().max()) for t in outputs), default=1.0)
    inputs_still: dict[str, bool] = {}
    culprit: tuple[str, bool] | None = None
    for one, other in zip(first, second, strict=False):
        if one.name != other.name:
            break  # the two runs took different code paths
        moved = _moved(one.inputs, other.inputs, greatest)
        inputs_still.setdefault(one.name, not moved)
        if culprit is None and _moved(one.outputs, other.outputs, greatest):
            culprit = one.name, moved
    if culprit is None:
        return None
    name, inputs_moved = culprit
    if inputs_moved:  # the leak entered in the code around it
        parents = [name.rpartition(".")[0]]
        while parents[-1]:
            parents.append(parents[-1].rpartition(".")[0])
        # A parent that only contains its parts (a ModuleList, say) is never called, and no code of its own can leak.
        name = next((parent for parent in parents if inputs_still.get(parent, False)), "")
    return name or type(module).__name__


def _watch(adapter: ModelAdapter, module: Any, inputs: Inputs, row: int, query: int) -> list[_Event]:
    """Every module's calls, in the order in which they finish."""
    events: list[_Event] = []

    def at_position(values: Iterable[Any]) -> list[torch.Tensor]:
        cut = (_cut(value, row, query, inputs, adapter.signature.position_axes[0]) for value in values)
        return [value for value in cut if value is not None]

    def record(name: str, part: Any, args: Any, kwargs: Any, output: Any) -> None:
        if isinstance(output, torch.Tensor):
            output = [output]
        elif not isinstance(output, (tuple, list)):
            values = getattr(output, "values", None)
            output = values() if callable(values) else []
        events.append(_Event(name, at_position([*args, *kwargs.values()]), at_position(output)))

    hooks = [
        part.register_forward_hook(functools.partial(record, name), with_kwargs=True)
        for name, part in module.named_modules()
    ]
    try:
        adapter(inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return events


def _cut(value: Any, row: int, query: int, inputs: Inputs, axis: int) -> torch.Tensor | None:
    """A tensor's values at the position; None where its axis of positions is not known."""
    if not isinstance(value, torch.Tensor) or not value.is_floating_point() or value.dim() < 2:
        return None
    value = value.detach()
    axes = [axis, *(i for i in range(value.dim()) if i != axis)]
    positions = next((i for i in axes if i < value.dim() and value.shape[i] == inputs.n), None)
    if positions is not None:
        value = value.select(positions, query)
        return (value[row] if value.dim() > 1 and value.shape[0] == inputs.batch else value).clone()
    if value.shape[0] == inputs.batch * inputs.n:  # batch and positions flattened into one, as experts have it
        return value[row * inputs.n + query].clone()
    return None


def _moved(before: list[torch.Tensor], after: list[torch.Tensor], greatest: float) -> bool:
    for one, other in zip(before, after, strict=False):
        if one.shape != other.shape or not one.numel():
            continue
        still = (one == other) | (one.isnan() & other.isnan())
        distance = torch.nan_to_num((one.double() - other.double()).abs(), nan=torch.inf).masked_fill(still, 0.0)
        if float(distance.max()) > 64 * torch.finfo(one.dtype).eps * greatest:
            return True
    return False

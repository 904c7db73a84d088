"""Where a leak enters: the first module whose output at a clean position moved although nothing it was given there did.

Hooks watch every module during one run before and one after the change. A module is named when its own input at the clean
position stood still and its output moved. Where the movement begins between modules, in plain code, their parent is named.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from lowtri.auditing.adapter import ModelAdapter
from lowtri.auditing.inputs import Inputs

__all__ = ["locate"]

_Events = list[tuple[str, list[torch.Tensor], list[torch.Tensor]]]


def locate(adapter: ModelAdapter, before: Inputs, after: Inputs, row: int, query: int) -> str | None:
    """The dotted name of the module where the leak enters; None when nothing in a module moved."""
    module = adapter.module
    if module is None:
        return None
    first = _watch(adapter, module, before, row, query)
    second = _watch(adapter, module, after, row, query)
    greatest = max(
        (float(t.nan_to_num(0.0, 0.0, 0.0).abs().max()) for _, _, outs in first for t in outs if t.numel()), default=1.0
    )
    still_in: dict[str, bool] = {}
    culprits = []
    for (name, ins, outs), (other, ins2, outs2) in zip(first, second, strict=False):
        if name != other:
            break  # the two runs took different code paths
        moved_in, moved_out = _moved(ins, ins2, greatest), _moved(outs, outs2, greatest)
        still_in.setdefault(name, not moved_in)
        if moved_out:
            culprits.append((name, moved_in))
    if not culprits:
        return None
    name, moved_in = culprits[0]
    if moved_in:  # what it was given had moved: the leak entered in the code around it
        parents = [name.rpartition(".")[0]]
        while parents[-1]:
            parents.append(parents[-1].rpartition(".")[0])
        # A parent that only holds its parts (a ModuleList, say) is never called, and no code of its own can leak.
        name = next((parent for parent in parents if still_in.get(parent, False)), "")
    return name or type(module).__name__


def _watch(adapter: ModelAdapter, module: Any, inputs: Inputs, row: int, query: int) -> _Events:
    """Every module's inputs and outputs at the position, in the order in which modules finish."""
    events: _Events = []
    hooks = []

    def record(name: str, part: Any, args: Any, kwargs: Any, output: Any) -> None:
        cut = functools.partial(_at, row=row, query=query, inputs=inputs, axis=adapter.signature.position_axes[0])
        given = [cut(value) for value in [*args, *kwargs.values()]]
        answers = [cut(value) for value in _tensors(output)]
        events.append((name, [v for v in given if v is not None], [v for v in answers if v is not None]))

    for name, part in module.named_modules():
        hooks.append(part.register_forward_hook(functools.partial(record, name), with_kwargs=True))
    try:
        adapter(inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return events


def _tensors(output: Any) -> list[Any]:
    if isinstance(output, torch.Tensor):
        return [output]
    if isinstance(output, (tuple, list)):
        return [value for value in output if isinstance(value, torch.Tensor)]
    values = getattr(output, "values", None)
    return [value for value in values() if isinstance(value, torch.Tensor)] if callable(values) else []


def _at(value: Any, *, row: int, query: int, inputs: Inputs, axis: int) -> torch.Tensor | None:
    """A tensor's values at the position; None where its axis of positions is not known."""
    if not isinstance(value, torch.Tensor) or not value.is_floating_point() or value.dim() < 2:
        return None
    axes = [axis, *(i for i in range(value.dim()) if i != axis)]
    found = next((i for i in axes if i < value.dim() and value.shape[i] == inputs.n), None)
    if found is None:
        if value.shape[0] != inputs.batch * inputs.n:
            return None
        return value.detach()[
            row * inputs.n + query
        ].clone()  # batch and positions flattened into one, as experts have it
    value = value.detach().select(found, query)
    if value.dim() > 1 and value.shape[0] == inputs.batch:
        value = value[row]
    return value.clone()


def _moved(before: list[torch.Tensor], after: list[torch.Tensor], greatest: float) -> bool:
    for one, other in zip(before, after, strict=False):
        if one.shape != other.shape:
            continue
        still = (one == other) | (one.isnan() & other.isnan())
        distance = torch.nan_to_num((one.double() - other.double()).abs(), nan=torch.inf).masked_fill(still, 0.0)
        if distance.numel() and float(distance.max()) > 64 * torch.finfo(one.dtype).eps * greatest:
            return True
    return False

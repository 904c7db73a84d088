"""Vectors to differentiate by, or to poison: the inputs themselves, or what the model looks up for its token ids."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from lowtri.auditing.adapter import ModelAdapter
from lowtri.auditing.inputs import Inputs

__all__ = ["run_with_leaves"]


class _Lookup(TorchFunctionMode):
    """Replaces every look-up of exactly the example's ids, by embedding or by indexing, by a leaf with the same values."""

    def __init__(self, ids: torch.Tensor, make: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.ids = ids
        self.make = make
        self.leaves: list[torch.Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func in (torch.nn.functional.embedding, torch.embedding):
            index = args[0] if func is torch.nn.functional.embedding else args[1]
        elif func is torch.Tensor.__getitem__:
            index = args[1]
        else:
            return result
        if not (isinstance(index, torch.Tensor) and index.shape == self.ids.shape and result.is_floating_point()):
            return result
        if not torch.equal(index, self.ids) or result.dim() <= index.dim():
            return result
        leaf = self.make(result)
        self.leaves.append(leaf)
        return leaf.clone()  # a leaf itself may not be written in place, and some models do


def run_with_leaves(
    adapter: ModelAdapter, inputs: Inputs, make: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Run the adapter with its vectors passed through `make`, which gets them in the caller's own layout.

    Returns:
        The rows, (B, N, F), and what `make` returned, one for each sequence or look-up; none when ids are looked up in a way
        that is not known.
    """
    if inputs.discrete:
        ids = adapter.signature.give(inputs.sequences[0])
        if not isinstance(ids, torch.Tensor):
            return adapter.tensor(inputs), []
        with _Lookup(ids, make) as mode:
            rows = adapter.tensor(inputs)
        return rows, mode.leaves
    made: list[torch.Tensor] = []

    def keep(value: torch.Tensor) -> torch.Tensor:
        made.append(make(value))
        return made[-1].clone()

    return replace(adapter, signature=replace(adapter.signature, transform=keep)).tensor(inputs), made

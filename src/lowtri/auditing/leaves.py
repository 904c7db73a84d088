"""Vectors to differentiate with respect to, or to poison: the inputs themselves, or the embeddings of token ids."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from lowtri.auditing.adapter import ModelAdapter
from lowtri.auditing.inputs import Inputs

__all__ = ["run_with_leaves"]

Make = Callable[[torch.Tensor], torch.Tensor]


def run_with_leaves(adapter: ModelAdapter, inputs: Inputs, make: Make) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Run the adapter with its vectors passed through `make`, which gets them in the caller's own layout.

    Returns:
        The rows, (B, N, F), and what `make` returned, one for each sequence or look-up; none when ids are looked up in a way
        that is not known.
    """
    leaves: list[torch.Tensor] = []

    def replaced(vectors: torch.Tensor) -> torch.Tensor:
        leaves.append(make(vectors))
        return leaves[-1].clone()  # a leaf itself may not be written in place, and some models do

    if not inputs.discrete:
        signature = replace(adapter.signature, transform=replaced)
        return torch.as_tensor(replace(adapter, signature=signature).raw_rows(inputs)), leaves
    ids = adapter.signature.sequence(inputs.sequences[0])
    if not isinstance(ids, torch.Tensor):
        return torch.as_tensor(adapter.raw_rows(inputs)), []
    with _Lookup(ids, replaced):
        return torch.as_tensor(adapter.raw_rows(inputs)), leaves


class _Lookup(TorchFunctionMode):
    """Replaces the result of every look-up of exactly the example's ids, by embedding or by indexing."""

    def __init__(self, ids: torch.Tensor, replaced: Make) -> None:
        super().__init__()
        self.ids = ids
        self.replaced = replaced

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.nn.functional.embedding:
            index = args[0]
        elif func in (torch.embedding, torch.Tensor.__getitem__):
            index = args[1]
        else:
            return result
        if not (isinstance(index, torch.Tensor) and index.shape == self.ids.shape and result.is_floating_point()):
            return result
        if not torch.equal(index, self.ids) or result.dim() <= index.dim():
            return result
        return self.replaced(result)

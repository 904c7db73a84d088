"""Several linear layers with the same input as one."""

from __future__ import annotations

import torch
from torch import nn

__all__ = ["joined"]


def joined(*layers: nn.Linear) -> nn.Linear:
    """One layer whose outputs are those of the layers, one after the other."""
    biases = [layer.bias for layer in layers if layer.bias is not None]
    weight = torch.cat([layer.weight.detach() for layer in layers])  # (sum of out, in)
    result = nn.Linear(weight.shape[1], weight.shape[0], bias=bool(biases), device="meta")
    result.weight = nn.Parameter(weight, requires_grad=False)
    if biases:
        result.bias = nn.Parameter(torch.cat([bias.detach() for bias in biases]), requires_grad=False)
    return result

"""The first weights of a model that was made on the meta device, where it takes no memory: whole, or sharded by ``fully_shard``."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lowtri.nn.decoder import Decoder

__all__ = ["initialise"]


@torch.no_grad()
def initialise(model: nn.Module, device: str = "cpu") -> None:
    """Allocate and draw the weights of a :class:`Decoder` that was made on the meta device; other models stay as they are.

    Every process draws the same numbers, one weight after the other, and keeps its shard. So the weights do not depend on the number of
    processes, and none holds more than its shards and one whole weight.
    """
    if not isinstance(model, Decoder) or not any(weight.is_meta for weight in model.parameters()):
        return
    model.to_empty(device=device)
    model.tie_weights()
    for name, weight in model.named_parameters():
        if not hasattr(weight, "placements"):
            model.init_weight(name, weight)
            continue
        whole = torch.empty(weight.shape, dtype=weight.dtype, device=device)
        model.init_weight(name, whole)
        weight.copy_(_sharded_like(weight, whole))


def _sharded_like(weight: Any, whole: torch.Tensor) -> Any:
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(whole, weight.device_mesh, weight.placements)

"""A call of torch's ``varlen_attn``: the rows of the batch one after the other, cut into segments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lowtri.backends.varlen.segments import Segments, segments_of
from lowtri.ops.call import Call, Inputs, Result

__all__ = ["Packed"]


class Packed:
    """A prepared call. torch differentiates it.

    Args:
        call: a call whose mask is made of segments.
        function: torch's ``varlen_attn``; another one in tests.
    """

    def __init__(self, call: Call, function: Callable[..., Any] | None = None) -> None:
        found = segments_of(call)
        assert isinstance(found, Segments), found  # supports() has said so
        self.function = _torchs() if function is None else function
        edges = [torch.from_numpy(x.astype(np.int32)).to(call.device) for x in (found.queries, found.keys)]
        longest = [int(np.diff(x).max()) for x in (found.queries, found.keys)]
        self.arguments: tuple[Any, ...] = (*edges, *longest)
        self.options: dict[str, Any] = {"scale": call.scale, "window_size": (found.before, found.after)}
        if call.group > 1:
            self.options["enable_gqa"] = True
        self.nbytes = 1024 + sum(x.nbytes for x in edges)

    def run(self, inputs: Inputs) -> Result:
        batch, nq = inputs.q.shape[0], inputs.q.shape[2]
        output = self.function(*map(_packed, inputs[:3]), *self.arguments, **self.options)  # (B * Nq, Hq, Dv)
        return Result(output.unflatten(0, (batch, nq)).transpose(1, 2))


def _torchs() -> Callable[..., Any]:
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn


def _packed(x: Tensor) -> Tensor:
    """(B, H, N, D) -> (B * N, H, D)."""
    return x.transpose(1, 2).flatten(0, 1)

"""Fewer and cheaper operations for a few tokens: compiled passes over their rows, and several linear layers as one.

A step of generation calls hundreds of small operators, and a call takes some microseconds more than its work. With many tokens the
calls do not matter, and torch computes on all threads.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from lowtri.errors import EngineError
from lowtri.ops.guards import active_mode, is_plain

if TYPE_CHECKING:
    from lowtri.kernels.token_rows import TokenRows

__all__ = ["FewTokensNorm", "fuse_linears", "compiled_row_ops"]


_MOST = 2**15  # numbers: the grain size of torch's operators, which compute larger arrays on several threads


def compiled_row_ops(x: Tensor) -> TokenRows | None:
    """The compiled operations on rows, if they can read x (..., columns), in float32; None if torch's operators have to run."""
    if torch.compiler.is_compiling() or not 0 < x.numel() <= _MOST or x.dtype is not torch.float32:
        return None
    if not x.is_contiguous() or not is_plain(x) or active_mode() is not None:
        return None
    return _compiled()


class FewTokensNorm(nn.RMSNorm):
    """An RMSNorm; torch's operators compute gradients, and the norm without a weight or an epsilon."""

    def __init__(self, norm: nn.RMSNorm) -> None:
        super().__init__(norm.normalized_shape, norm.eps, device="meta")
        self.weight = norm.weight

    def forward(self, x: Tensor) -> Tensor:
        few, weight, epsilon = compiled_row_ops(x), self.weight, self.eps
        if few is None or weight is None or epsilon is None or x.requires_grad or weight.requires_grad:
            return super().forward(x)
        if compiled_row_ops(weight) is None or weight.shape != x.shape[-1:]:
            return super().forward(x)
        y, columns = torch.empty_like(x), x.shape[-1]
        few.rms_norm(x.data_ptr(), weight.data_ptr(), y.data_ptr(), x.numel() // columns, columns, epsilon)
        return y


@cache
def _compiled() -> TokenRows | None:
    try:
        from lowtri.kernels import library, target
        from lowtri.kernels.token_rows import TokenRows

        return TokenRows(target.ISA, library.code)
    except EngineError:  # there are no kernels for this machine
        return None


def fuse_linears(*layers: nn.Linear) -> nn.Linear:
    """One layer whose outputs are those of the layers, one after the other."""
    biases = [layer.bias for layer in layers if layer.bias is not None]
    weight = torch.cat([layer.weight.detach() for layer in layers])  # (sum of out, in)
    result = nn.Linear(weight.shape[1], weight.shape[0], bias=bool(biases), device="meta")
    result.weight = nn.Parameter(weight, requires_grad=False)
    if biases:
        result.bias = nn.Parameter(torch.cat([bias.detach() for bias in biases]), requires_grad=False)
    return result

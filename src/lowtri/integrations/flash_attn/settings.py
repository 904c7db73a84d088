"""The arguments that all functions of flash-attn share, as a mask and options of :func:`lowtri.attention`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lowtri.dispatch.attend import attention
from lowtri.errors import CallError
from lowtri.masks import POSITION_MAX, Mask, band, causal, full, window
from lowtri.ops.distance_bias import alibi

__all__ = ["Positions", "Settings", "aligned", "check_tensor", "seen"]


@dataclass(frozen=True)
class Positions:
    """Positions of queries and keys, (N,) or (B, N); None where lowtri's defaults are right."""

    q: NDArray[np.int64] | None = None
    k: NDArray[np.int64] | None = None


@dataclass(frozen=True)
class Settings:
    """Arguments under flash-attn's names."""

    dropout_p: float = 0.0
    softmax_scale: float | None = None
    causal: bool = False
    window_size: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    alibi_slopes: Tensor | None = None
    return_attn_probs: bool = False

    def run(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, at: Positions) -> tuple[Tensor, Tensor, Tensor]:
        """The output (B, Hq, Nq, D), the log-sum-exp (B, Hq, Nq) and the weights, empty where they are not returned."""
        options: dict[str, Any] = {
            "scale": self.softmax_scale,
            "softcap": self.softcap or None,
            "dropout": self.dropout_p,
            "return_weights": self.return_attn_probs and self.dropout_p > 0,
            "return_lse": self.return_attn_probs,
            "q_positions": at.q,
            "k_positions": at.k,
        }
        if (slopes := self.alibi_slopes) is not None:
            batch, heads = q.shape[:2]
            if tuple(slopes.shape) not in ((heads,), (batch, heads)):
                raise CallError(
                    f"alibi_slopes is {tuple(slopes.shape)}. Fix: ({heads},) or ({batch}, {heads}), one per query head."
                )
            options["bias"] = alibi(slopes.detach().to(q.device, torch.promote_types(q.dtype, torch.float32)))
        result: Any = attention(q, k, v, mask, **options)
        output, *rest = result if isinstance(result, tuple) else (result,)
        none = q.new_empty(0)
        weights = rest[0] if options["return_weights"] else none
        return output, rest[-1] if self.return_attn_probs else none, weights

    def mask(self, name: str) -> Mask:
        """Who may see whom, for positions that end together."""
        if len(self.window_size) != 2:
            raise CallError(f"{name}: window_size is {self.window_size!r:.60}. Fix: (left, right), -1 for no limit.")
        left, right = (int(n) for n in self.window_size)
        right = 0 if self.causal else right
        if left < 0 and right < 0:
            return full()
        if right == 0:
            return causal() if left < 0 else window(left + 1)
        return band(POSITION_MAX if left < 0 else left, POSITION_MAX if right < 0 else right)


def aligned(nq: int, nk: int) -> Positions:
    """Positions of queries and keys that end together; None where they are lowtri's defaults."""
    if nq <= nk:
        return Positions()
    return Positions(np.arange(nq), np.arange(nq - nk, nq))  # negative positions would be padding


def seen(lse: Tensor) -> Tensor:
    """flash-attn's log-sum-exp: float32, without gradient, and inf for a query that sees no key."""
    lse = lse.detach()
    return lse.masked_fill(lse == -torch.inf, torch.inf).float()


def check_tensor(name: str, argument: str, x: Any, layout: str) -> None:
    """Raise unless x is a tensor with as many dimensions as its layout."""
    if not isinstance(x, Tensor) or x.ndim != layout.count(",") + 1:
        came = f"{tuple(x.shape)}" if hasattr(x, "shape") else type(x).__name__
        raise CallError(f"{name}: {argument} is {came}. Fix: a torch tensor {layout}.")

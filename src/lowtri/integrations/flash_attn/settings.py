"""The arguments that all functions of flash-attn share, as a mask and options of :func:`lowtri.attention`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lowtri.dispatch.attend import attention
from lowtri.integrations.flash_attn.arguments import check_numbers, read_window
from lowtri.masks import POSITION_MAX, Mask, band, causal, full, window
from lowtri.ops.distance_bias import alibi

__all__ = ["Positions", "Settings", "aligned", "seen"]


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
            options["bias"] = alibi(slopes.detach().to(q.device, torch.promote_types(q.dtype, torch.float32)))
        result: Any = attention(q, k, v, mask, **options)
        output, *rest = result if isinstance(result, tuple) else (result,)
        none = q.new_empty(0)
        weights = rest[0] if options["return_weights"] else none
        return output, rest[-1] if self.return_attn_probs else none, weights

    def mask(self, name: str) -> Mask:
        """Who may see whom, for positions that end together.

        Raises:
            CallError: if an option of the function ``name`` has no meaning.
        """
        left, right = read_window(name, self.window_size)
        if not torch.compiler.is_compiling():  # lowtri.attention checks the numbers of a program
            check_numbers(name, self.dropout_p, self.softmax_scale, self.softcap, self.causal)
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

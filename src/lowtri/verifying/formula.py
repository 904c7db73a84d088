"""Attention by its definition, in float64 and with gradients; its fields also say how it can be written wrongly."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Formula", "Results"]

Results = dict[str, Tensor]  # "output", "lse", and "gradient of q" and so on


@dataclass(frozen=True)
class Formula:
    """softmax(cap(scale q k^T) + bias) v over visible keys. The defaults are right; another value is a known mistake.

    Attributes:
        visible: (B, Hq, Nq, Nk), True = may see.
        scale, softcap: of the scores; no cap by default.
        bias: (B, Hq, Nq, Nk) or broadcasting to it; added after the cap.
        sinks: (Hq,), one more logit for each head, without a value.
        kv_heads: (Hq,), the key/value head of each query head.
        cap_after_bias: the cap is applied to the sum of scores and bias.
        hidden: what hidden scores become: left out, "replaced" by -1e9, or -1e9 "added" to them.
        empty: the output of a query that sees nothing.
        contained: False multiplies hidden values by a weight of 0, so that their NaN is seen.
        weights_in: the weights are rounded to this dtype; normalised first, or before the division.
        sums_in: the sum over keys is rounded to this dtype after each key.
        lse_base, lse_scaled: the log-sum-exp in base 2, or of the scores without their scale.
        group: how the gradients of the query heads of a group become one: "sum", "first", "last", "mean".
    """

    visible: Tensor
    scale: float
    kv_heads: Tensor
    softcap: float | None = None
    bias: Tensor | None = None
    sinks: Tensor | None = None
    cap_after_bias: bool = False
    hidden: str = "left out"
    empty: float = 0.0
    contained: bool = True
    weights_in: torch.dtype | None = None
    normalised: bool = True
    sums_in: torch.dtype | None = None
    lse_base: float = math.e
    lse_scaled: bool = True
    group: str = "sum"

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, d_output: Tensor | None = None) -> Results:
        """Output (B, Hq, Nq, Dv), log-sum-exp (B, Hq, Nq) and, with ``d_output``, the gradients; all float64.

        Source: Vaswani et al. 2017, section 3.2.
        """
        inputs = [q, k[:, self.kv_heads], v[:, self.kv_heads]]  # each query head with keys of its own
        extra = {name: x for name, x in (("bias", self.bias), ("sinks", self.sinks)) if x is not None}
        leaves = [x.detach().double().requires_grad_(d_output is not None) for x in (*inputs, *extra.values())]
        named = dict(zip(extra, leaves[3:], strict=True))
        output, lse = self._attend(leaves[0], leaves[1], leaves[2], named.get("bias"), named.get("sinks"))
        results = {"output": output.detach(), "lse": lse.detach()}
        if d_output is not None:
            found = torch.autograd.grad(output, leaves, d_output.double(), allow_unused=True, materialize_grads=True)
            grads = dict(zip(("q", "k", "v", *extra), found, strict=True))
            for name in "kv":
                grads[name] = self._grouped(grads[name], k.shape[1])
            results |= {f"gradient of {name}": grad for name, grad in grads.items()}
        return results

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sinks: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        products = q @ k.mT  # (B, Hq, Nq, Nk)
        scores = products * self.scale
        if self.softcap and not self.cap_after_bias:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        if bias is not None:
            scores = scores + bias
        if self.softcap and self.cap_after_bias:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        if self.hidden == "added":
            scores = torch.where(self.visible, scores, scores - 1e9)
        elif self.contained:
            scores = torch.where(self.visible, scores, -1e9 if self.hidden == "replaced" else -math.inf)
        else:
            scores = scores + torch.where(self.visible, 0.0, -math.inf)
        if sinks is not None:
            scores = torch.cat([scores, sinks[None, :, None, None].expand(*scores.shape[:3], 1)], -1)
        none = torch.zeros(*scores.shape[:3], 1, dtype=torch.float64)
        most = torch.cat([scores.detach(), none - math.inf], -1).amax(-1, keepdim=True)  # -inf if there are no keys
        seen = most != -math.inf  # (B, Hq, Nq, 1); a NaN counts as seen
        powers = torch.exp(scores - torch.where(seen, most, 0.0))
        total = powers.sum(-1, keepdim=True)
        divisor = torch.where(seen, total, 1.0)
        if self.weights_in is None:
            weights = powers / divisor
        elif self.normalised:
            weights = (powers / divisor).to(self.weights_in).double()
        else:
            weights = powers.to(self.weights_in).double() / divisor
        weights = weights[..., : k.shape[2]]
        if self.sums_in is not None:
            output = torch.zeros_like(weights @ v)
            for key in range(v.shape[2]):
                part = torch.where(self.visible[..., key, None], weights[..., key, None] * v[:, :, None, key], 0.0)
                output = (output + part).to(self.sums_in).double()
        elif self.contained and not v.isfinite().all():
            parts = torch.where(self.visible[..., None], weights[..., None] * v[:, :, None], 0.0)
            output = parts.sum(-2)
        else:
            output = weights @ v
        output = torch.where(seen, output, self.empty)
        if not self.lse_scaled:
            scores = torch.where(self.visible, products, -math.inf)
        lse = torch.logsumexp(scores, -1) if scores.shape[-1] else (none - math.inf)[..., 0]
        return output, lse / math.log(self.lse_base)

    def _grouped(self, gradient: Tensor, heads: int) -> Tensor:
        """(B, Hq, N, D) for the copies of a key/value head, as one gradient for each head (B, Hkv, N, D)."""
        each: Sequence[Tensor] = [gradient[:, self.kv_heads == head] for head in range(heads)]
        if self.group == "first":
            return torch.stack([x[:, 0] for x in each], 1)
        if self.group == "last":
            return torch.stack([x[:, -1] for x in each], 1)
        return torch.stack([x.mean(1) if self.group == "mean" else x.sum(1) for x in each], 1)

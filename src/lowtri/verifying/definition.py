"""One attention call in float64, computed by its definition; its last fields say how it can be computed wrongly.

This is the oracle of ``lowtri.verify`` and uses no other attention of lowtri, so that all of them can be judged by it: neither the
backends nor ``backends.reference``, which is NumPy with gradients written by hand, while these are torch's autograd.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Results = dict[str, Tensor]  # "output", "lse", and "gradient of q" and so on


@dataclass(frozen=True)
class Problem:
    """softmax(cap(scale q k^T) + bias) v over visible keys.

    A custom ``signature`` function gets one whose arrays are of the callable's library.

    Attributes:
        case: the case that it belongs to, with sizes, ``text``, ``mask``, ``scale`` (None: 1 / sqrt(D)), and ``lse``, whether the
            log-sum-exp is returned, too.
        q, k, v: (B, Hq, Nq, D), (B, Hkv, Nk, D), (B, Hkv, Nk, Dv).
        visible: (B, Hq, Nq, Nk), True = may see.
        scale: of the scores.
        softcap: None for no cap.
        bias: (B or 1, Hq or 1, Nq or 1, Nk), added after the cap, or None.
        sinks: (Hq,), one more logit for each head, without a value, or None.
        slopes: (Hq,), of ALiBi, whose biases are in ``bias``; or None.
        d_output: (B, Hq, Nq, Dv), the gradient of the output.

    The other fields are right by default; another value is a mistake.
    """

    case: Any  # a Case, whose file imports this one
    q: Any
    k: Any
    v: Any
    visible: Any
    scale: float
    softcap: float | None
    bias: Any
    sinks: Any
    slopes: Any
    d_output: Any
    kv_heads: Any  # (Hq,), the key/value head of each query head
    bias_scale: float = 1.0
    cap_of: str = "scores"  # or "products" of q and k without their scale, or "sum" of scores and bias
    # What hidden scores become; or "replaced" by -1e9, or -1e9 "added" to them, or "capped": -inf before the softcap, -c after it.
    hidden: str = "-inf"
    empty: float = 0.0  # the output of a query that sees nothing
    contained: bool = True  # False multiplies hidden values by a weight of 0, which is NaN if they are
    weights_in: torch.dtype | None = None  # the weights are rounded to this dtype
    normalised: bool = True  # or they are rounded before the division
    sums_in: torch.dtype | None = None  # the sum over keys is rounded to this dtype after each key
    lse_base: float = math.e
    lse_scaled: bool = True
    group: str = "sum"  # how the gradients of the query heads of a group become one; or "first", "last", "mean"

    @property
    def finite(self) -> bool:
        """Whether q, k and v have no NaN and no infinity."""
        return all(bool(x.isfinite().all()) for x in (self.q, self.k, self.v))

    def results(self, gradients: bool, compute: torch.dtype = torch.float64) -> Results:
        """Output (B, Hq, Nq, Dv), log-sum-exp (B, Hq, Nq), and gradients of q, k, v, bias and sinks.

        Source: Vaswani et al. 2017, section 3.2.
        """
        inputs = {"q": self.q, "k": self.k[:, self.kv_heads], "v": self.v[:, self.kv_heads]}  # k, v for each query head
        inputs |= {name: x for name, x in (("bias", self.bias), ("sinks", self.sinks)) if x is not None}
        leaves = {name: x.detach().to(compute).requires_grad_(gradients) for name, x in inputs.items()}
        output, lse = self._attend(**leaves)
        results = {"output": output.detach(), "lse": lse.detach()}
        if gradients:
            d_output, all_leaves = self.d_output.to(compute), list(leaves.values())
            grads = torch.autograd.grad(output, all_leaves, d_output, allow_unused=True, materialize_grads=True)
            results |= {f"gradient of {name}": grad for name, grad in zip(leaves, grads, strict=True)}
            for name in ("gradient of k", "gradient of v"):
                results[name] = self._reduce_groups(results[name])
        return results

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None, sinks: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        products = q @ k.mT  # (B, Hq, Nq, Nk)
        scores = self._cap(products, "products") * self.scale
        if self.hidden == "capped":
            scores = torch.where(self.visible, scores, -math.inf)
        scores = self._cap(scores, "scores")
        if bias is not None:
            scores = scores + self.bias_scale * bias
        scores = self._cap(scores, "sum")
        if self.hidden == "capped":
            pass  # no other mask comes after it
        elif self.hidden == "added":
            scores = torch.where(self.visible, scores, scores - 1e9)
        elif self.contained:
            scores = torch.where(self.visible, scores, -1e9 if self.hidden == "replaced" else -math.inf)
        else:
            scores = scores + torch.where(self.visible, 0.0, -math.inf)
        if sinks is not None:
            scores = torch.cat([scores, sinks[None, :, None, None].expand(*scores.shape[:3], 1)], -1)
        nothing = scores.new_full((*scores.shape[:3], 1), -math.inf)
        row_max = torch.cat([scores.detach(), nothing], -1).amax(-1, keepdim=True)  # -inf if there are no keys
        sees = row_max != -math.inf  # (B, Hq, Nq, 1); a NaN counts as seen
        weights = torch.exp(scores - torch.where(sees, row_max, 0.0))
        divisor = torch.where(sees, weights.sum(-1, keepdim=True), 1.0)
        if self.normalised:
            weights = _rounded(weights / divisor, self.weights_in)
        else:
            weights = _rounded(weights, self.weights_in) / divisor
        weights = weights[..., : k.shape[2]]
        if self.sums_in is not None:
            output = torch.zeros_like(weights @ v)
            for key in range(v.shape[2]):
                part = torch.where(self.visible[..., key, None], weights[..., key, None] * v[:, :, None, key], 0.0)
                output = _rounded(output + part, self.sums_in)
        elif self.contained and not v.isfinite().all():
            output = torch.where(self.visible[..., None], weights[..., None] * v[:, :, None], 0.0).sum(-2)
        else:
            output = weights @ v
        if not self.lse_scaled:
            scores = torch.where(self.visible, products, -math.inf)
        lse = torch.logsumexp(scores, -1) if scores.shape[-1] else nothing[..., 0]
        return torch.where(sees, output, self.empty), lse / math.log(self.lse_base)

    def _cap(self, scores: Tensor, what: str) -> Tensor:
        return self.softcap * torch.tanh(scores / self.softcap) if self.softcap and what == self.cap_of else scores

    def _reduce_groups(self, gradient: Tensor) -> Tensor:
        """(B, Hq, N, D), of the copies of each key/value head, to (B, Hkv, N, D)."""
        groups = [gradient[:, self.kv_heads == h] for h in range(self.k.shape[1])]  # (B, group, N, D) each
        if self.group in ("first", "last"):
            return torch.stack([x[:, 0 if self.group == "first" else -1] for x in groups], 1)
        return torch.stack([x.sum(1) if self.group == "sum" else x.mean(1) for x in groups], 1)


def _rounded(x: Tensor, dtype: torch.dtype | None) -> Tensor:
    return x if dtype is None else x.to(dtype).to(x.dtype)

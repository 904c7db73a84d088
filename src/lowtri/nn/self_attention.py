"""Single-head masked self-attention, as it is taught: the projections W_q, W_k and W_v."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from lowtri.dispatch.attend import attention
from lowtri.errors import CallError
from lowtri.masks import Mask, as_mask

__all__ = ["MaskedSelfAttention"]


class MaskedSelfAttention(nn.Module):
    """Single-head self-attention; the mask defines which keys each query sees.

    >>> import torch
    >>> _ = torch.manual_seed(42)
    >>> attend = MaskedSelfAttention(2)
    >>> write_a_poem = torch.tensor([[1.16, 0.23], [0.57, 1.36], [4.41, -2.16]])
    >>> output, weights = attend(write_a_poem, return_weights=True)
    >>> weights.detach()
    tensor([[1.0000, 0.0000, 0.0000],
            [0.3606, 0.6394, 0.0000],
            [0.0722, 0.0320, 0.8959]])

    Args:
        d_model: the size of a token's vector, and of q, k and v.
        mask: the module's own mask, or its text.

    Source: Vaswani et al. 2017, section 3.2.1.
    """

    def __init__(self, d_model: int, mask: Mask | str = "causal") -> None:
        super().__init__()
        if d_model < 1:
            raise CallError(f"MaskedSelfAttention: d_model is {d_model}; expected at least 1.")
        self.mask = as_mask(mask)
        # Created in this order, so that a seed gives the same weights as in the common tutorials.
        self.W_q = nn.Linear(d_model, d_model, bias=False)
        self.W_k = nn.Linear(d_model, d_model, bias=False)
        self.W_v = nn.Linear(d_model, d_model, bias=False)

    def forward(self, x: Tensor, mask: Mask | str | None = None, *, return_weights: bool = False) -> Any:
        """Attention of the tokens of ``x`` to each other.

        Args:
            x: (N, d_model) or (B, N, d_model).
            mask: replaces the module's own mask in this call; ``"full"`` hides nothing.
            return_weights: also return the weights.

        Returns:
            output in the shape of ``x``; with ``return_weights`` also the weights, (N, N) or (B, N, N).

        Raises:
            CallError: if ``x`` has another shape.
            MaskError: if the mask is a bare tensor, in which the meaning of True is ambiguous.
        """
        if x.ndim not in (2, 3) or x.shape[-1] != self.W_q.in_features:
            raise CallError(
                f"MaskedSelfAttention: x is {tuple(x.shape)}, expected (N, {self.W_q.in_features}) "
                f"or (B, N, {self.W_q.in_features})."
            )
        q, k, v = self.W_q(x), self.W_k(x), self.W_v(x)  # (N, D) or (B, N, D)
        if x.ndim == 3:
            q, k, v = q[:, None], k[:, None], v[:, None]  # one head: (B, 1, N, D)
        mask = self.mask if mask is None else mask
        if not return_weights:
            output = attention(q, k, v, mask)
            return output[:, 0] if x.ndim == 3 else output
        output, weights = attention(q, k, v, mask, return_weights=True)
        return (output[:, 0], weights[:, 0]) if x.ndim == 3 else (output, weights)

    def extra_repr(self) -> str:
        return f"mask={self.mask!r}"

"""What lowtri.plain has in torch; each name is used as ``lowtri.plain.NAME``, whose description has the meaning of True for all."""

from __future__ import annotations

import math
from types import EllipsisType

import torch
from torch import Tensor, nn

from lowtri.errors import CallError


def create_causal_mask(size: int, device: torch.device | str | None = None) -> Tensor:
    """A number to add to the scores: 0 where visible, -inf above the diagonal. (size, size), torch.

    >>> create_causal_mask(3)
    tensor([[0., -inf, -inf],
            [0., 0., -inf],
            [0., 0., 0.]])
    """
    return torch.full((size, size), -math.inf, device=device).triu(diagonal=1)  # (size, size)


def create_causal_mask_bool(size: int, device: torch.device | str | None = None) -> Tensor:
    """True = attend: the lower triangle and its diagonal. (size, size), torch.

    >>> create_causal_mask_bool(3).int()
    tensor([[1, 0, 0],
            [1, 1, 0],
            [1, 1, 1]], dtype=torch.int32)
    """
    return torch.ones(size, size, dtype=torch.bool, device=device).tril()  # (size, size)


def masked_attention_bool(scores: Tensor, mask: Tensor) -> Tensor:
    """True = attend: the weights (..., Nq, Nk) of scores (..., Nq, Nk) under a boolean mask; 0 where hidden. torch.

    >>> masked_attention_bool(torch.zeros(2, 2), create_causal_mask_bool(2))
    tensor([[1.0000, 0.0000],
            [0.5000, 0.5000]])
    """
    return torch.softmax(scores.masked_fill(~mask, -math.inf), dim=-1)


class MaskedSelfAttention(nn.Module):
    """True = hidden: the score becomes -1e9 where the mask is True. With ``mask=None`` every token sees every token. torch.

    Three linear layers without bias, W_q, W_k and W_v, created in this order, so that a seed gives the notebooks' figures.
    ``embed_dim`` is another name for ``d_model``. Notebooks have two classes of this name; the input selects one:

        encodings               row_dim, col_dim    ``module(x)`` uses    returns
        (T, d_model)            0, 1 (default)      no mask               the output (T, d_model)
        (batch, T, d_model)     1, 2                no mask               the output (batch, T, d_model)
        (batch, T, d_model)     not given           the causal mask       output and weights (batch, T, T)

    In its notebook, the class in the last row has no mask argument and applies the causal mask; here an explicit ``mask=None``
    turns the causal mask off.

    >>> _ = torch.manual_seed(42)
    >>> module = MaskedSelfAttention(d_model=2)
    >>> encodings = torch.tensor([[1.16, 0.23], [0.57, 1.36], [4.41, -2.16]])
    >>> hidden = torch.ones(3, 3, dtype=torch.bool).triu(diagonal=1)
    >>> module(encodings, hidden).detach()
    tensor([[ 0.6038,  0.7434],
            [-0.0062,  0.6072],
            [ 3.4989,  2.2427]])
    >>> output, weights = MaskedSelfAttention(embed_dim=4)(torch.zeros(1, 2, 4))
    >>> output.shape, weights.tolist()
    (torch.Size([1, 2, 4]), [[[1.0, 0.0], [0.5, 0.5]]])
    """

    def __init__(
        self,
        d_model: int | None = None,
        row_dim: int | None = None,
        col_dim: int | None = None,
        *,
        embed_dim: int | None = None,
    ) -> None:
        super().__init__()
        if (d_model is None) == (embed_dim is None):
            raise CallError(
                f"MaskedSelfAttention: d_model={d_model}, embed_dim={embed_dim}: they are two names for one size.\n"
                "Fix: give exactly one, as in MaskedSelfAttention(d_model=2)."
            )
        size = d_model or embed_dim or 0
        self.W_q = nn.Linear(size, size, bias=False)
        self.W_k = nn.Linear(size, size, bias=False)
        self.W_v = nn.Linear(size, size, bias=False)
        self.returns_pair = row_dim is None and col_dim is None  # for a batch
        self.row_dim = 0 if row_dim is None else row_dim
        self.col_dim = self.row_dim + 1 if col_dim is None else col_dim

    def forward(self, encodings: Tensor, mask: Tensor | EllipsisType | None = ...) -> Tensor | tuple[Tensor, Tensor]:
        """True = hidden. Encodings are (T, d_model) or (batch, T, d_model), the mask (T, T); see the class for the result."""
        pair = self.returns_pair and encodings.ndim == 3
        row_dim, col_dim = (1, 2) if pair else (self.row_dim, self.col_dim)
        if isinstance(mask, EllipsisType):
            mask = ~create_causal_mask_bool(encodings.size(1), encodings.device) if pair else None
        q = self.W_q(encodings)
        k = self.W_k(encodings)
        v = self.W_v(encodings)
        scores = q @ k.transpose(row_dim, col_dim)  # (..., T, T)
        scaled = scores / math.sqrt(k.size(col_dim))
        if mask is not None:
            if mask.dtype != torch.bool:
                raise CallError(
                    f"MaskedSelfAttention: mask is {mask.dtype}; expected torch.bool with True = hidden.\n"
                    "Fix: mask == 0 of a lower triangle of ones, or torch.ones(T, T, dtype=torch.bool).triu(1)."
                )
            scaled = scaled.masked_fill(mask, -1e9)
        weights = torch.softmax(scaled, dim=col_dim)
        output: Tensor = weights @ v
        return (output, weights) if pair else output


class AutoRegressiveModel(nn.Module):
    """No mask: the step from hidden states to the next token, the argmax of softmax(linear(hidden)). torch.

    >>> model = AutoRegressiveModel(embed_dim=4, vocab_size=10_000)
    >>> model(torch.zeros(1, 1, 4)).shape
    torch.Size([1, 1])
    """

    def __init__(self, embed_dim: int, vocab_size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(embed_dim, vocab_size)

    def probabilities(self, hidden: Tensor) -> Tensor:
        """No mask: the probability of each word (..., vocab_size) for hidden states (..., embed_dim)."""
        return torch.softmax(self.linear(hidden), dim=-1)

    def forward(self, hidden: Tensor) -> Tensor:
        """No mask: the indices (batch, T) of the likeliest next words for hidden states (batch, T, embed_dim)."""
        return self.probabilities(hidden).argmax(dim=-1)

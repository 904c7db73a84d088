"""Padded batches to packed tokens and back, with flash-attn's names."""

from __future__ import annotations

import torch
from torch import Tensor

from lowtri.errors import CallError

__all__ = ["index_first_axis", "index_put_first_axis", "pad_input", "unpad_input"]


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """Rows of x: (rows, ...) and (n,) to (n, ...)."""
    return input.index_select(0, indices.long())


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """Zeros (first_axis_dim, ...) with the values (n, ...) at the rows ``indices``."""
    return values.new_zeros(first_axis_dim, *values.shape[1:]).index_copy(0, indices.long(), values)


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """The real tokens of a padded batch, packed.

    >>> x, real = torch.arange(6.0).view(2, 3, 1), torch.tensor([[1, 1, 0], [1, 1, 1]])
    >>> tokens, indices, cu_seqlens, longest, used = unpad_input(x, real)
    >>> tokens[:, 0].tolist(), cu_seqlens.tolist(), longest, used.tolist()
    ([0.0, 1.0, 3.0, 4.0, 5.0], [0, 2, 5], 3, [2, 3])

    Args:
        hidden_states: (B, N, ...).
        attention_mask: (B, N), 1 or True for a real token.
        unused_mask: (B, N), 1 for tokens that are kept, but not counted as used.

    Returns:
        the tokens (total, ...); their indices in the flattened batch; cu_seqlens, int32 (B + 1,); the longest length; the number
        of used tokens of each row, int32 (B,).
    """
    if tuple(attention_mask.shape) != tuple(hidden_states.shape[:2]):
        raise CallError(
            f"unpad_input: attention_mask is {tuple(attention_mask.shape)}. Fix: {tuple(hidden_states.shape[:2])}, one per token."
        )
    used = attention_mask.sum(-1, dtype=torch.int32)
    kept = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths = kept.sum(-1, dtype=torch.int32)
    indices = kept.flatten().nonzero().flatten()
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    longest = int(lengths.max()) if len(lengths) else 0
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, cu_seqlens, longest, used


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """Packed tokens (total, ...) as a batch (batch, seqlen, ...), 0 at padding; the inverse of :func:`unpad_input`."""
    return index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(0, (batch, seqlen))

"""Padded batches to packed tokens and back, with flash-attn's names."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lowtri.errors import CallError
from lowtri.integrations.flash_attn.arguments import check_range, whole_numbers

__all__ = ["index_first_axis", "index_put_first_axis", "pad_input", "unpad_input"]


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """The rows ``indices`` (n,) of ``input`` (rows, ...): (n, ...)."""
    return input.index_select(0, _rows("index_first_axis", indices, len(input), "n").to(input.device))


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """Zeros (first_axis_dim, ...) with the values (n, ...) at the rows ``indices``."""
    rows = _rows("index_put_first_axis", indices, first_axis_dim, len(values)).to(values.device)
    return values.new_zeros(first_axis_dim, *values.shape[1:]).index_copy(0, rows, values)


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

    Raises:
        CallError: if a mask has another shape, or holds other numbers than 0 and 1; ``unused_mask`` is 0 at used tokens.
    """
    real = _flags("attention_mask", attention_mask, hidden_states)
    used = real.sum(-1, dtype=torch.int32)
    kept = real
    if unused_mask is not None:
        kept = real + _flags("unused_mask", unused_mask, hidden_states)
        if bool((kept > 1).any()):
            raise CallError("unpad_input: unused_mask is 1 at tokens that attention_mask uses. Fix: 0 there.")
    lengths = kept.sum(-1, dtype=torch.int32)
    indices = kept.flatten().nonzero().flatten()
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    longest = int(lengths.max()) if len(lengths) else 0
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, cu_seqlens, longest, used


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """Packed tokens (total, ...) as a batch (batch, seqlen, ...), 0 at padding; the inverse of :func:`unpad_input`."""
    return index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(0, (batch, seqlen))


def _flags(argument: str, mask: Any, hidden_states: Tensor) -> Tensor:
    """A mask as int32, 1 at its tokens."""
    shape = tuple(hidden_states.shape[:2])
    if not isinstance(mask, Tensor) or tuple(mask.shape) != shape:
        got = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise CallError(f"unpad_input: {argument} is {got}. Fix: a torch tensor {shape}, one number per token.")
    if not bool(((mask == 0) | (mask == 1)).all()):
        raise CallError(
            f"unpad_input: {argument} holds other numbers than 0 and 1. Fix: 1 or True = a real token; additive masks are not read."
        )
    return mask.int()


def _rows(name: str, indices: Any, below: int, count: int | str) -> Tensor:
    rows = whole_numbers(name, "indices", indices, (count,))
    check_range(name, "indices", rows.tolist(), below)
    return torch.from_numpy(rows)

"""The masks of ONNX's Attention: converts its index-based attributes and inputs to a lowtri mask and positions."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lowtri.errors import CallError
from lowtri.masks import POSITION_MAX, Mask, band, causal, full, table
from lowtri.masks.arrays import in_numpy

__all__ = ["PositionedMask", "band_mask", "bools_and_bias", "positions_of", "four_dimensions"]


@dataclass(frozen=True)
class PositionedMask:
    """A mask and the positions of queries and keys; no query sees a key at position -1."""

    mask: Mask
    q: NDArray[np.int64]  # (B|1, Nq)
    k: NDArray[np.int64]  # (B|1, Nk)

    def visible(self) -> NDArray[np.bool_]:
        """All pairs, (B|1, H|1, Nq, Nk)."""
        if not self.mask.batch:
            return np.asarray(self.mask(self.q[:, :, None], self.k[:, None, :]))[:, None]
        return np.asarray(self.mask(self.q[0, :, None], self.k[0]))  # a table, which carries its batch in front

    def arguments(self) -> dict[str, Any]:
        """The positions as arguments of `attention`; empty where they are its default, which more backends run without a table."""
        nq, nk = self.q.shape[1], self.k.shape[1]
        default = np.array_equal(self.k, np.arange(nk)[None]) and np.array_equal(self.q, np.arange(nk - nq, nk)[None])
        return {} if default and nq <= nk else {"q_positions": self.q, "k_positions": self.k}

    def restricted(self, allowed: NDArray[np.bool_]) -> PositionedMask:
        """Intersect with a table (B|1, H|1, Nq|1, Nk), True = may see.

        Where the table is the same for all queries, hidden keys get position -1; else all becomes one table.
        """
        if allowed.all():
            return self
        nq, nk = self.q.shape[1], allowed.shape[3]
        if allowed.shape[1:3] == (1, 1):
            return PositionedMask(self.mask, self.q, np.where(allowed[:, 0, 0], self.k, -1))
        pairs = self.visible() & allowed  # (B|1, H|1, Nq, Nk)
        rows = max(nk - nq, 0) + np.arange(nq)  # a table's last row is its newest position
        return PositionedMask(table(pairs), rows[None], np.arange(nk)[None])


def band_mask(is_causal: bool | int, left: int, right: int) -> Mask:
    """The mask over positions that the three attributes describe."""
    after = 0 if is_causal else right
    if left < 0:
        return full() if after < 0 else causal() if after == 0 else band(POSITION_MAX, after)
    return band(left, POSITION_MAX if after < 0 else after)


def positions_of(q: Any, k: Any, past: int, nonpad: Any, mask: Mask) -> PositionedMask:
    """The positions of queries and keys: after the past, or at the end of each row's real keys."""
    rows, nq, nk = q.shape[0], q.shape[2], k.shape[2]
    keys = np.arange(nk)[None]
    if nonpad is None:
        return PositionedMask(mask, past + np.arange(nq)[None], keys)
    lengths = in_numpy("nonpad_kv_seqlen", nonpad)
    if isinstance(lengths, str):
        raise CallError(f"onnx.attention: {lengths}, but it counts the real keys of each row: ({rows},) whole numbers.")
    if lengths.shape != (rows,) or lengths.dtype.kind not in "iu" or np.any((lengths < 0) | (lengths > nk)):
        raise CallError(
            f"onnx.attention: nonpad_kv_seqlen is {lengths.dtype} {lengths.tolist()}, but it counts the real keys of each "
            f"row: ({rows},) whole numbers in 0 .. {nk}."
        )
    first = lengths[:, None].astype(np.int64) - nq  # negative for queries before any key; positions are not,
    shift = max(0, -int(first.min(initial=0)))  # so all positions are shifted
    return PositionedMask(mask, first + shift + np.arange(nq), np.where(keys < lengths[:, None], keys + shift, -1))


def four_dimensions(attn_mask: Any, q: Any, nk: int) -> Any:
    """attn_mask with four dimensions, its last as long as the keys: (B|1, H|1, Nq|1, Nk)."""
    shape, name = tuple(attn_mask.shape), str(attn_mask.dtype).removeprefix("torch.")
    if name != "bool" and "float" not in name:
        raise CallError(
            f"onnx.attention: attn_mask is {name} {shape}; it holds bools (True = may see) or floats to add.\n"
            "Fix: attn_mask != 0, after checking whether it marks visible or hidden pairs."
        )
    fits = 1 <= len(shape) <= 4 and shape[-1] <= nk
    if not fits or any(n not in (1, m) for n, m in zip(shape[-2::-1], q.shape[2::-1], strict=False)):
        raise CallError(
            f"onnx.attention: attn_mask is {shape}, which does not broadcast against "
            f"(B, Hq, Nq, keys) = {(*q.shape[:3], nk)}."
        )
    attn_mask = attn_mask.reshape((1,) * (4 - len(shape)) + shape)
    missing = nk - shape[-1]
    if not missing:
        return attn_mask
    hidden = False if name == "bool" else -math.inf
    if isinstance(attn_mask, np.ndarray):
        return np.pad(attn_mask, [(0, 0)] * 3 + [(0, missing)], constant_values=hidden)
    from torch.nn.functional import pad

    return pad(attn_mask, (0, missing), value=hidden)


def bools_and_bias(attn_mask: Any) -> tuple[NDArray[np.bool_], Any]:
    """The visible pairs, and the bias; -inf hides a pair, and the bias is not read there."""
    is_bool = str(attn_mask.dtype).endswith("bool")
    allowed = attn_mask if is_bool else attn_mask != -math.inf
    return np.asarray(allowed.cpu() if hasattr(allowed, "cpu") else allowed), None if is_bool else attn_mask

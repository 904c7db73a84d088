"""Merges attention over disjoint sets of keys into attention over all of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from lowtri.errors import CallError
from lowtri.ops.arguments import plain_array

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lowtri.ops.types import Array


def merge(outputs: Sequence[Array], lses: Sequence[Array]) -> tuple[Array, Array]:
    """Merge attention over disjoint sets of keys into attention over all of them.

    >>> import numpy as np, lowtri
    >>> q, k, v = np.random.default_rng(0).normal(size=(3, 4, 8))
    >>> parts = [lowtri.attention(q, k[half], v[half], "full", return_lse=True) for half in (slice(0, 2), slice(2, 4))]
    >>> output, lse = lowtri.merge([out for out, _ in parts], [lse for _, lse in parts])
    >>> bool(np.allclose(output, lowtri.attention(q, k, v, "full")))
    True

    Args:
        outputs: list of (..., Nq, Dv), one for each set of keys.  lses: list of (..., Nq), from ``return_lse=True``.

    Returns:
        (output, lse) over all keys, which can be merged again. Compute the parts without sinks, which would be counted once per part.

    Source: the split softmax of FlashAttention (Dao et al. 2022) and ring attention (Liu et al. 2023).
    """
    outputs, lses = list(outputs), list(lses)
    if not outputs or len(outputs) != len(lses):
        raise CallError(
            f"merge: {len(outputs)} outputs and {len(lses)} lses; there is one of each for every set of keys."
        )
    outputs, lses = (
        [plain_array("an output", x, "merge") for x in outputs],
        [plain_array("an lse", x, "merge") for x in lses],
    )
    whole = outputs + lses
    if not all(hasattr(x, "dtype") for x in whole) or len({isinstance(x, np.ndarray) for x in whole}) > 1:
        kinds = sorted({type(x).__name__ for x in whole})
        raise CallError(
            f"merge: got {' and '.join(kinds)}, but it takes NumPy arrays or torch tensors, all of one kind."
        )
    for out, lse in zip(outputs, lses, strict=True):
        if tuple(out.shape[:-1]) != tuple(lse.shape) or out.shape != outputs[0].shape:
            raise CallError(
                f"merge: an output is {tuple(out.shape)} and its lse {tuple(lse.shape)}, "
                "but outputs share one shape (..., Nq, Dv), and each has an lse (..., Nq)."
            )
    if isinstance(outputs[0], np.ndarray):
        stacked, lse = np.stack(outputs), np.stack(lses)  # (parts, ..., Nq, Dv), (parts, ..., Nq)
        row_max = lse.max(axis=0)
        shift = np.where(np.isneginf(row_max), 0, row_max)
        with np.errstate(divide="ignore"):
            total = np.exp(lse - shift).sum(axis=0)
            joined = shift + np.log(total)
        share = np.exp(lse - shift) / np.where(total == 0, 1, total)
        return (stacked * share[..., None]).sum(axis=0).astype(outputs[0].dtype), joined
    import torch

    parts, lse = torch.stack(outputs), torch.stack(lses)
    nothing = (lse == -torch.inf).all(dim=0)
    share = torch.softmax(lse.masked_fill(nothing, 0), dim=0).masked_fill(nothing, 0)
    joined = torch.logsumexp(lse.masked_fill(nothing, 0), dim=0).masked_fill(nothing, -torch.inf)
    return (parts * share[..., None]).sum(dim=0).to(outputs[0].dtype), joined

"""Tokens at which documents end inside the ids: to change one of them changes who may see whom."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from lowtri.auditing.context import Context, compare
from lowtri.auditing.example import Array, Bools


def separator(context: Context) -> int | None:
    """The token at which the model ends a document; None where documents do not end at a token of the example.

    A token is one where it stands at the end of every document that the mask has (or at the start of every one but the first),
    and where the documents on its two sides are one once it is another token: an earlier token then moves a later output.
    """
    labels = context.options.mask.documents(context.n) if context.inputs.discrete else None
    if labels is None:
        return None
    labels = np.broadcast_to(labels, (context.inputs.batch, context.n))
    last = np.pad(
        labels[:, 1:] != labels[:, :-1], ((0, 0), (0, 1))
    )  # (B, N): the last token of a document but the last
    ids = context.inputs.sequences[0]
    for places in (last, np.roll(last, 1, axis=1)):
        tokens = np.unique(ids[places])
        if len(tokens) == 1 and _joins(context, places, ids, int(tokens[0])):
            return int(tokens[0])
    return None


def _joins(context: Context, places: Bools, ids: Array, token: int) -> bool:
    """Whether the documents are one where these tokens are others."""
    without = replace(context, separator=token)
    fresh, inputs = without.fresh(950), context.inputs
    others = context.vocabulary[context.vocabulary != token]
    joined_ids = np.where(places, others[int(context.options.seed) % len(others)], ids)
    joined = replace(inputs, sequences=(joined_ids.astype(ids.dtype), *inputs.sequences[1:]))
    before_first = np.cumsum(places, axis=1) == 0  # (B, N)
    hidden = context.independent_of(before_first & (ids != token))
    try:
        apart = context.compare(context.tested(inputs.change(before_first & (ids != token), fresh)), hidden)
        one, other = (context.tested(each) for each in (joined, joined.change(before_first, fresh)))
    except Exception:
        return False
    # A leak moves outputs in both cases; what moves in the second alone was hidden by the token.
    together = compare(one, other, context.noise, hidden & (apart.sizes == 0))
    return together.status == "leak"

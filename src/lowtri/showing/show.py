"""show(): attention weights as a picture, in a notebook, a terminal or a file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lowtri.errors import CallError
from lowtri.masks import Mask, as_mask
from lowtri.masks.panels import MAX_CELLS
from lowtri.pictures.files import save_picture
from lowtri.pictures.labels import shortened, split
from lowtri.pictures.pages import card, page
from lowtri.showing.reading import MAX_HEADS, SMALL, Maps, check_weights, pool
from lowtri.showing.svg import as_svg
from lowtri.showing.text import as_text

__all__ = ["WeightMaps", "show"]


@dataclass(frozen=True, repr=False)
class WeightMaps:
    """The result of :func:`lowtri.show`: notebooks show it as a picture, ``print`` as text, and :meth:`save` writes a file."""

    maps: Maps

    def __str__(self) -> str:
        return as_text(self.maps)

    def __repr__(self) -> str:
        maps = self.maps
        return f"<WeightMaps of {maps.heads} x {maps.queries} x {maps.keys} weights>"

    def to_svg(self) -> str:
        """The picture as SVG text."""
        return as_svg(self.maps)

    def _repr_svg_(self) -> str:
        return self.to_svg()

    def _repr_html_(self) -> str:
        return card("weights", self.to_svg(), f"lowtri.show(weights), head={self.maps.head}", str(self))

    def save(self, path: str | Path) -> Path:
        """Write the picture, by the file's name as .svg, .html, .png, .pdf or .txt; atomically.

        PNG and PDF are drawn by matplotlib (``pip install 'lowtri[plot]'``).

        Raises:
            DataError: if the name ends in none of these, or the file cannot be written, or matplotlib is missing.
        """
        forms = {".svg": self.to_svg, ".html": self._as_page, ".txt": self._as_file}
        return save_picture(path, forms)

    def _as_page(self) -> str:
        return page("weights", "attention weights", [self.to_svg()])

    def _as_file(self) -> str:
        return f"{self}\n"


def show(
    weights: Any,
    tokens: Sequence[str] | str | None = None,
    *,
    query_tokens: Sequence[str] | str | None = None,
    mask: Mask | str | None = None,
    head: int = 0,
) -> WeightMaps:
    """Attention weights as a picture: small maps of all heads, then one head.

    The picture's size is bounded. Beyond 64 positions a cell stands for a square of pairs and shows the weight on its keys
    together, mean over its queries, so that rows of cells still sum to 1. The overview has at most 64 heads.

    >>> import numpy as np
    >>> weights = np.tril(np.ones((3, 3))) / [[1], [2], [3]]
    >>> print(show(weights, tokens="The black cat", mask="causal"))
           The  black  cat
    The      1      ╱    ╱
    black  .50    .50    ╱
    cat    .33    .33  .33
    <BLANKLINE>
    queries down, keys across; · 0, █ 1, ╱ hidden

    Args:
        weights: (H, Nq, Nk) or (Nq, Nk), at least 0: a NumPy array, a torch tensor on any device, or nested lists. NaN is drawn
            in the colour of leaks.
        tokens: a label for each key, in a list; a text is cut at its spaces, and by characters where its script has none. The
            queries are the last ``Nq`` of them. Above 64 tokens the labels are left out.
        query_tokens: labels of the queries, if they are other tokens (cross-attention).
        mask: the mask of these weights, or its text: the pairs that it hides are hatched where their weight is 0, so that
            *hidden* and *visible with weight 0* look different.
        head: the head that is shown large.

    Raises:
        CallError: if shapes or the numbers of labels do not fit, or a weight is negative or infinite.
        MaskError: if the mask has a batch or other heads than the weights.

    Source: maps of attention weights over tokens are those of Bahdanau et al. 2015, one per head those of Vaswani et al. 2017.
    """
    weights = check_weights(weights)
    heads, nq, nk = (int(n) for n in weights.shape)
    if not 0 <= head < heads:
        raise CallError(f"show: there is no head {head} among {heads}. Fix: head from 0 to {heads - 1}.")
    allowed = None if mask is None else as_mask(mask)
    if allowed is not None and (allowed.batch[:1] not in ((), (1,)) or allowed.batch[1:] not in ((), (1,), (heads,))):
        raise CallError(f"show: the mask has the batch {allowed.batch}, the weights {heads} heads. Fix: mask.at(b, h).")
    keys, queries = _labels(tokens, query_tokens, nq, nk)
    large = pool(weights, head, MAX_CELLS, allowed)
    small = tuple(pool(weights, h, SMALL, allowed) for h in range(min(heads, MAX_HEADS))) if heads > 1 else ()
    greatest = max((float(np.nanmax(c.values)) for c in (large, *small) if not np.isnan(c.values).all()), default=1.0)
    return WeightMaps(Maps(heads, nq, nk, head, large, small, greatest or 1.0, queries, keys))


def _labels(tokens: Any, query_tokens: Any, nq: int, nk: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Labels of the keys and of the queries; none if there are more than a picture has cells."""
    if tokens is None:
        if query_tokens is not None:
            raise CallError("show: query_tokens came without tokens. Fix: tokens= names the keys.")
        return (), ()
    keys = split(tokens)[0] if isinstance(tokens, str) else list(tokens)
    if len(keys) != nk:
        raise CallError(f"show: {len(keys)} tokens came for {nk} keys. Fix: one token for each key, in a list.")
    if query_tokens is None and nq > nk:
        raise CallError(f"show: {nq} queries and {nk} tokens. Fix: query_tokens= names the queries.")
    queries = keys[nk - nq :] if query_tokens is None else query_tokens
    queries = split(queries)[0] if isinstance(queries, str) else list(queries)
    if len(queries) != nq:
        raise CallError(f"show: {len(queries)} query_tokens came for {nq} queries.")
    if max(nq, nk) > MAX_CELLS:
        return (), ()
    return tuple(shortened(str(token)) for token in keys), tuple(shortened(str(token)) for token in queries)

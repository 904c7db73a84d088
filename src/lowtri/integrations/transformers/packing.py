"""Rows that hold several documents: how a call of transformers says so, and the mask that follows.

    cu_seq_lens_q, cu_seq_lens_k    the start of each document, and the end of the last one, over all rows of the batch in turn
    seq_idx                         the number of each token's document
    position_ids                    begin anew at 0 with each document

transformers looks at ``position_ids`` only in a call without a cache and without a padding mask, and at the others only for flash
attention and recurrent layers. Here all of them count in every call, and two that contradict each other raise. Positions that repeat or
jump without beginning anew are places for the rotary embedding, as drafts have; they say nothing about documents.

Where keys are cached, positions say nothing either. The cache of a packed call remembers its documents, and later tokens continue the
last one.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lowtri.compat.model_caches import CACHE_NAMES, cached_length
from lowtri.errors import CallError
from lowtri.integrations.dense_mask import LazyMask, join
from lowtri.integrations.transformers.lazy import LazyMaskTensor
from lowtri.masks.arrays import FrozenArray
from lowtri.masks.formulas import Band, full
from lowtri.masks.label_masks import Documents, InDocuments, PackedDocuments
from lowtri.masks.mask import Mask

STARTS = ("cu_seq_lens_q", "cu_seq_lens_k")
TOLD = (*STARTS, "seq_idx")  # beside position_ids, which every call may have
_TOLD = frozenset(TOLD)
_REMEMBERED = "lowtri_documents"  # an attribute of a cache, so that its copies have it, too


@dataclass(frozen=True, eq=False)
class Packing:
    """The documents of the rows of a call, from the first token in its cache on."""

    starts: NDArray[np.bool_]  # (B, N), whether a document begins
    told_by: str

    @cached_property
    def same_rows(self) -> bool:
        """Whether all rows have the same documents."""
        return bool((self.starts == self.starts[:1]).all())

    @cached_property
    def mask(self) -> PackedDocuments | Documents:
        """Each token sees its own document; tokens past the end continue the last one."""
        if self.same_rows:
            bounds = [0, *np.flatnonzero(self.starts[0, 1:]) + 1, self.starts.shape[1]]
            return PackedDocuments(tuple(np.diff(bounds).tolist()), open_end=True)
        return Documents(FrozenArray(np.cumsum(self.starts, axis=1)))

    def within_each(self, mask: Mask) -> Mask:
        """The mask within each document, at positions that count from its start."""
        if isinstance(mask, Band) or mask == full():  # which compare distances only
            return join(mask, self.mask)
        return InDocuments(self.mask, mask)


def read_packing(
    named: Mapping[str, Any], firsts: Callable[[], Collection[int]], looks_for_jumps: Callable[[], bool]
) -> Packing | None:
    """The documents that the arguments of a forward say; None for one document in each row.

    Args:
        named: the arguments, by name.
        firsts: the positions with which a document may begin.
        looks_for_jumps: whether transformers' own attention would take every jump of the positions for another document, so that a
            warning names it.

    Raises:
        CallError: if they contradict each other or the tokens.
    """
    tokens = _tokens(named)
    if tokens is None:
        return None
    cache = next((named[name] for name in CACHE_NAMES if hasattr(named.get(name), "get_mask_sizes")), None)
    length = 0 if cache is None else cached_length(cache) or 0
    remembered: Packing | None = getattr(cache, _REMEMBERED, None)
    told = _told(named, *tokens)
    if length:
        if told is not None:
            raise CallError(
                f"transformers: got {told.told_by} with a cache of {length} tokens, whose documents it does not say.\n"
                f"Fix: no {told.told_by} after the first call; later tokens continue the last document."
            )
        return None if remembered is None else _continued(remembered, length, *tokens)
    if remembered is not None:
        delattr(cache, _REMEMBERED)  # its tokens have been dropped
    found, jump = _begun_anew(named, *tokens, firsts)
    if told is not None:
        if found is not None and bool((found.starts & ~told.starts).any()):
            row, token = np.argwhere(found.starts & ~told.starts)[0].tolist()
            raise CallError(
                f"transformers: position_ids begin anew at token {token} of row {row}, where {told.told_by} has no document begin.\n"
                f"Fix: one of the two, or {told.told_by} with all documents."
            )
        found = told
    elif found is None and jump is not None and looks_for_jumps():
        warnings.warn(
            f"transformers: position_ids go from {jump.before} to {jump.after} at token {jump.token} of row {jump.row}. "
            "This is read as one document, since they do not begin anew at 0; transformers' own attention would read two.\n"
            'Fix: cu_seq_lens_q= and cu_seq_lens_k= for documents, attention_mask="causal" for one.',
            stacklevel=2,
        )
    return None if found is None or not found.starts[:, 1:].any() else found


def is_next_token(tokens: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether a call has one token in each row, and neither its arguments nor its cache say documents: :func:`read_packing` then finds
    none. It is asked for every token, so its answer may be False without need.

    Args:
        tokens: the positional argument, if there is one.  kwargs: those by name.
    """
    for name in ("input_ids", "inputs_embeds"):
        given = kwargs.get(name)
        if tokens is not None and given is not None:
            return False
        tokens = given if tokens is None else tokens
    if not isinstance(tokens, Tensor) or tokens.ndim < 2 or tokens.shape[1] != 1 or not _TOLD.isdisjoint(kwargs):
        return False
    remembers = False
    for name in CACHE_NAMES:
        remembers = remembers or hasattr(kwargs.get(name), _REMEMBERED)
    return not remembers


def is_table(mask: Any) -> bool:
    """Whether the attention_mask of a call is a table of pairs that was made by hand."""
    return isinstance(mask, Tensor) and mask.ndim == 4 and not isinstance(mask, LazyMaskTensor)


def remember(cache: Any, packing: Packing) -> None:
    """Let a cache of transformers know the documents of the call that filled it."""
    if hasattr(cache, "get_mask_sizes"):
        setattr(cache, _REMEMBERED, packing)


def documents_of_layer(lazy: LazyMask, others: Mapping[str, Any]) -> LazyMask:
    """The mask of a layer with the documents that its own arguments say, where no forward has read them: of a model that is not
    switched, and under a table made by hand.

    Raises:
        CallError: if the mask is not that of the whole row.
    """
    told = [name for name in TOLD if isinstance(others.get(name), Tensor)]
    if not told or lazy.packed:
        return lazy
    if lazy.q0 or lazy.k0 or lazy.nq != lazy.nk:
        raise CallError(
            f"transformers: got {told[0]} in a layer of {lazy.nq} queries and {lazy.nk} keys, which are not those of one call.\n"
            "Fix: use_cache=False; or switch(model), whose caches remember documents."
        )
    packing = _told(others, others[told[0]].shape[0] if told[0] == "seq_idx" else 0, lazy.nq)
    return lazy if packing is None else lazy.joined(packing.mask)


def documents_in_graph(others: Mapping[str, Any], rows: int, n: int) -> Tensor | None:
    """The table (B, 1, N, N) of the documents that the arguments of a layer say, while a program is traced; None if they say none."""
    ids = others.get("seq_idx")
    if not isinstance(ids, Tensor):
        starts = next((others[name] for name in STARTS if isinstance(others.get(name), Tensor)), None)
        if starts is None:
            return None
        tokens = torch.arange(rows * n, device=starts.device, dtype=starts.dtype)
        ids = torch.searchsorted(starts[1:].contiguous(), tokens, right=True).reshape(rows, n)
    return (ids[:, :, None] == ids[:, None, :])[:, None]


def begins_anew_in_graph(position_ids: Tensor, attention_mask: Any) -> Tensor:
    """Whether some row has a token at position 0 after others: a bool tensor, for a program that cannot read it."""
    zero = position_ids == 0
    real = torch.ones_like(zero)
    if isinstance(attention_mask, Tensor) and attention_mask.ndim == 2 and attention_mask.shape[-1] == zero.shape[-1]:
        real = attention_mask.bool().expand(*zero.shape)
    return (zero & real & (real.cumsum(-1) > 1)).any()


def _tokens(named: Mapping[str, Any]) -> tuple[int, int] | None:
    """How many rows and tokens a call has."""
    for name in ("input_ids", "inputs_embeds"):
        given = named.get(name)
        if isinstance(given, Tensor) and given.ndim >= 2:
            return given.shape[0], given.shape[1]
    return None


def _told(named: Mapping[str, Any], rows: int, n: int) -> Packing | None:
    """The documents by cu_seq_lens and seq_idx; with ``rows`` 0 of any number of rows."""
    found: Packing | None = None
    for name in TOLD:
        given = named.get(name)
        if given is None:
            continue
        numbers = np.asarray(given.cpu() if isinstance(given, Tensor) else given)
        starts = _changes(name, numbers, rows, n) if name == "seq_idx" else _at_bounds(name, numbers, rows, n)
        if found is not None and bool((found.starts != starts).any()):
            raise CallError(
                f"transformers: {found.told_by} and {name} say other documents.\nFix: one of them, or both of the same batch."
            )
        found = Packing(starts, name)
    return found


def _at_bounds(name: str, bounds: NDArray[Any], rows: int, n: int) -> NDArray[np.bool_]:
    if (
        bounds.ndim != 1
        or bounds.dtype.kind not in "iu"
        or len(bounds) < 2
        or bounds[0] != 0
        or (np.diff(bounds) < 0).any()
    ):
        raise CallError(
            f"transformers: {name} is {bounds.dtype} {bounds.shape}; expected integers (documents + 1,) from 0 on that do not fall.\n"
            "Fix: the start of each document, and the end of the last one."
        )
    total = max(rows, bounds[-1] // n if n else 0, 1) * n
    if bounds[-1] != (rows or total // max(n, 1)) * n:
        raise CallError(
            f"transformers: {name} ends at {bounds[-1]}, but the call has {max(rows, 1)} x {n} tokens.\n"
            f"Fix: {name} of all tokens of this call, padding included."
        )
    starts = np.zeros(total + 1, np.bool_)
    starts[bounds] = True
    begins = np.flatnonzero(starts[:-1]).tolist()
    missing = next((row for row in range(0, total, n) if row not in begins), None) if n else None
    if missing is not None:
        raise CallError(
            f"transformers: a document of {name} runs from row {missing // n - 1} into row {missing // n}, which it cannot see.\n"
            "Fix: one row, or documents that end with their row."
        )
    return starts[:-1].reshape(-1, n)


def _changes(name: str, ids: NDArray[Any], rows: int, n: int) -> NDArray[np.bool_]:
    ids = ids[None] if ids.ndim == 1 else ids
    if ids.ndim != 2 or ids.shape[1] != n or ids.shape[0] not in (1, rows or ids.shape[0]):
        raise CallError(
            f"transformers: {name} is {tuple(ids.shape)}, but the call has {max(rows, 1)} x {n} tokens.\n"
            "Fix: the number of each token's document, (B, N)."
        )
    starts = np.ones(ids.shape, np.bool_)
    starts[:, 1:] = ids[:, 1:] != ids[:, :-1]
    return np.broadcast_to(starts, (rows or len(starts), n))


class Jump(NamedTuple):
    """Where positions do not count on."""

    row: int
    token: int
    before: int  # the position before
    after: int  # the position there


def _begun_anew(
    named: Mapping[str, Any], rows: int, n: int, firsts: Callable[[], Collection[int]]
) -> tuple[Packing | None, Jump | None]:
    """The documents by position_ids; and the first place where these neither count on nor begin anew."""
    given = named.get("position_ids")
    if not isinstance(given, Tensor) or given.shape[-1] != n or n < 2 or is_table(named.get("attention_mask")):
        return None, None  # a table says all pairs
    positions = np.asarray(given.cpu())
    if positions.ndim == 3:  # several axes: (text, time, height, width), or three, of which text moves all
        axes = positions[:1] if len(positions) == 4 else positions
        begins = np.isin(axes, list(firsts())).all(0)
        positions = axes[0]
        in_images = len(axes) > 1
    else:
        positions = np.atleast_2d(positions)
        begins = np.isin(positions, list(firsts()))
        in_images = False
    positions = np.broadcast_to(positions, (rows, n))
    begins = np.broadcast_to(begins, (rows, n))
    real = _real(named.get("attention_mask"), rows, n)
    starts = begins & real & (np.cumsum(real, axis=1) > 1)
    jumps = np.zeros((rows, n), np.bool_)
    both = real[:, 1:] & real[:, :-1]
    jumps[:, 1:] = both & (np.diff(positions, axis=1) != 1) & ~starts[:, 1:]
    jump: Jump | None = None
    if jumps.any() and not in_images:
        row, token = np.argwhere(jumps)[0].tolist()
        jump = Jump(row, token, int(positions[row, token - 1]), int(positions[row, token]))
    if not starts.any():
        return None, jump
    starts[:, 0] = True
    return Packing(starts, "position_ids"), jump


def _real(mask: Any, rows: int, n: int) -> NDArray[np.bool_]:
    """Which tokens are no padding, (B, N)."""
    if isinstance(mask, dict):
        mask = next(iter(mask.values()), None)
    if isinstance(mask, LazyMaskTensor):
        mask = (
            None
            if mask.lazy.materialize is None
            else getattr(mask.lazy.materialize, "keywords", {}).get("attention_mask")
        )
    if not isinstance(mask, Tensor) or mask.ndim != 2 or mask.shape[1] < n:
        return np.ones((rows, n), np.bool_)
    return np.broadcast_to(np.asarray(mask[:, :n].cpu() != 0), (rows, n))


def _continued(packing: Packing, length: int, rows: int, n: int) -> Packing:
    """The documents of a cache of ``length`` tokens, and of new ones that continue the last document."""
    if not packing.same_rows:
        raise CallError(
            "transformers: this cache holds rows that are packed differently, and may have been reordered since.\n"
            "Fix: rows packed alike, one row at a time, or use_cache=False."
        )
    kept = packing.starts[:1, :length]
    more = np.zeros((1, max(0, length - kept.shape[1]) + n), np.bool_)
    starts = np.concatenate([kept, more], axis=1)
    return Packing(np.broadcast_to(starts, (rows, starts.shape[1])), packing.told_by)

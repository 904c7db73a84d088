"""Tables of pairs, as callers of other libraries pass them, as masks; and where the queries and keys of a mask stand.

A table is boolean or additive (added to the scores). A boolean table is read as torch's SDPA reads it, True = may see, or as
``nn.MultiheadAttention`` does, True = hidden. An additive one hides a pair with -inf or with the lowest number of its dtype; any other
number but 0 is a bias (:mod:`lowtri.dispatch.dense_tables` reads both). The last row of a table is that of the last key; where there
are more queries than keys, the first row is that of the first key. Inside torch.compile and torch.export a table stays a tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lowtri.dispatch.dense_tables import lowest_number, read_bools, read_numbers
from lowtri.errors import CallError
from lowtri.masks.array_masks import keys, table
from lowtri.masks.formulas import Band, full
from lowtri.masks.mask import Mask
from lowtri.masks.tile import EMPTY
from lowtri.ops.arguments import plain_array

_FEW = 16  # queries: below, reading keys and values dominates, and hidden keys are trimmed at both ends


@dataclass(frozen=True, eq=False)
class LazyMask:
    """A mask for ``nq`` queries from position ``q0`` on and ``nk`` keys from position ``k0`` on.

    >>> from lowtri.masks import causal
    >>> LazyMask(causal(), 5, 2, 4, 8).table().astype(int)[0, 0]
    array([[1, 1, 0, 0, 0, 0, 0, 0],
           [1, 1, 1, 0, 0, 0, 0, 0]])
    """

    mask: Mask
    q0: int
    nq: int
    k0: int
    nk: int
    materialize: Callable[[], Tensor | None] | None = field(default=None, repr=False)  # for the forward that then runs
    context: Any = field(default=None, repr=False)  # a ContextParallel, which then has the positions
    packed: bool = field(default=False, repr=False)  # whether the documents that the call says are in it
    cache: Any = field(default=None, repr=False)  # an EvictingCache, which then has the positions

    @cached_property
    def positions(self) -> dict[str, NDArray[np.int64]]:
        """The positions to pass to ``attention``; empty where keys are at 0 .. Nk-1 and the queries at the last of them."""
        if self.k0 == 0 and (self.q0 == self.nk - self.nq or not self.mask.depends_on_query):
            return {}
        q_positions, k_positions = np.arange(self.q0, self.q0 + self.nq), np.arange(self.k0, self.k0 + self.nk)
        return {"q_positions": q_positions, "k_positions": k_positions}

    @cached_property
    def trimmed(self) -> LazyMask:
        """This mask without the keys at either end that no query sees: the tail of a static cache, what a window left behind.

        One tile decides about the tail; the start of a window is found by bisection. Computed once for a forward, not a layer.
        """
        mask = self.mask
        q0, q1 = self.q0, self.q0 + self.nq
        low, high = self.k0, self.k0 + self.nk
        if not mask.depends_on_query or low == high:
            return self
        if low < q1 < high and _all_hidden(mask, q0, q1, q1, high):
            high = q1
        if self.nq < _FEW and _all_hidden(mask, q0, q1, low, low + 1):
            hidden, visible = low + 1, high  # all keys before the first are hidden, some before the second are not
            while visible - hidden > 1:
                middle = (hidden + visible) // 2
                if _all_hidden(mask, q0, q1, low, middle):
                    hidden = middle
                else:
                    visible = middle
            low = hidden
        if high - low == self.nk or _all_hidden(mask, q0, q1, low, high):
            return self
        return replace(self, k0=low, nk=high - low)

    def joined(self, mask: Mask) -> LazyMask:
        """This mask and another."""
        return replace(self, mask=join(self.mask, mask), materialize=None)

    def rows(self, start: int, stop: int) -> LazyMask:
        """The queries ``start .. stop`` alone (indices)."""
        self._require_sequence()
        return replace(self, q0=self.q0 + start, nq=max(stop - start, 0), materialize=None)

    def columns(self, start: int, stop: int) -> LazyMask:
        """The keys ``start .. stop`` alone (indices)."""
        self._require_sequence()
        return replace(self, k0=self.k0 + start, nk=max(stop - start, 0), materialize=None)

    def table(self) -> NDArray[np.bool_]:
        """Every pair, True = may see: (B|1, Hq|1, Nq, Nk)."""
        self._require_sequence()
        if self.cache is not None:
            raise CallError(
                "EvictingCache: the model reads its mask, but the cache does not hold all of its columns.\n"
                "Fix: transformers.DynamicCache for this model."
            )
        q, k = np.arange(self.q0, self.q0 + self.nq), np.arange(self.k0, self.k0 + self.nk)
        pairs = np.asarray(self.mask(q[:, None], k[None, :]))
        batch = self.mask.batch
        lead = (*batch, *[1 for _ in range(2 - len(batch))])  # (B|1, Hq|1)
        return np.broadcast_to(pairs.reshape(*lead, *pairs.shape[-2:]), (*lead, self.nq, self.nk))

    def _require_sequence(self) -> None:
        if self.context is not None:
            raise CallError(
                "transformers: the model reads its mask, but no process has all pairs of the sequence.\n"
                "Fix: use(model) without context_parallel for this model."
            )


# lowtri's default is that keys are at 0 .. Nk-1 and queries at the last of them. Other libraries align a table of another shape than a
# square in one of two ways; negative positions would be padding.


def top_left_positions(nq: int, nk: int, device: Any = None) -> dict[str, Any]:
    """The positions to pass to ``attention`` where the first query stands at the first key, as torch's ``is_causal`` has it.

    >>> top_left_positions(2, 4), top_left_positions(4, 4)
    ({'q_positions': array([0, 1])}, {})

    Args:
        device: of tensors, which a traced program needs.
    """
    if nq == nk:
        return {}
    return {"q_positions": torch.arange(nq, device=device) if torch.compiler.is_compiling() else np.arange(nq)}


def bottom_right_positions(nq: int, nk: int) -> dict[str, Any]:
    """The positions to pass to ``attention`` where the last query stands at the last key, as flash-attn has it.

    >>> bottom_right_positions(4, 2)
    {'q_positions': array([0, 1, 2, 3]), 'k_positions': array([2, 3])}
    """
    return {} if nq <= nk else {"q_positions": np.arange(nq), "k_positions": np.arange(nq - nk, nq)}


def _all_hidden(mask: Mask, q0: int, q1: int, k0: int, k1: int) -> bool:
    return bool(np.all(mask.tile(q0, q1, k0, k1) == EMPTY))


def join(left: Mask, right: Mask) -> Mask:
    """left & right, simplified, so that equal masks are built alike: ``full`` is dropped, and two bands become one."""
    if right == full():
        return left
    if left == full() or left == right:
        return right
    if isinstance(left, Band) and isinstance(right, Band):
        before, after = min(left.before, right.before), min(left.after, right.after)
        return Band(before, after, f"window({before + 1})" if after == 0 else f"band({before}, {after})")
    return left & right


class MaskAndBias(NamedTuple):
    """A table as a lazy mask, and the bias that is left of it (None, or four dimensions)."""

    lazy: LazyMask
    bias: Tensor | None


@lru_cache(maxsize=16)  # of the tables that the layers of a few models share
def _lazy_mask_of(mask: Mask, nq: int, nk: int) -> LazyMask:
    """A mask in place; the same object, with what was worked out from it, for an equal one."""
    return LazyMask(mask, max(nk - nq, 0), nq, 0, nk)


_GIVEN = ("transformers", "attention_mask")  # the library and the argument, for errors


def read_dense_mask(mask: Tensor, nq: int, nk: int, dtype: torch.dtype, name: tuple[str, str] = _GIVEN) -> MaskAndBias:
    """Read a table for ``nq`` queries and ``nk`` keys, outside of torch.compile; the arguments are those of :func:`read_table`.

    >>> import torch
    >>> least = torch.finfo(torch.float32).min
    >>> read_dense_mask(torch.tensor([[[[0.0, least], [0.0, 0.0]]]]), 2, 2, torch.float32)
    MaskAndBias(lazy=LazyMask(mask=causal, q0=0, nq=2, k0=0, nk=2), bias=None)
    """
    found, bias, _ = read_table(mask, nq, nk, dtype, name)
    return MaskAndBias(_lazy_mask_of(found, nq, nk), bias)


def read_table(
    mask: Tensor, nq: int, nk: int, dtype: torch.dtype, name: tuple[str, str] = _GIVEN
) -> tuple[Mask, Tensor | None, dict[str, Any]]:
    """The mask, the bias and the positions of a table, as :func:`read_pairs`.

    Args:
        mask: as there, or with fewer dimensions in front.

    Raises:
        CallError: if the sizes do not fit, or the mask holds integers, which could be read as booleans or as a bias.
    """
    if not torch.compiler.is_compiling():
        mask = plain_array(name[1], mask, name[0])
    return read_pairs(mask.reshape(_to_4d(mask, nq, nk, name)), nq, nk, dtype, name)


def read_pairs(
    pairs: Tensor,
    nq: int,
    nk: int,
    dtype: torch.dtype,
    name: tuple[str, str],
    true_hides: bool = False,
    lowest_hides: bool = True,
) -> tuple[Mask, Tensor | None, dict[str, Any]]:
    """The mask, the bias and the positions of a table; also inside torch.compile and torch.export.

    Args:
        pairs: (B|1, H|1, Nq|1, Nk|1); bools, True = may see, or numbers added to the scores.
        nq, nk: how many queries and keys the call has.
        dtype: of the queries.
        name: of the library and the argument, for errors.
        true_hides: whether True = hidden, as in ``nn.MultiheadAttention``.
        lowest_hides: whether the lowest number of a dtype hides, and not -inf alone; False for one of two masks, which decide
            together whether a query sees any key.
    """
    bools = pairs.dtype == torch.bool
    greatest_hidden = lowest_number(pairs.dtype, dtype) if lowest_hides and not bools else -math.inf
    positions = top_left_positions(nq, nk, pairs.device) if nq > nk else {}
    if torch.compiler.is_compiling():
        visible = _visible(pairs, greatest_hidden, true_hides)
        return _traced_mask(visible, nq, nk), None if bools else pairs, positions
    if not bools:
        read = read_numbers(pairs, nq, nk, greatest_hidden, always=True)
        return (full(), pairs, positions) if read is None else (read.mask, read.bias(pairs), positions)
    found = read_bools(pairs, nq, nk, true_hides)
    if found is None:
        raise CallError(
            f"{name[0]}: {name[1]} is a tensor without numbers (fake, meta, or inside a transform). Fix: a tensor made outside."
        )
    return found, None, positions


def _to_4d(mask: Tensor, nq: int, nk: int, name: tuple[str, str]) -> tuple[int, ...]:
    """The mask's shape in four dimensions."""
    library, argument = name
    shape = (*(1,) * (4 - mask.ndim), *mask.shape)
    if len(shape) != 4 or shape[2] not in (1, nq) or shape[3] not in (1, nk):
        raise CallError(
            f"{library}: {argument} is {tuple(mask.shape)}, but the layer has {nq} queries and {nk} keys: "
            f"expected (B, H, {nq}, {nk}), each size or 1."
        )
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise CallError(
            f"{library}: {argument} is {mask.dtype} {tuple(mask.shape)}; as numbers for each pair they could mean "
            "two things.\nFix: bools, True = may see, or floats that are added to the scores."
        )
    return shape


def _traced_mask(visible: Tensor, nq: int, nk: int) -> Mask:
    """The mask of a table (B|1, H|1, Nq|1, Nk|1) while a program is traced."""
    if visible.shape[1] == visible.shape[2] == 1 and nq != 1:
        return keys(visible[:, 0, 0].expand(-1, nk))
    visible = visible.expand(*visible.shape[:2], nq, nk)
    if visible.shape[1] == 1:
        visible = visible[0, 0] if visible.shape[0] == 1 else visible[:, 0]
    return table(visible)


def _visible(mask: Tensor, most_hidden: float, true_hides: bool) -> Tensor:
    """The visible pairs, while a program is traced. A query with no number above the lowest one sees the keys that have it."""
    if mask.dtype == torch.bool:
        return ~mask if true_hides else mask
    visible = ~(mask <= most_hidden)  # NaN hides nothing
    if most_hidden == -math.inf:
        return visible
    return visible | (~visible.any(dim=-1, keepdim=True) & (mask > -torch.inf))

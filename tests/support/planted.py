"""Faults to plant in the integrations, one at a time: what the matrix of ``tests/verifying`` must find.

Each fault replaces one function of an integration for as long as its context lasts. It is a mistake that somebody could make
there: a mask the wrong way round, a window one key too wide, a bias that gets lost, rows that are exchanged. ``found_by`` names
entries of the matrix, of which each finds it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from lowtri.dispatch import dense_tables, jagged, sdpa_compatible
from lowtri.generation import slots
from lowtri.integrations import dense_mask, flash_attn, function_mask
from lowtri.integrations import torch as torch_nn
from lowtri.integrations.flash_attn import functions, layers_rotary
from lowtri.integrations.flex import attention as flex_attention
from lowtri.integrations.flex import masks as flex_masks
from lowtri.integrations.transformers import attention as transformers_attention
from lowtri.integrations.transformers import caching as transformers_caching
from lowtri.integrations.transformers import masks as transformers_masks
from lowtri.masks import Mask, causal
from lowtri.masks.tile import Truth

Change = Callable[[Any], Any]  # from a function to the one that takes its place


@dataclass(frozen=True)
class Fault:
    """One mistake.

    Attributes:
        door: the way into lowtri that it breaks.
        says: what is wrong.
        where: the module or class, and the name of the function in it.
        change: from the function to the wrong one.
        found_by: names of entries of the matrix, of which each finds it.
        case: the name of a case of ``lowtri.verify`` in which they do.
    """

    door: str
    says: str
    where: tuple[Any, str]
    change: Change
    found_by: tuple[str, ...]
    case: str

    @contextmanager
    def planted(self) -> Iterator[None]:
        """While this lasts, the fault is there."""
        owner, name = self.where
        right = owner[name] if isinstance(owner, dict) else getattr(owner, name)
        change = patch.dict(owner, {name: self.change(right)}) if isinstance(owner, dict) else None
        kept = patch.multiple(dense_tables, _kept=(), _small=())
        with kept, change or patch.object(owner, name, self.change(right)):
            yield


FAULTS: dict[str, Fault] = {}


def fault(name: str, case: str, door: str, where: tuple[Any, str], *found_by: str) -> Callable[[Change], Change]:
    """Add a fault; its sentence is the docstring of the function that makes the change."""

    def add(change: Change) -> Change:
        FAULTS[name] = Fault(door, " ".join((change.__doc__ or "").split()), where, change, found_by, case)
        return change

    return add


def with_options(**changes: Any) -> Change:
    """A change of keyword arguments: a value that replaces what was passed, or a function of it."""

    def change(right: Any) -> Any:
        def wrong(*args: Any, **options: Any) -> Any:
            for name, value in changes.items():
                if options.get(name) is not None:
                    options[name] = value(options[name]) if callable(value) else value
            return right(*args, **options)

        return wrong

    return change


# torch's function.

SDPA = "scaled_dot_product_attention"


@fault("sdpa polarity", "five queries, 130 keys", SDPA, (sdpa_compatible, "read_bools"), SDPA)
def _(right: Any) -> Any:
    """True hides, as in nn.MultiheadAttention."""
    return lambda visible, *sizes: right(~visible, *sizes)


@fault("sdpa alignment", "aligned to the first key", SDPA, (sdpa_compatible, "attention"), f"{SDPA}, is_causal")
def _(right: Any) -> Any:
    """is_causal is aligned to the last key."""
    return with_options(q_positions=lambda positions: None)(right)


@fault("sdpa bias", "ALiBi, 5 queries", SDPA, (sdpa_compatible, "attention"), SDPA)
def _(right: Any) -> Any:
    """Numbers of a mask only hide; what they add is lost."""
    return with_options(bias=lambda bias: torch.where(bias == -math.inf, bias, 0.0))(right)


@fault("sdpa heads", "ALiBi, 5 queries", SDPA, (sdpa_compatible, "attention"), SDPA)
def _(right: Any) -> Any:
    """The heads of a bias are in the opposite order."""
    return with_options(bias=lambda bias: bias.flip(1))(right)


# nn.MultiheadAttention.

MULTIHEAD = "nn.MultiheadAttention"


def _of_argument(name: str, change: Change) -> Change:
    """A change of what is read from one argument: mask, bias and positions."""

    def plant(right: Any) -> Any:
        def wrong(*args: Any) -> Any:
            return change(right)(*args) if args[4][1] == name else right(*args)

        return wrong

    return plant


@fault(
    "padding polarity",
    "padding left, 5 queries",
    MULTIHEAD,
    (torch_nn, "read_pairs"),
    f"{MULTIHEAD}, bools",
    f"{MULTIHEAD}, floats",
)
def _(right: Any) -> Any:
    """key_padding_mask shows where it is True."""

    def wrong(*args: Any) -> Any:
        mask, bias, positions = right(*args)
        return ~mask, bias, positions

    return _of_argument("key_padding_mask", lambda _: wrong)(right)


@fault("padding bias", "bias of keys", MULTIHEAD, (torch_nn, "read_pairs"), f"{MULTIHEAD}, floats")
def _(right: Any) -> Any:
    """Numbers in key_padding_mask hide, and are not added."""

    def wrong(*args: Any) -> Any:
        mask, _bias, positions = right(*args)
        return mask, None, positions

    return _of_argument("key_padding_mask", lambda _: wrong)(right)


@fault("rows and heads", "ALiBi, 5 queries", MULTIHEAD, (torch_nn, "_read_masks"), f"{MULTIHEAD}, bools")
def _(right: Any) -> Any:
    """The first dimension of a 3-D attn_mask is read as heads times rows."""

    def wrong(pairs: Any, *rest: Any) -> Any:
        if pairs is not None:
            rows, heads = pairs.shape[:2]
            pairs = pairs.flatten(0, 1).unflatten(0, (heads, rows)).transpose(0, 1)
        return right(pairs, *rest)

    return wrong


@fault(
    "promise aligned",
    "aligned to the first key",
    MULTIHEAD,
    (torch_nn, "top_left_positions"),
    f"{MULTIHEAD}, is_causal",
)
def _(right: Any) -> Any:
    """What is_causal promises is taken to be aligned to the last key."""
    return lambda *args: {}


@fault("masks joined", "padding left, 5 queries", MULTIHEAD, (torch_nn, "join"), f"{MULTIHEAD}, bools")
def _(right: Any) -> Any:
    """A key is visible if either of the two masks shows it."""
    return lambda left, right: left | right


# Tables of transformers, and the function that its layers call.

ATTEND = "transformers"
FORMS = tuple(f"transformers, {form}" for form in ("bools", "-inf", "least"))


@fault("large numbers hide", "bias of -100", "dense_mask", (dense_mask, "read_numbers"), "transformers, -inf")
def _(right: Any) -> Any:
    """Every number below -50 hides."""
    return lambda numbers, *args, **options: right(numbers.masked_fill(numbers < -50, -math.inf), *args, **options)


@fault(
    "bias of a table",
    "ALiBi, 5 queries",
    "dense_mask",
    (transformers_attention, "read_dense_mask"),
    "transformers, -inf",
)
def _(right: Any) -> Any:
    """Numbers other than -inf in a table are lost."""
    return lambda *args: right(*args)._replace(bias=None)


@fault("causal table", "aligned to the first key", "dense_mask", (dense_tables, "simplest_mask"), "transformers, bools")
def _(right: Any) -> Any:
    """A table whose first row shows one key is taken for the causal mask."""

    def wrong(visible: Any, nq: int, nk: int) -> Mask:
        triangle = np.arange(nk) <= np.arange(nq)[:, None]
        looks_causal = visible.shape[2:] == (nq, nk) and (visible == triangle).all()
        return causal() if looks_causal else right(visible, nq, nk)

    return wrong


@fault("rows of a table", "padding left, 5 queries", "dense_mask", (dense_tables, "simplest_mask"), *FORMS)
def _(right: Any) -> Any:
    """The rows of a batch are exchanged."""
    return lambda visible, *sizes: right(visible[::-1], *sizes)


@fault("scale", "scale", ATTEND, (transformers_attention, "attention"), *FORMS)
def _(right: Any) -> Any:
    """scaling is ignored."""
    return with_options(scale=lambda scale: None)(right)


@fault("softcap", "softcap", ATTEND, (transformers_attention, "attention"), *FORMS)
def _(right: Any) -> Any:
    """softcap gets lost."""
    return with_options(softcap=lambda softcap: None)(right)


@fault("sinks", "sink logits", ATTEND, (transformers_attention, "attention"), *FORMS)
def _(right: Any) -> Any:
    """Each head has another head's sink."""
    return with_options(sinks=lambda sinks: sinks.flip(0))(right)


# The mask functions of transformers.

MASKS = "transformers, mask functions"


@fault("offset", "one query, 130 keys", "transformers masks", (transformers_masks, "LazyMask"), MASKS)
def _(right: Any) -> Any:
    """Queries stand at the first keys, also where keys are cached."""
    return lambda mask, q0, *rest, **more: right(mask, 0, *rest, **more)


@fault("padding of rows", "padding left, 5 queries", "transformers masks", (transformers_masks, "_keys"), MASKS)
def _(right: Any) -> Any:
    """The paddings of the rows are exchanged."""
    return lambda valid: right(valid.flip(0))


@fault("window of a function", "window of 8, 5 queries", "transformers masks", (transformers_masks, "_read"), MASKS)
def _(right: Any) -> Any:
    """A sliding window shows one key more than its size."""

    def wrong(name: str, fn: Any, rows: int, read: Any) -> Mask:
        mask: Mask = right(name, fn, rows, read)
        wider = name == "sliding_window_overlay" and fn.__closure__[0].cell_contents != 3  # which the check asks for
        return transformers_masks._sliding(mask.before + 1, mask.after) if wider else mask  # type: ignore[attr-defined]

    return wrong


# Jagged tensors.

JAGGED = "jagged tensors"


@fault("ends of jagged rows", "five queries, 130 keys", JAGGED, (jagged, "_positions"), JAGGED)
def _(right: Any) -> Any:
    """Queries of a sequence stand at its first keys."""
    return lambda of_q, of_k, from_top: right(of_q, of_k, True)


@fault("jagged rows apart", "padding left, 5 queries", JAGGED, (jagged, "documents"), JAGGED)
def _(right: Any) -> Any:
    """Every sequence sees all sequences before it."""
    return lambda lengths, inner: right(lengths=[int(lengths.sum())], inner=inner)


# EvictingCache.

EVICTING = "EvictingCache"


@fault("evicted too early", "window of 8, 5 queries", EVICTING, (slots.SlotAllocator, "_invisible"), EVICTING)
def _(right: Any) -> Any:
    """A key that the next query is the last to see is evicted before it."""
    return lambda self, k, first: right(self, k, first + 1)


@fault("padding in the cache", "padding left, 5 queries", EVICTING, (transformers_caching, "_pads"), EVICTING)
def _(right: Any) -> Any:
    """The cache takes the padding of each row for its neighbour's."""
    return lambda valid: right(valid)[::-1]


# Mask functions of any library, by their operations.

FLEX = "flex_attention"
FORMULAS = f"{FLEX}, formulas"


@fault("tiles of a comparison", "129 tokens", "function_mask", (function_mask._OPERATIONS, "ge"), FORMULAS)
def _(right: Any) -> Any:
    """A tile in which only q = k is visible is empty."""

    def wrong(x: Any, y: Any) -> Any:
        ends = [(z.low, z.high) if hasattr(z, "low") else (z, z) for z in (x, y)]
        return Truth(ends[0][0] > ends[1][1], ends[0][1] > ends[1][0])

    return wrong


@fault(
    "rows of a function",
    "padding left, 5 queries",
    "function_mask",
    (function_mask.FunctionMask, "_for_row"),
    FLEX,
    FORMULAS,
)
def _(right: Any) -> Any:
    """Every row of the batch has the mask of the first one."""
    return lambda self, b, h: right(self, 0, h)


# FlexAttention.


@fault("full blocks", "300 tokens", "flex masks", (flex_masks, "_listed"), FLEX, FORMULAS)
def _(right: Any) -> Any:
    """Blocks that are listed as full are left out."""

    def wrong(blocks: Any, counts: Any, indices: Any) -> Any:
        is_full = counts is not None and counts is blocks.full_kv_num_blocks
        return right(blocks, None if is_full else counts, indices)

    return wrong


@fault(
    "blocks in the first key",
    "padding left, 5 queries",
    "flex masks",
    (flex_attention, "top_left_positions"),
    FLEX,
    FORMULAS,
)
def _(right: Any) -> Any:
    """Indices of queries count from the last key."""
    return lambda nq, nk: {}


def _of_scores(change: Callable[[Any], None]) -> Change:
    """A change of what was read from a score_mod."""

    def plant(right: Any) -> Any:
        def wrong(*args: Any) -> Any:
            scores = right(*args)
            change(scores)
            return scores

        return wrong

    return plant


@fault("cap of a score_mod", "softcap", "flex scores", (flex_attention, "read_score_mod"), FLEX, FORMULAS)
def _(right: Any) -> Any:
    """The soft cap of a score_mod is recognised, and not passed on."""
    return _of_scores(lambda scores: setattr(scores, "softcap", None))(right)


@fault(
    "condition of a score_mod",
    "padding left, 5 queries",
    "flex scores",
    (flex_attention, "read_score_mod"),
    f"{FLEX}, conditions",
)
def _(right: Any) -> Any:
    """What a condition in a score_mod hides is visible."""
    return _of_scores(lambda scores: setattr(scores, "mask", None))(right)


@fault("heads of a score_mod", "bias, 5 queries", "flex scores", (flex_attention, "read_score_mod"), FORMULAS)
def _(right: Any) -> Any:
    """The heads of a captured table are in the opposite order."""

    def change(scores: Any) -> None:
        if isinstance(scores.bias, torch.Tensor):
            scores.bias = scores.bias.flip(1)

    return _of_scores(change)(right)


@fault("tile of scores", "bias, 5 queries", "flex scores", (flex_attention, "tile_function"), f"{FLEX}, general")
def _(right: Any) -> Any:
    """Scores that are computed in torch get the indices of other rows of the batch."""

    def wrong(score_mod: Any) -> Any:
        apply = right(score_mod)
        return lambda scores, tile: apply(scores.flip(0), tile).flip(0)

    return wrong


# flash-attn.

FLASH = "flash_attn"
CACHE = "flash_attn cache"


@fault("window of flash-attn", "log-sum-exp of a window", FLASH, (functions, "read_window"), FLASH, f"{CACHE}, pages")
def _(right: Any) -> Any:
    """A window shows one key more."""

    def wrong(*args: Any) -> Any:
        left, after = right(*args)
        return left + 1 if left >= 0 else left, after

    return wrong


@fault("slopes", "ALiBi, 5 queries", FLASH, (functions, "alibi"), FLASH)
def _(right: Any) -> Any:
    """ALiBi favours what is far away."""
    return lambda slopes: right(-slopes)


@fault("log-sum-exp", "log-sum-exp of a window", FLASH, (functions._Options, "run"), FLASH, f"{CACHE}, pages")
def _(right: Any) -> Any:
    """The log-sum-exp is one of base 2."""

    def wrong(*args: Any) -> Any:
        output, *others = right(*args)
        return output, *[x / math.log(2) for x in others[:1]], *others[1:]

    return wrong


@fault(
    "packed keys",
    "one query, 130 keys",
    "flash-attn packed",
    (flash_attn, "flash_attn_kvpacked_func"),
    "flash_attn packed",
)
def _(right: Any) -> Any:
    """Values stand before keys in a packed tensor."""
    return lambda q, kv, *args, **options: right(q, kv.flip(2), *args, **options)


@fault(
    "packed heads", "head size 1", "flash-attn packed", (flash_attn, "flash_attn_qkvpacked_func"), "flash_attn packed"
)
def _(right: Any) -> Any:
    """Heads of queries are in the opposite order."""

    def wrong(qkv: Any, *args: Any, **options: Any) -> Any:
        return right(torch.cat([qkv[:, :, :1].flip(3), qkv[:, :, 1:]], 2), *args, **options)

    return wrong


VARLEN = "flash_attn varlen"


@fault("sequences apart", "one query, 130 keys", VARLEN, (functions, "_documents"), VARLEN)
def _(right: Any) -> Any:
    """Packed sequences see one another."""
    return lambda *args: (None, right(*args)[1])


@fault("ends of sequences", "one query, 130 keys", VARLEN, (functions, "_documents"), VARLEN)
def _(right: Any) -> Any:
    """The queries of a sequence stand at its first keys, not at its last ones."""

    def wrong(of_q: Any, of_k: Any, total_q: int, total_k: int) -> Any:
        mask, positions = right(of_q, of_k, total_q, total_k)
        if "q_positions" in positions:
            lengths = np.maximum(np.diff(of_q), np.diff(of_k))
            starts = np.cumsum(lengths) - lengths
            counted = np.arange(of_q[-1]) + np.repeat(starts - np.array(of_q[:-1]), np.diff(of_q))
            positions["q_positions"][: of_q[-1]] = counted
        return mask, positions

    return wrong


@fault("ragged slots", "padding left, 5 queries", CACHE, (functions, "_slot_positions"), f"{CACHE}, ragged")
def _(right: Any) -> Any:
    """All rows of a cache are as long as the longest."""
    return lambda nq, nk, starts, ends: right(nq, nk, starts, [max(ends) for _ in ends])


@fault("ragged rows", "padding left, 5 queries", CACHE, (functions, "_slot_positions"), f"{CACHE}, ragged")
def _(right: Any) -> Any:
    """The lengths of the rows are exchanged."""
    return lambda nq, nk, starts, ends: right(nq, nk, starts, ends[::-1])


@fault("left padding", "padding left, 5 queries", CACHE, (functions, "_slot_positions"), f"{CACHE}, left padding")
def _(right: Any) -> Any:
    """Slots before a row's first one are visible."""
    return lambda nq, nk, starts, ends: right(nq, nk, None, ends)


@fault("slot of new tokens", "one query, 130 keys", CACHE, (functions._Slots, "write"), f"{CACHE}, new tokens")
def _(right: Any) -> Any:
    """New keys are written one slot too early."""
    return lambda self, lengths, k, v: right(self, [max(n - 1, 0) for n in lengths], k, v)


@fault("order of pages", "one query, 130 keys", CACHE, (functions._Slots, "read"), f"{CACHE}, pages")
def _(right: Any) -> Any:
    """Pages are read in the order in which they lie in memory."""

    def wrong(self: Any, n: int) -> Any:
        self.table = np.sort(self.table, axis=1)
        return right(self, n)

    return wrong


@fault("rows by index", "one token", CACHE, (functions._Slots, "read"), f"{CACHE}, index")
def _(right: Any) -> Any:
    """cache_batch_idx is ignored."""

    def wrong(self: Any, n: int) -> Any:
        self.table = np.arange(self.batch)[:, None]
        return right(self, n)

    return wrong


# Rotary embedding.


@fault("offset of rotary", "one query, 130 keys", "rotary", (layers_rotary, "for_rows"), "flash_attn rotary")
def _(right: Any) -> Any:
    """seqlen_offsets are ignored."""
    return lambda name, argument, value, rows: [0 for _ in range(rows)]


@fault("pairs of rotary", "one query, 130 keys", "rotary", (layers_rotary, "rotate"), "flash_attn rotary")
def _(right: Any) -> Any:
    """Pairs of entries are neighbours where they should be half a head apart, and the other way round."""

    def wrong(x: Any, cos: Any, sin: Any, positions: Any, interleaved: bool, *name: Any) -> Any:
        return right(x, cos, sin, positions, not interleaved, *name)

    return wrong


@fault("rotary in the cache", "one query, 130 keys", "rotary", (functions, "rotate"), f"{CACHE}, rotary")
def _(right: Any) -> Any:
    """New tokens are rotated as if the cache were empty."""

    def wrong(x: Any, cos: Any, sin: Any, positions: Any, *rest: Any) -> Any:
        return right(x, cos, sin, positions - positions[:, :1], *rest)

    return wrong

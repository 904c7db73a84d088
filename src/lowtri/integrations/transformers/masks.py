"""The mask functions of transformers as lowtri masks, and the mask of a forward.

transformers describes a mask as a function of (batch, head, query, key), combined from a few known functions by "and" and "or". Each
known function is recognised by its code object and becomes a formula, so that no pair is evaluated. Each formula is checked once
against its function on every pair of a small square; if they differ, the function is not recognised. Other functions are traced, so
that tiles are skipped, and evaluated pair by pair where a tile needs it (:class:`~lowtri.integrations.function_mask.FunctionMask`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import cache, cached_property, partial, reduce
from operator import or_
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lowtri.compat.torch_private import mapped_indexing
from lowtri.compat.transformers_private import known_mask_function
from lowtri.errors import CallError, MaskError
from lowtri.integrations.dense_mask import LazyMask, join
from lowtri.integrations.function_mask import FunctionMask, trace
from lowtri.integrations.transformers.lazy import LazyMaskTensor, TraceableMaskTensor
from lowtri.integrations.transformers.packing import Packing
from lowtri.integrations.transformers.sharded import mask_of_plan
from lowtri.integrations.transformers.traced_cache import TRACED
from lowtri.integrations.transformers.user_masks import check_cache, current_forward
from lowtri.masks.array_masks import Keys
from lowtri.masks.arrays import FrozenArray
from lowtri.masks.formulas import Band, band, causal, full
from lowtri.masks.label_masks import Documents, InDocuments, RangeMinMax, chunks
from lowtri.masks.mask import And, Mask
from lowtri.masks.tile import EMPTY, POSITION_MAX, Index

# Models that write values of their own next to an additive mask: they get the additive mask that eager gets.
_NEED_ADDITIVE = ("deepseek_v4",)
_PAIRS_OF_A_PROGRAM = 2**16  # of a mask that a compiled program may take as its table
_CAUSAL = causal()  # one object, which a cache compares without looking into it


def make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    use_vmap: bool = False,
    device: Any = "cpu",
    dtype: torch.dtype = torch.float32,
    config: Any = None,
    **options: Any,
) -> Tensor | None:
    """Make the mask of a forward, for transformers' mask interface: a lazy mask tensor (B, 1, Nq, Nk).

    Under torch.compile and torch.export it is the table, or None where that means the same to the layers.

    Args:
        batch_size, q_length, kv_length: B, Nq and Nk.
        q_offset, kv_offset: the positions of the first query and the first key.
        mask_function: ``fn(batch, head, query, key)``, True = may see; causal where none is given.
        attention_mask: (B, N) bools by position, True = a token, False = padding.
        use_vmap: whether the function may not be written for arrays of indices.
        device, dtype: of the model's tensors.
        config: the model's.
        options: when a mask may be left out: here it is for one token that sees all keys, of which there are many calls.
    """
    numbers = getattr(config, "model_type", None) in _NEED_ADDITIVE
    traced = torch.compiler.is_compiling()
    if traced and TRACED.cache is not None:
        return None  # its operators know the mask
    forward = None if traced else current_forward(config)
    if numbers and forward is not None and forward.required:
        raise CallError(
            f"transformers: {config.model_type} writes numbers into its mask, so no other reaches it.\n"
            "Fix: its own mask, with attention_mask=None."
        )
    if numbers or traced:  # a compiled program cannot hold a lazy mask
        from transformers.masking_utils import causal_mask_function, eager_mask, sdpa_mask

        make: Any = partial(eager_mask, dtype=dtype) if numbers else partial(sdpa_mask, allow_is_causal_skip=False)
        function = causal_mask_function if mask_function is None else mask_function
        sizes = (q_length, kv_length, q_offset, kv_offset)
        if not numbers and function is causal_mask_function and attention_mask is None and _can_omit_mask(*sizes):
            return None
        return make(batch_size, *sizes, function, attention_mask, use_vmap=use_vmap, device=device)
    q0 = int(q_offset)
    k0 = int(kv_offset)
    may_omit = forward is None and q_length == 1 and bool(options.get("allow_is_causal_skip"))
    if may_omit and _can_omit_mask(1, kv_length, q0, k0):
        no_padding = attention_mask is None or (attention_mask.shape[-1] > q0 and bool(attention_mask.all()))
        if no_padding and (mask_function is None or _is_known(mask_function, "causal_mask_function")):
            return None  # the newest token sees every key
    pattern = None
    context = None if forward is None else forward.context
    packing = None
    if forward is not None:
        forward.mask_was_built = True
        pattern = forward.mask
        packing = forward.packing
        if packing is not None and forward.crosses and _is_known(mask_function, "bidirectional_mask_function"):
            packing = None
        if pattern is not None and context is None and forward.cache is None:
            pattern = _from_first_tokens(pattern, attention_mask) if packing is None else packing.within_each(pattern)
            pattern = check_cache(pattern, q0, q_length, k0, kv_length, forward.cache_argument)
            if forward.in_generate_without_cache:
                with suppress(MaskError):  # a table may end here
                    check_cache(pattern, q_length, 1, 0, q_length + 1, forward.cache_argument)
    if mask_function is None or (packing is None and _is_known(mask_function, "causal_mask_function")):
        mask = _CAUSAL if pattern is None else pattern
    else:
        reading = Reading(batch_size, use_vmap, str(device), pattern, forward is not None and context is None, packing)
        mask = _mask_of(mask_function, reading)
    if packing is not None and not _is_within(mask, packing.mask):
        mask = join(mask, packing.mask)
    if context is not None:
        mask = mask_of_plan(mask, context.plan)
    elif attention_mask is not None and (
        forward is None or forward.cache is None
    ):  # which has positions without padding
        mask = join(mask, _real_keys(mask, attention_mask, (q0, q0 + q_length), k0 + kv_length))
    cache = None if forward is None else forward.cache
    materialize: Any = None
    if cache is None:  # which has no table
        materialize = partial(
            make_mask, batch_size, q_length, kv_length, q0, k0, mask_function, attention_mask=attention_mask
        )
        materialize = partial(materialize, use_vmap=use_vmap, device=device, dtype=dtype, config=config)
    lazy = LazyMask(mask, q0, q_length, k0, kv_length, materialize, context, packed=forward is not None, cache=cache)
    heads = mask.batch[1] if len(mask.batch) > 1 else 1
    kind = TraceableMaskTensor if q_length * kv_length <= _PAIRS_OF_A_PROGRAM else LazyMaskTensor
    return kind(lazy, (batch_size, heads, q_length, kv_length), device)


def _can_omit_mask(q_length: Any, kv_length: Any, q_offset: Any, kv_offset: Any) -> bool:
    """Whether None means the same causal mask to a layer: for queries from position 0 on, or for the newest one alone.

    Sizes may be symbolic; the value of a tensor (the position in a static cache) is not known while tracing.
    """
    if any(isinstance(offset, Tensor) for offset in (q_offset, kv_offset)) or kv_offset != 0:
        return False
    return bool(kv_length == q_length + q_offset and (q_offset == 0 or q_length == 1))


def read_function(
    fn: Callable[..., Any], rows: int = 1, use_vmap: bool = False, device: str = "cpu", pattern: Mask | None = None
) -> Mask:
    """The mask that a mask function of transformers is.

    >>> from transformers.masking_utils import sliding_window_causal_mask_function
    >>> print(read_function(sliding_window_causal_mask_function(2)).draw(4))
    █···
    ██··
    ·██·
    ··██

    Args:
        fn: ``fn(batch, head, query, key)``, bools, True = may see.
        rows: how many batch rows it is defined for.
        use_vmap: whether it takes single indices, and must be mapped by torch.vmap.
        device: where its tensors are.
        pattern: replaces the pattern of the model (causal, sliding, chunked); padding, documents and other functions joined to
            it by "and" stay.
    """
    return _mask_of(fn, Reading(rows, use_vmap, device, pattern))


@dataclass(frozen=True)
class Reading:
    """How the mask functions of a forward are read; see :func:`read_function`."""

    rows: int = 1
    use_vmap: bool = False
    device: str = "cpu"
    pattern: Mask | None = None
    # Whether the documents are known, so that those which transformers found in the positions do not count; and those from whose
    # starts chunks and functions of the model's own count.
    knows_documents: bool = False
    packing: Packing | None = None

    def within_each(self, mask: Mask) -> Mask:
        """The mask within each document, at positions that count from its start."""
        return mask if self.packing is None else self.packing.within_each(mask)


def _mask_of(fn: Callable[..., Any], reading: Reading) -> Mask:
    name = _known().get(getattr(fn, "__code__", None))
    if name is None:
        return reading.within_each(_evaluated_mask(fn, reading.rows, reading.device, reading.use_vmap))
    if reading.pattern is not None and name in _PATTERNS:
        return reading.pattern
    if reading.knows_documents and name == "packed_sequence_mask_function":
        return full()
    if reading.knows_documents and name == "remap_positions_for_packed_sequence":
        return _mask_of(_closed_over(fn)["mask_function"], reading)
    mask = _read(name, fn, reading.rows, lambda part: _mask_of(part, reading))
    return reading.within_each(mask) if name == "chunked_overlay" else mask


def _is_known(fn: Any, name: str) -> bool:
    """Whether a mask function is the one of transformers that has this name."""
    return _known().get(getattr(fn, "__code__", None)) == name


def _evaluated_mask(fn: Callable[..., Any], rows: int, device: str, use_vmap: bool) -> Mask:
    """A function ``fn(batch, head, query, key)`` that is not recognised; it is traced for tile answers, else evaluated.

    Args:
        rows: how many batch rows it is defined for.
        use_vmap: whether it takes single indices, and must be mapped by torch.vmap.
    """
    mapped = torch.vmap(fn, in_dims=(None, None, 0, 0)) if use_vmap else fn

    def evaluate(*indices: Tensor) -> Tensor:
        with mapped_indexing() if use_vmap else nullcontext():
            return mapped(*indices)

    traced = trace(fn, device)
    key = object() if traced is None else traced.program()
    return FunctionMask(key, fn, evaluate, device, traced, (rows,) if rows > 1 else ())


def _real_keys(mask: Mask, valid: Tensor, queries: tuple[int, int], end: int) -> Mask:
    """The keys that hold a token. Those past the end of ``valid`` hold none; it is extended only where the mask shows them."""
    n = valid.shape[-1]
    if n < end and not np.all(mask.tile(*queries, n, end) == EMPTY):
        valid = torch.nn.functional.pad(valid, (0, end - n))
    return _keys(valid)


def _keys(valid: Tensor) -> Mask:
    return full() if bool(valid.all()) else Keys(_rows_of(valid.to("cpu", torch.bool).numpy()))


def _rows_of(array: NDArray[Any]) -> FrozenArray:
    """(B, N), or (N,) where all rows are the same."""
    array = np.atleast_2d(array)
    return FrozenArray(array[0] if bool((array == array[0]).all()) else array)


def _documents(ids: Tensor) -> Mask:
    return Documents(_rows_of(ids.cpu().numpy()))


def _sliding(before: int, after: int) -> Mask:
    return Band(before, after, f"band({before}, {after})")


def _chunked(n: int, pads: Any) -> Mask:
    shifts = tuple(-int(pad) % n for pad in torch.as_tensor(pads).reshape(-1).tolist())  # from the first token
    if len(set(shifts)) == 1:
        shifts = shifts[:1]
    return chunks(n) if shifts == (0,) else ShiftedMask(chunks(n), shifts)


def _remapped(inner: Mask, positions: Tensor) -> Mask:
    return inner if inner == full() else RemappedMask(inner, _rows_of(positions.cpu().numpy().astype(np.int64)))


# The functions of transformers: from the variables that each closes over to its mask. ``read`` gives the mask of a function.
_KNOWN_MASK_FUNCTIONS: dict[str, Callable[[dict[str, Any], int, Callable[[Any], Mask]], Mask]] = {
    "causal_mask_function": lambda c, rows, read: _CAUSAL,
    "bidirectional_mask_function": lambda c, rows, read: full(),
    "sliding_window_overlay": lambda c, rows, read: _sliding(int(c["sliding_window"]) - 1, POSITION_MAX),
    "sliding_window_bidirectional_overlay": lambda c, rows, read: band(*[int(c["sliding_window"])] * 2),
    "chunked_overlay": lambda c, rows, read: _chunked(int(c["chunk_size"]), c["left_padding"]),
    "padding_mask_function": lambda c, rows, read: _keys(c["padding_mask"][:rows]),
    "packed_sequence_mask_function": lambda c, rows, read: _documents(c["packed_sequence_mask"][:rows]),
    "blockwise_overlay": lambda c, rows, read: join(
        _documents(c["block_sequence_ids"][:rows]), _keys(c["block_sequence_ids"][:rows] >= 0)
    ),
    "and_masks": lambda c, rows, read: reduce(join, map(read, c["mask_functions"]), full()),
    "or_masks": lambda c, rows, read: reduce(or_, map(read, c["mask_functions"])),
    "remap_positions_for_packed_sequence": lambda c, rows, read: _remapped(
        read(c["mask_function"]), c["position_ids"][:rows]
    ),
}
# What a model's pattern is made of. An overlay joined by "or" shows more than the pattern (the tokens of an image one another).
_PATTERNS = (*list(_KNOWN_MASK_FUNCTIONS)[:5], "or_masks")


def _read(name: str, fn: Callable[..., Any], rows: int, read: Callable[[Any], Mask]) -> Mask:
    return _KNOWN_MASK_FUNCTIONS[name](_closed_over(fn), rows, read)


def _closed_over(fn: Callable[..., Any]) -> dict[str, Any]:
    """The variables that a function closes over."""
    cells = (cell.cell_contents for cell in fn.__closure__ or ())
    return dict(zip(fn.__code__.co_freevars, cells, strict=True))


@cache
def _known() -> dict[Any, str]:
    """Code object -> name, for the functions of the installed transformers that are what their reader says."""
    ids = torch.tensor([[0, 0, 1, 1, 1, -1, -1, 2, 2, 3, 3, 3], [-1, -1, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1]])
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 0, 1, 2], [0, 1, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9]])
    two = known_mask_function("sliding_window_overlay", 3), known_mask_function("causal_mask_function")
    arguments: dict[str, tuple[Any, ...]] = {
        "sliding_window_overlay": (3,),
        "sliding_window_bidirectional_overlay": (3,),
        "chunked_overlay": (5, torch.tensor([0, 3])),
        "padding_mask_function": (ids >= 0,),
        "packed_sequence_mask_function": (ids,),
        "blockwise_overlay": (ids,),
        **dict.fromkeys(("and_masks", "or_masks"), two),
        "remap_positions_for_packed_sequence": (two[0], positions),
    }
    examples = {name: known_mask_function(name, *arguments.get(name, ())) for name in _KNOWN_MASK_FUNCTIONS}
    return {fn.__code__: name for name, fn in examples.items() if fn is not None and _agree(fn, name)}


def _agree(fn: Callable[..., Any], name: str) -> bool:
    """Whether a function and the mask read from it agree on every pair of 12 positions in two batch rows."""
    try:
        mask = _read(name, fn, 2, lambda part: _evaluated_mask(part, 2, "cpu", False))
    except (KeyError, TypeError, AttributeError, MaskError):  # it closes over other variables than the reader expects
        return False
    expected = _evaluated_mask(fn, 2, "cpu", False).dense(12)
    return bool(np.array_equal(np.broadcast_to(mask.dense(12), expected.shape), expected))


# Masks at other positions.


@dataclass(frozen=True)
class RemappedMask(Mask):
    """Another mask, evaluated at ``positions[q]`` and ``positions[k]``; the array is (N,) or (B, N)."""

    inner: Mask
    positions: FrozenArray

    def __post_init__(self) -> None:
        rows = max(self.positions.array.shape[:-1], self.inner.batch[:1])  # one row broadcasts
        object.__setattr__(self, "_batch", rows + self.inner.batch[1:])

    @cached_property
    def _range_min_max(self) -> RangeMinMax:
        return RangeMinMax(self.positions.array)

    def _sees(self, q: Index, k: Index) -> Any:
        # Intervals may contain positions that do not occur; what is true of all of them is still true of those that do.
        return self.inner._sees(self._range_min_max[q], self._range_min_max[k])

    def _for_row(self, b: int, h: int) -> Mask:
        positions = np.atleast_2d(self.positions.array)
        inner_rows = self.inner.batch[0] if self.inner.batch else 1
        return RemappedMask(self.inner.for_row(b % inner_rows, h), FrozenArray(positions[b % len(positions)]))

    def __repr__(self) -> str:
        return f"moved({self.inner!r}, {self.positions})"


@dataclass(frozen=True)
class ShiftedMask(Mask):
    """Another mask, shifted by ``by[b]`` positions in batch row b."""

    inner: Mask
    by: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "_batch", (len(self.by),) if len(self.by) > 1 else ())

    def _sees(self, q: Index, k: Index) -> Any:
        return self.inner._sees(q + self.by[0], k + self.by[0])

    def _for_row(self, b: int, h: int) -> Mask:
        return ShiftedMask(self.inner, (self.by[b],))

    def __repr__(self) -> str:
        return f"shifted({self.inner!r}, {list(self.by)})"


def without_shift(mask: Mask) -> Mask:
    """A mask at positions that count from the first token of each row already."""
    return mask.inner if isinstance(mask, ShiftedMask) else mask


def _is_within(mask: Mask, documents: Mask) -> bool:
    """Whether a mask shows no pair across these documents, as its parts say."""
    if isinstance(mask, And):
        return _is_within(mask.left, documents) or _is_within(mask.right, documents)
    return mask == documents or (isinstance(mask, InDocuments) and mask.documents == documents)


def _from_first_tokens(mask: Mask, valid: Tensor | None) -> Mask:
    """A mask at positions that count from the first token of each row: the document after its pads.

    Args:
        valid: (B, N) bools, True = a token, False = padding; None without padding.
    """
    if valid is None or isinstance(mask, Band) or mask == full():  # which compare distances only
        return mask
    tokens = np.maximum.accumulate(valid.to("cpu", torch.uint8).numpy(), axis=1)
    return mask if tokens[:, 0].all() else InDocuments(Documents(_rows_of(tokens)), mask)

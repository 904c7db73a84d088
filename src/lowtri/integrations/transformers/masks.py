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
from lowtri.integrations.function_mask import FunctionMask, bounds_of, trace
from lowtri.integrations.transformers.lazy import LazyMaskTensor
from lowtri.integrations.transformers.sharded import mask_of_plan
from lowtri.integrations.transformers.user_masks import check_cache, current_forward
from lowtri.masks.array_masks import Keys
from lowtri.masks.arrays import FrozenArray
from lowtri.masks.formulas import Band, band, causal, full
from lowtri.masks.label_masks import Documents, RangeMinMax, chunks
from lowtri.masks.mask import Mask
from lowtri.masks.tile import EMPTY, POSITION_MAX, Positions

# Models that write values of their own next to an additive mask: they get the additive mask that eager gets.
_NEED_ADDITIVE = ("deepseek_v4",)


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
        options: when a mask may be left out: here it never is.
    """
    numbers = getattr(config, "model_type", None) in _NEED_ADDITIVE
    forward = None if torch.compiler.is_compiling() else current_forward(config)
    if numbers and forward is not None:
        raise CallError(f"transformers: {config.model_type} writes numbers into its mask. Fix: attention_mask=None.")
    if numbers or torch.compiler.is_compiling():  # a compiled program cannot hold a lazy mask
        from transformers.masking_utils import causal_mask_function, eager_mask, sdpa_mask

        make: Any = partial(eager_mask, dtype=dtype) if numbers else partial(sdpa_mask, allow_is_causal_skip=False)
        function = causal_mask_function if mask_function is None else mask_function
        sizes = (q_length, kv_length, q_offset, kv_offset)
        if not numbers and function is causal_mask_function and attention_mask is None and _can_omit_mask(*sizes):
            return None
        return make(batch_size, *sizes, function, attention_mask, use_vmap=use_vmap, device=device)
    q0, k0 = int(q_offset), int(kv_offset)
    pattern, context = None, None if forward is None else forward.context
    if forward is not None:
        forward.made_mask, pattern = True, forward.mask
        if pattern is not None and context is None:
            pattern = _from_first_tokens(pattern, attention_mask, max(q0 + q_length, k0 + kv_length) + 1)
            pattern = check_cache(pattern, q0, q_length, k0, kv_length)
            if forward.in_generate_without_cache:
                with suppress(MaskError):  # a table may end here
                    check_cache(pattern, q_length, 1, 0, q_length + 1)
    if mask_function is None:
        mask = causal() if pattern is None else pattern
    else:
        mask = read_function(mask_function, batch_size, use_vmap, str(device), pattern)
    if context is not None:
        mask = mask_of_plan(mask, context.plan)
    elif attention_mask is not None:
        mask = join(mask, _real_keys(mask, attention_mask, (q0, q0 + q_length), k0 + kv_length))
    remake = partial(make_mask, batch_size, q_length, kv_length, q0, k0, mask_function, attention_mask, use_vmap)
    lazy = LazyMask(mask, q0, q_length, k0, kv_length, partial(remake, device, dtype, config), context)
    return LazyMaskTensor(lazy, (batch_size, (*mask.batch, 1, 1)[1], q_length, kv_length), device)


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
    reader = _readers().get(getattr(fn, "__code__", None))
    if reader is None:
        return _evaluated_mask(fn, rows, device, use_vmap)
    if pattern is not None and reader in _PATTERNS:
        return pattern
    return _read(reader, fn, rows, lambda part: read_function(part, rows, use_vmap, device, pattern))


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

    bounds = cache(lambda: bounds_of(trace(fn, device, of_score=False)))
    return FunctionMask(fn, evaluate, device, bounds, (rows,) if rows > 1 else ())


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


def _closure(fn: Callable[..., Any]) -> dict[str, Any]:
    """The variables that a function closes over, by name."""
    cells = fn.__closure__ or ()
    return dict(zip(fn.__code__.co_freevars, (cell.cell_contents for cell in cells), strict=True))


# One reader for each known function: from the variables that it closes over to the mask.


def _causal(closure: dict[str, Any], rows: int) -> Mask:
    return causal()


def _full(closure: dict[str, Any], rows: int) -> Mask:
    return full()


def _sliding(closure: dict[str, Any], rows: int) -> Mask:
    n = int(closure["sliding_window"])
    return Band(n - 1, POSITION_MAX, f"band({n - 1}, {POSITION_MAX})")


def _sliding_both_ways(closure: dict[str, Any], rows: int) -> Mask:
    n = int(closure["sliding_window"])
    return band(n, n)


def _chunked(closure: dict[str, Any], rows: int) -> Mask:
    n, pads = int(closure["chunk_size"]), closure["left_padding"]
    shifts = tuple(-int(pad) % n for pad in torch.as_tensor(pads).reshape(-1).tolist())  # from the first token
    if len(set(shifts)) == 1:
        shifts = shifts[:1]
    return chunks(n) if shifts == (0,) else ShiftedMask(chunks(n), shifts)


def _padding(closure: dict[str, Any], rows: int) -> Mask:
    return _keys(closure["padding_mask"][:rows])


def _packed(closure: dict[str, Any], rows: int) -> Mask:
    return Documents(_rows_of(closure["packed_sequence_mask"][:rows].cpu().numpy()))


def _blocks(closure: dict[str, Any], rows: int) -> Mask:
    ids = closure["block_sequence_ids"][:rows].cpu()
    return join(Documents(_rows_of(ids.numpy())), _keys(ids >= 0))


# Readers of functions that combine others, or evaluate one at other positions: ``read`` gives the mask of a function.


def _remapped(closure: dict[str, Any], rows: int, read: Callable[[Any], Mask]) -> Mask:
    inner, positions = read(closure["mask_function"]), closure["position_ids"][:rows].cpu().numpy()
    return inner if inner == full() else RemappedMask(inner, _rows_of(positions.astype(np.int64)))


def _all_of(closure: dict[str, Any], rows: int, read: Callable[[Any], Mask]) -> Mask:
    return reduce(join, map(read, closure["mask_functions"]), full())


def _any_of(closure: dict[str, Any], rows: int, read: Callable[[Any], Mask]) -> Mask:
    return reduce(or_, map(read, closure["mask_functions"]))


# What a model's pattern is made of. An overlay joined by "or" shows more than the pattern (the tokens of an image one another).
_PATTERNS = (_causal, _full, _sliding, _sliding_both_ways, _chunked, _any_of)


def _read(reader: Callable[..., Mask], fn: Callable[..., Any], rows: int, read: Callable[[Any], Mask]) -> Mask:
    parts = (read,) if reader in (_remapped, _all_of, _any_of) else ()
    return reader(_closure(fn), rows, *parts)


@cache
def _readers() -> dict[Any, Callable[..., Mask]]:
    """Code object -> reader, for the functions of the installed transformers that pass the check."""
    ids = torch.tensor([[0, 0, 1, 1, 1, -1, -1, 2, 2, 3, 3, 3], [-1, -1, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1]])
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 0, 1, 2], [0, 1, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9]])
    two = known_mask_function("sliding_window_overlay", 3), known_mask_function("causal_mask_function")
    examples: list[tuple[Callable[..., Any] | None, Callable[..., Mask]]] = [
        (known_mask_function("causal_mask_function"), _causal),
        (known_mask_function("bidirectional_mask_function"), _full),
        (known_mask_function("sliding_window_overlay", 3), _sliding),
        (known_mask_function("sliding_window_bidirectional_overlay", 3), _sliding_both_ways),
        (known_mask_function("chunked_overlay", 5, torch.tensor([0, 3])), _chunked),
        (known_mask_function("padding_mask_function", ids >= 0), _padding),
        (known_mask_function("packed_sequence_mask_function", ids), _packed),
        (known_mask_function("blockwise_overlay", ids), _blocks),
        (known_mask_function("and_masks", *two), _all_of),
        (known_mask_function("or_masks", *two), _any_of),
        (known_mask_function("remap_positions_for_packed_sequence", two[0], positions), _remapped),
    ]
    return {fn.__code__: reader for fn, reader in examples if fn is not None and _agree(fn, reader)}


def _agree(fn: Callable[..., Any], reader: Callable[..., Mask]) -> bool:
    """Whether a function and the mask read from it agree on every pair of 12 positions in two batch rows."""
    try:
        mask = _read(reader, fn, 2, lambda part: _evaluated_mask(part, 2, "cpu", False))
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

    @property
    def batch(self) -> tuple[int, ...]:
        rows = self.positions.array.shape[:-1]
        return max(rows, self.inner.batch[:1]) + self.inner.batch[1:]  # one row broadcasts

    @cached_property
    def _range_min_max(self) -> RangeMinMax:
        return RangeMinMax(self.positions.array)

    def _sees(self, q: Positions, k: Positions) -> Any:
        # Intervals may contain positions that do not occur; what is true of all of them is still true of those that do.
        return self.inner._sees(self._range_min_max[q], self._range_min_max[k])

    def _at(self, b: int, h: int) -> Mask:
        positions = np.atleast_2d(self.positions.array)
        return RemappedMask(self.inner.at(b % (*self.inner.batch, 1)[0], h), FrozenArray(positions[b % len(positions)]))

    def __repr__(self) -> str:
        return f"moved({self.inner!r}, {self.positions})"


@dataclass(frozen=True)
class ShiftedMask(Mask):
    """Another mask, shifted by ``by[b]`` positions in batch row b."""

    inner: Mask
    by: tuple[int, ...]

    @property
    def batch(self) -> tuple[int, ...]:
        return (len(self.by),) if len(self.by) > 1 else ()

    def _sees(self, q: Positions, k: Positions) -> Any:
        return self.inner._sees(q + self.by[0], k + self.by[0])

    def _at(self, b: int, h: int) -> Mask:
        return ShiftedMask(self.inner, (self.by[b],))

    def __repr__(self) -> str:
        return f"shifted({self.inner!r}, {list(self.by)})"


def _from_first_tokens(mask: Mask, valid: Tensor | None, length: int) -> Mask:
    """A mask at positions that count from the first token of each row.

    Args:
        valid: (B, N) bools, True = a token, False = padding; None without padding.
        length: of the longest row, past tokens included.
    """
    if valid is None or isinstance(mask, Band) or mask == full():  # which compare distances only
        return mask
    pads = valid.to("cpu", torch.uint8).numpy().argmax(-1)[:, None]  # (B, 1) in front of the first token
    return RemappedMask(mask, FrozenArray(np.maximum(np.arange(length) - pads, 0))) if pads.any() else mask

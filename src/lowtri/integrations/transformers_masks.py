"""The mask functions of transformers as lowtri masks.

transformers describes a mask as a function of (batch, head, query, key), combined from a few known ones by "and" and "or". Each
known one is recognised by its code object and becomes a formula, so that no pair is evaluated. Each formula is checked once
against its function on every pair of a small square; where they differ, the function is not recognised. Other functions are
evaluated pair by pair where a tile needs it (:class:`~lowtri.integrations.transformers_functions.FunctionMask`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lowtri.errors import MaskError
from lowtri.integrations.transformers_functions import FunctionMask, RemappedMask, ShiftedMask
from lowtri.integrations.transformers_lazy import LazyMask, LazyMaskTensor
from lowtri.integrations.transformers_traced import can_omit_mask
from lowtri.masks.array_masks import Keys
from lowtri.masks.arrays import FrozenArray
from lowtri.masks.document_masks import Documents
from lowtri.masks.formulas import Band, band, causal, chunks, full
from lowtri.masks.mask import Mask
from lowtri.masks.positions import POSITION_MAX
from lowtri.masks.tile import EMPTY

__all__ = ["make_mask", "read_function"]

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
    if numbers or torch.compiler.is_compiling():  # a compiled program cannot hold a lazy mask
        from transformers.masking_utils import causal_mask_function, eager_mask, sdpa_mask

        make: Any = partial(eager_mask, dtype=dtype) if numbers else partial(sdpa_mask, allow_is_causal_skip=False)
        function = causal_mask_function if mask_function is None else mask_function
        sizes = (q_length, kv_length, q_offset, kv_offset)
        if not numbers and function is causal_mask_function and attention_mask is None and can_omit_mask(*sizes):
            return None
        return make(batch_size, *sizes, function, attention_mask, use_vmap=use_vmap, device=device)
    q0, k0 = int(q_offset), int(kv_offset)
    mask = causal() if mask_function is None else read_function(mask_function, batch_size, use_vmap, str(device))
    if attention_mask is not None:
        mask = _and(mask, _real_keys(mask, attention_mask, (q0, q0 + q_length), k0 + kv_length))
    return LazyMaskTensor(LazyMask(mask, q0, q_length, k0, kv_length), (batch_size, 1, q_length, kv_length), device)


def read_function(fn: Callable[..., Any], rows: int = 1, use_vmap: bool = False, device: str = "cpu") -> Mask:
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
    """
    code = getattr(fn, "__code__", None)
    reader = _known().get(code) or _combinators().get(code)
    if reader is None:
        return FunctionMask(fn, rows, device, use_vmap)
    closure = _closure(fn)
    if reader in (_all_of, _any_of, _remapped):
        return reader(closure, lambda part: read_function(part, rows, use_vmap, device), rows)
    return reader(closure, rows)


def _real_keys(mask: Mask, valid: Tensor, queries: tuple[int, int], end: int) -> Mask:
    """The keys that hold a token: those beyond ``valid`` do not, which is said only where the mask would show them."""
    n = valid.shape[-1]
    if n < end and not np.all(mask.tile(*queries, n, end) == EMPTY):
        valid = torch.nn.functional.pad(valid, (0, end - n))
    if bool(valid.all()):
        return full()
    return Keys(_rows_of(valid.to("cpu", torch.bool).numpy()))


def _and(left: Mask, right: Mask) -> Mask:
    """left & right, simplified, so that equal masks are built alike: `full` is dropped, and two bands become one."""
    if right == full():
        return left
    if left == full():
        return right
    if isinstance(left, Band) and isinstance(right, Band):
        before, after = min(left.before, right.before), min(left.after, right.after)
        return Band(before, after, f"window({before + 1})" if after == 0 else f"band({before}, {after})")
    return left & right


def _rows_of(array: NDArray[Any]) -> FrozenArray:
    """(B, N), or (N,) where all rows are the same."""
    array = np.atleast_2d(array)
    return FrozenArray(array[0] if bool((array == array[0]).all()) else array)


def _closure(fn: Callable[..., Any]) -> dict[str, Any]:
    """The variables that a function closes over, by name."""
    cells = fn.__closure__ or ()
    return dict(zip(fn.__code__.co_freevars, (cell.cell_contents for cell in cells), strict=True))


# One reader for each known function: from its closure to the mask.


def _causal(closure: dict[str, Any], rows: int) -> Mask:
    return causal()


def _full(closure: dict[str, Any], rows: int) -> Mask:
    return full()


def _sliding(closure: dict[str, Any], rows: int) -> Mask:
    n = int(closure["sliding_window"])
    return Band(n - 1, POSITION_MAX, f"band({n - 1}, {POSITION_MAX})")


def _around(closure: dict[str, Any], rows: int) -> Mask:
    n = int(closure["sliding_window"])
    return band(n, n)


def _chunked(closure: dict[str, Any], rows: int) -> Mask:
    n, pads = int(closure["chunk_size"]), closure["left_padding"]
    by = [-int(pad) % n for pad in torch.as_tensor(pads).reshape(-1).tolist()]  # chunks count from the first token
    if len(set(by)) == 1:
        return chunks(n) if by[0] == 0 else ShiftedMask(chunks(n), (by[0],))
    return ShiftedMask(chunks(n), tuple(by))


def _padding(closure: dict[str, Any], rows: int) -> Mask:
    valid = closure["padding_mask"].to("cpu", torch.bool)[:rows]
    return full() if bool(valid.all()) else Keys(_rows_of(valid.numpy()))


def _packed(closure: dict[str, Any], rows: int) -> Mask:
    return Documents(_rows_of(closure["packed_sequence_mask"][:rows].cpu().numpy()))


def _blocks(closure: dict[str, Any], rows: int) -> Mask:
    ids = closure["block_sequence_ids"][:rows].cpu().numpy()
    return _and(Documents(_rows_of(ids)), full() if (ids >= 0).all() else Keys(_rows_of(ids >= 0)))


def _remapped(closure: dict[str, Any], read: Callable[[Any], Mask], rows: int) -> Mask:
    inner, places = read(closure["mask_function"]), closure["position_ids"][:rows].cpu().numpy()
    return inner if inner == full() else RemappedMask(inner, _rows_of(places.astype(np.int64)))


def _all_of(closure: dict[str, Any], read: Callable[[Any], Mask], rows: int) -> Mask:
    mask = full()
    for part in closure["mask_functions"]:
        mask = _and(mask, read(part))
    return mask


def _any_of(closure: dict[str, Any], read: Callable[[Any], Mask], rows: int) -> Mask:
    parts = [read(part) for part in closure["mask_functions"]]
    mask = parts[0]
    for part in parts[1:]:
        mask = mask | part
    return mask


@cache
def _known() -> dict[Any, Any]:
    """Code object -> reader, for the functions of the installed transformers that pass the check."""
    import transformers.masking_utils as theirs

    ids = torch.tensor([[0, 0, 1, 1, 1, -1, -1, 2, 2, 3, 3, 3], [-1, -1, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1]])
    made: list[tuple[Callable[..., Any], Any]] = [
        (theirs.causal_mask_function, _causal),
        (theirs.bidirectional_mask_function, _full),
        (theirs.sliding_window_overlay(3), _sliding),
        (theirs.sliding_window_bidirectional_overlay(3), _around),
        (theirs.chunked_overlay(5, torch.tensor([0, 3])), _chunked),
        (theirs.padding_mask_function(ids >= 0), _padding),
        (theirs.packed_sequence_mask_function(ids), _packed),
        (theirs.blockwise_overlay(ids), _blocks),
    ]
    return {fn.__code__: reader for fn, reader in made if _means(fn, reader, 2)}


@cache
def _combinators() -> dict[Any, Any]:
    """Code object -> reader, for the functions that combine others or remap their positions."""
    import transformers.masking_utils as theirs

    window, block = theirs.sliding_window_overlay(3), theirs.causal_mask_function
    places = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 0, 1, 2], [0, 1, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9]])
    made: list[tuple[Callable[..., Any], Any]] = [
        (theirs.and_masks(window, block), _all_of),
        (theirs.or_masks(window, block), _any_of),
        (theirs.remap_positions_for_packed_sequence(window, places), _remapped),
    ]

    def read(part: Any) -> Mask:
        return FunctionMask(part, 2, "cpu", False)

    return {fn.__code__: reader for fn, reader in made if _means(fn, reader, read, 2)}


def _means(fn: Callable[..., Any], reader: Callable[..., Mask], *how: Any) -> bool:
    """Whether a function and the mask read from it agree on every pair of 12 positions in two batch rows."""
    try:
        said = reader(_closure(fn), *how)
    except (KeyError, TypeError, AttributeError, MaskError):  # its closure is not what the reader expects
        return False
    asked = FunctionMask(fn, 2, "cpu", False).dense(12)
    return bool(np.array_equal(np.broadcast_to(said.dense(12), asked.shape), asked))

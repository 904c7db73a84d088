"""The masks that hold something of the user's, by name: labels, lengths, a table, a function, other masks.

Public doors as in :mod:`lowtri.masks.atoms`; what they make stands in :mod:`lowtri.masks.held`.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from lowtri.errors import MaskError
from lowtri.masks.arguments import bool_array, integer_array
from lowtri.masks.held import Heads, Held, KeyLengths, Keys, Table, Where
from lowtri.masks.ids import Documents, Packed
from lowtri.masks.mask import END, Mask, shown

__all__ = ["documents", "heads", "hidden", "keys", "table", "where"]


def documents(ids: Any = None, key_ids: Any = None, *, lengths: Any = None, cu_seqlens: Any = None) -> Mask:
    """Packed rows: everybody sees the tokens of its own document, and nobody else's.

    >>> from lowtri import causal
    >>> print((causal() & documents([0, 0, 0, 1, 1])).draw(5))
    █····
    ██···
    ███··
    ···█·
    ···██
    >>> documents(cu_seqlens=[0, 3, 5]) == documents(lengths=[3, 2])
    True

    Args:
        ids: the document of each position, integers, (N,), or (B, N) for a batch of rows.
        key_ids: the documents of the keys where they are not those of the queries, same leading shape.
        lengths: instead of ids: how long each document is, in tokens.
        cu_seqlens: instead of ids: where each begins, from 0, and where the last one ends.

    Beyond the array the last document goes on, so that generating continues it.

    Documents given by their lengths hold a number for each document and none for each token.

    Raises:
        MaskError: unless exactly one of ids, lengths and cu_seqlens is given, or if they do not describe documents.

    The same mask elsewhere: FlashAttention ``cu_seqlens``; FlexAttention ``document_id[q] == document_id[k]``.
    Source: packing without cross-contamination, Krell et al. 2021.
    """
    if sum(given is not None for given in (ids, lengths, cu_seqlens)) != 1 or (key_ids is not None and ids is None):
        raise MaskError("documents: give one of ids (with or without key_ids), lengths= or cu_seqlens=.")
    if cu_seqlens is not None:
        edges = integer_array("documents", "cu_seqlens", cu_seqlens, (1,)).tolist()
        if len(edges) < 2 or edges[0] != 0:
            raise MaskError(f"documents: cu_seqlens is {edges[:8]}; it begins with 0 and ends with the total.")
        return _packed([after - before for before, after in pairwise(edges)])
    if lengths is not None:
        return _packed(integer_array("documents", "lengths", lengths, (1,)).tolist())
    rows = integer_array("documents", "ids", ids, (1, 2))
    if key_ids is None:
        return Documents(Held(rows))
    columns = integer_array("documents", "key_ids", key_ids, (1, 2))
    if columns.shape[:-1] != rows.shape[:-1]:
        raise MaskError(f"documents: ids {rows.shape} and key_ids {columns.shape} differ in their batch.")
    return Documents(Held(rows), Held(columns))


def _packed(lengths: list[int]) -> Mask:
    if min(lengths) < 1:
        raise MaskError(f"documents: lengths are {lengths[:8]}; there is at least one, and each is at least 1.")
    if sum(lengths) > END:  # Python's ints: a sum of 64 bits would wrap
        raise MaskError(f"documents: lengths add up to {sum(lengths)}, but positions end at END (2**62).")
    return Packed(tuple(lengths))


def keys(valid: Any = None, *, lengths: Any = None) -> Mask:
    """Only these keys are real: padding, on either side.

    >>> from lowtri import causal
    >>> print((causal() & keys([False, True, True])).draw(3))
    ···
    ·█·
    ·██
    >>> keys(lengths=[1, 2]).dense(1, 3).astype(int).tolist()
    [[[1, 0, 0]], [[1, 1, 0]]]

    Args:
        valid: True where the key is real, bool, (N,) or (B, N). A key beyond the array is real: it is a new token.
        lengths: instead of ``valid``: how many keys are real in each batch row, (B,). There is no array to be beyond of:
            every later key is hidden.

    Raises:
        MaskError: if both or neither are given, or ``valid`` holds no bools.

    The same mask elsewhere: transformers ``attention_mask`` (1 = real); the opposite of ``key_padding_mask`` in torch.
    """
    if (valid is None) == (lengths is None):
        raise MaskError("keys: give valid (True = real) or lengths=, one of them.")
    if lengths is not None:
        sizes = integer_array("keys", "lengths", lengths, (1,)).tolist()
        if min(sizes) < 0 or max(sizes) > END:
            raise MaskError(
                f"keys: lengths are {sizes[:8]}; there is one for each batch row, none below 0 or beyond END (2**62)."
            )
        return KeyLengths(tuple(sizes))
    return Keys(Held(bool_array("keys", "valid", valid, (1, 2))))


def table(bools: Any) -> Mask:
    """An explicit table of pairs, True = may see.

    >>> print(table([[True, False], [True, True]]).draw(2))
    █·
    ██

    Args:
        bools: bool, (Nq, Nk), or with (B,) or (B, H) in front. Its rows are the queries at the last Nq of the Nk keys (at
            0 .. Nq-1 if there are more queries than keys). Beyond them it raises: nobody has said.

    The same mask elsewhere: SDPA ``attn_mask`` of bools. For True = hidden write :func:`hidden`.
    """
    return Table(Held(bool_array("table", "bools", bools, (2, 3, 4))))


def hidden(bools: Any) -> Mask:
    """An explicit table of pairs with True = hidden, as many notebooks and ``nn.MultiheadAttention`` write it.

    >>> import numpy as np
    >>> print(hidden(np.triu(np.ones((3, 3), bool), k=1)).draw(3))
    █··
    ██·
    ███

    Args:
        bools: bool, (Nq, Nk), or with (B,) or (B, H) in front; see :func:`table`.
    """
    return Table(Held(bool_array("hidden", "bools", bools, (2, 3, 4), inverted=True)))


def where(fn: Callable[[Any, Any], Any]) -> Mask:
    """Any formula ``fn(q, k)`` of your own, in comparisons and arithmetic that NumPy arrays understand.

    >>> print(where(lambda q, k: (k <= q) & (k % 2 == 0)).draw(4))
    █···
    █···
    █·█·
    █·█·

    Args:
        fn: takes positions (ints, or integer arrays that broadcast) and gives bools, True = may see; for the same positions
            always the same, since plans are kept.

    lowtri knows nothing about the formula but its answers, so plans read every pair of it: combine it with masks that say
    more (``window(n) & where(fn)``) where it can be said.

    Raises:
        MaskError: if ``fn`` is not callable or does not take two positions; when asked, if it gives no bools.

    FlexAttention's ``mask_mod(b, h, q, k)`` becomes ``where(lambda q, k: mask_mod(0, 0, q, k))``; where it differs by head,
    one such mask for each head goes into :func:`heads`.
    """
    if not callable(fn):
        raise MaskError(
            f"where: fn is {type(fn).__name__}; it takes a function of two positions. Fix: lowtri.table(bools)."
        )
    _check_two_positions(fn)
    try:
        hash(fn)
    except TypeError:
        raise MaskError(
            f"where: fn is {type(fn).__name__}, which cannot be hashed. Fix: give it __hash__, or wrap it in a function."
        ) from None
    return Where(fn)


def _check_two_positions(fn: Callable[..., Any]) -> None:
    try:
        takes = inspect.signature(fn)
    except (TypeError, ValueError):  # some compiled functions do not say
        return
    try:
        takes.bind(0, 0)
    except TypeError:
        fix = "where(lambda q, k: fn(...))"
        with contextlib.suppress(TypeError):
            takes.bind(0, 0, 0, 0)
            fix = (
                "where(lambda q, k: fn(0, 0, q, k)) for FlexAttention's (b, h, q, k); "
                "one of them for each head in heads([...]) where they differ"
            )
        raise MaskError(f"where: fn takes {takes}, but it is given two positions, (q, k).\nFix: {fix}.") from None


def heads(masks: Sequence[Mask | str]) -> Mask:
    """Another mask for each query head.

    >>> from lowtri import causal, window
    >>> heads([causal(), window(2)]).dense(3).astype(int)[0, 1].tolist()
    [[1, 0, 0], [1, 1, 0], [0, 1, 1]]

    Args:
        masks: one for each of the H query heads, in order; masks or their texts. They may differ by batch row, not by head.

    Raises:
        MaskError: if there are none, or one differs by head already.
    """
    from lowtri.masks.text import as_mask

    try:
        each = iter(() if isinstance(masks, str | Mask) else masks)
    except TypeError:
        each = iter(())
    found = tuple([as_mask(one) for one in each])  # the first that is no mask ends it, however long the list
    if not found:
        raise MaskError(f"heads: masks is {shown(masks)}, but it takes a list: one mask for each query head.")
    if any(len(one.batch) > 1 for one in found):
        raise MaskError("heads: one of the masks differs by head already; it takes masks with batch () or (B,).")
    rows = {one.batch[0] for one in found if one.batch} - {1}
    if len(rows) > 1:
        raise MaskError(f"heads: the masks have batches of {sorted(rows)} rows, which do not fit together.")
    return Heads(found)

"""The masks by name: the public doors. Each checks its arguments, shows its picture, and names itself in other libraries.

The formulas behind them stand in :mod:`lowtri.masks.formulas`, those that hold an array in :mod:`lowtri.masks.held`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lowtri.errors import MaskError
from lowtri.masks.formulas import Band, Chunks, First, Full, Strided
from lowtri.masks.held import Documents, Heads, Held, KeyLengths, Keys, Table, Where, is_traced
from lowtri.masks.mask import END, Mask

__all__ = [
    "band",
    "causal",
    "chunks",
    "documents",
    "first",
    "full",
    "heads",
    "hidden",
    "keys",
    "strided",
    "table",
    "where",
    "window",
]


def full() -> Mask:
    """Everybody sees everybody: the encoder's attention.

    >>> print(full().draw(3))
    ███
    ███
    ███

    The same mask elsewhere: no mask at all. Source: the encoder of Vaswani et al. 2017.
    """
    return Full()


def causal() -> Mask:
    """Each query sees itself and what came before: ``k <= q``.

    >>> print(causal().draw(4))
    █···
    ██··
    ███·
    ████

    The same mask elsewhere: SDPA ``is_causal=True`` (for as many queries as keys), ``torch.tril``, FlashAttention ``causal=True``.
    Source: the decoder of Vaswani et al. 2017, section 3.2.3.
    """
    return Band(END, 0, "causal")


def window(n: int) -> Mask:
    """Each query sees the newest ``n`` keys, its own position included.

    >>> print(window(3).draw(6))
    █·····
    ██····
    ███···
    ·███··
    ··███·
    ···███

    A query at ``q`` sees a key at ``k`` when ``q - n < k <= q``.

    Args:
        n: how many keys, in tokens, at least 1; ``window(1)`` sees only itself.

    Raises:
        MaskError: if ``n`` is below 1, since then nobody would see anything.

    The same mask elsewhere: FlashAttention ``window_size=(n - 1, 0)``; transformers ``sliding_window=n``.
    Source: the backward half of the sliding window in Longformer (Beltagy et al. 2020).
    """
    n = _whole("window", "n", n, least=1)
    return Band(n - 1, 0, f"window({n})")


def band(before: int, after: int) -> Mask:
    """Each query sees ``before`` keys back and ``after`` keys ahead, both inclusive: ``q - before <= k <= q + after``.

    >>> print(band(1, 2).draw(5))
    ███··
    ████·
    ·████
    ··███
    ···██

    Args:
        before, after: how far back and ahead, in tokens, at least 0.

    The same mask elsewhere: FlashAttention ``window_size=(before, after)``.
    Source: the symmetric window of Longformer (Beltagy et al. 2020).
    """
    before, after = _whole("band", "before", before, least=0), _whole("band", "after", after, least=0)
    return Band(before, after, f"band({before}, {after})")


def first(n: int) -> Mask:
    """Everybody sees the first ``n`` keys: ``0 <= k < n``.

    >>> prefix = causal() | first(2)
    >>> print(prefix.draw(4))
    ██··
    ██··
    ███·
    ████

    ``causal() | first(p)`` is a prefix language model; ``causal() & (window(w) | first(s))`` keeps ``s`` attention sinks.

    Args:
        n: how many keys, in tokens, at least 1.

    Source: prefix LM, Raffel et al. 2020; sinks, Xiao et al. 2023 (StreamingLLM).
    """
    return First(_whole("first", "n", n, least=1))


def documents(ids: Any = None, key_ids: Any = None, *, lengths: Any = None, cu_seqlens: Any = None) -> Mask:
    """Packed rows: everybody sees the tokens of its own document, and nobody else's.

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

    Raises:
        MaskError: unless exactly one of ids, lengths and cu_seqlens is given, or if they do not describe documents.

    The same mask elsewhere: FlashAttention ``cu_seqlens``; FlexAttention ``document_id[q] == document_id[k]``.
    Source: packing without cross-contamination, Krell et al. 2021.
    """
    if sum(given is not None for given in (ids, lengths, cu_seqlens)) != 1 or (key_ids is not None and ids is None):
        raise MaskError("documents: give one of ids (with or without key_ids), lengths= or cu_seqlens=.")
    if cu_seqlens is not None:
        edges = _integers("documents", "cu_seqlens", cu_seqlens, (1,))
        if len(edges) < 2 or edges[0] != 0:
            raise MaskError(f"documents: cu_seqlens is {edges[:8].tolist()}; it begins with 0 and ends with the total.")
        lengths = np.diff(edges)
    if lengths is not None:
        sizes = _integers("documents", "lengths", lengths, (1,))
        if len(sizes) == 0 or np.any(sizes < 1):
            raise MaskError(
                f"documents: lengths are {sizes[:8].tolist()}; there is at least one, and each is at least 1."
            )
        return Documents(Held(np.repeat(np.arange(len(sizes)), sizes)), None, tuple(sizes.tolist()))
    rows = _integers("documents", "ids", ids, (1, 2))
    if key_ids is None:
        return Documents(Held(rows))
    columns = _integers("documents", "key_ids", key_ids, (1, 2))
    if columns.shape[:-1] != rows.shape[:-1]:
        raise MaskError(f"documents: ids {rows.shape} and key_ids {columns.shape} differ in their batch.")
    return Documents(Held(rows), Held(columns))


def chunks(n: int) -> Mask:
    """Blocks of ``n`` positions, each closed to the others: ``q // n == k // n``.

    >>> print((causal() & chunks(2)).draw(5))
    █····
    ██···
    ··█··
    ··██·
    ····█

    Args:
        n: the length of a chunk, in tokens, at least 1.

    The same mask elsewhere: transformers ``attention_chunk_size=n`` (with causal). Source: blockwise attention, Qiu et al. 2019.
    """
    return Chunks(_whole("chunks", "n", n, least=1))


def strided(n: int) -> Mask:
    """Every ``n``-th key, counted from the query: ``(q - k) % n == 0``.

    >>> print((causal() & strided(2)).draw(5))
    █····
    ·█···
    █·█··
    ·█·█·
    █·█·█

    Args:
        n: the stride, in tokens, at least 1.

    Source: the strided pattern of Sparse Transformers (Child et al. 2019).
    """
    return Strided(_whole("strided", "n", n, least=1))


def keys(valid: Any = None, *, lengths: Any = None) -> Mask:
    """Only these keys are real: padding, on either side.

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
        sizes = _integers("keys", "lengths", lengths, (1,))
        if len(sizes) == 0 or np.any(sizes < 0):
            raise MaskError(f"keys: lengths are {sizes[:8].tolist()}; there is one for each batch row, none below 0.")
        return KeyLengths(tuple(sizes.tolist()))
    return Keys(Held(_bools("keys", "valid", valid, (1, 2))))


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
    return Table(Held(_bools("table", "bools", bools, (2, 3, 4))))


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
    return Table(Held(~_bools("hidden", "bools", bools, (2, 3, 4))))


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
        MaskError: if ``fn`` is not callable; when asked, if it gives no bools.
    """
    if not callable(fn):
        raise MaskError(
            f"where: fn is {type(fn).__name__}; it takes a function of two positions. Fix: lowtri.table(bools)."
        )
    try:
        hash(fn)
    except TypeError:
        raise MaskError(
            f"where: fn is {type(fn).__name__}, which cannot be hashed. Fix: give it __hash__, or wrap it in a function."
        ) from None
    return Where(fn)


def heads(masks: Sequence[Mask | str]) -> Mask:
    """Another mask for each query head.

    >>> heads([causal(), window(2)]).dense(3).astype(int)[0, 1].tolist()
    [[1, 0, 0], [1, 1, 0], [0, 1, 1]]

    Args:
        masks: one for each of the H query heads, in order; masks or their texts. They may differ by batch row, not by head.

    Raises:
        MaskError: if there are none, or one differs by head already.
    """
    from lowtri.masks.text import as_mask

    found = tuple(as_mask(one) for one in masks)
    if not found:
        raise MaskError("heads: the list is empty; it takes one mask for each query head.")
    if any(len(one.batch) > 1 for one in found):
        raise MaskError("heads: one of the masks differs by head already; it takes masks with batch () or (B,).")
    rows = {one.batch[0] for one in found if one.batch} - {1}
    if len(rows) > 1:
        raise MaskError(f"heads: the masks have batches of {sorted(rows)} rows, which do not fit together.")
    return Heads(found)


def _whole(mask: str, name: str, value: Any, least: int) -> int:
    if isinstance(value, bool | np.bool_) or not isinstance(value, int | np.integer):
        raise MaskError(f"{mask}: {name} is {value!r}, but it counts tokens: a whole number, at least {least}.")
    if not least <= value <= END:
        raise MaskError(f"{mask}: {name} is {value}, but it must lie in {least} .. END (2**62).")
    return int(value)


def _array(value: Any) -> NDArray[Any]:
    """NumPy's view of lists, arrays and torch tensors (on any device)."""
    if hasattr(value, "detach"):
        value = value.detach().cpu().numpy()
    try:
        return np.asarray(value)
    except ValueError:  # rows of different lengths
        return np.asarray(None)


def _integers(mask: str, name: str, value: Any, ranks: tuple[int, ...]) -> NDArray[np.int64]:
    if is_traced(value):
        return _traced(mask, name, value, ranks)
    array = _array(value)
    if array.size == 0:
        raise MaskError(f"{mask}: {name} is empty.")
    if array.dtype.kind not in "iu" or array.ndim not in ranks:
        raise MaskError(f"{mask}: {name} is {_came(array)}, but it takes integers of shape {_shapes(ranks)}.")
    return array.astype(np.int64)


def _bools(mask: str, name: str, value: Any, ranks: tuple[int, ...]) -> NDArray[np.bool_]:
    if is_traced(value):
        return _traced(mask, name, value, ranks)
    array = _array(value)
    if array.size == 0:
        raise MaskError(f"{mask}: {name} is empty.")
    if array.dtype != bool or array.ndim not in ranks:
        fix = " Fix: x != 0, after you made sure which way round it is." if array.dtype.kind in "iuf" else ""
        raise MaskError(f"{mask}: {name} is {_came(array)}, but it takes bools of shape {_shapes(ranks)}.{fix}")
    return array


def _traced(mask: str, name: str, value: Any, ranks: tuple[int, ...]) -> Any:
    """A tensor whose numbers come when the program runs; they are checked then."""
    if name not in ("ids", "key_ids", "valid", "bools") or value.ndim not in ranks:
        raise MaskError(
            f"{mask}: {name} is a tensor of a program that is being traced, where it cannot be looked into. "
            "Fix: documents(ids), keys(valid) and table(bools) take such tensors; or make the mask outside."
        )
    return value


def _came(array: NDArray[Any]) -> str:
    return "no array" if array.dtype == object else f"{array.dtype} {array.shape}"


def _shapes(ranks: tuple[int, ...]) -> str:
    names = {1: "(N,)", 2: "(B, N)", 3: "(B, Nq, Nk)", 4: "(B, H, Nq, Nk)"}
    if ranks[0] == 2:
        names[2] = "(Nq, Nk)"
    return " or ".join(names[rank] for rank in ranks)

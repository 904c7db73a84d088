"""The masks that are a formula of positions, by name: the public doors. Each checks its arguments, shows its picture, and names
itself in other libraries.

The formulas behind them stand in :mod:`lowtri.masks.formulas`; the doors to masks that hold something in
:mod:`lowtri.masks.holders`.
"""

from __future__ import annotations

from lowtri.masks.formulas import Band, Chunks, First, Full, Strided
from lowtri.masks.mask import END, Mask, check_count

__all__ = ["band", "causal", "chunks", "first", "full", "strided", "window"]


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
    n = check_count("window", "n", n, least=1)
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
    before, after = check_count("band", "before", before, least=0), check_count("band", "after", after, least=0)
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
    return First(check_count("first", "n", n, least=1))


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
    return Chunks(check_count("chunks", "n", n, least=1))


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
    return Strided(check_count("strided", "n", n, least=1))

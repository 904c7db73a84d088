"""Dropout: which weights are dropped. A draw is a function of the seed of a call, the row of the batch, the query head, and the
positions of the query and of the key, and of nothing else.

So neither padding, a cache, the order of tokens, tiles, threads nor instruction sets change what is dropped, nothing is stored for the
backward but the seed, and all backends that draw these numbers agree. There are whole numbers only:

    word(query)   64 bits: the seed, the row, the head and the position, mixed one after another
    word(key)     32 bits: the position, mixed
    draw          32 bits: both, mixed by two multiplications

A weight is dropped where its draw is less than round(dropout * 2 ** 32); the others are divided by 1 - dropout.

This is the definition, in NumPy and in torch; :mod:`lowtri.kernels.dropout` has it in LLVM code.

Source: counter-based generators (Salmon et al. 2011); the 64-bit mixing of SplitMix (Steele et al. 2014, variant 13 of Stafford); the
multipliers of Wellons' search for 32-bit hashes with little bias (2018).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "DRAW_SHIFTS",
    "FIRST",
    "LAST_SHIFT",
    "MIXING",
    "SECOND",
    "STEP",
    "draws",
    "kept",
    "kept_scale",
    "kept_tensor",
    "key_words",
    "new_seed",
    "query_words",
    "threshold",
]

STEP = 0x9E3779B97F4A7C15  # from one counter to the next: 2 ** 64 over the golden ratio
MIXING = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))  # shift, then multiply
LAST_SHIFT = 31
FIRST, SECOND = 0x7FEB352D, 0x846CA68B  # multipliers of the draw
DRAW_SHIFTS = 15, 16
_SEEDS = 2**63 - 1  # how many there are


def threshold(dropout: float) -> int:
    """The number below which a draw drops its weight, 0 .. 2 ** 32.

    >>> threshold(0.5) == 2**31
    True
    """
    return round(dropout * 2**32)


def kept_scale(dropout: float) -> float:
    """What a weight that is kept is multiplied by; 0 where none is."""
    return 0.0 if dropout == 1 else 1 / (1 - dropout)


def new_seed(is_numpy: bool) -> Any:
    """A seed, from the generator that users seed: NumPy's for its arrays, else torch's for the CPU, which gives a tensor.

    So torch's checkpointing, which restores its generator, repeats a call.
    """
    if is_numpy:
        return int(np.random.randint(_SEEDS, dtype=np.int64))  # noqa: NPY002 - the one that np.random.seed seeds
    import torch

    return torch.randint(_SEEDS, (), device="cpu")


# In NumPy.


def _mixed(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    for shift, multiplier in MIXING:
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(multiplier)
    return x ^ (x >> np.uint64(LAST_SHIFT))


def _counted(x: NDArray[np.uint64], count: Any) -> NDArray[np.uint64]:
    """The word after so many steps from x."""
    steps: NDArray[np.uint64] = np.asarray(count, np.int64).astype(np.uint64) + np.uint64(1)
    return _mixed(x + np.uint64(STEP) * steps)


def query_words(seed: int, heads: int, positions: NDArray[np.int64], rows: int) -> NDArray[np.uint64]:
    """The words of the queries at these positions, (B|1, N): (B, heads, N)."""
    of_row = _counted(np.array([seed], np.uint64), np.arange(rows))
    of_head = _counted(of_row[:, None], np.arange(heads))
    return _counted(of_head[:, :, None], positions[:, None, :])


def key_words(positions: NDArray[np.int64]) -> NDArray[np.uint32]:
    """The words of the keys at these positions, in the same shape."""
    return (_counted(np.zeros(1, np.uint64), positions) >> np.uint64(32)).astype(np.uint32)


def draws(of_queries: NDArray[np.uint64], of_keys: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """The draws of all pairs of queries (B, H, N) and keys (B|1, Nk): (B, H, N, Nk)."""
    low, high = of_queries.astype(np.uint32)[..., None], (of_queries >> np.uint64(32)).astype(np.uint32)[..., None]
    first, second = (np.uint32(shift) for shift in DRAW_SHIFTS)
    x = (of_keys[:, None, None, :] ^ low) * np.uint32(FIRST)
    x = ((x ^ (x >> first)) ^ high) * np.uint32(SECOND)
    return x ^ (x >> second)


def kept(
    seed: int, dropout: float, shape: tuple[int, int], q_positions: NDArray[np.int64], k_positions: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """Which weights (B, Hq, Nq, Nk) are kept, for ``shape`` (B, Hq).

    >>> positions = np.arange(64)[None]
    >>> half = kept(7, 0.5, (1, 1), positions, positions)
    >>> bool((half[..., 3:, :] == kept(7, 0.5, (1, 1), positions[:, 3:], positions)).all())
    True
    """
    rows, heads = shape
    return draws(query_words(seed, heads, q_positions, rows), key_words(k_positions)) >= threshold(dropout)


# In torch, whose integers of 64 bits have a sign: products wrap around, and bits that a shift copies from the sign are cleared.


def _signed(x: int) -> int:
    return x - 2**64 if x >= 2**63 else x


def _shifted(x: Tensor, shift: int) -> Tensor:
    return (x >> shift) & (2 ** (64 - shift) - 1)


def _mixed_tensor(x: Tensor) -> Tensor:
    for shift, multiplier in MIXING:
        x = (x ^ _shifted(x, shift)) * _signed(multiplier)
    return x ^ _shifted(x, LAST_SHIFT)


def _counted_tensor(x: Tensor, count: Tensor) -> Tensor:
    return _mixed_tensor(x + (count + 1) * _signed(STEP))


def kept_tensor(
    seed: Tensor, dropout: float, shape: tuple[int, int], q_positions: NDArray[np.int64], k_positions: NDArray[np.int64]
) -> Tensor:
    """:func:`kept` on the device of the seed, which torch.vmap may map over."""
    import torch

    def on_device(x: Any) -> Tensor:
        return torch.from_numpy(np.array(x, np.int64)).to(seed.device)

    rows, heads = (on_device(np.arange(n)) for n in shape)
    of_head = _counted_tensor(_counted_tensor(seed, rows)[:, None], heads)
    of_query = _counted_tensor(of_head[..., None], on_device(q_positions)[:, None])[..., None]
    of_key = on_device(key_words(k_positions))[:, None, None]  # (B|1, 1, 1, Nk)
    last = 2**32 - 1
    first, second = DRAW_SHIFTS
    x = ((of_key ^ (of_query & last)) * FIRST) & last
    x = ((x ^ (x >> first) ^ _shifted(of_query, 32)) * SECOND) & last
    return (x ^ (x >> second)) >= threshold(dropout)

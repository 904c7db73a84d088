"""A call of attention: its description without the data, its arrays in four dimensions, and its result.

A :class:`Call` holds everything about a call except the data of its arrays. Backends read it to decide whether they support the call,
and prepare it; the arrays are passed when a prepared call runs, so equal calls are prepared once.

Whatever the rank of the user's arrays, ``q`` is (B, Hq, Nq, D), ``k`` (B, Hkv, Nk, D), ``v`` (B, Hkv, Nk, Dv), ``bias`` is None or has
four dimensions that broadcast against (B, Hq, Nq, Nk), and positions are NumPy integers, (1, N) or (B, N).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict, TypeVar

import numpy as np
from numpy.typing import NDArray

from lowtri.masks.mask import Mask
from lowtri.masks.plan import Plan, plan

if TYPE_CHECKING:
    from numpy.typing import ArrayLike
    from torch import Tensor

    from lowtri.ops.distance_bias import DistanceBias

    Array = TypeVar("Array", Tensor, NDArray[Any])  # all arrays of a call come from one library, and so do its results

FEW_QUERIES = 16  # a call of fewer is prepared for any number of keys where its kernel reads a cache
_PAIRS_AT_ONCE = 2**18  # of a table whose rows differ: 2 MB of distances


class ArrayInfo(NamedTuple):
    """The properties of an array without its data."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in elements, not bytes
    dtype: str
    requires_grad: bool  # and gradients are recorded


class Inputs(NamedTuple):
    """The arrays of a call: all NumPy arrays, or all torch tensors on one device."""

    q: Any  # (B, Hq, Nq, D)
    k: Any  # (B, Hkv, Nk, D)
    v: Any  # (B, Hkv, Nk, Dv)
    bias: Any = None  # or (B|1, Hq|1, Nq|1, Nk|1)
    sinks: Any = None  # or (Hq,)


class Sizes(NamedTuple):
    """The sizes of a call."""

    batch: int
    heads: int  # of the queries
    kv_heads: int
    nq: int
    nk: int
    head_dim: int
    value_dim: int


class Options(TypedDict, total=False):
    """The keyword arguments of :func:`lowtri.attention` that change neither the return type nor the backend; for type checkers."""

    scale: float | None
    softcap: float | None
    bias: Tensor | NDArray[Any] | DistanceBias | None
    sinks: Tensor | NDArray[Any] | None
    dropout: float
    q_positions: Tensor | ArrayLike | None
    k_positions: Tensor | ArrayLike | None


class CallOptions(NamedTuple):
    """The keyword arguments of :func:`lowtri.attention`, as users pass them."""

    scale: Any = None
    softcap: Any = None
    bias: Any = None
    sinks: Any = None
    dropout: Any = 0.0
    q_positions: Any = None
    k_positions: Any = None
    return_weights: bool = False
    return_lse: bool = False
    engine: str = "auto"
    return_received: bool = False


class Result(NamedTuple):
    """The result of a call, in four dimensions; ``weights``, ``lse`` and ``received`` where the call returns them."""

    output: Any  # (B, Hq, Nq, Dv), the dtype of q
    weights: Any = None  # (B, Hq, Nq, Nk), the dtype of q, before dropout
    lse: Any = None  # (B, Hq, Nq), at least float32
    state: Any = None  # what the backend's own gradients need besides the inputs and the output
    received: Any = None  # (B, Hq, Nk), at least float32, the sum of the weights over the queries; without a gradient


@dataclass(eq=False, slots=True)  # frozen, it would take twice as long to make
class Placement:
    """What changes from token to token where few queries read a cache: the number of keys, and all positions, checked."""

    nk: int
    q: NDArray[np.int64] | None  # (B|1, Nq); None: the default
    k: NDArray[np.int64] | None  # (B|1, Nk)
    bounds: tuple[int, int, int, int]  # the least and the greatest position of the queries, and of the keys


@dataclass(frozen=True, eq=False)
class Call:
    """A checked call without the data of its arrays."""

    q: ArrayInfo
    k: ArrayInfo
    v: ArrayInfo
    bias: ArrayInfo | None
    sinks: ArrayInfo | None
    is_numpy: bool
    device: str  # "cpu", "cuda", ...
    mask: Mask
    scale: float
    softcap: float | None
    dropout: float
    q_positions: NDArray[np.int64]  # (B|1, Nq)
    k_positions: NDArray[np.int64]  # (B|1, Nk)
    positions_given: bool
    return_weights: bool
    return_lse: bool
    threads: int
    why_unreadable: str | None  # why the data cannot be read from memory, or None
    transformation: str | None  # torch's transform (vmap, jvp, ...) around the call, or None
    batch_shape: tuple[int, ...]  # the user's dimensions before (Hq, Nq, D)
    rank: int  # of the user's q
    return_received: bool = False
    distance_low: int | None = None  # of a bias over distances (ops.distance_bias): the distance of its first number

    @property
    def dtype(self) -> str:
        return self.q.dtype

    @property
    def sizes(self) -> Sizes:
        """B, Hq, Hkv, Nq, Nk, D, Dv."""
        q, v = self.q.shape, self.v.shape
        return Sizes(q[0], q[1], v[1], q[2], v[2], q[3], v[3])

    @property
    def group(self) -> int:
        """The number of neighbouring query heads that share one key/value head."""
        return self.q.shape[1] // max(1, self.k.shape[1]) or 1  # 1 where there are no heads

    @cached_property
    def needs_grad(self) -> bool:
        return any(x is not None and x.requires_grad for x in (self.q, self.k, self.v, self.bias, self.sinks))

    @property
    def is_plain(self) -> bool:
        """Whether it takes three tensors whose memory can be read, as they are, and returns the output alone."""
        others = self.bias, self.sinks, self.why_unreadable
        returns_more = self.return_weights or self.return_lse or self.return_received
        as_given = self.rank == 4 or (self.rank < 4 and not self.needs_grad)  # gradients have four dimensions
        return as_given and not (self.is_numpy or returns_more) and others == (None, None, None)

    @cached_property
    def shows_all(self) -> bool:
        """Whether every query sees every key; decided from the bounds of the positions, so it may be False without need."""
        return self._shows(self.bounds)

    @property
    def bounds(self) -> tuple[int, int, int, int]:
        """The least and the greatest position of the queries, and of the keys; of none, -1."""
        q, k = self.q_positions, self.k_positions
        if 0 in (q.size, k.size):
            return -1, -1, -1, -1
        if not self.positions_given:  # consecutive
            return int(q[0, 0]), int(q[0, -1]), 0, k.shape[1] - 1
        return int(q.min()), int(q.max()), int(k.min()), int(k.max())

    def _shows(self, bounds: tuple[int, int, int, int]) -> bool:
        q_low, q_high = bounds[:2]
        k_low, k_high = bounds[2:]
        if self.mask.batch or q_low < 0 or k_low < 0:
            return False
        return self.mask.full_unchecked(q_low, q_high, k_low, k_high)

    def plan(self, tile_k: int = 128) -> Plan:
        """The plan of the mask at these positions."""
        return plan(self.mask, self.q_positions, self.k_positions, tile_k=tile_k)

    def visible(self, start: int = 0, stop: int | None = None, k0: int = 0, k1: int | None = None) -> NDArray[np.bool_]:
        """The table of visible pairs among the queries ``start .. stop`` and the keys ``k0 .. k1`` (indices): (B|1, Hq|1, nq, nk)."""
        return _table(self.mask, self.q_positions[:, start:stop], self.k_positions[:, k0:k1])

    def visible_at(self, positions: Placement) -> NDArray[np.bool_] | None:
        """The table of visible pairs at other positions, (B|1, Hq|1, Nq, Nk); None where every query sees every key."""
        bounds = positions.bounds
        if self._shows(bounds):
            return None
        q, k = positions_of(self.mask, self.q.shape[2], positions.nk, positions.q, positions.k)
        if self.mask.batch or len(q) > 1 or len(k) > 1 or bounds[0] < 0:
            return _table(self.mask, q, k)
        visible = self.mask.visible_unchecked(q.T, k)
        return (visible & (k >= 0) if bounds[2] < 0 else visible)[None, None]  # free slots of a cache are at -1

    @cached_property
    def first_distance(self) -> int | None:
        """The index of the first query's distance to the first key in a bias over distances, if both have consecutive positions."""
        assert self.distance_low is not None
        for x in (self.q_positions, self.k_positions):
            if len(x) != 1 or x[0, 0] < 0 or np.any(np.diff(x[0]) != 1):
                return None
        return int(self.q_positions[0, 0] - self.k_positions[0, 0]) - self.distance_low

    def bias_of_pairs(
        self, bias: Any, start: int = 0, stop: int | None = None, k0: int = 0, k1: int | None = None
    ) -> Any:
        """A bias over distances for the pairs of :meth:`visible`, (B|1, Hq|1, nq, nk); any number at hidden ones."""
        assert self.distance_low is not None
        index: Any = self.q_positions[:, start:stop, None] - self.k_positions[:, None, k0:k1] - self.distance_low
        index = np.clip(index, 0, bias.shape[3] - 1)  # padding has other distances, and is hidden
        if not isinstance(bias, np.ndarray):
            import torch

            index = torch.from_numpy(index).to(bias.device)
        rows = bias[:, :, 0]  # (B|1, H|1, L)
        if len(index) == 1:
            return rows[:, :, index[0]]
        parts = [rows[b % len(rows)][:, index[b]] for b in range(len(index))]
        return np.stack(parts) if isinstance(bias, np.ndarray) else torch.stack(parts)

    def of_user_rank(self, sizes: tuple[int, ...]) -> tuple[int, ...]:
        """The sizes or strides of an array (B, H, N, D) in the rank of the user's q, of at most four dimensions."""
        return sizes[4 - self.rank :]

    def to_user_rank(self, x: Any) -> Any:
        """A result (B, Hq, ...) in the rank of the user's q."""
        if self.rank == 4:
            return x
        if self.rank == 2:
            return x[0, 0]
        return x.reshape(*self.batch_shape, *x.shape[1:])

    def in_order(self, result: Result, with_lse: bool) -> list[Any]:
        """The results that a call returns, in their order and in the rank of the user's q; ``with_lse``: the log-sum-exp, too."""
        chosen = [result.output]
        if self.return_weights:
            chosen.append(result.weights)
        if self.return_received:
            chosen.append(result.received)
        if with_lse:
            chosen.append(result.lse)
        return [self.to_user_rank(x) for x in chosen]

    def returned(self, result: Result) -> Any:
        """What the user gets of a result."""
        if not (self.return_weights or self.return_lse or self.return_received):
            return self.to_user_rank(result.output)
        return tuple(self.in_order(result, self.return_lse))

    def __str__(self) -> str:
        shapes = f"q {tuple(self.q.shape)}   k {tuple(self.k.shape)}   {self.dtype}   {self.device}"
        text = repr(self.mask)
        return f"{shapes}   mask {text if len(text) <= 80 else text[:77] + '...'}"


def _table(mask: Mask, q: NDArray[np.int64], k: NDArray[np.int64]) -> NDArray[np.bool_]:
    """The visible pairs of queries and keys at these positions, (B|1, N) each: (B|1, Hq|1, nq, nk)."""
    if not mask.batch and len(q) == len(k) == 1:
        return np.asarray(mask(q[0][:, None], k[0][None, :]))[None, None]
    if not mask.batch and max(len(q), len(k)) * q.shape[1] * k.shape[1] <= _PAIRS_AT_ONCE:
        return np.asarray(mask(q[:, :, None], k[:, None, :]))[:, None]
    rows = max(len(q), len(k), *(mask.batch[:1] or (1,)))
    heads = mask.batch[1] if len(mask.batch) > 1 else 1
    out = np.empty((rows, heads, q.shape[1], k.shape[1]), bool)
    for b, h in np.ndindex(rows, heads):
        out[b, h] = mask.for_row(b, h)(q[b % len(q)][:, None], k[b % len(k)][None, :])
    return out


def positions_of(
    mask: Mask, nq: int, nk: int, q_positions: NDArray[np.int64] | None, k_positions: NDArray[np.int64] | None
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The positions of the queries and of the keys, (B|1, N) each, where None stands for the default."""
    start = max(nk - nq, 0)
    keys = _consecutive(0, nk) if k_positions is None else k_positions
    if q_positions is not None:
        return q_positions, keys
    if k_positions is not None and mask.depends_on_query:
        return keys[:, start:], keys  # those of the last keys, also where they are shifted, padded or differ by row
    return _consecutive(start, start + nq), keys


def _consecutive(start: int, stop: int) -> NDArray[np.int64]:
    """start .. stop - 1 as positions, (1, N)."""
    positions = np.arange(start, stop)[None]
    positions.setflags(write=False)
    return positions

"""A mask and its positions, in the shape of the tensor that models pass from layer to layer.

transformers makes a mask once for a forward and hands it to every layer; on the way models slice it, expand it, move it to
another device, or ask for its dtype. :class:`SeenTensor` is a bool tensor (B, 1, Nq, Nk) that holds no table: only a
:class:`Seen`. What keeps it a mask over consecutive positions is answered without a table; any other operation gets the table,
exactly. Adding it to scores is refused: True would become 1, False 0, and nothing would be hidden. So is torch's attention with
it: both are signs of a model with attention code of its own, which runs on as if nobody had switched it over.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._pytree import tree_map

from lowtri.errors import CallError
from lowtri.masks.mask import Mask
from lowtri.masks.tile import EMPTY

__all__ = ["Seen", "SeenTensor"]

_FEW = 16  # queries: below, reading keys and values is the work, and keys that nobody sees are left out at both ends


@dataclass(frozen=True, eq=False)
class Seen:
    """Who may see whom among ``nq`` queries from place ``q0`` on and ``nk`` keys from place ``k0`` on.

    >>> from lowtri.masks import causal
    >>> Seen(causal(), 5, 2, 4, 8).table().astype(int)[0, 0]
    array([[1, 1, 0, 0, 0, 0, 0, 0],
           [1, 1, 1, 0, 0, 0, 0, 0]])
    """

    mask: Mask
    q0: int
    nq: int
    k0: int
    nk: int

    @cached_property
    def positions(self) -> dict[str, NDArray[np.int64]]:
        """What ``attention`` must be told: nothing where keys stand at 0 .. Nk-1 and the queries at the last of them."""
        usual = self.k0 == 0 and (self.q0 == self.nk - self.nq or not self.mask.asks_query)
        if usual:
            return {}
        q_positions, k_positions = np.arange(self.q0, self.q0 + self.nq), np.arange(self.k0, self.k0 + self.nk)
        return {"q_positions": q_positions, "k_positions": k_positions}

    @cached_property
    def trimmed(self) -> Seen:
        """The same without the keys at either end that no query sees: the tail of a static cache, what a window left behind.

        Where a key is hidden from every later place too, one question settles the tail; the far end of a window is looked
        for by halving. Both once for a forward, not for a layer.
        """
        mask, q0, q1, low, high = self.mask, self.q0, self.q0 + self.nq, self.k0, self.k0 + self.nk
        if not mask.asks_query or low == high:
            return self
        if low < q1 < high and _nobody(mask, q0, q1, q1, high):
            high = q1
        if self.nq < _FEW and _nobody(mask, q0, q1, low, low + 1):
            known, open_ = low + 1, high
            while open_ - known > 1:
                middle = (known + open_) // 2
                known, open_ = (middle, open_) if _nobody(mask, q0, q1, low, middle) else (known, middle)
            low = known
        if high - low == self.nk or _nobody(mask, q0, q1, low, high):
            return self
        return replace(self, k0=low, nk=high - low)

    def rows(self, start: int, stop: int) -> Seen:
        """The queries ``start .. stop`` alone (indices)."""
        return replace(self, q0=self.q0 + start, nq=max(stop - start, 0))

    def columns(self, start: int, stop: int) -> Seen:
        """The keys ``start .. stop`` alone (indices)."""
        return replace(self, k0=self.k0 + start, nk=max(stop - start, 0))

    def table(self) -> NDArray[np.bool_]:
        """Every pair, True = may see: (B|1, Hq|1, Nq, Nk)."""
        q, k = np.arange(self.q0, self.q0 + self.nq), np.arange(self.k0, self.k0 + self.nk)
        pairs = np.asarray(self.mask(q[:, None], k[None, :]))
        lead = (*self.mask.batch, 1, 1)[:2]
        return np.broadcast_to(pairs.reshape(*lead, *pairs.shape[-2:]), (*lead, self.nq, self.nk))


def _nobody(mask: Mask, q0: int, q1: int, k0: int, k1: int) -> bool:
    if mask.batch:
        return bool(np.all(mask.tile(q0, q1, k0, k1) == EMPTY))
    return bool(mask.tile(q0, q1, k0, k1) == EMPTY)


class SeenTensor(Tensor):
    """A bool tensor (B, Hq|1, Nq, Nk), True = may see, that is a :class:`Seen` and holds no table.

    >>> from lowtri.masks import causal
    >>> tensor = SeenTensor(Seen(causal(), 0, 1000, 0, 1000), (2, 1, 1000, 1000), "cpu")
    >>> tensor[:, :, -1:].seen.q0, tensor.dtype
    (999, torch.bool)
    >>> tensor[0, 0, :2, :3]
    tensor([[ True, False, False],
            [ True,  True, False]])
    """

    seen: Seen

    @staticmethod
    def __new__(cls, seen: Seen, shape: Any, device: Any) -> SeenTensor:
        made: SeenTensor = torch.Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=torch.bool, device=device)
        made.seen = seen
        return made

    def __init__(self, seen: Seen, shape: Any, device: Any) -> None:
        super().__init__()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.scaled_dot_product_attention:
            _refuse("gives its mask to torch's attention")
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        keep = _KEPT.get(func)
        kept = keep(*args, **kwargs) if keep and type(args[0]) is cls else None
        if kept is not None:
            return kept
        as_numbers = func is _TO and _is_float(kwargs.get("dtype"))
        if as_numbers or (func in _SUMS and any(isinstance(x, Tensor) and _is_float(x.dtype) for x in args)):
            _refuse(f"takes its mask for numbers to add to the scores ({func})")
        return func(*tree_map(_written, args), **tree_map(_written, kwargs))

    def __repr__(self, **options: Any) -> str:  # type: ignore[override]
        return f"SeenTensor({tuple(self.shape)}, {self.seen.mask!r}, queries from {self.seen.q0}, keys from {self.seen.k0})"

    def written(self) -> Tensor:
        """The table, an ordinary tensor; made once."""
        known = self.__dict__.get("_table")
        if known is None:
            # Inside an operation torch.vmap, by which some masks are asked, does not run; a thread stands outside.
            with ThreadPoolExecutor(1) as apart:
                table = np.broadcast_to(apart.submit(self.seen.table).result(), tuple(self.shape))
            known = self.__dict__["_table"] = torch.from_numpy(table.copy()).to(self.device)
        return known


def _written(x: Any) -> Any:
    return x.written() if isinstance(x, SeenTensor) else x


def _is_float(dtype: Any) -> bool:
    return dtype is not None and bool(dtype.is_floating_point)


def _refuse(does: str) -> None:
    """The sign of a model with attention code of its own, which lowtri does not reach."""
    raise CallError(
        f"transformers: the model {does}, so it has attention code of its own, which\n"
        'attn_implementation="lowtri" does not reach; and True and False hide nothing where they are added.\n'
        'Fix: attn_implementation="eager" (or "sdpa") for this model, or this part of a model.'
    )


# Operations after which it is still a mask over consecutive positions; None where it is not.


def _same(x: SeenTensor, *args: Any, **kwargs: Any) -> SeenTensor:
    return SeenTensor(x.seen, x.shape, x.device)


def _to(x: SeenTensor, *, dtype: Any = None, device: Any = None, **kwargs: Any) -> SeenTensor | None:
    return SeenTensor(x.seen, x.shape, device or x.device) if dtype in (None, torch.bool) else None


def _slice(x: SeenTensor, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> SeenTensor | None:
    if step != 1:
        return None
    dim %= 4
    first, last, _ = slice(start, end).indices(x.shape[dim])
    shape = [*x.shape[:dim], max(last - first, 0), *x.shape[dim + 1 :]]
    if shape == list(x.shape):
        return _same(x)
    if dim == 0 and not x.seen.mask.batch:
        return SeenTensor(x.seen, shape, x.device)
    if dim < 2 or 0 in shape:
        return None
    return SeenTensor(x.seen.rows(first, last) if dim == 2 else x.seen.columns(first, last), shape, x.device)


def _expand(x: SeenTensor, size: Any, **kwargs: Any) -> SeenTensor | None:
    shape = [old if new == -1 else new for old, new in zip(x.shape, size, strict=False)]
    fits = len(size) == 4 and shape[2:] == list(x.shape[2:])
    return SeenTensor(x.seen, shape, x.device) if fits else None


_OPS = torch.ops.aten
_TO = _OPS._to_copy.default
_KEPT: dict[Any, Any] = {
    _OPS.detach.default: _same,
    _OPS.alias.default: _same,
    _OPS.clone.default: _same,
    _TO: _to,
    _OPS.slice.Tensor: _slice,
    _OPS.expand.default: _expand,
}
_SUMS = {_OPS.add.Tensor, _OPS.add_.Tensor, _OPS.sub.Tensor, _OPS.sub_.Tensor, _OPS.rsub.Tensor}

"""Lazy mask tensors: a mask and its positions, as a tensor subclass without a table.

transformers makes a mask once per forward pass and passes it to every layer; models slice it, expand it, move it to another device
or read its dtype. Operations that keep consecutive positions stay lazy; any other operation materializes the table. Two uses are
rejected: adding the mask to scores, where True would become 1 and False 0, so that nothing would be hidden, and passing it to torch's
attention. Both show that the model has its own attention code, which does not call the registered attention.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lowtri.compat.torch_private import make_wrapper, to_copy, without_torch_function
from lowtri.errors import CallError
from lowtri.integrations.dense_mask import LazyMask


class LazyMaskTensor(Tensor):
    """A bool tensor (B, Hq|1, Nq, Nk), True = may see, that is a :class:`LazyMask` and holds no table.

    >>> from lowtri.masks import causal
    >>> tensor = LazyMaskTensor(LazyMask(causal(), 0, 1000, 0, 1000), (2, 1, 1000, 1000), "cpu")
    >>> tensor[:, :, -1:].lazy.q0, tensor.dtype
    (999, torch.bool)
    >>> tensor[0, 0, :2, :3]
    tensor([[ True, False, False],
            [ True,  True, False]])
    """

    lazy: LazyMask

    @staticmethod
    def __new__(cls, lazy: LazyMask, shape: Any, device: Any) -> LazyMaskTensor:
        tensor: LazyMaskTensor = make_wrapper(cls, tuple(shape), dtype=torch.bool, device=device)
        tensor.lazy = lazy
        return tensor

    def __init__(self, lazy: LazyMask, shape: Any, device: Any) -> None:
        super().__init__()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.scaled_dot_product_attention:
            _reject("passes its mask to torch's attention")
        with without_torch_function():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        lazy_op = None if args and getattr(args[0], "lazy", None) is None else _LAZY_OPS.get(func)
        result = lazy_op(*args, **kwargs) if lazy_op and type(args[0]) is cls else None
        if result is not None:
            return result
        as_numbers = func is to_copy and _is_float(kwargs.get("dtype"))
        if as_numbers or (func in _SUMS and any(isinstance(x, Tensor) and _is_float(x.dtype) for x in args)):
            _reject(f"adds its boolean mask to the scores ({func})")
        return func(*_materialized(args), **{name: _materialized(x) for name, x in kwargs.items()})

    def __repr__(self, **options: Any) -> str:  # type: ignore[override]
        return f"LazyMaskTensor({tuple(self.shape)}, {self.lazy.mask!r}, queries from {self.lazy.q0}, keys from {self.lazy.k0})"

    def materialize(self) -> Tensor:
        """The table, an ordinary tensor; made once."""
        made: Tensor | None = self.__dict__.get("_table")
        if made is None:
            # torch.vmap, which some mask functions need, does not run inside of an operation; it does in another thread.
            with ThreadPoolExecutor(1) as thread:
                table = np.broadcast_to(thread.submit(self.lazy.table).result(), tuple(self.shape))
            made = self.__dict__["_table"] = torch.from_numpy(table.copy()).to(self.device)
        return made


class TraceableMaskTensor(LazyMaskTensor):
    """A lazy mask of few pairs, which a program of torch.compile takes as its table: that is small."""

    _table: Tensor

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        self.materialize()
        return ["_table"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], context: None, size: Any, stride: Any) -> Any:
        table = inner["_table"]
        tensor: Any = make_wrapper(TraceableMaskTensor, size, dtype=torch.bool, device=table.device)
        tensor.lazy, tensor._table = None, table
        return tensor


def _materialized(x: Any) -> Any:
    """An argument of an operator, a sequence of them included, with tables for lazy masks."""
    if isinstance(x, list | tuple):
        return type(x)(map(_materialized, x))
    return x.materialize() if isinstance(x, LazyMaskTensor) else x


def _is_float(dtype: Any) -> bool:
    return dtype is not None and bool(dtype.is_floating_point)


def _reject(does: str) -> None:
    """Reject a use that shows that the model has attention code of its own."""
    raise CallError(
        f"transformers: the model {does}, so it has attention code of its own, which\n"
        'attn_implementation="lowtri" does not reach; and True and False hide nothing where they are added.\n'
        'Fix: attn_implementation="eager" (or "sdpa") for this model, or this part of a model.'
    )


# Operations that stay lazy; they return None where the result is no mask over consecutive positions.


def _same(x: LazyMaskTensor, *args: Any, **kwargs: Any) -> LazyMaskTensor:
    return LazyMaskTensor(x.lazy, x.shape, x.device)


def _to(x: LazyMaskTensor, *, dtype: Any = None, device: Any = None, **kwargs: Any) -> LazyMaskTensor | None:
    return LazyMaskTensor(x.lazy, x.shape, device or x.device) if dtype in (None, torch.bool) else None


def _slice(x: LazyMaskTensor, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> LazyMaskTensor | None:
    if step != 1:
        return None
    dim %= 4
    first, last, _ = slice(start, end).indices(x.shape[dim])
    shape = [*x.shape[:dim], max(last - first, 0), *x.shape[dim + 1 :]]
    if shape == list(x.shape):
        return _same(x)
    if dim == 0 and not x.lazy.mask.batch:
        return LazyMaskTensor(x.lazy, shape, x.device)
    if dim < 2 or 0 in shape:
        return None
    return LazyMaskTensor(x.lazy.rows(first, last) if dim == 2 else x.lazy.columns(first, last), shape, x.device)


def _expand(x: LazyMaskTensor, size: Any, **kwargs: Any) -> LazyMaskTensor | None:
    shape = [old if new == -1 else new for old, new in zip(x.shape, size, strict=False)]
    fits = len(size) == 4 and shape[2:] == list(x.shape[2:])
    return LazyMaskTensor(x.lazy, shape, x.device) if fits else None


_OPS = torch.ops.aten
_LAZY_OPS: dict[Any, Any] = {
    _OPS.detach.default: _same,
    _OPS.alias.default: _same,
    _OPS.clone.default: _same,
    to_copy: _to,
    _OPS.slice.Tensor: _slice,
    _OPS.expand.default: _expand,
}
_SUMS = {_OPS.add.Tensor, _OPS.add_.Tensor, _OPS.sub.Tensor, _OPS.sub_.Tensor, _OPS.rsub.Tensor}

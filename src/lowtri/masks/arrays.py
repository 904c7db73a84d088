"""Users' lists, arrays and tensors as NumPy arrays, checked, and the frozen copies that masks keep.

Subclasses of arrays and tensors are rejected, with the fix: their memory may not hold their values (torch's ``CausalBias`` has none,
NumPy's masked arrays exclude some), and reading it would silently give wrong numbers.

torch is never imported here: if it has not been imported, no argument is a tensor.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lowtri.errors import CallError, MaskError
from lowtri.masks.positions import POSITION_MAX

__all__ = [
    "FrozenArray",
    "bool_array",
    "in_numpy",
    "integer_array",
    "is_fake",
    "is_tensor",
    "is_traced",
    "positions_in_numpy",
    "why_not_plain",
]

_FIXES = {
    "CausalBias": 'the mask "causal"',
    "DTensor": "{}.to_local()",
    "MaskedTensor": "{}.get_data(), with lowtri.table or lowtri.keys for its mask",
    "MaskedArray": "{}.data, with lowtri.table or lowtri.keys for its mask",
}


def is_tensor(x: Any) -> bool:
    """Whether x is a torch tensor, without loading torch to find out."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.Tensor)


def is_traced(value: Any) -> bool:
    """Whether this is a tensor of a program that torch.compile or torch.export is tracing: a shape without numbers."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.compiler.is_compiling() and isinstance(value, torch.Tensor)


def is_fake(x: Any) -> bool:
    """Whether x stands for a tensor while a program is recorded, and has no numbers."""
    if not is_tensor(x):
        return False
    from lowtri.compat import torch_private

    return torch_private.is_fake(x)


def why_not_plain(name: str, x: Any) -> str | None:
    """Why the numbers of an array or a tensor cannot be read from its memory, with the fix; None where they can, or x is neither."""
    kind = type(x)
    if kind is np.ndarray or kind is np.memmap:
        return None
    if is_tensor(x):
        torch = sys.modules["torch"]
        if kind not in (torch.Tensor, torch.nn.Parameter) and not is_fake(x):
            fix = "{}.as_subclass(torch.Tensor)"
            if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
                fix = "the plain tensor that it wraps"
            fix = _FIXES.get(kind.__name__, fix).format(name)
            return f"{name} is a {kind.__name__}, but subclasses of torch.Tensor are not taken. Fix: {fix}."
        if x.is_nested or x.layout is not torch.strided:
            layout, fix = ("nested", "pad it") if x.is_nested else (str(x.layout), f"{name}.to_dense()")
            return f"{name} is a {layout} tensor, but dense ones are taken. Fix: {fix}."
    elif isinstance(x, np.ndarray):
        fix = _FIXES.get(kind.__name__, "np.asarray({})").format(name)
        return f"{name} is a {kind.__name__}, but subclasses of NumPy's array are not taken. Fix: {fix}."
    return None


def in_numpy(name: str, value: Any) -> NDArray[Any] | str:
    """The numbers of a list, an array or a tensor on any device; or in words why there are none."""
    if is_tensor(value) or isinstance(value, np.ma.MaskedArray):
        trouble = why_not_plain(name, value)
        if trouble is not None:
            return trouble
    if is_tensor(value):
        from lowtri.compat.torch_private import functional_value

        try:
            if value.dtype.is_floating_point and value.dtype.itemsize < 4:  # NumPy has no bfloat16
                value = value.float()
            array: NDArray[Any] = functional_value(value).numpy(force=True)
            return array
        except Exception:  # fake, on the meta device, inside vmap: torch raises various classes
            return f"{name} is a {type(value).__name__} without numbers (fake, meta, or inside a transform)"
    try:
        return np.asarray(value)
    except Exception:  # rows of different lengths, or any error of an object's __array__
        return f"{name} is no array"


def positions_in_numpy(name: str, value: Any, shapes: str) -> NDArray[np.int64]:
    """Positions as int64, in their own shape; all below 0 become -1, which means no token.

    Raises:
        CallError: unless they are whole numbers below POSITION_MAX; the message says what was expected, ``shapes``.
    """
    if is_traced(value):  # its numbers come when the program runs
        return value.detach().cpu().numpy()
    array = in_numpy(name, value)
    if isinstance(array, str) or (array.size and array.dtype.kind not in "iu"):
        came = array if isinstance(array, str) else f"{name} is {array.dtype} {array.shape}"
        raise CallError(
            f"{came}, but it holds whole numbers, {shapes}: the position of each in the sequence, -1 where there is no token."
        )
    if not array.size:
        return np.zeros(array.shape, np.int64)
    if (
        int(array.max()) >= POSITION_MAX
    ):  # before the cast, where uint64 would turn negative; NumPy 1 compares uint64 as float64
        raise CallError(f"{name} reaches {array.max()}, but positions lie below 2**62.")
    array = array.astype(np.int64, copy=False)
    return array if array.min() >= -1 else np.maximum(array, -1)


class FrozenArray:
    """A read-only copy of an array, compared and hashed by content; the hash is computed once.

    A tensor of a program that is being traced is kept as it is, and only its shape is used. ``memory`` is the same array, writable,
    for functions that do not accept read-only arrays.
    """

    def __init__(self, array: NDArray[Any]) -> None:
        if is_traced(array):
            self.array = self.memory = array
            return
        try:
            self.memory = np.array(array, order="C")
        except MemoryError:
            raise MaskError(
                f"mask: an array of {array.shape} {array.dtype} does not fit into memory, and a mask copies its array."
            ) from None
        self.array = self.memory.view()
        self.array.setflags(write=False)

    @cached_property
    def digest(self) -> str:
        kind = f"{self.array.dtype.str}{self.array.shape}".encode()
        return hashlib.sha256(kind + self.array.tobytes()).hexdigest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FrozenArray) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __reduce__(self) -> tuple[type[FrozenArray], tuple[NDArray[Any]]]:
        return FrozenArray, (self.array,)  # the copy on the other side is read-only again

    def __repr__(self) -> str:
        return f"<{'x'.join(map(str, self.array.shape))} {self.array.dtype} {self.digest[:8]}>"


def integer_array(mask: str, name: str, value: Any, ranks: tuple[int, ...]) -> NDArray[np.int64]:
    """Integers of one of these ranks, from lists, arrays or tensors."""
    if is_traced(value):
        return _traced(mask, name, value, ranks)
    array = in_numpy(name, value)
    if isinstance(array, str):
        raise MaskError(f"{mask}: {array}, but it takes integers of shape {_shapes(ranks)}.")
    if array.size == 0:
        raise MaskError(f"{mask}: {name} is empty.")
    if array.dtype.kind not in "iu" or array.ndim not in ranks:
        raise MaskError(f"{mask}: {name} is {_came(array)}, but it takes integers of shape {_shapes(ranks)}.")
    whole = _fitting(mask, name, array, lambda: array.astype(np.int64))
    if int(array.max()) > POSITION_MAX:  # of the array before the cast, in which large uint64 turn negative
        raise MaskError(f"{mask}: {name} reaches {array.max()}, but at most 2**62 is taken.")
    return whole


def bool_array(
    mask: str, name: str, value: Any, ranks: tuple[int, ...], *, inverted: bool = False
) -> NDArray[np.bool_]:
    """Bools of one of these ranks, or their opposites. Numbers are rejected, because 1 may mean either visible or hidden."""
    if is_traced(value):
        return ~_traced(mask, name, value, ranks) if inverted else _traced(mask, name, value, ranks)
    array = in_numpy(name, value)
    if isinstance(array, str):
        raise MaskError(f"{mask}: {array}, but it takes bools of shape {_shapes(ranks)}.")
    if array.size == 0:
        raise MaskError(f"{mask}: {name} is empty.")
    if array.dtype != bool or array.ndim not in ranks:
        fix = (
            " Fix: x != 0, after checking whether it marks visible or hidden pairs."
            if array.dtype.kind in "iuf"
            else ""
        )
        raise MaskError(f"{mask}: {name} is {_came(array)}, but it takes bools of shape {_shapes(ranks)}.{fix}")
    return _fitting(mask, name, array, lambda: ~array) if inverted else array


def _fitting(mask: str, name: str, array: NDArray[Any], make: Callable[[], NDArray[Any]]) -> NDArray[Any]:
    try:
        return make()
    except MemoryError:
        raise MaskError(f"{mask}: {name} is {_came(array)}, which does not fit into memory.") from None


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

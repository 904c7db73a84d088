"""Arrays as users pass them, NumPy's and torch's alike: which of them hold plain numbers, and those numbers in NumPy.

A subclass may keep its numbers elsewhere (torch's ``CausalBias`` has none at all), leave some of them out (NumPy's masked arrays) or
compute in its own way. Reading its memory would give wrong numbers in silence, so subclasses are refused, with the fix.

torch is never loaded here: where it is not loaded, no tensor can come.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lowtri.errors import CallError
from lowtri.masks.held import is_traced
from lowtri.masks.mask import END

__all__ = ["in_numpy", "is_fake", "is_tensor", "positions_in_numpy", "why_not_plain"]

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


def is_fake(x: Any) -> bool:
    """Whether x stands for a tensor while a program is recorded, and has no numbers."""
    return type(x).__module__ in ("torch._subclasses.fake_tensor", "torch._subclasses.functional_tensor")


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
        torch = sys.modules["torch"]
        try:
            if value.dtype.is_floating_point and value.dtype.itemsize < 4:  # NumPy has no bfloat16
                value = value.float()
            if torch._is_functional_tensor(value):
                torch._sync(value)
                value = torch._from_functional_tensor(value)
            found: NDArray[Any] = value.numpy(force=True)
            return found
        except Exception:  # fake, on the meta device, inside vmap: torch has no one class for these
            return f"{name} is a {type(value).__name__} without numbers (fake, meta, or inside a transform)"
    try:
        return np.asarray(value)
    except Exception:  # rows of different lengths; whatever an object raises that is asked for an array
        return f"{name} is no array"


def positions_in_numpy(name: str, value: Any, shapes: str) -> NDArray[np.int64]:
    """Positions as int64, in the shape that came; all below 0 become -1, since none of them is a token.

    Raises:
        CallError: unless they are whole numbers below END; the message says what was expected, ``shapes``.
    """
    if is_traced(value):  # its numbers come when the program runs
        return value.detach().cpu().numpy()
    array = in_numpy(name, value)
    if isinstance(array, str) or (array.size and array.dtype.kind not in "iu"):
        came = array if isinstance(array, str) else f"{name} is {array.dtype} {array.shape}"
        raise CallError(
            f"{came}, but it holds whole numbers, {shapes}: the place of each in the sequence, -1 where there is no token."
        )
    if not array.size:
        return np.zeros(array.shape, np.int64)
    if array.max() >= END:  # asked before the cast, where uint64 would turn negative
        raise CallError(f"{name} reaches {array.max()}, but positions lie below lowtri.END (2**62).")
    array = array.astype(np.int64, copy=False)
    return array if array.min() >= -1 else np.maximum(array, -1)

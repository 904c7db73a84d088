"""What the doors to masks take, checked: whole numbers, integers and bools; and what they say when something else comes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lowtri.errors import MaskError
from lowtri.masks.arrays import in_numpy
from lowtri.masks.held import is_traced
from lowtri.masks.mask import END

__all__ = ["bool_array", "integer_array"]


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
    if array.max() > END:  # asked before the cast, where uint64 would turn negative
        raise MaskError(f"{mask}: {name} reaches {array.max()}, but at most END (2**62) is taken.")
    return _fitting(mask, name, array, lambda: array.astype(np.int64))


def bool_array(
    mask: str, name: str, value: Any, ranks: tuple[int, ...], *, inverted: bool = False
) -> NDArray[np.bool_]:
    """Bools of one of these ranks, or their opposites. Numbers are refused: nobody can say which way round they are."""
    if is_traced(value):
        return ~_traced(mask, name, value, ranks) if inverted else _traced(mask, name, value, ranks)
    array = in_numpy(name, value)
    if isinstance(array, str):
        raise MaskError(f"{mask}: {array}, but it takes bools of shape {_shapes(ranks)}.")
    if array.size == 0:
        raise MaskError(f"{mask}: {name} is empty.")
    if array.dtype != bool or array.ndim not in ranks:
        fix = " Fix: x != 0, after you made sure which way round it is." if array.dtype.kind in "iuf" else ""
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

"""Converts users' lists, arrays and tensors to checked NumPy arrays, and makes the frozen copies that masks keep.

Subclasses of arrays and tensors are rejected, with the fix: their memory may not hold their values (torch's ``CausalBias`` has none,
NumPy's masked arrays exclude some), and reading it would silently give wrong numbers.

torch is never imported here: if it has not been imported, no argument can be a tensor.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lowtri.compat.programs import COMPILER, tensor_of, tracer
from lowtri.errors import CallError, MaskError
from lowtri.forks import after_fork, renew_cached_properties
from lowtri.masks.tile import POSITION_MAX, refuse_symbol

after_fork(renew_cached_properties)  # of all of lowtri; masks have the first ones

# Shapes that arguments take, by rank.
VECTOR = {1: "(N,)"}
ROWS = {**VECTOR, 2: "(B, N)"}
TABLES = {2: "(Nq, Nk)", 3: "(B, Nq, Nk)", 4: "(B, H, Nq, Nk)"}

# Which may be tensors without numbers.
_TRACED_ARGUMENTS = ("ids", "key_ids", "lengths", "cu_seqlens", "valid", "bools", "parents")
_PADDED = "torch.nested.to_padded_tensor({}, 0.0), and keys(lengths=[...]) in the mask, with the length of each row"
_FIXES = {
    "CausalBias": 'the mask "causal", or lowtri.scaled_dot_product_attention',
    "DTensor": "{}.full_tensor()",
    "NestedTensor": _PADDED,
    "MaskedTensor": "{}.get_data(), with lowtri.table or lowtri.keys for its mask",
    "MaskedArray": "{}.data, with lowtri.table or lowtri.keys for its mask",
}


def is_tensor(x: Any) -> bool:
    """Whether x is a torch tensor; torch is not imported."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.Tensor)


def is_traced(value: Any) -> bool:
    """Whether this is a tensor of a program that torch.compile or torch.export is tracing: it has a shape and no numbers."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.compiler.is_compiling() and isinstance(value, torch.Tensor)


def in_program(value: Any) -> Any:
    """A list or NumPy's array as a tensor of the program that torch's compiler traces; unchanged elsewhere.

    The compiler cannot read the numbers of NumPy's arrays. Those of a tensor come when the program runs, and are checked then.
    """
    if tracer() in COMPILER and (isinstance(value, np.ndarray) or _holds_numbers(value)):
        return tensor_of(value)
    return value


def _holds_numbers(value: Any) -> bool:
    """Whether this is a list of numbers, or of such lists, all of one length; what else is wrong with it is said elsewhere."""
    if not isinstance(value, (list, tuple)):
        return False
    if value and isinstance(value[0], (list, tuple)):
        return all([_holds_numbers(row) and len(row) == len(value[0]) for row in value])
    return all([isinstance(x, (int, float)) for x in value])


def is_fake(x: Any) -> bool:
    """Whether x is one of torch's fake tensors: it has a shape and no numbers."""
    if not is_tensor(x):
        return False
    from lowtri.compat import torch_private

    return torch_private.is_fake(x)


def why_not_plain(name: str, x: Any) -> str | None:
    """Why the memory of an array or a tensor cannot be read, with the fix; None if it can, or if x is neither."""
    kind = type(x)
    if kind is np.ndarray or kind is np.memmap:
        return None
    if is_tensor(x):
        torch = sys.modules["torch"]
        if kind not in (torch.Tensor, torch.nn.Parameter) and not is_fake(x):
            fix = "{}.as_subclass(torch.Tensor)"
            if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
                fix = "a plain torch.Tensor with the values of {}"
            fix = _FIXES.get(kind.__name__, fix).format(name)
            return f"{name} is a {kind.__name__}, but subclasses of torch.Tensor are not taken. Fix: {fix}."
        if x.is_nested or x.layout is not torch.strided:
            layout, fix = ("nested", _PADDED.format(name)) if x.is_nested else (str(x.layout), f"{name}.to_dense()")
            return f"{name} is a {layout} tensor, but dense ones are taken. Fix: {fix}."
    elif isinstance(x, np.ndarray):
        fix = _FIXES.get(kind.__name__, "np.asarray({})").format(name)
        return f"{name} is a {kind.__name__}, but subclasses of NumPy's array are not taken. Fix: {fix}."
    return None


def in_numpy(name: str, value: Any) -> NDArray[Any] | str:
    """The numbers of a list, an array or a tensor on any device, or the reason why they cannot be read."""
    if is_tensor(value) or isinstance(value, np.ma.MaskedArray):
        reason = why_not_plain(name, value)
        if reason is not None:
            return reason
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
        return f"{name} is not an array"


def positions_in_numpy(name: str, value: Any, shapes: str) -> NDArray[np.int64]:
    """Positions as int64, in their own shape; all below 0 become -1, which means no token.

    Raises:
        CallError: unless they are whole numbers below POSITION_MAX; the message says what was expected, ``shapes``.
    """
    if is_traced(value):  # its numbers come when the program runs
        return value.detach().cpu().numpy()
    array = in_numpy(name, value)
    if isinstance(array, str) or (array.size and array.dtype.kind not in "iu"):
        given = array if isinstance(array, str) else f"{name} is {array.dtype} {array.shape}"
        raise CallError(
            f"{given}, but it holds whole numbers, {shapes}: the position of each in the sequence, -1 where there is no token."
        )
    if not array.size:
        return np.zeros(array.shape, np.int64)
    if int(array.max()) >= POSITION_MAX:  # of the array before the cast, in which large uint64 turn negative
        raise CallError(f"{name} reaches {array.max()}, but positions lie below 2**62.")
    array = array.astype(np.int64, copy=False)
    return array if array.min() >= -1 else np.maximum(array, -1)


class FrozenArray:
    """A read-only copy of an array, compared and hashed by content; the hash is computed once.

    A tensor of a program that is being traced is kept as it is, and only its shape is used; where the mask leaves the program, after a
    graph break, it becomes an array when it is read. ``memory`` is the same array, writable, for functions that do not accept
    read-only arrays.
    """

    def __init__(self, array: NDArray[Any]) -> None:
        if is_traced(array):
            self._array = self._memory = array
        else:
            self._copy(array)

    def _copy(self, array: NDArray[Any]) -> None:
        try:
            self._memory = np.array(array, order="C")
        except MemoryError:
            raise MaskError(
                f"mask: an array of {array.shape} {array.dtype} does not fit into memory, and a mask copies its array."
            ) from None
        self._array = self._memory.view()
        self._array.setflags(write=False)

    def _copy_tensor(self) -> None:
        """Copy the tensor that is kept, unless the caller is traced, too."""
        tensor: Any = self._array
        if is_tensor(tensor) and not tracer() and not is_fake(tensor):
            array = tensor.numpy(force=True)
            self._copy(array.astype(np.int64) if array.dtype.kind in "iu" else array)

    @property
    def array(self) -> NDArray[Any]:
        if type(self._array) is not np.ndarray:
            self._copy_tensor()
        return self._array

    @property
    def memory(self) -> NDArray[Any]:
        if type(self._memory) is not np.ndarray:
            self._copy_tensor()
        return self._memory

    @cached_property
    def digest(self) -> str:
        kind = f"{self.array.dtype.str}{self.array.shape}".encode()
        content = self.array
        if content.dtype == bool:  # packing takes less time than hashing
            content = np.packbits(content)
        return hashlib.sha256(kind + content.tobytes()).hexdigest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FrozenArray) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __reduce__(self) -> tuple[type[FrozenArray], tuple[NDArray[Any]]]:
        return FrozenArray, (self.array,)  # unpickling freezes the array again

    def __repr__(self) -> str:
        return f"<{'x'.join(map(str, self.array.shape))} {self.array.dtype} {self.digest[:8]}>"


def integer_array(mask: str, name: str, value: Any, shapes: Mapping[int, str]) -> NDArray[np.int64]:
    """The integers of a user's list, array or tensor, of one of these shapes.

    Raises:
        MaskError: names ``mask``, the function, and ``name``, its argument.
    """
    array = _checked(mask, name, value, shapes, "integers")
    if is_traced(value):
        return array
    integers = _in_memory(mask, name, array, lambda: array.astype(np.int64))
    if int(array.max()) > POSITION_MAX:  # of the array before the cast, in which large uint64 turn negative
        raise MaskError(f"{mask}: {name} reaches {array.max()}, but at most 2**62 is taken.")
    return integers


def bool_array(
    mask: str, name: str, value: Any, shapes: Mapping[int, str], *, inverted: bool = False
) -> NDArray[np.bool_]:
    """A user's argument of bools as an array, or its negation. Numbers are rejected, because 1 may mean either visible or hidden."""
    array = _checked(mask, name, value, shapes, "bools")
    if not inverted:
        return array
    return ~array if is_traced(value) else _in_memory(mask, name, array, lambda: ~array)


def _checked(mask: str, name: str, value: Any, shapes: Mapping[int, str], content: str) -> Any:
    """The array of an argument, of these shapes and this content; a tensor of a traced program as it is, since it has no numbers."""
    expected = f"but it takes {content} of shape {' or '.join(shapes.values())}."
    if is_traced(value):
        if name not in _TRACED_ARGUMENTS or value.ndim not in shapes:
            raise MaskError(
                f"{mask}: {name} belongs to a program that is being traced, so its numbers cannot be read. "
                "Fix: documents, keys, table and tree's parents may; or make the mask outside."
            )
        # Integers are checked when the program runs; by then `hidden` has inverted its numbers, and is a table.
        if content == "bools" and value.dtype is not sys.modules["torch"].bool:
            raise MaskError(f"{mask}: {name} is {value.dtype}, {expected}{_fix_for_bools(content)}")
        return value
    if tracer() == "export" and isinstance(value, (list, tuple)):
        for number in value:
            refuse_symbol(mask, name, number)
    array = in_numpy(name, value)
    if isinstance(array, str):
        raise MaskError(f"{mask}: {array}, {expected}")
    if array.size == 0:
        raise MaskError(f"{mask}: {name} is empty.")
    if array.dtype.kind not in ("b" if content == "bools" else "iu") or array.ndim not in shapes:
        if array.dtype.kind in "iuf":
            expected += _fix_for_bools(content)
        raise MaskError(f"{mask}: {name} is {_described(array)}, {expected}")
    return array


def _fix_for_bools(content: str) -> str:
    return " Fix: x != 0, after checking whether it marks visible or hidden pairs." if content == "bools" else ""


def _in_memory(mask: str, name: str, array: NDArray[Any], convert: Callable[[], NDArray[Any]]) -> NDArray[Any]:
    try:
        return convert()
    except MemoryError:
        raise MaskError(f"{mask}: {name} is {_described(array)}, which does not fit into memory.") from None


def _described(array: NDArray[Any]) -> str:
    return "not an array" if array.dtype == object else f"{array.dtype} {array.shape}"

"""What a model is given: sequences that a probe may change, and settings that it leaves alone.

`Inputs` is the probes' view: every sequence as a NumPy array with the batch first and the positions second, (B, N, ...).
`Form` remembers how the caller had it (framework, dtype, device, axes, keyword names) and turns an `Inputs` back into a call.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from lowtri.errors import CallError

__all__ = ["Form", "Inputs", "read_example"]

Array = npt.NDArray[Any]

_SEQUENCE_NAMES = ("input_ids", "inputs_embeds", "ids", "tokens", "x", "input", "inputs", "query")


@dataclass(frozen=True)
class Inputs:
    """One call's inputs: `sequences`, each (B, N, ...), and `settings`, arrays that follow the positions but are not changed."""

    sequences: tuple[Array, ...]
    settings: dict[Hashable, Array] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def batch(self) -> int:
        return int(self.sequences[0].shape[0])

    @property
    def n(self) -> int:
        return int(self.sequences[0].shape[1])

    @property
    def discrete(self) -> bool:
        """Whether the sequences hold token ids rather than vectors."""
        return not np.issubdtype(self.sequences[0].dtype, np.inexact)

    def change(self, where: npt.NDArray[np.bool_], other: Inputs) -> Inputs:
        """Take `other`'s values where `where`, (N,) or (B, N), is true."""
        where = np.broadcast_to(where, (self.batch, self.n))
        mixed = tuple(
            np.where(where.reshape(where.shape + (1,) * (a.ndim - 2)), b, a)
            for a, b in zip(self.sequences, other.sequences, strict=True)
        )
        return replace(self, sequences=mixed)

    def span(self, start: int, stop: int) -> Inputs:
        """The positions `start .. stop - 1` alone; settings are cut along every axis that has the length of the input."""
        cut = {}
        for key, value in self.settings.items():
            axes = [axis for axis, size in enumerate(value.shape) if size == self.n]
            if self.batch == self.n and value.ndim > 1 and 0 in axes:
                axes.remove(0)  # more likely the batch
            for axis in axes:
                value = np.take(value, np.arange(start, stop), axis=axis)
            cut[key] = value
        return replace(self, sequences=tuple(a[:, start:stop] for a in self.sequences), settings=cut)

    def rows(self, index: Sequence[int]) -> Inputs:
        """The given rows of the batch, in the given order."""
        index = list(index)
        settings = {
            key: value[index] if value.ndim > 1 and value.shape[0] == self.batch and self.batch > 1 else value
            for key, value in self.settings.items()
        }
        return replace(self, sequences=tuple(a[index] for a in self.sequences), settings=settings)


@dataclass(frozen=True)
class Form:
    """How the caller's model is called: what `Inputs` has to be turned back into."""

    keys: tuple[Hashable, ...]  # one for each sequence: a position (int) or a keyword (str)
    kind: str  # "single", "args" or "kwargs"
    constants: dict[Hashable, Any]
    batch_axis: int | None
    position_axes: tuple[int, ...]
    torch: bool
    dtypes: tuple[Any, ...]
    device: Any = None
    double: bool = False

    def arguments(self, inputs: Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The positional and keyword arguments of the call."""
        given: dict[Hashable, Any] = dict(self.constants)
        for key, value in inputs.settings.items():
            given[key] = self._setting(value)
        for number, (key, value) in enumerate(zip(self.keys, inputs.sequences, strict=True)):
            given[key] = self.give(value, number)
        options = {name: self._option(value) for name, value in inputs.options.items()}
        if self.kind == "kwargs":
            return (), {**{str(key): value for key, value in given.items()}, **options}
        return tuple(given[key] for key in sorted(given, key=lambda key: int(str(key)))), options

    def give(self, value: Array, number: int = 0) -> Any:
        """One sequence, (B, N, ...), in the caller's own layout and framework."""
        axis = self.position_axes[number]
        if self.batch_axis is None:
            value = np.moveaxis(value[0], 0, axis)
        else:
            value = np.moveaxis(value, (0, 1), (self.batch_axis, axis))
        if not self.torch:
            return np.ascontiguousarray(value.astype(self.dtypes[number], copy=True))
        import torch

        dtype = self.dtypes[number]
        if self.double and dtype.is_floating_point:
            dtype = torch.float64
        return torch.from_numpy(np.ascontiguousarray(value)).to(device=self.device, dtype=dtype, copy=True)

    def _setting(self, value: Array) -> Any:
        if not self.torch:
            return value.copy()
        import torch

        tensor = torch.from_numpy(np.ascontiguousarray(value)).to(self.device)
        return tensor.double() if self.double and tensor.is_floating_point() else tensor.clone()

    def _option(self, value: Any) -> Any:
        return self._setting(value) if isinstance(value, np.ndarray) else value


def read_example(
    example: Any,
    *,
    model: Any = None,
    input: str | int | Sequence[str | int] | None = None,
    position_axis: int | None = None,
    batch_axis: int | str | None = "auto",
) -> tuple[Inputs, Form]:
    """Read the caller's example: token ids or vectors, alone, as a tuple of arguments or as a dict of keywords.

    Args:
        example: ids (N,) or (B, N); vectors (N, D), (B, N, D) or (B, H, N, D); or a tuple or dict of them and of constants.
        model: only asked for its device.
        input: which entries of a tuple or dict are sequences; the rest is passed on unchanged.
        position_axis: the axis of the positions; by default the last of ids and the last but one of vectors.
        batch_axis: the axis of the batch; by default the first that is left, when there is one to spare.
    """
    kind, entries = _entries(example)
    keys = _sequence_keys(kind, entries, input, position_axis)
    torch_in = any(_is_tensor(value) for value in entries.values()) or _is_module(model)
    arrays, dtypes, axes = [], [], []
    for key in keys:
        array = _as_array(entries[key], f"example[{key!r}]" if kind != "single" else "example")
        axis = _position_axis(array, position_axis)
        chosen = _batch_axis(array, axis, batch_axis)
        axes.append(axis)
        dtypes.append(_dtype(entries[key], array, torch_in, model))
        if chosen is None:
            arrays.append(np.moveaxis(array, axis, 0)[None])
        else:
            arrays.append(np.moveaxis(array, (chosen, axis), (0, 1)))
    first = _as_array(entries[keys[0]], "example")
    n = arrays[0].shape[1]
    if n < 2:
        raise CallError(
            f"audit: example has {n} position(s), shape {tuple(first.shape)}; at least 2 are needed to see one peek.\n"
            "Fix: give a longer example, or say where its positions are with position_axis=."
        )
    settings, constants = {}, {}
    for key, value in entries.items():
        if key in keys:
            continue
        table = _maybe_array(value)
        if table is not None and n in table.shape:
            settings[key] = table
        else:
            constants[key] = value
    form = Form(
        keys=tuple(keys),
        kind=kind,
        constants=constants,
        batch_axis=_batch_axis(first, axes[0], batch_axis),
        position_axes=tuple(axes),
        torch=torch_in,
        dtypes=tuple(dtypes),
        device=_device(model, entries),
    )
    return Inputs(tuple(arrays), settings), form


def _entries(example: Any) -> tuple[str, dict[Hashable, Any]]:
    if isinstance(example, Mapping):
        return "kwargs", dict(example)
    if isinstance(example, tuple):
        return "args", dict(enumerate(example))
    return "single", {0: example}


def _sequence_keys(kind: str, entries: dict[Hashable, Any], input: Any, position_axis: int | None) -> list[Hashable]:
    if input is not None:
        named = list(input) if isinstance(input, (list, tuple)) else [input]
        missing = [name for name in named if name not in entries]
        if missing:
            raise CallError(
                f"audit: input={missing[0]!r} is not in the example, which has {sorted(map(str, entries))}."
            )
        return named
    if kind == "single":
        return [0]
    found: Hashable | None = 0 if kind == "args" else next((name for name in _SEQUENCE_NAMES if name in entries), None)
    if found is None:
        found = next((key for key, value in entries.items() if _maybe_array(value) is not None), None)
    if found is None or found not in entries:
        raise CallError(
            f"audit: example has no array among {sorted(map(str, entries))}.\n"
            "Fix: name the one that holds the sequence with input=."
        )
    first = _as_array(entries[found], f"example[{found!r}]")
    keys = [found]
    for key, value in entries.items():
        other = _maybe_array(value)
        if key == found or other is None or not np.issubdtype(first.dtype, np.inexact):
            continue
        # Q, K and V move together; a table of pairs or an additive mask is a setting.
        alike = np.issubdtype(other.dtype, np.inexact) and other.ndim == first.ndim
        axis = _position_axis(first, position_axis)
        if alike and other.shape[axis] == first.shape[axis] and not _looks_like_a_mask(other):
            keys.append(key)
    return keys


def _looks_like_a_mask(array: Array) -> bool:
    values = np.unique(array)
    if len(values) > 2 or values[-1] > 1:
        return False
    return bool(values[0] < -1e3 or set(values.tolist()) <= {0.0, 1.0})


def _position_axis(array: Array, asked: int | None) -> int:
    if asked is not None:
        if not -array.ndim <= asked < array.ndim:
            raise CallError(f"audit: position_axis={asked} does not exist in an example of shape {tuple(array.shape)}.")
        return asked % array.ndim
    if np.issubdtype(array.dtype, np.inexact) and array.ndim >= 2:
        return array.ndim - 2
    return array.ndim - 1


def _batch_axis(array: Array, axis: int, asked: int | str | None) -> int | None:
    if asked is None:
        return None
    if asked != "auto":
        return int(asked) % array.ndim
    spare = 2 if np.issubdtype(array.dtype, np.inexact) and array.ndim >= 2 else 1  # (N, D) and (N,) have no batch
    return None if array.ndim <= spare else next(i for i in range(array.ndim) if i != axis)


def _as_array(value: Any, name: str) -> Array:
    array = _maybe_array(value)
    if array is None or array.dtype == object or array.ndim == 0:
        raise CallError(
            f"audit: {name} is a {type(value).__name__}, not an array of token ids or of vectors.\n"
            "Fix: give ids (N,) or (B, N), or vectors (N, D) or (B, N, D); input= names the entry of a dict."
        )
    return array


def _maybe_array(value: Any) -> Array | None:
    if _is_tensor(value):
        tensor = value.detach().cpu()
        if tensor.is_floating_point() and tensor.element_size() < 4:
            tensor = tensor.float()
        return np.asarray(tensor.numpy())
    if isinstance(value, (np.ndarray, list)) or hasattr(value, "__array__"):
        array = np.asarray(value)
        return array if array.ndim and array.dtype != object else None
    return None


def _is_tensor(value: Any) -> bool:
    return type(value).__module__.split(".")[0] == "torch" and hasattr(value, "detach")


def _is_module(model: Any) -> bool:
    return hasattr(model, "named_modules") and hasattr(model, "parameters")


def _dtype(value: Any, array: Array, torch_in: bool, model: Any) -> Any:
    if _is_tensor(value):
        return value.dtype
    if not torch_in:
        return array.dtype
    import torch

    if not np.issubdtype(array.dtype, np.floating):
        return torch.from_numpy(np.zeros(1, array.dtype)).dtype
    floats = [p.dtype for p in model.parameters() if p.is_floating_point()] if _is_module(model) else []
    return floats[0] if floats else torch.get_default_dtype()


def _device(model: Any, entries: dict[Hashable, Any]) -> Any:
    if _is_module(model):
        for parameter in model.parameters():
            return parameter.device
    return next((value.device for value in entries.values() if _is_tensor(value)), None)

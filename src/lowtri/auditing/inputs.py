"""The inputs of a model: sequences that a trial may change, and settings that it leaves unchanged.

`read_example` reads the caller's example. `Inputs` is what trials see: every sequence as a NumPy array with the batch first and the
positions second, (B, N, ...). `CallSignature` turns `Inputs` back into a call (framework, dtype, device, axes, keywords).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from lowtri.errors import CallError

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Inputs:
    """One call's inputs."""

    sequences: tuple[Array, ...]  # each (B, N, ...): what probes change
    settings: dict[Hashable, Array] = field(default_factory=dict)  # arrays that follow the positions
    options: dict[str, Any] = field(default_factory=dict)  # keywords that a probe adds
    per_row: dict[Hashable, Any] = field(default_factory=dict)  # (B, ...), such as the source of a translation

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
        """The positions `start .. stop - 1` alone."""
        return self.at(np.arange(start, stop))

    def at(self, positions: Array, keys: Array | None = None, whole: Sequence[Any] = ()) -> Inputs:
        """These positions; settings are cut along every axis that has the length of the input.

        With `keys`, the positions are appended to others: a table of pairs has these keys, and so have the settings and options
        named `whole`.
        """

        def cut(key: Any, value: Any) -> Any:
            if not isinstance(value, np.ndarray):
                return value
            axes = [axis for axis, size in enumerate(value.shape) if size == self.n]
            if self.batch == self.n and value.ndim > 1 and 0 in axes:
                axes.remove(0)  # more likely the batch
            for axis in axes:
                is_keys = key in whole or (len(axes) > 1 and axis == axes[-1])
                value = np.take(value, keys if is_keys and keys is not None else positions, axis=axis)
            return value

        settings = {key: cut(key, value) for key, value in self.settings.items()}
        options = self.options if keys is None else {key: cut(key, value) for key, value in self.options.items()}
        sequences = tuple(array[:, positions] for array in self.sequences)
        return replace(self, sequences=sequences, settings=settings, options=options)

    def rows(self, index: Sequence[int]) -> Inputs:
        """The given rows of the batch, in the given order."""
        index = list(index)
        settings = {
            key: value[index] if value.ndim > 1 and value.shape[0] == self.batch and self.batch > 1 else value
            for key, value in self.settings.items()
        }
        per_row = {key: value[index] for key, value in self.per_row.items()}
        return replace(self, sequences=tuple(a[index] for a in self.sequences), settings=settings, per_row=per_row)


@dataclass(frozen=True)
class CallSignature:
    """How the caller's model is called: what `Inputs` has to be turned back into."""

    keys: tuple[Hashable, ...]  # one for each sequence: a position (int) or a keyword (str)
    by_keyword: bool
    constants: dict[Hashable, Any]
    batch_axis: int | None
    position_axes: tuple[int, ...]
    torch: bool
    dtypes: tuple[Any, ...]
    device: Any = None
    float64: bool = False
    transform: Callable[[Any], Any] | None = None  # what each torch sequence passes on its way in

    @property
    def prefix(self) -> str:
        """What stands before the names of a sequence's masks and positions, where a model has two sequences."""
        return "decoder_" if str(self.keys[0]).startswith("decoder_") else ""

    def arguments(self, inputs: Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The positional and keyword arguments of the call."""
        values = {**self.constants, **{key: self._widened(value) for key, value in inputs.per_row.items()}}
        values |= {key: self._setting(value) for key, value in inputs.settings.items()}
        for number, (key, value) in enumerate(zip(self.keys, inputs.sequences, strict=True)):
            values[key] = self.sequence(value, number)
        options = {
            name: self._setting(value) if isinstance(value, np.ndarray) else value
            for name, value in inputs.options.items()
        }
        if self.by_keyword:
            return (), {**{str(key): value for key, value in values.items()}, **options}
        return tuple(values[key] for key in sorted(values, key=lambda key: int(str(key)))), options

    def sequence(self, value: Array, number: int = 0) -> Any:
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
        if self.float64 and dtype.is_floating_point:
            dtype = torch.float64
        tensor = torch.from_numpy(np.ascontiguousarray(value)).to(device=self.device, dtype=dtype, copy=True)
        return tensor if self.transform is None else self.transform(tensor)

    def _setting(self, value: Array) -> Any:
        if not self.torch:
            return value.copy()
        import torch

        return self._widened(torch.from_numpy(np.array(value, order="C")).to(self.device))

    def _widened(self, value: Any) -> Any:
        """A float tensor as float64 where the copy computes; anything else as it is."""
        wide = self.float64 and hasattr(value, "is_floating_point") and value.is_floating_point()
        return value.double() if wide else value


def positions_first(array: Any, batch_axis: int | None, position_axis: int) -> Any:
    """(B, N, ...), from an array or a tensor in the caller's layout."""
    move = type(array).movedim if hasattr(array, "movedim") else np.moveaxis
    if batch_axis is None:
        return move(array, position_axis, 0)[None]
    return move(array, (batch_axis, position_axis), (0, 1))


def first_line(error: Exception, *, typed: bool = True) -> str:
    """An error in one line: its message, with its type in front where `0` or `x` alone would mean little."""
    kind, message = type(error).__name__, (str(error).strip().splitlines() or [""])[0][:120]
    return f"{kind}: {message}" if typed and message else message or kind


_SEQUENCE_NAMES = ("input_ids", "inputs_embeds", "ids", "tokens", "x", "input", "inputs", "query")


def read_example(
    example: Any,
    *,
    model: Any = None,
    input: str | int | Sequence[str | int] | None = None,
    position_axis: int | None = None,
    batch_axis: int | str | None = "auto",
) -> tuple[Inputs, CallSignature]:
    """Read token ids or vectors, given alone, as a tuple of arguments or as a dict of keywords.

    Args:
        example: ids (N,) or (B, N); vectors (N, D), (B, N, D) or (B, H, N, D); or a tuple or dict of them and of constants.
        model: read for its device and dtype.
        input: which entries of a tuple or dict are sequences; the others are passed on unchanged.
        position_axis: the axis of the positions; by default the last of ids and the last but one of vectors.
        batch_axis: the axis of the batch; by default the first other axis, where there is one to spare.
    """
    by_keyword, several = isinstance(example, Mapping), isinstance(example, (Mapping, tuple))
    entries: dict[Hashable, Any]
    entries = dict(example) if by_keyword else dict(enumerate(example if several else (example,)))
    keys = _sequence_keys(entries, by_keyword, input, position_axis) if several or input is not None else [0]
    torch_in = any(_is_tensor(value) for value in entries.values()) or _is_module(model)
    sequences = [_as_array(entries[key], f"example[{key!r}]" if several else "example") for key in keys]
    position_axes = [_position_axis(array, position_axis) for array in sequences]
    batch_axes = [_batch_axis(*pair, batch_axis) for pair in zip(sequences, position_axes, strict=True)]
    rows = [positions_first(*layout) for layout in zip(sequences, batch_axes, position_axes, strict=True)]
    batch, n = rows[0].shape[:2]
    shape = tuple(sequences[0].shape)
    if batch == 0:
        raise CallError(f"audit: example has no rows, shape {shape}.\nFix: give at least one row.")
    if n < 2:
        raise CallError(
            f"audit: example has {n} position(s), shape {shape}; a leak needs at least 2.\n"
            "Fix: give a longer example, or say where its positions are with position_axis=."
        )
    settings, constants, per_row = {}, {}, {}
    for key, value in entries.items():
        table = _maybe_array(value)
        if key in keys:
            continue
        if table is not None and n in table.shape and not _of_the_source(keys[0], key):
            settings[key] = table
        elif len(getattr(value, "shape", ())) > 1 and len(value) == batch:
            per_row[key] = value
        else:
            constants[key] = value
    signature = CallSignature(
        keys=tuple(keys),
        by_keyword=by_keyword,
        constants=constants,
        batch_axis=batch_axes[0],
        position_axes=tuple(position_axes),
        torch=torch_in,
        dtypes=tuple(_dtype(entries[key], array, torch_in, model) for key, array in zip(keys, sequences, strict=True)),
        device=_device(model, entries),
    )
    return Inputs(tuple(rows), settings, per_row=per_row), signature


def _sequence_keys(
    entries: dict[Hashable, Any], by_keyword: bool, input: Any, position_axis: int | None
) -> list[Hashable]:
    if input is not None:
        keys = list(input) if isinstance(input, (list, tuple)) else [input]
        missing = [name for name in keys if name not in entries]
        if missing:
            raise CallError(
                f"audit: input={missing[0]!r} is not in the example, which has {sorted(map(str, entries))}."
            )
        return keys
    candidates: list[Hashable] = [0] if entries else []
    if by_keyword:
        candidates = [name for name in _SEQUENCE_NAMES if name in entries]
        candidates += [key for key, value in entries.items() if _maybe_array(value) is not None]
    if not candidates:
        raise CallError(
            f"audit: example has no array among {sorted(map(str, entries))}.\n"
            "Fix: add the sequence, ids (B, N) or vectors (B, N, D); input= names its entry."
        )
    keys = candidates[:1]
    first = _as_array(entries[keys[0]], f"example[{keys[0]!r}]")
    if np.issubdtype(first.dtype, np.inexact):
        # Q, K and V move together; a table of pairs or an additive mask is a setting.
        axis = _position_axis(first, position_axis)
        for key, value in entries.items():
            other = _maybe_array(value)
            if key == keys[0] or other is None:
                continue
            alike = np.issubdtype(other.dtype, np.inexact) and other.ndim == first.ndim
            if alike and other.shape[axis] == first.shape[axis] and not _looks_like_a_mask(other):
                keys.append(key)
    return keys


def _of_the_source(sequence: Hashable, key: Hashable) -> bool:
    """Whether the sequence is a decoder's and this entry its encoder's, whose length is independent."""
    return str(sequence).startswith("decoder_") and not str(key).startswith("decoder_")


def _looks_like_a_mask(array: Array) -> bool:
    values = np.unique(array)
    if len(values) > 2 or values[-1] > 1:
        return False
    return bool(values[0] < -1e3 or set(values.tolist()) <= {0.0, 1.0})


def _is_vectors(array: Array) -> bool:
    return bool(np.issubdtype(array.dtype, np.inexact) and array.ndim >= 2)


def _position_axis(array: Array, requested: int | None) -> int:
    if requested is None:
        return array.ndim - (2 if _is_vectors(array) else 1)
    if not -array.ndim <= requested < array.ndim:
        raise CallError(f"audit: position_axis={requested} does not exist in an example of shape {tuple(array.shape)}.")
    return requested % array.ndim


def _batch_axis(array: Array, axis: int, requested: int | str | None) -> int | None:
    if requested is None:
        return None
    if requested != "auto":
        chosen = operator.index(requested)  # type: ignore[arg-type]
        if not -array.ndim <= chosen < array.ndim or chosen % array.ndim == axis:
            shape = tuple(array.shape)
            raise CallError(
                f"audit: batch_axis={requested} is no axis of an example of shape {shape} besides the positions' axis {axis}."
            )
        return chosen % array.ndim
    without_batch = 2 if _is_vectors(array) else 1  # (N, D) and (N,)
    return None if array.ndim <= without_batch else next(i for i in range(array.ndim) if i != axis)


def _as_array(value: Any, name: str) -> Array:
    if getattr(value, "is_meta", False):
        raise CallError(f"audit: {name} is on the device meta, which stores no values.\nFix: give it with its values.")
    array = _maybe_array(value)
    if array is None:
        raise CallError(
            f"audit: {name} is a {type(value).__name__}, not an array of token ids or of vectors.\n"
            "Fix: give ids (N,) or (B, N), or vectors (N, D) or (B, N, D); input= names the entry of a dict."
        )
    return array


def _maybe_array(value: Any) -> Array | None:
    if _is_tensor(value):
        if value.is_meta:
            return None
        tensor = value.detach().cpu()
        value = (tensor.float() if tensor.is_floating_point() and tensor.element_size() < 4 else tensor).numpy()
    if isinstance(value, (np.ndarray, list)) or hasattr(value, "__array__"):
        try:
            array = np.asarray(value)
        except ValueError:  # rows of unequal lengths
            return None
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
    tensors = [*(model.parameters() if _is_module(model) else ()), *filter(_is_tensor, entries.values())]
    return tensors[0].device if tensors else None

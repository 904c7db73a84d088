"""The caller's example: what probes see of it, and how it turns back into a call.

`read_example` reads it. `Inputs` is what probes see: every sequence as a NumPy array with the batch first and the positions
second, settings that follow the positions, and arrays that belong to the rows. `CallSignature` turns `Inputs` back into a call
(framework, dtype, device, axes).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from lowtri.auditing.adapter import Model
from lowtri.errors import CallError

Array = npt.NDArray[Any]
Bools = npt.NDArray[np.bool_]
Rows = npt.NDArray[Any]


@dataclass(frozen=True)
class Inputs:
    """One call's inputs."""

    sequences: tuple[Array, ...]  # each (B, N, ...): what probes change
    settings: dict[Hashable, Any] = field(default_factory=dict)  # arrays that follow the positions, and added keywords
    per_row: dict[Hashable, Any] = field(default_factory=dict)  # (B, ...): the source of a translation, lengths, names

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

    def having(self, settings: Mapping[Any, Any]) -> Inputs:
        """With these settings in addition to, or in place of, its own; what belongs to the rows stays so."""
        per_row = {key: value for key, value in settings.items() if key in self.per_row}
        others = {key: value for key, value in settings.items() if key not in per_row}
        return replace(self, settings={**self.settings, **others}, per_row={**self.per_row, **per_row})

    def change(self, where: Bools, other: Inputs) -> Inputs:
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

        With `keys`, the positions are appended to others: a table of pairs has these keys, and so have the settings named `whole`.
        """

        def cut(key: Any, value: Any) -> Any:
            axes = [axis for axis, size in enumerate(value.shape) if size == self.n] if _is_array(value) else []
            if self.batch == self.n and 0 in axes and value.ndim > 1:
                axes.remove(0)  # more likely the batch
            for axis in axes:
                is_keys = key in whole or (len(axes) > 1 and axis == axes[-1])
                value = np.take(value, positions if keys is None or not is_keys else keys, axis=axis)
            return value

        settings = {key: cut(key, value) for key, value in self.settings.items()}
        sequences = tuple(array[:, positions] for array in self.sequences)
        part = replace(self, sequences=sequences, settings=settings)
        if keys is not None:
            return part
        lengths = self.with_lengths(lambda lengths: (positions[:, None] < lengths).sum(axis=0))
        return replace(part, per_row=lengths.per_row)

    def with_lengths(self, new: Callable[[Array], Array]) -> Inputs:
        """With other lengths of the rows, where an array (B,) is named so and can be one."""
        per_row = dict(self.per_row)
        for key, value in self.per_row.items():
            lengths = maybe_array(value)
            is_count = lengths is not None and lengths.ndim == 1 and lengths.dtype.kind in "iu"
            if lengths is not None and is_count and "len" in str(key) and 0 <= lengths.min() <= lengths.max() <= self.n:
                per_row[key] = like(value, new(lengths))
        return replace(self, per_row=per_row)

    def rows(self, index: Sequence[int]) -> Inputs:
        """The given rows of the batch, in the given order."""
        index = list(index)

        def of(value: Any) -> Any:
            return [value[i] for i in index] if isinstance(value, list) else value[index]

        with_rows = {k for k, v in self.settings.items() if _is_array(v) and v.ndim > 1 and len(v) == self.batch}
        settings = {key: of(value) if key in with_rows else value for key, value in self.settings.items()}
        per_row = {key: of(value) for key, value in self.per_row.items()}
        return replace(self, sequences=tuple(a[index] for a in self.sequences), settings=settings, per_row=per_row)


@dataclass(frozen=True)
class CallSignature:
    """How the caller's model is called: what `Inputs` has to be turned back into."""

    keys: tuple[Hashable, ...]  # one for each sequence: a position (int) or a keyword (str)
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
        for key, value in inputs.settings.items():
            values[key] = self._passed(value) if _is_array(value) else value
        for number, (key, value) in enumerate(zip(self.keys, inputs.sequences, strict=True)):
            values[key] = self.sequence(value, number)
        positional = sorted(key for key in values if isinstance(key, int))
        keywords = {str(key): value for key, value in values.items() if not isinstance(key, int)}
        return tuple(values[key] for key in positional), keywords

    def sequence(self, value: Array, number: int = 0) -> Any:
        """One sequence, (B, N, ...), in the caller's own layout and framework."""
        axis = self.position_axes[number]
        if self.batch_axis is None:
            value = np.moveaxis(value[0], 0, axis)
        else:
            value = np.moveaxis(value, (0, 1), (self.batch_axis, axis))
        passed = self._passed(value, self.dtypes[number])
        return self.transform(passed) if self.torch and self.transform is not None else passed

    def _passed(self, value: Array, dtype: Any = None) -> Any:
        """A copy of an array in the caller's framework."""
        if not self.torch:
            return np.array(value, dtype, order="C")
        import torch

        # In memory that torch has allocated: sums of arrays with other alignments are rounded in other ways.
        tensor = torch.tensor(np.ascontiguousarray(value))
        dtype = dtype or tensor.dtype
        if self.float64 and dtype.is_floating_point:
            dtype = torch.float64
        return tensor.to(device=self.device, dtype=dtype)

    def _widened(self, value: Any) -> Any:
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
_SOURCE_NAMES = ("src", "source", "encoder", "memory")


def read_example(example: Any, adapter: Model) -> tuple[Inputs, CallSignature]:
    """Read token ids or vectors, given alone, as a tuple of arguments or as a dict of keywords.

    Args:
        example: ids (N,) or (B, N); vectors (N, D), (B, N, D) or (B, H, N, D); or a tuple or dict of them and of constants.
        adapter: its `inputs` and `axes`; the model is read for its device and dtype.
    """
    model = adapter.call
    several = isinstance(example, (Mapping, tuple))
    parts = example if several else (example,)
    entries: dict[Hashable, Any] = dict(example) if isinstance(example, Mapping) else dict(enumerate(parts))
    keys = _sequence_keys(entries, adapter) if several or adapter.inputs is not None else [0]
    is_module = hasattr(model, "named_modules") and hasattr(model, "parameters")
    tensors = [*(model.parameters() if is_module else ()), *filter(_is_tensor, entries.values())]
    in_torch = is_module or len(tensors) > 0
    sequences = [_as_array(entries[key], f"example[{key!r}]" if several else "example") for key in keys]
    axes = [_axes(array, adapter.layout.input) for array in sequences]
    rows = [positions_first(array, *layout) for array, layout in zip(sequences, axes, strict=True)]
    batch, n = rows[0].shape[:2]
    shape = tuple(sequences[0].shape)
    if batch == 0:
        raise CallError(f"audit: example has no rows, shape {shape}.\nFix: give at least one row.")
    if n < 2:
        raise CallError(
            f"audit: example has {n} position(s), shape {shape}; a leak needs at least 2.\n"
            "Fix: give a longer example, or say where its positions are with Model(axes=)."
        )
    settings, per_row = dict[Hashable, Any](), dict[Hashable, Any]()
    constants, batch_axis = dict[Hashable, Any](), axes[0][0]
    for key in [key for key in entries if key not in keys]:
        value, array = entries[key], maybe_array(entries[key])
        # Numbers, names, or arrays, one for each row of the batch.
        in_rows = value if isinstance(value, list) else array
        if array is not None and not _is_of_source(key, keys) and _follows_positions(array, batch_axis, batch, n):
            settings[key] = array
        elif batch_axis is not None and in_rows is not None and len(in_rows) == batch:
            per_row[key] = value
        else:
            constants[key] = value
    signature = CallSignature(
        keys=tuple(keys),
        constants=constants,
        batch_axis=batch_axis,
        position_axes=tuple(axis for _, axis in axes),
        torch=in_torch,
        dtypes=tuple(_dtype(entries[k], array, in_torch, tensors) for k, array in zip(keys, sequences, strict=True)),
        device=tensors[0].device if tensors else None,
    )
    return Inputs(tuple(rows), settings, per_row), signature


def _is_of_source(key: Hashable, keys: Sequence[Hashable]) -> bool:
    """Whether an entry belongs to the other sequence of an encoder-decoder, of any length."""
    if str(keys[0]).startswith("decoder_"):
        return not str(key).startswith("decoder_")
    return str(key).startswith(_SOURCE_NAMES) and not str(keys[0]).startswith(_SOURCE_NAMES)


def _follows_positions(array: Array, batch_axis: int | None, batch: int, n: int) -> bool:
    """Whether an array has an axis of the positions; one number for each of as many rows belongs to the rows."""
    if array.ndim == 1 and batch_axis is not None and batch == n == len(array):
        return bool(array.dtype == bool or np.array_equal(array, np.arange(n)))
    return n in array.shape


def _sequence_keys(entries: dict[Hashable, Any], adapter: Model) -> list[Hashable]:
    if adapter.inputs is not None:
        keys = list(adapter.inputs) if isinstance(adapter.inputs, (list, tuple)) else [adapter.inputs]
        missing = [name for name in keys if name not in entries]
        if missing:
            raise CallError(
                f"audit: inputs={missing[0]!r} is not in the example, which has {sorted(map(str, entries))}.\n"
                "Fix: the key of the sequence, Model(inputs=)."
            )
        return keys
    arrays = (key for key, value in entries.items() if maybe_array(value) is not None)
    first = next((name for name in (0, *_SEQUENCE_NAMES) if name in entries), next(arrays, None))
    if first is None:
        raise CallError(
            f"audit: example has no array among {sorted(map(str, entries))}.\n"
            "Fix: add the sequence, ids (B, N) or vectors (B, N, D); Model(inputs=) names its entry."
        )
    sequence, keys = _as_array(entries[first], f"example[{first!r}]"), [first]
    if not np.issubdtype(sequence.dtype, np.inexact):
        return keys
    # Q, K and V move together; a table of pairs or an additive mask is a setting.
    _, axis = _axes(sequence, adapter.layout.input)
    for key, value in entries.items():
        other = maybe_array(value) if key != first else None
        if other is not None and np.issubdtype(other.dtype, np.inexact) and other.ndim == sequence.ndim:
            keys += [key] if other.shape[axis] == sequence.shape[axis] and not _looks_like_a_mask(other) else []
    return keys


def _looks_like_a_mask(array: Array) -> bool:
    values = np.unique(array)
    if len(values) > 2 or values[-1] > 1:
        return False
    return bool(values[0] < -1e3 or set(values.tolist()) <= {0.0, 1.0})


def _axes(array: Array, letters: str | None) -> tuple[int | None, int]:
    """The axes of the batch, None where there is none, and of the positions."""
    if letters is None:
        position = array.ndim - (2 if np.issubdtype(array.dtype, np.inexact) and array.ndim >= 2 else 1)
        return 0 if position else None, position
    if len(letters) != array.ndim:
        raise CallError(
            f"audit: axes={letters!r} names {len(letters)} axes, the example has the shape {tuple(array.shape)}.\n"
            "Fix: a letter for each axis, N the positions and B the batch."
        )
    return letters.index("B") if "B" in letters else None, letters.index("N")


def _as_array(value: Any, name: str) -> Array:
    if getattr(value, "is_meta", False):
        raise CallError(f"audit: {name} is on the device meta, which stores no values.\nFix: give it with its values.")
    array = maybe_array(value)
    if array is not None and array.dtype.kind in "biufc":
        return array
    what = f"a {type(value).__name__}" if array is None else f"of {array.dtype} {array.shape}"
    if _is_tensor(value):
        what = f"a tensor of the layout {value.layout}"
    raise CallError(
        f"audit: {name} is {what}, not an array of token ids or of vectors.\n"
        "Fix: give ids (N,) or (B, N), or vectors (N, D) or (B, N, D); Model(inputs=) names the entry of a dict."
    )


def maybe_array(value: Any) -> Array | None:
    """The value as a NumPy array of at least one axis; None where it is none."""
    if _is_tensor(value):
        if value.is_meta or value.is_quantized or str(value.layout) != "torch.strided" or value.is_nested:
            return None
        tensor = value.detach().cpu().resolve_conj().resolve_neg()
        value = (tensor.float() if tensor.is_floating_point() and tensor.element_size() < 4 else tensor).numpy()
    if isinstance(value, (np.ndarray, list)) or hasattr(value, "__array__"):
        with contextlib.suppress(ValueError, TypeError):  # rows of unequal lengths, say
            array = np.asarray(value)
            return array if array.ndim and array.dtype != object else None
    return None


def like(value: Any, array: Array) -> Any:
    """An array in the framework, dtype and device of the value."""
    if not _is_tensor(value):
        return array.tolist() if isinstance(value, list) else np.asarray(array, getattr(value, "dtype", None))
    import torch

    return torch.as_tensor(np.ascontiguousarray(array), dtype=value.dtype, device=value.device)


def _is_array(value: Any) -> bool:
    return isinstance(value, np.ndarray)


def _is_tensor(value: Any) -> bool:
    return type(value).__module__.split(".")[0] == "torch" and hasattr(value, "detach")


def _dtype(value: Any, array: Array, in_torch: bool, tensors: Sequence[Any]) -> Any:
    """The dtype in which a sequence is passed on: of arrays for a torch model, that of its own floats."""
    if _is_tensor(value) or not in_torch:
        return value.dtype if _is_tensor(value) else array.dtype
    import torch

    if not np.issubdtype(array.dtype, np.floating):
        return torch.from_numpy(np.zeros(1, array.dtype)).dtype
    return next((tensor.dtype for tensor in tensors if tensor.is_floating_point()), torch.get_default_dtype())

"""Read what a caller gives as an example: which arrays are sequences, where their positions and batch are, what is a setting."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from lowtri.auditing.inputs import Array, CallSignature, Inputs
from lowtri.errors import CallError

__all__ = ["read_example"]

_SEQUENCE_NAMES = ("input_ids", "inputs_embeds", "ids", "tokens", "x", "input", "inputs", "query")


def read_example(
    example: Any,
    *,
    model: Any = None,
    input: str | int | Sequence[str | int] | None = None,
    position_axis: int | None = None,
    batch_axis: int | str | None = "auto",
) -> tuple[Inputs, CallSignature]:
    """Read the caller's example: token ids or vectors, alone, as a tuple of arguments or as a dict of keywords.

    Args:
        example: ids (N,) or (B, N); vectors (N, D), (B, N, D) or (B, H, N, D); or a tuple or dict of them and of constants.
        model: read for its device and dtype.
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
    batch, n = arrays[0].shape[:2]
    if batch == 0:
        raise CallError(f"audit: example has no rows, shape {tuple(first.shape)}.\nFix: give at least one row.")
    if n < 2:
        raise CallError(
            f"audit: example has {n} position(s), shape {tuple(first.shape)}; at least 2 are needed to see one peek.\n"
            "Fix: give a longer example, or say where its positions are with position_axis=."
        )
    settings, constants, per_row = {}, {}, {}
    for key, value in entries.items():
        if key in keys:
            continue
        table = _maybe_array(value)
        follows = table is not None and n in table.shape and not _of_the_source(keys[0], key)
        if follows and table is not None:
            settings[key] = table
        elif len(getattr(value, "shape", ())) > 1 and len(value) == len(arrays[0]):
            per_row[key] = value  # one entry for each row of the batch
        else:
            constants[key] = value
    signature = CallSignature(
        keys=tuple(keys),
        kind=kind,
        constants=constants,
        batch_axis=_batch_axis(first, axes[0], batch_axis),
        position_axes=tuple(axes),
        torch=torch_in,
        dtypes=tuple(dtypes),
        device=_device(model, entries),
    )
    return Inputs(tuple(arrays), settings, per_row=per_row), signature


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


def _of_the_source(sequence: Hashable, key: Hashable) -> bool:
    """Whether the sequence is a decoder's and this entry is its encoder's, whose length is its own affair."""
    return str(sequence).startswith("decoder_") and not str(key).startswith("decoder_")


def _looks_like_a_mask(array: Array) -> bool:
    values = np.unique(array)
    if len(values) > 2 or values[-1] > 1:
        return False
    return bool(values[0] < -1e3 or set(values.tolist()) <= {0.0, 1.0})


def _position_axis(array: Array, requested: int | None) -> int:
    if requested is not None:
        if not -array.ndim <= requested < array.ndim:
            raise CallError(
                f"audit: position_axis={requested} does not exist in an example of shape {tuple(array.shape)}."
            )
        return requested % array.ndim
    if np.issubdtype(array.dtype, np.inexact) and array.ndim >= 2:
        return array.ndim - 2
    return array.ndim - 1


def _batch_axis(array: Array, axis: int, requested: int | str | None) -> int | None:
    if requested is None:
        return None
    if requested != "auto":
        return int(requested) % array.ndim
    spare = 2 if np.issubdtype(array.dtype, np.inexact) and array.ndim >= 2 else 1  # (N, D) and (N,) have no batch
    return None if array.ndim <= spare else next(i for i in range(array.ndim) if i != axis)


def _as_array(value: Any, name: str) -> Array:
    if getattr(value, "is_meta", False):
        raise CallError(f"audit: {name} is on the device meta, which holds no numbers.\nFix: give it with its values.")
    array = _maybe_array(value)
    if array is None or array.dtype == object or array.ndim == 0:
        raise CallError(
            f"audit: {name} is a {type(value).__name__}, not an array of token ids or of vectors.\n"
            "Fix: give ids (N,) or (B, N), or vectors (N, D) or (B, N, D); input= names the entry of a dict."
        )
    return array


def _maybe_array(value: Any) -> Array | None:
    if _is_tensor(value) and not value.is_meta:
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

"""Reads a caller's example: which arrays are sequences, which axes are positions and batch, and which arguments are settings."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from lowtri.auditing.inputs import Array, CallSignature, Inputs, positions_first
from lowtri.auditing.system import System
from lowtri.errors import CallError

__all__ = ["check_axes", "read_example"]

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
            "Fix: name the one that holds the sequence with input=."
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


def _holds_vectors(array: Array) -> bool:
    return bool(np.issubdtype(array.dtype, np.inexact) and array.ndim >= 2)


def _position_axis(array: Array, requested: int | None) -> int:
    if requested is None:
        return array.ndim - (2 if _holds_vectors(array) else 1)
    if not -array.ndim <= requested < array.ndim:
        raise CallError(f"audit: position_axis={requested} does not exist in an example of shape {tuple(array.shape)}.")
    return requested % array.ndim


def _batch_axis(array: Array, axis: int, requested: int | str | None) -> int | None:
    if requested is None:
        return None
    if requested != "auto":
        return int(requested) % array.ndim
    without_batch = 2 if _holds_vectors(array) else 1  # (N, D) and (N,)
    return None if array.ndim <= without_batch else next(i for i in range(array.ndim) if i != axis)


def check_axes(system: System, inputs: Inputs, seed: int) -> None:
    """Ask back where there are more rows than positions, and only the first axis behaves as positions do."""
    batch, n = inputs.batch, inputs.n
    if batch <= n or system.signature.position_axes[0] != 1:
        return
    rng = np.random.default_rng([seed, 11])
    before = system(inputs)
    across_rows = across_positions = False
    for row, position in ((0, 0), (batch - 1, n - 1), (batch // 2, 0), (0, n - 1)):
        where = np.zeros((batch, n), bool)
        where[row, position] = True
        other = replace(inputs, sequences=tuple(values[rng.permutation(batch)][:, ::-1] for values in inputs.sequences))
        moved = (before != system(inputs.change(where, other))).any(axis=-1)
        across_positions |= bool(np.delete(moved[row], position).any())
        across_rows |= bool(np.delete(moved, row, axis=0).any())
    if across_rows and not across_positions:
        shape = (batch, n, *inputs.sequences[0].shape[2:])
        raise CallError(
            f"audit: example of shape {shape} is either {batch} rows of {n} positions or {n} rows of {batch} positions,\n"
            "and changes move outputs along the first axis alone.\n"
            "Fix: position_axis=1 for the first reading, position_axis=0 for the second."
        )


def _as_array(value: Any, name: str) -> Array:
    if getattr(value, "is_meta", False):
        raise CallError(f"audit: {name} is on the device meta, which holds no numbers.\nFix: give it with its values.")
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
    tensors = [*(model.parameters() if _is_module(model) else ()), *filter(_is_tensor, entries.values())]
    return tensors[0].device if tensors else None

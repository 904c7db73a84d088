"""The inputs of a model: sequences that a probe may change, and settings that it leaves unchanged.

`Inputs` is the probes' view: every sequence as a NumPy array with the batch first and the positions second, (B, N, ...).
`CallSignature` holds how the model is called (framework, dtype, device, axes, keywords) and turns `Inputs` back into a call.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Array", "CallSignature", "Inputs", "first_line", "positions_first"]

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

    def part(self, start: int, stop: int, whole: Sequence[Any]) -> Inputs:
        """The positions `start .. stop - 1` as they are appended to those before; of the names `whole`, all up to `stop`.

        Of a table of pairs, these queries and all keys up to `stop`.
        """

        def cut(key: Any, value: Any) -> Any:
            if not isinstance(value, np.ndarray):
                return value
            axes = [axis for axis, size in enumerate(value.shape) if size == self.n]
            if self.batch == self.n and value.ndim > 1 and 0 in axes and len(axes) > 1:
                axes.remove(0)
            for axis in axes:
                all_keys = key in whole or (len(axes) > 1 and axis == axes[-1])
                value = np.take(value, np.arange(0 if all_keys else start, stop), axis=axis)
            return value

        return replace(
            self,
            sequences=tuple(a[:, start:stop] for a in self.sequences),
            settings={key: cut(key, value) for key, value in self.settings.items()},
            options={key: cut(key, value) for key, value in self.options.items()},
        )

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

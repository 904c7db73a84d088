"""The system under audit: inputs in, one row of numbers for each position out, (B, N, F).

`read_example` reads the caller's example. `Inputs` is what trials see: every sequence as a NumPy array with the batch first and the
positions second, and settings that a trial leaves unchanged. `CallSignature` turns `Inputs` back into a call (framework, dtype, device,
axes). The model is run unmodified: random states, training flags and buffers are restored after a run.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import inspect
import operator
import random
import sys
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from lowtri.errors import CallError
from lowtri.masks.tile import shown

Array = npt.NDArray[Any]
Bools = npt.NDArray[np.bool_]
Rows = npt.NDArray[Any]


@dataclass(frozen=True)
class Inputs:
    """One call's inputs."""

    sequences: tuple[Array, ...]  # each (B, N, ...): what trials change
    settings: dict[Hashable, Any] = field(default_factory=dict)  # arrays that follow the positions, and added keywords
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

    def having(self, settings: Mapping[Any, Any]) -> Inputs:
        """With these settings in addition to, or in place of, its own."""
        return replace(self, settings={**self.settings, **settings})

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
        return replace(self, sequences=tuple(array[:, positions] for array in self.sequences), settings=settings)

    def rows(self, index: Sequence[int]) -> Inputs:
        """The given rows of the batch, in the given order."""
        index = list(index)
        settings = {
            key: value[index] if _is_array(value) and value.ndim > 1 and len(value) == self.batch else value
            for key, value in self.settings.items()
        }
        per_row = {key: value[index] for key, value in self.per_row.items()}
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
    several = isinstance(example, (Mapping, tuple))
    entries: dict[Hashable, Any]
    entries = dict(example) if isinstance(example, Mapping) else dict(enumerate(example if several else (example,)))
    keys = _sequence_keys(entries, input, position_axis) if several or input is not None else [0]
    in_torch = any(_is_tensor(value) for value in entries.values()) or _is_module(model)
    sequences = [_as_array(entries[key], f"example[{key!r}]" if several else "example") for key in keys]
    position_axes = [_position_axis(array, position_axis) for array in sequences]
    batch_axes = [_batch_axis(array, axis, batch_axis) for array, axis in zip(sequences, position_axes, strict=True)]
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
    for key in [key for key in entries if key not in keys]:
        value, array = entries[key], _maybe_array(entries[key])
        of_source = str(keys[0]).startswith("decoder_") and not str(key).startswith("decoder_")  # of any length
        if array is not None and n in array.shape and not of_source:
            settings[key] = array
        elif len(getattr(value, "shape", ())) > 1 and len(value) == batch:
            per_row[key] = value
        else:
            constants[key] = value
    tensors = [*(model.parameters() if _is_module(model) else ()), *filter(_is_tensor, entries.values())]
    signature = CallSignature(
        keys=tuple(keys),
        constants=constants,
        batch_axis=batch_axes[0],
        position_axes=tuple(position_axes),
        torch=in_torch,
        dtypes=tuple(_dtype(entries[key], array, in_torch, model) for key, array in zip(keys, sequences, strict=True)),
        device=tensors[0].device if tensors else None,
    )
    return Inputs(tuple(rows), settings, per_row), signature


def _sequence_keys(entries: dict[Hashable, Any], input: Any, position_axis: int | None) -> list[Hashable]:
    if input is not None:
        keys = list(input) if isinstance(input, (list, tuple)) else [input]
        if not keys or not all(isinstance(name, str | int) for name in keys):
            raise CallError(
                f"audit: input={shown(input)}; expected the name or number of an entry of the example, or a list of them.\n"
                f"Fix: of {sorted(map(str, entries))}; input=None finds it."
            )
        missing = [name for name in keys if name not in entries]
        if missing:
            raise CallError(
                f"audit: input={missing[0]!r} is not in the example, which has {sorted(map(str, entries))}."
            )
        return keys
    arrays = (key for key, value in entries.items() if _maybe_array(value) is not None)
    first = next((name for name in (0, *_SEQUENCE_NAMES) if name in entries), next(arrays, None))
    if first is None:
        raise CallError(
            f"audit: example has no array among {sorted(map(str, entries))}.\n"
            "Fix: add the sequence, ids (B, N) or vectors (B, N, D); input= names its entry."
        )
    sequence = _as_array(entries[first], f"example[{first!r}]")
    if not np.issubdtype(sequence.dtype, np.inexact):
        return [first]
    # Q, K and V move together; a table of pairs or an additive mask is a setting.
    axis, keys = _position_axis(sequence, position_axis), [first]
    for key, value in entries.items():
        other = _maybe_array(value) if key != first else None
        if other is not None and np.issubdtype(other.dtype, np.inexact) and other.ndim == sequence.ndim:
            keys += [key] if other.shape[axis] == sequence.shape[axis] and not _looks_like_a_mask(other) else []
    return keys


def _looks_like_a_mask(array: Array) -> bool:
    values = np.unique(array)
    if len(values) > 2 or values[-1] > 1:
        return False
    return bool(values[0] < -1e3 or set(values.tolist()) <= {0.0, 1.0})


def _axes_of_one_row(array: Array) -> int:
    """How many axes ids (N,) or vectors (N, D) have without a batch."""
    return 2 if np.issubdtype(array.dtype, np.inexact) and array.ndim >= 2 else 1


def _position_axis(array: Array, requested: int | None) -> int:
    if requested is None:
        return array.ndim - _axes_of_one_row(array)
    if not -array.ndim <= requested < array.ndim:
        raise CallError(f"audit: position_axis={requested} does not exist in an example of shape {tuple(array.shape)}.")
    return requested % array.ndim


def _batch_axis(array: Array, axis: int, requested: int | str | None) -> int | None:
    if requested is None:
        return None
    if requested == "auto":
        return None if array.ndim <= _axes_of_one_row(array) else next(i for i in range(array.ndim) if i != axis)
    chosen = operator.index(requested)  # type: ignore[arg-type]
    if not -array.ndim <= chosen < array.ndim or chosen % array.ndim == axis:
        shape = tuple(array.shape)
        raise CallError(
            f"audit: batch_axis={requested} is no axis of an example of shape {shape} besides the positions' axis {axis}."
        )
    return chosen % array.ndim


def _as_array(value: Any, name: str) -> Array:
    if getattr(value, "is_meta", False):
        raise CallError(f"audit: {name} is on the device meta, which stores no values.\nFix: give it with its values.")
    if _is_tensor(value) and "strided" not in str(value.layout):
        raise CallError(f"audit: {name} is a {value.layout} tensor, not a dense one.\nFix: {name}.to_dense().")
    array = _maybe_array(value)
    if array is not None and array.dtype.kind not in "biufc":
        raise CallError(
            f"audit: {name} holds {array.dtype} {array.shape}, not numbers.\n"
            "Fix: give ids (N,) or (B, N), or vectors (N, D) or (B, N, D)."
        )
    if array is None:
        raise CallError(
            f"audit: {name} is a {type(value).__name__}, not an array of token ids or of vectors.\n"
            "Fix: give ids (N,) or (B, N), or vectors (N, D) or (B, N, D); input= names the entry of a dict."
        )
    return array


def _maybe_array(value: Any) -> Array | None:
    if _is_tensor(value):
        if value.is_meta or "strided" not in str(value.layout):
            return None
        tensor = value.detach().cpu()
        value = (tensor.float() if tensor.is_floating_point() and tensor.element_size() < 4 else tensor).numpy()
    if isinstance(value, (np.ndarray, list)) or hasattr(value, "__array__"):
        with contextlib.suppress(ValueError):  # rows of unequal lengths
            array = np.asarray(value)
            return array if array.ndim and array.dtype != object else None
    return None


def _is_array(value: Any) -> bool:
    return isinstance(value, np.ndarray)


def _is_tensor(value: Any) -> bool:
    return type(value).__module__.split(".")[0] == "torch" and hasattr(value, "detach")


def _is_module(model: Any) -> bool:
    return hasattr(model, "named_modules") and hasattr(model, "parameters")


def _dtype(value: Any, array: Array, in_torch: bool, model: Any) -> Any:
    if _is_tensor(value):
        return value.dtype
    if not in_torch:
        return array.dtype
    import torch

    if not np.issubdtype(array.dtype, np.floating):
        return torch.from_numpy(np.zeros(1, array.dtype)).dtype
    floats = (p.dtype for p in model.parameters() if p.is_floating_point()) if _is_module(model) else iter(())
    return next(floats, torch.get_default_dtype())


@dataclass(frozen=True)
class System:
    """A model, the signature of its call, and how to read its answer."""

    model: Any
    signature: CallSignature
    output: Callable[[Any], Any] | None = None
    output_axis: int | None = None
    training: bool = False
    seed: int = 0

    @functools.cached_property
    def module(self) -> Any:
        """The torch module behind the model; None where there is none."""
        return module_behind(self.model)

    @property
    def in_torch(self) -> bool:
        return self.signature.torch or self.module is not None

    def __call__(self, inputs: Inputs, seed: int | None = None) -> Rows:
        """The rows of the answer, (B, N, F), as float64 or int64."""
        with without_gradients() if self.in_torch else contextlib.nullcontext():
            return _in_numpy(self.raw_rows(inputs, seed))

    def raw_rows(self, inputs: Inputs, seed: int | None = None) -> Any:
        """The rows of the answer as the model returns them: a tensor, with the graph that torch records, or an array."""
        with self._conditions(self.seed if seed is None else seed):
            return self._rows(self._call(inputs), inputs)

    def answer(self, inputs: Inputs) -> Any:
        """The model's whole answer, without gradients."""
        with without_gradients(), self._conditions(self.seed):
            return self._call(inputs)

    def rows(self, answer: Any, inputs: Inputs) -> Rows:
        """The rows of a whole answer."""
        return _in_numpy(self._rows(answer, inputs))

    def in_float64(self) -> System:
        """The model computing in float64; raises whatever the copy raises."""
        signature = self.signature
        if not self.in_torch:
            if signature.dtypes[0].kind != "f" or signature.dtypes[0] == np.float64:
                raise CallError("a callable on NumPy arrays computes in its own precision")
            return replace(self, signature=replace(signature, dtypes=(np.dtype(np.float64),) * len(signature.dtypes)))
        is_module = self.model is self.module  # a function is its own copy
        model = copy.deepcopy(self.model).double() if is_module else self.model
        return replace(self, model=model, signature=replace(signature, float64=True))

    @contextlib.contextmanager
    def prepared(self) -> Iterator[None]:
        """Set the training flag for the audit; restore flags and buffers after it."""
        module = self.module if self.model is self.module else None
        with in_mode(module, self.training), _buffers_restored(module):
            yield

    def accepts(self, name: str) -> bool:
        """Whether the call has a keyword of this name in its signature."""
        return name in parameters(self.model)

    def _call(self, inputs: Inputs) -> Any:
        args, kwargs = self.signature.arguments(inputs)
        return self.model(*args, **kwargs)

    @contextlib.contextmanager
    def _conditions(self, seed: int) -> Iterator[None]:
        """The conditions of one run: the seed, the precision, and in training mode the same running statistics."""
        precision: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if self.signature.float64:
            from lowtri.auditing.torch_hooks import computing_in_float64

            precision = computing_in_float64()
        with _seeded(seed), _buffers_restored(self.module if self.training else None), precision:
            yield

    def _rows(self, answer: Any, inputs: Inputs) -> Any:
        answer = self._picked(answer, inputs)
        if not hasattr(answer, "movedim"):
            answer = np.asarray(answer)
        rows = positions_first(answer, *self._axes(tuple(answer.shape), inputs))
        if isinstance(rows, np.ndarray):
            rows = np.stack([rows.real, rows.imag], axis=-1) if np.iscomplexobj(rows) else rows
        elif rows.is_complex():
            import torch

            rows = torch.view_as_real(rows)
        return rows.reshape(rows.shape[0], rows.shape[1], -1)

    def _picked(self, answer: Any, inputs: Inputs) -> Any:
        """The tensor or array with one row for each position."""
        if self.output is not None:
            return self.output(answer)
        for name in ("logits", "last_hidden_state"):
            value = getattr(answer, name, None)
            if value is not None and hasattr(value, "shape"):
                return value
        if isinstance(answer, Mapping):
            return answer["logits"] if "logits" in answer else next(iter(answer.values()))
        if dataclasses.is_dataclass(answer):
            return self._field(answer, inputs)
        if isinstance(answer, (tuple, list)) and not all(isinstance(value, (int, float)) for value in answer):
            return answer[0]
        return answer

    def _field(self, answer: Any, inputs: Inputs) -> Any:
        """The one field of a dataclass that has a row for each position."""
        shapes = {f.name: getattr(getattr(answer, f.name), "shape", ()) for f in dataclasses.fields(answer)}
        fitting = [name for name, shape in shapes.items() if inputs.n in shape]
        if len(fitting) == 1:
            return getattr(answer, fitting[0])
        given = ", ".join(f"{name} {tuple(shape)}" if len(shape) else name for name, shape in shapes.items())
        raise CallError(
            f"audit: the model returns a {type(answer).__name__} of {given}; {len(fitting)} of them have a row for each of "
            f"the {inputs.n} positions.\nFix: pick one with output=lambda answer: answer.{next(iter(fitting or shapes), 'name')}."
        )

    def _axes(self, shape: tuple[int, ...], inputs: Inputs) -> tuple[int | None, int]:
        """The axes of the batch and of the positions."""
        n, axis, fitting = inputs.n, self.output_axis, [i for i, size in enumerate(shape) if size == inputs.n]
        if axis is not None:
            axis = axis % len(shape) if -len(shape) <= axis < len(shape) else axis
        elif self.signature.position_axes[0] in fitting:
            axis = self.signature.position_axes[0]
        elif len(fitting) == 1:
            axis = fitting[0]
        if axis not in fitting:
            raise CallError(
                f"audit: the model's answer has shape {shape}; no axis with one row for each of the {n} positions was found.\n"
                "Fix: pick the tensor with output=, and its axis of positions with output_axis=."
            )
        batch = self.signature.batch_axis
        if batch is None or (batch != axis and batch < len(shape) and shape[batch] == inputs.batch):
            return batch, axis
        if inputs.batch == 1:
            return None, axis
        raise CallError(
            f"audit: the model's answer has shape {shape}; the {inputs.batch} rows of the batch were not found in it.\n"
            "Fix: pick a tensor with batch and positions with output=."
        )


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


def parameters(model: Any) -> Mapping[str, inspect.Parameter]:
    """What a callable takes, by name; empty where Python cannot say, as for a builtin."""
    try:
        return inspect.signature(getattr(model, "forward", model)).parameters
    except (TypeError, ValueError):
        return {}


def module_behind(model: Any) -> Any:
    """The torch module that a model is, is a method of, or closes over; None for anything else."""
    if hasattr(model, "named_modules") and hasattr(model, "forward"):
        return model
    if isinstance(model, functools.partial):
        return module_behind(model.func)
    owners = [getattr(model, "__self__", None)]
    for cell in getattr(model, "__closure__", None) or ():
        with contextlib.suppress(ValueError):  # an empty cell
            owners.append(cell.cell_contents)
    return next((owner for owner in owners if owner is not None and hasattr(owner, "named_modules")), None)


def without_gradients() -> contextlib.AbstractContextManager[Any]:
    """`torch.no_grad()`, where torch has been imported."""
    torch = sys.modules.get("torch")
    return contextlib.nullcontext() if torch is None else torch.no_grad()


def _in_numpy(rows: Any) -> Rows:
    """Float64 or int64."""
    if isinstance(rows, np.ndarray):
        return rows.astype(np.float64 if np.issubdtype(rows.dtype, np.floating) else np.int64)
    rows = rows.detach().cpu()
    return np.asarray((rows.double() if rows.is_floating_point() else rows.long()).numpy())


@contextlib.contextmanager
def in_mode(module: Any, training: bool | None) -> Iterator[None]:
    """Set a module's training flags (None leaves them as they are), and restore every part's after it."""
    flags = [] if module is None else [(part, part.training) for part in module.modules()]
    try:
        if module is not None and training is not None:
            module.train(training)
        yield
    finally:
        for part, flag in flags:
            part.training = flag


@contextlib.contextmanager
def _buffers_restored(module: Any) -> Iterator[None]:
    buffers = [] if module is None else [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    try:
        yield
    finally:
        with without_gradients():
            for buffer, value in buffers:
                buffer.copy_(value)


@contextlib.contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Every global source of random numbers at the same seed, and its state restored afterwards."""
    torch = sys.modules.get("torch")
    python_state, numpy_state = random.getstate(), np.random.get_state()  # noqa: NPY002
    torch_state = torch.get_rng_state() if torch is not None else None
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002
    if torch is not None:
        torch.default_generator.manual_seed(seed)  # `torch.manual_seed` walks the stack for devices that may come later
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed_all(seed)
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)  # noqa: NPY002
        if torch is not None and torch_state is not None:
            torch.set_rng_state(torch_state)

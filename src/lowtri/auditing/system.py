"""The system under audit: inputs in, one row of numbers for each position out, (B, N, F).

The model is run unmodified. Random states, training flags and buffers are restored after a run.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import inspect
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from lowtri.auditing.inputs import CallSignature, Inputs, positions_first
from lowtri.errors import CallError

Rows = npt.NDArray[Any]


@dataclass(frozen=True)
class System:
    """A model, the signature of its call, and how to read its answer."""

    model: Any
    signature: CallSignature
    output: Callable[[Any], Any] | None = None
    output_axis: int | None = None
    training: bool = False
    seed: int = 0

    @property
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
        with self._run(self.seed if seed is None else seed):
            return self._rows(self._call(inputs), inputs)

    def answer(self, inputs: Inputs) -> Any:
        """The model's whole answer, without gradients."""
        with without_gradients(), self._run(self.seed):
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
        model = (
            copy.deepcopy(self.model).double() if self.model is self.module else self.model
        )  # a function is its own copy
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
    def _run(self, seed: int) -> Iterator[None]:
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
        n, axis = inputs.n, self.output_axis
        if axis is None:
            axis = self.signature.position_axes[0]
            if axis >= len(shape) or shape[axis] != n:
                fitting = [i for i, size in enumerate(shape) if size == n]
                axis = fitting[0] if len(fitting) == 1 else None
        elif -len(shape) <= axis < len(shape):
            axis %= len(shape)
        if axis is None or axis >= len(shape) or shape[axis] != n:
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
    owner = getattr(model, "__self__", None)
    if owner is not None and hasattr(owner, "named_modules"):
        return owner
    for cell in getattr(model, "__closure__", None) or ():
        with contextlib.suppress(ValueError):
            if hasattr(cell.cell_contents, "named_modules"):
                return cell.cell_contents
    return None


def redrawn(model: Any, std: float, seed: int) -> Any:
    """A copy whose matrices are drawn anew; vectors (norms, biases) stay."""
    import torch

    if not isinstance(model, torch.nn.Module):
        raise CallError(f"audit: redraw= needs a torch module, got {type(model).__name__}.\nFix: drop redraw=.")
    redrawn_copy = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in redrawn_copy.parameters():
            if parameter.dim() >= 2 and parameter.is_floating_point():
                fresh = torch.randn(parameter.shape, generator=generator) * std
                parameter.copy_(fresh.to(parameter))
    return redrawn_copy


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

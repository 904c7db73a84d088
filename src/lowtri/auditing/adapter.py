"""The model adapter: inputs in, one row of numbers for each position out, (B, N, F).

The model is run as it is. Only random states, the training flag and buffers are touched, and put back.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from lowtri.auditing.inputs import CallSignature, Inputs
from lowtri.errors import CallError

__all__ = ["ModelAdapter", "module_behind"]

Rows = npt.NDArray[Any]


@dataclass(frozen=True)
class ModelAdapter:
    """A model, the signature of its call, and how to read its answer."""

    model: Any
    signature: CallSignature
    output: Callable[[Any], Any] | None = None
    output_axis: int | None = None
    training: bool = False
    seed: int = 0

    @property
    def module(self) -> Any:
        """The torch module behind the model, where one can be found, else None."""
        return module_behind(self.model)

    def __call__(self, inputs: Inputs, seed: int | None = None) -> Rows:
        """The rows of the answer, (B, N, F), as float64 or int64."""
        if self.module is None and not self.signature.torch:
            with _seeded(self.seed if seed is None else seed):
                answer = self._call(inputs)
            return self._rows_of_array(self._pick(answer), inputs)
        import torch

        with torch.no_grad():
            answer = self.tensor(inputs, seed)
        return _to_numpy(answer)

    def tensor(self, inputs: Inputs, seed: int | None = None) -> Any:
        """The same rows as a torch tensor, (B, N, F), with whatever graph the caller's modes record."""
        import torch

        with _seeded(self.seed if seed is None else seed), self._as_trained(), self._precision():
            answer = self._pick(self._call(inputs))
        if not isinstance(answer, torch.Tensor):
            return torch.from_numpy(self._rows_of_array(answer, inputs))
        return self._rows_of_tensor(answer, inputs)

    def raw(self, inputs: Inputs) -> Any:
        """The model's whole answer, unread, without gradients."""
        import torch

        with torch.no_grad(), _seeded(self.seed), self._as_trained(), self._precision():
            return self._call(inputs)

    def rows(self, answer: Any, inputs: Inputs) -> Rows:
        """Read the rows out of a whole answer."""
        picked = self._pick(answer)
        if hasattr(picked, "detach"):
            return _to_numpy(self._rows_of_tensor(picked, inputs))
        return self._rows_of_array(picked, inputs)

    def in_float64(self) -> ModelAdapter:
        """The same model computing in float64; raises whatever the copy raises."""
        if self.module is None and not self.signature.torch:
            if self.signature.dtypes[0].kind != "f" or self.signature.dtypes[0] == np.float64:
                raise CallError("a callable on NumPy arrays computes in its own precision")
            return replace(
                self, signature=replace(self.signature, dtypes=(np.dtype(np.float64),) * len(self.signature.dtypes))
            )
        from lowtri.auditing.float64 import float64_copy

        return replace(self, model=float64_copy(self.model), signature=replace(self.signature, float64=True))

    @contextlib.contextmanager
    def prepared(self) -> Iterator[None]:
        """Set the training flag for the audit and put flags and buffers back after it."""
        module = self.module if self.model is self.module else None
        if module is None:
            yield
            return
        flags = [(part, part.training) for part in module.modules()]
        buffers = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
        module.train(self.training)
        try:
            yield
        finally:
            for part, flag in flags:
                part.training = flag
            _restore(buffers)

    def accepts(self, name: str) -> bool:
        """Whether the call takes a keyword of this name, named in its signature."""
        try:
            target = self.model.forward if hasattr(self.model, "forward") else self.model
            return name in inspect.signature(target).parameters
        except (TypeError, ValueError):
            return False

    def _call(self, inputs: Inputs) -> Any:
        args, kwargs = self.signature.arguments(inputs)
        return self.model(*args, **kwargs)

    @contextlib.contextmanager
    def _precision(self) -> Iterator[None]:
        if not self.signature.float64:
            yield
            return
        from lowtri.auditing.float64 import computing_in_float64

        with computing_in_float64():
            yield

    @contextlib.contextmanager
    def _as_trained(self) -> Iterator[None]:
        # In training mode a call may move running statistics; the next call must start from the same ones.
        module = self.module if self.training else None
        buffers = [] if module is None else [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
        yield
        _restore(buffers)

    def _pick(self, answer: Any) -> Any:
        if self.output is not None:
            return self.output(answer)
        for name in ("logits", "last_hidden_state"):
            value = getattr(answer, name, None)
            if value is not None and hasattr(value, "shape"):
                return value
        if isinstance(answer, Mapping):
            return answer["logits"] if "logits" in answer else next(iter(answer.values()))
        if isinstance(answer, (tuple, list)) and not _is_numbers(answer):
            return answer[0]
        return answer

    def _rows_of_array(self, answer: Any, inputs: Inputs) -> Rows:
        array = np.asarray(answer)
        batch, axis = self._axes(array.shape, inputs)
        array = np.moveaxis(array, axis, 0)[None] if batch is None else np.moveaxis(array, (batch, axis), (0, 1))
        if np.iscomplexobj(array):
            array = np.stack([array.real, array.imag], axis=-1)
        array = array.reshape(array.shape[0], array.shape[1], -1)
        return array.astype(np.float64 if np.issubdtype(array.dtype, np.floating) else np.int64)

    def _rows_of_tensor(self, answer: Any, inputs: Inputs) -> Any:
        batch, axis = self._axes(tuple(answer.shape), inputs)
        answer = answer.movedim(axis, 0).unsqueeze(0) if batch is None else answer.movedim((batch, axis), (0, 1))
        if answer.is_complex():
            import torch

            answer = torch.view_as_real(answer)
        return answer.reshape(answer.shape[0], answer.shape[1], -1)

    def _axes(self, shape: tuple[int, ...], inputs: Inputs) -> tuple[int | None, int]:
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
        if batch is None:
            return None, axis
        if batch == axis or batch >= len(shape) or shape[batch] != inputs.batch:
            if inputs.batch == 1:
                return None, axis
            raise CallError(
                f"audit: the model's answer has shape {shape}; the {inputs.batch} rows of the batch were not found in it.\n"
                "Fix: pick a tensor with batch and positions with output=."
            )
        return batch, axis


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


@contextlib.contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Every global source of random numbers at the same seed, and back where it was afterwards."""
    import sys

    torch = sys.modules.get("torch")
    python, numpy_state = random.getstate(), np.random.get_state()  # noqa: NPY002
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
        random.setstate(python)
        np.random.set_state(numpy_state)  # noqa: NPY002
        if torch is not None and torch_state is not None:
            torch.set_rng_state(torch_state)


def _restore(buffers: list[tuple[Any, Any]]) -> None:
    if buffers:
        import torch

        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)


def _is_numbers(answer: Any) -> bool:
    return all(isinstance(value, (int, float)) for value in answer)


def _to_numpy(tensor: Any) -> Rows:
    tensor = tensor.detach().cpu()
    return np.asarray((tensor.double() if tensor.is_floating_point() else tensor.long()).numpy())

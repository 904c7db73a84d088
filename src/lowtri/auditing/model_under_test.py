"""The model under test: inputs in, one row of numbers for each position out, (B, N, F).

The model is run unmodified, each call from the same seed; what it keeps is put back after the audit.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from lowtri.auditing.adapter import Model, module_behind, parameters
from lowtri.auditing.example import CallSignature, Inputs, Rows, positions_first
from lowtri.auditing.restoring import Snapshot, in_mode, seeded, torch_settings_restored, without_gradients
from lowtri.errors import CallError

WIDE = 4096  # numbers of a row, beyond which sums of them are compared
_SUMS = 16
_SMALL = 2**30  # parameters times tokens of a call, below which threads cost more than they save


@dataclass(frozen=True)
class ModelUnderTest:
    """A model, the signature of its call, and how to read its answer."""

    model: Any
    signature: CallSignature
    adapter: Model  # what its caller says about it
    training: bool = False
    restoring: bool = False  # whether each call begins with what the model kept before the audit
    narrow: bool = False  # whether wide rows are compared in random sums of their numbers
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

    def in_float64(self) -> ModelUnderTest:
        """The model computing in float64; raises whatever the copy raises."""
        signature = self.signature
        if not self.in_torch:
            if signature.dtypes[0].kind != "f" or signature.dtypes[0] == np.float64:
                raise CallError("a callable on NumPy arrays computes in its own precision")
            return replace(self, signature=replace(signature, dtypes=(np.dtype(np.float64),) * len(signature.dtypes)))
        is_module = self.model is self.module  # a function is its own copy
        model = copy.deepcopy(self.model).double() if is_module else self.model
        names = ("step", "prefill", "alone")
        functions = {name: _of_copy(getattr(self.adapter, name), self.model, model) for name in names}
        adapter = replace(self.adapter, **functions)
        return replace(self, model=model, adapter=adapter, signature=replace(signature, float64=True))

    @functools.cached_property
    def snapshot(self) -> Snapshot:
        """What the model and its functions keep, as of the first reading."""
        return Snapshot(self.model, self.adapter.step, self.adapter.prefill, self.adapter.alone)

    def work(self, inputs: Inputs) -> int:
        """Parameters times tokens of a call; 0 where there is no module to count them in."""
        size = sum(p.numel() for p in self.module.parameters()) if self.module is not None else 0
        return size * inputs.batch * inputs.n

    @contextlib.contextmanager
    def prepared(self, inputs: Inputs) -> Iterator[None]:
        """Set the training flag for the audit, and one thread for a small model; put everything back after it."""
        module = self.module if self.model is self.module or self.training else None
        threads = 1 if self.in_torch and self.work(inputs) < _SMALL else None
        before = self.snapshot
        with torch_settings_restored(threads):
            try:
                with in_mode(module, self.training):
                    yield
            finally:
                before.restore()

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
        with seeded(seed), precision:
            self.snapshot.seed(seed)
            try:
                yield
            finally:
                if self.training or self.restoring:
                    self.snapshot.restore(modes=False)

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
        return self.narrowed(rows.reshape(rows.shape[0], rows.shape[1], -1))

    def narrowed(self, rows: Any) -> Any:
        """Rows (B, N, F); of very many numbers, as those of a large vocabulary, sums with random signs, (B, N, 16).

        What moves one number moves each sum; where rounding could hide it, the float64 copy decides.
        """
        if not self.narrow or rows.shape[-1] <= WIDE:
            return rows
        signs = _signs(rows.shape[-1])
        if isinstance(rows, np.ndarray):
            return rows @ signs.astype(rows.dtype)
        import torch

        return rows @ torch.as_tensor(signs, dtype=rows.dtype, device=rows.device)

    def _picked(self, answer: Any, inputs: Inputs) -> Any:
        """The tensor or array with one row for each position."""
        if self.adapter.output is not None:
            return self.adapter.output(answer)
        for name in ("logits", "last_hidden_state"):
            if hasattr(getattr(answer, name, None), "shape"):
                return getattr(answer, name)
        if isinstance(answer, Mapping):
            return answer["logits"] if "logits" in answer else next(iter(answer.values()))
        if isinstance(answer, (tuple, list)) and not all(isinstance(value, (int, float)) for value in answer):
            return answer[0]
        if not dataclasses.is_dataclass(answer):
            return answer
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
        n, letters = inputs.n, self.adapter.layout.output
        fitting = [i for i, size in enumerate(shape) if size == n]
        axis: int | None = None
        if letters is not None:
            axis = letters.index("N") if len(letters) == len(shape) else None
        elif self.signature.position_axes[0] in fitting:
            axis = self.signature.position_axes[0]
        elif len(fitting) == 1:
            axis = fitting[0]
        if axis is None or axis not in fitting:
            raise CallError(
                f"audit: the model's answer has shape {shape}; no axis with one row for each of the {n} positions was found.\n"
                'Fix: pick the tensor with Model(output=), and say its axes with Model(axes="BND->BNV").'
            )
        batch = self.signature.batch_axis
        if letters is not None and batch is not None:
            batch = letters.index("B") if "B" in letters else batch
        if batch is None or (batch != axis and batch < len(shape) and shape[batch] == inputs.batch):
            return batch, axis
        if inputs.batch == 1:
            return None, axis
        raise CallError(
            f"audit: the model's answer has shape {shape}; the {inputs.batch} rows of the batch were not found in it.\n"
            "Fix: pick a tensor with batch and positions with Model(output=)."
        )


@functools.lru_cache(maxsize=2)
def _signs(width: int) -> npt.NDArray[np.float64]:
    """Random signs (width, 16)."""
    return np.random.default_rng(0).choice(np.array([-1.0, 1.0]), (width, _SUMS))


def _of_copy(value: Any, model: Any, copy64: Any) -> Any:
    """The model itself, or a method of it, as the copy's own; anything else as it is."""
    if value is not None and value is model:
        return copy64
    if getattr(value, "__self__", None) is model and hasattr(value, "__name__"):
        return getattr(copy64, value.__name__)
    return value


def _in_numpy(rows: Any) -> Rows:
    """Float64 or int64."""
    if isinstance(rows, np.ndarray):
        return rows.astype(np.float64 if np.issubdtype(rows.dtype, np.floating) else np.int64)
    rows = rows.detach().cpu()
    return np.asarray((rows.double() if rows.is_floating_point() else rows.long()).numpy())

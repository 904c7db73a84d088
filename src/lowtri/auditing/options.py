"""The options of an audit, checked before anything runs; the mask as a table of pairs; the ids to draw from; the progress line."""

from __future__ import annotations

import contextlib
import inspect
import math
import operator
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from lowtri.auditing.inputs import Inputs
from lowtri.auditing.system import System, module_behind
from lowtri.errors import CallError, MaskError

__all__ = ["Bools", "Options", "progress_line", "vocabulary", "vocabulary_size"]

Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Options:
    """What trials read of `audit`'s arguments, where they are described."""

    mask: Any
    layers: int | None
    step: Callable[[Any, Any], Any] | None
    prefill: Callable[[Any], Any] | None
    alone: Callable[..., Any] | None
    pad_mask: str | None
    train: bool | None
    compile: bool
    length: int | None
    draws: int
    exact: int
    seed: int

    def check(self, model: Any, output: Any, redraw: Any) -> None:
        """Raise CallError, with its name, for an argument that cannot be used."""
        _check_model(model)
        for name, value in (("output", output), ("step", self.step), ("prefill", self.prefill), ("alone", self.alone)):
            if value is not None and not callable(value):
                raise CallError(f"audit: {name}= is a {type(value).__name__}, expected something to call, or None.")
        for name, least in (("draws", 1), ("exact", 0), ("seed", 0)):
            if not _is_whole(getattr(self, name), least):
                raise CallError(f"audit: {name}={getattr(self, name)!r}, expected a whole number of at least {least}.")
        if self.prefill is not None and self.step is None:
            raise CallError("audit: prefill= was given without step=.\nFix: say how decoding goes on, step(state, x).")
        if self.train is not None and not isinstance(self.train, bool):
            raise CallError(f"audit: train={self.train!r}, expected True, False (eval mode alone) or None (both).")
        if self.length is not None and not _is_whole(self.length, 0):
            raise CallError(
                f"audit: length={self.length!r}, expected a whole number, 0 for no longer example, or None."
            )
        if self.layers is not None and not _is_whole(self.layers, 1):
            raise CallError(
                f"audit: layers={self.layers!r}, expected a whole number of at least 1 (or None: the mask is from end to end)."
            )
        if not isinstance(redraw, (bool, int, float)) or not 0 <= redraw < math.inf:
            raise CallError(f"audit: redraw={redraw!r}, expected True, False or a standard deviation above 0.")
        if self.pad_mask is not None:
            _check_pad_mask(model, self.pad_mask)

    def declared(self, n: int, batch: int) -> tuple[Bools, Bools]:
        """The pairs (1 or B, N, N) that the mask allows from end to end, and the keys (1 or B, N) that it shows to no query.

        A mask that differs from head to head allows what any head allows. With `layers`, the mask is one layer's, and every
        layer passes its own position on: the pairs are those that a path of at most `layers` steps joins.
        """
        if isinstance(self.mask, np.ndarray):
            table = wide = self.mask.astype(bool)
        else:
            from lowtri.masks import as_mask

            formula = as_mask(self.mask)
            table = wide = np.array(formula.dense(n), dtype=bool)
            with contextlib.suppress(MaskError):  # a strict mask shows the last key to later queries
                wide = np.array(formula.dense(2 * n), dtype=bool)[..., :n]
        table, wide = _with_batch(table), _with_batch(wide)
        if table.shape[0] not in (1, batch) or table.shape[1:] != (n, n):
            raise CallError(
                f"audit: mask gives a table of {tuple(table.shape)}, the example has {batch} row(s) of {n} positions.\n"
                "Fix: use a mask without a batch, or one whose batch is the example's."
            )
        return self._reached(table), np.logical_not(wide.any(axis=1))

    def _reached(self, table: Bools) -> Bools:
        if self.layers is None:
            return table
        step = reach = table | np.eye(table.shape[-1], dtype=bool)
        for _ in range(min(self.layers, table.shape[-1]) - 1):
            wider = (reach.astype(np.float32) @ step.astype(np.float32)) > 0
            if (wider == reach).all():
                break
            reach = wider
        return reach

    def allowed(self, declared: Bools, real: Bools) -> Bools:
        """The declared pairs without the pads as keys."""
        return declared if real.all() else declared & real[:, None, :]


def _with_batch(table: Bools) -> Bools:
    """(1 or B, N, N), of a table that may have heads or no batch."""
    return np.asarray(table.any(axis=1)) if table.ndim == 4 else table[None] if table.ndim == 2 else table


def _check_model(model: Any) -> None:
    if isinstance(model, type):
        raise CallError(f"audit: model is the class {model.__name__}.\nFix: make one of it, {model.__name__}(...).")
    if not callable(model):
        kind = f"the text {model!r}" if isinstance(model, str) else f"a {type(model).__name__}"
        raise CallError(
            f"audit: model is {kind}, expected a module or a function.\nFix: load or build the model first."
        )
    module = module_behind(model)
    tensors = [] if module is None else [*module.named_parameters(), *module.named_buffers()]
    empty = next((name for name, value in tensors if value.is_meta), None)
    if empty is not None:
        raise CallError(
            f"audit: {empty} of the model is on the device meta, which holds no numbers.\n"
            "Fix: load its weights, or make it with .to_empty(device='cpu') and initialise it."
        )


def _check_pad_mask(model: Any, name: Any) -> None:
    if not isinstance(name, str) or not name:
        raise CallError(f"audit: pad_mask={name!r}, expected the name of a keyword of the model's.")
    try:
        takes = inspect.signature(getattr(model, "forward", model)).parameters
    except (TypeError, ValueError):
        return
    if name not in takes and not any(taken.kind is taken.VAR_KEYWORD for taken in takes.values()):
        raise CallError(
            f"audit: pad_mask={name!r}, but the model takes ({', '.join(takes)}).\n"
            "Fix: name the one that marks real positions."
        )


def _is_whole(value: Any, least: int) -> bool:
    try:
        return not isinstance(value, bool) and operator.index(value) >= least
    except TypeError:
        return False


def vocabulary(system: System, inputs: Inputs, requested: int | None) -> npt.NDArray[np.int64]:
    """The ids to draw from: those of the table in which the example's are looked up, else those that the config names."""
    present = np.unique(inputs.sequences[0]).astype(np.int64) if inputs.discrete else np.zeros(2, np.int64)
    size = requested
    if size is None and inputs.discrete:
        size = vocabulary_size(system.module)
        reached = _reached(system, inputs) if system.in_torch else None
        size = reached if size is None or (reached is not None and reached < size) else size
    if isinstance(size, int):
        if size < 2:
            raise CallError(f"audit: vocab_size={size}, expected at least 2.")
        return np.arange(size)
    if len(present) < 2:
        raise CallError(
            "audit: the example repeats one id, and how many ids there are is not known.\nFix: say vocab_size=."
        )
    return present


def _reached(system: System, inputs: Inputs) -> int | None:
    from lowtri.auditing.torch_hooks import looked_up

    try:
        return looked_up(system, inputs)
    except Exception:  # the example's own run reports it
        return None


def vocabulary_size(model: Any) -> int | None:
    """How many ids a model's config names, or else its first embedding; None where neither is there."""
    size = getattr(getattr(model, "config", None), "vocab_size", None)
    if isinstance(size, int) or not hasattr(model, "modules"):
        return size if isinstance(size, int) else None
    return next((part.num_embeddings for part in model.modules() if hasattr(part, "num_embeddings")), None)


def progress_line(requested: bool | None, started: float) -> Callable[[str, int, int], None]:
    """A line on stderr once an audit takes more than two seconds."""
    show = sys.stderr.isatty() if requested is None else requested
    last = [started + 2.0]

    def tick(probe: str, done: int, of: int) -> None:
        now = time.monotonic()
        if show and now > last[0]:
            last[0] = now + 0.2
            sys.stderr.write(f"\raudit: {probe} {done} of {of}, {now - started:.0f} s\x1b[K")
            if done >= of:
                sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()

    return tick

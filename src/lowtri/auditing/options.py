"""The options of an audit, checked before anything runs, and the mask as the table of pairs that it allows."""

from __future__ import annotations

import inspect
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from lowtri.auditing.adapter import module_behind
from lowtri.errors import CallError

__all__ = ["Bools", "Options"]

Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Options:
    """What probes read of `audit`'s arguments, where they are described."""

    mask: Any
    layers: int | None
    step: Callable[[Any, Any], Any] | None
    alone: Callable[..., Any] | None
    pad_mask: str | None
    compile: bool
    length: int | None
    draws: int
    exact: int
    seed: int

    def check(self, model: Any, output: Any, redraw: Any) -> None:
        """Raise CallError, with its name, for an argument that cannot be used."""
        _check_model(model)
        for name, value in (("output", output), ("step", self.step), ("alone", self.alone)):
            if value is not None and not callable(value):
                raise CallError(f"audit: {name}= is a {type(value).__name__}, expected something to call, or None.")
        for name, least in (("draws", 1), ("exact", 0), ("seed", 0)):
            if not _is_whole(getattr(self, name), least):
                raise CallError(f"audit: {name}={getattr(self, name)!r}, expected a whole number of at least {least}.")
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

    def allowed(self, n: int, batch: int) -> Bools:
        """The pairs (1 or B, N, N) that the mask allows from end to end.

        A mask that differs from head to head allows what any head allows. With `layers`, the mask is one layer's, and every
        layer passes its own position on: the pairs are those that a path of at most `layers` steps joins.
        """
        if isinstance(self.mask, np.ndarray):
            table: Bools = self.mask.astype(bool)
        else:
            from lowtri.masks import as_mask

            table = np.array(as_mask(self.mask).dense(n), dtype=bool)
        if table.ndim == 4:
            table = np.asarray(table.any(axis=1))
        if table.ndim == 2:
            table = table[None]
        if table.shape[0] not in (1, batch) or table.shape[1:] != (n, n):
            raise CallError(
                f"audit: mask gives a table of {tuple(table.shape)}, the example has {batch} row(s) of {n} positions.\n"
                "Fix: use a mask without a batch, or one whose batch is the example's."
            )
        if self.layers is None:
            return table
        step = reach = table | np.eye(n, dtype=bool)
        for _ in range(min(self.layers, n) - 1):
            wider = (reach.astype(np.float32) @ step.astype(np.float32)) > 0
            if (wider == reach).all():
                break
            reach = wider
        return reach


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

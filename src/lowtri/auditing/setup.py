"""What an audit needs before its probes run: redrawn weights, the ids to draw from, and the progress line."""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from lowtri.auditing.adapter import module_behind
from lowtri.auditing.inputs import Inputs
from lowtri.errors import CallError

__all__ = ["progress_line", "redrawn", "vocabulary", "vocabulary_size"]


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


def vocabulary(model: Any, inputs: Inputs, requested: int | None) -> npt.NDArray[np.int64]:
    """The ids to draw from."""
    present = np.unique(inputs.sequences[0]).astype(np.int64) if inputs.discrete else np.zeros(2, np.int64)
    size = requested
    if size is None and inputs.discrete:
        size = vocabulary_size(module_behind(model))
    if isinstance(size, int):
        if size < 2:
            raise CallError(f"audit: vocab_size={size}, expected at least 2.")
        return np.arange(size)
    if len(present) < 2:
        raise CallError(
            "audit: the example repeats one id, and how many ids there are is not known.\nFix: say vocab_size=."
        )
    return present


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

"""Inputs with padding: the keyword that marks real positions, and the example with pads around it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from lowtri.auditing.context import Context
from lowtri.auditing.inputs import Inputs

__all__ = ["pad", "pad_keyword", "pads_declared"]

# Keywords that mark real positions, and whether True (or 1) means real.
_KEYWORDS = {"attention_mask": True, "padding_mask": True, "positions": True, "key_padding_mask": False}


def pad_keyword(context: Context) -> str | None:
    """The keyword that marks this model's real positions."""
    if context.options.pad_mask:
        return context.options.pad_mask
    names = [context.adapter.signature.prefix + name for name in _KEYWORDS]
    for name in names:
        if name in context.inputs.settings:
            return name
    # A signature alone is believed only of libraries whose words are known.
    origin = {part.__module__.split(".")[0] for part in type(context.adapter.model).__mro__}
    if origin & {"transformers", "lowtri"}:
        return next((name for name in names if context.adapter.accepts(name)), None)
    return None


def pads_declared(context: Context, name: str) -> bool:
    """Whether padding is declared: by the caller, by the example, or because the module is lowtri's."""
    ours = type(context.adapter.model).__module__.startswith("lowtri.")
    return ours or name in context.inputs.settings or context.options.pad_mask is not None


def pad(context: Context, name: str, left: int, right: int, salt: int) -> Inputs:
    """The example with pads around it, their content drawn at random."""
    inputs, signature = context.inputs, context.adapter.signature
    wide = replace(
        inputs,
        sequences=tuple(
            np.concatenate([np.repeat(values[:, :1], left, 1), values, np.repeat(values[:, -1:], right, 1)], axis=1)
            for values in inputs.sequences
        ),
        settings={},
    )
    position = np.arange(wide.n) - left
    real = (position >= 0) & (position < inputs.n)
    wide = wide.change(~real, context.fresh(salt, inputs=wide))
    options: dict[str, Any] = {**inputs.options}
    rows = (inputs.batch, 1)
    if name == "positions":
        options[name] = np.tile(np.where(real, position, -1), rows)
        return replace(wide, options=options)
    means_real = _KEYWORDS.get(name.removeprefix("decoder_"), True)
    example = inputs.settings.get(name)
    dtype = np.dtype(np.int64 if means_real else np.bool_) if example is None else example.dtype
    marks = np.tile(real if means_real else ~real, rows).astype(dtype)
    options[name] = marks[0] if signature.batch_axis is None else marks
    if context.adapter.accepts(f"{signature.prefix}position_ids"):
        options[f"{signature.prefix}position_ids"] = np.tile(np.where(real, position, 0), rows)
    return replace(wide, options=options)

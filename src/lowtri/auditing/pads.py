"""Inputs with padding: the keyword that marks real positions, and the example with pads around it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from lowtri.auditing.context import Context, draw
from lowtri.auditing.inputs import Inputs

__all__ = ["pad", "pad_keyword", "pads_declared"]

# Keywords that mark real positions, and whether True (or 1) means real.
_KEYWORDS = {"attention_mask": True, "padding_mask": True, "positions": True, "key_padding_mask": False}


def pad_keyword(context: Context) -> str | None:
    """The keyword that tells this model which positions are real."""
    requested = context.options.get("pad_mask")
    if requested:
        return str(requested)
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
    return ours or name in context.inputs.settings or context.options.get("pad_mask") is not None


def pad(context: Context, name: str, left: int, right: int, salt: int) -> Inputs:
    """The example with pads around it, their content drawn at random."""
    inputs = context.inputs
    rng = np.random.default_rng([context.seed, salt])
    wide = replace(
        inputs,
        sequences=tuple(
            np.concatenate([np.repeat(values[:, :1], left, 1), values, np.repeat(values[:, -1:], right, 1)], axis=1)
            for values in inputs.sequences
        ),
        settings={},
    )
    real = np.zeros(wide.n, bool)
    real[left : left + inputs.n] = True
    wide = wide.change(~real, draw(wide, context.vocab, rng, "random"))
    options: dict[str, Any] = {**inputs.options}
    count = np.arange(wide.n) - left
    tiled = (inputs.batch, 1)
    if name == "positions":
        options[name] = np.tile(np.where(real, count, -1), tiled)
    else:
        like = inputs.settings.get(name)
        means_real = _KEYWORDS.get(name.removeprefix("decoder_"), True)
        marks = real if means_real else ~real
        dtype = like.dtype if like is not None else np.dtype(np.int64 if means_real else np.bool_)
        options[name] = np.tile(marks, tiled).astype(dtype)
        if context.adapter.signature.batch_axis is None:
            options[name] = options[name][0]
        places = f"{context.adapter.signature.prefix}position_ids"
        if context.adapter.accepts(places):
            options[places] = np.tile(np.where(real, count, 0), tiled)
    return replace(wide, options=options)

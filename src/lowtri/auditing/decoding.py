"""Ways to decode: one position after another, or in chunks, with a state between them.

Recognised: `make_cache(batch)` with `model(ids, cache=...)`, and the caches of transformers models. Any other model needs
`step(state, x) -> (output, state)`, where x is one position: ids (B,) or vectors (B, D).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from lowtri.auditing.adapter import Rows
from lowtri.auditing.context import Context
from lowtri.auditing.inputs import Inputs
from lowtri.compat.transformers_private import is_stateful
from lowtri.generation.models import stepwise_cache

__all__ = ["decoder_for"]

Decode = Callable[[Inputs, Sequence[int]], Rows]

_CACHES = ("past_key_values", "cache_params", "state", "mems")


def decoder_for(context: Context) -> tuple[Decode, bool] | None:
    """How this model decodes, and whether it can take several positions at a time; None if that is not known."""
    step = context.options.get("step")
    if step is not None:
        return (lambda inputs, sizes: _by_step(context, step, inputs, sizes)), False
    model = context.adapter.model
    if hasattr(model, "make_cache") and context.adapter.accepts("cache"):
        return (lambda inputs, sizes: _with_own_cache(context, inputs, sizes)), True
    config = getattr(model, "config", None)
    if config is not None and hasattr(model, "generate") and context.inputs.discrete:
        whole = getattr(config, "is_encoder_decoder", False) and not context.adapter.signature.prefix
        if whole or not getattr(model, "can_generate", lambda: False)():
            return None
        return (lambda inputs, sizes: _with_cache(context, inputs, sizes)), not is_stateful(model)
    return None


def _by_step(context: Context, step: Any, inputs: Inputs, sizes: Sequence[int]) -> Rows:
    import contextlib
    import sys

    adapter, rows, state = context.adapter, [], None
    width = context.base.shape[-1]
    torch = sys.modules.get("torch")
    with torch.no_grad() if torch is not None else contextlib.nullcontext():
        for t in range(inputs.n):
            given = adapter.signature.give(inputs.sequences[0][:, t : t + 1])
            axis = adapter.signature.position_axes[0]
            token = given.select(axis, 0) if hasattr(given, "select") else np.take(given, 0, axis=axis)
            came = step(state, token)
            if not isinstance(came, (tuple, list)) or len(came) != 2:
                raise TypeError(f"step returned a {type(came).__name__}, expected (output, state)")
            answer, state = came
            answer = answer.detach().cpu().double().numpy() if hasattr(answer, "detach") else np.asarray(answer)
            if answer.size != inputs.batch * width:
                raise ValueError(
                    f"step answers {answer.shape}, expected {inputs.batch} x {width} numbers at each position"
                )
            rows.append(answer.reshape(inputs.batch, 1, -1))
    return np.concatenate(rows, axis=1).astype(context.base.dtype)


def _with_own_cache(context: Context, inputs: Inputs, sizes: Sequence[int]) -> Rows:
    adapter, rows, done = context.adapter, [], 0
    cache = stepwise_cache(adapter.model, inputs.batch)
    for size in sizes:
        part = replace(inputs.span(done, done + size), options={"cache": cache})
        rows.append(adapter(part))
        done += size
    return np.concatenate(rows, axis=1)


def _with_cache(context: Context, inputs: Inputs, sizes: Sequence[int]) -> Rows:
    adapter, rows, done = context.adapter, [], 0
    cache: dict[str, Any] = {}
    for size in sizes:
        part = inputs.span(done, done + size)
        options: dict[str, Any] = {"use_cache": True, **cache}
        for name, value in inputs.options.items():  # a padding mask covers all that came, positions only what comes
            options[name] = value[:, : done + size] if name.endswith("attention_mask") else value[:, done : done + size]
        part = replace(part, options=options, settings={})
        answer = adapter.raw(part)
        found = next((key for key in _CACHES if getattr(answer, key, None) is not None), None)
        if found is None:
            raise LookupError("the model returned no cache")
        if found != "past_key_values" and any(name.endswith("attention_mask") for name in options) and done:
            raise LookupError("how this state is decoded together with a padding mask is not known")
        cache = {found: getattr(answer, found)}
        rows.append(adapter.rows(answer, part))
        done += size
    return np.concatenate(rows, axis=1)

"""Ways to decode: one position after another, or in chunks, with a state between them.

Models with `make_cache(batch)` and `model(ids, cache=...)`, and the caches of transformers models, are recognised. Others need
`step(state, x) -> (output, state)`, where x is one position: ids (B,) or vectors (B, D).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from lowtri.auditing.adapter import Rows, without_gradients
from lowtri.auditing.context import Context
from lowtri.auditing.inputs import Inputs
from lowtri.compat.transformers_private import is_stateful
from lowtri.generation.models import stepwise_cache

__all__ = ["decoder_for"]

Decode = Callable[[Inputs, Sequence[int]], Rows]

_CACHES = ("past_key_values", "cache_params", "state", "mems")


def decoder_for(context: Context) -> tuple[Decode, bool] | None:
    """How this model decodes, and whether it can take several positions at a time; None if that is not known."""
    model = context.adapter.model
    if context.options.step is not None:
        return partial(_by_step, context), False
    if hasattr(model, "make_cache") and context.adapter.accepts("cache"):
        return partial(_with_own_cache, context), True
    config = getattr(model, "config", None)
    if config is not None and hasattr(model, "generate") and context.inputs.discrete:
        whole = getattr(config, "is_encoder_decoder", False) and not context.adapter.signature.prefix
        if whole or not getattr(model, "can_generate", lambda: False)():
            return None
        return partial(_with_transformers_cache, context), not is_stateful(model)
    return None


def _by_step(context: Context, inputs: Inputs, sizes: Sequence[int]) -> Rows:
    step: Any = context.options.step
    signature, rows, state = context.adapter.signature, [], None
    width = context.base.shape[-1]
    with without_gradients():
        for t in range(inputs.n):
            value, axis = signature.sequence(inputs.sequences[0][:, t : t + 1]), signature.position_axes[0]
            token = value.select(axis, 0) if hasattr(value, "select") else np.take(value, 0, axis=axis)
            result = step(state, token)
            if not isinstance(result, (tuple, list)) or len(result) != 2:
                raise TypeError(f"step returned a {type(result).__name__}, expected (output, state)")
            answer, state = result
            answer = answer.detach().cpu().double().numpy() if hasattr(answer, "detach") else np.asarray(answer)
            if answer.size != inputs.batch * width:
                raise ValueError(
                    f"step answers {answer.shape}, expected {inputs.batch} x {width} numbers at each position"
                )
            rows.append(answer.reshape(inputs.batch, 1, -1))
    return np.concatenate(rows, axis=1).astype(context.base.dtype)


def _with_own_cache(context: Context, inputs: Inputs, sizes: Sequence[int]) -> Rows:
    cache = stepwise_cache(context.adapter.model, inputs.batch)
    parts = (inputs.span(start, stop) for start, stop in pairwise(accumulate(sizes, initial=0)))
    rows = [context.adapter(replace(part, options={"cache": cache})) for part in parts]
    return np.concatenate(rows, axis=1)


def _with_transformers_cache(context: Context, inputs: Inputs, sizes: Sequence[int]) -> Rows:
    adapter, rows = context.adapter, []
    cache: dict[str, Any] = {}
    for start, stop in pairwise(accumulate(sizes, initial=0)):
        options: dict[str, Any] = {"use_cache": True, **cache}
        masked = False
        for name, value in inputs.options.items():  # a padding mask covers all that came, positions only what comes
            is_mask = name.endswith("attention_mask")
            options[name] = value[:, 0 if is_mask else start : stop]
            masked |= is_mask
        part = replace(inputs.span(start, stop), options=options, settings={})
        answer = adapter.answer(part)
        kind = next((name for name in _CACHES if getattr(answer, name, None) is not None), None)
        if kind is None:
            raise LookupError("the model returned no cache")
        if kind != "past_key_values" and masked and start:
            raise LookupError("how this state is decoded together with a padding mask is not known")
        cache = {kind: getattr(answer, kind)}
        rows.append(adapter.rows(answer, part))
    return np.concatenate(rows, axis=1)

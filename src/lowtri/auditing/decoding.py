"""Ways to decode: parts of a sequence appended one after another, with a state between them.

Models with `make_cache(batch)` and `model(ids, cache=...)` are recognised, and those with `model(ids, past_key_values=...)` as
transformers has it. Others need `step(state, x) -> (output, state)`, where x is one position, ids (B,) or vectors (B, D), or any
number of them, (B, n) or (B, n, D).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from lowtri.auditing.context import Context
from lowtri.auditing.inputs import Inputs
from lowtri.auditing.pads import pad_keyword
from lowtri.auditing.system import Rows, without_gradients
from lowtri.compat.transformers_private import is_stateful
from lowtri.generation.models import stepwise_cache

__all__ = ["Decoder", "decoder_of"]

_CACHES = ("past_key_values", "cache_params", "state", "mems")
_DRAFT = 2  # tokens that are appended and cropped again


@dataclass(frozen=True)
class Decoder:
    """How a model decodes."""

    run: Callable[
        ..., Rows
    ]  # (inputs, sizes, draft=None): the rows, with each part of `sizes` positions appended at once
    several: bool  # whether a part may have several positions
    prompt: bool = True  # whether the first part may
    crops: bool = False
    masked: bool = False  # whether the padding mask of the example is passed on


def decoder_of(context: Context) -> Decoder | None:
    """How this model decodes; None if that is not known."""
    model, system = context.system.model, context.system
    if context.options.step is not None:
        slices = _takes_slices(context)
        several = context.options.prefill is not None or slices
        return Decoder(partial(_by_step, context, slices), slices, several)
    if hasattr(model, "make_cache") and system.accepts("cache"):
        return Decoder(partial(_with_own_cache, context), True, crops=True)
    config = getattr(model, "config", None)
    if config is not None and hasattr(model, "generate") and context.inputs.discrete:
        whole = getattr(config, "is_encoder_decoder", False) and not system.signature.prefix
        if whole or not getattr(model, "can_generate", lambda: False)():
            return None
        stateful = is_stateful(model)
        return Decoder(partial(_with_past, context), not stateful, crops=not stateful, masked=True)
    if system.accepts("past_key_values") and system.accepts("use_cache"):
        return Decoder(partial(_with_past, context), True, crops=True, masked=True)
    return None


def _takes_slices(context: Context) -> bool:
    """Whether `step` takes several positions at once: where all at once, from nothing, equal the whole, or where it takes no single
    one."""
    try:
        rows = _by_step(context, True, context.inputs, [context.n])
        if context.compare(rows, ~context.ignored).status != "leak":
            return True
    except Exception:
        pass
    first = context.inputs.span(0, 1)
    try:
        _by_step(context, False, first, [1])
        return False
    except Exception:
        try:
            return len(_by_step(context, True, first, [1])) > 0
        except Exception:
            return False


def _by_step(context: Context, slices: bool, inputs: Inputs, sizes: Sequence[int], draft: Inputs | None = None) -> Rows:
    step: Any = context.options.step
    prefill: Any = context.options.prefill
    signature, rows, state = context.system.signature, [], None
    width = context.base.shape[-1]
    with without_gradients():
        for start, stop in pairwise(accumulate(sizes, initial=0)):
            value, axis = signature.sequence(inputs.sequences[0][:, start:stop]), signature.position_axes[0]
            if prefill is not None and start == 0:
                name, result = "prefill", prefill(value)
            else:
                if not slices:
                    value = value.select(axis, 0) if hasattr(value, "select") else np.take(value, 0, axis=axis)
                name, result = "step", step(state, value)
            if not isinstance(result, (tuple, list)) or len(result) != 2:
                raise TypeError(f"{name} returned a {type(result).__name__}, expected (output, state)")
            answer, state = result
            answer = answer.detach().cpu().double().numpy() if hasattr(answer, "detach") else np.asarray(answer)
            if answer.size != inputs.batch * (stop - start) * width:
                each = "at each position" if stop - start == 1 else f"for {stop - start} positions"
                raise ValueError(f"{name} answers {answer.shape}, expected {inputs.batch} x {width} numbers {each}")
            rows.append(answer.reshape(inputs.batch, stop - start, -1))
    return np.concatenate(rows, axis=1).astype(context.base.dtype)


def _with_own_cache(context: Context, inputs: Inputs, sizes: Sequence[int], draft: Inputs | None = None) -> Rows:
    cache, rows = stepwise_cache(context.system.model, inputs.batch), []
    for start, stop in pairwise(accumulate(sizes, initial=0)):
        options = {**inputs.options, "cache": cache}
        if draft is not None and start:
            context.system(replace(draft.span(start, min(start + _DRAFT, inputs.n)), options=options))
            cache.crop(start)
        rows.append(context.system(replace(inputs.part(start, stop, ()), options=options)))
    return np.concatenate(rows, axis=1)


def _with_past(context: Context, inputs: Inputs, sizes: Sequence[int], draft: Inputs | None = None) -> Rows:
    system, rows = context.system, []
    cache: dict[str, Any] = {}
    keyword = pad_keyword(context)

    def appended(source: Inputs, start: int, stop: int) -> Rows:
        nonlocal cache
        # A cache of keys needs the padding mask of all that came; a recurrent state that of what comes.
        whole = () if cache and "past_key_values" not in cache else (keyword,)
        part = source.part(start, stop, whole)
        part = replace(part, options={**part.options, "use_cache": True, **cache})
        answer = system.answer(part)
        cache = _cache_of(answer)
        return system.rows(answer, part)

    for start, stop in pairwise(accumulate(sizes, initial=0)):
        if draft is not None and start:
            end = min(start + _DRAFT, inputs.n)
            appended(draft, start, end)
            kept = next(iter(cache.values()))
            # transformers counts what to remove, below zero; others say how many stay.
            kept.crop(start - end if hasattr(kept, "get_seq_length") else start)
        rows.append(appended(inputs, start, stop))
    return np.concatenate(rows, axis=1)


def _cache_of(answer: Any) -> dict[str, Any]:
    for name in _CACHES:
        value = answer.get(name) if isinstance(answer, dict) else getattr(answer, name, None)
        if value is not None:
            return {name: value}
    if isinstance(answer, (tuple, list)) and len(answer) > 1 and answer[1] is not None:
        return {"past_key_values": answer[1]}
    raise LookupError("the model returned no cache")

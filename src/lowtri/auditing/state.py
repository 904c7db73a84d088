"""The trial of state: a model that has been called must answer as a copy that never was."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from lowtri.auditing.context import Context, Need
from lowtri.auditing.finding import Difference, Finding, Leak, compare, moves
from lowtri.auditing.inputs import Inputs
from lowtri.auditing.longer import extended
from lowtri.auditing.system import Rows, System
from lowtri.auditing.trial import Trial, watch

__all__ = ["STATE"]


def _state(context: Context) -> Finding:
    """Call copies with other inputs first, and compare what they then answer with the first answer of a copy."""
    first, measured = _after(context)[1], {"histories": list[str]()}
    earlier = list[tuple[str, Inputs]]()
    for words, inputs in _histories(context):
        try:
            rows = _after(context, inputs)[1]
        except Exception:
            continue
        earlier.append((words, inputs))
        measured["histories"].append(words)
        if _differs(context, first, rows).status == "leak":
            return _judged(context, first, earlier, measured)
    unseen = context.fresh(940)
    difference = _differs(context, _copy(context)(unseen), context.system(unseen))
    if difference.status == "leak":
        return _leak(context, difference, "the calls of this audit", context.system, unseen, measured)
    calls = f"another input, {len(earlier)} kinds of calls before it, and the whole audit"
    return Finding("clean", f"a used model answers as one that was never called ({calls})", (), measured)


def _judged(context: Context, first: Rows, earlier: list[tuple[str, Inputs]], measured: dict[str, Any]) -> Finding:
    """Whether an answer depends on what came in earlier calls, and not only on how many there were."""
    reference = first
    one, other = (_after(context, context.fresh(salt))[1] for salt in (900, 905))
    if _differs(context, one, other).status == "clean" and _differs(context, first, one).status != "clean":
        # Another call changes the answer whatever it is given: a count, or random numbers of the model's own.
        reference = one
        earlier = [(words, inputs) for words, inputs in earlier if inputs.n == context.n]
    for words, inputs in earlier:
        system, rows = _after(context, inputs)
        difference = _differs(context, reference, rows)
        if difference.status == "leak":
            return _leak(context, difference, words, system, context.inputs, measured)
    return Finding("skipped", "each call changes the answer, whatever it is given", (), measured)


def _leak(
    context: Context, difference: Difference, words: str, used: System, inputs: Inputs, measured: dict[str, Any]
) -> Finding:
    row, query, size = difference.first(of_all_rows=True)
    note = f"the model keeps state between calls: after {words}, output {query} {moves(size)}"
    leak = Leak(query, query, size, row, note=note)
    fresh = replace(context, system=_copy(context))
    pair = watch(fresh, inputs, row, query), watch(replace(context, system=used), inputs, row, query)
    return Finding("leak", note, (leak,), {**measured, "greatest": size}, watch=pair)


def _copy(context: Context) -> System:
    return replace(context.system, model=copy.deepcopy(context.pristine))


def _after(context: Context, *earlier: Inputs) -> tuple[System, Rows]:
    """A copy that was called with these inputs, and then its rows of the example."""
    system = _copy(context)
    for inputs in earlier:
        system(inputs)
    return system, system(context.inputs)


def _differs(context: Context, before: Rows, after: Rows) -> Difference:
    # The model's own noise is no measure: state shows as noise.
    return compare(before, after, replace(context.noise, repeat=0.0, reorder=0.0), ~context.ignored)


def _histories(context: Context) -> Iterator[tuple[str, Inputs]]:
    """What may be called before the example: (words, inputs)."""
    inputs, n, positions = context.inputs, context.n, np.arange(context.n)
    yield "a call with other inputs", context.fresh(900)
    yield "a call with the same first position", inputs.change(positions > 0, context.fresh(903))
    yield "a call with another second half", inputs.change(positions >= n // 2, context.fresh(901))
    yield "a call with another first half", inputs.change(positions < n // 2, context.fresh(902))
    yield "a call with a shorter input", inputs.span(0, n // 2)
    for key, value in {**inputs.per_row, **inputs.settings}.items():
        moved = value.roll(1, 0) if hasattr(value, "roll") else np.roll(value, 1, 0)
        if getattr(value, "ndim", 0) > 1 and value.dtype != bool:
            changed = (value + moved) if "float" in str(value.dtype) else moved
            per_row, settings = (
                {name: changed if name == key else old for name, old in part.items()}
                for part in (inputs.per_row, inputs.settings)
            )
            yield f"a call with another {key}", replace(inputs, per_row=per_row, settings=settings)
    with contextlib.suppress(Exception):  # what the model takes may not be known
        yield "a call with a longer input", extended(context, max(256, 2 * n)).inputs


def _no_copy(context: Context) -> str | None:
    return None if context.pristine is not None else "the model cannot be copied before its first call"


STATE = Trial(
    name="state",
    does="calls copies of the model with other, longer and shorter inputs first",
    finds="state that one call leaves to the next",
    function=_state,
    needs=(Need("a torch module", _no_copy),),
)

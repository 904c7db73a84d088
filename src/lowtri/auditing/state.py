"""The probe of state that one call leaves to the next."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from lowtri.auditing.conditions import extended
from lowtri.auditing.context import Context, Movement, Run, compare
from lowtri.auditing.example import Inputs
from lowtri.auditing.model_under_test import ModelUnderTest
from lowtri.auditing.probe import Leak, ProbeResult, Skipped, describe_movement, probe


@probe(
    "state",
    "calls copies of the model with other, longer and shorter inputs first",
    "state that one call leaves to the next",
    needs="a torch module",
)
def state(context: Context) -> ProbeResult:
    """Call copies with other inputs first, and compare what they then answer with the first answer of a copy."""
    if context.fresh_copy is None:
        raise Skipped("the model cannot be copied before its first call")
    first, histories = _used(context), list[tuple[str, Inputs]]()
    measured = {"histories": list[str]()}
    differs = False
    for words, inputs in _histories(context):
        try:
            run = _used(context, inputs)
        except Exception:
            continue
        histories.append((words, inputs))
        measured["histories"].append(words)
        differs = _difference(context, first, run).status == "leak"
        if differs:
            break
    if not differs:
        calls = f"another input, {len(histories)} kinds of calls before it"
        return ProbeResult(
            "clean", f"a used model has the outputs of one that was never called ({calls})", (), measured
        )
    one, other = (_used(context, context.fresh(salt)) for salt in (900, 905))
    if _difference(context, one, other).status == "clean" and _difference(context, first, one).status != "clean":
        # Another call changes the answer whatever it is given: a count, or random numbers of the model's own.
        first, histories = one, [(words, inputs) for words, inputs in histories if inputs.n == context.n]
    for words, inputs in histories:
        found = _found(context, words, first, _used(context, inputs))
        if found is not None:
            return replace(found, measured={**measured, **found.measured})
    raise Skipped("each call changes the output, whatever its input", measured)


def state_after(context: Context) -> ProbeResult | None:
    """What the calls of the whole audit have left behind, where that shows."""
    unseen = context.fresh(940)
    found = _found(context, "the calls of this audit", Run(_copy(context), unseen), context.run(unseen))
    return None if found is None else replace(found, probe="state", leaks=_probed(found.leaks))


def _probed(leaks: tuple[Leak, ...]) -> tuple[Leak, ...]:
    return tuple(replace(leak, probe="state") for leak in leaks)


def _found(context: Context, words: str, before: Run, run: Run) -> ProbeResult | None:
    difference = _difference(context, before, run)
    if difference.status != "leak":
        return None
    row, query, size = difference.first(of_all_rows=True)
    note = f"the model keeps state between calls: after {words}, output {query} {describe_movement(size)}"
    pair = Run(_copy(context), run.inputs).watch(row, query), run.watch(row, query)
    return ProbeResult("leak", note, (Leak(query, query, size, row, note=note),), {"greatest": size}, watch=pair)


def _copy(context: Context) -> ModelUnderTest:
    return replace(context.tested, model=copy.deepcopy(context.fresh_copy))


def _used(context: Context, *earlier: Inputs) -> Run:
    """The run on the example of a copy that was called with these inputs before."""
    tested = _copy(context)
    for inputs in earlier:
        tested(inputs)
    run = Run(tested, context.inputs)
    run.output  # noqa: B018 (run now)
    return run


def _difference(context: Context, before: Run, after: Run) -> Movement:
    # The model's own noise is no measure: state shows as noise.
    quiet = replace(context.noise, repeat=0.0, reorder=0.0)
    return compare(before.output, after.output, quiet, ~context.ignored)


def _histories(context: Context) -> Iterator[tuple[str, Inputs]]:
    """What may be called before the example: (words, inputs)."""
    inputs, n = context.inputs, context.n
    positions = np.arange(n)
    yield "a call with other inputs", context.fresh(900)
    yield "a call with the same first position", inputs.change(positions > 0, context.fresh(903))
    yield "a call with another second half", inputs.change(positions >= n // 2, context.fresh(901))
    yield "a call with another first half", inputs.change(positions < n // 2, context.fresh(902))
    yield "a call with a shorter input", inputs.span(0, n // 2)
    for key, value in {**inputs.per_row, **inputs.settings}.items():
        moved = value.roll(1, 0) if hasattr(value, "roll") else np.roll(value, 1, 0)
        if getattr(value, "ndim", 0) > 1 and value.dtype != bool:
            changed = {key: (value + moved) if "float" in str(value.dtype) else moved}
            other = (
                replace(inputs, per_row={**inputs.per_row, **changed})
                if key in inputs.per_row
                else inputs.having(changed)
            )
            yield f"a call with another {key}", other
    with contextlib.suppress(Exception):  # what the model takes may not be known
        yield "a call with a longer input", extended(context, max(256, 2 * n)).inputs

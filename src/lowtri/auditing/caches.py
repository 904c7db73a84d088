"""The trial of caches, in which every way to decode must equal the whole forward pass, and that of state kept between calls.

Models with `make_cache(batch)` and `model(ids, cache=...)` are recognised, and those that take and return their cache as transformers
has it. Others need `step(state, x) -> (output, state)`, where x is one position, ids (B,) or vectors (B, D), or any
number of them, (B, n) or (B, n, D).
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from lowtri.auditing.conditions import extended
from lowtri.auditing.context import Context, Difference, Run, compare, describe_difference, movement
from lowtri.auditing.system import Bools, Inputs, Rows, System, first_line, parameters, without_gradients
from lowtri.auditing.trial import Case, Cases, Finding, Leak, Skipped, Summary, describe_movement, trial
from lowtri.auditing.trials import pad_keyword
from lowtri.compat.model_caches import cache_argument, cache_of, crop_cache, needs_whole_mask
from lowtri.compat.transformers_private import is_stateful
from lowtri.generation.models import stepwise_cache

_DRAFT = 2  # tokens that are appended and cropped again


# The rows of the positions from a start to a stop, appended to those before.
Append = Callable[[Inputs, int, int], Rows]
Crop = Callable[[int, int], object]  # drops the positions from a start to an end


@dataclass(frozen=True)
class Decoder:
    """How a model decodes."""

    start: Callable[[int], tuple[Append, Crop]]  # of a number of rows
    several: bool  # whether a part may have several positions
    prompt: bool = True  # whether the first part may
    crops: bool = False
    masked: bool = False  # whether the padding mask of the example is passed on
    pads_in_prompt: bool = False  # whether pads come in the first part only, as `generate` gives them

    def run(self, inputs: Inputs, sizes: Sequence[int], draft: Inputs | None = None) -> Rows:
        """The rows, each part of `sizes` appended at once; with a draft, some of its positions are appended first and cropped."""
        append, crop = self.start(inputs.batch)
        rows = []
        with without_gradients():
            for start, stop in pairwise(accumulate(sizes, initial=0)):
                if draft is not None and start:
                    end = min(start + _DRAFT, inputs.n)
                    append(draft, start, end)
                    crop(start, end)
                rows.append(append(inputs, start, stop))
        return np.concatenate(rows, axis=1)


def _decoder(context: Context) -> Decoder | None:
    """How this model decodes; None if that is not known."""
    model, system = context.system.model, context.system
    if context.options.step is not None:
        slices = _takes_slices(context)
        return Decoder(partial(_by_step, context, slices), slices, context.options.prefill is not None or slices)
    if hasattr(model, "make_cache") and system.accepts("cache"):
        return Decoder(partial(_with_own_cache, context), True, crops=True)
    past, config = partial(_with_past, context), getattr(model, "config", None)
    if config is not None and hasattr(model, "generate") and context.inputs.discrete:
        whole = getattr(config, "is_encoder_decoder", False) and not system.signature.prefix
        if whole or not getattr(model, "can_generate", lambda: False)():
            return None
        slices = not is_stateful(model)
        return Decoder(past, slices, crops=slices, masked=True, pads_in_prompt=True)
    if cache_argument(parameters(model), model) is not None and system.accepts("use_cache"):
        return Decoder(past, True, crops=True, masked=True)
    return None


def _takes_slices(context: Context) -> bool:
    """Whether `step` takes several positions at once: where all at once, from nothing, equal the whole, or where it takes no single
    one."""
    one, several = (Decoder(partial(_by_step, context, slices), slices) for slices in (False, True))
    first = context.inputs.span(0, 1)
    with contextlib.suppress(Exception):
        if context.compare(several.run(context.inputs, [context.n]), ~context.ignored).status != "leak":
            return True
    with contextlib.suppress(Exception):
        one.run(first, [1])
        return False
    with contextlib.suppress(Exception):
        return len(several.run(first, [1])) > 0
    return False


def _by_step(context: Context, slices: bool, batch: int) -> tuple[Append, Crop]:
    step, prefill, signature = context.options.step, context.options.prefill, context.system.signature
    state: Any = None

    def append(inputs: Inputs, start: int, stop: int) -> Rows:
        nonlocal state
        value, axis = signature.sequence(inputs.sequences[0][:, start:stop]), signature.position_axes[0]
        if prefill is not None and start == 0:
            name, result = "prefill", prefill(value)
        else:
            if not slices:
                value = value.select(axis, 0) if hasattr(value, "select") else np.take(value, 0, axis=axis)
            name, result = "step", step(state, value)  # type: ignore[misc]
        if not isinstance(result, (tuple, list)) or len(result) != 2:
            raise TypeError(f"{name} returned a {type(result).__name__}, expected (output, state)")
        answer, state = result
        answer = answer.detach().cpu().double().numpy() if hasattr(answer, "detach") else np.asarray(answer)
        width = context.base.shape[-1]
        if answer.size != batch * (stop - start) * width:
            each = "at each position" if stop - start == 1 else f"for {stop - start} positions"
            raise ValueError(f"{name} answers {answer.shape}, expected {batch} x {width} numbers {each}")
        return np.asarray(answer.reshape(batch, stop - start, -1).astype(context.base.dtype))

    return append, lambda start, end: None


def _with_own_cache(context: Context, batch: int) -> tuple[Append, Crop]:
    cache = stepwise_cache(context.system.model, batch)

    def append(inputs: Inputs, start: int, stop: int) -> Rows:
        return context.system(inputs.at(np.arange(start, stop), np.arange(stop)).having({"cache": cache}))

    return append, lambda start, end: cache.crop(start)


def _with_past(context: Context, batch: int) -> tuple[Append, Crop]:
    system, cache = context.system, dict[str, Any]()
    unnamed = cache_argument(parameters(system.model), system.model) or "past_key_values"

    def append(inputs: Inputs, start: int, stop: int) -> Rows:
        nonlocal cache
        of_new_tokens = any(not needs_whole_mask(kept, name) for name, kept in cache.items())
        whole = () if of_new_tokens else (pad_keyword(context),)
        part = inputs.at(np.arange(start, stop), np.arange(stop), whole).having({"use_cache": True, **cache})
        answer = system.answer(part)
        found = cache_of(answer)
        if found is None:
            raise LookupError("the model returned no cache")
        cache = {found[0] or unnamed: found[1]}
        return system.rows(answer, part)

    return append, lambda start, end: crop_cache(next(iter(cache.values())), start, end)


@trial(
    "cache",
    "decodes one by one, after a prompt, in uneven chunks, after a rejected draft and with rows of unequal lengths "
    "(`step=` and `prefill=` for your own decoding); compares positions whose visible inputs have all been appended",
    "caches whose outputs differ from the full forward pass",
    needs="a cache",
    reshapes=True,
    argument="step",
)
def cache(context: Context) -> Cases:
    """One position at a time, after prompts and in uneven chunks, with pads and after a rejected draft, against the whole."""
    decoder, n = _required_decoder(context), context.n
    ways = {"one at a time": [1] * n}
    if decoder.prompt:
        ways["after a prompt"] = [n // 2] + [1] * (n - n // 2)
    if decoder.several:
        ends = [*(end for end in accumulate([3, 1, 4, 2] * n) if end < n), n]
        ways["in chunks"] = [stop - start for start, stop in pairwise([0, *ends])]
    tried, failing, refused = list[str](), list[_Way](), dict[str, str]()
    # A decoder that gets no padding mask computes nothing that can be compared after a pad.
    real = ~context.ignored if decoder.masked else np.logical_and.accumulate(~context.ignored, axis=1)
    ahead = [words for words, sizes in ways.items() if not _complete(context, sizes).any()]
    for words, sizes in ways.items():
        for salt in (None, 400) if words not in ahead else ():
            before = context.example if salt is None else context.run(context.fresh(salt))
            before.output  # noqa: B018 (run, since only the decoding may refuse)
            way = _Way(context, decoder, words, sizes, before, real, tried, refused)
            difference = yield way.case()
            if difference is None or difference.status != "clean":
                failing += [] if difference is None else [way]
                break
    warning = ""
    if not failing and "after a prompt" in tried:
        if decoder.crops and decoder.several:
            halves, words = [n // 2, n - n // 2], "after a rejected draft"
            way = _Way(context, decoder, words, halves, context.example, real, tried, {}, context.fresh(403))
            yield way.case()
        keyword = pad_keyword(context)
        own_pads = not context.real.all() or keyword in context.inputs.settings or context.options.pad_mask is not None
        for words, inputs, marked in _unequal(context) if decoder.masked else ():
            sizes, before = ways["after a prompt"], context.run(inputs)
            way = _Way(context, decoder, words, sizes, before, marked, tried, {})
            difference = yield replace(way.case(), noted=own_pads)
            if not own_pads and difference is not None and difference.status == "leak":
                _, query, size = difference.first()
                differs = f"differs from the whole forward at position {query}, {describe_difference(size, '')}"
                warning = f"{words}, cached decoding {differs}; without pads they agree"
    if failing and _agree_with_positions(context, failing):
        warning = "cached decoding differs from the whole forward, unless position_ids are passed"
    measured = {"ways": tried, "refused": refused, "length": n}
    if not tried:
        early = f"the mask shows inputs that are not yet appended when decoding {' or '.join(ahead)}"
        raise Skipped(f"cached decoding does not run: {next(iter(refused.values()))}" if refused else early, measured)
    clean = f"cached decoding equals the whole forward ({', '.join(tried)})"
    return Summary(clean, "cached decoding differs from the whole forward", measured, warning)


def _required_decoder(context: Context) -> Decoder:
    step, system = context.options.step, context.system
    copied = step is system.model or getattr(step, "__self__", None) is system.model
    if step is not None and system.signature.float64 and system.module is not None and not copied:
        raise Skipped("step= keeps its own precision")
    if context.noise.random:
        raise Skipped("the model draws random numbers, and steps draw others")
    decoder = _decoder(context)
    if decoder is None:
        raise Skipped("how this model decodes with a cache is not known (say step=)")
    return decoder


@dataclass(frozen=True)
class _Way:
    """One way to decode one input."""

    context: Context
    decoder: Decoder
    words: str
    sizes: list[int]
    before: Run  # the whole forward
    real: Bools  # the positions that are compared, as far as they are complete
    tried: list[str]
    refused: dict[str, str]
    draft: Inputs | None = None

    def case(self) -> Case:
        """The case of this way, against the whole forward."""
        calls = None if self.context.options.step is not None or self.draft is not None else self.sizes
        run = Run(self.context.system, self.before.inputs, self.rows, calls)
        return Case(run, self.where, self.note, self.key_that_differs, self.before, earliest=True)

    def rows(self) -> Rows:
        try:
            rows = self.decoder.run(self.before.inputs, self.sizes, self.draft)
        except Exception as error:
            self.refused[self.words] = first_line(error)
            raise
        if self.words not in self.tried:
            self.tried.append(self.words)
        return rows

    @property
    def where(self) -> Bools:
        """The positions (B, N) to compare: before the first pad that is given alone, where pads come in a prompt only. Convolutions
        and recurrent states have no place for it, and not all of these models say that they have a state."""
        alone = ~self.real & (np.arange(self.context.n) >= self.sizes[0]) & self.decoder.pads_in_prompt
        return self.real & _complete(self.context, self.sizes) & ~np.logical_or.accumulate(alone, axis=1)

    def note(self, leak: Leak) -> str:
        differs = describe_difference(leak.size, "")
        note = f"decoding {self.words} differs from the whole forward from position {leak.query} on, {differs}"
        return note + (f"; the two disagree whether it sees position {leak.key}" if leak.key != leak.query else "")

    def key_that_differs(self, row: int, query: int) -> int:
        """The first key that only one of the two sees from `query`; the query itself if there is none."""
        context, inputs, fresh = self.context, self.before.inputs, self.context.fresh(401)
        with contextlib.suppress(Exception):
            whole, rows = self.before.output, self.decoder.run(inputs, self.sizes)
            for key in (position for position in context.sample(24) if position <= query and self.draft is None):
                changed = inputs.change(np.arange(context.n) == key, fresh)
                in_whole = movement(whole, context.system(changed))[row, query]
                in_steps = movement(rows, self.decoder.run(changed, self.sizes))[row, query]
                if (in_whole > 0) != (in_steps > 0):
                    return int(key)
        return query


def _agree_with_positions(context: Context, failing: list[_Way]) -> bool:
    """Whether the ways that fail agree once position_ids are passed."""
    place = f"{context.system.signature.prefix}position_ids"
    if not context.system.accepts(place) or place in context.inputs.settings:
        return False
    positions = np.tile(np.arange(context.n), (context.inputs.batch, 1))
    try:
        for way in failing:
            placed = way.before.inputs.having({place: positions})
            rows = way.decoder.run(placed, way.sizes)
            if compare(context.system(placed), rows, context.noise, way.where).status != "clean":
                return False
    except Exception:
        return False
    return True


def _unequal(context: Context) -> Iterator[tuple[str, Inputs, Bools]]:
    """The example with rows of unequal lengths: (way, inputs, real positions)."""
    keyword, n, batch = pad_keyword(context) or "", context.n, context.inputs.batch
    given = context.inputs.settings.get(keyword)
    if not keyword.endswith("mask") or (given is not None and given.ndim != 2) or n < 4:
        return
    pads = np.minimum(1 + np.arange(batch), max(1, n // 4))[:, None]
    position = np.arange(n)
    holes = {"with pads on the left": (position < pads)} if context.real.all() else {}
    if not context.real[:, -1].all():
        holes["after a prompt with pads on the right"] = (position >= n // 2 - pads) & (position < n // 2)
    for way, hole in holes.items():
        real = np.broadcast_to(context.real, (batch, n)) & ~hole
        marks = ~real if keyword.endswith("key_padding_mask") else real
        settings = {keyword: marks.astype(np.int64 if given is None else given.dtype)}
        place = f"{context.system.signature.prefix}position_ids"
        if context.system.accepts(place) and place not in context.inputs.settings:
            settings[place] = np.maximum(np.cumsum(real, axis=1) - 1, 0)
        yield way, context.inputs.having(settings), real


def _complete(context: Context, sizes: list[int]) -> Bools:
    """Positions (1 or B, N) that see only what has come, and nothing that saw less than the mask shows it."""
    come = np.repeat(np.cumsum(sizes), sizes)  # how many inputs there are when a position is decoded
    early = np.any(context.allowed & (np.arange(context.n) >= come[:, None]), axis=-1)  # (1 or B, N)
    return np.asarray(~early & ~np.any(context.allowed & early[:, None, :], axis=-1))


@trial(
    "state",
    "calls copies of the model with other, longer and shorter inputs first",
    "state that one call leaves to the next",
    needs="a torch module",
)
def state(context: Context) -> Finding:
    """Call copies with other inputs first, and compare what they then answer with the first answer of a copy."""
    if context.pristine is None:
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
    if differs:
        one, other = (_used(context, context.fresh(salt)) for salt in (900, 905))
        if _difference(context, one, other).status == "clean" and _difference(context, first, one).status != "clean":
            # Another call changes the answer whatever it is given: a count, or random numbers of the model's own.
            first, histories = one, [(words, inputs) for words, inputs in histories if inputs.n == context.n]
        runs = ((words, first, _used(context, inputs)) for words, inputs in histories)
    else:
        unseen = context.fresh(940)
        runs = (("the calls of this audit", Run(_copy(context), unseen), context.run(unseen)) for _ in range(1))
    for words, before, run in runs:
        difference = _difference(context, before, run)
        if difference.status == "leak":
            row, query, size = difference.first(of_all_rows=True)
            note = f"the model keeps state between calls: after {words}, output {query} {describe_movement(size)}"
            pair = Run(_copy(context), run.inputs).watch(row, query), run.watch(row, query)
            return Finding(
                "leak", note, (Leak(query, query, size, row, note=note),), {**measured, "greatest": size}, watch=pair
            )
    if differs:
        raise Skipped("each call changes the output, whatever its input", measured)
    calls = f"another input, {len(histories)} kinds of calls before it, and the whole audit"
    return Finding("clean", f"a used model has the outputs of one that was never called ({calls})", (), measured)


def _copy(context: Context) -> System:
    return replace(context.system, model=copy.deepcopy(context.pristine))


def _used(context: Context, *earlier: Inputs) -> Run:
    """The run on the example of a copy that was called with these inputs before."""
    system = _copy(context)
    for inputs in earlier:
        system(inputs)
    run = Run(system, context.inputs)
    run.output  # noqa: B018 (run now)
    return run


def _difference(context: Context, before: Run, after: Run) -> Difference:
    # The model's own noise is no measure: state shows as noise.
    quiet = replace(context.noise, repeat=0.0, reorder=0.0)
    return compare(before.output, after.output, quiet, ~context.ignored)


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
            changed = {key: (value + moved) if "float" in str(value.dtype) else moved}
            other = (
                replace(inputs, per_row={**inputs.per_row, **changed})
                if key in inputs.per_row
                else inputs.having(changed)
            )
            yield f"a call with another {key}", other
    with contextlib.suppress(Exception):  # what the model takes may not be known
        yield "a call with a longer input", extended(context, max(256, 2 * n)).inputs

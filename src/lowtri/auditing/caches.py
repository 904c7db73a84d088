"""The trial of caches, in which every way to decode must equal the whole forward pass, and that of state kept between calls.

Models with `make_cache(batch)` and `model(ids, cache=...)` are recognised, and those with `model(ids, past_key_values=...)` as
transformers has it. Others need `step(state, x) -> (output, state)`, where x is one position, ids (B,) or vectors (B, D), or any
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
from lowtri.auditing.context import Bools, Context, Requirement
from lowtri.auditing.finding import Difference, Finding, Leak, compare, describe_difference, describe_movement, movement
from lowtri.auditing.inputs import Inputs, first_line
from lowtri.auditing.rows import pad_keyword
from lowtri.auditing.system import Rows, System, without_gradients
from lowtri.auditing.trial import Case, Cases, Summary, Trial, watch
from lowtri.compat.transformers_private import is_stateful
from lowtri.generation.models import stepwise_cache

_CACHES = ("past_key_values", "cache_params", "state", "mems")
_DRAFT = 2  # tokens that are appended and cropped again


@dataclass(frozen=True)
class Decoder:
    """How a model decodes."""

    # (inputs, sizes, draft=None): the rows, with each part of `sizes` positions appended at once
    run: Callable[..., Rows]
    several: bool  # whether a part may have several positions
    prompt: bool = True  # whether the first part may
    crops: bool = False
    masked: bool = False  # whether the padding mask of the example is passed on
    pads_in_prompt: bool = False  # whether pads come in the first part only, as `generate` gives them


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
        return Decoder(partial(_with_past, context), not stateful, True, not stateful, masked=True, pads_in_prompt=True)
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


def _appended(
    inputs: Inputs,
    sizes: Sequence[int],
    draft: Inputs | None,
    append: Callable[[Inputs, int, int], Rows],
    crop: Callable[[int, int], object] = lambda start, end: None,
) -> Rows:
    """The rows of `inputs`, appended in parts; with a draft, some of its positions are appended before each part and cropped."""
    rows = []
    for start, stop in pairwise(accumulate(sizes, initial=0)):
        if draft is not None and start:
            end = min(start + _DRAFT, inputs.n)
            append(draft, start, end)
            crop(start, end)
        rows.append(append(inputs, start, stop))
    return np.concatenate(rows, axis=1)


def _by_step(context: Context, slices: bool, inputs: Inputs, sizes: Sequence[int], draft: Inputs | None = None) -> Rows:
    step, prefill, signature = context.options.step, context.options.prefill, context.system.signature
    state: Any = None

    def append(source: Inputs, start: int, stop: int) -> Rows:
        nonlocal state
        value, axis = signature.sequence(source.sequences[0][:, start:stop]), signature.position_axes[0]
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
        if answer.size != source.batch * (stop - start) * width:
            each = "at each position" if stop - start == 1 else f"for {stop - start} positions"
            raise ValueError(f"{name} answers {answer.shape}, expected {source.batch} x {width} numbers {each}")
        return np.asarray(answer.reshape(source.batch, stop - start, -1).astype(context.base.dtype))

    with without_gradients():
        return _appended(inputs, sizes, draft, append)


def _with_own_cache(context: Context, inputs: Inputs, sizes: Sequence[int], draft: Inputs | None = None) -> Rows:
    cache = stepwise_cache(context.system.model, inputs.batch)

    def append(source: Inputs, start: int, stop: int) -> Rows:
        part = source.at(np.arange(start, stop), np.arange(stop))
        return context.system(replace(part, options={**part.options, "cache": cache}))

    return _appended(inputs, sizes, draft, append, lambda start, end: cache.crop(start))


def _with_past(context: Context, inputs: Inputs, sizes: Sequence[int], draft: Inputs | None = None) -> Rows:
    system, cache = context.system, dict[str, Any]()

    def append(source: Inputs, start: int, stop: int) -> Rows:
        nonlocal cache
        # A cache of keys needs the padding mask of all tokens so far; a recurrent state that of the new ones.
        whole = () if cache and "past_key_values" not in cache else (pad_keyword(context),)
        part = source.at(np.arange(start, stop), np.arange(stop), whole)
        part = replace(part, options={**part.options, "use_cache": True, **cache})
        answer = system.answer(part)
        cache = _cache_of(answer)
        return system.rows(answer, part)

    def crop(start: int, end: int) -> None:
        kept = next(iter(cache.values()))
        # transformers counts what to remove, below zero; others say how many stay.
        kept.crop(start - end if hasattr(kept, "get_seq_length") else start)

    return _appended(inputs, sizes, draft, append, crop)


def _cache_of(answer: Any) -> dict[str, Any]:
    for name in _CACHES:
        value = answer.get(name) if isinstance(answer, dict) else getattr(answer, name, None)
        if value is not None:
            return {name: value}
    if isinstance(answer, (tuple, list)) and len(answer) > 1 and answer[1] is not None:
        return {"past_key_values": answer[1]}
    raise LookupError("the model returned no cache")


def _cache(context: Context) -> Cases:
    """One position at a time, after prompts and in uneven chunks, with pads and after a rejected draft, against the whole."""
    decoder = decoder_of(context)
    assert decoder is not None  # see `_no_decoder`
    n = context.n
    ways = {"one at a time": [1] * n}
    if decoder.prompt:
        ways["after a prompt"] = [n // 2] + [1] * (n - n // 2)
    if decoder.several:
        ways["in chunks"] = _chunks(n)
    tried, failing, refused = list[str](), list[_Run](), dict[str, str]()
    ahead = [way for way, sizes in ways.items() if not _complete(context, sizes).any()]
    # A decoder that gets no padding mask computes nothing that can be compared after a pad.
    real = ~context.ignored if decoder.masked else np.logical_and.accumulate(~context.ignored, axis=1)
    for way, sizes in ways.items():
        for salt in (None, 400) if way not in ahead else ():
            inputs = context.inputs if salt is None else context.fresh(salt)
            whole = context.base if salt is None else context.system(inputs)
            run = _Run(context, decoder, way, sizes, inputs, real, tried, refused)
            difference = yield run.case(whole)
            if difference is None or difference.status != "clean":
                failing += [] if difference is None else [run]
                break
    warning = ""
    if not failing and "after a prompt" in tried:
        if decoder.crops and decoder.several:
            halves = [n // 2, n - n // 2]
            run = _Run(context, decoder, "after a rejected draft", halves, context.inputs, real, tried, {})
            yield replace(run, draft=context.fresh(403)).case(context.base)
        keyword = pad_keyword(context)
        own_pads = not context.real.all() or keyword in context.inputs.settings or context.options.pad_mask is not None
        for way, inputs, marked in _unequal(context) if decoder.masked else ():
            run = _Run(context, decoder, way, ways["after a prompt"], inputs, marked, tried, {})
            difference = yield replace(run.case(None), noted=own_pads)
            if not own_pads and difference is not None and difference.status == "leak":
                _, query, size = difference.first()
                warning = f"{way}, cached decoding differs from the whole forward at position {query}, {describe_difference(size, '')}"
                warning += "; without pads they agree"
    if failing and _agrees_with_positions(context, decoder, failing):
        warning = "cached decoding differs from the whole forward, unless position_ids are passed"
    measured = {"ways": tried, "refused": refused, "length": n}
    message = f"cached decoding does not run: {next(iter(refused.values()), 'no way to decode')}"
    if not refused:
        message = f"the mask shows inputs that are not yet appended when decoding {' or '.join(ahead)}"
    clean = f"cached decoding equals the whole forward ({', '.join(tried)})"
    leaks = "cached decoding differs from the whole forward"
    return Summary(clean, leaks, measured, "" if tried else message, warning)


@dataclass(frozen=True)
class _Run:
    """One way to decode one input."""

    context: Context
    decoder: Decoder
    way: str
    sizes: list[int]
    inputs: Inputs
    real: Bools  # the positions that are compared, as far as they are complete
    tried: list[str]
    refused: dict[str, str]
    draft: Inputs | None = None

    def __call__(self, inputs: Inputs) -> Rows:
        try:
            rows = self.decoder.run(inputs, self.sizes, self.draft)
        except Exception as error:
            self.refused[self.way] = first_line(error)
            raise
        if self.way not in self.tried:
            self.tried.append(self.way)
        return rows

    def case(self, whole: Rows | None) -> Case:
        """The case of this run, against the whole forward."""
        context = self.context
        try:
            expected = context.system(self.inputs) if whole is None else whole
        except Exception:
            expected = np.zeros((0, 0, 0))  # no rows agree in shape: refused
        return Case(self.inputs, self.where, self.leak, expected, self, earliest=True, watch=self.two)

    @property
    def where(self) -> Bools:
        """The positions (B, N) to compare: before the first pad that is given alone, where pads come in a prompt only. Convolutions
        and recurrent states have no place for it, and not all of these models say that they have a state."""
        alone = ~self.real & (np.arange(self.context.n) >= self.sizes[0]) & self.decoder.pads_in_prompt
        return self.real & _complete(self.context, self.sizes) & ~np.logical_or.accumulate(alone, axis=1)

    def leak(self, row: int, query: int, size: float) -> Leak:
        note = f"decoding {self.way} differs from the whole forward from position {query} on, {describe_difference(size, '')}"
        key = query if self.draft is not None else self.key_that_differs(row, query)
        if key != query:
            note += f"; the two disagree whether it sees position {key}"
        return Leak(query, key, size, row, note=note)

    def key_that_differs(self, row: int, query: int) -> int:
        """The first key that only one of the two sees from `query`; the query itself if there is none."""
        context, fresh = self.context, self.context.fresh(401)
        try:
            whole, rows = context.system(self.inputs), self.decoder.run(self.inputs, self.sizes, None)
            for key in (position for position in context.sample(24) if position <= query):
                changed = self.inputs.change(np.arange(context.n) == key, fresh)
                in_whole = movement(whole, context.system(changed))[row, query]
                in_steps = movement(rows, self.decoder.run(changed, self.sizes, None))[row, query]
                if (in_whole > 0) != (in_steps > 0):
                    return int(key)
        except Exception:
            return query
        return query

    def two(self, row: int, query: int) -> Any:
        """The whole forward, and the call that computes the position with the cache."""
        if self.context.system.module is None or self.context.options.step is not None or self.draft is not None:
            return None
        starts = np.cumsum([0, *self.sizes])
        call = int(np.searchsorted(starts, query, side="right")) - 1
        whole = watch(self.context, self.inputs, row, query)
        shape = (self.inputs.batch, self.sizes[call])
        part = whole._replace(position=query - int(starts[call]), shape=shape, call=call)
        return whole, part._replace(run=lambda: self.decoder.run(self.inputs, self.sizes, None))


def _agrees_with_positions(context: Context, decoder: Decoder, failing: list[_Run]) -> bool:
    """Whether the ways that fail agree once position_ids are passed."""
    place = f"{context.system.signature.prefix}position_ids"
    if not context.system.accepts(place) or place in context.inputs.options or place in context.inputs.settings:
        return False
    positions = np.tile(np.arange(context.n), (context.inputs.batch, 1))
    try:
        for run in failing:
            placed = replace(run.inputs, options={**run.inputs.options, place: positions})
            rows, where = decoder.run(placed, run.sizes, None), run.where
            if compare(context.system(placed), rows, context.noise, where).status != "clean":
                return False
    except Exception:
        return False
    return True


def _unequal(context: Context) -> Any:
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
        options = {**context.inputs.options, keyword: marks.astype(np.int64 if given is None else given.dtype)}
        place = f"{context.system.signature.prefix}position_ids"
        if context.system.accepts(place) and place not in context.inputs.settings:
            options[place] = np.maximum(np.cumsum(real, axis=1) - 1, 0)
        settings = {key: value for key, value in context.inputs.settings.items() if key != keyword}
        yield way, replace(context.inputs, settings=settings, options=options), real


def _no_decoder(context: Context) -> str | None:
    step, system = context.options.step, context.system
    copied = step is system.model or getattr(step, "__self__", None) is system.model
    if step is not None and system.signature.float64 and system.module is not None and not copied:
        return "step= keeps its own precision"
    if context.noise.random:
        return "the model draws random numbers, and steps draw others"
    return None if decoder_of(context) is not None else "how this model decodes with a cache is not known (say step=)"


def _chunks(n: int) -> list[int]:
    """Sizes of uneven chunks that make up n positions."""
    sizes: list[int] = []
    while sum(sizes) < n:
        sizes.append(min((3, 1, 4, 2)[len(sizes) % 4], n - sum(sizes)))
    return sizes


def _complete(context: Context, sizes: list[int]) -> Bools:
    """Positions (1 or B, N) that see only what has come, and nothing that saw less than the mask shows it."""
    come = np.repeat(np.cumsum(sizes), sizes)  # how many inputs there are when a position is decoded
    early = np.any(context.allowed & (np.arange(context.n) >= come[:, None]), axis=-1)  # (1 or B, N)
    return np.asarray(~early & ~np.any(context.allowed & early[:, None, :], axis=-1))


CACHE = Trial(
    name="cache",
    does="decodes one by one, after a prompt, in uneven chunks, after a rejected draft and with rows of unequal lengths "
    "(`step=` and `prefill=` for your own decoding); compares positions whose visible inputs have all been appended",
    finds="caches whose outputs differ from the full forward pass",
    function=_cache,
    needs=(Requirement("a cache", _no_decoder),),
    reshapes=True,
    argument="step",
)


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
    return Finding("clean", f"a used model has the outputs of one that was never called ({calls})", (), measured)


def _judged(context: Context, first: Rows, earlier: list[tuple[str, Inputs]], measured: dict[str, Any]) -> Finding:
    """Whether an answer depends on the inputs of earlier calls, and not only on their number."""
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
    return Finding("skipped", "each call changes the output, whatever its input", (), measured)


def _leak(
    context: Context, difference: Difference, words: str, used: System, inputs: Inputs, measured: dict[str, Any]
) -> Finding:
    row, query, size = difference.first(of_all_rows=True)
    note = f"the model keeps state between calls: after {words}, output {query} {describe_movement(size)}"
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


STATE = Trial(
    name="state",
    does="calls copies of the model with other, longer and shorter inputs first",
    finds="state that one call leaves to the next",
    function=_state,
    needs=(
        Requirement(
            "a torch module",
            lambda c: "the model cannot be copied before its first call" if c.pristine is None else None,
        ),
    ),
)

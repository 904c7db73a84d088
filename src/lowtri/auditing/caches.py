"""The probe of caches: every way to decode must equal the whole forward pass.

Models with `make_cache(batch)` and `model(ids, cache=...)` are recognised, and those that take and return their cache as transformers
has it. Others need `step(state, x) -> (output, state)`, where x is one position, ids (B,) or (B, 1) or vectors (B, D) or
(B, 1, D), or any number of them, (B, n) or (B, n, D). A model that has both is decoded both ways.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from lowtri.auditing.adapter import parameters
from lowtri.auditing.context import Context, Movement, Run, compare, describe_difference, movement
from lowtri.auditing.example import Bools, Inputs, Rows, first_line
from lowtri.auditing.neighbours import is_packed
from lowtri.auditing.pads import marks, pad_keyword
from lowtri.auditing.probe import Leak, PairOfRuns, PairsOfRuns, Skipped, Summary, probe
from lowtri.auditing.restoring import without_gradients
from lowtri.compat.model_caches import cache_argument, cache_of, crop_cache, needs_whole_mask
from lowtri.compat.transformers_private import is_stateful
from lowtri.generation.models import stepwise_cache

_OWN = "with its own cache"
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
    name: str = ""  # where the model can be decoded in several ways
    of_documents: bool = True  # whether it may know of documents; a cache of transformers does not
    counts_calls: bool = True  # whether each part is one call of the module
    remark: str = ""  # what was seen when its form was found out

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


def _decoders(context: Context) -> list[Decoder]:
    """How this model decodes: with `step=`, and with its own cache."""
    tested, step = context.tested, context.tested.adapter.step
    for name, function in (("step", step), ("prefill", tested.adapter.prefill)):
        copied = function is tested.model or getattr(function, "__self__", None) is tested.model
        if function is not None and tested.signature.float64 and tested.module is not None and not copied:
            raise Skipped(f"{name}= keeps its own precision")
    if context.noise.random:
        raise Skipped("the model draws random numbers, and steps draw others")
    own = _own_decoder(context)
    found = [] if step is None else [_step_decoder(context)]
    found += [] if own is None else [own]
    if not found:
        raise Skipped("how this model decodes with a cache cannot be inferred; pass step=")
    if len(found) == 2:
        found = [replace(one, name=name) for one, name in zip(found, ("with step=", _OWN), strict=True)]
    if is_packed(context):
        found = [one for one in found if one.of_documents]
        if not found:
            raise Skipped("the example is packed, and the model's cache knows nothing of documents")
    return found


def _own_decoder(context: Context) -> Decoder | None:
    """How this model decodes with its own cache; None if that is not known."""
    model, tested = context.tested.model, context.tested
    if hasattr(model, "make_cache") and tested.accepts("cache"):
        return Decoder(partial(_with_own_cache, context), True, crops=True)
    past, config = partial(_with_past, context), getattr(model, "config", None)
    if config is not None and hasattr(model, "generate") and context.inputs.discrete:
        whole = getattr(config, "is_encoder_decoder", False) and not tested.signature.prefix
        if whole or not getattr(model, "can_generate", lambda: False)():
            return None
        slices = not is_stateful(model)
        return Decoder(past, slices, crops=slices, masked=True, pads_in_prompt=True, of_documents=False)
    if cache_argument(parameters(model), model) is not None and tested.accepts("use_cache"):
        return Decoder(past, True, crops=True, masked=True, of_documents=False)
    return None


def _step_decoder(context: Context) -> Decoder:
    """What `step` takes: several positions at once, one without an axis, or one column.

    The first of them whose outputs are the whole forward's, else the first that runs.
    """
    n, prefill = context.n, context.tested.adapter.prefill is not None
    first = max(1, n // 2) if prefill else 1
    one_by_one = [first] + [1] * (n - first)

    def decoder(form: str, **more: Any) -> Decoder:
        several = form == "several"
        return Decoder(partial(_by_step, context, form, **more), several, prefill or several, counts_calls=False)

    def difference(decoder: Decoder, sizes: list[int]) -> Movement | None:
        """From the whole forward; None where the step refuses."""
        with contextlib.suppress(Exception):
            return context.compare(decoder.run(context.inputs, sizes), context.real)
        return None

    def equals(decoder: Decoder, sizes: list[int]) -> bool:
        moved = difference(decoder, sizes)
        return moved is not None and moved.status != "leak"

    at_once = difference(decoder("several", prefills=False), [n])
    if (at_once is not None and at_once.status != "leak") or equals(decoder("several"), [first, n - first]):
        return decoder("several")
    forms = [decoder(form) for form in ("one", "column", "several")]
    for one in forms[:2]:
        if equals(one, one_by_one):
            if at_once is None:
                return one
            differs = describe_difference(at_once.greatest)
            # A step of one position may well answer several, and another thing.
            return replace(one, remark=f"; with several positions at once step= differs, {differs}")
    for one in forms:
        with contextlib.suppress(Exception):
            one.run(context.inputs.span(0, first + 1), [first, 1])
            return one
    return forms[0]


def _by_step(context: Context, form: str, batch: int, *, prefills: bool = True) -> tuple[Append, Crop]:
    adapter, signature = context.tested.adapter, context.tested.signature
    state: Any = None

    def called(name: str, value: Any) -> Any:
        """The output and the state that `prefill` or `step` returns."""
        if name == "prefill":
            result = adapter.prefill(value)  # type: ignore[misc]
        else:
            if form == "one":
                axis = signature.position_axes[0]
                value = value.select(axis, 0) if hasattr(value, "select") else np.take(value, 0, axis=axis)
            result = adapter.step(state, value)  # type: ignore[misc]
        if not isinstance(result, (tuple, list)) or len(result) != 2:
            raise TypeError(f"{name} returned a {type(result).__name__}, expected (output, state)")
        return result

    def append(inputs: Inputs, start: int, stop: int) -> Rows:
        nonlocal state
        name = "prefill" if prefills and adapter.prefill is not None and start == 0 else "step"
        answer, state = called(name, signature.sequence(inputs.sequences[0][:, start:stop]))
        rows = answer.detach().cpu().double().numpy() if hasattr(answer, "detach") else np.asarray(answer)
        count, width = stop - start, context.base.shape[-1]
        if rows.size % (batch * count) == 0:
            rows = context.tested.narrowed(rows.reshape(batch, count, -1))
        if rows.size != batch * count * width:
            each = "at each position" if count == 1 else f"for {count} positions"
            raise ValueError(f"{name} answers {tuple(answer.shape)}, expected {batch} x {width} numbers {each}")
        return np.asarray(rows.reshape(batch, count, -1).astype(context.base.dtype))

    return append, lambda start, end: None


def _with_own_cache(context: Context, batch: int) -> tuple[Append, Crop]:
    cache = stepwise_cache(context.tested.model, batch)

    def append(inputs: Inputs, start: int, stop: int) -> Rows:
        return context.tested(inputs.at(np.arange(start, stop), np.arange(stop)).having({"cache": cache}))

    return append, lambda start, end: cache.crop(start)


def _with_past(context: Context, batch: int) -> tuple[Append, Crop]:
    tested, cache = context.tested, dict[str, Any]()
    unnamed = cache_argument(parameters(tested.model), tested.model) or "past_key_values"

    def append(inputs: Inputs, start: int, stop: int) -> Rows:
        nonlocal cache
        of_new_tokens = any(not needs_whole_mask(kept, name) for name, kept in cache.items())
        whole = () if of_new_tokens else (pad_keyword(context),)
        part = inputs.at(np.arange(start, stop), np.arange(stop), whole).having({"use_cache": True, **cache})
        answer = tested.answer(part)
        found = cache_of(answer)
        if found is None:
            raise LookupError("the model returned no cache")
        cache = {found[0] or unnamed: found[1]}
        return tested.rows(answer, part)

    return append, lambda start, end: crop_cache(next(iter(cache.values())), start, end)


@probe(
    "cache",
    "decodes one by one, after a prompt, in uneven chunks, after a rejected draft and with rows of unequal lengths "
    "(`step=` and `prefill=` for your own decoding); compares positions whose visible inputs have all been appended",
    "caches whose outputs differ from the full forward pass",
    needs="a cache",
    reshapes=True,
    argument="step",
)
def cache(context: Context) -> PairsOfRuns:
    tried: dict[str, Any] = {"ways": [], "refused": {}, "length": context.n}
    early, leaks = list[str](), False
    warning = remark = ""
    for decoder in _decoders(context):
        fails, words = yield from _decoded(context, decoder, tried, early)
        leaks |= fails
        warning = words or warning
        remark += decoder.remark
    if not tried["ways"] and tried["refused"]:
        raise Skipped(f"cached decoding does not run: {next(iter(tried['refused'].values()))}", tried)
    if not tried["ways"]:
        raise Skipped(f"the mask shows inputs that are not yet appended when decoding {' or '.join(early)}", tried)
    clean = f"cached decoding equals the whole forward ({', '.join(tried['ways'])}{remark})"
    # One decoder's warning takes back no other's leak.
    return Summary(clean, "cached decoding differs from the whole forward", tried, "" if leaks else warning)


def _decoded(
    context: Context, decoder: Decoder, tried: dict[str, Any], early: list[str]
) -> Generator[PairOfRuns, Movement | None, tuple[bool, str]]:
    """Every way to decode with one decoder; returns whether one of them differs, and a warning, or nothing.

    Args:
        tried: what became of each way, by its words.
        early: gets the ways in which every position sees inputs that come later.
    """
    n = context.n
    ways = {"one at a time": [1] * n}
    if decoder.prompt:
        ways["after a prompt"] = [n // 2] + [1] * (n - n // 2)
    if decoder.several:
        ends = [*(end for end in accumulate([3, 1, 4, 2] * n) if end < n), n]
        ways["in chunks"] = [stop - start for start, stop in pairwise([0, *ends])]

    def way_of(words: str, sizes: list[int], before: Run, real: Bools, draft: Inputs | None = None) -> _Way:
        named = f"{decoder.name}, {words}" if decoder.name else words
        optional = decoder.name == _OWN or words not in ways
        return _Way(context, decoder, named, sizes, before, real, tried, optional, draft)

    # A decoder that gets no padding mask computes nothing that can be compared after a pad.
    real = context.real if decoder.masked else np.logical_and.accumulate(context.real, axis=1)
    # Whether a difference is a leak is not known before the positions were passed.
    place = _unpassed_positions(context)
    failing, compared = list[tuple[_Way, PairOfRuns]](), set[str]()
    certain = False
    for words, sizes in ways.items():
        if not _complete(context, sizes).any():
            early.append(words)
            continue
        for salt in [None] if context.is_large else [None, 400]:
            before = context.example if salt is None else context.run(context.fresh(salt))
            before.output  # noqa: B018 (run, since only the decoding may refuse)
            way = way_of(words, sizes, before, real)
            pair = replace(way.pair(), is_leak=not place)
            difference = yield pair
            if difference is None:
                break
            compared.add(words)
            if difference.status != "clean":
                failing.append((way, pair))
                certain |= difference.status == "leak"
                break
    if certain and place and _agree_with_positions(context, [way for way, _ in failing], place):
        return False, "cached decoding differs from the whole forward, unless position_ids are passed"
    for _, pair in failing if place else ():
        yield replace(pair, is_leak=True)
    fails = bool(failing)
    if fails or "after a prompt" not in compared:
        return fails, ""
    if decoder.crops and decoder.several:
        halves = [n // 2, n - n // 2]
        difference = yield way_of("after a rejected draft", halves, context.example, real, context.fresh(403)).pair()
        fails |= difference is not None and difference.status != "clean"
    keyword, warning = pad_keyword(context), ""
    given = keyword in context.inputs.settings or context.tested.adapter.pads is not None
    own_pads = given or not context.real.all()
    for words, inputs, marked in _unequal(context) if decoder.masked else ():
        way = way_of(words, ways["after a prompt"], context.run(inputs), marked)
        difference = yield replace(way.pair(), is_leak=own_pads)
        fails |= own_pads and difference is not None and difference.status != "clean"
        if not own_pads and difference is not None and difference.status == "leak":
            _, query, size = difference.first()
            differs = f"differs from the whole forward at position {query}, {describe_difference(size, '')}"
            warning = f"{words}, cached decoding {differs}; without pads they agree"
    return fails, warning


@dataclass(frozen=True)
class _Way:
    """One way to decode one input."""

    context: Context
    decoder: Decoder
    words: str
    sizes: list[int]
    before: Run  # the whole forward
    real: Bools  # the positions that are compared, as far as they are complete
    tried: dict[str, Any]
    optional: bool  # a decoder that refuses it has not failed
    draft: Inputs | None = None

    def pair(self) -> PairOfRuns:
        """The two runs of this way: against the whole forward."""
        calls = self.sizes if self.decoder.counts_calls and self.draft is None else None
        run = Run(self.context.tested, self.before.inputs, self.rows, calls)
        return PairOfRuns(run, self.where, self.note, self.key_that_differs, self.before, first_position=True)

    def rows(self) -> Rows:
        try:
            rows = self.decoder.run(self.before.inputs, self.sizes, self.draft)
        except Exception as error:
            if not self.optional:
                self.tried["refused"][self.words] = first_line(error)
            raise
        if self.words not in self.tried["ways"]:
            self.tried["ways"].append(self.words)
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
        context, inputs = self.context, self.before.inputs
        fresh, come = context.fresh(401), np.repeat(np.cumsum(self.sizes), self.sizes)
        with contextlib.suppress(Exception):
            whole, rows = self.before.output, self.decoder.run(inputs, self.sizes)
            for key in (position for position in context.sample(24) if position < come[query] and self.draft is None):
                changed = inputs.change(np.arange(context.n) == key, fresh)
                in_whole = movement(whole, context.tested(changed))[row, query]
                in_steps = movement(rows, self.decoder.run(changed, self.sizes))[row, query]
                if (in_whole > 0) != (in_steps > 0):
                    return int(key)
        return query


def _unpassed_positions(context: Context) -> str:
    """The keyword of positions that the model takes and the example does not pass; else nothing."""
    place = f"{context.tested.signature.prefix}position_ids"
    return place if context.tested.accepts(place) and place not in context.inputs.settings else ""


def _agree_with_positions(context: Context, failing: list[_Way], place: str) -> bool:
    """Whether the ways that fail agree once positions are passed under this keyword."""
    positions = {place: np.tile(np.arange(context.n), (context.inputs.batch, 1))}
    placed = [replace(way, before=context.run(way.before.inputs.having(positions))) for way in failing]
    with contextlib.suppress(Exception):
        moved = (compare(way.before.output, way.rows(), context.noise, way.where) for way in placed)
        return all(one.status == "clean" for one in moved)
    return False


def _unequal(context: Context) -> Iterator[tuple[str, Inputs, Bools]]:
    """The example with rows of unequal lengths: (way, inputs, real positions)."""
    keyword = pad_keyword(context) or ""
    n, batch = context.n, context.inputs.batch
    given = context.inputs.settings.get(keyword)
    if not keyword.endswith("mask") or (given is not None and given.ndim != 2) or n < 4:
        return
    pads = np.minimum(1 + np.arange(batch), max(1, n // 4))[:, None]
    position = np.arange(n)
    holes = {"with pads on the left": (position < pads)} if context.real.all() else {}
    if not context.real[:, -1].all():
        holes["after a prompt with pads on the right"] = (position >= n // 2 - pads) & (position < n // 2)
    for way, hole in holes.items():
        real = context.real & ~hole
        settings = marks(context, keyword, real)
        if given is not None:
            settings[keyword] = settings[keyword].astype(given.dtype)
        kept = {key: value for key, value in context.inputs.settings.items() if key != keyword}
        yield way, context.inputs.having({**settings, **kept}), real


def _complete(context: Context, sizes: list[int]) -> Bools:
    """Positions (1 or B, N) that see only what has come, and nothing that saw less than the mask shows it."""
    come = np.repeat(np.cumsum(sizes), sizes)  # how many inputs there are when a position is decoded
    early = np.any(context.allowed & (np.arange(context.n) >= come[:, None]), axis=-1)  # (1 or B, N)
    return np.asarray(~early & ~np.any(context.allowed & early[:, None, :], axis=-1))

"""The trial of caches: every way to decode must equal the whole forward pass."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from lowtri.auditing.context import Context, Need
from lowtri.auditing.decoding import Decoder, decoder_of
from lowtri.auditing.finding import Leak, by, compare, movement
from lowtri.auditing.inputs import Inputs, first_line
from lowtri.auditing.options import Bools
from lowtri.auditing.pads import pad_keyword
from lowtri.auditing.system import Rows
from lowtri.auditing.trial import Case, Cases, Summary, Trial, watch

__all__ = ["CACHE"]


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
    real = _comparable(context, decoder)
    for done, (way, sizes) in enumerate(ways.items()):
        for salt in (None, 400) if way not in ahead else ():
            inputs = context.inputs if salt is None else context.fresh(salt)
            whole = context.base if salt is None else context.system(inputs)
            run = _Run(context, decoder, way, sizes, inputs, real, tried, refused)
            difference = yield run.case(whole)
            if difference is None or difference.status != "clean":
                failing += [] if difference is None else [run]
                break
        context.tick(done + 1, len(ways))
    warning = ""
    if not failing and "after a prompt" in tried:
        if decoder.crops and decoder.several:
            halves = [n // 2, n - n // 2]
            run = _Run(context, decoder, "after a rejected draft", halves, context.inputs, real, tried, {})
            yield replace(run, draft=context.fresh(403)).case(context.base)
        for way, inputs, marked in _unequal(context) if decoder.masked else ():
            run = _Run(context, decoder, way, ways["after a prompt"], inputs, marked, tried, {})
            if context.real.all() and not _declared(context):
                warning = run.warning() or warning
            else:
                yield run.case(None)
    if failing and _agrees_with_positions(context, decoder, failing):
        warning = "cached decoding differs from the whole forward, unless position_ids are passed"
    measured = {"ways": tried, "refused": refused, "length": n, **_window(context)}
    message = f"cached decoding does not run: {next(iter(refused.values()), 'no way to decode')}"
    if not refused:
        message = f"the mask shows inputs that are still to come when decoding {' or '.join(ahead)}"
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
        """The positions (B, N) to compare: before the first pad that is given alone to a recurrent state, which takes pads in a
        prompt only."""
        alone = ~self.real & (np.arange(self.context.n) >= self.sizes[0]) & (not self.decoder.several)
        return self.real & _complete(self.context, self.sizes) & ~np.logical_or.accumulate(alone, axis=1)

    def warning(self) -> str:
        """What is said where this way is no one's claim."""
        try:
            whole, rows = self.context.system(self.inputs), self(self.inputs)
            difference = compare(whole, rows, self.context.noise, self.real & _complete(self.context, self.sizes))
        except Exception:
            return ""
        if np.isnan(whole).any() or difference.status != "leak":
            return ""
        _, query, size = difference.first()
        where = f"at position {query}, {by(size, '')}"
        return f"{self.way}, cached decoding differs from the whole forward {where}; without pads they agree"

    def leak(self, row: int, query: int, size: float) -> Leak:
        note = f"decoding {self.way} differs from the whole forward from position {query} on, {by(size, '')}"
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
        if self.context.options.step is not None or self.draft is not None:
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


def _declared(context: Context) -> bool:
    return pad_keyword(context) in context.inputs.settings or context.options.pad_mask is not None


def _comparable(context: Context, decoder: Decoder) -> Bools:
    """The positions (B, N) whose outputs mean the same with a cache; after a pad that decoding is not told of, none."""
    real = ~context.ignored
    return real if decoder.masked else np.logical_and.accumulate(real, axis=1)


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


def _window(context: Context) -> dict[str, object]:
    """The model's own window, and whether the input goes past it."""
    window = getattr(getattr(context.system.model, "config", None), "sliding_window", None)
    return {"window": window, "past_the_window": context.n > window} if isinstance(window, int) else {}


CACHE = Trial(
    name="cache",
    does="decodes one by one, after a prompt, in uneven chunks, after a rejected draft and with rows of unequal lengths "
    "(`step=` and `prefill=` for your own decoding); compares positions whose visible inputs have all been appended",
    finds="caches whose outputs differ from the full forward pass",
    function=_cache,
    needs=(Need("a cache", _no_decoder),),
    reshapes=True,
    argument="step",
)

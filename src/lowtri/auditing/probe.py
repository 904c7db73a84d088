"""Probes, and the one engine that runs them.

A probe is a generator of pairs: a run, the positions whose rows must agree with the example's own, and a sentence for where they do
not. `examine` runs each pair, compares, confirms what differs, and follows a change of many inputs down to one of them. `run_probes`
repeats in float64 what is in doubt, and names the module where a leak enters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias

import numpy as np

from lowtri.auditing.context import EXAMPLE, Condition, Context, Kind, Movement, Run, compare, describe_difference
from lowtri.auditing.example import Bools, Rows, first_line
from lowtri.errors import CallError, LowtriError

Status = Literal["clean", "leak", "doubt", "undecided", "warning", "skipped"]

_BISECTED = 16  # queries that are followed down to one key
_COARSE = 2.0**-12  # one rounding, above which float64 is asked, too: half precision


@dataclass(frozen=True)
class Leak:
    """Position `query` depends on position `key` although the mask hides it, or its output is wrong in another way."""

    query: int
    key: int
    size: float
    row: int = 0
    module: str | None = None
    note: str = ""  # the whole sentence, where it is not "position q sees position k"
    by_state: bool = False  # not by the input: by what an earlier call left behind
    probe: str = ""  # set by `examine`, as are the next two
    paired: bool = False  # query and key are positions of the probe's input
    under: Condition = EXAMPLE
    noise64: float | None = None  # of the float64 copy, where it was found there

    @property
    def condition(self) -> str:
        """The name of the condition; empty for the example as it is."""
        return self.under.name

    @property
    def found_by(self) -> str:
        """The condition under which it was found, or else the probe."""
        return self.condition or self.probe

    @property
    def direct(self) -> bool:
        """Whether it is a pair of positions, found without any special conditions."""
        return self.paired and not self.under.words

    def sentence(self, noise: float) -> str:
        """One sentence that names the pair, the size and the module."""
        text = self.note
        if not text:
            how = f"moves output {self.query} by {self.size:.2g}"
            if math.isinf(self.size):
                how = f"turns output {self.query} from finite to infinite or NaN, or back"
            text = f"position {self.query} sees position {self.key}: changing input {self.key} {how}"
        text = f"{self.under.words}, {text}" if self.under.words else text
        noise, where = (noise, "") if self.noise64 is None else (self.noise64, " in float64")
        text += f" (noise {noise:.1g}{where})." if noise else f" (noise 0{where})."
        return text + (f" First seen in {self.module}." if self.module else "")


@dataclass(frozen=True)
class ProbeResult:
    """One probe's result under one condition; without a probe, why a condition was not tried or what it shows by itself.

    A probe returns `doubt` where the movement is near the noise; the audit then repeats it on the float64 copy, so that no
    report contains a `doubt`.
    """

    status: Status
    message: str
    leaks: tuple[Leak, ...] = ()
    measured: dict[str, Any] = field(default_factory=dict)
    probe: str = ""  # set by `examine`, as is the next one
    under: Condition = EXAMPLE
    note: str = ""  # what the float64 copy decided
    watch: Any = field(default=None, repr=False)  # two runs that part where the first leak enters, and the place

    @property
    def condition(self) -> str:
        """The name of the condition; empty for the example as it is."""
        return self.under.name

    @property
    def title(self) -> str:
        """The probe and its condition, as the report lists them."""
        return ", ".join(part for part in (self.probe, self.under.words or self.condition) if part)

    @property
    def greatest(self) -> float:
        """The greatest movement that the probe measured."""
        return float(self.measured.get("greatest", 0.0))


@dataclass(frozen=True)
class PairOfRuns:
    """Two runs, and the positions at which their rows must agree."""

    run: Run
    where: Bools | bool
    # The leak's sentence, with {row}, {query}, {key}, {moves} and {comma}; else "position q sees position k".
    note: str | Callable[[Leak], str] = ""
    key: int | Callable[[int, int], int] | None = None  # the leak's, of a row and a query; by default the query
    before: Run | None = None  # by default the run on the example itself
    origin: tuple[int, int] = (0, 0)  # the row and the position of the example at which the compared rows begin
    same_order: bool = False  # both runs add the same sums in the same order
    overflows: bool = False  # numbers may turn infinite or NaN
    all_positions: bool = False  # each position that differs is a leak, and not only the first
    first_position: bool = False  # the first position of all rows, and not of the row that differs most
    refusable: bool = True  # the model may refuse these inputs
    is_leak: bool = True  # a difference is a leak; else the probe itself judges it
    isolate_row: bool = False  # whether a row that differs is tried again with no other row changed
    keys: Bools | None = None  # (N,) or (B, N): what is changed, where a leak is to be followed down to one key

    def leak(self, row: int, position: int, size: float, kind: Kind = "leak") -> Leak:
        """What is reported for a position that differs. No key is searched for a doubt, which no report shows."""
        row, query = row + self.origin[0], position + self.origin[1]
        key = self.key
        if callable(key):
            key = key(row, query) if kind == "leak" else None
        leak = Leak(query, query if key is None else key, size, row)
        if callable(self.note):
            return replace(leak, note=self.note(leak))
        words = {"moves": describe_movement(size), "comma": "," if math.isinf(size) else ""}
        return replace(leak, note=self.note.format(row=row, query=query, key=leak.key, **words))


class Summary(NamedTuple):
    """What a probe says at its end."""

    clean: str
    leak: str  # `{count}` is the number of leaks
    measured: dict[str, Any]
    warning: str = ""  # what its leaks amount to, where that is only a warning


class Skipped(Exception):
    """Raised by a probe or a condition that could not be run, with the reason and what was measured."""

    status: ClassVar[Status] = "skipped"

    def __init__(self, reason: str, measured: dict[str, Any] | None = None) -> None:
        super().__init__(reason)
        self.measured = measured or {}


# A probe is sent the difference of each pair; None where the model refuses.
PairsOfRuns: TypeAlias = Generator[PairOfRuns, Movement | None, Summary]
Function: TypeAlias = Callable[[Context], PairsOfRuns | ProbeResult]


@dataclass(frozen=True)
class Probe:
    """One check of the audit. Verdict, report and documentation read its fields; none of them knows a probe by name."""

    name: str
    does: str
    finds: str
    function: Function
    needs: str = ""  # as the documentation lists it; the function raises Skipped where it is missing
    pairs: bool = False  # its leaks are pairs of positions of its input; others are about lengths, pads, rows or caches
    reshapes: bool = False  # it compares runs of different shapes, where rounding can flip a discrete choice
    argument: str | None = None  # the field of `Model` that requests it


def probe(name: str, does: str, finds: str, **fields: Any) -> Callable[[Function], Probe]:
    """Make a probe of the function below it; the arguments are the fields of `Probe`."""
    return lambda function: Probe(name, does, finds, function, **fields)


def describe_movement(size: float) -> str:
    """What an output does, in words: an infinite size stands for a number that turned infinite or NaN, or back.

    >>> describe_movement(0.25), describe_movement(math.inf)
    ('moves by 0.25', 'turns from finite to infinite or NaN, or back')
    """
    return "turns from finite to infinite or NaN, or back" if math.isinf(size) else f"moves by {size:.2g}"


def run_probes(context: Context, probes: Sequence[Probe], *, first: bool = False) -> list[ProbeResult]:
    """The result of each probe, with `first` up to the first leak; those in doubt are repeated on the float64 copy."""
    results = []
    for probe in probes:
        results.append(_decided(context, probe))
        if first and results[-1].status == "leak":
            break
    return results


def require_repeatable(context: Context) -> None:
    """Skip what compares calls of other shapes, where a model draws random numbers."""
    if context.noise.random:
        raise Skipped("the model draws random numbers, and another length draws others")


def _examined(context: Context, probe: Probe) -> ProbeResult:
    """Run a probe, and put its name and condition on what it found."""
    context.probe = probe.name
    try:
        result = probe.function(context)
        found = result if isinstance(result, ProbeResult) else _Comparisons(context, probe.pairs).result(result)
    except Skipped as skipped:
        found = ProbeResult(skipped.status, str(skipped), (), skipped.measured)
    except LowtriError:
        raise
    except Exception as error:
        raise _raised(context, error) from error
    own: dict[str, Any] = {"probe": probe.name, "under": context.condition}
    leaks = tuple(replace(leak, paired=probe.pairs and not leak.by_state, **own) for leak in found.leaks)
    return replace(found, leaks=leaks, **own)


@dataclass
class _Comparisons:
    """What the pairs of one probe show so far."""

    context: Context
    by_pair: bool  # leaks are pairs of positions
    confirmed: dict[tuple[int, int, int], Leak] = field(default_factory=dict)
    unconfirmed: dict[tuple[int, int, int], Leak] = field(default_factory=dict)
    greatest: float = 0.0
    bisected: int = 0
    runs: int = 0
    refused: str = ""  # why the model refused inputs, the first time
    answered: bool = False  # whether it took any
    poisoned: int = 0
    watch: Any = None

    def result(self, pairs: PairsOfRuns) -> ProbeResult:
        """Run all pairs."""
        difference: Movement | None = None
        try:
            while True:
                difference = self._take(pairs.send(difference))
        except StopIteration as end:
            summary: Summary = end.value
        except Skipped as skipped:
            if skipped.measured:  # pairs were run
                raise Skipped(str(skipped), self._counted | skipped.measured) from None
            raise
        measured = self._counted | {"greatest": self.greatest} | summary.measured
        if summary.warning:
            return ProbeResult("warning", summary.warning, (), measured)
        found = self.confirmed or self.unconfirmed  # unconfirmed leaks add nothing to confirmed ones
        if found:
            leaks = tuple(found[key] for key in (sorted(found) if self.by_pair else found))
            message = f"{summary.leak.format(count=len(leaks))}, {describe_difference(self.greatest)}"
            return ProbeResult("leak" if self.confirmed else "doubt", message, leaks, measured, watch=self.watch)
        if self.refused and not self.answered:
            return ProbeResult("skipped", f"no run succeeded: {self.refused}", (), measured)
        return ProbeResult("clean", summary.clean, (), measured)

    @property
    def _counted(self) -> dict[str, Any]:
        return {"greatest": 0.0, "runs": self.runs, "poisoned": self.poisoned}

    def _take(self, pair: PairOfRuns) -> Movement | None:
        """Run a pair, and note what differs."""
        context = self.context
        self.runs += 1
        context.show_progress(f"{context.probe}, run {self.runs}")
        try:
            after, before = pair.run.output, (pair.before or context.example).output
            if after.shape != before.shape:
                raise LookupError(f"its answer has the shape {after.shape}, expected {before.shape}")
        except Exception as error:
            if pair.refusable:
                self.refused = self.refused or first_line(error)
                return None
            raise _raised(context, error) from error
        self.answered = True
        how = {"same_order": pair.same_order, "overflows": pair.overflows}
        difference = compare(before, after, context.noise, pair.where, **how)
        self.poisoned += int((np.isinf(difference.moved) & pair.where).sum())
        if pair.keys is not None:
            self._follow(pair, np.atleast_2d(pair.keys), difference)
            return difference
        if pair.is_leak or difference.status == "clean":
            self.greatest = max(self.greatest, difference.greatest)
        if pair.is_leak and difference.status != "clean":
            self._note_all(pair, difference)
        return difference

    def _note_all(self, pair: PairOfRuns, difference: Movement) -> None:
        """Note the first position that differs, or all of them."""
        spots = [difference.first(of_all_rows=pair.first_position)]
        if pair.all_positions:
            spots = [(r, q, float(difference.sizes[r, q])) for r, q in np.argwhere(difference.sizes > 0).tolist()]
        alone: dict[int, Any] = {}
        for row, position, size in spots:
            kind = difference.kind(size)
            if kind == "clean":
                continue
            leak = pair.leak(row, position, size, kind)
            if pair.isolate_row and len(difference.sizes) > 1 and self._key(leak) not in self.confirmed:
                if row not in alone:
                    alone[row] = self._row_alone(pair, row)
                if alone[row] is not None and not alone[row][position] >= size / 4:
                    continue  # another row of the batch does it: the probe of rows names that one
            self._note(leak, kind, pair, (row, position))

    def _row_alone(self, pair: PairOfRuns, row: int) -> Any:
        """How far the positions of a row, (N,), move where nothing but this row changes; None where that does not run."""
        inputs, tested = self.context.inputs, self.context.tested
        changed = pair.run.inputs
        where = np.broadcast_to(pair.where, (inputs.batch, changed.n))
        if changed.n == inputs.n:
            mixed = inputs.change(np.arange(inputs.batch)[:, None] == row, changed)
            return self.context.compare(tested(mixed), where).sizes[row]
        try:
            whole, short = (tested(one.rows([row]))[:, : changed.n] for one in (inputs, changed))
            return compare(whole, short, self.context.noise, where[[row]]).sizes[0]
        except Exception:
            return None

    def _key(self, leak: Leak) -> tuple[int, int, int]:
        return leak.query, leak.key, -1 if self.by_pair else leak.row

    def _note(self, leak: Leak, kind: Kind, pair: PairOfRuns, spot: tuple[int, int]) -> None:
        confirmed = kind == "leak"
        if confirmed and not self.confirmed and pair.before is None:  # once: then the model is known to repeat itself
            confirmed, leak = self._repeated(leak, pair, spot)
        leaks, key = self.confirmed if confirmed else self.unconfirmed, self._key(leak)
        # Of a pair the draw that moves it most is reported; else what was tried first, which is the simplest.
        if key not in leaks or (self.by_pair and leaks[key].size < leak.size):
            leaks[key] = leak
        before = pair.before or self.context.example
        if confirmed and self.watch is None and None not in (before.calls, pair.run.calls):
            self.watch = before, pair.run, spot

    def _repeated(self, leak: Leak, pair: PairOfRuns, spot: tuple[int, int]) -> tuple[bool, Leak]:
        """Whether a leak shows again; as one of state, where it does not show between two copies that were never called."""
        context = self.context

        def shows(before: Rows, after: Rows, least: float) -> bool:
            return before.shape != after.shape or bool(compare(before, after, context.noise).moved[spot] >= least)

        if not shows(context.example.compute(), pair.run.compute(), leak.size / 2):
            return False, leak
        try:
            one, other = context.copied(), context.copied()
            if context.tested.restoring or shows(one(context.inputs), other(pair.run.inputs), leak.size / 4):
                return True, leak
        except Exception:  # not every model can be copied
            return True, leak
        where = f"output {leak.query} {describe_movement(leak.size)} between two calls of the model that is audited"
        note = f"the model keeps state between calls: {where}, and not between two copies that were never called"
        return True, replace(leak, key=leak.query, note=note, by_state=True)

    def _follow(self, pair: PairOfRuns, changed: Bools, difference: Movement) -> None:
        """For each row, one query that moved and one key that moves it alone, by halving."""
        wrong = difference.sizes > 0  # (B, N)
        for row in np.flatnonzero(wrong.any(axis=1)).tolist():
            query = int(np.flatnonzero(wrong[row])[-1])
            kind = difference.kind(difference.sizes[row, query])
            known = self.confirmed if kind == "leak" else {**self.confirmed, **self.unconfirmed}
            if self.bisected >= _BISECTED or any(q == query for q, _, _ in known):
                continue
            self.bisected += 1
            keys = np.flatnonzero(changed[row % len(changed)])
            found, all_keys = self._moved(pair, keys, row, query, kind), len(keys)
            if found is None:
                continue  # a change of other rows moves it
            while len(keys) > 1:
                halves = keys[: len(keys) // 2], keys[len(keys) // 2 :]
                moved = ((half, self._moved(pair, half, row, query, kind)) for half in halves)
                half, of_half = next((one for one in moved if one[1] is not None), (keys, None))
                if of_half is None:
                    break
                keys, found = half, of_half
            note = f"output {{query}} {{moves}}{{comma}} when all {all_keys} inputs hidden from it change together"
            single = replace(pair, run=found[1], key=int(keys[0]), note=note if len(keys) > 1 else "")
            self.greatest = max(self.greatest, found[0])
            self._note(single.leak(row, query, found[0]), kind, single, (row, query))

    def _moved(self, pair: PairOfRuns, keys: Any, row: int, query: int, kind: Kind) -> tuple[float, Run] | None:
        """How far these keys of a row alone move the query, and the run that shows it; None where that is of another kind."""
        example = self.context.inputs
        one = np.isin(np.arange(example.n), keys) & (np.arange(example.batch)[:, None] == row)
        run = self.context.run(example.change(one, pair.run.inputs))
        self.runs += 1
        moved = self.context.compare(run.output, same_order=True, overflows=pair.overflows)
        size = float(moved.sizes[row, query])
        return (size, run) if kind != "clean" and moved.kind(size) == kind else None


def _raised(context: Context, error: Exception) -> CallError:
    """What to do about a model that raises in the middle of a probe."""
    if isinstance(error, CallError):
        return error
    fix = "the model must take any values in place of the example's"
    if isinstance(error, IndexError) and context.inputs.discrete:
        fix = f"Model(vocab_size=), which says how many ids there are; they were drawn up to {int(context.vocabulary.max())}"
    return CallError(f"audit: the model raised {first_line(error)}, in the probe {context.probe}.\nFix: {fix}.")


def _decided(context: Context, probe: Probe) -> ProbeResult:
    """The probe's result, from the float64 copy where it is in doubt."""
    found = _examined(context, probe)
    if found.status == "clean" and probe.reshapes and context.noise.eps > _COARSE and found.greatest:
        return _unhidden(context, probe, found)
    if found.status != "doubt" and not (found.status == "leak" and probe.reshapes):
        return _with_module(context, probe, found)
    copy64, size = context.float64, found.greatest
    if isinstance(copy64, str):
        return _without_copy(context, probe, found, copy64)
    second = _examined(copy64, probe)
    if second.status == "skipped":
        return _without_copy(context, probe, found, second.message)
    if second.status != "leak" and math.isinf(size):
        reason = f"{found.message}, in the model's precision and not in float64"
        return replace(found, status="undecided", message=reason, leaks=())
    if second.status == "clean":
        return replace(second, note=f"up to {size:.2g} in the model's precision vanishes in float64: rounding")
    if second.status not in ("doubt", "undecided"):
        return _of_copy(copy64, probe, second)
    # In float64 rounding is some 1e-15; what shrank with the precision is noise that the copy still rounds.
    if second.greatest >= size / 30:
        return replace(second, status="undecided", leaks=())
    sizes = f"{size:.2g} in the model's precision, {second.greatest:.2g} in float64"
    return replace(second, status="clean", message=f"nothing beyond rounding ({sizes})", leaks=())


def _unhidden(context: Context, probe: Probe, result: ProbeResult) -> ProbeResult:
    """What the float64 copy shows that the rounding of half precision may hide: there 16 roundings are a tenth of an output."""
    copy64 = context.float64
    if isinstance(copy64, str):
        return result
    second = _examined(copy64, probe)
    return _of_copy(copy64, probe, second) if second.status == "leak" else result


def _of_copy(copy64: Context, probe: Probe, second: ProbeResult) -> ProbeResult:
    """A result of the float64 copy that stands, with the noise of its leaks."""
    leaks = tuple(replace(leak, noise64=copy64.noise.greatest) for leak in second.leaks)
    return replace(_with_module(copy64, probe, replace(second, leaks=leaks)), note="confirmed in float64")


def _without_copy(context: Context, probe: Probe, found: ProbeResult, reason: str) -> ProbeResult:
    """What can be said of a result that no float64 copy decides, for the given reason."""
    if found.status == "leak" and not (probe.reshapes and context.discrete_output):
        return _with_module(context, probe, found)
    in_float64 = context.noise.eps <= np.finfo(np.float64).eps
    if found.status == "doubt" and in_float64 and not context.discrete_output:
        message = f"nothing beyond the rounding of float64 ({found.greatest:.2g})"
        return replace(found, status="clean", message=message, leaks=())
    message = f"{found.message}, near the noise, and no float64 copy could settle it ({reason})"
    return replace(found, status="undecided", message=message, leaks=())


def _with_module(context: Context, probe: Probe, found: ProbeResult) -> ProbeResult:
    """Name the module where each leak enters, from two runs that part there."""
    if not found.leaks or context.tested.module is None:
        return found
    from lowtri.auditing.torch_hooks import locate

    first, pairs = found.leaks[0], [] if found.watch is None else [found.watch]
    if probe.pairs:
        # The key that is furthest away: no strided part has both in one stride.
        key = max((k.key for k in found.leaks if k.query == first.query), key=lambda key: abs(key - first.query))
        changed = context.run(context.inputs.change(np.arange(context.n) == key, context.fresh(0)))
        pairs.insert(0, (context.example, changed, (first.row, first.query)))
    try:
        name = next((name for pair in pairs if (name := locate(*pair)) is not None), None)
    except Exception:
        name = None
    return replace(found, leaks=tuple(replace(leak, module=leak.module or name) for leak in found.leaks))

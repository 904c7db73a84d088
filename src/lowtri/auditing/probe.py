"""Probes, and the one engine that runs them.

A probe is a generator of cases: a run, the positions whose rows must agree with the example's own, and a sentence for where they do
not. `examine` runs each case, compares, confirms what differs, and follows a change of many inputs down to one of them. `run_probes`
repeats in float64 what is in doubt, and names the module where a leak enters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from lowtri.auditing.context import Context, Difference, Kind, Run, compare, describe_difference
from lowtri.auditing.example import Bools, Rows, first_line
from lowtri.errors import CallError, LowtriError

Status = Literal["clean", "leak", "doubt", "undecided", "warning", "skipped"]

_BISECTED = 16  # queries that are followed down to one key


@dataclass(frozen=True)
class Leak:
    """Position `query` depends on position `key` although the mask hides it, or its output is wrong in another way."""

    query: int
    key: int
    size: float
    row: int = 0
    module: str | None = None
    note: str = ""  # the whole sentence, where it is not "position q sees position k"
    under: str = ""  # the conditions, where they are not the example's own: "in training mode"
    probe: str = ""  # set by `examine`, as are the next three
    condition: str = ""  # the name of the condition, where it is not the example as it is
    paired: bool = False  # query and key are positions of the probe's input
    by_state: bool = False  # not by the input: by what an earlier call left behind
    in_picture: bool = True  # and of the example, so that the drawing can show them

    @property
    def found_by(self) -> str:
        """The condition under which it was found, or else the probe."""
        return self.condition or self.probe

    @property
    def direct(self) -> bool:
        """Whether it is a pair of positions, found without any special conditions."""
        return self.paired and not self.under

    @property
    def what(self) -> str:
        """The pair and the size, without a full stop."""
        text = self.note
        if not text:
            how = f"moves output {self.query} by {self.size:.2g}"
            if math.isinf(self.size):
                how = f"turns output {self.query} from finite to infinite or NaN, or back"
            text = f"position {self.query} sees position {self.key}: changing input {self.key} {how}"
        return f"{self.under}, {text}" if self.under else text

    def sentence(self, noise: float) -> str:
        """One sentence that names the pair, the size and the module."""
        text = self.what + (f" (noise {noise:.1g})." if noise else " (noise 0).")
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
    probe: str = ""  # set by `examine`
    condition: str = ""  # its name; empty for the example as it is
    words: str = ""  # the condition in words
    mode: str = ""  # the mode and the length that it adds to those of the whole audit
    length: int | None = None
    watch: Any = field(default=None, repr=False)  # two runs that part where the first leak enters

    @property
    def title(self) -> str:
        """The probe and its condition, as the report lists them."""
        under = self.words or self.condition
        return f"{self.probe}, {under}" if self.probe and under else self.probe or under

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

    def leak(self, row: int, position: int, size: float) -> Leak:
        """What is reported for a position that differs."""
        row, query = row + self.origin[0], position + self.origin[1]
        key = query if self.key is None else self.key(row, query) if callable(self.key) else self.key
        leak = Leak(query, key, size, row)
        if not self.note:
            return leak
        if callable(self.note):
            return replace(leak, note=self.note(leak))
        comma = "," if math.isinf(size) else ""
        note = self.note.format(row=row, query=query, key=key, moves=describe_movement(size), comma=comma)
        return replace(leak, note=note)

    def outputs(self, context: Context) -> tuple[Rows, Rows]:
        """The rows of both runs; LookupError where their shapes differ."""
        after, before = self.run.output, (self.before or context.example).output
        if after.shape != before.shape:
            raise LookupError(f"its answer has the shape {after.shape}, expected {before.shape}")
        return before, after


class Summary(NamedTuple):
    """What a probe says at its end."""

    clean: str
    leak: str  # `{count}` is the number of leaks
    measured: dict[str, Any]
    warning: str = ""  # what its leaks amount to, where that is only a warning


class Skipped(Exception):
    """Raised by a probe that could not be run, with the reason and what was measured."""

    def __init__(self, reason: str, measured: dict[str, Any] | None = None) -> None:
        super().__init__(reason)
        self.measured = measured or {}


PairsOfRuns: TypeAlias = Generator[
    PairOfRuns, Difference | None, Summary
]  # is sent the difference; None where the model refuses
Function: TypeAlias = Callable[[Context], PairsOfRuns | ProbeResult]


def requested_but_not_run(result: ProbeResult) -> str | None:
    """Why a probe did not do what its argument requests; None where it did, or where it found a leak."""
    if result.status == "skipped":
        return result.message
    refused = result.measured.get("refused")
    return str(next(iter(refused.values()))) if refused and result.status != "leak" else None


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


def examine(context: Context, probe: Probe) -> ProbeResult:
    """Run a probe, and put its name and condition on what it found."""
    context.probe, condition = probe.name, context.condition
    try:
        result = probe.function(context)
        finding = result if isinstance(result, ProbeResult) else _Comparisons(context, probe.pairs).finding(result)
    except Skipped as skipped:
        finding = ProbeResult("skipped", str(skipped), (), skipped.measured)
    except LowtriError:
        raise
    except Exception as error:
        raise _raised(context, error) from error
    own: dict[str, Any] = {"probe": probe.name, "condition": condition.name, "under": condition.words}
    in_picture = condition.length is None
    leaks = tuple(
        replace(leak, paired=probe.pairs and not leak.by_state, in_picture=in_picture, **own) for leak in finding.leaks
    )
    return replace(
        finding,
        probe=probe.name,
        condition=condition.name,
        words=condition.words,
        mode="training mode" if condition.training else "",
        length=condition.length,
        leaks=leaks,
    )


@dataclass
class _Comparisons:
    """What the cases of one probe show so far."""

    context: Context
    pairs: bool
    confirmed: dict[tuple[int, int, int], Leak] = field(default_factory=dict)
    unconfirmed: dict[tuple[int, int, int], Leak] = field(default_factory=dict)
    greatest: float = 0.0
    bisected: int = 0
    runs: int = 0
    refused: str = ""  # why the model refused inputs, the first time
    answered: bool = False  # whether it took any
    poisoned: int = 0
    watch: Any = None

    def finding(self, cases: PairsOfRuns) -> ProbeResult:
        """Run all cases."""
        try:
            case = next(cases)
            while True:
                case = cases.send(self.take(case))
        except StopIteration as end:
            summary: Summary = end.value
        except Skipped as skipped:
            if skipped.measured:  # cases were run
                counted = {"greatest": 0.0, "runs": self.runs, "poisoned": self.poisoned}
                raise Skipped(str(skipped), counted | skipped.measured) from None
            raise
        pairs = self.confirmed or self.unconfirmed  # unconfirmed pairs add nothing to sure ones
        leaks = tuple(pairs[pair] for pair in (sorted(pairs) if self.pairs else pairs))
        measured = {"greatest": self.greatest, "runs": self.runs, "poisoned": self.poisoned, **summary.measured}
        if summary.warning:
            return ProbeResult("warning", summary.warning, (), measured)
        if not leaks and self.refused and not self.answered:
            return ProbeResult("skipped", f"no run succeeded: {self.refused}", (), measured)
        if not leaks:
            return ProbeResult("clean", summary.clean, (), measured)
        message = f"{summary.leak.format(count=len(leaks))}, {describe_difference(self.greatest)}"
        return ProbeResult("leak" if self.confirmed else "doubt", message, leaks, measured, watch=self.watch)

    def take(self, case: PairOfRuns) -> Difference | None:
        """Run a case, and note what differs."""
        self.runs += 1
        self.context.show_progress(f"{self.context.probe}, run {self.runs}")
        try:
            outputs = case.outputs(self.context)
        except Exception as error:
            if case.refusable:
                self.refused = self.refused or first_line(error)
                return None
            raise _raised(self.context, error) from error
        self.answered = True
        difference = compare(
            *outputs, self.context.noise, case.where, same_order=case.same_order, overflows=case.overflows
        )
        self.poisoned += int((np.isinf(difference.moved) & case.where).sum())
        if case.keys is not None:
            self._follow(case, np.atleast_2d(case.keys), difference)
            return difference
        if not case.is_leak:
            return difference
        self.greatest = max(self.greatest, difference.greatest)
        if difference.status == "clean":
            return difference
        spots = [difference.first(of_all_rows=case.first_position)]
        if case.all_positions:
            spots = [(r, q, float(difference.sizes[r, q])) for r, q in np.argwhere(difference.sizes > 0).tolist()]
        confirmed: dict[int, Any] = {}
        for row, position, size in spots:
            kind = difference.kind(size)
            if kind == "clean":
                continue
            leak = case.leak(row, position, size)
            if case.isolate_row and len(difference.sizes) > 1 and self._pair(leak) not in self.confirmed:
                if row not in confirmed:
                    confirmed[row] = self._row_alone(case, row)
                alone = confirmed[row]
                if alone is not None and not alone[position] >= size / 4:
                    continue  # another row of the batch does it: the probe of rows names that one
            self._note(leak, kind, case, (row, position))
        return difference

    def _row_alone(self, case: PairOfRuns, row: int) -> Any:
        """How far the positions of a row, (N,), move where nothing but this row changes; None where that does not run."""
        inputs, changed, tested = self.context.inputs, case.run.inputs, self.context.tested
        where = np.broadcast_to(case.where, (inputs.batch, changed.n))
        if changed.n == inputs.n:
            mixed = inputs.change(np.arange(inputs.batch)[:, None] == row, changed)
            return self.context.compare(tested(mixed), where).sizes[row]
        try:
            whole, short = (tested(one.rows([row]))[:, : changed.n] for one in (inputs, changed))
            return compare(whole, short, self.context.noise, where[[row]]).sizes[0]
        except Exception:
            return None

    def _pair(self, leak: Leak) -> tuple[int, int, int]:
        return leak.query, leak.key, -1 if self.pairs else leak.row

    def _note(self, leak: Leak, kind: Kind, case: PairOfRuns, spot: tuple[int, int]) -> None:
        confirmed = kind == "leak" and bool(self.confirmed)
        if kind == "leak" and not confirmed:
            confirmed = self._repeats(leak, case, spot)
            if confirmed and not self._repeats_on_copies(leak, case, spot):
                where = (
                    f"output {leak.query} {describe_movement(leak.size)} between two calls of the model that is audited"
                )
                note = (
                    f"the model keeps state between calls: {where}, and not between two copies that were never called"
                )
                leak = replace(leak, key=leak.query, note=note, by_state=True)
        leaks, pair = self.confirmed if confirmed else self.unconfirmed, self._pair(leak)
        if pair not in leaks or leaks[pair].size < leak.size:
            leaks[pair] = leak
        if confirmed and self.watch is None:
            runs = (case.before or self.context.example).watch(*spot), case.run.watch(*spot)
            self.watch = None if None in runs else runs

    def _repeats(self, leak: Leak, case: PairOfRuns, spot: tuple[int, int]) -> bool:
        """Whether the first leak shows again; then the model is known to repeat itself."""
        if case.before is not None:
            return True
        before, after = (run.compute() for run in (self.context.example, case.run))
        if before.shape != after.shape:
            return True
        return bool(compare(before, after, self.context.noise).moved[spot] >= leak.size / 2)

    def _repeats_on_copies(self, leak: Leak, case: PairOfRuns, spot: tuple[int, int]) -> bool:
        """Whether the first leak shows between two copies that were never called; True where that cannot be tried."""
        context = self.context
        if context.fresh_copy is None or case.before is not None or context.tested.restoring:
            return True
        try:
            with context.on_copy() as one, context.on_copy() as other:
                before, after = one(context.inputs), other(case.run.inputs)
        except Exception:
            return True
        if before.shape != after.shape:
            return True
        return bool(compare(before, after, context.noise).moved[spot] >= leak.size / 4)

    def _follow(self, case: PairOfRuns, changed: Bools, difference: Difference) -> None:
        """For each row, one query that moved and one key that moves it alone, by halving."""
        wrong = difference.sizes > 0  # (B, N)
        for row in np.flatnonzero(wrong.any(axis=1)).tolist():
            query = int(np.flatnonzero(wrong[row])[-1])
            kind = self.context.noise.classify(float(difference.sizes[row, query]), difference.scale)
            known = self.confirmed if kind == "leak" else {**self.confirmed, **self.unconfirmed}
            if self.bisected >= _BISECTED or any(q == query for q, _, _ in known):
                continue
            self.bisected += 1
            keys = np.flatnonzero(changed[row % len(changed)])
            moved = self._moved(case, keys, row, query, kind)
            if moved is None:
                continue  # a change of other rows moves it
            one, all_keys = moved, len(keys)
            while len(keys) > 1:
                for half in (keys[: len(keys) // 2], keys[len(keys) // 2 :]):
                    moved = self._moved(case, half, row, query, kind)
                    if moved is not None:
                        break
                else:
                    break
                keys, one = half, moved
            note = f"output {{query}} {{moves}}{{comma}} when all {all_keys} inputs hidden from it change together"
            single = replace(case, run=one[1], key=int(keys[0]), note=note if len(keys) > 1 else "")
            self.greatest = max(self.greatest, one[0])
            self._note(single.leak(row, query, one[0]), kind, single, (row, query))

    def _moved(self, case: PairOfRuns, keys: Any, row: int, query: int, kind: Kind) -> tuple[float, Run] | None:
        """How far these keys of a row alone move the query, and the run that shows it; None where that is of another kind."""
        example = self.context.inputs
        one = np.isin(np.arange(example.n), keys) & (np.arange(example.batch)[:, None] == row)
        run = self.context.run(example.change(one, case.run.inputs))
        self.runs += 1
        moved = self.context.compare(run.output, same_order=True, overflows=case.overflows)
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


def chosen_names(argument: str, given: Any, known: Sequence[str]) -> list[str] | None:
    """The names that an argument lists, as a text with commas or as a list; None where it was not given."""
    if given is None:
        return None
    one = argument.rstrip("s")
    if not isinstance(given, (str, list, tuple, set)):
        raise CallError(f"audit: {argument}={given!r}, expected a list of names.\nFix: {argument}=[{known[0]!r}], say.")
    names = [name.strip() for name in given.split(",")] if isinstance(given, str) else list(given)
    names = [name for name in names if name != ""]
    if not names:
        raise CallError(
            f"audit: {argument}={given!r} would look at nothing.\nFix: name a {one}, or drop {argument}= to run them all."
        )
    unknown = next((name for name in names if name not in known), None)
    if unknown is not None:
        raise CallError(
            f"audit: no {one} is called {unknown!r}; there are {', '.join(known)}.\nFix: {argument}={known[0]!r}, say."
        )
    return names


def run_probes(
    context: Context, probes: Sequence[Probe], *, first: bool = False
) -> tuple[list[ProbeResult], list[str]]:
    """Run the probes, with `first` up to the first leak; repeat those in doubt on the float64 copy.

    Returns:
        One finding for each probe, and notes on what the float64 copy decided.
    """
    findings: list[ProbeResult] = []
    notes = []
    for probe in probes:
        finding, note = _decided(context, probe)
        findings.append(finding)
        notes += [f"{probe.name}: {note}"] if note else []
        if first and finding.status == "leak":
            break
    return findings, notes


def require_requested(
    results: Sequence[ProbeResult], probes: Sequence[Probe], requested: Mapping[str, Any]
) -> tuple[list[ProbeResult], list[str]]:
    """A probe that a field of `Model` requests and that did not run is undecided, never passed over.

    Returns:
        The results, and a note for each field whose probe was not among those to run.
    """
    results, notes = list(results), []
    for probe in probes:
        if probe.argument is None or requested.get(probe.argument) is None:
            continue
        index = next((i for i, r in enumerate(results) if r.probe == probe.name and not r.condition), None)
        if index is None:
            notes.append(f"{probe.argument}= was not used: probes= leaves {probe.name} out")
            continue
        reason = requested_but_not_run(results[index])
        if reason is not None:
            message = f"{probe.argument}= was requested and did not run: {reason}"
            results[index] = replace(results[index], status="undecided", message=message)
    return results, notes


def require_repeatable(context: Context) -> None:
    """Skip what compares calls of other shapes, where a model draws random numbers."""
    if context.noise.random:
        raise Skipped("the model draws random numbers, and another length draws others")


def nothing_ran(findings: Sequence[ProbeResult]) -> str | None:
    """Why there is no verdict at all, where every probe was skipped."""
    if any(finding.status != "skipped" for finding in findings):
        return None
    return "; ".join(f"{f.title} was requested and did not run: {f.message}" for f in findings) or None


def _decided(context: Context, probe: Probe) -> tuple[ProbeResult, str]:
    """The probe's finding, from the float64 copy where it is in doubt; and a note on what the copy decided."""
    finding = examine(context, probe)
    if finding.status != "doubt" and not (finding.status == "leak" and probe.reshapes):
        return _with_module(context, probe, finding), ""
    copy64, size = context.float64, finding.greatest
    if isinstance(copy64, str):
        return _without_copy(context, probe, finding, copy64), ""
    second = examine(copy64, probe)
    if second.status == "skipped":
        return _without_copy(context, probe, finding, second.message), ""
    if second.status != "leak" and math.isinf(size):
        reason = f"{finding.message}, in the model's precision and not in float64"
        return replace(finding, status="undecided", message=reason, leaks=()), ""
    if second.status == "clean":
        return second, f"up to {size:.2g} in the model's precision vanishes in float64: rounding"
    if second.status not in ("doubt", "undecided"):
        return _with_module(copy64, probe, second), "confirmed in float64"
    # In float64 rounding is some 1e-15; what shrank with the precision is noise that the copy still rounds.
    if second.greatest >= size / 30:
        return replace(second, status="undecided", leaks=()), ""
    sizes = f"{size:.2g} in the model's precision, {second.greatest:.2g} in float64"
    return replace(second, status="clean", message=f"nothing beyond rounding ({sizes})", leaks=()), ""


def _without_copy(context: Context, probe: Probe, finding: ProbeResult, reason: str) -> ProbeResult:
    """What can be said of a finding that no float64 copy decides, for the given reason."""
    if finding.status == "leak" and not (probe.reshapes and context.discrete_output):
        return _with_module(context, probe, finding)
    in_float64 = context.noise.eps <= np.finfo(np.float64).eps
    if finding.status == "doubt" and in_float64 and not context.discrete_output:
        message = f"nothing beyond the rounding of float64 ({finding.greatest:.2g})"
        return replace(finding, status="clean", message=message, leaks=())
    message = f"{finding.message}, near the noise, and no float64 copy could settle it ({reason})"
    return replace(finding, status="undecided", message=message, leaks=())


def _with_module(context: Context, probe: Probe, finding: ProbeResult) -> ProbeResult:
    """Name the module where each leak enters, from two runs that part there."""
    if not finding.leaks or context.tested.module is None:
        return finding
    from lowtri.auditing.torch_hooks import locate

    first, pairs = finding.leaks[0], [] if finding.watch is None else [finding.watch]
    if probe.pairs:
        # The key that is furthest away: no strided part has both in one stride.
        key = max((k.key for k in finding.leaks if k.query == first.query), key=lambda key: abs(key - first.query))
        changed = context.run(context.inputs.change(np.arange(context.n) == key, context.fresh(0)))
        pairs.insert(0, tuple(run.watch(first.row, first.query) for run in (context.example, changed)))
    try:
        names = (locate(pair[0], pair[1], context.tested.signature.position_axes[0]) for pair in pairs)
        name = next((name for name in names if name is not None), None)
    except Exception:
        name = None
    return replace(finding, leaks=tuple(replace(leak, module=leak.module or name) for leak in finding.leaks))

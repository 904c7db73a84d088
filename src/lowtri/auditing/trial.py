"""Trials, and the one engine that runs them.

A trial is a generator of cases: a run, the positions whose rows must agree with the example's own, and a sentence for where they do
not. `examine` runs each case, compares, confirms what differs, and follows a change of many inputs down to one of them. `run_trials`
repeats in float64 what is in doubt, and names the module where a leak enters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from lowtri.auditing.context import Context, Difference, Kind, Options, Run, compare, describe_difference
from lowtri.auditing.system import Bools, Rows, first_line
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
    probe: str = ""  # set by `examine`, as are the next two
    paired: bool = False  # query and key are positions of the trial's input
    drawn: bool = True  # and of the example, so that the drawing can show them

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
class Finding:
    """One trial's result under one condition, or that of a group of conditions.

    A trial returns `doubt` where the movement is near the noise; the audit then repeats it on the float64 copy, so that no
    report contains a `doubt`.
    """

    status: Status
    message: str
    leaks: tuple[Leak, ...] = ()
    measured: dict[str, Any] = field(default_factory=dict)
    probe: str = ""  # set by `examine`
    condition: str = ""  # in words; empty for the example as it is
    mode: str = ""  # the mode and the length that it adds to those of the whole audit
    length: int | None = None
    watch: Any = field(default=None, repr=False)  # two runs that part where the first leak enters

    @property
    def greatest(self) -> float:
        """The greatest movement that the probe measured."""
        return float(self.measured.get("greatest", 0.0))


@dataclass(frozen=True)
class Case:
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
    every: bool = False  # each position that differs is a leak, and not only the first
    earliest: bool = False  # the first position of all rows, and not of the row that differs most
    refusable: bool = True  # the model may refuse these inputs
    noted: bool = True  # a difference is a leak; else the trial itself judges it
    by_row: bool = False  # whether a row that differs is tried again with no other row changed
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
    """What a trial says at its end."""

    clean: str
    leak: str  # `{count}` is the number of leaks
    measured: dict[str, Any]
    warning: str = ""  # what its leaks amount to, where that is only a warning


class Skipped(Exception):
    """Raised by a trial that could not be run, with the reason and what was measured."""

    def __init__(self, reason: str, measured: dict[str, Any] | None = None) -> None:
        super().__init__(reason)
        self.measured = measured or {}


Cases: TypeAlias = Generator[Case, Difference | None, Summary]  # is sent the difference; None where the model refuses
Function: TypeAlias = Callable[[Context], Cases | Finding]


def requested_but_not_run(finding: Finding, value: Any) -> str | None:
    """Why a trial did not do what its argument requests; None where it did, or where it found a leak."""
    if finding.status == "skipped":
        return finding.message
    refused = finding.measured.get("refused")
    return str(next(iter(refused.values()))) if refused and finding.status != "leak" else None


@dataclass(frozen=True)
class Trial:
    """One check of the audit. Verdict, report and documentation read its fields; none of them knows a trial by name."""

    name: str
    does: str
    finds: str
    function: Function
    needs: str = ""  # as the documentation lists it; the function raises Skipped where it is missing
    pairs: bool = False  # its leaks are pairs of positions of its input; others are about lengths, pads, rows or caches
    reshapes: bool = False  # it compares runs of different shapes, where rounding can flip a discrete choice
    skipped_after: tuple[str, ...] = ()  # a leak of one of these would only be found again
    argument: str | None = None  # the argument of `audit` that requests it
    not_run: Callable[[Finding, Any], str | None] = requested_but_not_run


def trial(name: str, does: str, finds: str, **fields: Any) -> Callable[[Function], Trial]:
    """Make a trial of the function below it; the arguments are the fields of `Trial`."""
    return lambda function: Trial(name, does, finds, function, **fields)


def describe_movement(size: float) -> str:
    """What an output does, in words: an infinite size stands for a number that turned infinite or NaN, or back.

    >>> describe_movement(0.25), describe_movement(math.inf)
    ('moves by 0.25', 'turns from finite to infinite or NaN, or back')
    """
    return "turns from finite to infinite or NaN, or back" if math.isinf(size) else f"moves by {size:.2g}"


def examine(context: Context, trial: Trial) -> Finding:
    """Run a trial, and put its name and condition on what it found."""
    context.trial, words = trial.name, context.condition.words
    try:
        result = trial.function(context)
        finding = result if isinstance(result, Finding) else _Comparisons(context, trial.pairs).finding(result)
    except Skipped as skipped:
        finding = Finding("skipped", str(skipped), (), skipped.measured)
    except LowtriError:
        raise
    except Exception as error:
        raise _raised(context, error) from error
    own: dict[str, Any] = {"paired": trial.pairs, "under": words, "drawn": context.condition.length is None}
    # Leaks that other trials found under conditions of their own keep what they are.
    leaks = tuple(replace(leak, probe=trial.name, **({} if leak.under else own)) for leak in finding.leaks)
    return replace(finding, probe=trial.name, condition=words, leaks=leaks)


@dataclass
class _Comparisons:
    """What the cases of one trial show so far."""

    context: Context
    pairs: bool
    sure: dict[tuple[int, int, int], Leak] = field(default_factory=dict)
    doubtful: dict[tuple[int, int, int], Leak] = field(default_factory=dict)
    greatest: float = 0.0
    bisected: int = 0
    runs: int = 0
    poisoned: int = 0
    watch: Any = None

    def finding(self, cases: Cases) -> Finding:
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
        pairs = self.sure or self.doubtful  # doubtful pairs add nothing to sure ones
        leaks = tuple(pairs[pair] for pair in (sorted(pairs) if self.pairs else pairs))
        measured = {"greatest": self.greatest, "runs": self.runs, "poisoned": self.poisoned, **summary.measured}
        if summary.warning:
            return Finding("warning", summary.warning, (), measured)
        if not leaks:
            return Finding("clean", summary.clean, (), measured)
        message = f"{summary.leak.format(count=len(leaks))}, {describe_difference(self.greatest)}"
        return Finding("leak" if self.sure else "doubt", message, leaks, measured, watch=self.watch)

    def take(self, case: Case) -> Difference | None:
        """Run a case, and note what differs."""
        self.runs += 1
        self.context.show_progress(self.context.trial, self.runs)
        try:
            outputs = case.outputs(self.context)
        except Exception as error:
            if case.refusable:
                return None
            raise _raised(self.context, error) from error
        difference = compare(
            *outputs, self.context.noise, case.where, same_order=case.same_order, overflows=case.overflows
        )
        self.poisoned += int((np.isinf(difference.moved) & case.where).sum())
        if case.keys is not None:
            self._follow(case, np.atleast_2d(case.keys), difference)
            return difference
        if not case.noted:
            return difference
        self.greatest = max(self.greatest, difference.greatest)
        if difference.status == "clean":
            return difference
        spots = [difference.first(of_all_rows=case.earliest)]
        if case.every:
            spots = [(r, q, float(difference.sizes[r, q])) for r, q in np.argwhere(difference.sizes > 0).tolist()]
        confirmed: dict[int, Any] = {}
        for row, position, size in spots:
            kind = difference.kind(size)
            if kind == "clean":
                continue
            leak = case.leak(row, position, size)
            if case.by_row and len(difference.sizes) > 1 and self._pair(leak) not in self.sure:
                if row not in confirmed:
                    confirmed[row] = self._row_alone(case, row)
                alone = confirmed[row]
                if alone is not None and not alone[position] >= size / 4:
                    continue  # another row of the batch does it: the trial of rows names that one
            self._note(leak, kind, case, (row, position))
        return difference

    def _row_alone(self, case: Case, row: int) -> Any:
        """How far the positions of a row, (N,), move where nothing but this row changes; None where that does not run."""
        inputs, changed, system = self.context.inputs, case.run.inputs, self.context.system
        where = np.broadcast_to(case.where, (inputs.batch, changed.n))
        if changed.n == inputs.n:
            mixed = inputs.change(np.arange(inputs.batch)[:, None] == row, changed)
            return self.context.compare(system(mixed), where).sizes[row]
        try:
            whole, short = (system(one.rows([row]))[:, : changed.n] for one in (inputs, changed))
            return compare(whole, short, self.context.noise, where[[row]]).sizes[0]
        except Exception:
            return None

    def _pair(self, leak: Leak) -> tuple[int, int, int]:
        return leak.query, leak.key, -1 if self.pairs else leak.row

    def _note(self, leak: Leak, kind: Kind, case: Case, spot: tuple[int, int]) -> None:
        sure = kind == "leak" and (bool(self.sure) or self._repeats(leak, case, spot))
        leaks, pair = self.sure if sure else self.doubtful, self._pair(leak)
        if pair not in leaks or leaks[pair].size < leak.size:
            leaks[pair] = leak
        if sure and self.watch is None:
            runs = (case.before or self.context.example).watch(*spot), case.run.watch(*spot)
            self.watch = None if None in runs else runs

    def _repeats(self, leak: Leak, case: Case, spot: tuple[int, int]) -> bool:
        """Whether the first leak shows again; then the model is known to repeat itself."""
        if case.before is not None:
            return True
        before, after = (run.compute() for run in (self.context.example, case.run))
        if before.shape != after.shape:
            return True
        return bool(compare(before, after, self.context.noise).moved[spot] >= leak.size / 2)

    def _follow(self, case: Case, changed: Bools, difference: Difference) -> None:
        """For each row, one query that moved and one key that moves it alone, by halving."""
        wrong = difference.sizes > 0  # (B, N)
        for row in np.flatnonzero(wrong.any(axis=1)).tolist():
            query = int(np.flatnonzero(wrong[row])[-1])
            kind = self.context.noise.classify(float(difference.sizes[row, query]), difference.scale)
            known = self.sure if kind == "leak" else {**self.sure, **self.doubtful}
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

    def _moved(self, case: Case, keys: Any, row: int, query: int, kind: Kind) -> tuple[float, Run] | None:
        """How far these keys of a row alone move the query, and the run that shows it; None where that is of another kind."""
        example = self.context.inputs
        one = np.isin(np.arange(example.n), keys) & (np.arange(example.batch)[:, None] == row)
        run = self.context.run(example.change(one, case.run.inputs))
        self.runs += 1
        moved = self.context.compare(run.output, same_order=True, overflows=case.overflows)
        size = float(moved.sizes[row, query])
        return (size, run) if kind != "clean" and moved.kind(size) == kind else None


def _raised(context: Context, error: Exception) -> CallError:
    """What to do about a model that raises in the middle of a trial."""
    if isinstance(error, CallError):
        return error
    fix = "the model must take any values in place of the example's"
    if isinstance(error, IndexError) and context.inputs.discrete:
        fix = f"vocab_size=, which says how many ids there are; they were drawn up to {int(context.vocabulary.max())}"
    return CallError(f"audit: the model raised {first_line(error)}, in the trial {context.trial}.\nFix: {fix}.")


def chosen_trials(names: Sequence[str] | None, trials: Sequence[Trial]) -> list[Trial]:
    """The trials to run, in the order in which they run."""
    if isinstance(names, str):
        raise CallError(f"audit: probes={names!r} is one text, expected a list of names.\nFix: probes=[{names!r}].")
    if names is not None and not len(names):
        raise CallError("audit: probes=[] would look at nothing.\nFix: name a probe, or drop probes= to run them all.")
    known = [trial.name for trial in trials]
    unknown = [name for name in names or () if name not in known]
    if unknown:
        raise CallError(f"audit: no probe is called {unknown[0]!r}; there are {', '.join(known)}.")
    return [trial for trial in trials if names is None or trial.name in names]


def run_trials(context: Context, trials: Sequence[Trial], *, first: bool = False) -> tuple[list[Finding], list[str]]:
    """Run the trials, with `first` up to the first leak; repeat those in doubt on the float64 copy.

    Returns:
        One finding for each trial, and notes on what the float64 copy decided.
    """
    findings: list[Finding] = []
    notes = []
    for trial in trials:
        if any(finding.status == "leak" and finding.probe in trial.skipped_after for finding in findings):
            # A model that leaks does so under most other conditions, too: to try them costs as much again and adds nothing.
            findings.append(Finding("skipped", "not tried, since the model leaks without it", probe=trial.name))
            continue
        finding, note = _decided(context, trial)
        findings.append(finding)
        notes += [f"{trial.name}: {note}"] if note else []
        if first and finding.status == "leak":
            break
    return findings, notes


def require_requested(
    findings: Sequence[Finding], trials: Sequence[Trial], options: Options
) -> tuple[list[Finding], list[str]]:
    """A trial that an argument requests and that did not run is undecided, never passed over.

    Returns:
        The findings, and a note for each argument whose trial was not among those to run.
    """
    by_name, notes = {finding.probe: finding for finding in findings}, []
    for trial in trials:
        value = getattr(options, trial.argument) if trial.argument else None
        if value is None or value is False:
            continue
        finding = by_name.get(trial.name)
        if finding is None:
            notes.append(f"{trial.argument}= was not used: probes= leaves {trial.name} out")
            continue
        reason = trial.not_run(finding, value)
        if reason is not None:
            message = f"{trial.argument}= was requested and did not run: {reason}"
            by_name[trial.name] = replace(finding, status="undecided", message=message)
    return list(by_name.values()), notes


def nothing_ran(findings: Sequence[Finding]) -> str | None:
    """Why there is no verdict at all, where every trial was skipped."""
    if any(finding.status != "skipped" for finding in findings):
        return None
    return "; ".join(f"{f.probe} was requested and did not run: {f.message}" for f in findings) or None


def _decided(context: Context, trial: Trial) -> tuple[Finding, str]:
    """The trial's finding, from the float64 copy where it is in doubt; and a note on what the copy decided."""
    finding = examine(context, trial)
    if finding.status != "doubt" and not (finding.status == "leak" and trial.reshapes):
        return _with_module(context, trial, finding), ""
    copy64, size = context.float64, finding.greatest
    if isinstance(copy64, str):
        return _without_copy(context, trial, finding, copy64), ""
    second = examine(copy64, trial)
    if second.status == "skipped":
        return _without_copy(context, trial, finding, second.message), ""
    if second.status != "leak" and math.isinf(size):
        reason = f"{finding.message}, in the model's precision and not in float64"
        return replace(finding, status="undecided", message=reason, leaks=()), ""
    if second.status == "clean":
        return second, f"up to {size:.2g} in the model's precision vanishes in float64: rounding"
    if second.status not in ("doubt", "undecided"):
        return _with_module(copy64, trial, second), "confirmed in float64"
    # In float64 rounding is some 1e-15; what shrank with the precision is noise that the copy still rounds.
    if second.greatest >= size / 30:
        return replace(second, status="undecided", leaks=()), ""
    sizes = f"{size:.2g} in the model's precision, {second.greatest:.2g} in float64"
    return replace(second, status="clean", message=f"nothing beyond rounding ({sizes})", leaks=()), ""


def _without_copy(context: Context, trial: Trial, finding: Finding, reason: str) -> Finding:
    """What can be said of a finding that no float64 copy decides, for the given reason."""
    if finding.status == "leak" and not (trial.reshapes and context.discrete_output):
        return _with_module(context, trial, finding)
    in_float64 = context.noise.eps <= np.finfo(np.float64).eps
    if finding.status == "doubt" and in_float64 and not context.discrete_output:
        message = f"nothing beyond the rounding of float64 ({finding.greatest:.2g})"
        return replace(finding, status="clean", message=message, leaks=())
    message = f"{finding.message}, near the noise, and no float64 copy could settle it ({reason})"
    return replace(finding, status="undecided", message=message, leaks=())


def _with_module(context: Context, trial: Trial, finding: Finding) -> Finding:
    """Name the module where each leak enters, from two runs that part there."""
    if not finding.leaks or context.system.module is None:
        return finding
    from lowtri.auditing.torch_hooks import locate

    first, pairs = finding.leaks[0], [] if finding.watch is None else [finding.watch]
    if trial.pairs:
        # The key that is furthest away: no strided part has both in one stride.
        key = max((k.key for k in finding.leaks if k.query == first.query), key=lambda key: abs(key - first.query))
        changed = context.run(context.inputs.change(np.arange(context.n) == key, context.fresh(0)))
        pairs.insert(0, tuple(run.watch(first.row, first.query) for run in (context.example, changed)))
    try:
        names = (locate(pair[0], pair[1], context.system.signature.position_axes[0]) for pair in pairs)
        name = next((name for name in names if name is not None), None)
    except Exception:
        name = None
    return replace(finding, leaks=tuple(replace(leak, module=leak.module or name) for leak in finding.leaks))

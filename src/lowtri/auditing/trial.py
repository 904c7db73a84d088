"""Trials, and the one engine that runs them.

A trial is a generator of cases: inputs, the positions whose rows must agree with the example's own, and a sentence for where they do
not. `examine` runs each case, compares, confirms what differs, and follows a change of many inputs down to one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from lowtri.auditing.context import Context, Need
from lowtri.auditing.finding import Difference, Finding, Leak, by, compare, moves
from lowtri.auditing.inputs import Inputs, first_line
from lowtri.auditing.options import Bools
from lowtri.auditing.system import Rows
from lowtri.errors import CallError

__all__ = ["Case", "Cases", "Summary", "Trial", "examine", "watch"]

_BISECTED = 16  # queries that are followed down to one key


@dataclass(frozen=True)
class Case:
    """A run, and the positions at which its rows must agree with others."""

    inputs: Inputs
    where: Bools | bool
    leak: Callable[[int, int, float], Leak]  # of a row, a position and a size
    expected: Rows | None = None  # the example's own rows
    run: Callable[[Inputs], Rows] | None = None  # the system
    same_order: bool = False  # both runs add the same sums in the same order
    non_finite: float = np.inf  # the size of what turns infinite or NaN
    every: bool = False  # each position that differs is a leak, and not only the first
    earliest: bool = False  # the first position of all rows, and not of the row that differs most
    refusable: bool = True  # the model may refuse these inputs
    only: Callable[[int], Difference | None] | None = None  # the difference where nothing but this row is changed
    narrow: Callable[[Any, int], Inputs] | None = None  # the example with these keys of one row changed
    keys: Bools | None = None  # (1 or B, N): what is changed, where `narrow` can change fewer
    watch: Callable[[int, int], Any] | None = None  # two runs of the module in which to find where they part


class Summary(NamedTuple):
    """What a trial says at its end."""

    clean: str
    leak: str  # `{count}` is the number of leaks
    measured: dict[str, Any]
    skipped: str = ""  # why nothing was tried
    warning: str = ""  # what its leaks amount to, where that is only a warning


Cases: TypeAlias = Generator[Case, Difference | None, Summary]  # is sent the difference; None where the model refuses


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
    function: Callable[[Context], Cases | Finding]
    needs: tuple[Need, ...] = ()
    pairs: bool = False  # its leaks are pairs of positions of its input; others are about lengths, pads, rows or caches
    reshapes: bool = False  # it compares runs of different shapes, where rounding can flip a discrete choice
    skipped_after: tuple[str, ...] = ()  # a leak of one of these would only be found again
    argument: str | None = None  # the argument of `audit` that requests it
    not_run: Callable[[Finding, Any], str | None] = requested_but_not_run


def examine(context: Context, trial: Trial) -> Finding:
    """Run a trial if its needs are met, and put its name and condition on what it found."""
    for need in trial.needs:
        reason = need.why_not(context)
        if reason is not None:
            return Finding("skipped", reason, probe=trial.name)
    context.trial = trial.name
    result = trial.function(context)
    finding = result if isinstance(result, Finding) else _Tally(context, trial.pairs).finding(result)
    words = context.condition.words
    by_name = trial.name if words else ""
    leaks = tuple(
        # Leaks that other trials found under conditions of their own keep what they are.
        replace(leak, probe=trial.name)
        if leak.under
        else replace(leak, probe=trial.name, paired=trial.pairs, under=words, found_by=by_name)
        for leak in finding.leaks
    )
    return replace(finding, probe=trial.name, condition=words, leaks=leaks)


@dataclass
class _Tally:
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
        pairs = self.sure or self.doubtful  # doubtful pairs add nothing to sure ones
        leaks = tuple(pairs[pair] for pair in (sorted(pairs) if self.pairs else pairs))
        measured = {"greatest": self.greatest, "runs": self.runs, "poisoned": self.poisoned, **summary.measured}
        if summary.skipped:
            return Finding("skipped", summary.skipped, (), {**measured, "greatest": 0.0})
        if summary.warning:
            return Finding("warning", summary.warning, (), measured)
        if not leaks:
            return Finding("clean", summary.clean, (), measured)
        message = f"{summary.leak.format(count=len(leaks))}, {by(self.greatest)}"
        return Finding("leak" if self.sure else "doubt", message, leaks, measured, watch=self.watch)

    def take(self, case: Case) -> Difference | None:
        """Run a case, and note what differs."""
        self.runs += 1
        expected = self.context.base if case.expected is None else case.expected
        try:
            rows = (case.run or self.context.system)(case.inputs)
            if rows.shape != expected.shape:
                raise LookupError(f"its answer has the shape {rows.shape}, expected {expected.shape}")
        except Exception as error:
            if case.refusable:
                return None
            raise _raised(self.context, error) from error
        difference = compare(
            expected, rows, self.context.noise, case.where, same_order=case.same_order, non_finite=case.non_finite
        )
        self.poisoned += int((np.isinf(difference.moved) & case.where).sum())
        if case.narrow is not None:
            self._followed(case, difference)
            return difference
        self.greatest = max(self.greatest, difference.greatest)
        if difference.status == "clean":
            return difference
        spots = [difference.first(of_all_rows=case.earliest)]
        if case.every:
            spots = [(r, q, float(difference.sizes[r, q])) for r, q in np.argwhere(difference.sizes > 0).tolist()]
        confirmed: dict[int, Difference | None] = {}
        for row, position, size in spots:
            kind = self.context.noise.classify(size, difference.scale, same_order=case.same_order)
            leak = case.leak(row, position, size)
            if kind == "clean":
                continue
            if case.only is not None and len(rows) > 1 and self._pair(leak) not in self.sure:
                if row not in confirmed:
                    confirmed[row] = case.only(row)
                alone = confirmed[row]
                if alone is not None and not alone.sizes[row, position] >= size / 4:
                    continue  # another row of the batch does it: the trial of rows names that one
            self._note(leak, kind, case, (row, position))
        return difference

    def _pair(self, leak: Leak) -> tuple[int, int, int]:
        return leak.query, leak.key, -1 if self.pairs else leak.row

    def _note(self, leak: Leak, kind: str, case: Case, spot: tuple[int, int]) -> None:
        sure = kind == "leak" and (bool(self.sure) or self._repeats(leak, case, spot))
        leaks, pair = self.sure if sure else self.doubtful, self._pair(leak)
        if pair not in leaks or leaks[pair].size < leak.size:
            leaks[pair] = leak
        if sure and self.watch is None:
            self.watch = (case.watch or self._same_place(case))(*spot)

    def _repeats(self, leak: Leak, case: Case, spot: tuple[int, int]) -> bool:
        """Whether the first leak shows again; then the model is known to repeat itself."""
        if case.expected is not None or case.run is not None:
            return True
        before, after = (self.context.system(inputs) for inputs in (self.context.inputs, case.inputs))
        if before.shape != after.shape:
            return True
        return bool(compare(before, after, self.context.noise).moved[spot] >= leak.size / 2)

    def _same_place(self, case: Case) -> Callable[[int, int], Any]:
        if case.run is not None or case.inputs.sequences[0].shape != self.context.inputs.sequences[0].shape:
            return lambda row, position: None
        return lambda row, q: (
            watch(self.context, self.context.inputs, row, q),
            watch(self.context, case.inputs, row, q),
        )

    def _followed(self, case: Case, difference: Difference) -> None:
        """For each row, one query that moved and one key that moves it alone, by halving."""
        assert case.narrow is not None and case.keys is not None
        wrong = difference.sizes > 0  # (B, N)
        for row in np.flatnonzero(wrong.any(axis=1)).tolist():
            query = int(np.flatnonzero(wrong[row])[-1])
            kind = self.context.noise.classify(float(difference.sizes[row, query]), difference.scale)
            known = {q for q, _, _ in [*self.sure, *([] if kind == "leak" else self.doubtful)]}
            if query in known or self.bisected >= _BISECTED:
                continue
            self.bisected += 1
            keys = np.flatnonzero(case.keys[row % len(case.keys)])
            moved = self._moved(case, keys, row, query)
            if moved is None or moved[1] != kind:
                continue  # a change of other rows moves it
            size, _, inputs, all_keys = *moved, len(keys)
            while len(keys) > 1:
                for half in (keys[: len(keys) // 2], keys[len(keys) // 2 :]):
                    moved = self._moved(case, half, row, query)
                    if moved is not None and moved[1] == kind:
                        break
                else:
                    break
                keys, (size, _, inputs) = half, moved
            leak = Leak(query, int(keys[0]), size, row)
            if len(keys) > 1:
                how = moves(size, f" when all {all_keys} inputs hidden from it change together")
                leak = replace(leak, note=f"output {query} {how}")
            self.greatest = max(self.greatest, size)
            self._note(leak, kind, replace(case, inputs=inputs), (row, query))

    def _moved(self, case: Case, keys: Any, row: int, query: int) -> tuple[float, str, Inputs] | None:
        assert case.narrow is not None
        inputs = case.narrow(keys, row)
        self.runs += 1
        rows = self.context.system(inputs)
        moved = self.context.compare(rows, same_order=True, non_finite=case.non_finite)
        size = float(moved.sizes[row, query])
        kind = self.context.noise.classify(size, moved.scale)
        return None if kind == "clean" else (size, kind, inputs)


def watch(context: Context, inputs: Inputs, row: int, position: int) -> Any:
    """One position of a run of the system; None for one that is no torch module."""
    system = context.system
    if system.module is None:
        return None
    from lowtri.auditing.torch_hooks import Watch

    return Watch(system.module, lambda: system(inputs), row, position, (inputs.batch, inputs.n))


def _raised(context: Context, error: Exception) -> CallError:
    """What to do about a model that raises in the middle of a trial."""
    if isinstance(error, CallError):
        return error
    fix = "the model must take any values in place of the example's"
    if isinstance(error, IndexError) and context.inputs.discrete:
        fix = f"vocab_size=, which says how many ids there are; they were drawn up to {int(context.vocabulary.max())}"
    return CallError(f"audit: the model raised {first_line(error)}, in the trial {context.trial}.\nFix: {fix}.")

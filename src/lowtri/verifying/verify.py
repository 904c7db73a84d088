"""``verify``: compares anyone's attention with the definition, and names the mistake where it differs."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from lowtri.errors import CallError
from lowtri.progress import ProgressLine
from lowtri.verifying.calling import TOP_LEFT, CallFailed, Calls, caller_of, maker_of, name_of
from lowtri.verifying.cases import CASES, Case
from lowtri.verifying.isolation import ChildProcess
from lowtri.verifying.judging import Comparison, drawn, expected
from lowtri.verifying.mistakes import MISTAKES, ROUNDINGS
from lowtri.verifying.report import Difference, VerifyReport

DTYPES = ("float32", "bfloat16", "float16", "float64")
_SMALLER = 24  # calls to find the smallest case that shows an unexplained difference
_FREQUENT = ("scale missing", "window one too wide", "window one too narrow", "softcap missing", "mask inverted")
_PAIRED = 6  # unexplained calls for which two mistakes together are tried


def verify(
    attend: Callable[..., Any],
    *,
    signature: str | Callable[..., Any] = "mask",
    dtypes: Sequence[str] | None = None,
    device: str = "cpu",
    gradients: bool = True,
    cases: str | Iterable[str] | None = None,
    differences: Mapping[str, str] | None = None,
    limit: float = 60.0,
    seed: int = 0,
    isolate: bool = False,
    progress: bool | None = None,
) -> VerifyReport:
    """Whether a function computes masked attention; where it does not, which well-known mistake it makes.

    >>> import lowtri, torch
    >>> def attend(q, k, v, mask):
    ...     scores = q @ k.mT  # the scale is missing
    ...     visible = torch.from_numpy(mask.dense(q.shape[2], k.shape[2]))
    ...     return scores.masked_fill(~visible, -torch.inf).softmax(-1) @ v
    >>> report = lowtri.verify(attend, dtypes=["float32"], cases=["causal", "full"])
    >>> report.ok, report.mistakes
    (False, ('scale missing',))

    Each case is compared with the definition in float64. An error may be twice the plain formula's own in the same dtype and
    two units in the last place (as root of the mean square 1.5 times). Options that the callable does not take are listed as
    not offered, which is no failure.

    Args:
        attend: the function. It takes and returns NumPy arrays, torch tensors or JAX arrays.
        signature: how it is called. "mask": ``attend(q, k, v, mask, ...)`` with arrays (B, H, N, D) and a lowtri mask;
            "sdpa": torch's arguments; "flash": flash-attn's, with arrays (B, N, H, D); "flex": FlexAttention's. Or a function
            ``call(attend, given)`` that makes the call and returns the output (B, H, N, D), or (output, lse); ``given`` is
            :class:`lowtri.verifying.definition.Problem`. It raises NotImplementedError for what cannot be expressed.
        dtypes: of "float32", "bfloat16", "float16", "float64"; default: the first three, of which those count that it takes.
        device: where torch tensors lie.
        gradients: whether gradients are compared, too.
        cases: names of cases, or a text that their names contain; default: all.
        differences: documented differences: the name of a case or of a mistake, and the sentence that documents it.
        limit: seconds that one call may take.
        seed: of the random numbers.
        isolate: whether calls are made in a child process, so that a segmentation fault or an exit is a difference with its case.
            What the function prints goes to stderr then, and torch has one thread. Needs os.fork.
        progress: whether to show progress on stderr; by default only if stderr is a terminal.

    Raises:
        CallError: if an argument is wrong, or ``attend`` takes no arrays at all.
    """
    started = time.perf_counter()
    if not callable(attend):
        raise CallError(
            f"verify: attend is {type(attend).__name__}; expected a function.\nFix: pass the function itself."
        )
    _check(seed, {} if differences is None else differences)
    if not isinstance(limit, int | float) or not 0 < limit < float("inf"):
        raise CallError(f"verify: limit={limit!r:.60}; expected seconds, above 0. Fix: limit=60.")
    chosen, names = [replace(case, seed=seed) for case in _cases(cases)], _dtypes(dtypes)
    with contextlib.ExitStack() as stack:
        here = maker_of(attend, signature, device, gradients, limit)
        make: Callable[[str], Calls] = here
        if isolate:
            make = stack.enter_context(ChildProcess(here, limit)).caller
        _check_device(device)  # after the fork: a process that has used CUDA cannot be forked
        run = _Verification(caller_of(attend, make, names), dict(differences or {}))
        line = stack.enter_context(ProgressLine("verify", progress))
        for number, (dtype, case) in enumerate(itertools.product(names, chosen), start=1):
            line.show(f"{number} of {len(names) * len(chosen)}, {case.name}, {dtype}")
            run.try_case(case, dtype)
        line.show("which mistakes explain the differences")
        findings = run.findings()
    undocumented: Counter[str] = Counter()
    for finding in findings:
        if finding.mistake and not finding.known:
            undocumented[finding.mistake] += finding.cases
    return VerifyReport(
        name=name_of(attend),
        arrays=run.caller.arrays,
        results={case.name: {dtype: run.status[case, dtype] for dtype in names} for case in chosen},
        findings=tuple(findings),
        mistakes=tuple(dict.fromkeys(one for both, _ in undocumented.most_common() for one in both.split(" and "))),
        not_offered=run.not_offered,
        stopped=run.stopped,
        seconds=time.perf_counter() - started,
        with_nan=frozenset(case.name for case in chosen if not case.is_finite),
    )


class _Verification:
    """The state of one verification."""

    def __init__(self, caller: Calls, known: Mapping[str, str]) -> None:
        self.caller, self.known = caller, known
        self.status: dict[tuple[Case, str], str] = {}  # of each case and dtype, as the report has it
        self.comparisons: list[Comparison] = []  # the calls that gave a wrong result
        self.failures: list[tuple[Case, str, CallFailed]] = []  # the calls that gave none
        self.notes: list[tuple[Case, str, CallFailed]] = []  # what is wrong with results beside their numbers
        # Cases and dtypes with a difference that no sentence documents.
        self.undocumented: set[tuple[Case, str]] = set()
        self.not_offered = caller.no_gradient  # options, and why
        self.stopped: str | None = None  # why it ended early
        self.has_gradients = False

    def try_case(self, case: Case, dtype: str) -> None:
        """Each call of a case in one dtype."""
        if self.stopped is not None:
            self.status[case, dtype] = "not tried"
            return
        try:
            comparisons = self._comparisons(case, dtype)
            notes = [*self.caller.noted, *self._compare_runs(comparisons, case, dtype)]
            wrong = [comparison for comparison in comparisons if comparison.differences]
            self.comparisons += wrong
            self.notes += [(case, dtype, note) for note in notes]
            self.status[case, dtype] = "wrong" if wrong or notes else "right"
        except CallFailed as error:
            self.failures.append((case, dtype, error))
            self.status[case, dtype] = {"timeout": "not tried", "not offered": "not offered"}.get(error.status, "wrong")
            if error.status == "not offered":
                self.not_offered[str(error)] = "its signature has no argument for it, or it raises NotImplementedError"
            elif error.status == "timeout":
                self.stopped = f"{case.name}, {dtype}: {error}; the cases after it were not tried"

    def _compare_runs(self, comparisons: Sequence[Comparison], case: Case, dtype: str) -> list[CallFailed]:
        """What to note where a second call of a case does not give the same bits."""
        kind = getattr(torch, dtype)
        again = self.caller.results(drawn(case, kind), kind)
        for comparison, (_, second) in zip(comparisons, again, strict=True):
            for what, x in comparison.actual.items():
                if not torch.equal(x.nan_to_num(7.0), second[what].nan_to_num(7.0)):
                    size = float((x - second[what]).abs().nan_to_num(0.0).max())
                    words = f"two equal calls differ by {size:.2g} in the {what}"
                    words += ": random numbers, or sums in no fixed order"
                    return [CallFailed("wrong", words, "differs from run to run")]
        return []

    def findings(self) -> list[Difference]:
        """What differs, with the mistakes that explain it; afterwards ``status`` and ``not_offered`` are complete."""
        failed = {(case, dtype) for case, dtype, _ in self.failures}
        tried = [key for key, status in self.status.items() if status != "not tried" and key not in failed]
        offered = {feature for case, dtype in tried for feature in (*case.features, dtype)}
        # What cannot be compared is said once, with the number of its cases.
        once: dict[tuple[str, ...], Difference] = {}
        for case, dtype, error in self.failures + self.notes:
            missing, words = {*case.features, dtype} - offered, str(error)
            if error.status == "raised" and missing:
                self.not_offered.update(dict.fromkeys(missing, words))
                self.status[case, dtype] = "not offered"
            elif error.status not in ("timeout", "not offered"):
                words = f"it raised {words}" if error.status in ("raised", "crashed") else words
                known = self._known(case, dtype, case.name, error.mistake)
                one = Difference(case.name, dtype, words, mistake=error.mistake, known=known, cases=0)
                case_name = case.name if error.status == "ended" else ""  # each of these is worth its line
                key = (error.mistake or words, dtype, known, case_name)
                first = once.setdefault(key, one)
                once[key] = replace(first, cases=first.cases + 1)
        findings = list(once.values())
        for comparison, mistake in zip(self.comparisons, self._mistakes(), strict=True):
            known = self._known(comparison.case, comparison.dtype, comparison.case.name, comparison.name, mistake)
            findings += [
                replace(one, mistake=mistake, where=mistake or one.where, known=known) for one in comparison.differences
            ]
        for i, one in enumerate(findings):
            if not one.mistake and one.difference is not None and not one.known:
                comparison = min((t for t in self.comparisons if t.name == one.case), key=_pairs)
                findings[i] = replace(one, where=f"{one.where}; smallest case: {self._smallest(comparison)}")
                break
        return findings

    def _comparisons(self, case: Case, dtype: str) -> list[Comparison]:
        """The calls of a case; without gradients from the first one on that has no backward pass."""
        kind = getattr(torch, dtype)
        problem = drawn(case, kind)
        try:
            results = self.caller.results(problem, kind)
        except CallFailed as error:
            if error.status != "raised" or self.has_gradients or not (self.caller.gradients and case.gradients):
                raise
            self.caller.gradients = False
            try:
                results = self.caller.results(problem, kind)
            except CallFailed:
                self.caller.gradients = True
                raise
            self.not_offered["gradients"] = str(error)
        self.has_gradients |= any("gradient of q" in actual for _, actual in results)
        return [
            Comparison(
                expected(case, kind, way == TOP_LEFT, "gradient of q" in actual),
                dtype,
                f"{case.name} ({way})" if way else case.name,
                actual,
            )
            for way, actual in results
        ]

    def _mistakes(self) -> list[str]:
        """For each wrong call, of the mistakes that explain it, the one that explains most calls; "" for none."""
        matches = [comparison.explain() for comparison in self.comparisons]
        chosen: dict[int, str] = {}
        while votes := Counter(name for i, names in enumerate(matches) if i not in chosen for name in names):
            best = max(votes, key=lambda name: (votes[name], -list(MISTAKES).index(name)))
            if best in ROUNDINGS and 2 * votes[best] < len(matches) - len(chosen):  # rounding shows in most calls
                matches = [{name: rest for name, rest in names.items() if name != best} for names in matches]
                continue
            chosen |= {i: best for i, names in enumerate(matches) if i not in chosen and best in names}
        singles = list(dict.fromkeys(chosen.values())) or _FREQUENT
        unexplained = [i for i in range(len(matches)) if i not in chosen]
        for i in sorted(unexplained, key=lambda i: _pairs(self.comparisons[i]))[:_PAIRED]:
            if pairs := self.comparisons[i].explain(singles) or self.comparisons[i].explain(results=["output"]):
                chosen[i] = min(pairs, key=pairs.__getitem__)
        return [chosen.get(i, "") for i in range(len(matches))]

    def _known(self, case: Case, dtype: str, *names: str) -> str:
        """The sentence that documents a difference of a case, which then counts as documented; or ""."""
        known = next((sentence for key, sentence in self.known.items() if key in names), "")
        if not known:
            self.undocumented.add((case, dtype))
        self.status[case, dtype] = "wrong" if (case, dtype) in self.undocumented else "documented"
        return known

    def _smallest(self, comparison: Comparison) -> str:
        """The sizes of the smallest case that still differs."""
        case, calls = comparison.case, 0
        candidates = case.smaller()
        while candidates and calls < _SMALLER:
            smaller, calls = candidates.pop(0), calls + 1
            try:
                if any(one.differences for one in self._comparisons(smaller, comparison.dtype)):
                    case, candidates = smaller, smaller.smaller()
            except CallFailed:  # another kind of failure shows less
                continue
        sizes = f"B {case.b}, heads {case.hq}/{case.hkv}, Nq {case.nq}, Nk {case.nk}, D {case.d}, Dv {case.dv}"
        return f"{sizes}, mask {case.text}"


def _pairs(comparison: Comparison) -> int:
    return comparison.expected.problem.visible.numel()


def _check_device(device: str) -> None:
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, TypeError, ValueError) as error:
        first = str(error).splitlines()[0]
        fix = "a device that this torch has, such as cpu"
        raise CallError(f"verify: device={device!r}: {first}.\nFix: {fix}.") from None


def _check(seed: int, differences: Mapping[str, str]) -> None:
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise CallError(f"verify: seed={seed!r}; expected a whole number, at least 0.")
    if not isinstance(differences, Mapping):
        raise CallError(
            f"verify: differences is {type(differences).__name__}; expected a dict.\n"
            "Fix: {name of a case or a mistake: the sentence that documents it}."
        )
    known = {
        *(case.name for case in CASES),
        *MISTAKES,
        "differs from run to run",
        "changes its arguments",
        "ends its process",
    }
    for name in map(str, differences):
        if not name.startswith("returns ") and not any(
            one in known for one in (name, name.partition(" (")[0], *name.split(" and "))
        ):
            raise CallError(
                f"verify: differences={name!r} is neither a case nor a mistake.\n"
                f"Fix: one of {', '.join(list(MISTAKES)[:4])}, ... or a case's name (lowtri.verifying.cases.CASES)."
            )


def _cases(cases: str | Iterable[str] | None) -> list[Case]:
    known = {case.name: case for case in CASES}
    if cases is not None and not isinstance(cases, Iterable):
        raise CallError(f"verify: cases={cases!r:.60}; expected names of cases, or a part of a name.")
    if isinstance(cases, str):
        names = [name for name in known if cases in name]
    else:
        names = list(known) if cases is None else [str(name) for name in cases]
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        raise CallError(
            f"verify: cases={(unknown[0] if unknown else cases)!r}, which is in the name of no case.\nFix: one of "
            f"{', '.join(list(known)[:6])}, ... (lowtri.verifying.cases.CASES), or a part of a name."
        )
    return [known[name] for name in names]


def _dtypes(dtypes: Sequence[str] | None) -> list[str]:
    if dtypes is not None and not isinstance(dtypes, Iterable):
        raise CallError(f"verify: dtypes={dtypes!r:.60}; expected {', '.join(DTYPES)}.\nFix: one or more of these.")
    given = DTYPES[:3] if dtypes is None else dtypes
    given = [given] if isinstance(given, str) else given
    names = [str(one).removeprefix("torch.") for one in given]
    unknown = [name for name in names if name not in DTYPES]
    if unknown or not names:
        expected_names = ", ".join(DTYPES)
        raise CallError(
            f"verify: dtypes={(unknown or names)!r}; expected {expected_names}.\nFix: one or more of these."
        )
    return names

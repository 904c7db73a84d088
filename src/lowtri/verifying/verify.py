"""``verify``: compares anyone's attention with the definition, and names the mistake where it differs."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch

from lowtri.errors import CallError
from lowtri.verifying.calling import Caller, CallFailed, caller_of, name_of
from lowtri.verifying.cases import CASES, Case
from lowtri.verifying.definition import Call, Results
from lowtri.verifying.judging import Trial, tolerances
from lowtri.verifying.mistakes import MISTAKES, ROUNDINGS
from lowtri.verifying.report import Finding, VerifyReport

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
            :class:`lowtri.verifying.definition.Call`. It raises NotImplementedError for what cannot be expressed.
        dtypes: of "float32", "bfloat16", "float16", "float64"; default: the first three, of which those count that it takes.
        device: where torch tensors lie.
        gradients: whether gradients are compared, too.
        cases: names of cases, or a text that their names contain; default: all.
        differences: documented differences: the name of a case or of a mistake, and the sentence that documents it.
        limit: seconds that one call may take.
        seed: of the random numbers.

    Raises:
        CallError: if an argument is wrong, or ``attend`` takes no arrays at all.
    """
    started = time.perf_counter()
    if not callable(attend):
        raise CallError(
            f"verify: attend is {type(attend).__name__}; expected a function.\nFix: pass the function itself."
        )
    _check(device, seed, differences or {})
    chosen = [replace(case, seed=seed) for case in _cases(cases)]
    names = _dtypes(dtypes)
    run = _Verification(caller_of(attend, signature, names, device, gradients, limit), dict(differences or {}))
    for dtype in names:
        for case in chosen:
            run.try_case(case, dtype)
    run.repeat(chosen, names[0])
    findings = run.findings()
    undocumented = Counter(finding.mistake for finding in findings if finding.mistake and not finding.known)
    return VerifyReport(
        name=name_of(attend),
        arrays=run.caller.arrays,
        results={case.name: {dtype: run.status[case, dtype] for dtype in names} for case in chosen},
        findings=tuple(findings),
        mistakes=tuple(dict.fromkeys(one for both, _ in undocumented.most_common() for one in both.split(" and "))),
        not_offered=run.not_offered,
        stopped=run.stopped,
        seconds=time.perf_counter() - started,
    )


class _Verification:
    """The state of one verification.

    Attributes:
        status: of each case and dtype: "right", "wrong", "documented", "not offered" or "not tried".
        trials: the calls that gave a wrong result, with their findings.
        failures: the calls that gave none: case, dtype, and the exception.
        not_offered: options, and why they are not offered.
        stopped: why the verification ended early, or None.
    """

    def __init__(self, caller: Caller, known: Mapping[str, str]) -> None:
        self.caller, self.known = caller, known
        self.status: dict[tuple[Case, str], str] = {}
        self.trials: list[tuple[Trial, list[Finding]]] = []
        self.failures: list[tuple[Case, str, CallFailed]] = []
        self.not_offered = caller.no_gradient
        self.stopped: str | None = None
        self.has_gradients = False

    def try_case(self, case: Case, dtype: str) -> None:
        """Each call of a case in one dtype."""
        if self.stopped is not None:
            self.status[case, dtype] = "not tried"
            return
        try:
            trials = [(trial, list(trial.findings())) for trial in self._trials(case, dtype)]
        except CallFailed as error:
            self.failures.append((case, dtype, error))
            self.status[case, dtype] = {"timeout": "not tried", "not offered": "not offered"}.get(error.status, "wrong")
            if error.status == "not offered":
                self.not_offered[str(error)] = "its signature has no argument for it, or it raises NotImplementedError"
            elif error.status == "timeout":
                self.stopped = f"{case.name}, {dtype}: {error}; the cases after it were not tried"
            return
        wrong = [(trial, findings) for trial, findings in trials if findings]
        self.trials += wrong
        self.status[case, dtype] = "wrong" if wrong else "right"

    def repeat(self, cases: Sequence[Case], dtype: str) -> None:
        """Check that a repeated call gives the same bits."""
        case = max(cases, key=lambda one: one.nq * one.nk)
        if self.stopped is not None or any(case is failed for failed, _, _ in self.failures):
            return
        call = _call(case, getattr(torch, dtype))
        one, other = (self.caller.results(call, getattr(torch, dtype)) for _ in range(2))
        for (_, first), (_, second) in zip(one, other, strict=True):
            for what, x in first.items():
                if not torch.equal(x.nan_to_num(7.0), second[what].nan_to_num(7.0)):
                    size = float((x - second[what]).abs().nan_to_num(0.0).max())
                    words = (
                        f"two equal calls differ by {size:.2g} in the {what}: random numbers, or sums in no fixed order"
                    )
                    self.failures.append((case, dtype, CallFailed("wrong", words)))
                    self.status[case, dtype] = "wrong"
                    return

    def findings(self) -> list[Finding]:
        """What differs, with the mistakes that explain it; afterwards ``status`` and ``not_offered`` are complete."""
        offered = {
            feature
            for (case, dtype), status in self.status.items()
            if status == "right"
            for feature in (*case.features, dtype)
        }
        offered |= {feature for trial, each in self.trials for feature in (*trial.call.case.features, each[0].dtype)}
        findings = []
        for case, dtype, error in self.failures:
            missing, words = {*case.features, dtype} - offered, str(error)
            if error.status == "raised" and missing:
                self.not_offered.update(dict.fromkeys(missing, words))
                self.status[case, dtype] = "not offered"
            elif error.status not in ("timeout", "not offered"):
                words = f"it raised {words}" if error.status in ("raised", "crashed") else words
                findings.append(Finding(case.name, dtype, words, known=self._known(case.name)))
                if findings[-1].known:
                    self.status[case, dtype] = "documented"
        for (trial, each), mistake in zip(self.trials, self._mistakes(), strict=True):
            known = self._known(trial.call.case.name, trial.name, mistake)
            findings += [replace(one, mistake=mistake, where=mistake or one.where, known=known) for one in each]
            if known:
                self.status[trial.call.case, each[0].dtype] = "documented"
        for i, one in enumerate(findings):
            if not one.mistake and one.difference is not None and not one.known:
                trial = min((t for t, _ in self.trials if t.name == one.case), key=lambda t: t.call.visible.numel())
                findings[i] = replace(one, where=f"{one.where}; smallest case: {self._smallest(trial)}")
                break
        return findings

    def _trials(self, case: Case, dtype: str) -> list[Trial]:
        """The calls of a case."""
        kind = getattr(torch, dtype)
        call = _call(case, kind)
        try:
            results = self.caller.results(call, kind)
        except CallFailed as error:
            if error.status != "raised" or self.has_gradients or not (self.caller.gradients and case.gradients):
                raise
            self.caller.gradients = False  # perhaps it has no backward pass
            try:
                results = self.caller.results(call, kind)
            except CallFailed:
                self.caller.gradients = True
                raise
            self.not_offered["gradients"] = str(error)
        trials = []
        for arguments, actual in results:
            gradients = "gradient of q" in actual
            self.has_gradients |= gradients
            right, clean, exact, allowed = _expected(case, kind, arguments.top_left, gradients)
            name = f"{case.name} ({arguments.name})" if arguments.name else case.name
            trials.append(Trial(right, clean, kind, name, exact, actual, allowed))
        return trials

    def _mistakes(self) -> list[str]:
        """For each wrong call, of the mistakes that explain it, the one that explains most calls; "" for none."""
        matches = [trial.explain() for trial, _ in self.trials]
        chosen: dict[int, str] = {}
        while votes := Counter(name for i, names in enumerate(matches) if i not in chosen for name in names):
            best = max(votes, key=lambda name: (votes[name], -list(MISTAKES).index(name)))
            if best in ROUNDINGS and 2 * votes[best] < len(matches) - len(chosen):  # rounding shows in most calls
                matches = [{name: rest for name, rest in names.items() if name != best} for names in matches]
                continue
            chosen |= {i: best for i, names in enumerate(matches) if i not in chosen and best in names}
        singles = list(dict.fromkeys(chosen.values())) or _FREQUENT
        unexplained = [i for i in range(len(matches)) if i not in chosen]
        for i in sorted(unexplained, key=lambda i: self.trials[i][0].call.visible.numel())[:_PAIRED]:
            trial = self.trials[i][0]
            if pairs := trial.explain(singles) or trial.explain(results=["output"]):
                chosen[i] = min(pairs, key=pairs.__getitem__)
        return [chosen.get(i, "") for i in range(len(matches))]

    def _known(self, *names: str) -> str:
        return next((sentence for key, sentence in self.known.items() if key in names), "")

    def _smallest(self, trial: Trial) -> str:
        """The sizes of the smallest case that still differs."""
        case, dtype = trial.call.case, str(trial.dtype).removeprefix("torch.")
        candidates, calls = case.smaller(), 0
        while candidates and calls < _SMALLER:
            smaller, calls = candidates.pop(0), calls + 1
            try:
                if any(True for one in self._trials(smaller, dtype) for _ in one.findings()):
                    case, candidates = smaller, smaller.smaller()
            except CallFailed:  # another kind of failure shows less
                continue
        sizes = f"B {case.b}, heads {case.hq}/{case.hkv}, Nq {case.nq}, Nk {case.nk}, D {case.d}, Dv {case.dv}"
        return f"{sizes}, mask {case.text}"


@lru_cache(maxsize=256)  # of all cases in four dtypes, for the next function that is verified
def _call(case: Case, dtype: torch.dtype) -> Call:
    return case.draw(dtype)


@lru_cache(maxsize=256)
def _expected(
    case: Case, dtype: torch.dtype, top_left: bool, gradients: bool
) -> tuple[Call, Call, Results, dict[str, tuple[float, float]]]:
    """The call, the same with 0 for NaN and inf that no query sees, what the definition gives, and the tolerances."""
    call = _call(case, dtype)
    if top_left:
        call = replace(call, visible=torch.ones(case.nq, case.nk, dtype=torch.bool).tril().expand(case.visible.shape))
    clean = replace(call, q=torch.where(call.visible.any(-1)[..., None], call.q, 0.0))
    if case.numbers != "NaN seen late":
        seen = call.visible.any(2).any(1)[:, None, :, None]
        clean = replace(clean, k=torch.where(seen, call.k, 0.0), v=torch.where(seen, call.v, 0.0))
    exact = clean.results(gradients)
    return call, clean, exact, tolerances(clean, exact, dtype)


def _check(device: str, seed: int, differences: Mapping[str, str]) -> None:
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise CallError(f"verify: seed={seed!r}; expected a whole number, at least 0.")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, TypeError) as error:
        first = str(error).splitlines()[0]
        raise CallError(
            f"verify: device={device!r}: {first}.\nFix: a device that this torch has, such as cpu."
        ) from None
    known = {*(case.name for case in CASES), *MISTAKES}
    for name in differences:
        if not any(one in known for one in (name, name.partition(" (")[0], *name.split(" and "))):
            raise CallError(
                f"verify: differences={name!r} is neither a case nor a mistake.\n"
                f"Fix: one of {', '.join(list(MISTAKES)[:4])}, ... or a case's name (lowtri.verifying.cases.CASES)."
            )


def _cases(cases: str | Iterable[str] | None) -> list[Case]:
    known = {case.name: case for case in CASES}
    names = (
        [name for name in known if cases in name] if isinstance(cases, str) else list(known if cases is None else cases)
    )
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        raise CallError(
            f"verify: cases={(unknown[0] if unknown else cases)!r}, which is in the name of no case.\nFix: one of "
            f"{', '.join(list(known)[:6])}, ... (lowtri.verifying.cases.CASES), or a part of a name."
        )
    return [known[name] for name in names]


def _dtypes(dtypes: Sequence[str] | None) -> list[str]:
    given = DTYPES[:3] if dtypes is None else [dtypes] if isinstance(dtypes, str) else dtypes
    names = [str(one).removeprefix("torch.") for one in given]
    unknown = [name for name in names if name not in DTYPES]
    if unknown or not names:
        raise CallError(
            f"verify: dtypes={(unknown or names)!r}; expected {', '.join(DTYPES)}.\nFix: one or more of these."
        )
    return names

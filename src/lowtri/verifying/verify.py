"""``verify``: hold anyone's attention to the definition, and name the mistake where it differs."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from lowtri.errors import CallError
from lowtri.verifying.cases import CASES, Case
from lowtri.verifying.judging import Difference, Trial, differences_of, explain, limits, where
from lowtri.verifying.report import Finding, VerifyReport
from lowtri.verifying.running import Broken, NoAnswer, Refused, Runner, arrays_that_work
from lowtri.verifying.signatures import SIGNATURES, NotOffered, Signature, custom

__all__ = ["verify"]

DTYPES = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16", "float64")}
_SHRINKS = 24  # calls to find the smallest case that shows an unexplained difference


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
    (False, ['scale missing'])

    Each case is compared with the definition in float64. An error may be twice the plain formula's own in the same dtype and
    two units in the last place (as root of the mean square 1.5 times). What the callable does not take, it does not offer:
    that is listed and is no failure.

    Args:
        attend: the function. It takes and returns NumPy arrays, torch tensors or JAX arrays.
        signature: how it is called. "mask": ``attend(q, k, v, mask, ...)`` with arrays (B, H, N, D) and a lowtri mask;
            "sdpa": torch's arguments; "flash": flash-attn's, with arrays (B, N, H, D); "flex": FlexAttention's. Or a function
            ``call(attend, given)`` that makes the call and returns the output (B, H, N, D), or (output, lse); ``given`` is
            :class:`lowtri.verifying.signatures.Given`. It raises NotImplementedError for what cannot be expressed.
        dtypes: of "float32", "bfloat16", "float16", "float64"; default: the first three, of which those count that it takes.
        device: where torch tensors lie.
        gradients: whether gradients of q, k and v are compared too.
        cases: names of cases, or a text that their names contain; default: all.
        differences: documented differences: the name of a case or of a mistake, and the sentence that documents it.
        limit: seconds that one call may take.
        seed: of the random numbers.

    Raises:
        CallError: if an argument is wrong, or ``attend`` takes no arrays at all.
    """
    started = time.perf_counter()
    chosen = [replace(case, seed=seed) for case in _chosen(cases)]
    if not callable(attend):
        raise CallError(
            f"verify: attend is {type(attend).__name__}; expected a function.\nFix: pass the function itself."
        )
    name = getattr(attend, "__name__", type(attend).__name__)
    attend, how = _signature(attend, signature)
    given = _dtypes(dtypes)
    arrays = arrays_that_work(attend, how, device, limit)
    run = _Run(Runner(attend, how, arrays, device, gradients, limit), dict(differences or {}))
    for dtype in given:
        for case in chosen:
            if run.stopped is None:
                run.try_case(case, DTYPES[dtype])
    run.repeat(chosen, DTYPES[given[0]])
    return run.report(name, arrays, given, time.perf_counter() - started)


class _Run:
    """The state of one verification."""

    def __init__(self, runner: Runner, known: dict[str, str]) -> None:
        self.runner, self.known = runner, known
        self.stopped: str | None = None
        self.passed: list[tuple[Case, str]] = []
        self.wrong: list[tuple[Trial, list[Difference]]] = []
        self.raised: list[tuple[Case, str, str]] = []  # case, dtype, words
        self.broken: list[tuple[Case, str, str]] = []
        self.lacking: dict[str, str] = {}

    def try_case(self, case: Case, dtype: torch.dtype) -> None:
        """Every call of one case in one dtype."""
        name = str(dtype).removeprefix("torch.")
        try:
            wrong = [(trial, list(differences_of(trial))) for trial in self.trials(case, dtype)]
            wrong = [(trial, each) for trial, each in wrong if each]
            self.wrong += wrong
            if not wrong:
                self.passed.append((case, name))
        except NotOffered as error:
            self.lacking[str(error)] = "its signature has no argument for it"
        except NoAnswer as error:
            self.stopped = f"{case.name}, {name}: {error}; what follows was not tried"
        except Broken as error:
            self.broken.append((case, name, str(error)))
        except Refused as error:
            self.raised.append((case, name, str(error)))

    def trials(self, case: Case, dtype: torch.dtype) -> list[Trial]:
        """The calls of a case."""
        numbers, found = case.draw(dtype), []
        clean = numbers._replace(q=_clean(numbers.q, case.visible.any(-1)))
        if case.numbers != "NaN seen late":  # garbage that nobody sees counts as 0
            seen = case.visible.any(2).any(1)[:, None].expand(-1, case.hkv, -1)
            clean = clean._replace(k=_clean(numbers.k, seen), v=_clean(numbers.v, seen))
        for binding in self.runner.signature.bind(case, numbers, lambda x: self.runner.convert(x, dtype)):
            right = case.formula(clean)
            if binding.visible is not None:
                right = replace(right, visible=binding.visible)
            wants = self.runner.gradients and case.gradients
            exact = right(clean.q, clean.k, clean.v, clean.d_output if wants else None)
            actual = self.runner.run(case, numbers, binding, dtype)
            allowed = limits(case, clean, right, exact, dtype)
            found.append(Trial(case, numbers, clean, dtype, binding.how, right, exact, actual, allowed))
        return found

    def repeat(self, cases: Sequence[Case], dtype: torch.dtype) -> None:
        """The same call twice gives the same bits."""
        case = max(cases, key=lambda one: one.nq * one.nk, default=None)
        if case is None or self.stopped or any(one[0] is case for one in (*self.raised, *self.broken)):
            return
        try:
            one, other = (self.trials(case, dtype) for _ in range(2))
        except (NotOffered, NoAnswer, Broken, Refused):  # reported where the case was tried
            return
        for first, second in zip(one, other, strict=True):
            for name, x in first.actual.items():
                if not torch.equal(x.nan_to_num(7.0), second.actual[name].nan_to_num(7.0)):
                    size = float((x - second.actual[name]).abs().nan_to_num(0.0).max())
                    words = (
                        f"two equal calls differ by {size:.2g} in the {name}: random numbers, or sums in no fixed order"
                    )
                    self.broken.append((case, str(dtype).removeprefix("torch."), words))
                    return

    def report(self, name: str, arrays: str, dtypes: Sequence[str], seconds: float) -> VerifyReport:
        """Which features are not offered, and which mistakes explain what differs."""
        offered = {feature for case, dtype in self.passed for feature in (*case.features, dtype)}
        offered |= {feature for trial, _ in self.wrong for feature in (*trial.case.features, _name(trial))}
        findings = [
            Finding(case.name, dtype, words, "", None, None, (), self._known(case.name))
            for case, dtype, words in self.broken
        ]
        for case, dtype, words in self.raised:
            missing = {*case.features, dtype} - offered
            if missing:
                self.lacking |= dict.fromkeys(missing, words)
            else:
                findings.append(
                    Finding(case.name, dtype, f"it raised {words}", "", None, None, (), self._known(case.name))
                )
        findings += self._named()
        order = Counter(f.mistake for f in findings if f.mistake and not f.known)
        mistakes = list(dict.fromkeys(one for names, _ in order.most_common() for one in names.split(" and ")))
        return VerifyReport(
            name,
            arrays,
            tuple(dtypes),
            len(self.passed),
            tuple(findings),
            tuple(mistakes),
            self.lacking,
            self.stopped,
            seconds,
        )

    def _named(self) -> list[Finding]:
        """Each wrong call with the mistake that explains most of the calls that it explains."""
        matches = [set(explain(trial)) for trial, _ in self.wrong]
        chosen: dict[int, str] = {}
        while votes := Counter(name for i, names in enumerate(matches) if i not in chosen for name in names):
            best = max(votes, key=lambda name: (votes[name], -_rank(name)))
            chosen |= {i: best for i, names in enumerate(matches) if i not in chosen and best in names}
        singles = list(dict.fromkeys(chosen.values())) or _FREQUENT
        unexplained = sorted((i for i in range(len(matches)) if i not in chosen), key=lambda i: self.wrong[i][0].size)
        for i in unexplained[:_PAIRED]:
            trial = self.wrong[i][0]
            found = explain(trial, singles) or explain(trial, results=["output"])
            if found:
                chosen[i] = min(found, key=found.__getitem__)
        findings = []
        for i, (trial, each) in enumerate(self.wrong):
            mistake, how = chosen.get(i, ""), f"{trial.case.name} ({trial.how})" if trial.how else trial.case.name
            known = self._known(trial.case.name, mistake, how)
            for one in each:
                place = mistake or where(trial, one)
                if not mistake and i == unexplained[0] and one is each[0]:
                    place += f"; smallest case: {self._smallest(trial)}"
                size, limit = one.size, one.tolerance
                findings.append(Finding(how, _name(trial), place, mistake, size, limit, one.position, known, one.what))
        return findings

    def _known(self, *names: str) -> str:
        return next((sentence for key, sentence in self.known.items() if key in names), "")

    def _smallest(self, trial: Trial) -> str:
        """The sizes of the smallest case that still differs."""
        case, calls = trial.case, 0
        while True:
            for smaller in case.smaller():
                calls += 1
                if calls > _SHRINKS:
                    break
                try:
                    found = self.trials(smaller, trial.dtype)
                    if any(True for one in found for _ in differences_of(one)):
                        case = smaller
                        break
                except (NotOffered, NoAnswer, Broken, Refused):  # another kind of failure shows less
                    continue
            else:
                break
            if calls > _SHRINKS:
                break
        sizes = f"B {case.b}, heads {case.hq}/{case.hkv}, Nq {case.nq}, Nk {case.nk}, D {case.d}, Dv {case.dv}"
        return f"{sizes}, mask {case.text}"


_FREQUENT = ["scale missing", "window one too wide", "window one too narrow", "softcap missing", "mask inverted"]
_PAIRED = 6  # unexplained calls for which two mistakes together are tried


def _rank(name: str) -> int:
    from lowtri.verifying.mistakes import MISTAKES

    return list(MISTAKES).index(name)


def _name(trial: Trial) -> str:
    return str(trial.dtype).removeprefix("torch.")


def _clean(x: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    return torch.where(seen[..., None], x, 0.0)


def _chosen(cases: str | Iterable[str] | None) -> list[Case]:
    if cases is None:
        return list(CASES)
    known = {case.name: case for case in CASES}
    if isinstance(cases, str):
        found = [case for name, case in known.items() if cases in name]
        unknown = [] if found else [cases]
    else:
        found = [known[name] for name in cases if name in known]
        unknown = [name for name in cases if name not in known]
    if unknown:
        raise CallError(
            f"verify: cases= names {unknown[0]!r}, which no case has.\nFix: one of {', '.join(list(known)[:6])}, ... "
            "(lowtri.verifying.cases.CASES), or a part of a name."
        )
    return found


def _dtypes(dtypes: Sequence[str] | None) -> list[str]:
    given = (
        ["float32", "bfloat16", "float16"] if dtypes is None else [dtypes] if isinstance(dtypes, str) else list(dtypes)
    )
    names = [str(one).removeprefix("torch.") for one in given]
    for name in names:
        if name not in DTYPES:
            raise CallError(
                f"verify: dtypes= names {name!r}; expected {', '.join(DTYPES)}.\nFix: one or more of these."
            )
    if not names:
        raise CallError("verify: dtypes= is empty.\nFix: dtypes=['float32'], or leave it out.")
    return names


def _signature(attend: Any, signature: str | Callable[..., Any]) -> tuple[Callable[..., Any], Signature]:
    if callable(signature):
        return custom(attend, signature)
    if signature not in SIGNATURES:
        raise CallError(
            f"verify: signature={signature!r}; expected {', '.join(SIGNATURES)}, or a function that makes the call.\n"
            "Fix: name the library whose arguments attend takes."
        )
    return attend, SIGNATURES[signature]

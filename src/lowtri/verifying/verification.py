"""The state of one verification: what passed, what differs, what is not offered; and what explains the differences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import torch

from lowtri.verifying.cases import Case
from lowtri.verifying.judging import Difference, Trial, differences_of, explain, limits, where
from lowtri.verifying.mistakes import MISTAKES
from lowtri.verifying.report import Finding, VerifyReport
from lowtri.verifying.running import Broken, NoAnswer, Refused, Runner
from lowtri.verifying.signatures import NotOffered

__all__ = ["Verification"]

_SHRINKS = 24  # calls to find the smallest case that shows an unexplained difference
_FREQUENT = ["scale missing", "window one too wide", "window one too narrow", "softcap missing", "mask inverted"]
_PAIRED = 6  # unexplained calls for which two mistakes together are tried


class Verification:
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
            self.lacking[str(error)] = "its signature has no argument for it, or it raises NotImplementedError"
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


def _rank(name: str) -> int:
    return list(MISTAKES).index(name)


def _name(trial: Trial) -> str:
    return str(trial.dtype).removeprefix("torch.")


def _clean(x: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    return torch.where(seen[..., None], x, 0.0)

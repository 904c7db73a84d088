"""A probe as data: its name, what it does, finds and needs, how its findings are interpreted, and the function that runs it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from lowtri.auditing.context import Context
from lowtri.auditing.finding import Finding, Leak, Status, by
from lowtri.auditing.noise import Difference

__all__ = ["BATCH", "REPEATABLE", "TORCH", "Need", "Probe", "Tally", "requested_but_not_run"]


class Need(NamedTuple):
    """A condition without which a probe is skipped."""

    what: str  # as the documentation lists it
    why_not: Callable[[Context], str | None]  # the reason why it is not met; None where it is


def requested_but_not_run(finding: Finding, value: Any) -> str | None:
    """Why a probe did not do what its argument requests; None where it did, or where it found a leak."""
    if finding.status == "skipped":
        return finding.message
    refused = finding.measured.get("refused")
    return str(next(iter(refused.values()))) if refused and finding.status != "leak" else None


@dataclass(frozen=True)
class Probe:
    """One check of the audit. Verdict, report and documentation read its fields; none of them knows a probe by name."""

    name: str
    does: str
    finds: str
    function: Callable[[Context], Finding]
    needs: tuple[Need, ...] = ()
    pairs: bool = False  # its leaks are pairs of positions of its input; others are about lengths, pads, rows or caches
    reshapes: bool = False  # it compares runs of different shapes, where rounding can flip a discrete choice
    skipped_after: tuple[Probe, ...] = ()  # a leak of one of these would only be found again
    argument: str | None = None  # the argument of `audit` that requests it
    not_run: Callable[[Finding, Any], str | None] = requested_but_not_run

    def __call__(self, context: Context) -> Finding:
        """Run the probe if its needs are met, and put its name on what it found."""
        for need in self.needs:
            reason = need.why_not(context)
            if reason is not None:
                return Finding("skipped", reason, probe=self.name)
        context.probe = self.name
        finding = self.function(context)
        # Leaks that another probe found under this one's conditions keep what they are.
        leaks = (replace(k, probe=self.name, paired=k.paired if k.probe else self.pairs) for k in finding.leaks)
        return replace(finding, probe=self.name, leaks=tuple(leaks))


@dataclass
class Tally:
    """What the comparisons of one probe show so far."""

    leaks: list[Leak] = field(default_factory=list)
    status: Status = "clean"
    greatest: float = 0.0

    def differs(self, difference: Difference) -> bool:
        """Count a comparison, and say whether the two differ by more than rounding."""
        self.greatest = max(self.greatest, difference.greatest)
        if difference.status == "clean":
            return False
        self.status = "leak" if "leak" in (difference.status, self.status) else "doubt"
        return True

    def finding(self, clean: str, message: str, measured: dict[str, Any], witness: Any = None) -> Finding:
        """`clean` where nothing differed, else `message` with the greatest difference."""
        measured = {"greatest": self.greatest, **measured}
        if self.status == "clean":
            return Finding("clean", clean, (), measured)
        return Finding(self.status, f"{message}, {by(self.greatest)}", tuple(self.leaks), measured, witness)


def _batch(context: Context) -> str | None:
    return None if context.adapter.signature.batch_axis is not None else "the example has no batch"


def _torch(context: Context) -> str | None:
    return None if context.adapter.in_torch else "the model does not compute in torch"


def _repeatable(context: Context) -> str | None:
    return "the model draws random numbers, and another length draws others" if context.noise.random else None


BATCH = Need("a batch", _batch)
TORCH = Need("gradients", _torch)
REPEATABLE = Need("no random numbers", _repeatable)

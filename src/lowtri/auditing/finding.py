"""The result of a probe: a finding, with the leaking pairs and the measurements."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

from lowtri.auditing.inputs import Inputs

__all__ = ["Finding", "Leak", "Status", "by", "first_line", "moves"]

Status = Literal["clean", "leak", "doubt", "undecided", "warning", "skipped"]


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
    probe: str = ""  # set by `Probe`, as is `paired`
    paired: bool = False  # query and key are positions of the probe's input
    found_by: str = ""  # the probe that found it, where another one ran it under those conditions
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
    """One probe's result.

    A probe returns `doubt` where the movement is near the noise; the audit then repeats it on the float64 copy, so that no
    report contains a `doubt`.
    """

    status: Status
    message: str
    leaks: tuple[Leak, ...] = ()
    measured: dict[str, Any] = field(default_factory=dict)
    # Two inputs (before, after) and the row of the batch that show the first leak, for `locate`.
    witness: tuple[Inputs, Inputs, int] | None = None
    probe: str = ""  # set by `Probe`
    mode: str = ""  # the mode and the length that it adds to those of the whole audit
    length: int | None = None

    @property
    def greatest(self) -> float:
        """The greatest movement that the probe measured."""
        return float(self.measured.get("greatest", 0.0))


def moves(size: float, when: str = "") -> str:
    """What an output does, in words: an infinite size stands for a number that turned infinite or NaN, or back.

    >>> moves(0.25, " when the input ends"), moves(math.inf)
    ('moves by 0.25 when the input ends', 'turns from finite to infinite or NaN, or back')
    """
    if math.isinf(size):
        return "turns from finite to infinite or NaN, or back" + ("," if when else "") + when
    return f"moves by {size:.2g}{when}"


def by(size: float, up_to: str = "up to ") -> str:
    """How far two answers are apart, in words that follow a comma.

    >>> by(0.25), by(math.inf)
    ('by up to 0.25', 'one side finite and the other infinite or NaN')
    """
    return "one side finite and the other infinite or NaN" if math.isinf(size) else f"by {up_to}{size:.2g}"


def first_line(error: Exception, *, typed: bool = True) -> str:
    """An error in one line: its message, with its type in front where `0` or `x` alone would mean little."""
    kind, message = type(error).__name__, (str(error).strip().splitlines() or [""])[0][:120]
    return f"{kind}: {message}" if typed and message else message or kind

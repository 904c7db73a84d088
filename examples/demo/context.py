"""What a part of the demo is given, and what it returns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from lowtri.files import write_text
from why_mask.experiment import Experiment, Setting, why_mask

__all__ = ["Check", "Context", "Result"]


class Check(NamedTuple):
    """A statement about lowtri, and whether it held in this run."""

    text: str  # with the figure that was measured
    passed: bool


@dataclass
class Result:
    """What a part shows."""

    text: str
    checks: list[Check] = field(default_factory=list)
    pictures: list[str] = field(default_factory=list)  # names of files in the output folder
    files: list[str] = field(default_factory=list)  # names of the other files written there

    def check(self, text: str, passed: object) -> None:
        self.checks.append(Check(text, bool(passed)))


@dataclass
class Context:
    """The output folder, and the experiment, which the first part that needs it runs."""

    out: Path
    note: Callable[[str], object] = lambda _: None
    setting: Setting = field(default_factory=Setting)

    @cached_property
    def experiment(self) -> Experiment:
        return why_mask(self.setting, note=self.note)

    def write(self, name: str, text: str) -> str:
        """Write a file into the output folder, atomically; returns its name."""
        write_text(self.out / name, text)
        return name

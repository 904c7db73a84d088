"""What an act is given, and what it gives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from lowtri.nn.checkpoint import write_whole
from lowtri.training.experiment import Experiment, Setting, why_mask

__all__ = ["Promise", "Stage", "Told"]


class Promise(NamedTuple):
    """What the act says will be found, and whether it was."""

    text: str  # with the figure that was measured
    kept: bool


@dataclass
class Told:
    """What an act shows."""

    text: str
    promises: list[Promise] = field(default_factory=list)
    pictures: list[str] = field(default_factory=list)  # names of files in the folder
    files: list[str] = field(default_factory=list)  # others that were written

    def promise(self, text: str, kept: object) -> None:
        self.promises.append(Promise(text, bool(kept)))


@dataclass
class Stage:
    """The folder to write to, and the experiment, which the first act that needs it runs."""

    out: Path
    note: Callable[[str], object] = lambda _: None
    setting: Setting = field(default_factory=Setting)

    @cached_property
    def experiment(self) -> Experiment:
        return why_mask(self.setting, note=self.note)

    def write(self, name: str, text: str) -> str:
        """A file in the folder, whole or not at all; gives back its name."""
        write_whole(self.out / name, lambda beside: beside.write_text(text, encoding="utf-8"))
        return name

"""The state of a run: its losses, and its whole state on disk, so that a kill loses only the steps since the last save.

Neither the order of the data nor the state of random numbers (dropout) is stored: both follow from the seed and the step (recipe.py).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from lowtri.errors import DataError
from lowtri.training.checkpoints import Saver, check_sizes, content_of, newest, restore
from lowtri.training.corpus import Packed
from lowtri.training.processes import Processes
from lowtri.training.recipe import Recipe

__all__ = ["History", "Run"]


@dataclass
class History:
    """Losses in nats a token."""

    losses: list[float] = field(default_factory=list)  # one a step, measured before it
    validations: list[tuple[int, float]] = field(default_factory=list)  # (steps done, loss on the held-out rows)
    tokens_per_second: float = 0.0  # of training alone, in the process that ended the run


@dataclass
class Run:
    """The state that steps change, and the recipe and corpus that they do not."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    recipe: Recipe
    corpus: Packed
    history: History = field(default_factory=History)
    done: int = 0  # steps
    processes: Processes = field(default_factory=Processes)
    saver: Saver | None = None

    def save(self, folder: Path) -> None:
        """Begin to write the state; training goes on meanwhile, and :meth:`wait` waits until it is complete."""
        content = {"done": self.done, "history": asdict(self.history)}
        content |= {"recipe": asdict(self.recipe), "corpus": self.corpus.digest()}
        if self.saver is None:
            self.saver = Saver(folder, self.processes)
        self.saver.save(content, self.model, self.optimizer)

    def wait(self) -> None:
        """Wait until the last state is written."""
        if self.saver is not None:
            self.saver.wait()

    def settle(self) -> None:
        """Let the last state be written, if it can, while an error ends the run."""
        if self.saver is not None:
            self.saver.settle()

    def resume(self, folder: Path) -> None:
        """Put everything back as :meth:`save` has written it, on any number of processes, if there is anything.

        Raises:
            DataError: on every rank, if it is damaged, or belongs to a run with another recipe, text or model.
        """
        path = self.processes.on_main(lambda: newest(folder))
        if path is None:
            return
        content = self.processes.run_on_all(lambda: self._check(path, content_of(path)), "reading a checkpoint")
        restore(path, self.model, self.optimizer, self.processes)
        validations = [(int(step), float(loss)) for step, loss in content["history"]["validations"]]
        self.history = History(content["history"]["losses"], validations)
        self.done = int(content["done"])

    def _check(self, path: Path, content: dict[str, Any]) -> dict[str, Any]:
        """``content``, if the state belongs to this run, or to one of fewer steps; else a DataError."""
        now = asdict(self.recipe)
        if content["recipe"]["steps"] < now["steps"]:
            now["steps"] = content["recipe"]["steps"]
        changed = [
            f"{key} {before} -> {now.get(key)}" for key, before in content["recipe"].items() if before != now.get(key)
        ]
        if changed:
            raise DataError(f"{path} belongs to a run with another recipe: {', '.join(changed)}")
        if content["corpus"] != self.corpus.digest():
            raise DataError(f"{path} belongs to a run on other text: the files, or the vocabulary, changed since")
        check_sizes(path, self.model)
        return content

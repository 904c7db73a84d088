"""The state of a run: its losses, and its whole state on disk, so that a kill loses only the steps since the last save.

Neither the order of the data nor the state of random numbers (dropout) is stored: both follow from the seed and the step (recipe.py).
"""

from __future__ import annotations

import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from lowtri.errors import DataError
from lowtri.files import write_atomically
from lowtri.training.corpus import Packed
from lowtri.training.processes import Processes
from lowtri.training.recipe import Recipe
from lowtri.training.sharded_state import Saver, content_of, newest, restore_sharded

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

    def save(self, path: Path) -> None:
        """Write the state atomically: on one process as the file ``path``, on several as a folder of that name without its suffix.

        On several, training goes on while it is written; :meth:`wait` waits for it.
        """
        if self.processes.world > 1:
            content = {"done": self.done, "history": asdict(self.history)}
            content |= {"recipe": asdict(self.recipe), "corpus": self.corpus.digest()}
            if self.saver is None:
                self.saver = Saver(path.with_suffix(""), self.processes)
            self.saver.save(content, self.model, self.optimizer)
            return
        content = {
            "done": self.done,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "history": asdict(self.history),
            "recipe": asdict(self.recipe),
            "corpus": self.corpus.digest(),
        }

        def write(temporary: Path) -> None:
            with open(temporary, "wb") as file:  # given a path, torch does not say why it cannot be written
                torch.save(content, file)

        write_atomically(path, write)
        shutil.rmtree(path.with_suffix(""), ignore_errors=True)  # of the same run on several processes

    def wait(self) -> None:
        """Wait until the last state is written."""
        if self.saver is not None:
            self.saver.wait()

    def settle(self) -> None:
        """Let the last state be written, if it can, while an error ends the run."""
        if self.saver is not None:
            self.saver.settle()

    def resume(self, path: Path) -> None:
        """Restore what :meth:`save` has written, on any number of processes, if there is anything."""
        sharded = newest(path.with_suffix(""))
        if sharded is not None and path.exists() and self.processes.world == 1:
            # A kill may have come before save() had removed the folder, or all of it.
            sharded = None if _steps(path) >= int(sharded.name.removeprefix("step-")) else sharded
        if sharded is not None:
            self._check(sharded, content_of(sharded))
            self._continue(restore_sharded(sharded, self.model, self.optimizer))
        elif path.exists():
            if self.processes.world > 1:
                raise DataError(
                    f"{path} was written by one process.\nFix: resume it without torchrun; several processes resume what several "
                    "have begun"
                )
            self.restore(path)

    def restore(self, path: Path) -> None:
        """Put everything back as it was saved.

        Raises:
            DataError: if the file is damaged, or belongs to a run with another recipe, text or model.
        """
        try:
            content: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # torch raises many kinds for a damaged file
            raise DataError(f"{path} is not a training state: {str(error).splitlines()[0]}") from None
        self._check(path, content)
        try:
            self.model.load_state_dict(content["model"])
            self.optimizer.load_state_dict(content["optimizer"])
        except (RuntimeError, ValueError) as error:
            raise DataError(f"{path} belongs to a model of other sizes: {str(error).splitlines()[0]}") from None
        self._continue(content)

    def _check(self, path: Path, content: dict[str, Any]) -> None:
        """Raise a DataError unless the state belongs to this run."""
        now = asdict(self.recipe)
        changed = [
            f"{key} {before} -> {now.get(key)}" for key, before in content["recipe"].items() if before != now.get(key)
        ]
        if changed:
            raise DataError(f"{path} belongs to a run with another recipe: {', '.join(changed)}")
        if content["corpus"] != self.corpus.digest():
            raise DataError(f"{path} belongs to a run on other text: the files, or the vocabulary, changed since")

    def _continue(self, content: dict[str, Any]) -> None:
        validations = [(int(step), float(loss)) for step, loss in content["history"]["validations"]]
        self.history = History(content["history"]["losses"], validations)
        self.done = int(content["done"])


def _steps(path: Path) -> int:
    """The steps that a checkpoint of one process has done; -1 if it cannot be read."""
    try:
        return int(torch.load(path, map_location="cpu", weights_only=True)["done"])
    except Exception:  # pickles fail in many ways
        return -1

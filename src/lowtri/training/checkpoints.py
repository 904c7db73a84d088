"""The state of a run on disk: torch's distributed checkpoint, written while training goes on, and renamed when it is complete.

    training-state/step-120/          shards of weights and moments, and run.json
    training-state/.step-140.part/    one that is being written, or was when a process was killed

Any number of processes, one among them, reads what any number has written. Neither the order of the data nor the state of random
numbers (dropout) is stored: both follow from the seed and the step (corpus.py).
"""

from __future__ import annotations

import json
import pickle
import re
import shutil
import warnings
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from lowtri.errors import DataError
from lowtri.files import os_error, write_text
from lowtri.system import replace
from lowtri.training.corpus import Packed, Recipe
from lowtri.training.processes import Processes

_ALONE = "torch.distributed is disabled"  # the beginning of torch's warning where one process saves or loads
_UNREADABLE = (OSError, RuntimeError, ValueError, KeyError, EOFError, pickle.UnpicklingError)


def newest(folder: Path) -> Path | None:
    """The newest complete checkpoint.

    Raises:
        DataError: if ``folder`` is a file, which the first save would notice only after many steps.
    """
    if folder.is_file():
        raise DataError(f"{folder} is a file, but checkpoints lie in a folder.\nFix: another path.")
    steps = {int(match[1]): path for path in folder.glob("step-*") if (match := re.fullmatch(r"step-(\d+)", path.name))}
    return steps[max(steps)] if steps else None


@dataclass
class History:
    """Losses in nats a token."""

    losses: list[float] = field(default_factory=list)  # one a step, measured before it
    validations: list[tuple[int, float]] = field(default_factory=list)  # (steps done, loss on the held-out rows)
    tokens_per_second: float = 0.0  # of training alone, in the process that ended the run

    @classmethod
    def of(cls, content: dict[str, Any]) -> History:
        """From JSON, which has no tuples."""
        return cls(**{**content, "validations": [(int(step), float(loss)) for step, loss in content["validations"]]})


@dataclass
class Run:
    """The state that steps change, and the recipe and corpus that they do not.

    Checkpoints are written in the background, one at a time; all processes call these methods together. The weights and moments are
    copied before :meth:`save` returns. A thread of each process writes its shards, with collectives in a group of their own, and then
    that of rank 0 renames the folder. Until then, the checkpoint before it is the newest.
    """

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    recipe: Recipe
    corpus: Packed
    history: History = field(default_factory=History)
    done: int = 0  # steps
    processes: Processes = field(default_factory=Processes)
    _thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1), init=False)
    _writing: Future[None] | None = field(default=None, init=False)  # the newest checkpoint
    _folder: Path = field(default=Path(), init=False)
    _group: Any = field(default=None, init=False)  # for the collectives of the thread

    def save(self, folder: Path) -> None:
        """Begin to write the state; training goes on meanwhile, and :meth:`wait` waits until it is complete.

        Raises:
            OSError, DataError: on every rank, if the checkpoint before could not be written.
        """
        from torch.distributed.checkpoint.state_dict import get_state_dict

        self.wait()
        self._folder = folder
        self.processes.on_main(lambda: _clear(folder))
        weights, moments = get_state_dict(self.model, self.optimizer)
        state = _copied({"model": weights, "optimizer": moments})
        content = {"done": self.done, "history": asdict(self.history)}
        content |= {"recipe": asdict(self.recipe), "corpus": self.corpus.digest()}
        if self.processes.world == 1:  # in this thread, since filters are those of the whole process
            warnings.filterwarnings("ignore", _ALONE)
        if self._group is None:
            self._group = self.processes.new_group()
        self._writing = self._thread.submit(self._write, state, content, folder)

    def _write(self, state: dict[str, Any], content: dict[str, Any], folder: Path) -> None:
        """In a thread: write a checkpoint, rename it, and remove those before it."""
        from torch.distributed.checkpoint.state_dict_saver import save

        part, target = (folder / name.format(content["done"]) for name in (".step-{}.part", "step-{}"))
        try:
            save(state, checkpoint_id=part, process_group=self._group, no_dist=self.processes.world == 1)
            if self.processes.is_main:
                write_text(part / "run.json", json.dumps(content))
                replace(part, target)
                for old in folder.glob("step-*"):
                    if old != target:
                        shutil.rmtree(old)
        except BaseException:
            if self.processes.is_main:
                shutil.rmtree(part, ignore_errors=True)
            raise

    def wait(self) -> None:
        """Wait for the checkpoint that is being written.

        Raises:
            OSError, DataError: on every rank, if it could not be written; the one before is complete.
        """
        if self._writing is not None:
            error = self._writing.exception()  # a user may interrupt here: settle() then waits again
            self._writing = None
            self.processes.run_on_all(lambda: _raise(error, self._folder), "saving")

    def settle(self) -> None:
        """Let the checkpoint that is being written become complete, if it can, while an error ends this process."""
        if self._writing is not None:
            self._writing.exception()

    def resume(self, folder: Path) -> None:
        """Put everything back as :meth:`save` has written it, on any number of processes, if there is anything.

        Raises:
            DataError: on every rank, if it is damaged, or belongs to a run with another recipe, text or model.
        """
        path = self.processes.on_main(lambda: newest(folder))
        if path is None:
            return
        content = self.processes.run_on_all(lambda: self._check(path), "reading a checkpoint")
        self._restore(path)
        self.history = History.of(content["history"])
        self.done = int(content["done"])

    def _check(self, path: Path) -> dict[str, Any]:
        """What run.json has, if the state belongs to this run, or to one of fewer steps; else a DataError."""
        from torch.distributed.checkpoint.filesystem import FileSystemReader
        from torch.distributed.checkpoint.state_dict import get_model_state_dict

        try:
            content: dict[str, Any] = json.loads((path / "run.json").read_text(encoding="utf-8"))
            saved = FileSystemReader(path).read_metadata().state_dict_metadata
        except _UNREADABLE as error:
            raise _unreadable(path, error) from None
        now = asdict(self.recipe)
        now["steps"] = min(now["steps"], content["recipe"]["steps"])
        changed = [
            f"{key} {before} -> {now.get(key)}" for key, before in content["recipe"].items() if before != now.get(key)
        ]
        if changed:
            raise DataError(f"{path} belongs to a run with another recipe: {', '.join(changed)}")
        if content["corpus"] != self.corpus.digest():
            raise DataError(f"{path} belongs to a run on other text: the files, or the vocabulary, changed since")
        for name, weight in get_model_state_dict(self.model).items():  # its names are those of the checkpoint
            there = getattr(saved.get(f"model.{name}"), "size", None)
            if isinstance(weight, torch.Tensor) and there != weight.shape:
                there = "nothing" if there is None else tuple(there)
                raise DataError(
                    f"{path} belongs to a model of other sizes: {name} is {there} there, {tuple(weight.shape)} here"
                )
        return content

    def _restore(self, path: Path) -> None:
        """Load the weights and moments."""
        from torch.distributed.checkpoint.api import CheckpointException
        from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
        from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
        from torch.distributed.checkpoint.state_dict_loader import load

        weights, moments = get_state_dict(self.model, self.optimizer)
        state: dict[str, Any] = {"model": weights, "optimizer": moments}
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", _ALONE)
                planner = DefaultLoadPlanner(allow_partial_load=True)  # parameters without gradients have no moments
                load(state, checkpoint_id=path, planner=planner, no_dist=self.processes.world == 1)
        except (*_UNREADABLE, CheckpointException) as error:
            raise _unreadable(path, error) from None
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def _copied(state: Any) -> Any:
    """A state with copies of its tensors, on the CPU."""
    if isinstance(state, torch.Tensor):
        return state.detach().to("cpu", copy=True)
    if isinstance(state, dict):
        return {name: _copied(value) for name, value in state.items()}
    return [_copied(value) for value in state] if isinstance(state, list) else state


def full_weights(model: Any) -> dict[str, Any]:
    """The whole weights of a sharded model, on the CPU of rank 0; empty on the others."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))


def _clear(folder: Path) -> None:
    """Remove what was being written when a process was killed."""
    folder.mkdir(parents=True, exist_ok=True)
    for part in folder.glob(".step-*.part"):
        shutil.rmtree(part)


def _unreadable(path: Path, error: BaseException) -> DataError:
    return DataError(f"{path} cannot be read: {_text(error)}.\nFix: remove it, and begin again.")


def _raise(error: BaseException | None, folder: Path) -> None:
    """Raise what is behind an error of saving, with the folder's name."""
    if error is None:
        return
    if reason := os_error(error):
        raise OSError(reason.errno, reason.strerror, str(folder)) from error
    raise DataError(
        f"{folder}: a checkpoint could not be written: {_text(error)}.\nFix: the cause; the checkpoint before is complete."
    ) from error


def _text(error: BaseException) -> str:
    """One line that says what is behind torch's exception."""
    cause = next((failure[0] for failure in getattr(error, "failures", {}).values()), error)
    return (str(cause) or type(cause).__name__).splitlines()[0]

"""The state of a run on disk: torch's distributed checkpoint, written while training goes on, and renamed when it is complete.

    training-state/step-120/          shards of weights and moments, and run.json
    training-state/.step-140.part/    one that is being written, or was when a process was killed

Any number of processes, one among them, reads what any number has written. Neither the order of the data nor the state of random
numbers (dropout) is stored: both follow from the seed and the step (recipe.py).
"""

from __future__ import annotations

import inspect
import json
import pickle
import re
import shutil
import warnings
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from lowtri.errors import DataError
from lowtri.files import os_error, write_text
from lowtri.system import replace
from lowtri.training.corpus import Packed
from lowtri.training.processes import Processes
from lowtri.training.recipe import Recipe

_ALONE = "torch.distributed is disabled"  # the beginning of torch's warning where one process saves or loads


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


@dataclass
class Run:
    """The state that steps change, and the recipe and corpus that they do not.

    Checkpoints are written in the background, one at a time; all processes call these methods together. The weights and moments are
    copied before :meth:`save` returns. A thread of each process writes its shards, with collectives in a group of their own, and then a
    thread of rank 0 renames the folder. Until then, the checkpoint before it is the newest.
    """

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    recipe: Recipe
    corpus: Packed
    history: History = field(default_factory=History)
    done: int = 0  # steps
    processes: Processes = field(default_factory=Processes)
    _pending: Future[None] | None = field(default=None, init=False)  # the checkpoint that is being written
    _folder: Path = field(default=Path(), init=False)
    _group: Any = field(default=None, init=False)

    def save(self, folder: Path) -> None:
        """Begin to write the state; training goes on meanwhile, and :meth:`wait` waits until it is complete.

        Raises:
            OSError, DataError: on every rank, if the checkpoint before could not be written.
        """
        from torch.distributed.checkpoint.state_dict import get_state_dict

        self.wait()
        self._folder, part = folder, folder / f".step-{self.done}.part"
        content = {"done": self.done, "history": asdict(self.history)}
        content |= {"recipe": asdict(self.recipe), "corpus": self.corpus.digest()}
        self.processes.on_main(lambda: _clear(folder))
        weights, moments = get_state_dict(self.model, self.optimizer)
        if self._group is None:
            self._group = self.processes.new_group()
        with self.processes.guard("beginning to save"):
            written = _write({"model": weights, "optimizer": moments}, part, self._group, self.processes.world == 1)
        pending: Future[None] = Future()
        self._pending, is_main = pending, self.processes.is_main
        written.add_done_callback(lambda done: _finish(done, pending, content, part, is_main))

    def wait(self) -> None:
        """Wait for the checkpoint that is being written.

        Raises:
            OSError, DataError: on every rank, if it could not be written; the one before is complete.
        """
        if self._pending is not None:
            error = self._pending.exception()  # a user may interrupt here: settle() then waits again
            self._pending = None
            self.processes.run_on_all(lambda: _raise(error, self._folder), "saving")

    def settle(self) -> None:
        """Let the checkpoint that is being written become complete, if it can, while an error ends this process."""
        if self._pending is not None:
            self._pending.exception()

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


def _finish(written: Future[Any], pending: Future[None], content: dict[str, Any], part: Path, is_main: bool) -> None:
    """In the thread that has written: rename the checkpoint, and remove those before it."""
    target = part.parent / f"step-{content['done']}"
    try:
        written.result()
        if is_main:
            write_text(part / "run.json", json.dumps(content))
            replace(part, target)
            for old in part.parent.glob("step-*"):
                if old != target:
                    shutil.rmtree(old)
    except BaseException as error:
        try:
            if is_main:
                shutil.rmtree(part, ignore_errors=True)
        finally:
            pending.set_exception(error)
    else:
        pending.set_result(None)


def _write(state: dict[str, Any], path: Path, group: Any, alone: bool) -> Future[Any]:
    """Copy a state and begin to write it.

    Args:
        alone: without torch.distributed, also where it has begun.
    """
    from torch.distributed.checkpoint import state_dict_saver

    if alone:  # the warning comes from another thread, where filters cannot be changed for a while
        warnings.filterwarnings("ignore", _ALONE)
    options: dict[str, Any] = {"no_dist": True} if alone else {}
    if {"async_stager", *options} <= inspect.signature(state_dict_saver.async_save).parameters.keys():
        begun: Any = state_dict_saver.async_save(state, checkpoint_id=path, process_group=group, **options)
        future: Future[Any] = begun
        return future
    done: Future[Any] = Future()
    try:  # older versions do not copy tensors that are on the CPU, and training would change them
        done.set_result(state_dict_saver.save(state, checkpoint_id=path, process_group=group, **options))
    except BaseException as error:
        done.set_exception(error)
    return done


def content_of(path: Path) -> dict[str, Any]:
    """What run.json has: the number of steps, losses, recipe and corpus."""
    try:
        content: dict[str, Any] = json.loads((path / "run.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {error}") from None
    return content


def check_sizes(path: Path, model: Any) -> None:
    """Raise a DataError unless a checkpoint has the weights of a model."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    try:
        saved = FileSystemReader(path).read_metadata().state_dict_metadata
    except (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
        raise _unreadable(path, error) from None
    for name, weight in get_model_state_dict(model).items():  # its names are those of the checkpoint
        there = getattr(saved.get(f"model.{name}"), "size", None)
        if isinstance(weight, torch.Tensor) and there != weight.shape:
            there = "nothing" if there is None else tuple(there)
            raise DataError(
                f"{path} belongs to a model of other sizes: {name} is {there} there, {tuple(weight.shape)} here"
            )


def restore(path: Path, model: Any, optimizer: Any, processes: Processes) -> None:
    """Load a checkpoint into a model and its optimizer."""
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.checkpoint.state_dict_loader import load

    weights, moments = get_state_dict(model, optimizer)
    state: dict[str, Any] = {"model": weights, "optimizer": moments}
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", _ALONE)
            planner = DefaultLoadPlanner(allow_partial_load=True)  # parameters without gradients have no moments
            load(state, checkpoint_id=path, planner=planner, no_dist=processes.world == 1)
    except (OSError, RuntimeError, ValueError, KeyError, EOFError, CheckpointException) as error:
        raise _unreadable(path, error) from None
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


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

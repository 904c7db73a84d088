"""The training loop: AdamW, gradient clipping, and checkpoints from which it resumes after any kill.

A resumed run repeats the uninterrupted one bit for bit on the same machine with the same number of threads. Checkpoints are torch's
distributed ones, written while training goes on, and renamed when they are complete:

    training-state/step-120/          shards of weights and moments, and run.json
    training-state/.step-140.part/    one that is being written, or was when a process was killed

Any number of processes, one among them, reads what any number has written. Neither the order of the data nor the state of random
numbers (dropout) is stored: both follow from the seed and the step (corpus.py).

Sources: Loshchilov and Hutter 2019 (AdamW); Pascanu et al. 2013 (clipping).
"""

from __future__ import annotations

import json
import math
import pickle
import re
import shutil
import time
import warnings
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from lowtri.errors import CallError, DataError, RankError
from lowtri.files import os_error, write_text
from lowtri.masks import as_mask, documents
from lowtri.system import replace
from lowtri.training.corpus import IGNORED, Packed, Recipe, Rows, rows_of_step, split
from lowtri.training.processes import Processes

_ALONE = "torch.distributed is disabled"  # the beginning of torch's warning where one process saves or loads
_UNREADABLE = (OSError, RuntimeError, ValueError, KeyError, EOFError, pickle.UnpicklingError)


class Step(NamedTuple):
    """What ``on_step`` receives after each step."""

    number: int  # steps done, from 1
    loss: float  # of this step's batch, before the step; nats a token
    lr: float
    validation: float | None  # loss on the held-out rows, when it was measured
    tokens_per_second: float  # of training alone, since this process began


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


def train(
    model: torch.nn.Module,
    corpus: Packed,
    recipe: Recipe | None = None,
    *,
    state: Path | None = None,
    on_step: Callable[[Step], object] | None = None,
    processes: Processes | None = None,
) -> History:
    """Train a model on packed documents, in place.

    torch's random numbers are seeded at each step, from the recipe's seed, the step and the rank: dropout is the same in a resumed run.

    Args:
        model: ids (B, N) -> logits (B, N, V). If it has a mask of its own (``model.config.mask``), a batch in which a row
            holds several documents is called with ``mask=mask & documents(ids)``. A model without one reads on
            across documents; no target crosses in either case.
        recipe: ``Recipe()`` if none is given.
        state: a folder that keeps the run: a checkpoint is written every ``save_every`` steps, while training goes on, and the newest
            complete one is resumed from, on any number of processes. The model, the recipe and the corpus must be those it began
            with.
        on_step: is called after each step, on rank 0.
        processes: those that train together; by default this one alone. Every process passes the same arguments. What is learnt does
            not depend on their number, except for rounding and dropout.

    Returns:
        the losses of every step and of every validation, those before a kill included.

    Raises:
        DataError: if the text is too short for one row, or the state belongs to another run.
        CallError: if the loss is NaN or infinite.

    >>> from lowtri.nn import Decoder, DecoderConfig
    >>> _ = torch.manual_seed(0)
    >>> model = Decoder(DecoderConfig(vocab_size=8, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
    ...                               num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=8))
    >>> history = train(model, Packed.of([[1, 2, 3, 4] * 40]), Recipe(steps=40, batch=4, context=8, lr=3e-2))
    >>> history.losses[0] > 1.5, history.losses[-1] < 0.2
    (True, True)
    """
    recipe, processes = recipe or Recipe(), processes or Processes()
    corpus.require(recipe.context)
    if recipe.batch < processes.dp * recipe.accumulate:
        raise CallError(
            f"train: a batch of {recipe.batch} rows cannot be shared by {processes.dp} groups in {recipe.accumulate} parts.\n"
            f"Fix: --batch {processes.dp * recipe.accumulate} or more."
        )
    model = processes.shard(model, recipe.dtype)
    train_rows, held_out = split(corpus.count(recipe.context), recipe.held_out)
    run = Run(model, _optimizer(model, recipe), recipe, corpus, processes)
    if state is not None:
        run.resume(state)
    begun, seconds = run.done, 0.0
    model.train()
    try:
        while run.done < recipe.steps:
            started, lr = time.perf_counter(), recipe.lr_at(run.done)
            loss = run.step(rows_of_step(train_rows, run.done, recipe), lr)
            seconds += time.perf_counter() - started
            run.history.tokens_per_second = (run.done - begun) * recipe.batch * recipe.context / seconds
            validation, is_last = None, run.done == recipe.steps
            if len(held_out) and (is_last or run.done % recipe.validate_every == 0):
                validation = run.validate(held_out)
            if state is not None and (is_last or run.done % recipe.save_every == 0):
                run.save(state)
            if on_step is not None and processes.is_main:
                on_step(Step(run.done, loss, lr, validation, run.history.tokens_per_second))
        run.wait()
    except RankError:
        raise
    except BaseException:  # also where a user interrupts: the checkpoint that is being written is not lost
        run.settle()
        raise
    return run.history


@dataclass
class Run:
    """The state that steps change, and the recipe and corpus that they do not; all processes call the methods together.

    Checkpoints are written in the background, one at a time. The weights and moments are copied before :meth:`save` returns. A thread
    of each process writes its shards, with collectives in a group of their own, and then that of rank 0 renames the folder. Until
    then, the checkpoint before it is the newest.
    """

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    recipe: Recipe
    corpus: Packed
    processes: Processes = field(default_factory=Processes)
    history: History = field(default_factory=History)
    done: int = 0  # steps
    _thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1), init=False)
    _writing: Future[None] | None = field(default=None, init=False)  # the newest checkpoint
    _folder: Path = field(default=Path(), init=False)
    _group: Any = field(default=None, init=False)  # for the collectives of the thread

    def step(self, numbers: npt.NDArray[np.int64], lr: float) -> float:
        """One update with the rows of these numbers; the mean loss of all their targets.

        Processes and parts have different numbers of targets, so a mean of their means would weight targets differently: losses are
        summed and divided by the number of all targets. FSDP divides gradients by the number of processes, hence the factor.
        """
        model, recipe, processes = self.model, self.recipe, self.processes
        rows = self.corpus.rows(numbers, recipe.context)
        torch.manual_seed(recipe.random_seed(self.done, processes.rank))
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        scale = processes.world / max(1, int((rows.targets != IGNORED).sum()))
        with processes.guard(f"step {self.done + 1}"):
            mine, total = processes.share(rows), 0.0
            self.optimizer.zero_grad(set_to_none=True)
            parts = np.array_split(np.arange(len(mine.inputs)), min(recipe.accumulate, len(mine.inputs)))
            for number, part in enumerate(parts):
                processes.sync_gradients(model, number == len(parts) - 1)
                loss = _loss(model, Rows(*(x[part] for x in mine)), "sum", processes, recipe.dtype) * scale
                loss.backward()
                total += loss.item()
            torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
            self.optimizer.step()
            mean = processes.sum(total) / processes.world
        self.done += 1
        if not math.isfinite(mean):
            raise CallError(f"train: the loss is {mean} at step {self.done}. Fix: an lr below {recipe.lr}")
        self.history.losses.append(mean)
        return mean

    @torch.no_grad()
    def validate(self, held_out: npt.NDArray[np.int64]) -> float:
        """The mean loss on the held-out rows."""
        recipe, total, count = self.recipe, 0.0, 0
        self.model.eval()
        with self.processes.guard(f"validation after step {self.done}"):
            for start in range(0, len(held_out), recipe.batch):
                rows = self.corpus.rows(held_out[start : start + recipe.batch], recipe.context)
                total += _loss(self.model, self.processes.share(rows), "sum", self.processes, recipe.dtype).item()
                count += int((rows.targets != IGNORED).sum())
            mean = self.processes.sum(total) / max(1, count)
        self.model.train()
        self.history.validations.append((self.done, mean))
        return mean

    def save(self, folder: Path) -> None:
        """Begin to write the state; training goes on meanwhile. Raises what :meth:`wait` raises for the checkpoint before."""
        from torch.distributed.checkpoint.state_dict import get_state_dict

        self.wait()
        self._folder = folder
        self.processes.on_main(lambda: _remove(folder.glob(".step-*.part")))  # left by a kill
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
                _remove(old for old in folder.glob("step-*") if old != target)
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
        history, done = self.processes.run_on_all(lambda: self._check(path), "reading a checkpoint")
        self._restore(path)
        self.history, self.done = history, done

    def _check(self, path: Path) -> tuple[History, int]:
        """The history and the steps done, if the state belongs to this run, or to one of fewer steps; else a DataError."""
        from torch.distributed.checkpoint.filesystem import FileSystemReader
        from torch.distributed.checkpoint.state_dict import get_model_state_dict

        try:
            content: dict[str, Any] = json.loads((path / "run.json").read_text(encoding="utf-8"))
            recipe, corpus, now = dict(content["recipe"]), content["corpus"], asdict(self.recipe)
            history, done = History.of(content["history"]), int(content["done"])
            now["steps"] = min(now["steps"], recipe["steps"])
            saved = FileSystemReader(path).read_metadata().state_dict_metadata
        except (*_UNREADABLE, TypeError) as error:  # also where run.json has other keys
            raise _unreadable(path, error) from None
        changed = [f"{key} {before} -> {now.get(key)}" for key, before in recipe.items() if before != now.get(key)]
        if changed:
            raise DataError(f"{path} belongs to a run with another recipe: {', '.join(changed)}")
        if corpus != self.corpus.digest():
            raise DataError(f"{path} belongs to a run on other text: the files, or the vocabulary, changed since")
        for name, weight in get_model_state_dict(self.model).items():  # its names are those of the checkpoint
            there = getattr(saved.get(f"model.{name}"), "size", None)
            if isinstance(weight, torch.Tensor) and there != weight.shape:
                there = "nothing" if there is None else tuple(there)
                raise DataError(
                    f"{path} belongs to a model of other sizes: {name} is {there} there, {tuple(weight.shape)} here"
                )
        return history, done

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


def newest(folder: Path) -> Path | None:
    """The newest complete checkpoint.

    Raises:
        DataError: if ``folder`` is a file, which the first save would notice only after many steps.
    """
    if folder.is_file():
        raise DataError(f"{folder} is a file, but checkpoints lie in a folder.\nFix: another path.")
    steps = {int(match[1]): path for path in folder.glob("step-*") if (match := re.fullmatch(r"step-(\d+)", path.name))}
    return steps[max(steps)] if steps else None


_ONE = Processes()


@torch.no_grad()
def first_loss(model: torch.nn.Module, corpus: Packed, recipe: Recipe) -> float:
    """The loss of the first row, in nats a token: before the first step about the logarithm of the vocabulary's size."""
    return _loss(model, corpus.rows(np.zeros(1, np.int64), recipe.context), "mean", dtype=recipe.dtype).item()


def _loss(
    model: torch.nn.Module, rows: Rows, reduction: str, processes: Processes = _ONE, dtype: str = "float32"
) -> torch.Tensor:
    device = next(model.parameters()).device
    ids = torch.from_numpy(rows.inputs).to(device)  # (B, N)
    targets = torch.from_numpy(rows.targets).to(device)  # (B, N)
    own, mask = getattr(getattr(model, "config", None), "mask", None), None
    # Rows of one document each need only the model's own mask, and run faster with it.
    if own is not None and not (rows.documents == rows.documents[:, :1]).all():
        mask = as_mask(own) & documents(rows.documents)
    with torch.autocast(device.type, getattr(torch, dtype), enabled=dtype != "float32"):
        logits, targets = processes.forward(model, ids, targets, mask)  # (B, N, V), (B, N)
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED, reduction=reduction)


def _optimizer(model: torch.nn.Module, recipe: Recipe) -> torch.optim.AdamW:
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": recipe.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=recipe.lr, betas=(0.9, 0.95), fused=True)


def _remove(folders: Iterable[Path]) -> None:
    for folder in folders:
        shutil.rmtree(folder)


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

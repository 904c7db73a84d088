"""The training loop: AdamW, gradient clipping, and checkpoints from which it resumes after any kill.

A resumed run repeats the uninterrupted one bit for bit on the same machine with the same number of threads.
Sources: Loshchilov and Hutter 2019 (AdamW); Pascanu et al. 2013 (clipping); the schedule is in corpus.py.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from lowtri.errors import CallError, RankError
from lowtri.masks import as_mask, documents
from lowtri.training.checkpoints import History, Run
from lowtri.training.corpus import IGNORED, Packed, Recipe, Rows, rows_of_step, split
from lowtri.training.processes import Processes


class Step(NamedTuple):
    """What ``on_step`` receives after each step."""

    number: int  # steps done, from 1
    loss: float  # of this step's batch, before the step; nats a token
    lr: float
    validation: float | None  # loss on the held-out rows, when it was measured
    tokens_per_second: float  # of training alone, since this process began


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

    torch's random numbers are seeded at each step, from the recipe's seed, the step and the rank, so dropout is the same in a resumed
    run.

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
    run = Run(model, _optimizer(model, recipe), recipe, corpus, processes=processes)
    if state is not None:
        run.resume(state)
    model.train()
    try:
        _steps(run, train_rows, held_out, state, on_step)
        run.wait()
    except RankError:
        raise
    except BaseException:  # also where a user interrupts: the checkpoint that is being written is not lost
        run.settle()
        raise
    return run.history


def _steps(
    run: Run,
    train_rows: npt.NDArray[np.int64],
    held_out: npt.NDArray[np.int64],
    state: Path | None,
    on_step: Callable[[Step], object] | None,
) -> None:
    """The steps that are left."""
    model, recipe, corpus, processes = run.model, run.recipe, run.corpus, run.processes
    begun, seconds = run.done, 0.0
    while run.done < recipe.steps:
        started = time.perf_counter()
        rows = corpus.rows(rows_of_step(train_rows, run.done, recipe), recipe.context)
        lr = recipe.lr_at(run.done)
        torch.manual_seed(recipe.random_seed(run.done, processes.rank))
        with processes.guard(f"step {run.done + 1}"):
            loss = _step(model, run.optimizer, rows, lr, recipe, processes)
        seconds += time.perf_counter() - started
        run.done += 1
        if not math.isfinite(loss):
            raise CallError(f"train: the loss is {loss} at step {run.done}. Fix: an lr below {recipe.lr}")
        run.history.losses.append(loss)
        run.history.tokens_per_second = (run.done - begun) * rows.inputs.size / seconds
        validation = None
        if len(held_out) and _due(run.done, recipe.validate_every, recipe.steps):
            with processes.guard(f"validation after step {run.done}"):
                validation = _validate(model, corpus, held_out, recipe, processes)
            run.history.validations.append((run.done, validation))
        if state is not None and _due(run.done, recipe.save_every, recipe.steps):
            run.save(state)
        if on_step is not None and processes.is_main:
            on_step(Step(run.done, loss, lr, validation, run.history.tokens_per_second))


def _due(done: int, every: int, steps: int) -> bool:
    return done % every == 0 or done == steps


def _step(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    rows: Rows,
    lr: float,
    recipe: Recipe,
    processes: Processes,
) -> float:
    """One update; the mean loss of all targets in the batch.

    Processes and parts have different numbers of targets, so a mean of their means would weight targets differently: losses are summed
    and divided by the number of all targets. FSDP divides gradients by the number of processes, hence the factor.
    """
    for group in optimizer.param_groups:
        group["lr"] = lr
    scale = processes.world / max(1, int((rows.targets != IGNORED).sum()))
    mine, total = processes.share(rows), 0.0
    optimizer.zero_grad(set_to_none=True)
    parts = np.array_split(np.arange(len(mine.inputs)), min(recipe.accumulate, len(mine.inputs)))
    for number, part in enumerate(parts):
        processes.sync_gradients(model, number == len(parts) - 1)
        loss = _loss(model, Rows(*(x[part] for x in mine)), "sum", processes, recipe.dtype) * scale
        loss.backward()
        total += loss.item()
    torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
    optimizer.step()
    return processes.sum(total) / processes.world


_ALONE = Processes()


@torch.no_grad()
def first_loss(model: torch.nn.Module, corpus: Packed, recipe: Recipe) -> float:
    """The loss of the first row, in nats a token: before the first step about the logarithm of the vocabulary's size."""
    return _loss(model, corpus.rows(np.zeros(1, np.int64), recipe.context), "mean", dtype=recipe.dtype).item()


def _loss(
    model: torch.nn.Module, rows: Rows, reduction: str, processes: Processes = _ALONE, dtype: str = "float32"
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


@torch.no_grad()
def _validate(
    model: torch.nn.Module,
    corpus: Packed,
    held_out: npt.NDArray[np.int64],
    recipe: Recipe,
    processes: Processes,
) -> float:
    model.eval()
    total, count = 0.0, 0
    for start in range(0, len(held_out), recipe.batch):
        rows = corpus.rows(held_out[start : start + recipe.batch], recipe.context)
        total += _loss(model, processes.share(rows), "sum", processes, recipe.dtype).item()
        count += int((rows.targets != IGNORED).sum())
    model.train()
    return processes.sum(total) / max(1, count)


def _optimizer(model: torch.nn.Module, recipe: Recipe) -> torch.optim.AdamW:
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": recipe.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=recipe.lr, betas=(0.9, 0.95), fused=True)

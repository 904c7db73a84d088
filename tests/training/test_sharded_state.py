"""Checkpoints of several processes, as one process meets them."""

from __future__ import annotations

import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from lowtri.errors import DataError
from lowtri.training import state
from lowtri.training.corpus import Packed
from lowtri.training.processes import Processes
from lowtri.training.recipe import Recipe
from lowtri.training.sharded_state import Saver, newest, restore_sharded
from lowtri.training.state import Run

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # one process writes as several do

RECIPE = Recipe(steps=40, batch=4, context=8)


class Kill(BaseException):
    """What ends the process."""


def new_run() -> Run:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    return Run(model, optimizer, RECIPE, Packed.of([[1, 2, 3, 4] * 40]))


def saved_by_several(run: Run, path: Path, step: int) -> None:
    saver = Saver(path.with_suffix(""), Processes())
    content = {"history": asdict(run.history), "recipe": asdict(RECIPE), "corpus": run.corpus.digest()}
    saver.save({"done": step, **content}, run.model, run.optimizer)
    saver.wait()


def without_shards(folder: Path, **_: Any) -> None:
    """A removal that has begun."""
    for shard in Path(folder).rglob("*.distcp"):
        shard.unlink()
    raise Kill


@pytest.mark.parametrize("removal", [mock.Mock(side_effect=Kill), without_shards], ids=["before", "within"])
def test_a_kill_around_the_removal_of_what_several_processes_have_saved(tmp_path: Path, removal: Any) -> None:
    run, path = new_run(), tmp_path / "training-state.pt"
    saved_by_several(run, path, 10)
    run.done = 30
    with mock.patch.object(state.shutil, "rmtree", removal), pytest.raises(Kill):
        run.save(path)
    resumed = new_run()
    resumed.resume(path)
    assert resumed.done == 30


@pytest.mark.parametrize("damage", ["half a shard", "no shard", "no metadata"])
def test_a_damaged_checkpoint_of_several_processes_is_named(tmp_path: Path, damage: str) -> None:
    run, path = new_run(), tmp_path / "training-state.pt"
    saved_by_several(run, path, 10)
    folder = newest(path.with_suffix(""))
    assert folder is not None
    (shard,) = folder.glob("*.distcp")
    if damage == "half a shard":
        shard.write_bytes(shard.read_bytes()[: shard.stat().st_size // 2])
    else:
        (shard if damage == "no shard" else folder / ".metadata").unlink()
    with pytest.raises(DataError, match=r"step-10 cannot be read: .*\nFix: "):
        restore_sharded(folder, run.model, run.optimizer)
    shutil.rmtree(folder)
    assert newest(path.with_suffix("")) is None

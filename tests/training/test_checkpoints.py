"""Checkpoints, as one process meets them."""

from __future__ import annotations

import os
import shutil
from concurrent.futures import Future
from pathlib import Path
from threading import Event, Timer
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from lowtri.errors import DataError
from lowtri.training.corpus import Packed, Recipe
from lowtri.training.train import Run, newest

RECIPE = Recipe(steps=40, batch=4, context=8)


class Kill(BaseException):
    """What ends the process."""


class Partly(nn.Module):
    """One weight that is used, one that is not, and one that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)
        self.fixed = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


def new_run() -> Run:
    torch.manual_seed(0)
    model = Partly()
    optimizer = torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad])
    return Run(model, optimizer, RECIPE, Packed.of([[1, 2, 3, 4] * 40]))


def step(run: Run) -> torch.Tensor:
    """A step that changes the weights in place; the weight after it."""
    run.optimizer.zero_grad()
    run.model(torch.ones(1, 4)).square().sum().backward()
    run.optimizer.step()
    run.done += 1
    return run.model.used.weight.detach().clone()


def saved(folder: Path) -> Run:
    """A run that saved after its first step."""
    run = new_run()
    step(run)
    run.save(folder)
    run.wait()
    return run


def test_what_is_saved_is_the_moment_of_the_call_whatever_changes_meanwhile(tmp_path: Path) -> None:
    real, run, changed = os.replace, new_run(), Event()
    first = step(run)

    def late(*paths: Any) -> None:
        assert changed.wait(30)
        real(*paths)

    with mock.patch("os.replace", late):
        run.save(tmp_path)
        second = step(run)
        changed.set()
        run.wait()
    resumed = new_run()
    resumed.resume(tmp_path)
    assert resumed.done == 1 and torch.equal(resumed.model.used.weight, first)
    assert torch.equal(step(resumed), second)


def test_an_interrupt_of_the_waiting_leaves_the_checkpoint_to_be_settled(tmp_path: Path) -> None:
    real, run, goes_on = os.replace, new_run(), Event()
    step(run)

    def late(*paths: Any) -> None:
        assert goes_on.wait(30)
        real(*paths)

    def interrupted(_: Any) -> None:
        raise KeyboardInterrupt

    with mock.patch("os.replace", late):
        run.save(tmp_path)
        with mock.patch.object(Future, "exception", interrupted), pytest.raises(KeyboardInterrupt):
            run.wait()
        Timer(0.2, goes_on.set).start()
        run.settle()
        assert newest(tmp_path) == tmp_path / "step-1"


@pytest.mark.parametrize("moment", ["before its name", "after its name"])
def test_a_kill_around_the_renaming(tmp_path: Path, moment: str) -> None:
    """Before a checkpoint has its name, the one before it is the newest; then it is itself, also while the old one is removed."""
    run, real = saved(tmp_path), os.replace
    step(run)

    def dies(*paths: Any, **_: Any) -> None:
        if moment == "after its name":
            for shard in Path(paths[0]).rglob("*.distcp"):
                shard.unlink()
        elif not str(paths[1]).endswith("step-2"):  # the files in it
            return real(*paths)
        raise Kill

    name = "replace" if moment == "before its name" else "rmtree"
    with mock.patch("os.replace" if name == "replace" else "shutil.rmtree", dies):
        run.save(tmp_path)
        with pytest.raises(DataError, match="could not be written: Kill"):
            run.wait()
    resumed = new_run()
    resumed.resume(tmp_path)
    assert resumed.done == (1 if name == "replace" else 2)
    step(resumed)
    resumed.save(tmp_path)
    resumed.wait()
    assert os.listdir(tmp_path) == [f"step-{resumed.done}"]


@pytest.mark.parametrize(
    "damage", ["half a shard", "no shard", "no metadata", "half of the metadata", "no run.json", "other keys"]
)
def test_a_damaged_checkpoint_is_named(tmp_path: Path, damage: str) -> None:
    saved(tmp_path)
    folder = newest(tmp_path)
    assert folder is not None
    (shard,) = folder.glob("*.distcp")
    if damage == "other keys":
        (folder / "run.json").write_text('{"recipe": {"steps": 3}, "done": 1}')
    elif damage.startswith("half"):
        path = shard if "shard" in damage else folder / ".metadata"
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    else:
        {"no shard": shard, "no metadata": folder / ".metadata", "no run.json": folder / "run.json"}[damage].unlink()
    with pytest.raises(DataError, match="step-1 cannot be read: "):
        new_run().resume(tmp_path)
    shutil.rmtree(folder)
    assert newest(tmp_path) is None


def test_a_file_in_the_place_of_the_folder_is_noticed_before_the_first_step(tmp_path: Path) -> None:
    file = tmp_path / "state.pt"
    file.touch()
    with pytest.raises(DataError, match=r"state.pt is a file, but checkpoints lie in a folder.\nFix: another path"):
        new_run().resume(file)


def test_a_model_of_other_sizes_is_named(tmp_path: Path) -> None:
    saved(tmp_path)
    other = new_run()
    other.model.unused = nn.Linear(4, 5)
    with pytest.raises(DataError, match=r"unused.weight is \(4, 4\) there, \(5, 4\) here"):
        other.resume(tmp_path)
    other.model.another = nn.Linear(4, 4)
    other.model.unused = nn.Linear(4, 4)
    with pytest.raises(DataError, match=r"another.weight is nothing there, \(4, 4\) here"):
        other.resume(tmp_path)


@pytest.mark.parametrize("compiled", ["the saved one", "the resumed one"])
def test_names_of_weights_are_those_before_torch_compile(tmp_path: Path, compiled: str) -> None:
    """torch.compile puts ``_orig_mod.`` before the names of the weights; it compiles nothing before the first call."""
    run, resumed = new_run(), new_run()
    weight = step(run)
    changed = run if compiled == "the saved one" else resumed
    changed.model = torch.compile(changed.model, backend="eager")
    run.save(tmp_path)
    run.wait()
    resumed.resume(tmp_path)
    assert resumed.done == 1 and torch.equal(resumed.model.used.weight, weight)

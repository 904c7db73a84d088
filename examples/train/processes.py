"""The processes of a run, one or those of torchrun: how they begin, what they share, and what they keep in the folder of the run.

    run.json            the options that decide what is learnt
    state/step-120      weights and moments; any number of processes reads what any number has written
    state/.step-140     a checkpoint that is being written, or was when a process was killed

All processes call each of these functions. torch reads its checkpoints with pickle: resume only in folders that your own runs have
written.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from lowtri.errors import DataError, LowtriError
from lowtri.files import write_text


@contextmanager
def processes(sp: int) -> Iterator[DeviceMesh]:
    """torch.distributed, as a mesh of groups that share the rows of a batch ("dp") x processes that share a row ("sp").

    An error of lowtri ends the program with its message alone.
    """
    try:
        if "RANK" in os.environ:  # set by torchrun
            dist.init_process_group("gloo")
        else:
            stores: Any = dist  # its stores are documented, but not marked as exported for type checkers
            dist.init_process_group("gloo", store=stores.HashStore(), rank=0, world_size=1)
        world = dist.get_world_size()
        if sp < 1 or world % sp:
            raise DataError(
                f"--sp: got {sp}, which does not divide the number of processes, {world}.\n"
                f"Fix: torchrun --nproc-per-node {max(sp, 2)} examples/train/train.py ..."
            )
        yield init_device_mesh("cpu", (world // sp, sp), mesh_dim_names=("dp", "sp"))
    except LowtriError as error:
        raise SystemExit(f"train: {error}") from None
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def shard(model: torch.nn.Module) -> None:
    """Shard weights, gradients and moments over all processes, layer by layer."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    lists = [part for part in model.modules() if isinstance(part, torch.nn.ModuleList)]
    layers = max(lists, key=len)
    for part in (*layers, model):
        fully_shard(part, mesh=mesh)


def total(value: torch.Tensor, mesh: DeviceMesh | None) -> float:
    """The sum of a number over all processes of a mesh; without one, the number."""
    value = value.detach().double()
    if mesh is not None:
        dist.all_reduce(value)
    return value.item()


_FREE = ("files", "out", "sp", "prompt")  # options that do not change what is learnt, or of which only the text counts


def claim(folder: Path, options: dict[str, Any], text: str) -> None:
    """Note the options of a run, and the digest of its text, in its folder.

    Raises:
        DataError: if the folder holds a run with other options or other text, or something else.
    """
    options = {name: value for name, value in options.items() if name not in _FREE} | {"text": text}
    path, now = folder / "run.json", json.loads(json.dumps(options))
    try:
        begun = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if folder.exists() and any(folder.iterdir()):
            raise DataError(f"--out: {folder} is not empty, and holds no run.\nFix: another folder") from None
        begun = now
    changed = [f"{name} {begun.get(name)} there, {now[name]} here" for name in now if begun.get(name) != now[name]]
    if changed:
        raise DataError(
            f"--out: {folder} holds another run: {', '.join(changed)}.\nFix: another folder, or its options"
        )
    dist.barrier()  # every process has looked
    if dist.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(now, indent=1) + "\n")


def save(folder: Path, done: int, model: Any, optimizer: Any) -> None:
    """Write a checkpoint after so many steps. It has its name when it is complete, and only then the one before it goes."""
    part, target = folder / f".step-{done}", folder / f"step-{done}"
    if dist.get_rank() == 0:
        _remove(folder.glob(".step-*"))  # left by a kill
    dist.barrier()
    weights, moments = get_state_dict(model, optimizer)
    state_dict_saver.save({"weights": weights, "moments": moments}, checkpoint_id=part)
    if dist.get_rank() == 0:
        os.replace(part, target)
        _remove(old for old in folder.glob("step-*") if old != target)


def _remove(folders: Iterable[Path]) -> None:
    for folder in folders:
        shutil.rmtree(folder)


def resume(folder: Path, model: Any, optimizer: Any) -> int:
    """Load the newest checkpoint into a model and its optimizer; the steps done, 0 if there is no checkpoint."""
    steps = [int(found[1]) for path in folder.glob("step-*") if (found := re.fullmatch(r"step-(\d+)", path.name))]
    if not steps:
        return 0
    weights, moments = get_state_dict(model, optimizer)
    state: dict[str, Any] = {"weights": weights, "moments": moments}
    state_dict_loader.load(state, checkpoint_id=folder / f"step-{max(steps)}")
    set_state_dict(model, optimizer, model_state_dict=state["weights"], optim_state_dict=state["moments"])
    return max(steps)


def full_weights(model: Any) -> dict[str, Any]:
    """The whole weights of a sharded model, on the CPU of rank 0; empty on the others."""
    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))

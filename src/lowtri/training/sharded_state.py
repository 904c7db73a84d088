"""The state of a run on several processes: torch's distributed checkpoint, written beside its name and renamed when it is complete.

    training-state/step-120/          shards of weights and moments, and run.json
    training-state/.step-140.part/    one that is being written, or was when a process was killed

Any number of processes reads what any number has written.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowtri.errors import DataError
from lowtri.files import write_text

if TYPE_CHECKING:
    from lowtri.training.processes import Processes

__all__ = ["content_of", "full_weights", "newest", "restore_sharded", "save_sharded"]


def newest(folder: Path) -> Path | None:
    """The newest complete checkpoint."""
    steps = {int(match[1]): path for path in folder.glob("step-*") if (match := re.fullmatch(r"step-(\d+)", path.name))}
    return steps[max(steps)] if steps else None


def save_sharded(folder: Path, content: dict[str, Any], model: Any, optimizer: Any, processes: Processes) -> None:
    """Write a checkpoint; ``content`` is what JSON can say, with ``done``, the number of steps.

    Raises:
        OSError: on every rank, if it cannot be written; the one before is complete.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.checkpoint.state_dict_saver import save

    target, part = folder / f"step-{content['done']}", folder / f".step-{content['done']}.part"
    processes.on_main(lambda: _clear(folder))
    weights, moments = get_state_dict(model, optimizer)
    problem: OSError | None = None
    try:
        with processes.answering(f"saving {target.name}"):
            save({"model": weights, "optimizer": moments}, checkpoint_id=part)
    except (Exception, CheckpointException) as error:  # every rank learns of a failed write, in a class of torch's
        problem = _os_error(error, folder)
        if problem is None:
            raise

    def finish() -> None:
        if problem is not None:
            raise problem
        write_text(part / "run.json", json.dumps(content))
        os.replace(part, target)
        for old in folder.glob("step-*"):
            if old != target:
                shutil.rmtree(old)

    processes.on_main(finish)


def restore_sharded(path: Path, model: Any, optimizer: Any) -> dict[str, Any]:
    """Load a checkpoint into a model and its optimizer, and return its ``content``."""
    import torch.distributed as dist
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.checkpoint.state_dict_loader import load

    content: dict[str, Any] = content_of(path)
    weights, moments = get_state_dict(model, optimizer)
    state: dict[str, Any] = {"model": weights, "optimizer": moments}
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one process reads what several wrote
            load(state, checkpoint_id=path, no_dist=not (dist.is_available() and dist.is_initialized()))
    except (OSError, RuntimeError, ValueError, KeyError) as error:
        raise DataError(f"{path} cannot be read: {str(error).splitlines()[0]}") from None
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return content


def content_of(path: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads((path / "run.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {error}") from None
    return content


def full_weights(model: Any) -> dict[str, Any]:
    """The whole weights of a sharded model, on the CPU of rank 0; empty on the others."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))


def _clear(folder: Path) -> None:
    """Remove what was being written when a process was killed."""
    folder.mkdir(parents=True, exist_ok=True)
    for part in folder.glob(".step-*.part"):
        shutil.rmtree(part)


def _os_error(error: BaseException | None, folder: Path) -> OSError | None:
    """The operating system's error behind torch's exception, with the folder's name."""
    causes = [
        failure[0] for failure in getattr(error, "failures", {}).values()
    ]  # of torch's CheckpointException, by rank
    while error is not None:
        causes.append(error)
        error = error.__cause__ or error.__context__
    for cause in causes:
        if isinstance(cause, OSError) and cause.errno is not None:
            return OSError(cause.errno, cause.strerror, str(folder))
    return None

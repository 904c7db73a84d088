"""The processes of a training run, as torchrun starts them: ``dp`` groups share the rows of a batch, ``sp`` processes of a group share
the tokens of a row. Weights, gradients and moments are sharded over all of them (FSDP2).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from lowtri.errors import CallError, LowtriError, RankError
from lowtri.masks import Mask, as_mask
from lowtri.masks.plan import TILE_Q
from lowtri.nn.decoder import Decoder
from lowtri.parallel.collectives import guard
from lowtri.parallel.context import ContextParallel
from lowtri.parallel.planning import plan_shards
from lowtri.training.corpus import IGNORED, Rows

T = TypeVar("T")

_STEP = timedelta(minutes=10)  # for a process that hangs in a step; one that has ended is noticed at once
_FILES = timedelta(days=1)  # rank 0 may read texts and learn a tokenizer for hours
_OF_MAIN = "a file operation of rank 0"


class Processes:
    """The processes that train together; by default this one alone.

    Attributes:
        rank, world: this process's number, and how many there are.
        dp, sp: groups that share the rows of a batch, and processes that share the tokens of a row.
        is_main: whether this process writes files and reports.
    """

    rank, world, dp, sp = 0, 1, 1, 1
    is_main = True
    _row_group = 0  # of those that share the rows of a batch
    _sequence_group: Any = None  # of those that share the tokens of a row
    _files: Any = None  # for what follows from the work of one process, which may take hours

    @classmethod
    def of_torch(cls, dp: int | None, sp: int | None) -> Processes:
        """The processes of torch.distributed, which has begun.

        Raises:
            CallError: if ``dp * sp`` is not the number of processes.
        """
        self = cls()
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.is_main = self.rank == 0
        self.sp = sp or self.world // (dp or self.world) or 1
        self.dp = dp or self.world // self.sp
        if self.dp * self.sp != self.world:
            raise CallError(
                f"--dp {self.dp} x --sp {self.sp}: torchrun started {self.world} processes.\n"
                f"Fix: torchrun --nproc-per-node {max(1, self.dp * self.sp)}, or other numbers."
            )
        mesh = init_device_mesh("cpu", (self.dp, self.sp), mesh_dim_names=("dp", "sp"))
        self._sequence_group, self._row_group = mesh["sp"].get_group(), mesh.get_local_rank("dp")
        self._files = dist.new_group(backend="gloo", timeout=_FILES)
        return self

    def on_main(self, function: Callable[[], T]) -> T:
        """The result of a function that rank 0 alone runs, on every rank; its errors are raised on every rank."""
        box: list[Any] = [self.run_on_all(lambda: function() if self.is_main else None, _OF_MAIN)]
        if self.world > 1:
            with self.guard(_OF_MAIN):
                dist.broadcast_object_list(box, group=self._files)
        result: T = box[0]
        return result

    def run_on_all(self, function: Callable[[], T], what: str) -> T:
        """The result of a function that every rank runs by itself, ``what`` in words; an error of one rank is raised on every rank."""
        if self.world == 1:
            return function()
        error: Exception | None = None
        try:
            result = function()
        except Exception as raised:
            error = raised
        shown = error
        if not (error is None or isinstance(error, LowtriError | OSError)):
            text = f"rank {self.rank} of {self.world} ended ({type(error).__name__}: {error})".splitlines()[0]
            shown = RankError(f"{text}\nFix: start it again with --resume.")
        errors: list[Exception | None] = [None] * self.world
        with self.guard(what):
            dist.all_gather_object(errors, shown, group=self._files)
        for one in (error, *errors):
            if one is not None:
                raise one
        return result

    def share(self, rows: Rows) -> Rows:
        """The rows of this process's group."""
        mine = Rows(*(part[self._row_group :: self.dp] for part in rows))
        if len(mine.inputs):
            return mine
        # Every process takes part in the collectives of a forward: a group without rows computes one that counts for nothing.
        return Rows(rows.inputs[:1], np.full_like(rows.targets[:1], IGNORED), rows.documents[:1])

    def sum(self, value: float) -> float:
        """The sum over all processes."""
        if self.world == 1:
            return value
        total = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(total)
        return float(total)

    def shard(self, model: nn.Module, dtype: str) -> nn.Module:
        """The model with its weights sharded over all processes, and drawn if it was made on the meta device."""
        if self.world > 1:
            if self.sp > 1 and not isinstance(model, Decoder):
                raise CallError(
                    f"--sp {self.sp}: {type(model).__name__} cannot share a row between processes. Fix: --sp 1."
                )
            from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

            mesh = init_device_mesh("cpu", (self.world,), mesh_dim_names=("all",))
            policy = MixedPrecisionPolicy()
            if dtype != "float32":
                policy = MixedPrecisionPolicy(param_dtype=getattr(torch, dtype), reduce_dtype=torch.float32)
            for part in (*getattr(getattr(model, "model", None), "layers", ()), model):
                fully_shard(part, mesh=mesh, mp_policy=policy)
        with self.guard("drawing the weights"):
            initialise(model)
        return model

    def forward(self, model: nn.Module, ids: Tensor, targets: Tensor, mask: Mask | None) -> tuple[Tensor, Tensor]:
        """Logits, and their targets; with several processes to a row those of this process's tokens."""
        if self.sp == 1:
            return (model(ids) if mask is None else model(ids, mask=mask)), targets
        seen = as_mask(model.config.mask) if mask is None else mask  # type: ignore[union-attr]
        context = ContextParallel(plan_shards(seen, ids.shape[1], self.sp, block=TILE_Q), self._sequence_group)
        logits = model(context.shard(ids), mask=seen, positions=context.positions, attend=context.attend)
        return logits, context.shard(targets)

    def sync_gradients(self, model: Any, wanted: bool) -> None:
        """Whether the next backward sums gradients over processes: in the last part of a batch only."""
        if self.world > 1:
            model.set_requires_gradient_sync(wanted)

    @contextmanager
    def guard(self, what: str) -> Iterator[None]:
        """Around work in which all processes take part: if one has ended, the others raise a RankError."""
        try:
            with guard(what) if self.world > 1 else nullcontext():
                yield
        except RankError as error:
            text = str(error).removeprefix(f"{what}: ").rsplit("\nFix: ", 1)[0]
            raise RankError(f"{what}: {text}\nFix: start it again with --resume.") from error

    def new_group(self) -> Any:
        """A group of all processes for collectives of another thread."""
        return dist.new_group(backend="gloo", timeout=_STEP) if self.world > 1 else None


@contextmanager
def processes_of_torchrun(dp: int | None = None, sp: int | None = None) -> Iterator[Processes]:
    """The processes that torchrun started this one with, or this one alone.

    Raises:
        CallError: if ``dp`` or ``sp`` ask for several processes and there is one, or they do not give the number of processes.
    """
    for name, value in (("dp", dp), ("sp", sp)):
        if value is not None and value < 1:
            raise CallError(f"--{name}: got {value}; at least 1 is needed")
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        if (dp or 1) * (sp or 1) > 1:
            count = (dp or 1) * (sp or 1)
            raise CallError(
                f"--dp {dp or 1} x --sp {sp or 1}: there is one process.\n"
                f"Fix: torchrun --nproc-per-node {count} -m lowtri train ..."
            )
        yield Processes()
        return
    try:
        with reported_once(_begin()):
            yield Processes.of_torch(dp, sp)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _begin() -> Any:
    """Begin torch.distributed with the processes of torchrun; the store in which they meet.

    After a restart in place (``--max-restarts``), the store of torchrun still has the addresses of the processes that have ended, and
    torch would wait for those: each attempt has names of its own.
    """
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    is_master = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    stores: Any = dist  # its stores are documented, but not marked as exported for type checkers
    store = stores.TCPStore(host, port, world, is_master=is_master, timeout=_STEP)
    attempt = stores.PrefixStore(f"lowtri/attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    dist.init_process_group("gloo", store=attempt, rank=rank, world_size=world, timeout=_STEP)
    return attempt


@contextmanager
def reported_once(store: Any) -> Iterator[None]:
    """An error that several processes have, or that follows from the end of another one, ends all; only the first raises it."""
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        try:
            is_first = store.add("reported", 1) == 1
        except RuntimeError:  # the store was in a process that has ended
            is_first = True
        if is_first:
            raise
        raise SystemExit(130 if isinstance(error, KeyboardInterrupt) else getattr(error, "exit_code", 1)) from None


@torch.no_grad()
def initialise(model: nn.Module) -> None:
    """Allocate and draw the weights of a :class:`Decoder` that was made on the meta device; other models stay as they are.

    Every process draws the same numbers, one weight after the other, and keeps its shard. So the weights do not depend on the number of
    processes, and none holds more than its shards and one whole weight.
    """
    if not isinstance(model, Decoder) or not any(weight.is_meta for weight in model.parameters()):
        return
    model.to_empty(device="cpu")
    model.tie_weights()
    for name, weight in model.named_parameters():
        whole = torch.empty(weight.shape, dtype=weight.dtype)
        model.init_weight(name, whole)
        if hasattr(weight, "placements"):
            from torch.distributed.tensor import distribute_tensor

            sharded: Any = weight
            whole = distribute_tensor(whole, sharded.device_mesh, sharded.placements)
        weight.copy_(whole)

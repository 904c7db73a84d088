"""ContextParallel: one rank's view of a sequence that is spread over the processes of a group."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from lowtri.dispatch.prepared import autocast_device, cast_for_autocast, without_autocast
from lowtri.errors import CallError, LowtriError
from lowtri.masks import Mask, as_mask
from lowtri.parallel import collectives
from lowtri.parallel.attend import Bias, Setting, attend, module_options, take, wrong_tensors
from lowtri.parallel.collectives import agree, barrier, describe_call, guard
from lowtri.parallel.exchange import Exchange, exchange_of
from lowtri.parallel.runs import Ints
from lowtri.parallel.shards import ShardPlan


class ContextParallel:
    """A sequence that is spread over processes by a plan, and its exact attention, with gradients.

    In every process::

        plan = plan_shards("causal & window(4096)", n, dist.get_world_size())
        context = ContextParallel(plan)
        ids = context.shard(ids)                            # (B, N) -> (B, my tokens)
        logits = model(ids, positions=context.positions, attend=context.attend)

    and with tensors: ``output = context.attention(q, k, v)``, where q, k and v are (B, H, my tokens, D).

    A rank receives the keys and values of the blocks that its queries see, or all of them where the plan says so
    (``plan.gathers``). They are not kept for the backward, which fetches them again; so a layer keeps no more than its own
    tokens. Gradients of keys return to their owners in float32, and are added in the order of the ranks: they are bit-equal
    from run to run. Gradients of everything that all ranks hold (parameters, sinks, a learned bias) are this rank's part, to
    be summed over the ranks by DDP, FSDP or an all-reduce.

    Args:
        plan: the same on every rank.
        group: a process group with one process for each rank of the plan, or a DeviceMesh of one dimension, for instance
            ``init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "sp"))["sp"]``; default: all processes.
        keep: keep fetched keys and values for the backward: half the messages, more memory.
        overlap: attend the own keys while those of others arrive, and merge the results. None: in float32 and float64, but not in
            half types, whose partial results would be rounded twice.
        check: compare the arguments of each call between the ranks before data moves, in one small all-gather. Without it, ranks
            that come with different arguments may wait for each other until the group's time-out.
        timeout: seconds to wait for all ranks here; later calls wait as long as the group's own time-out.

    Raises:
        RankError: on every rank that is there, if a rank is missing (on rank 0 the message has its number), or if the plans differ.
        CallError: if the group has another number of processes than the plan has ranks.

    Source: ring attention, Liu et al. 2023; context parallelism, Dubey et al. 2024 (Llama 3), section 3.3.2.
    """

    def __init__(
        self,
        plan: ShardPlan,
        group: Any = None,
        *,
        keep: bool = False,
        overlap: bool | None = None,
        check: bool = True,
        timeout: float = 300.0,
    ) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise CallError(
                "ContextParallel: torch.distributed has not begun.\n"
                'Fix: torch.distributed.init_process_group("gloo") in each process, started by torchrun.'
            )
        if isinstance(group, DeviceMesh):
            if group.ndim != 1:
                raise CallError(
                    f"ContextParallel: group is a mesh of {group.ndim} dimensions, {group.mesh_dim_names}, but one shares the tokens.\n"
                    'Fix: mesh["sp"], with the name of that dimension.'
                )
            group = group.get_group()
        self.plan, self.group, self.keep, self.overlap, self.check = plan, group, keep, overlap, check
        self.rank = dist.get_rank(group)
        if self.rank < 0 or dist.get_world_size(group) != plan.ranks:
            raise CallError(
                f"ContextParallel: the plan is for {plan.ranks} ranks, but the group has {dist.get_world_size(group)} processes"
                f"{', and this one is not among them' if self.rank < 0 else ''}.\n"
                "Fix: plan_shards(mask, n, dist.get_world_size(group))."
            )
        self._timeout = timeout
        barrier("ContextParallel", group, timeout)
        what = [f"n {plan.n}", f"block {plan.block}", f"masks {plan.masks!r}", f"plan {plan.digest}"]
        agree("ContextParallel", None, what, group)
        self._exchanges: dict[int, Exchange] = {}
        self._positions = plan.positions(self.rank)

    @property
    def positions(self) -> Ints:
        """The positions of this rank's tokens in the sequence, increasing."""
        return self._positions

    def shard(self, x: Tensor, dim: int = 1) -> Tensor:
        """This rank's tokens of ``x``, whose dimension ``dim`` is the whole sequence. Every rank passes the same ``x``."""
        return take(x, dim, self.positions, self.plan.n)

    def unshard(self, x: Tensor, dim: int = 1) -> Tensor:
        """The whole sequence from the tokens ``x`` of each rank, on every rank, without gradients.

        Raises:
            CallError: on every rank, if ``x`` of a rank does not hold its tokens, or requires a gradient.
        """
        tokens, error = len(self.positions), None
        if not isinstance(x, Tensor) or not -x.ndim <= dim < x.ndim or x.shape[dim] != tokens:
            shape = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            error = f"unshard: x is {shape}, but its dimension {dim} must be this rank's {tokens} tokens."
        elif torch.is_grad_enabled() and x.requires_grad:
            error = "unshard: x requires a gradient, which would be lost. Fix: x.detach()."
        rest = [] if error else [f"x {[*x.shape[: dim % x.ndim], *x.shape[dim % x.ndim + 1 :]]} {x.dtype}"]
        agree("unshard", error, rest, self.group)
        own = x.detach().movedim(dim, 0)
        most = int(self.plan.tokens.max())
        sent = own.new_zeros((most, *own.shape[1:]))
        sent[:tokens] = own
        parts = own.new_empty((self.plan.ranks * most, *own.shape[1:]))
        with guard("unshard"):
            collectives.all_gather(parts, sent, self.group)
        whole = own.new_empty((self.plan.n, *own.shape[1:]))
        for rank, part in enumerate(parts.unflatten(0, (self.plan.ranks, most))):
            positions = self.plan.positions(rank)
            whole[torch.from_numpy(positions).to(x.device)] = part[: len(positions)]
        return whole.movedim(0, dim)

    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Mask | str | None = None,
        *,
        scale: float | None = None,
        softcap: float | None = None,
        bias: Bias | None = None,
        sinks: Tensor | None = None,
        return_lse: bool = False,
        engine: str = "auto",
    ) -> Any:
        """:func:`lowtri.attention` of this rank's queries over the whole sequence.

        Args:
            q: (B, Hq, my tokens, D).  k: (B, Hkv, my tokens, D).  v: (B, Hkv, my tokens, Dv).
            mask: one of the plan's masks; it can be left out if there is only one.
            bias: a function of the positions of queries (my tokens, 1) and keys (1, Nk), int64 tensors, that returns what is added
                to the scores, broadcasting against (B, Hq, my tokens, Nk). If its result requires a gradient it is kept for the
                backward; else it is computed again.
            scale, softcap, sinks, engine: as in :func:`lowtri.attention`.
            return_lse: also return the log-sum-exp (B, Hq, my tokens).

        Returns:
            the output (B, Hq, my tokens, Dv), or a tuple of it and the log-sum-exp.

        Raises:
            CallError: on every rank, if a rank's tensors do not hold its tokens, or its mask is not one of the plan's.
            RankError: if the ranks' arguments differ, or a process of the group has ended.
        """
        given = q, k, v, mask, scale, softcap, bias, sinks, engine
        result: tuple[Tensor, Tensor] = torch.compiler.disable(self._attention)(*given)
        return result if return_lse else result[0]

    def _attention(
        self,
        q: Any,
        k: Any,
        v: Any,
        mask: Any,
        scale: float | None,
        softcap: float | None,
        bias: Bias | None,
        sinks: Any,
        engine: str,
    ) -> tuple[Tensor, Tensor]:
        device, q, k, v = cast_for_autocast(q, k, v) if isinstance(q, Tensor) else (None, q, k, v)
        options = {"scale": scale, "softcap": softcap, "engine": engine}
        index, error = 0, wrong_tensors("ContextParallel.attention", len(self.positions), q, k, v, bias, sinks)
        if error is None:
            try:
                index = self.plan.index(None if mask is None else as_mask(mask, "ContextParallel.attention: mask"))
            except LowtriError as wrong:
                error = str(wrong)
        facts = []
        if self.check and error is None:
            facts = describe_call(q, k, v, sinks, {**options, "bias": bias is not None, "mask": index})
        self.agree("ContextParallel.attention", error, facts)
        if index not in self._exchanges:
            self._exchanges[index] = exchange_of(self.plan, index, self.rank, self.group)
        overlap = self.overlap
        if overlap is None:
            overlap = q.dtype in (torch.float32, torch.float64)
        setting = Setting(
            self._exchanges[index],
            self.plan.masks[index],
            self.positions,
            bias,
            options,
            overlap,
            self.keep,
        )
        with without_autocast(device or autocast_device(q)):
            return attend(setting, q, k, v, sinks)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask | str, **options: Any) -> Any:
        """:meth:`attention` with the arguments of :func:`lowtri.attention`, for modules that take a function in its place.

        Raises:
            CallError: if the module asks for weights, or its positions are not this rank's.
        """
        return self.attention(q, k, v, mask, **module_options("ContextParallel.attend", options, self.positions))

    def agree(self, what: str, error: str | None, facts: Sequence[str] = ()) -> None:
        """Raise a CallError on every rank if a rank has an error, or they differ in ``facts``; without ``check`` on that rank only."""
        if self.check:
            agree(what, error, list(facts), self.group)
        elif error is not None:
            raise CallError(error)

    def share_error(self, what: str, error: BaseException | None) -> None:
        """Raise an error of this rank on the others, where they next agree, and nothing here; with None those of others are raised."""
        if error is None:
            self.agree(what, None)
        if error is None or not self.check or getattr(error, "on_every_rank", False):
            return
        text = str(error) if isinstance(error, CallError) else f"{type(error).__name__}: {error}"
        with suppress(LowtriError):  # what happened here is more to the point
            agree(what, text, [], self.group, self._timeout)

    def __repr__(self) -> str:
        return f"ContextParallel(rank {self.rank} of {self.plan.ranks}, {len(self.positions)} of {self.plan.n} tokens)"

"""ContextParallel: one rank's view of a sequence that is spread over the processes of a group.

The forward keeps q, k, v, the output and its log-sum-exp of this rank's own tokens. The backward fetches the keys and values of other
ranks again, and starts from the known output and log-sum-exp (:func:`lowtri.attention_backward`).

With ``overlap`` the own keys are attended while those of others arrive, and the two results are merged by their log-sum-exp; without it
all keys are joined in one tensor and attended in one call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from lowtri.dispatch.attend import attention, merge
from lowtri.dispatch.backward import attention_backward
from lowtri.dispatch.prepared import autocast_device, cast_for_autocast, without_autocast
from lowtri.errors import CallError, LowtriError
from lowtri.masks import Mask, as_mask
from lowtri.parallel import collectives
from lowtri.parallel.collectives import Exchange, agree, guard
from lowtri.parallel.shards import Ints, ShardPlan

Bias = Callable[[Tensor, Tensor], Tensor]


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

    Attributes:
        positions: of this rank's tokens in the sequence, increasing.

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
        self.plan = plan
        self.group = group
        self.keep = keep
        self.overlap = overlap
        self.check = check
        self.rank = dist.get_rank(group)
        if self.rank < 0 or dist.get_world_size(group) != plan.ranks:
            raise CallError(
                f"ContextParallel: the plan is for {plan.ranks} ranks, but the group has {dist.get_world_size(group)} processes"
                f"{', and this one is not among them' if self.rank < 0 else ''}.\n"
                "Fix: plan_shards(mask, n, dist.get_world_size(group))."
            )
        self._timeout = timeout
        if dist.get_backend(group) == "gloo":  # the only one whose barrier notices who is missing
            with guard("ContextParallel"):
                dist.monitored_barrier(group, timedelta(seconds=timeout), wait_all_ranks=True)
        what = [f"n {plan.n}", f"block {plan.block}", f"masks {plan.masks!r}", f"plan {plan.digest}"]
        agree("ContextParallel", None, what, group)
        self._exchanges: dict[int, Exchange] = {}
        self.positions = plan.positions(self.rank)

    def shard(self, x: Tensor, dim: int = 1) -> Tensor:
        """This rank's tokens of ``x``, whose dimension ``dim`` is the whole sequence; every process passes the same ``x``."""
        if not isinstance(x, Tensor) or not -x.ndim <= dim < x.ndim or x.shape[dim] != self.plan.n:
            raise CallError(
                f"shard: x is {_shape(x)}, but its dimension {dim} must be the {self.plan.n} tokens of the plan."
            )
        return x.index_select(dim, torch.from_numpy(self.positions).to(x.device))

    def unshard(self, x: Tensor, dim: int = 1) -> Tensor:
        """The whole sequence from the tokens ``x`` of each rank, on every rank, without gradients.

        Raises:
            CallError: on every rank, if ``x`` of a rank does not hold its tokens, or requires a gradient.
        """
        tokens = len(self.positions)
        error = None
        if not isinstance(x, Tensor) or not -x.ndim <= dim < x.ndim or x.shape[dim] != tokens:
            error = f"unshard: x is {_shape(x)}, but its dimension {dim} must be this rank's {tokens} tokens."
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

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask | str, **options: Any) -> Any:
        """:meth:`attention` with the arguments of :func:`lowtri.attention`, for modules that take a function in its place.

        Raises:
            CallError: if the module asks for weights or dropout, or its positions are not those of this rank's tokens.
        """
        for which in ("q_positions", "k_positions"):
            given = options.pop(which, None)
            if given is None or not np.array_equal(np.ravel(given), self.positions):
                raise CallError(
                    f"ContextParallel.attend: {which} are not the positions of this rank's tokens.\n"
                    "Fix: model(ids, positions=context.positions, attend=context.attend), without a cache."
                )
        if options.pop("return_weights", False) or options.pop("dropout", 0):
            raise CallError(
                "ContextParallel.attend: no rank holds a whole row of weights. Fix: neither weights nor dropout."
            )
        return self.attention(q, k, v, mask, **options)

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
        options = {"scale": scale, "softcap": softcap, "engine": engine}
        output, lse = torch.compiler.disable(self._attention)(q, k, v, mask, bias, sinks, options)
        return (output, lse) if return_lse else output

    def _attention(
        self, q: Any, k: Any, v: Any, mask: Any, bias: Bias | None, sinks: Any, options: dict[str, Any]
    ) -> tuple[Tensor, Tensor]:
        device = None
        if isinstance(q, Tensor):
            device, tensors = cast_for_autocast(q, k, v)
            q, k, v = tensors
        index = 0
        error = None
        facts: list[str] = []
        try:
            index = self._mask_index(q, k, v, mask, bias, sinks)
        except LowtriError as wrong:
            error = str(wrong)
        if self.check and error is None:  # everything that all ranks must have in common
            facts = [f"{name} {[*x.shape[:2], x.shape[3]]} {x.dtype}" for name, x in (("q", q), ("k", k), ("v", v))]
            records = any(x is not None and x.requires_grad for x in (q, k, v, sinks))
            facts += [f"sinks {None if sinks is None else tuple(sinks.shape)}"]
            facts += [f"gradients {records and torch.is_grad_enabled()}"]
            facts += [f"{name} {value}" for name, value in options.items()]
            facts += [f"bias {bias is not None}", f"mask {index}"]
        self.agree("ContextParallel.attention", error, facts)
        if index not in self._exchanges:
            self._exchanges[index] = Exchange(self.plan, index, self.rank, self.group)
        overlap = q.dtype in (torch.float32, torch.float64) if self.overlap is None else self.overlap
        call = _Call(self._exchanges[index], self.plan.masks[index], self.positions, bias, options, overlap, self.keep)
        biases: list[Tensor | None] = []
        with without_autocast(device or autocast_device(q)):
            if bias is not None and torch.is_grad_enabled():
                biases = [_bias_of_positions(bias, self.positions, keys, q.device) for keys in call.key_positions()]
                if not any(part is not None and part.requires_grad for part in biases):
                    biases = []  # computed again when it is needed, since it has a number for each pair
            output, lse = _Attend.apply(call, q, k, v, sinks, *biases)
        return output, lse

    def _mask_index(self, q: Any, k: Any, v: Any, mask: Any, bias: Any, sinks: Any) -> int:
        """The index of a call's mask in the plan.

        Raises:
            CallError: if the plan does not have it, or the tensors do not hold this rank's tokens.
        """
        function = "ContextParallel.attention"
        tokens = len(self.positions)
        for name, x in (("q", q), ("k", k), ("v", v)):
            if not isinstance(x, Tensor) or x.ndim != 4 or x.shape[2] != tokens:
                raise CallError(
                    f"{function}: {name} is {_shape(x)}, but this rank holds {tokens} tokens: (B, H, {tokens}, D).\n"
                    "Fix: context.shard(x)."
                )
        if bias is not None and (isinstance(bias, Tensor) or not callable(bias)):
            raise CallError(
                f"{function}: bias is {type(bias).__name__}, but no rank holds all pairs; it takes a function of "
                "positions.\nFix: bias=lambda q, k: table[(q - k).clamp(min=0)], for instance."
            )
        if sinks is not None and not isinstance(sinks, Tensor):
            raise CallError(f"{function}: sinks is {type(sinks).__name__}; it takes a tensor (Hq,).")
        return self.plan.index(None if mask is None else as_mask(mask, f"{function}: mask"))

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


class _Call(NamedTuple):
    """Everything about a call but its tensors."""

    exchange: Exchange
    mask: Mask
    positions: Ints  # of the queries
    bias: Bias | None
    options: dict[str, Any]  # scale, softcap, engine
    overlap: bool
    keep: bool  # keep what was fetched for the backward

    def key_positions(self) -> list[Ints]:
        """The positions of the keys of each part: this rank's own, then those of others; or all of them at once."""
        if not self.overlap:
            return [self.exchange.whole]
        return [self.positions, self.exchange.others] if len(self.exchange.others) else [self.positions]

    def parts(
        self,
        tensors: tuple[Tensor, Tensor, Tensor],
        fetched: Callable[[], Tensor],
        sinks: Tensor | None,
        biases: Sequence[Tensor | None],
    ) -> Iterator[tuple[Tensor, Tensor, dict[str, Any]]]:
        """Keys, values and the options of attention over each part of them, when it has arrived; forward and backward alike."""
        q, k, v = tensors
        for number, positions in enumerate(self.key_positions()):
            if not self.overlap:
                keys, values = _keys_and_values(self.exchange.join(_rows(k, v), fetched()), k.shape[3])
            elif number == 1:
                keys, values = _keys_and_values(fetched(), k.shape[3])
            else:
                keys, values = (k, v)
            bias = biases[number] if biases else _bias_of_positions(self.bias, self.positions, positions, k.device)
            options = {"q_positions": self.positions, "k_positions": positions, "bias": bias, **self.options}
            options["sinks"] = sinks if number == 0 else None  # they take part in the softmax once
            if not (q.numel() and keys.numel()):  # a backend given by name is for ranks with queries and keys
                options["engine"] = "auto"
            yield keys, values, options


def _bias_of_positions(bias: Bias | None, q_positions: Ints, k_positions: Ints, device: torch.device) -> Tensor | None:
    """The bias of some queries and keys; -1, the position of no token, counts as 0."""
    if bias is None:
        return None
    q, k = (torch.from_numpy(np.maximum(x, 0)).to(device) for x in (q_positions, k_positions))
    return bias(q[:, None], k[None, :])


class _Saved(NamedTuple):
    """What a forward keeps for the backward, besides biases and fetched keys and values."""

    q: Any
    k: Any
    v: Any
    sinks: Any
    output: Any
    lse: Any


class _Attend(torch.autograd.Function):
    """Output (B, Hq, my tokens, Dv) and log-sum-exp (B, Hq, my tokens)."""

    @staticmethod
    def forward(
        ctx: Any, call: _Call, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *biases: Tensor | None
    ) -> Any:
        fetched = call.exchange.fetch(_rows(k, v))
        results = [
            attention(q, keys, values, call.mask, return_lse=True, **options)
            for keys, values, options in call.parts((q, k, v), fetched, sinks, biases)
        ]
        output, lse = results[0] if len(results) == 1 else merge(*zip(*results, strict=True))
        ctx.set_materialize_grads(False)
        ctx.call = call
        ctx.biases = len(biases)
        kept = (fetched(),) if call.keep else ()
        ctx.save_for_backward(*_Saved(q, k, v, sinks, output, lse), *biases, *kept)
        return output, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_output: Tensor | None, d_lse: Tensor | None) -> Any:
        call: _Call = ctx.call
        of_call = len(_Saved._fields)
        tensors = ctx.saved_tensors  # read once: checkpointing lets each tensor be unpacked a single time
        saved = _Saved(*tensors[:of_call])
        rest = tensors[of_call:]
        biases = rest[: ctx.biases]
        kept = rest[ctx.biases :]
        q, k, v = saved[:3]
        exchange = call.exchange
        fetched = (lambda: kept[0]) if kept else exchange.fetch(_rows(k, v))
        d_output = torch.zeros_like(saved.output) if d_output is None else d_output
        known = (d_output, d_lse, saved.output, saved.lse)
        gradients = [
            attention_backward(*known, q, keys, values, call.mask, wide=True, **options)
            for keys, values, options in call.parts((q, k, v), fetched, saved.sinks, biases)
        ]
        d_rows = [_rows(part.k, part.v) for part in gradients]
        if not call.overlap:
            d_rows = list(exchange.split(d_rows[0]))
        elif len(d_rows) == 1:  # this rank fetched nothing; others may return gradients to it
            d_rows.append(d_rows[0].new_empty((0, *d_rows[0].shape[1:])))
        d_own, d_fetched = d_rows
        returned = exchange.give_back(d_fetched)
        d_q = sum((part.q for part in gradients[1:]), gradients[0].q).to(q.dtype)
        d_biases = [
            None if part.bias is None else part.bias.to(bias.dtype)
            for part, bias in zip(gradients, biases, strict=False)
        ]
        d_k, d_v = _keys_and_values(exchange.add(d_own, returned()), k.shape[3])
        d_sinks = gradients[0].sinks
        if d_sinks is not None:
            d_sinks = d_sinks.to(saved.sinks.dtype)
        return None, d_q, d_k.to(k.dtype), d_v.to(v.dtype), d_sinks, *d_biases


def _rows(k: Tensor, v: Tensor) -> Tensor:
    return torch.cat([k, v], -1).permute(2, 0, 1, 3)  # (tokens, B, Hkv, D + Dv)


def _keys_and_values(rows: Tensor, size: int) -> tuple[Tensor, Tensor]:
    columns = rows.permute(1, 2, 0, 3)  # (B, Hkv, tokens, D + Dv)
    return columns[..., :size], columns[..., size:]


def _shape(x: Any) -> Any:
    return tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__

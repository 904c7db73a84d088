"""SequentialShards: the shards of a plan one after the other in one process, so that a long row needs the memory of one shard.

A training step has two passes. The first goes through the shards in order, without gradients, and keeps the keys and values that later
shards see. The second goes back from the last shard to the first: each is computed again with gradients, and its backward runs at
once. Gradients of earlier keys are kept until their shard comes, which adds them to its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lowtri.dispatch.attend import attention
from lowtri.errors import CallError
from lowtri.masks import Mask
from lowtri.parallel.attend import Bias, ShardedSequence, bias_of_positions
from lowtri.parallel.shards import Ints, ShardPlan


class SequentialShards(ShardedSequence):
    """The shards of a plan one after the other in one process: a training step over a long row in the memory of one shard.

    >>> import torch
    >>> from lowtri.nn import Decoder, DecoderConfig
    >>> from lowtri.parallel import SequentialShards, plan_shards
    >>> config = DecoderConfig(vocab_size=50, hidden_size=32, num_hidden_layers=2, mask="causal & window(100)")
    >>> model, ids = Decoder(config), torch.randint(50, (1, 1025))
    >>> inputs, targets = ids[:, :-1], ids[:, 1:]
    >>> shards = SequentialShards(plan_shards(model.mask, 1024, 4, way="contiguous"))
    >>> def loss():  # of one shard, over the number of targets in the whole row
    ...     logits = model(shards.shard(inputs), positions=shards.positions, attend=shards.attend)
    ...     mine = shards.shard(targets)
    ...     return torch.nn.functional.cross_entropy(logits.flatten(0, 1), mine.flatten(), reduction="sum") / 1024
    >>> total = shards.backward(loss)  # the parameters have their gradients now
    >>> expected = torch.nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
    >>> torch.allclose(total, expected), torch.allclose(shards.evaluate(loss), expected)
    (True, True)

    The gradients are exact. Besides the activations of one shard, each layer keeps the keys and values that later shards see (under
    a window only the last ones of each shard), and the gradients of those whose shard has not come yet. As with gradient
    checkpointing, each forward runs twice.

    Args:
        plan: its ranks are the shards. No two of them may need each other's keys: ``way="contiguous"`` in :func:`plan_shards`, and
            a mask under which no query sees a later key.

    Raises:
        CallError: if shards need each other's keys.

    Source: recomputation, Chen et al. 2016 (gradient checkpointing), over the tokens of a row instead of the layers.
    """

    _variable = "shards"

    def __init__(self, plan: ShardPlan) -> None:
        self.plan = plan
        self._order = order_of_shards(plan)
        self._earlier = [EarlierKeys.of(plan, mask) for mask in range(len(plan.masks))]
        self._step: _Step | None = None
        self._positions = plan.positions(self._order[0])

    def evaluate(self, loss: Callable[[], Tensor]) -> Tensor:
        """The loss alone, without gradients: one pass through the shards, under ``torch.no_grad()``.

        Args:
            loss: as in :meth:`backward`; it is called once for each shard.

        Raises:
            CallError: if ``loss`` does not return a number, or shards make different calls of attention.
        """
        with self._stepping() as step, torch.no_grad():
            return torch.stack([_value(self._run(step, shard, loss)) for shard in self._order]).sum()

    def backward(
        self, loss: Callable[[], Tensor], *, no_sync: Callable[[], AbstractContextManager[object]] = nullcontext
    ) -> Tensor:
        """Compute a loss that is a sum over tokens, and add its gradients to ``.grad`` of the parameters.

        Args:
            loss: computes the loss of the current shard, with :meth:`shard`, :attr:`positions` and :meth:`attend`. It is called twice
                for each shard but the last, with the same random numbers (dropout). The first call runs under
                ``torch.no_grad()``, and its result is not used.
            no_sync: makes a context in which backwards do not average gradients over processes, for instance the ``no_sync`` of
                DistributedDataParallel: without it, every shard's backward averages them, with it only the last.

        Returns:
            the sum of the losses of all shards.

        Raises:
            CallError: if ``loss`` does not return a number with a gradient, or shards make different calls of attention.
        """
        with self._stepping() as step:
            states, losses = [], []
            with torch.no_grad(), no_sync():
                for shard in self._order[:-1]:
                    states.append(_random_state())
                    self._run(step, shard, loss)
            # Weights that autocast converted without gradients must not be used in the second pass.
            torch.clear_autocast_cache()
            step.keeps, end = False, None
            for shard in reversed(self._order):
                if end is not None:
                    _set_random_state(states.pop())
                with no_sync() if shard != self._order[0] else nullcontext():
                    value = _value(self._run(step, shard, loss))
                    outputs, d_outputs = zip((value, None), *step.seen_by_others, strict=True)
                    torch.autograd.backward(outputs, d_outputs)
                losses.append(value.detach())
                end = end or _random_state()
            _set_random_state(end or _random_state())
            return torch.stack(losses).sum()

    @contextmanager
    def _stepping(self) -> Iterator[_Step]:
        self._step = step = _Step()
        try:
            yield step
        finally:
            self._step = None
            self._positions = self.plan.positions(self._order[0])

    def _run(self, step: _Step, shard: int, loss: Callable[[], Tensor]) -> Any:
        self._positions = self.plan.positions(shard)
        step.shard, step.calls, step.running, step.seen_by_others = shard, 0, True, []
        value = loss()
        step.running = False
        if step.calls != len(step.layers):
            raise step.error(f"{step.calls}, but an earlier one {len(step.layers)}")
        step.complete = True
        return value

    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Mask | str | None = None,
        *,
        bias: Bias | None = None,
        sinks: Tensor | None = None,
        **options: Any,
    ) -> Any:
        """:func:`lowtri.attention` of the current shard's queries over the whole sequence, in the function given to :meth:`backward`
        or :meth:`evaluate`.

        Args:
            q: (B, Hq, N, D), the current shard's tokens.  k: (B, Hkv, N, D).  v: (B, Hkv, N, Dv).
            mask: one of the plan's masks; it can be left out if there is only one.
            bias: a function of the positions of queries (N, 1) and keys (1, Nk), as in :meth:`ContextParallel.attention`.
            sinks: (Hq,).  options: scale, softcap, return_lse and engine, as in :func:`lowtri.attention`.
        """
        # The state of a step changes from call to call: torch.compile would compile again for each shard and layer.
        run = torch.compiler.disable(self._attention) if torch.compiler.is_compiling() else self._attention
        return run(q, k, v, mask, bias, sinks, options)

    def _attention(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Any, bias: Bias | None, sinks: Any, options: dict[str, Any]
    ) -> Any:
        step = self._step
        if step is None or not step.running:
            raise CallError(
                "SequentialShards.attention: it works only in the function that backward() or evaluate() calls, and not in "
                "gradient checkpointing.\nFix: shards.backward(loss); more shards instead of gradient checkpointing."
            )
        index = self._mask_index(q, k, v, mask, bias, sinks)
        earlier = self._earlier[index]
        keys, values = step.next_layer(earlier).join(step, k, v)
        k_positions = np.concatenate([earlier.positions[step.shard], self.positions])
        added = bias_of_positions(bias, self.positions, k_positions, q.device)
        where: dict[str, Any] = {"q_positions": self.positions, "k_positions": k_positions}
        return attention(q, keys, values, self.plan.masks[index], bias=added, sinks=sinks, **where, **options)

    def __repr__(self) -> str:
        return f"SequentialShards({len(self._order)} shards of {self.plan.n} tokens)"


def _random_state() -> list[Tensor]:
    devices = [torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else []
    return [torch.get_rng_state(), *devices]


def _set_random_state(state: list[Tensor]) -> None:
    torch.set_rng_state(state[0])
    if len(state) > 1:
        torch.cuda.set_rng_state(state[1])


def _value(loss: Any) -> Tensor:
    """The loss of one shard, a tensor ()."""
    if isinstance(loss, Tensor) and loss.numel() == 1 and (loss.requires_grad or not torch.is_grad_enabled()):
        return loss.reshape(())
    got = f"{tuple(loss.shape)}, requires_grad={loss.requires_grad}" if isinstance(loss, Tensor) else type(loss)
    raise CallError(
        f"SequentialShards: loss() returned {got}, but the loss of a shard is one number, for backward() with a gradient.\n"
        "Fix: a sum over tokens, for backward() without torch.no_grad()."
    )


def order_of_shards(plan: ShardPlan) -> list[int]:
    """The shards that hold tokens, each after those whose keys it needs; of several that could come next the first.

    Raises:
        CallError: if some need each other's keys.
    """
    needs: dict[int, set[int]] = {shard: set() for shard in np.unique(plan.owner).tolist()}
    for runs in plan.needed:
        for shard, needed in needs.items():
            needed.update(set(plan.owner[runs.blocks(shard)].tolist()) - {shard})
    order: list[int] = []
    while needs:
        ready = next((shard for shard, needed in needs.items() if needed.isdisjoint(needs)), None)
        if ready is None:
            names = ", ".join(map(str, list(needs)[:4])) + (" and more" if len(needs) > 4 else "")
            raise CallError(
                f"SequentialShards: the shards {names} of {plan.way!r} need each other's keys, so none of them can come first.\n"
                'Fix: plan_shards(..., way="contiguous"), and a mask under which no query sees a later key.'
            )
        order.append(ready)
        del needs[ready]
    return order


class EarlierKeys(NamedTuple):
    """The keys that shards take from each other under one mask."""

    kept: list[Tensor]  # for each shard the indices of its tokens whose keys other shards see
    sources: list[list[tuple[int, Tensor]]]  # for each shard the others, and indices among what they keep
    positions: list[Ints]  # of the keys from these sources

    @classmethod
    def of(cls, plan: ShardPlan, mask: int) -> EarlierKeys:
        taken = [plan.fetched(shard, mask) for shard in range(plan.ranks)]
        seen = np.unique(np.concatenate(taken))
        kept = [seen[plan.owner[seen // plan.block] == shard] for shard in range(plan.ranks)]
        sources: list[list[tuple[int, Tensor]]] = []
        for positions in taken:
            owner = plan.owner[positions // plan.block]
            parts = [(source, positions[owner == source]) for source in np.unique(owner).tolist()]
            sources.append([(source, torch.from_numpy(np.searchsorted(kept[source], part))) for source, part in parts])
        indices = [np.searchsorted(plan.positions(shard), positions) for shard, positions in enumerate(kept)]
        return cls([torch.from_numpy(index) for index in indices], sources, taken)


@dataclass
class _Step:
    """A training step: the shard that is computed, and the layers, which are numbered by their calls of attention."""

    layers: list[_Layer] = field(default_factory=list)
    keeps: bool = True  # in the first pass
    shard: int = 0
    calls: int = 0
    running: bool = False
    complete: bool = False  # the first shard has made all its calls
    seen_by_others: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # keys and values, and their gradients

    def next_layer(self, earlier: EarlierKeys) -> _Layer:
        if not self.complete:
            self.layers.append(_Layer(earlier))
        elif self.calls == len(self.layers):
            raise self.error(f"more than {len(self.layers)}, the number of an earlier one")
        layer = self.layers[self.calls]
        self.calls += 1
        if layer.earlier is not earlier:
            raise self.error(f"call {self.calls} with another mask than an earlier one")
        return layer

    def error(self, what: str) -> CallError:
        return CallError(
            f"SequentialShards: the calls of attention in shard {self.shard} are {what}.\n"
            "Fix: a function that makes the same calls for each shard."
        )


class _Layer:
    """One call of attention of each shard, with the keys and values that shards take from earlier ones."""

    def __init__(self, earlier: EarlierKeys) -> None:
        self.earlier = earlier
        self.kept: dict[int, list[Tensor]] = {}  # of each shard the keys (B, Hkv, tokens, D) and values that others see
        self.d_kept: dict[int, list[Tensor]] = {}  # their gradients so far, at least in float32

    def join(self, step: _Step, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """All keys and values that the current shard sees, those of earlier shards first."""
        shard, kept = step.shard, self.earlier.kept[step.shard]
        if not step.keeps:
            self.kept.pop(shard, None)  # later shards are done
            gradients = zip((k, v), self.d_kept.pop(shard, ()), strict=False)
            step.seen_by_others += [(_select(x, kept), d_x.to(x.dtype)) for x, d_x in gradients if x.requires_grad]
        elif len(kept):
            self.kept[shard] = [_select(x.detach(), kept) for x in (k, v)]
        taken: list[list[Tensor]] = [[], []]
        for source, index in self.earlier.sources[shard]:
            for number, x in enumerate(self.kept[source]):
                part = _select(x, index)
                if torch.is_grad_enabled():
                    part.requires_grad_().register_hook(partial(self._add, source, number, index))
                taken[number].append(part)
        return (torch.cat([*taken[0], k], 2), torch.cat([*taken[1], v], 2)) if taken[0] else (k, v)

    def _add(self, source: int, number: int, index: Tensor, gradient: Tensor) -> None:
        """Add the gradient of keys (0) or values (1) that the current shard took from another one."""
        if source not in self.d_kept:
            types = [torch.promote_types(x.dtype, torch.float32) for x in self.kept[source]]
            self.d_kept[source] = [torch.zeros_like(x, dtype=t) for x, t in zip(self.kept[source], types, strict=True)]
        total = self.d_kept[source][number]
        total.index_add_(2, index.to(total.device), gradient.to(total.dtype))


def _select(x: Tensor, index: Tensor) -> Tensor:
    """Tokens of ``x`` (B, H, N, D), as a tensor of their own."""
    return x.index_select(2, index.to(x.device))

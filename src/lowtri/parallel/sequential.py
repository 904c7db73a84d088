"""SequentialShards: the shards of a plan one after the other in one process, so that a long row needs the memory of one shard.

A training step has two passes. The first goes through the shards in order, without gradients, and keeps the keys and values that later
shards see. The second goes back from the last shard to the first: each is computed again with gradients, and its backward runs at
once. Gradients of earlier keys are kept until their shard comes, which adds them to its own.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lowtri.dispatch.attend import attention
from lowtri.errors import CallError
from lowtri.masks import Mask, as_mask
from lowtri.parallel.attend import Bias, bias_of_positions, module_options, take, wrong_tensors
from lowtri.parallel.runs import Ints, first_tokens
from lowtri.parallel.shards import ShardPlan


class SequentialShards:
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

    def __init__(self, plan: ShardPlan) -> None:
        self.plan = plan
        self._order = order_of_shards(plan)
        self._earlier = [EarlierKeys(plan, mask) for mask in range(len(plan.masks))]
        self._step: SequentialStep | None = None
        self._positions = plan.positions(self._order[0])

    @property
    def positions(self) -> Ints:
        """The positions of the current shard's tokens, increasing."""
        return self._positions

    def shard(self, x: Tensor, dim: int = 1) -> Tensor:
        """The current shard's tokens of ``x``, whose dimension ``dim`` is the whole sequence."""
        return take(x, dim, self.positions, self.plan.n)

    def evaluate(self, loss: Callable[[], Tensor]) -> Tensor:
        """The loss alone, without gradients: one pass through the shards, under ``torch.no_grad()``.

        Args:
            loss: as in :meth:`backward`; it is called once for each shard.

        Raises:
            CallError: if ``loss`` does not return a number, or shards make different calls of attention.
        """
        self._step = step = SequentialStep()
        try:
            with torch.no_grad():
                return torch.stack([step.value(self._run(step, shard, loss)) for shard in self._order]).sum()
        finally:
            self._end_step()

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
        self._step = step = SequentialStep()
        try:
            return self._two_passes(step, loss, no_sync)
        finally:
            self._end_step()

    def _end_step(self) -> None:
        self._step = None
        self._positions = self.plan.positions(self._order[0])

    def _two_passes(self, step: SequentialStep, loss: Callable[[], Tensor], no_sync: Callable[[], Any]) -> Tensor:
        states = []
        with torch.no_grad(), no_sync():
            for shard in self._order[:-1]:
                states.append(_random_state())
                self._run(step, shard, loss)
            states.append(_random_state())
        # Weights that autocast converted without gradients must not be used in the second pass.
        torch.clear_autocast_cache()
        step.keeps = False
        losses = []
        end: list[Tensor] = []
        for shard in reversed(self._order):
            _set_random_state(states.pop())
            with no_sync() if shard != self._order[0] else nullcontext():
                losses.append(step.backward(self._run(step, shard, loss), shard))
            end = end or _random_state()
        _set_random_state(end)
        return torch.stack(losses).sum()

    def _run(self, step: SequentialStep, shard: int, loss: Callable[[], Tensor]) -> Any:
        self._positions = self.plan.positions(shard)
        step.begin(shard)
        value = loss()
        step.end()
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
        function, step = "SequentialShards.attention", self._step
        if step is None or not step.running:
            raise CallError(
                f"{function}: it works only in the function that backward() or evaluate() calls, and not in gradient checkpointing.\n"
                "Fix: shards.backward(loss); more shards instead of gradient checkpointing."
            )
        error = wrong_tensors(function, len(self.positions), q, k, v, bias, sinks)
        if error is not None:
            raise CallError(error)
        index = self.plan.index(None if mask is None else as_mask(mask, f"{function}: mask"))
        layer = step.next_layer(self._earlier[index])
        keys, values, positions = layer.join(step, k, v)
        k_positions = np.concatenate([*positions, self.positions])
        added = bias_of_positions(bias, self.positions, k_positions, q.device)
        where: dict[str, Any] = {"q_positions": self.positions, "k_positions": k_positions}
        return attention(q, keys, values, self.plan.masks[index], bias=added, sinks=sinks, **where, **options)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask | str, **options: Any) -> Any:
        """:meth:`attention` with the arguments of :func:`lowtri.attention`, for modules that take a function in its place.

        Raises:
            CallError: if the module asks for weights or dropout, or its positions are not those of the current shard.
        """
        return self.attention(q, k, v, mask, **module_options("SequentialShards.attend", options, self.positions))

    def __repr__(self) -> str:
        return f"SequentialShards({len(self._order)} shards of {self.plan.n} tokens)"


def _random_state() -> list[Tensor]:
    devices = [torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else []
    return [torch.get_rng_state(), *devices]


def _set_random_state(state: list[Tensor]) -> None:
    torch.set_rng_state(state[0])
    if len(state) > 1:
        torch.cuda.set_rng_state(state[1])


class Source(NamedTuple):
    """Keys that a shard takes from another one."""

    shard: int
    indices: Ints  # (Nk,), among those that the shard keeps for others
    positions: Ints  # (Nk,)


class EarlierKeys:
    """The keys that shards take from each other under one mask.

    Attributes:
        kept: for each shard the indices of its tokens whose keys other shards see.
    """

    def __init__(self, plan: ShardPlan, mask: int) -> None:
        self.plan, self.mask = plan, mask
        self._owner = np.repeat(plan.owner, np.diff(first_tokens(plan.n, plan.block)))  # (n,)
        seen = np.zeros(plan.n, np.bool_)
        for shard in range(plan.ranks):
            seen[self._others(shard)] = True
        positions = np.flatnonzero(seen)
        by_shard = np.argsort(self._owner[positions], kind="stable")
        counts = np.bincount(self._owner[positions], minlength=plan.ranks)
        self._kept = np.split(positions[by_shard], np.cumsum(counts)[:-1])  # positions
        self.kept = [np.searchsorted(plan.positions(shard), kept) for shard, kept in enumerate(self._kept)]

    def sources(self, shard: int) -> list[Source]:
        """The keys that a shard takes from each other shard."""
        others = self._others(shard)
        owner = self._owner[others]
        parts = ((source, others[owner == source]) for source in np.unique(owner).tolist())
        return [Source(source, np.searchsorted(self._kept[source], part), part) for source, part in parts]

    def _others(self, shard: int) -> Ints:
        positions = self.plan.key_positions(shard, self.mask)
        return positions[self._owner[positions] != shard]


def order_of_shards(plan: ShardPlan) -> list[int]:
    """The shards that hold tokens, each after those whose keys it needs.

    Raises:
        CallError: if some need each other's keys.
    """
    needs: dict[int, set[int]] = {shard: set() for shard in np.unique(plan.owner).tolist()}
    for runs in plan.needed:
        for shard, needed in needs.items():
            needed.update(np.unique(plan.owner[runs.blocks(shard)]).tolist())
    order: list[int] = []
    while needs:
        done = set(order)
        ready = next((shard for shard, needed in needs.items() if needed <= done | {shard}), None)
        if ready is None:
            names = ", ".join(map(str, list(needs)[:4])) + (" and more" if len(needs) > 4 else "")
            raise CallError(
                f"SequentialShards: the shards {names} of {plan.way!r} need each other's keys, so none of them can come first.\n"
                'Fix: plan_shards(..., way="contiguous"), and a mask under which no query sees a later key.'
            )
        order.append(ready)
        del needs[ready]
    return order


class SequentialStep:
    """A training step: the shard that is computed, and the layers, which are numbered by their calls of attention."""

    def __init__(self) -> None:
        self.layers: list[Layer] = []
        self.keeps, self.running = True, False
        self.shard = self._calls = 0
        self._complete = False  # the first shard has made all its calls

    def begin(self, shard: int) -> None:
        self.shard, self._calls, self.running = shard, 0, True

    def end(self) -> None:
        self.running = False
        if self._calls != len(self.layers):
            raise self._error(f"{self._calls}, but an earlier one {len(self.layers)}")
        self._complete = True

    def next_layer(self, earlier: EarlierKeys) -> Layer:
        if not self._complete:
            self.layers.append(Layer(earlier))
        elif self._calls == len(self.layers):
            raise self._error(f"more than {len(self.layers)}, the number of an earlier one")
        layer = self.layers[self._calls]
        self._calls += 1
        if layer.keys is not earlier:
            raise self._error(f"call {self._calls} with another mask than an earlier one")
        return layer

    def value(self, loss: Any) -> Tensor:
        """The loss of one shard, a tensor ()."""
        if isinstance(loss, Tensor) and loss.numel() == 1 and (loss.requires_grad or not torch.is_grad_enabled()):
            return loss.reshape(())
        got = f"{tuple(loss.shape)}, requires_grad={loss.requires_grad}" if isinstance(loss, Tensor) else type(loss)
        raise CallError(
            f"SequentialShards: loss() returned {got}, but the loss of a shard is one number, for backward() with a gradient.\n"
            "Fix: a sum over tokens, for backward() without torch.no_grad()."
        )

    def backward(self, loss: Any, shard: int) -> Tensor:
        """The backward of one shard, and its loss without the graph."""
        outputs: list[Tensor] = [self.value(loss)]
        d_outputs: list[Tensor | None] = [None]
        for layer in self.layers:
            for x, d_x in layer.gradients_of_others(shard):
                outputs.append(x)
                d_outputs.append(d_x)
        torch.autograd.backward(outputs, d_outputs)
        for layer in self.layers:
            layer.add_gradients()
        return outputs[0].detach()

    def _error(self, what: str) -> CallError:
        return CallError(
            f"SequentialShards: the calls of attention in shard {self.shard} are {what}.\n"
            "Fix: a function that makes the same calls for each shard."
        )


class Layer:
    """One call of attention of each shard, with the keys and values that shards take from earlier ones."""

    def __init__(self, keys: EarlierKeys) -> None:
        self.keys = keys
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}  # of each shard what others see: (B, Hkv, tokens, D or Dv)
        self._d_kept: dict[int, tuple[Tensor, Tensor]] = {}  # their gradients so far, at least in float32
        self._own: tuple[Tensor, ...] = ()  # what later shards saw of the current one, in its graph
        self._taken: list[tuple[Source, Tensor, Tensor]] = []

    def join(self, step: SequentialStep, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, list[Ints]]:
        """All keys and values that the current shard sees, and the positions of those before its own."""
        index = self.keys.kept[step.shard]
        if step.keeps:
            if len(index):
                self._kept[step.shard] = _select(k.detach(), index), _select(v.detach(), index)
        else:
            self._kept.pop(step.shard, None)  # later shards are done
            self._own = (_select(k, index), _select(v, index)) if step.shard in self._d_kept else ()
        sources, taken = self.keys.sources(step.shard), []
        for one in sources:
            keys, values = (_select(x, one.indices) for x in self._kept[one.shard])
            taken.append((one, keys, values))
        if torch.is_grad_enabled():
            self._taken = [(one, keys.requires_grad_(), values.requires_grad_()) for one, keys, values in taken]
        if taken:
            k = torch.cat([*(keys for _, keys, _ in taken), k], 2)  # (B, Hkv, Nk, D)
            v = torch.cat([*(values for _, _, values in taken), v], 2)  # (B, Hkv, Nk, Dv)
        return k, v, [one.positions for one in sources]

    def gradients_of_others(self, shard: int) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of a shard that later ones saw, and their gradients from there."""
        pairs = zip(self._own, self._d_kept.pop(shard, ()), strict=False)
        self._own = ()
        return [(x, d_x.to(x.dtype)) for x, d_x in pairs if x.requires_grad]

    def add_gradients(self) -> None:
        """Add the gradients that the current shard has for keys and values of earlier ones."""
        for source, *taken in self._taken:
            if source.shard not in self._d_kept:
                self._d_kept[source.shard] = tuple(_zeros(x) for x in self._kept[source.shard])  # type: ignore[assignment]
            index = torch.from_numpy(source.indices).to(taken[0].device)
            for total, x in zip(self._d_kept[source.shard], taken, strict=True):
                if x.grad is not None:
                    total.index_add_(2, index, x.grad.to(total.dtype))
        self._taken = []


def _select(x: Tensor, index: Ints) -> Tensor:
    """Tokens of ``x`` (B, H, N, D), as a tensor of their own."""
    return x.index_select(2, torch.from_numpy(index).to(x.device))


def _zeros(x: Tensor) -> Tensor:
    return torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32))

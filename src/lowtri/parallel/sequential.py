"""SequentialShards: the shards of a plan one after the other in one process, so that a long row needs the memory of one shard.

A training step has two passes. The first goes through the shards in order, without gradients, and keeps the keys and values that later
shards see. The second goes back from the last shard to the first: each is computed again with gradients, and its backward runs at
once. Gradients of earlier keys are kept until their shard comes, which adds them to its own.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lowtri.dispatch.attend import attention
from lowtri.errors import CallError
from lowtri.masks import Mask, as_mask
from lowtri.parallel.arguments import Bias, bias_of_positions, module_options, take, wrong_tensors
from lowtri.parallel.earlier import EarlierKeys, order_of_shards
from lowtri.parallel.runs import Ints
from lowtri.parallel.sequential_step import SequentialStep
from lowtri.parallel.shards import ShardPlan

__all__ = ["SequentialShards"]


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
        who, step = "SequentialShards.attention", self._step
        if step is None or not step.running:
            raise CallError(
                f"{who}: it works only in the function that backward() or evaluate() calls, and not in gradient checkpointing.\n"
                "Fix: shards.backward(loss); more shards instead of gradient checkpointing."
            )
        error = wrong_tensors(who, len(self.positions), q, k, v, bias, sinks)
        if error is not None:
            raise CallError(error)
        index = self.plan.index(None if mask is None else as_mask(mask, f"{who}: mask"))
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
